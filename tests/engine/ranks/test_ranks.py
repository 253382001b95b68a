"""Ranks that share a model on the CPU kernels, in threads of one process: transformers' logits, and always the same
bits."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import result_of, wait_for
from pillion.config import ModelFlags
from pillion.engine.backends.backend import BackendLost
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.ranks.rank_memory import NEVER
from pillion.errors import Internal
from pillion.kernels.cpu.quantized.quantized_packing import KINDS
from pillion.kernels.cpu.runtime.program import aligned_bytes
from tests.support.cpu_model import cpu_backend, needs_kernels
from tests.support.families import BY_ROWS, FAMILIES, make_model, tokens_of
from tests.support.hybrids import HYBRIDS, StateDriver
from tests.support.mixed_adapters import mixed_steps, with_adapters
from tests.support.oracle import Oracle, first_difference
from tests.support.quantized import PRODUCERS, quantize_folder
from tests.support.rank_model import RankGroup
from tests.support.torch_model import BackendDriver

pytestmark = [needs_kernels, pytest.mark.usefixtures("own_cache")]

MODELS = FAMILIES | {
    # Shares of 6 and 3 heads; the heads of SmolLM2.
    "nine-heads": {
        "hidden_size": 144,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "intermediate_size": 160,
    },
    # Ranks split the heads and share all latents.
    "latents-six-heads": {**FAMILIES["youtu"], "num_attention_heads": 6, "num_key_value_heads": 6},
    # Four ranks share two KV heads, whose keys a norm over the whole projection counts once.
    "olmo2-wide": {"model_type": "olmo2", "num_key_value_heads": 2, "tie_word_embeddings": False},
}
# All families with two ranks. With four: biases and one KV head for all, multipliers, a norm over projections, partial
# RoPE, and experts. Convolutions with uneven shares of channels, without and with gates of heads; heads with keys; four
# ranks that share two groups with a common norm.
WITH_STATES = {
    "lfm2": {**HYBRIDS["lfm2"], "hidden_size": 192},
    "lfm3": {**HYBRIDS["lfm3"], "hidden_size": 192},
    "qwen3-next": HYBRIDS["qwen3-next"],
    "granite-hybrid-wide": {**HYBRIDS["granite-hybrid-dense"], "shared_intermediate_size": 160},
}
HYBRID_CASES = [
    *(("lfm2", 2), ("lfm3", 2), ("granite-hybrid-wide", 4), ("qwen3-next", 2)),
    *(
        pytest.param(name, 2, marks=pytest.mark.long)
        for name in HYBRIDS
        if not name.startswith("lfm") and name != "qwen3-next"
    ),
]
BY_FOUR = ["llama-mqa-biases", "granite", "olmo2-wide", "phi3-partial-rope", "mixtral"]
CASES = [
    *(pytest.param(name, 2, marks=pytest.mark.long if name in BY_ROWS else ()) for name in MODELS),
    *((name, 4) for name in BY_FOUR),
    # Some layers have two KV heads, others one.
    pytest.param("gemma4-keys", 4, marks=pytest.mark.long),
]
TEXT = tokens_of(70, 2)
SLOTS = 300


@pytest.fixture(scope="module")
def prepared_of(own_cache, tmp_path_factory):
    """Prepare each model once, in float32 or bfloat16."""

    @functools.cache
    def made(name):
        shape = {**HYBRIDS, **WITH_STATES, **MODELS}[name]
        return make_model(tmp_path_factory.mktemp("model"), shape)[1]

    return lambda name, dtype="float32": prepare(dataclasses.replace(made(name), dtype=dtype))


def run(backend, prepared, chunks=(30,), text=TEXT):
    driver = BackendDriver(prepared, backend=backend)
    return driver.run_all(driver.sequences.add()[0], text, chunks)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_and_tokens_of_ranks_match_transformers(prepared_of, name, size):
    prepared = prepared_of(name)
    model = AutoModelForCausalLM.from_pretrained(str(prepared.folder), dtype=torch.float32).eval()
    group = RankGroup(prepared, size)
    found = run(group, prepared, (1, 40))
    with torch.inference_mode():
        wanted = model(torch.tensor([TEXT])).logits[0].float()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    tokens = BackendDriver(prepared, backend=group).greedy(TEXT[:40], 8)
    assert first_difference(Oracle(model).greedy(TEXT[:40], 8), tokens, 1e-3) == ""
    group.check_integrity()
    group.close()


@pytest.mark.parametrize(("name", "size"), HYBRID_CASES)
def test_layers_with_states(prepared_of, name, size):
    """Transformers' logits and tokens; ranks and one process continue from each other's states."""
    prepared = prepared_of(name)
    model = AutoModelForCausalLM.from_pretrained(str(prepared.folder), dtype=torch.float32).eval()
    group, alone = RankGroup(prepared, size), cpu_backend(prepared)
    driver, found, begin = StateDriver(prepared, 16, SLOTS, backend=group), [], 0
    (number,) = driver.sequences.add()
    for backend, end in ((group, 1), (group, 33), (alone, 40), (group, 70)):
        backend.bind_pool(driver.memory, SLOTS)
        driver.backend = backend
        found.append(driver.step((number, TEXT[begin:end]), sample=range(end - begin)))
        begin = end
    with torch.inference_mode():
        wanted = model(torch.tensor([TEXT])).logits[0].float()
    torch.testing.assert_close(torch.cat(found), wanted, atol=1e-3, rtol=1e-3)
    assert first_difference(Oracle(model).greedy(TEXT[:40], 8), driver.greedy(TEXT[:40], 8), 1e-3) == ""
    group.check_integrity()
    group.close()
    alone.close()


@pytest.mark.parametrize(
    ("name", "size"), [("granite-hybrid-wide", 4), pytest.param("qwen3-next", 2, marks=pytest.mark.long)]
)
def test_ranks_write_the_same_states_however_a_text_is_cut(prepared_of, name, size):
    """Also among other texts (I6). Pieces of a state written by several ranks have the same bytes."""
    prepared = prepared_of(name, "bfloat16")
    group = RankGroup(prepared, size)
    driver = StateDriver(prepared, 16, SLOTS, backend=group)
    (number,) = driver.sequences.add()
    wanted = driver.run_all(number, TEXT, ())
    beside = StateDriver(prepared, 16, 2 * SLOTS, backend=group)
    mine, *others = beside.sequences.add(3)
    beside.check_among_others(mine, TEXT, (7, 1, 40), wanted, others)
    assert beside.state(mine) == driver.state(number)
    pools = [aligned_bytes(len(driver.memory)) for _ in range(size)]
    for backend, pool in zip(group.backends, pools, strict=True):
        pool[:] = driver.memory
        backend.bind_pool(memoryview(pool), SLOTS)
    batch = driver.batch((number, [5]))
    group.forward(batch)
    before = np.frombuffer(driver.memory, np.uint8)
    written = [pool != before for pool in pools]
    for one, pool in zip(written, pools, strict=True):
        for other, beside_it in zip(written, pools, strict=True):
            assert (pool == beside_it)[one & other].all()
    assert all(one.any() for one in written)
    group.close()


OF_SIZES = [
    *(("llama-gqa-tied", *sizes) for sizes in ((1, 2), (2, 1), (2, 4), (4, 1))),
    *(("latents-six-heads", *sizes) for sizes in ((1, 2), (2, 3), (3, 1))),
    *(pytest.param("gemma4-moe", *sizes, marks=pytest.mark.long) for sizes in ((1, 2), (2, 1))),
]


@pytest.mark.parametrize(("name", "writes", "reads"), OF_SIZES)
def test_kv_is_shared_by_workers_of_different_rank_counts(prepared_of, name, writes, reads):
    """Prefill and decode workers of different sizes share blocks."""
    prepared = prepared_of(name)
    wanted = run(cpu_backend(prepared), prepared)
    first, second = (RankGroup(prepared, size) if size > 1 else cpu_backend(prepared) for size in (writes, reads))
    driver = BackendDriver(prepared, backend=first)
    (number,) = driver.sequences.add()
    head = driver.step((number, TEXT[:48]), sample=range(48))
    driver.backend = second
    second.bind_pool(memoryview(driver.memory), 64)
    tail = driver.step((number, TEXT[48:]), sample=range(len(TEXT) - 48))
    torch.testing.assert_close(torch.cat((head, tail)), wanted, atol=1e-4, rtol=1e-4)
    first.close()
    second.close()


def test_ranks_that_share_a_kv_head_write_the_same_bytes(prepared_of):
    """Four ranks over two KV heads: each rank of a pair alone writes the pair's bytes."""
    prepared = prepared_of("llama-gqa-tied")
    driver = BackendDriver(prepared, backend=(group := RankGroup(prepared, 4)))
    pools = [bytearray(driver.memory) for _ in range(4)]
    for backend, pool in zip(group.backends, pools, strict=True):
        backend.bind_pool(memoryview(pool), 64)
    driver.step((driver.sequences.add()[0], TEXT))
    assert pools[0] == pools[1] != pools[2] == pools[3]
    layout = group.layout
    halves = [np.frombuffer(pool, np.uint8).reshape(64, layout.num_layers, 2, 2, -1) for pool in (pools[0], pools[2])]
    assert (halves[0][:, :, :, 1] == 255).all(), "the KV head of other ranks stays untouched"
    assert (halves[1][:, :, :, 0] == 255).all()
    group.close()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_write_the_same_latents(prepared_of, size):
    """Each rank alone writes all blocks, with the bytes of a single process."""
    prepared = prepared_of("latents-six-heads")
    whole = BackendDriver(prepared, backend=cpu_backend(prepared))
    whole.step((whole.sequences.add()[0], TEXT))
    driver = BackendDriver(prepared, backend=(group := RankGroup(prepared, size)))
    pools = [bytearray(driver.memory) for _ in range(size)]
    for backend, pool in zip(group.backends, pools, strict=True):
        backend.bind_pool(memoryview(pool), 64)
    driver.step((driver.sequences.add()[0], TEXT))
    # Only the first layer's rows are not sums of several ranks.
    first = slice(0, group.layout.block_bytes // group.layout.num_layers)
    slots = np.stack([np.frombuffer(pool, np.uint8).reshape(64, -1) for pool in (*pools, whole.memory)])
    assert (slots[:-1] == slots[0]).all()
    assert (slots[:, :, first] == slots[0][:, first]).all()
    assert not (slots[0] == 255).all()
    group.close()


def test_a_row_has_the_same_bits_in_every_batch_and_on_every_thread(prepared_of):
    """I6, with soft caps, windows and 8-bit KV; bounds-checked kernels, ranks of several threads, and other sequences
    in each step."""
    prepared = prepared_of("gemma2", "bfloat16")
    wanted = run(alone := RankGroup(prepared, 2, kv_cache_dtype="fp8"), prepared, ())
    alone.close()
    for threads, checked, chunks in (((3, 1), True, (7, 1, 1, 20)), ((1, 2), False, (33, 1))):
        group = RankGroup(prepared, 2, threads=threads, checked=checked, kv_cache_dtype="fp8")
        driver = BackendDriver(prepared, backend=group)
        mine, *others = driver.sequences.add(4)
        driver.check_among_others(mine, TEXT, chunks, wanted, others)
        group.check_integrity()
        group.close()


def in_turn(group, batch, order):
    """Run a step whose ranks arrive in this order, each asleep in its first wait before the next starts.

    Returns when all ranks' forward passes have: rank 0 may finish while another is not yet awake.
    """
    futures = {}
    for rank in order:
        futures[rank] = group.threads.submit(group.backends[rank].forward, batch)
        missing = set(order) - set(futures)
        if missing:
            # All present ranks sleep until the first missing one arrives.
            asleep = functools.partial(group.memory.sleepers, min(missing))
            wait_for("all ranks that are there sleep", lambda asleep=asleep: asleep() == len(futures))
    results = [result_of(f"the step of rank {rank}", futures[rank]) for rank in sorted(order)]
    return results[0]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_sleeping_ranks_are_woken_and_arrival_order_changes_no_bit(prepared_of, order):
    """Arrivals wake sleepers: naps would exceed the test's wait."""
    prepared = prepared_of("llama-gqa-tied")
    group = RankGroup(prepared, 4, nap_ns=100 * 10**9)
    wanted = run(group, prepared, ())[-1]
    driver = BackendDriver(prepared, backend=group)
    batch = driver.sequences.step([(driver.sequences.add()[0], TEXT)])
    found = in_turn(group, batch, order).clone()[0]
    assert torch.equal(found, wanted)
    group.check_integrity()
    group.close()


def test_an_abort_ends_a_wait_and_every_later_one(prepared_of):
    prepared = prepared_of("llama-gqa-tied")
    group = RankGroup(prepared, 2)
    driver = BackendDriver(prepared, backend=group)
    batch = driver.sequences.step([(driver.sequences.add()[0], TEXT)])
    for rank in (0, 1):
        waiting = group.threads.submit(group.backends[rank].forward, batch)
        if not rank:
            wait_for("rank 0 sleeps", lambda: group.memory.sleepers(1) > 0)
            assert not waiting.done()
            group.memory.abort()
        with pytest.raises(BackendLost, match="a rank was lost, or hangs"):
            result_of(f"the end of rank {rank}'s step", waiting)
    group.close()


def test_rank_0_alone_gives_up_on_a_rank_that_hangs(prepared_of):
    prepared = prepared_of("llama-gqa-tied")
    group = RankGroup(prepared, 2, max_wait_ms=40)
    driver = BackendDriver(prepared, backend=group)
    batch = driver.sequences.step([(driver.sequences.add()[0], TEXT)])
    assert [member.naps for member in group.members] == [2, NEVER]
    with pytest.raises(BackendLost):
        group.backends[0].forward(batch)
    assert group.memory.aborted
    group.close()


def test_a_rank_that_fails_ends_the_others(prepared_of, monkeypatch):
    """For instance without memory for its buffers."""
    prepared = prepared_of("llama-gqa-tied")
    group = RankGroup(prepared, 2)
    driver = BackendDriver(prepared, backend=group)
    batch = driver.sequences.step([(driver.sequences.add()[0], TEXT)])

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(group.backends[1], "_fill", fail)
    futures = [group.threads.submit(backend.forward, batch) for backend in group.backends]
    with pytest.raises(BackendLost):
        result_of("the end of rank 0's step", futures[0])
    with pytest.raises(MemoryError):
        result_of("the end of rank 1's step", futures[1])
    group.close()


def test_a_step_with_more_rows_than_the_memory_has_is_refused(prepared_of):
    prepared = prepared_of("llama-gqa-tied")
    group = RankGroup(prepared, 2, max_tokens=64)
    with pytest.raises(Internal, match="70 tokens, the ranks have memory for 64"):
        run(group, prepared, ())
    assert not group.memory.aborted
    group.close()


@pytest.mark.parametrize("kind", ["gptq-act-order", "w8a8"])
def test_matrices_that_are_quantized(kind, tmp_path):
    """Reordered inputs across heads; rows rounded to int8, with a scale for each rank's part of a row."""
    plain, _ = make_model(tmp_path / "plain", MODELS["nine-heads"])
    few, wide = (
        prepare(ModelFlags(model=str(folder), dtype="float32"))
        for folder in quantize_folder(plain, tmp_path / "few", PRODUCERS[kind](16))
    )
    wanted, group = run(None, wide), RankGroup(few, 2)
    found = run(group, few)
    if kind == "w8a8":
        error, alone = ((each - wanted).abs().mean() for each in (found, run(None, few)))
        assert error < 1.1 * alone < 0.1 * wanted.std()
    else:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    weights = group.backends[1].model.weights
    assert {weights.linear(f"layers.0.{name}").kind in KINDS for name in ("qkv", "gate_up", "down")} == {True}
    assert (weights.linear("layers.0.o").kind in KINDS) == (kind == "w8a8")
    group.close()


@pytest.mark.long
def test_quantized_latents(tmp_path):
    """Each rank has some heads of the query matrices and of the latents' up-projections."""
    plain, _ = make_model(tmp_path / "plain", {**MODELS["latents-six-heads"], "q_lora_rank": 32})
    few, wide = (
        prepare(ModelFlags(model=str(folder), dtype="float32"))
        for folder in quantize_folder(plain, tmp_path / "few", PRODUCERS["deepseek-fp8"](16))
    )
    wanted, group = run(None, wide), RankGroup(few, 2)
    torch.testing.assert_close(run(group, few), wanted, atol=1e-4, rtol=1e-4)
    assert group.backends[1].model.weights.linear("layers.0.query_up").kind in KINDS
    group.close()


@pytest.mark.parametrize(
    "kind",
    ["nine-heads", "latents-six-heads", "gptq-act-order", "gpt-oss", "qwen2-moe", "gptq-act-order-experts"],
)
def test_adapters(kind, prepared_of, tmp_path):
    """A or B of each pair is cut like its layer, also per expert or head; each rank packs its own share."""
    if kind.startswith("gptq"):
        plain, _ = make_model(tmp_path / "plain", FAMILIES["qwen2-moe" if "experts" in kind else "llama-gqa-tied"])
        folder, _ = quantize_folder(plain, tmp_path / "few", PRODUCERS["gptq-act-order"](16))
        prepared = prepare(ModelFlags(model=str(folder), dtype="float32"))
    else:
        prepared = prepared_of(kind)
    text = tokens_of(20, 3)
    driver = with_adapters(BackendDriver(prepared, backend=RankGroup(prepared, 2)), experts=True)
    found, wanted = mixed_steps(driver, text), mixed_steps(with_adapters(BackendDriver(prepared), experts=True), text)
    torch.testing.assert_close(found, wanted, atol=2e-4 * float(wanted.std()), rtol=2e-4)
    driver.backend.close()
