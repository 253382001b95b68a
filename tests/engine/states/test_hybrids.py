"""Random small hybrid models against transformers, token by token and in chunks: all cuts, mixed steps, whole answers;
on torch and the CPU kernels."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import parse_config
from pillion.errors import ConfigError, Internal
from pillion.kernels.step import StateSlots
from tests.support.cpu_model import cpu_backend, needs_kernels
from tests.support.families import PROMPT_TOKENS, make_model, tokens_of
from tests.support.hybrids import ATTENTION, HYBRIDS, LINEAR, StateDriver, token_by_token
from tests.support.oracle import Oracle, first_difference

pytestmark = pytest.mark.usefixtures("own_cache")

# Logits are about 10; transformers rounds chunks of the delta rule differently from single tokens.
TOLERANCE = 1e-3
SOME = ("lfm2", "qwen3-next", "granite-hybrid")
SLOTS = 200


@dataclasses.dataclass(frozen=True)
class HybridCase:
    prepared: PreparedModel
    model: Any
    kernels: str

    def driver(self, block_size: int = 16, num_slots: int = 64, **options: Any) -> StateDriver:
        if self.kernels == "torch":
            return StateDriver(self.prepared, block_size, num_slots)
        # The CPU kernels have 16 lanes and need blocks of whole vectors.
        backend = cpu_backend(self.prepared, max(16, block_size), **{"threads": 2, **options})
        return StateDriver(self.prepared, max(16, block_size), num_slots, backend=backend)

    def logits(self, text: list[int]) -> torch.Tensor:
        """Return the logits of each token of a text, token by token."""
        return token_by_token(self.model, text)


@pytest.fixture(scope="module")
def made(own_cache, tmp_path_factory):
    """Make a family's model, once."""

    @functools.cache
    def make(name: str) -> tuple[ModelFlags, Any]:
        flags = make_model(tmp_path_factory.mktemp("model"), HYBRIDS[name])[1]
        return flags, AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()

    def case_of(name: str, kernels: str, dtype: str = "float32") -> HybridCase:
        flags, model = make(name)
        return HybridCase(prepare(dataclasses.replace(flags, dtype=dtype)), model, kernels)

    return case_of


def cases(names: Iterable[str]) -> list[Any]:
    """Return parameters: each model on torch and on the CPU kernels, whose compiler is slow."""
    on_kernels = (
        pytest.param(
            (name, "cpu"), id=f"{name}-cpu", marks=[needs_kernels, *([] if name in SOME else [pytest.mark.long])]
        )
        for name in names
    )
    return [*(pytest.param((name, "torch"), id=f"{name}-torch") for name in names), *on_kernels]


@pytest.fixture(params=cases(HYBRIDS))
def case(request, made):
    return made(*request.param)


@pytest.fixture(params=cases(SOME))
def some_case(request, made):
    return made(*request.param)


@pytest.fixture(params=cases((*SOME, "nemotron-h")))
def headed_case(request, made):
    """A model whose last layer has neither keys and values nor a state."""
    return made(*request.param)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_logits_of_a_text_in_chunks_and_token_by_token(case):
    text = tokens_of(PROMPT_TOKENS, 2)
    wanted = case.logits(text)
    assert wanted.std() > 0.5
    driver = case.driver(4, num_slots=600)
    for chunks in ([33, 1, 2], [1] * (PROMPT_TOKENS - 1), []):
        (number,) = driver.sequences.add()
        close(driver.run_all(number, text, chunks), wanted)
    with torch.inference_mode():
        close(case.model(torch.tensor([text])).logits[0].float(), wanted)


def test_mixed_batches_match_transformers(some_case):
    texts = [tokens_of(count, seed) for seed, count in enumerate((70, 20, 33, 50))]
    wanted = [some_case.logits(text) for text in texts]
    driver = some_case.driver(num_slots=200)
    a, b, c, d = driver.sequences.add(4)
    one, two, three, four = texts
    driver.step((a, one[:40]), (b, two[:18]), sample=[])
    got = driver.step((b, two[18:19]), (a, one[40:69]), (c, three[:32]), (d, four[:1]))
    close(got, torch.stack([wanted[1][18], wanted[0][68], wanted[2][31], wanted[3][0]]))
    got = driver.step((a, one[69:]), (d, four[1:50]), (c, three[32:]), (b, two[19:]))
    close(got, torch.stack([wanted[0][69], wanted[3][49], wanted[2][32], wanted[1][19]]))


