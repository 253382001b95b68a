"""Stages that share a model's layers on the CPU kernels, in threads of one process: the KV of one process, bit by
bit."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import result_of
from pillion.engine.backends.backend import BackendLost
from pillion.engine.checkpoints.prepare import prepare
from pillion.errors import Internal
from tests.support.cpu_model import cpu_backend, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.hybrids import HYBRIDS, StateDriver
from tests.support.mixed_adapters import with_adapters
from tests.support.oracle import Oracle, first_difference
from tests.support.rank_model import RankGroup
from tests.support.stage_model import MAX_TOKENS, StageGroup
from tests.support.torch_model import BackendDriver

pytestmark = [needs_kernels, pytest.mark.usefixtures("own_cache")]

LAYERS = 5
TEXT = tokens_of(100, 2)
CUTS = ((0, 30), (30, 31), (31, 64), (64, 96))


@pytest.fixture(scope="module")
def prepared_of(own_cache, tmp_path_factory):
    """Prepare each model once, in float32 or bfloat16."""

    @functools.cache
    def made(name):
        shape = HYBRIDS.get(name) or {**FAMILIES[name], "num_hidden_layers": LAYERS}
        return make_model(tmp_path_factory.mktemp("model"), shape)[1]

    return lambda name, dtype="float32": prepare(dataclasses.replace(made(name), dtype=dtype))


def chunks(driver, texts=(TEXT,)):
    """Return batches of a text in chunks, with a second text in the same steps."""
    numbers = driver.sequences.add(len(texts))
    for begin, end in CUTS:
        parts = [(number, text[begin:end]) for number, text in zip(numbers, texts, strict=True)]
        has_states = isinstance(driver, StateDriver)
        yield driver.batch(*parts, sample=()) if has_states else driver.sequences.step(parts, ())


def pool_after(backend, prepared):
    """Return the pool after the chunks of two texts. Stages' steps start as early as possible."""
    kind, slots = (StateDriver, 400) if backend.layout.state_pages else (BackendDriver, 64)
    driver = kind(prepared, num_slots=slots, backend=backend)
    if isinstance(backend, StageGroup):
        steps, under_way = [*chunks(driver, (TEXT, TEXT[::-1]))], []
        for batch in steps:
            if len(under_way) == backend.rows.stages:
                [result_of("the oldest step", future) for future in under_way.pop(0)]
            under_way.append(backend.begin(batch))
        for futures in under_way:
            [result_of("a step", future) for future in futures]
    else:
        for batch in chunks(driver, (TEXT, TEXT[::-1])):
            backend.forward(batch)
    backend.close()
    return bytes(driver.memory)


@pytest.mark.parametrize(
    ("name", "stages", "dtype", "kv"),
    [
        ("llama-gqa-tied", 2, "float32", "auto"),
        ("llama-gqa-tied", 5, "bfloat16", "auto"),
        ("gemma2", 3, "bfloat16", "fp8"),
        ("mixtral", 2, "float32", "auto"),
        ("deepseek-v3", 3, "float32", "fp8"),
        ("deepseek-v32", 2, "bfloat16", "auto"),
        ("qwen3-next", 2, "bfloat16", "auto"),
    ],
)
def test_stages_write_the_kv_of_one_process_bit_by_bit(prepared_of, name, stages, dtype, kv):
    prepared = prepared_of(name, dtype)
    found = pool_after(StageGroup(prepared, stages, kv_cache_dtype=kv), prepared)
    assert found == pool_after(cpu_backend(prepared, kv_cache_dtype=kv), prepared)


@pytest.mark.parametrize("name", ["llama-gqa-tied", pytest.param("falcon-h1", marks=pytest.mark.long)])
def test_stages_of_two_ranks_write_the_kv_of_two_ranks(prepared_of, name):
    prepared = prepared_of(name)
    found = pool_after(StageGroup(prepared, 2, ranks=2), prepared)
    assert found == pool_after(RankGroup(prepared, 2), prepared)


