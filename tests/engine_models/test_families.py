"""Random small models of each family against transformers' logits: chunked at every place, paged, mixed; on torch and
on the CPU kernels."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.prepare import PreparedModel, kv_layout, prepare
from pillion.config import ModelFlags
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.oracle import Oracle, first_difference
from tests.support.tiny_model import save_model
from tests.support.torch_model import Driver, perturb_vectors

torch.set_num_threads(1)

# Logits are of the order of 10, so this is a few units in the last places of fp32 after some layers of sums.
TOLERANCE = 1e-4
PROMPT_TOKENS = 70

THETA = {"rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    **THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", **THETA, "factor": 4.0, "original_max_position_embeddings": 32}
NTK = {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", **THETA, "factor": 4.0}}
SHORT, LONG = [1.0, 1.0, 1.0, 1.1, 1.2, 1.3], [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]
PHI3 = {"model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 2}
PHI3_SCALED = {
    **PHI3,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
    "rope_parameters": {"rope_type": "longrope", **THETA, "short_factor": SHORT, "long_factor": LONG},
}
FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0]
ONE_SET = {"rope_type": "longrope", **THETA, "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 3}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}

# ``serve``: --max-model-len, where the rotary embedding depends on it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {},
    "llama-mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama-mqa-biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama-odd-hidden": {"hidden_size": 40},
    "llama-wide-heads": {"head_dim": 32, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 100_000.0}},
    "llama-llama3-rope": {"rope_parameters": LLAMA3},
    "llama-linear-rope": {"rope_parameters": {"rope_type": "linear", **THETA, "factor": 2.0}},
    "llama-dynamic-rope-within": {**NTK, "max_position_embeddings": 100, "serve": 100},
    "llama-dynamic-rope-beyond": {**NTK, "serve": PROMPT_TOKENS},
    "llama-yarn-rope": {"rope_parameters": YARN},
    "llama-longrope": {"rope_parameters": {**ONE_SET, "original_max_position_embeddings": 1024}},
    "smollm3-nope": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 2},
    "smollm3-window": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 20,
        "pad_token_id": 2,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 24, "tie_word_embeddings": False},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2-bias": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", **QWEN_WINDOW},
    "qwen3-qk-norm": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-window": {"model_type": "qwen3", **QWEN_WINDOW, "attention_bias": True},
    "phi3": {**PHI3, "sliding_window": 24},
    "phi3-partial-rope": {**PHI3, "partial_rotary_factor": 0.5},
    "phi3-longrope-short": {**PHI3_SCALED, "original_max_position_embeddings": 100, "serve": 100},
    "phi3-longrope-long": {**PHI3_SCALED, "serve": PROMPT_TOKENS},
    "gemma2": {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma2-no-caps": {
        "model_type": "gemma2",
        **GEMMA,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": GEMMA3_ROPE,
    },
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "granite": {"model_type": "granite", **MULTIPLIERS, "attention_bias": True},
    "mixtral": MIXTRAL,
    "mixtral-window-stacked": {**MIXTRAL, "sliding_window": 24, "stacked_experts": True},
    "qwen3-moe": {**QWEN3_MOE, "norm_topk_prob": True},
    "qwen3-moe-some-dense": {
        **QWEN3_MOE,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "stacked_experts": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    prepared: PreparedModel
    model: Any
    kernels: str = "torch"

    @property
    def block_sizes(self) -> tuple[int, int]:
        """The kernels have 16 lanes, and blocks of whole vectors."""
        return (4, 16) if self.kernels == "torch" else (16, 32)

    def driver(self, block_size: int = 16, num_slots: int = 64) -> Driver:
        if self.kernels == "torch":
            return Driver(self.prepared, block_size, num_slots)
        backend = cpu_backend(self.prepared, block_size, threads=2, checked=block_size == 32)
        return CpuDriver(self.prepared, block_size, num_slots, backend=backend)

    @torch.inference_mode()
    def logits(self, text: list[int]) -> torch.Tensor:
        """Of each token of a text; it is filled up, because some rotary embeddings go by the length of the text."""
        filled = text + [3] * (PROMPT_TOKENS - len(text))
        return self.model(torch.tensor([filled])).logits[0, : len(text)].float()


def make(folder: pathlib.Path, overrides: dict[str, Any]) -> tuple[pathlib.Path, ModelFlags]:
    shape = dict(overrides)
    serve = shape.pop("serve", 0)
    perturb_vectors(save_model(folder, **shape))
    return folder, ModelFlags(model=str(folder), dtype="float32", max_model_len=serve)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILLION_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=FAMILIES, scope="module")
def on_torch(request, own_cache, tmp_path_factory):
    folder, flags = make(tmp_path_factory.mktemp("model"), FAMILIES[request.param])
    return Case(prepare(flags), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(params=["torch", pytest.param("cpu", marks=needs_kernels)])
def case(request, on_torch):
    return dataclasses.replace(on_torch, kernels=request.param)


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_split_point(case):
    text = tokens_of(PROMPT_TOKENS, 2)
    wanted = case.logits(text)
    assert wanted.std() > 0.5  # Flat logits would prove nothing.
    drivers = [case.driver(block_size, num_slots=1500) for block_size in case.block_sizes]
    for split in range(1, PROMPT_TOKENS):
        driver = drivers[split % 2]
        (number,) = driver.sequences.add()
        close(driver.run_all(number, text, [split]), wanted)


def test_many_chunks_and_single_tokens(case):
    text = tokens_of(PROMPT_TOKENS, 2)
    wanted = case.logits(text)
    small, large = case.block_sizes
    for block_size, chunks in ((small, [1] * 69), (large, [17, 16]), (small, [33, 1, 2]), (large, [])):
        driver = case.driver(block_size, num_slots=40)
        (number,) = driver.sequences.add()
        close(driver.run_all(number, text, chunks), wanted)


@pytest.mark.parametrize("smaller", [True, False])
def test_mixed_batches(case, smaller):
    texts = [tokens_of(count, seed) for seed, count in enumerate((70, 20, 33, 50))]
    wanted = [case.logits(text) for text in texts]
    driver = case.driver(case.block_sizes[0 if smaller else 1], num_slots=100)
    a, b, c, d = driver.sequences.add(4)
    one, two, three, four = texts
    driver.step((a, one[:40]), (b, two[:18]), sample=[])
    got = driver.step((b, two[18:19]), (a, one[40:69]), (c, three[:32]), (d, four[:1]))
    close(got, torch.stack([wanted[1][18], wanted[0][68], wanted[2][31], wanted[3][0]]))
    got = driver.step((a, one[69:]), (d, four[1:50]), (c, three[32:]), (b, two[19:]))
    close(got, torch.stack([wanted[0][69], wanted[3][49], wanted[2][32], wanted[1][19]]))


def test_greedy_continuation(case):
    """Against transformers' own cache, which rolls windows; models whose rotary embedding grows there have none."""
    rope = case.prepared.max_model_len
    if "rope-" in kv_layout(case.prepared, 16).version:
        pytest.skip(f"transformers changes frequencies below {rope} tokens")
    prompt = tokens_of(40, 5)
    got = case.driver(16, num_slots=40).greedy(prompt, 12)
    assert not first_difference(Oracle(case.model).greedy(prompt, 12), got, 1e-3)


