"""Random small models of each family against transformers' logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.prepare import prepare
from pillion.config import ModelFlags
from tests.support.tiny_model import save_model
from tests.support.torch_model import Driver, perturb_vectors

torch.set_num_threads(1)

# Logits are of the order of 10, so this is a few units in the last places of fp32 after two layers of sums.
TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1024}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {},
    "llama-mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama-mqa-biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"head_dim": 32, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 100_000.0}},
    "llama-llama3-rope": {"rope_parameters": LLAMA3},
    "llama-linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    "llama-yarn-rope": {"rope_parameters": YARN},
    "llama-longrope": {"rope_parameters": {**LONGROPE, "short_factor": FACTORS, "long_factor": FACTORS}},
    "mistral-window": {"model_type": "mistral", "sliding_window": 24, "tie_word_embeddings": False},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2-bias": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3-qk-norm": {"model_type": "qwen3", "head_dim": 32},
}


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model", **FAMILIES[request.param])
    perturb_vectors(folder)
    return folder


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def oracle(folder, tokens, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return [model(torch.tensor([text])).logits[0].float() for text in tokens]


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("block_size", [16, 32])
def test_logits_are_those_of_transformers(folder, block_size):
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32"))
    text = tokens_of(70, 2)
    (wanted,) = oracle(folder, [text])
    assert wanted.std() > 0.5  # Flat logits would prove nothing.
    driver = Driver(prepared, block_size, num_slots=200)
    for chunks in ([], [1], [15], [16], [17, 16], [33, 1, 2], [69], [1] * 69):
        (number,) = driver.sequences.add()
        close(driver.run_all(number, text, chunks), wanted)


@pytest.mark.parametrize("block_size", [16, 32])
def test_mixed_batches(folder, block_size):
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32"))
    texts = [tokens_of(count, seed) for seed, count in enumerate((70, 20, 33, 50))]
    wanted = oracle(folder, texts)
    driver = Driver(prepared, block_size, num_slots=40)
    a, b, c, d = driver.sequences.add(4)
    one, two, three, four = texts
    driver.step((a, one[:40]), (b, two[:18]), sample=[])
    got = driver.step((b, two[18:19]), (a, one[40:69]), (c, three[:32]), (d, four[:1]))
    close(got, torch.stack([wanted[1][18], wanted[0][68], wanted[2][31], wanted[3][0]]))
    got = driver.step((a, one[69:]), (d, four[1:50]), (c, three[32:]), (b, two[19:]))
    close(got, torch.stack([wanted[0][69], wanted[3][49], wanted[2][32], wanted[1][19]]))


def test_bfloat16_is_as_close_to_fp32_as_transformers_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model", model_type="qwen3")
    perturb_vectors(folder)
    text = tokens_of(70, 2)
    (exact,), (theirs,) = oracle(folder, [text]), oracle(folder, [text], torch.bfloat16)
    driver = Driver(prepare(ModelFlags(model=str(folder), dtype="bfloat16")), 16, num_slots=20)
    (number,) = driver.sequences.add()
    ours = driver.run_all(number, text, [32, 1])
    assert (ours - exact).abs().mean() < 1.25 * (theirs - exact).abs().mean()
