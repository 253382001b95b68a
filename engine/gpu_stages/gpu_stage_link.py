"""Transfer of the residual stream's rows between the GPUs of adjacent stages.

    stage s: send --broadcast in a group of two--> stage s + 1: receive

Each rank of a stage is in a group with the same rank of the next stage (:mod:`pillion.engine.gpu_ranks.rank_group`).
NCCL copies between devices without blocking; gloo, for stages that share a GPU, copies through host memory. Either way,
a stage's next step starts once the next stage has received the rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.stages.stage_shares import StagePlace


@dataclass(frozen=True, slots=True)
class StageRendezvous:
    """Memfds for joining a worker's processes.

    Attributes:
        stages: one per stage, for its ranks; empty with one rank per stage.
        between: one per rank, for each two adjacent stages.
    """

    stages: Sequence[int]
    between: Sequence[Sequence[int]]

    @classmethod
    def create(cls, stages: int, ranks: int) -> StageRendezvous:
        """Create the memfds for ``stages`` stages of ``ranks`` ranks."""

        def memfds(count: int) -> list[int]:
            return [os.memfd_create("pillion-rendezvous", os.MFD_CLOEXEC) for _ in range(count)]

        return cls(memfds(stages if ranks > 1 else 0), [memfds(ranks) for _ in range(stages - 1)])

    def of(self, place: StagePlace) -> list[int]:
        """Return the fds of a process: for its stage's ranks if several, the previous stage and the next one, if
        any."""
        adjacent = self.between[max(place.stage - 1, 0) : place.stage + 1]
        return [*self.stages[place.stage : place.stage + 1], *(fds[place.rank] for fds in adjacent)]

    def close(self) -> None:
        """Close the fds; joined processes have duplicates."""
        for descriptor in (*self.stages, *(fd for fds in self.between for fd in fds)):
            os.close(descriptor)


class GpuStageLink:
    """One process's connections to the previous and the next stage; None at the ends of the pipeline. Created by
    :meth:`join`."""

    def __init__(self, before: GpuRankGroup | None, after: GpuRankGroup | None) -> None:
        """Takes ownership of the groups."""
        self._before, self._after = before, after
        self._groups = [group for group in (before, after) if group is not None]

    @classmethod
    def join(
        cls,
        place: StagePlace,
        rendezvous: Sequence[int],
        device: torch.device,
        *,
        own_device: bool,
        aborted: Callable[[], bool] = lambda: False,
    ) -> GpuStageLink:
        """Join the stages adjacent to ``place``. ``rendezvous``: fds for the previous stage, if any, and the next one,
        if any; other arguments as in :meth:`GpuRankGroup.join`. Raises ConfigError."""
        fds = iter(rendezvous)

        def group(rank: int) -> GpuRankGroup:
            # Only rank and size of the shard matter: the sender is rank 0 of two, the receiver rank 1.
            shard = ModelShard(range(0), rank, 2)
            return GpuRankGroup.join(shard, next(fds), device, own_device=own_device, aborted=aborted, name=place.name)

        before = group(1) if place.stage else None
        try:
            return cls(before, group(0) if place.stage < place.stages - 1 else None)
        except BaseException:
            if before is not None:
                before.close()
            raise

    def receive(self, rows: torch.Tensor) -> None:
        """Receive the previous stage's rows into the contiguous ``rows``; a no-op in the first stage. Raises
        BackendLost."""
        if self._before is not None:
            self._before.broadcast(rows.view(torch.uint8))

    def send(self, rows: torch.Tensor) -> None:
        """Send the contiguous ``rows`` to the next stage, if any. Work queued later may overwrite them. Raises
        BackendLost."""
        if self._after is not None:
            self._after.broadcast(rows.view(torch.uint8))

    def wait(self, event: Any) -> None:
        """Wait for a CUDA event, in the first stage with a time limit. Raises BackendLost if the device or a process
        fails."""
        self._groups[0].wait(event)

    def begin_steps(self) -> None:
        """Wait for the adjacent stages, and reduce the limit of waits to that of steps."""
        for group in self._groups:
            group.begin_steps()

    def close(self) -> None:
        """Leave the other stages without waiting for them. Idempotent."""
        for group in self._groups:
            group.close()