def test_a_decode_worker_continues_from_the_kv_of_stages(prepared_of):
    """The blocks are those of one process: it may write the first, stages the next, and it reads all."""
    prepared = prepared_of("llama-gqa-tied")
    group, alone = StageGroup(prepared, 3), cpu_backend(prepared)
    driver = BackendDriver(prepared, backend=alone)
    (number,) = driver.sequences.add()
    driver.step((number, TEXT[:32]), sample=())
    group.bind_pool(memoryview(driver.memory), 64)
    group.forward(driver.sequences.step([(number, TEXT[32:96])], ()))
    found = driver.step((number, TEXT[96:]), sample=range(len(TEXT) - 96))
    model = AutoModelForCausalLM.from_pretrained(str(prepared.folder), dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([TEXT])).logits[0, 96:].float()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    tokens = [int(found[-1].argmax())]
    while len(tokens) < 8:
        tokens.append(int(driver.step((number, tokens[-1:])).argmax()))
    assert first_difference(Oracle(model).greedy(TEXT, 8), tokens, 1e-3) == ""
    group.close()
    alone.close()


@pytest.mark.parametrize(
    ("stages", "ranks", "name"), [(2, 1, "llama-gqa-tied"), (2, 2, "llama-gqa-tied"), (2, 2, "mixtral")]
)
def test_adapters(prepared_of, stages, ranks, name):
    """Each stage packs its own layers' pairs."""
    prepared, text = prepared_of(name), tokens_of(20, 3)
    group = StageGroup(prepared, stages, ranks)
    driver = with_adapters(BackendDriver(prepared, backend=group), experts=True)
    own = RankGroup(prepared, ranks) if ranks > 1 else cpu_backend(prepared)
    beside = with_adapters(BackendDriver(prepared, backend=own), experts=True)
    plain = BackendDriver(prepared, backend=cpu_backend(prepared))
    for one in (driver, beside, plain):
        numbers = [one.sequences.add(adapter=slot if one is not plain else -1)[0] for slot in (2, -1, 0, 1)]
        one.step(*((number, text) for number in numbers), sample=())
    assert driver.memory == beside.memory != plain.memory
    group.close()


def test_a_failed_stage_ends_the_pipeline(prepared_of, monkeypatch):
    """A failing stage ends its neighbours' waits, and so on."""
    prepared = prepared_of("llama-gqa-tied")
    group = StageGroup(prepared, 3)
    driver = BackendDriver(prepared, backend=group)

    def fail(*args):
        group.backends[1].link.abort()
        raise MemoryError

    monkeypatch.setattr(group.backends[1], "_fill", fail)
    batch = driver.sequences.step([(driver.sequences.add()[0], TEXT)], ())
    first, second, third = group.begin(batch)
    with pytest.raises(MemoryError):
        result_of("the end of stage 1's step", second)
    with pytest.raises(BackendLost, match="the stage before stage 2 has ended"):
        result_of("the end of stage 2's step", third)
    with pytest.raises(BackendLost, match="the stage after stage 0 has ended"):
        [result_of("a step of stage 0", future) for future in (first, group.begin(batch)[0])]
    group.close()


def test_a_stage_that_is_at_another_step_is_refused(prepared_of):
    prepared = prepared_of("llama-gqa-tied")
    group = StageGroup(prepared, 2)
    driver = BackendDriver(prepared, backend=group)
    batch = driver.sequences.step([(driver.sequences.add()[0], TEXT)], ())
    group.backends[1].link._received = 1
    with pytest.raises(Internal, match="stage 1 is at step 1, and the stage before is not"):
        result_of("the step", group.begin(batch)[1])
    group.close()


def test_a_step_with_more_rows_than_the_memory_has_is_refused(prepared_of):
    prepared = prepared_of("llama-gqa-tied")
    group = StageGroup(prepared, 2)
    driver = BackendDriver(prepared, backend=group)
    batch = driver.sequences.step([(driver.sequences.add()[0], tokens_of(MAX_TOKENS + 1, 1))], ())
    with pytest.raises(Internal, match="257 tokens, the stages have memory for 256"):
        group.backends[0].check(batch)
    group.close()
