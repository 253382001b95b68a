"""The saturated engine of the GPU's benchmark, whose list of slots acts as a KV node."""

from __future__ import annotations

import tests.support.gpu  # isort: skip  # noqa: F401  (before the kernels)

import numpy as np
import pytest

from lab.benchmarks.gpu.line import BLOCK_SIZE, EngineLoad, EngineLoop
from pillion.kernels.step import Sampled

TOKEN = 7


class FakeInFlightStep:
    def __init__(self, count: int) -> None:
        self.count = count

    def wait(self) -> Sampled:
        return Sampled((TOKEN,) * self.count)


class FakeGpuBackend:
    """Samples the same token everywhere, and checks that no two tokens share a cell."""

    def __init__(self) -> None:
        self.ahead = self.most_streams = 0

    def launch(self, batch, copies, rows) -> FakeInFlightStep:
        assert len(rows) == len(batch.sample_rows)
        self.ahead += int(np.count_nonzero(batch.token_ids < 0))
        self.most_streams = max(self.most_streams, batch.num_seqs)
        written = []
        for row, (begin, end) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False)):
            positions = batch.positions[begin:end]
            written += [
                (int(batch.block_tables[row, place // BLOCK_SIZE]), place % BLOCK_SIZE) for place in positions.tolist()
            ]
        assert len(set(written)) == len(written), "two tokens of a step share a place"
        return FakeInFlightStep(len(rows))


@pytest.mark.parametrize(
    "load", [EngineLoad(8, 3, 40, 20, 64), EngineLoad(3, 1, 16, 33, 16), EngineLoad(1, 2, 5, 1, 8)]
)
def test_every_token_arrives_and_every_slot_is_accounted_for(load):
    backend, slots = FakeGpuBackend(), load.streams * 24
    loop = EngineLoop(backend, slots, load)
    assert loop.run().took_s > 0
    assert [len(seen.tokens_s) for seen in loop.seen.values()] == [load.answer_tokens] * load.streams * load.rounds
    # The scheduler keeps a few free slots for the next stream.
    scheduler = loop.scheduler
    scheduler.check_integrity()
    assert sorted((*loop.free_slots, *scheduler.free_slots.slots)) == list(range(slots))
    assert backend.most_streams == load.streams
    assert (backend.ahead > 0) == (load.answer_tokens > 1)
