"""Stages of a GPU worker: the KV of one process, bit by bit, and the rows sent from stage to stage."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, gpu_backend  # isort: skip  (before the kernels)

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import result_of
from pillion.config import ModelFlags
from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.backends.backend import BackendLost
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.gpu_stages.gpu_stage_backend import GpuStageBackend
from pillion.engine.gpu_stages.gpu_stage_link import GpuStageLink, StageRendezvous
from pillion.engine.models.config_parser import load_config
from pillion.engine.stages.stage_shares import StagePlace
from pillion.kernels.step import StepBatch
from tests.gpu.test_backend import close
from tests.gpu.test_gpu_hybrids import GpuStateDriver
from tests.gpu.test_quantized_models import FORMATS
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.gpu import DEVICE
from tests.support.hybrids import ATTENTION, HYBRIDS, LINEAR
from tests.support.mixed_adapters import RANKS, with_adapters
from tests.support.quantized import quantize_folder

pytestmark = pytest.mark.usefixtures("own_cache")

LAYERS, SLOTS = 3, 16
TEXT = tokens_of(46, 2)
CUTS = ((0, 12), (12, 13), (13, 25))
# One family per special case of stages: norms of sums with which the next stage begins, with and without one; caps and
# windows; experts and biases; layers that begin with a stored row; latents.
FAMILY_STAGES = {"gemma2": 2, "gpt-oss": 3, "youtu": 3}


class PassedOn:
    """The rows between stages that run in one process, in sequence; stands for a GpuStageLink."""

    def __init__(self, before: deque[torch.Tensor] | None, after: deque[torch.Tensor] | None) -> None:
        self.before, self.after = before, after

    def receive(self, rows: torch.Tensor) -> None:
        if self.before is not None:
            rows.copy_(self.before.popleft())

    def send(self, rows: torch.Tensor) -> None:
        if self.after is not None:
            self.after.append(rows.clone())

    def wait(self, event: Any) -> None:
        event.synchronize()

    def begin_steps(self) -> None: ...

    def close(self) -> None: ...


class StageChain:
    """All stages of a worker behind the interface of one backend."""

    def __init__(self, prepared: PreparedModel, stages: int, **options: Any) -> None:
        config = load_config(prepared.folder)
        between: list[deque[torch.Tensor] | None] = [None, *(deque() for _ in range(stages - 1)), None]
        self.backends = [
            gpu_backend(
                prepared,
                shard=StagePlace.of(stage, stages, 1).shard(config),
                make=partial(GpuStageBackend, link=PassedOn(*between[stage : stage + 2])),
                **options,
            )
            for stage in range(stages)
        ]
        self.layout, self.vocab_size = self.backends[0].layout, self.backends[0].vocab_size

    def bind_pool(self, memory: Any, num_slots: int) -> None:
        for backend in self.backends:
            backend.bind_pool(memory, num_slots)

    def warm_up(self, max_tokens: int) -> None:
        for backend in self.backends:
            backend.warm_up(max_tokens)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        return [backend.forward(batch) for backend in self.backends][-1]

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        for backend in self.backends:
            backend.bind_adapters(max_adapters, max_rank, targets)

    @property
    def adapters(self) -> StageChain:
        return self

    def pack(self, weights: AdapterWeights) -> AdapterWeights:
        return weights

    def place(self, slot: int, weights: AdapterWeights) -> None:
        for backend in self.backends:
            backend.adapters.place(slot, backend.adapters.pack(weights))


def chunks(driver: GpuDriver, *adapters: int) -> Iterator[StepBatch]:
    """Batches of two texts in chunks, those of all sequences in the same steps."""
    numbers = [driver.sequences.add(adapter=slot)[0] for slot in adapters or (-1, -1)]
    for begin, end in CUTS:
        parts = [(number, TEXT[:: 1 if place % 2 else -1][begin:end]) for place, number in enumerate(numbers)]
        yield driver.sequences.step(parts, ())


def pool_of(driver: GpuDriver) -> torch.Tensor:
    return driver.memory.tensor.cpu()


def driver_of(prepared: PreparedModel, backend: Any) -> GpuDriver:
    return GpuDriver(prepared, num_slots=SLOTS, backend=backend)


def check_blocks(prepared: PreparedModel, stages: int, *, workspace: bool = False, **options: Any) -> None:
    """Compare the pool after the chunks with that of one process. Each stage runs ahead of the next one; with
    ``workspace``, after it has run every kernel."""
    driver = driver_of(prepared, gpu_backend(prepared, **options))
    for batch in chunks(driver):
        driver.backend.forward(batch)
    chain = StageChain(prepared, stages, **options)
    for backend in chain.backends if workspace else ():
        backend.allocate_workspace()
    staged = driver_of(prepared, chain)
    steps = [*chunks(staged)]
    for backend in chain.backends:
        for batch in steps:
            assert backend.forward(batch).shape == (0, chain.vocab_size)
            assert backend.worked.began_s < backend.worked.ended_s
    found, wanted = pool_of(staged), pool_of(driver)
    if load_config(prepared.folder).moe is None:
        assert torch.equal(found, wanted)
    else:
        # Experts multiply their rows at once, including the padding of the interpreter's steps, and a product's bits
        # depend on their number. A stage's padding contains rows of an earlier step.
        both = found.view(torch.float32), wanted.view(torch.float32)
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize(("family", "stages"), FAMILY_STAGES.items())
def test_stages_write_the_kv_of_one_process_bit_by_bit(family, stages, tmp_path):
    _, flags = make_model(tmp_path / "model", {**FAMILIES[family], "num_hidden_layers": LAYERS})
    check_blocks(prepare(flags), stages, workspace=family == "gpt-oss")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_stages_write_the_states_of_one_process_bit_by_bit(tmp_path):
    """A stage without states is between two that have some; a chunk of the rule begins in one step and ends in the
    next."""
    shape = HYBRIDS["qwen3-5"] | {"num_hidden_layers": LAYERS, "layer_types": [LINEAR, ATTENTION, LINEAR]}
    prepared = prepare(make_model(tmp_path / "model", shape)[1])
    pools = []
    for backend in (gpu_backend(prepared), StageChain(prepared, LAYERS)):
        driver = GpuStateDriver(prepared, num_slots=300, backend=backend)
        one, two = driver.sequences.add(2)
        for begin, end in CUTS:
            assert driver.step((one, TEXT[begin:end]), (two, TEXT[-1 - begin : -1 - end : -1]), sample=()).numel() == 0
        pools.append(pool_of(driver))
    assert torch.equal(*pools)


@pytest.mark.long
def test_another_layout_of_the_pool_in_bfloat16(tmp_path):
    _, flags = make_model(tmp_path / "model", {**FAMILIES["llama-gqa-tied"], "num_hidden_layers": LAYERS})
    check_blocks(prepare(replace(flags, dtype="bfloat16")), 3, fp8=True, block_size=32)


@pytest.mark.long
def test_weights_that_are_quantized_are_packed_for_each_stage(prepared, tmp_path):
    producer, _ = FORMATS["gptq in an order"]
    folder, _ = quantize_folder(prepared.folder, tmp_path, producer)
    check_blocks(prepare(ModelFlags(model=str(folder), dtype="float32")), 2, workspace=True)


def test_a_decode_worker_continues_from_the_kv_of_stages(prepared):
    """It may have written the first blocks, stages write the next ones, and its logits are those of transformers."""
    driver = driver_of(prepared, gpu_backend(prepared))
    (number,) = driver.sequences.add()
    driver.step((number, TEXT[:16]), sample=())
    chain = StageChain(prepared, 2)
    chain.bind_pool(driver.memory, SLOTS)
    chain.warm_up(1)
    chain.forward(driver.sequences.step([(number, TEXT[16:40])], ()))
    # Each stage has its own layers, the first one the embedding, and none the output projection.
    assert [sorted(each._model.layers) for each in chain.backends] == [[0], [1]]
    assert ["embedding" in each._model.weights for each in chain.backends] == [True, False]
    assert not any("final_norm" in each._model.weights for each in chain.backends)
    found = driver.step((number, TEXT[40:]), sample=range(6))
    model = AutoModelForCausalLM.from_pretrained(str(prepared.folder), dtype=torch.float32).eval()
    with torch.inference_mode():
        close(found, model(torch.tensor([TEXT])).logits[0, 40:].float())


@pytest.mark.long
def test_adapters(prepared):
    """Each stage packs the pairs of its own layers."""
    slots, pools = (1, -1, 0, 2), []
    for backend in (gpu_backend(prepared), StageChain(prepared, 2)):
        driver = with_adapters(driver_of(prepared, backend))
        for batch in chunks(driver, *slots):
            driver.backend.forward(batch)
        pools.append(pool_of(driver))
    assert torch.equal(*pools)
    assert max(slots) < len(RANKS)


class Pipeline:
    """The links of stages that are threads of this process. ``ended`` is non-empty when a stage has ended."""

    def __init__(self, stages: int) -> None:
        self.ended: list[bool] = []
        self.threads = [ThreadPoolExecutor(1) for _ in range(stages)]
        self._rendezvous = StageRendezvous.create(stages, 1)
        places = [StagePlace.of(stage, stages, 1) for stage in range(stages)]
        joined = [thread.submit(self._join, place) for thread, place in zip(self.threads, places, strict=True)]
        self.links = [result_of("a stage that has met those beside it", one) for one in joined]
        self._rendezvous.close()

    def _join(self, place: StagePlace) -> GpuStageLink:
        given = self._rendezvous.of(place)
        return GpuStageLink.join(place, given, DEVICE, own_device=False, aborted=lambda: bool(self.ended))

    def begin(self, stage: int, call: str, *args: torch.Tensor) -> Future[None]:
        """Start a call of a stage's link, on that stage's thread."""
        return self.threads[stage].submit(getattr(self.links[stage], call), *args)

    def close(self) -> None:
        self.ended.append(True)
        for thread in self.threads:
            thread.shutdown()
        for link in self.links:
            link.close()
            link.close()


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made = Pipeline(3)
    yield made
    made.close()


def test_rows_pass_from_each_stage_to_the_next(pipeline):
    """Also those of successive steps with other numbers of rows."""
    for number in range(3):
        pipeline.begin(number, "begin_steps")
    given = [torch.randn(rows, 8).to(torch.bfloat16) for rows in (5, 1, 7)]
    ways = [[rows.clone(), torch.zeros_like(rows), torch.zeros_like(rows)] for rows in given]
    calls = []
    for rows in ways:
        for stage, mine in enumerate(rows):
            calls += [pipeline.begin(stage, call, mine) for call in ("receive", "send")]
    for call in calls:
        result_of("rows that pass", call)
    for rows, wanted in zip(ways, given, strict=True):
        assert all(torch.equal(found, wanted) for found in rows)


def test_a_stage_that_exits_ends_the_waits_of_the_others(pipeline):
    """The first stage waits for the second one to receive its rows, the third one for rows."""
    rows = torch.zeros(3, 8)
    waits = [pipeline.begin(0, "send", rows), pipeline.begin(2, "receive", rows.clone())]
    pipeline.ended.append(True)
    for stage, wait in zip((0, 2), waits, strict=True):
        with pytest.raises(BackendLost, match=f"stage {stage}: another rank has ended"):
            result_of("the end of a wait", wait)


def test_each_process_gets_the_meetings_of_its_neighbours():
    rendezvous = StageRendezvous.create(3, 2)
    places = [StagePlace.of(process, 3, 2) for process in range(6)]
    every = [rendezvous.of(place) for place in places]
    assert [len(one) for one in every] == [2, 2, 3, 3, 2, 2]
    for one, other in ((0, 1), (2, 3), (4, 5)):
        assert every[one][0] == every[other][0], "the ranks of a stage"
    for rank in (0, 1):
        before, middle, after = (every[2 * stage + rank][1:] for stage in range(3))
        assert [*before, *after] == middle
    assert len({descriptor for one in every for descriptor in one}) == 3 + 4
    rendezvous.close()