def test_the_text_part_of_a_model_of_text_and_images(tmp_path):
    """Gemma 3 above 1B: the text model's config and tensors lie inside others, whose names changed once."""
    folder, flags = make(tmp_path / "text", FAMILIES["gemma3"])
    text = tokens_of(PROMPT_TOKENS, 2)
    driver = Driver(prepare(flags))
    wanted = driver.run_all(driver.sequences.add()[0], text, [])
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 5], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    for prefix, vision in (
        ("language_model.model.", "vision_tower.x"),
        ("model.language_model.", "model.vision_tower.x"),
    ):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file({**renamed, vision: torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
        prepared = prepare(flags)
        assert prepared.eos_token_ids == (1, 5)
        driver = Driver(prepared)
        assert torch.equal(driver.run_all(driver.sequences.add()[0], text, []), wanted)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize(
    "name", ["qwen3-qk-norm", "gemma2", "gemma3", "olmo2", "granite", "phi3-partial-rope", "mixtral", "qwen3-moe"]
)
def test_bfloat16_is_as_close_to_fp32_as_transformers_bfloat16(tmp_path, name, kernels):
    """Summed over several models where a rounding can choose another expert: each of them is lucky or not."""
    text, ours, theirs = tokens_of(PROMPT_TOKENS, 2), 0.0, 0.0
    for seed in range(4 if "num_experts_per_tok" in FAMILIES[name] else 1):
        folder, flags = make(tmp_path / str(seed), {**FAMILIES[name], "seed": seed})
        models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
        ]
        exact, rounded = (Case(None, model.eval()).logits(text) for model in models)
        driver = Case(prepare(dataclasses.replace(flags, dtype="bfloat16")), None, kernels).driver(16, num_slots=20)
        (number,) = driver.sequences.add()
        ours += float((driver.run_all(number, text, [32, 1]) - exact).abs().mean())
        theirs += float((rounded - exact).abs().mean())
    # Torch rounds where transformers does; the kernels keep float32 wherever nothing asks for less.
    assert ours < (1.25 if kernels == "torch" else 1.0) * theirs
