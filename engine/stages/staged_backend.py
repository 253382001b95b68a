"""Backend of a prefill worker of several stages: the first stage's process launches each step on all.

    launch(k)  --the batch--> every process;  the first stage computes step k meanwhile, and passes its rows on
    wait(k)    <--its interval-- every process;  no stage uses a slot of step k any more

While a stage computes step k, the stage before computes step k + 1. All tokens of a prefill step are known, so there is
a step in flight per stage.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pillion.engine.ranks.rank_messages import step_to_bytes
from pillion.engine.ranks.rank_processes import AbortableMemory, RankProcesses
from pillion.engine.ranks.ranked_backend import RankedCalls, ShareBackend
from pillion.engine.stages.stage_clock import StageClock, StageInterval
from pillion.engine.stages.stage_shares import StagePlace
from pillion.errors import Internal
from pillion.kernels.step import Sampled, SamplingRows, StepBatch
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading

log = logging.getLogger("pillion.step")

MODULE = "pillion.engine.stages.stage_main"
# Answer of a process to a step: its StageInterval.
WORKED = struct.Struct("<2d")


class StageBackend(ShareBackend, Protocol):
    """Backend of one process of a stage. A forward pass begins with the rows of the stage before, and ends when the KV
    is written and the rows are sent."""

    @property
    def worked(self) -> StageInterval:
        """Interval of the last forward pass."""

    def check(self, batch: StepBatch) -> None:
        """Raise Internal for a batch that no stage could run."""


class StageProcesses(RankProcesses):
    """Other processes of a worker of several stages. ``clock`` has each stage's compute and wait times."""

    noun = "stage"

    def __init__(
        self,
        stages: int,
        ranks: int,
        label: str,
        memory: AbortableMemory,
        environ: Callable[[int], Mapping[str, str] | None] = lambda process: None,
    ) -> None:
        """Start the processes like :class:`RankProcesses`."""
        self.stages, self.ranks_each = stages, ranks
        self.clock = StageClock(stages)
        super().__init__(stages * ranks, label, memory, environ, module=MODULE)

    def name_of(self, rank: int) -> str:
        return StagePlace.of(rank, self.stages, self.ranks_each).name

    def readings(self) -> Iterator[Reading]:
        """Yield the number of processes, and the times of each stage."""
        yield names.RANKS, (), self.size
        for stage, (work_s, wait_s) in enumerate(zip(self.clock.work_s, self.clock.wait_s, strict=True)):
            yield names.STAGE_WORK, (str(stage),), work_s
            yield names.STAGE_WAIT, (str(stage),), wait_s


class StagedBackend(RankedCalls):
    """:class:`pillion.engine.backends.backend.Backend` for steps of prompts only, without sampling and scoring."""

    own: StageBackend
    ranks: StageProcesses

    def __init__(self, own: StageBackend, processes: StageProcesses) -> None:
        """Own ``own`` and ``processes`` from now on."""
        super().__init__(own, processes)
        self.max_steps_in_flight = processes.stages
        # Seconds of the first stage per step in flight.
        self._first_stage_s: deque[float] = deque(maxlen=processes.stages)

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> StagedStep:
        """Begin a step on all stages; returns when the first one has computed its layers. Raises Internal for a step
        that samples or copies slots."""
        if copies or len(batch.sample_rows):
            raise Internal("a worker of several stages does not sample")
        # An invalid step fails here, before other processes see it.
        self.own.check(batch)
        processes, began_s = self.ranks, time.monotonic()
        processes.clock.launched(began_s)
        with processes.beginning(step_to_bytes(batch)) as number:
            self.own.forward(batch)
        self._first_stage_s.append(time.monotonic() - began_s)
        # Added to the timeout for a silent stage: other stages may be up to four times as slow as the first one.
        processes.work_ms = int(4 * processes.stages * max(self._first_stage_s) * 1000)
        return StagedStep(batch.num_tokens, self.own.worked, processes, number)


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step of ``tokens`` tokens, computed by the first stage and perhaps not yet by the others. ``number`` is for
    :meth:`RankProcesses.ended`."""

    tokens: int
    own: StageInterval
    processes: StageProcesses
    number: int

    def choose(self, rows: SamplingRows) -> None:
        raise Internal("a worker of several stages does not sample")

    def wait(self) -> Sampled:
        """Wait until all stages have written their KV. Raises BackendLost."""
        processes = self.processes
        others = [StageInterval(*WORKED.unpack(answer)) for answer in processes.ended(self.number)]
        # Ranks of a stage compute simultaneously; use the first one's times.
        stages = [self.own, *others][:: processes.ranks_each]
        waits = processes.clock.finished(stages)
        if log.isEnabledFor(logging.DEBUG):
            times = (
                f"stage {stage} waited {wait * 1000:.1f} ms and computed {(end_s - began_s) * 1000:.1f} ms"
                for stage, (wait, (began_s, end_s)) in enumerate(zip(waits, stages, strict=True))
            )
            log.debug("a step of %d tokens: %s", self.tokens, ", ".join(times))
        return Sampled()