def test_inputs_of_layers_for_a_head_match_transformers(headed_case):
    """An EAGLE-3 head reads them, for all rows of a step, sampled or not."""
    case = headed_case
    plain, keeping = case.driver(num_slots=60), case.driver(num_slots=60)
    layers = [*range(case.model.config.num_hidden_layers)][::-1]
    keeping.backend.set_aux_hidden_state_layers(layers)
    text, (number,), kept = tokens_of(40, 2), plain.sequences.add(), []
    assert keeping.sequences.add() == [number]
    for part, sample in ((text[:25], []), (text[25:39], [3, 13]), (text[39:], [0])):
        assert torch.equal(keeping.step((number, part), sample=sample), plain.step((number, part), sample=sample))
        kept.append(torch.from_numpy(keeping.backend._read_states(len(part)).copy()))
    with torch.inference_mode():
        hidden = case.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    close(torch.cat(kept), torch.cat([hidden[layer][0] for layer in layers], -1))
    keeping.backend.close()
    plain.backend.close()


def test_greedy_continuations_match_transformers(some_case):
    prompt = tokens_of(40, 5)
    got = some_case.driver(num_slots=60).greedy(prompt, 12)
    assert not first_difference(Oracle(some_case.model).greedy(prompt, 12), got, 1e-3)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("lfm2-biases", "bfloat16"),
        ("qwen3-next", "float32"),
        ("falcon-h1-normed", "bfloat16"),
        pytest.param("lfm2-biases", "float32", marks=pytest.mark.long),
        pytest.param("qwen3-next", "bfloat16", marks=pytest.mark.long),
        pytest.param("falcon-h1-normed", "float32", marks=pytest.mark.long),
        *(
            pytest.param(name, dtype, marks=pytest.mark.long)
            for name in ("kimi-linear", "jamba")
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_a_text_has_the_same_bits_however_it_is_cut(made, name, dtype):
    """Logits and states, alone and beside others, in every chunk and thread pool, and in checked mode."""
    case, text = made(name, "cpu", dtype), tokens_of(PROMPT_TOKENS, 2)
    alone = case.driver(num_slots=400, threads=1)
    (number,) = alone.sequences.add()
    wanted = alone.run_all(number, text, [])
    for threads, checked, chunks in ((2, False, [1] * 20 + [16]), (3, True, [33, 2, 1])):
        driver = case.driver(num_slots=800, threads=threads, checked=checked)
        mine, *others = driver.sequences.add(4)
        driver.check_among_others(mine, text, chunks, wanted, others)
        assert driver.state(mine) == alone.state(number)
        driver.backend.check_integrity()
        driver.backend.close()


@needs_kernels
@pytest.mark.parametrize(
    "name",
    [
        "lfm2-biases",
        "falcon-h1-normed",
        pytest.param("qwen3-next", marks=pytest.mark.long),
        pytest.param("kimi-linear", marks=pytest.mark.long),
        pytest.param("jamba", marks=pytest.mark.long),
    ],
)
def test_bfloat16_logits_of_hybrids_are_close(made, name):
    case, text = made(name, "cpu", "bfloat16"), tokens_of(PROMPT_TOKENS, 2)
    wanted = case.logits(text)
    driver = case.driver(num_slots=400)
    found = driver.run_all(driver.sequences.add()[0], text, [33])
    assert (found - wanted).abs().mean() < 0.05 * wanted.std()


@needs_kernels
@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("qwen3-next", "int8"),
        *(
            pytest.param(name, kv, marks=pytest.mark.long)
            for name, kv in (("lfm2", "fp8"), ("granite-hybrid", "fp8"), ("falcon-h1", "int8"), ("kimi-linear", "int8"))
        ),
    ],
)
def test_kv_in_8_bits(made, name, kv):
    """Near transformers' logits, with float32 states whose bits do not depend on chunks."""
    case, text = made(name, "cpu"), tokens_of(PROMPT_TOKENS, 2)
    # 8-bit blocks of 16 tokens are too small for the pieces of these states.
    driver = case.driver(32, num_slots=400, kv_cache_dtype=kv)
    wanted, layout, plain = case.logits(text), driver.backend.layout, kv_layout(case.prepared, 32)
    assert layout.block_bytes < 0.35 * plain.block_bytes
    assert layout.state_pages >= plain.state_pages
    one, other, *others = driver.sequences.add(4)
    found = driver.run_all(one, text, [33, 1, 2, 20])
    assert 0 < (found - wanted).abs().mean() < 0.05 * wanted.std()
    driver.check_among_others(other, text, [1] * 20 + [16], found, others)
    assert driver.state(one) == driver.state(other)
    driver.backend.check_integrity()


