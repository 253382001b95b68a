"""Transfer of the residual stream's rows from one stage's GPU to the next one's.

    stage s: give --a broadcast in a group of two--> stage s + 1: take

Each rank of a stage has a group with the same rank of the next stage (:mod:`pillion.engine.gpu_ranks.rank_group`). NCCL
copies from device to device without blocking; gloo, for stages that share a GPU, copies through host memory. Either
way, a stage's next step begins when the next stage has received the rows of this one.
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

GIVES, TAKES = range(2)


@dataclass(frozen=True, slots=True)
class StageRendezvous:
    """Descriptors of files in memory for joining a worker's processes: one for the ranks of each stage, if several, and
    one per rank between two stages."""

    stages: Sequence[int]
    between: Sequence[Sequence[int]]

    @classmethod
    def create(cls, stages: int, ranks: int) -> StageRendezvous:

        def made(count: int) -> list[int]:
            return [os.memfd_create("pillion-rendezvous", os.MFD_CLOEXEC) for _ in range(count)]

        return cls(made(stages if ranks > 1 else 0), [made(ranks) for _ in range(stages - 1)])

    def of(self, place: StagePlace) -> list[int]:
        """Return those of a process, in the order of :func:`load_share_of`."""
        beside = self.between[max(place.stage - 1, 0) : place.stage + 1]
        return [*self.stages[place.stage : place.stage + 1], *(each[place.rank] for each in beside)]

    def close(self) -> None:
        """Close the descriptors; joined processes keep their own."""
        for descriptor in (*self.stages, *(one for each in self.between for one in each)):
            os.close(descriptor)


class GpuStageLink:
    """One process's connections to the adjacent stages: ``before`` and ``after``, None at the ends of the pipeline.
    Made by :meth:`join`."""

    def __init__(self, before: GpuRankGroup | None, after: GpuRankGroup | None) -> None:
        """Own the groups from now on."""
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
        """Join the stages adjacent to ``place``. ``rendezvous``: descriptors for the stage before, if any, then for the
        next one; the rest as in :meth:`GpuRankGroup.join`. Raises ConfigError."""
        given = iter(rendezvous)

        def group(side: int) -> GpuRankGroup:
            # Only rank and size of the shard matter: adjacent stages are ranks 0 and 1 of two.
            shard = ModelShard(range(0), side, 2)
            return GpuRankGroup.join(
                shard, next(given), device, own_device=own_device, aborted=aborted, name=place.name
            )

        before = group(TAKES) if place.stage else None
        try:
            return cls(before, group(GIVES) if place.stage < place.stages - 1 else None)
        except BaseException:
            if before is not None:
                before.close()
            raise

    def receive(self, rows: torch.Tensor) -> None:
        """Receive the stage before's rows into the contiguous ``rows``; a no-op in the first stage. Raises
        BackendLost."""
        if self._before is not None:
            self._before.broadcast(rows.view(torch.uint8))

    def send(self, rows: torch.Tensor) -> None:
        """Send the contiguous ``rows`` to the next stage, if any; work queued later may change them. Raises
        BackendLost."""
        if self._after is not None:
            self._after.broadcast(rows.view(torch.uint8))

    def wait(self, event: Any) -> None:
        """Wait for a CUDA event: with a limit in the first stage, in others as long as the first one lives. Raises
        BackendLost if the device failed, or a process is lost."""
        self._groups[0].wait(event)

    def begin_steps(self) -> None:
        """Wait for the adjacent stages, then limit waits to those of steps."""
        for group in self._groups:
            group.begin_steps()

    def close(self) -> None:
        """Leave the other stages without waiting for them. Idempotent."""
        for group in self._groups:
            group.close()
