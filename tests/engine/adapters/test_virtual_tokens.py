"""Adapters of virtual tokens beside PEFT in float32: prefix tuning, prompt tuning and p-tuning, alone and mixed, on
torch and on the CPU kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_store import AdapterStore
from pillion.engine.adapters.cpu_adapters import adapter_table, compile_with_adapters, inner_orders
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.kernels.cpu.adapters.virtual_rows import VirtualWrite
from pillion.kernels.cpu.rows.rotate import RotateWrite
from tests.engine.adapters.test_peft import BACKENDS, TOLERANCE, driver_with, logits_of
from tests.support.adapters import VIRTUAL, adapted_model, edit_config, edit_tensors, make_adapter, make_virtual
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.hybrids import HYBRIDS, StateDriver

pytestmark = pytest.mark.usefixtures("own_cache")

# Each has its own way with embeddings, norms of heads, windows, or rotary positions.
MODELS = (
    "llama-gqa-tied",
    "llama-mqa-biases",
    "llama-odd-hidden",
    "smollm3-nope",
    "mistral-window",
    "qwen3-qk-norm",
    "phi3-partial-rope",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
)
DIFFERENT = ("llama-gqa-tied", "mistral-window", "qwen3-qk-norm", "phi3-partial-rope", "gemma3", "granite")
TEXT = tokens_of(30, 3)


def placeholders(tokens: int) -> list[int]:
    """Ids in the places of virtual tokens; which ones does not matter."""
    return [7] * tokens


def check(driver, slot: int, tokens: int, wanted: torch.Tensor, chunks: list[int]) -> None:
    (number,) = driver.sequences.add(adapter=slot)
    found = driver.run_all(number, placeholders(tokens) + TEXT, chunks)[tokens:]
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in DIFFERENT else pytest.mark.long) for one in MODELS]
)
@pytest.mark.parametrize("kind", ["prefix", "prompt"])
@pytest.mark.parametrize("make", BACKENDS)
def test_a_model_of_each_family(make, family, kind, tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    adapter = make_virtual(folder, tmp_path / "adapter", kind, 5)
    oracle, driver = adapted_model(folder, adapter), driver_with(flags, adapter, make=make)
    wanted = logits_of(oracle, TEXT)[-len(TEXT) :]
    check(driver, 0, 5, wanted, [17, 1])
    (number,) = driver.sequences.add()
    plain = driver.run_all(number, TEXT, [])
    assert (plain - wanted).std() > 0.01 * wanted.std()


@pytest.mark.parametrize(
    "kernels", [pytest.param("torch", marks=pytest.mark.long), pytest.param("cpu", marks=needs_kernels)]
)
def test_a_model_whose_layers_have_states(kernels, tmp_path):
    """Virtual tokens pass its layers as embeddings. As keys and values they would leave nothing in its states."""
    folder, flags = make_model(tmp_path / "model", HYBRIDS["granite-hybrid"])
    adapter = make_virtual(folder, tmp_path / "adapter", "prompt", 5)

    def make(prepared, block_size, num_slots):
        backend = cpu_backend(prepared, block_size, threads=2) if kernels == "cpu" else None
        return StateDriver(prepared, block_size, num_slots, backend=backend)

    driver = driver_with(flags, adapter, make=make)
    check(driver, 0, 5, logits_of(adapted_model(folder, adapter), TEXT)[-len(TEXT) :], [17, 1])
    edit_config(adapter, peft_type="PREFIX_TUNING")
    with pytest.raises(ConfigError, match="keys and values, which leave nothing in this model's states"):
        driver_with(flags, adapter, make=make)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"), FAMILIES["llama-gqa-tied"])


@pytest.mark.parametrize("kind", VIRTUAL)
@pytest.mark.parametrize("tokens", [1, 16, 21])
@pytest.mark.parametrize("make", BACKENDS)
def test_every_kind_and_number_of_tokens(make, kind, tokens, llama, tmp_path):
    """Less than a block, a whole one, and more; steps end within virtual tokens, before the text, and in it."""
    folder, flags = llama
    adapter = make_virtual(folder, tmp_path / "adapter", kind, tokens)
    wanted, driver = (
        logits_of(adapted_model(folder, adapter), TEXT)[-len(TEXT) :],
        driver_with(flags, adapter, make=make),
    )
    for chunks in ([], [tokens], [max(1, tokens // 2), tokens]):
        check(driver, 0, tokens, wanted, chunks)


@pytest.mark.parametrize("make", BACKENDS)
def test_one_step_mixes_virtual_tokens_lora_and_the_base(make, llama, tmp_path):
    folder, flags = llama
    adapters = [
        make_virtual(folder, tmp_path / "a", "prefix", 21, seed=1),
        make_virtual(folder, tmp_path / "b", "prefix", 4, seed=2),
        make_virtual(folder, tmp_path / "c", "prompt", 9, seed=3),
        make_adapter(folder, tmp_path / "d", r=4),
    ]
    lengths = (21, 4, 9, 0)
    driver = driver_with(flags, *adapters, make=make)
    wanted = [logits_of(adapted_model(folder, one), TEXT)[-len(TEXT) :] for one in adapters]
    base = adapted_model(folder, adapters[3])
    with base.disable_adapter():
        wanted.append(logits_of(base, TEXT))
    slots = [2, -1, 0, 3, 1, 0]
    numbers = [driver.sequences.add(adapter=slot)[0] for slot in slots]
    texts = [placeholders(lengths[slot] if slot >= 0 else 0) + TEXT for slot in slots]
    ends = [len(text) for text in texts]
    starts = [0] * 6
    for cuts in ([13] * 6, [14] * 6, ends):
        found = driver.step(*((n, t[a:b]) for n, t, a, b in zip(numbers, texts, starts, cuts, strict=True)))
        starts = cuts
    for slot, logits in zip(slots, found, strict=True):
        torch.testing.assert_close(logits, wanted[slot][-1], atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(found[2], found[5])


@needs_kernels
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_bits_depend_on_no_other_row_step_or_thread(kv_cache_dtype, tmp_path):
    """I6, on the CPU kernels in bfloat16; every access of theirs is checked."""
    folder, flags = make_model(tmp_path / "model", FAMILIES["llama-gqa-tied"])
    flags = replace(flags, dtype="bfloat16")
    kinds = {"prefix": 21, "prompt": 9}
    adapters = [make_virtual(folder, tmp_path / kind, kind, tokens) for kind, tokens in kinds.items()]

    def drive(threads: int, *, checked: bool) -> CpuDriver:
        made = cpu_backend(prepare(flags), threads=threads, kv_cache_dtype=kv_cache_dtype, checked=checked)
        return driver_with(flags, *adapters, num_slots=200, make=partial(CpuDriver, backend=made))

    texts = [placeholders(tokens) + TEXT for tokens in kinds.values()]
    alone = drive(1, checked=False)
    wanted = [alone.run_all(alone.sequences.add(adapter=slot)[0], text, []) for slot, text in enumerate(texts)]
    driver = drive(3, checked=True)
    others = [driver.sequences.add(adapter=slot)[0] for slot in (0, 1, -1)]
    for slot, text in enumerate(texts):
        for chunks in ([1] * 10, [kinds[["prefix", "prompt"][slot]], 3]):
            (mine,) = driver.sequences.add(adapter=slot)
            driver.check_among_others(mine, text, chunks, wanted[slot], others)
    driver.backend.check_integrity()
    driver.backend.close()
    alone.backend.close()


@needs_kernels
def test_each_layer_writes_its_keys_and_values_once(tmp_path):
    """A rank that wrote others first would do so while another rank of the same KV head reads them."""
    _, flags = make_model(tmp_path / "model", FAMILIES["llama-mqa-biases"])
    model = cpu_backend(prepare(flags)).model
    _, programs = compile_with_adapters(model, adapter_table(model, inner_orders(model), 1, 1), lambda line: None)
    for operations in programs:
        writes = [each for each in operations if isinstance(each.spec, RotateWrite)]
        assert len(writes) == model.config.num_layers
    assert all(isinstance(each.spec, VirtualWrite) for each in writes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_virtual_tokens": 0}, "num_virtual_tokens must be a whole number above 0"),
        ({"num_virtual_tokens": 5000}, "num_virtual_tokens = 5000 is not supported: an adapter has at most 4096"),
        ({"num_virtual_tokens": 6}, "prompt_embeddings is [5, 128]; config and model want [6, 128]"),
        ({"peft_type": "PROMPT_TUNING"}, "prompt_embeddings is [5, 128]; config and model want [5, 64]"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules = 2 is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head'] is not supported"),
        ({"a_key_of_next_year": 3}, "a_key_of_next_year = 3 is not supported: nobody here obeys it"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "peft_type = 'MULTITASK_PROMPT_TUNING' is not supported"),
    ],
)
def test_configs_that_are_refused(changes, words, llama, tmp_path):
    adapter = edit_config(make_virtual(llama[0], tmp_path / "adapter", "prefix", 5), **changes)
    with pytest.raises(ConfigError) as error:
        AdapterFiles(adapter).pairs(load_config(llama[0]))
    assert words in error.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: {}, "has no prompt_embeddings"),
        (
            lambda tensors: {**tensors, "other": torch.ones(1)},
            "an adapter of virtual tokens has prompt_embeddings alone",
        ),
        (lambda tensors: {name: one / 0 for name, one in tensors.items()}, "NaN or infinite"),
        (lambda tensors: {name: one * 1e7 for name, one in tensors.items()}, "they may be up to 1000000"),
    ],
)
def test_tensors_that_are_refused(change, words, llama, tmp_path):
    adapter = edit_tensors(make_virtual(llama[0], tmp_path / "adapter", "prefix", 5), change)
    with pytest.raises(ConfigError, match=re.escape(words)):
        AdapterStore(tmp_path / "store").add(adapter, load_config(llama[0]))