@needs_kernels
@pytest.mark.parametrize("name", SOME)
def test_a_step_writes_its_blocks_and_states_and_nothing_else(made, name):
    driver = made(name, "cpu").driver(num_slots=SLOTS)
    text, (number,) = tokens_of(40, 2), driver.sequences.add()
    driver.step((number, text[:20]))
    before = np.frombuffer(driver.memory, np.uint8).reshape(SLOTS, -1).copy()
    batch = driver.batch((number, text[20:]))
    driver.backend.forward(batch)
    pool = np.frombuffer(driver.memory, np.uint8).reshape(SLOTS, -1)
    mine = {*batch.block_tables[0].tolist(), *batch.states.writes[0].tolist()}
    assert {slot for slot in range(SLOTS) if (pool[slot] != before[slot]).any()} <= mine
    assert (pool[batch.states.writes[0]] != before[batch.states.writes[0]]).any(1).all()


@needs_kernels
def test_states_that_could_leave_the_pool_are_refused(made):
    driver = made("lfm2", "cpu").driver(num_slots=40)
    (number,) = driver.sequences.add()
    driver.step((number, [1, 2, 3]))
    batch = driver.batch((number, [4]))
    reads, writes = batch.states.reads, batch.states.writes
    for wrong, words in (
        (None, "no slots for"),
        (StateSlots(reads, writes + 40), "leaves the pool"),
        (StateSlots(reads, writes - 41), "leaves the pool"),
        (StateSlots(reads + 40, writes), "leaves the pool"),
        (StateSlots(reads.astype(np.int64), writes), "int32"),
        (StateSlots(reads, np.concatenate((writes, writes))), r"int32 \[1, 1\]"),
    ):
        with pytest.raises(Internal, match=words):
            driver.backend.forward(dataclasses.replace(batch, states=wrong))
    assert driver.backend.forward(batch).shape == (1, 258)


@needs_kernels
def test_a_pool_that_begins_within_a_cache_line_is_refused(made):
    driver = made("lfm2", "cpu").driver(num_slots=40)
    (number,) = driver.sequences.add()
    shifted = np.zeros(len(driver.memory) + 16, np.uint8)
    shifted = shifted[8 if shifted.ctypes.data % 64 == 0 else 0 :]
    driver.backend.bind_pool(memoryview(shifted), 40)
    with pytest.raises(Internal, match="cache line"):
        driver.step((number, [1, 2, 3]))


def test_the_text_part_of_qwens_model_of_text_and_pictures(tmp_path):
    folder, flags = make_model(tmp_path / "text", HYBRIDS["qwen3-5"])
    text, found = tokens_of(PROMPT_TOKENS, 2), []
    driver = StateDriver(prepare(flags))
    found.append(driver.run_all(driver.sequences.add()[0], text, [7]))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": config, "vision_config": {}, "image_token_id": 3}
    (folder / "config.json").write_text(json.dumps({**outer, "vision_start_token_id": 4}))
    plain = {name.replace("model.language_model.", "model.", 1): tensor for name, tensor in tensors.items()}
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in plain.items()}
    beside = {"model.visual.x": torch.ones(3), "mtp.fc.weight": torch.ones(3)}
    save_file({**renamed, **beside}, folder / "model.safetensors", metadata={"format": "pt"})
    driver = StateDriver(prepare(flags))
    found.append(driver.run_all(driver.sequences.add()[0], text, [7]))
    assert torch.equal(*found)


def test_olmo_hybrids_own_names(tmp_path):
    """transformers 5 saves a convolution of queries, keys and values in three equal parts, published files in parts by
    their channels. A norm of attention layers also has two names."""
    folder, flags = make_model(tmp_path / "model", HYBRIDS["olmo-hybrid"])
    text, found = tokens_of(PROMPT_TOKENS, 2), []
    tensors, keys, values = load_file(folder / "model.safetensors"), 2 * 24, 4 * 48
    published = dict(tensors)
    norm = "model.layers.2.{}.weight".format
    published[norm("post_attention_layernorm")] = published.pop(norm("feedforward_layer_norm"))
    for layer in range(2):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split([keys, keys, values])
        published |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    for each in (tensors, published):
        save_file(each, folder / "model.safetensors", metadata={"format": "pt"})
        driver = StateDriver(prepare(flags))
        found.append(driver.run_all(driver.sequences.add()[0], text, [7]))
    assert torch.equal(*found)


SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


KDA = {"full_attn_layers": [2], "kda_layers": [1]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "lfm2", "layer_types": ["conv", "mamba"]}, "'mamba' for layer 1"),
        ({"model_type": "lfm2", "full_attn_idxs": "all"}, "full_attn_idxs"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 3}, "linear_num_key_heads = 3"),
        ({"model_type": "qwen3_next", "layer_types": [LINEAR]}, "each of the 2 layers"),
        ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate"),
        ({"model_type": "granitemoehybrid", "mamba_n_heads": 7}, "mamba_n_heads = 7"),
        ({"model_type": "kimi_linear", "linear_attn_config": [1]}, "linear_attn_config must be an object"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound = -5.0"),
        ({"model_type": "kimi_linear", "linear_attn_config": KDA | {"kda_layers": [0]}}, "each of the layers 1 to 2"),
        ({"model_type": "kimi_linear", "mla_use_nope": False}, "mla_use_nope = False"),
        ({"model_type": "kimi_linear", "moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"model_type": "jamba", "mamba_dt_rank": 20, "num_experts": 2}, "mamba_dt_rank = 20"),
        ({"model_type": "bamba", "attn_rotary_emb": 16}, "attn_rotary_emb = 16, not half of 16 values"),
        ({"model_type": "bamba", "attn_layer_indices": "all"}, "attn_layer_indices must be a list"),
        ({"model_type": "granitemoehybrid", "time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "alibi"}, "'alibi'"),
    ],
)
def test_what_cannot_be_served_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**SHAPE, **change})


def test_which_layers_have_keys_and_values():
    config = parse_config({**SHAPE, "model_type": "lfm2", "num_hidden_layers": 5, "full_attn_idxs": [1, 4]})
    assert config.kv_layers == (1, 4)
    config = parse_config({**SHAPE, "model_type": "qwen3_next", "num_hidden_layers": 9})
    assert config.kv_layers == (3, 7)
    kinds = ["mamba", "attention"]
    assert parse_config({**SHAPE, "model_type": "granitemoehybrid", "layer_types": kinds}).kv_layers == (1,)
    assert parse_config({**SHAPE, "model_type": "lfm2", "layer_types": ["conv", ATTENTION]}).linear.taps == 3
    kimi = {**SHAPE, "model_type": "kimi_linear", "num_experts": 8}
    assert parse_config({**kimi, "linear_attn_config": KDA}).kv_layers == (1,)
    assert parse_config({**kimi, "linear_attn_config": KDA, "layer_types": [ATTENTION, LINEAR]}).kv_layers == (0,)
    assert parse_config({**kimi, "num_hidden_layers": 9}).kv_layers == (4, 8)
