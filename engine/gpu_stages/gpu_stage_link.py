"""Passes the rows of the residual stream from the GPU of one stage to that of the next one.

    stage s: give --a broadcast in a group of two--> stage s + 1: take

Each rank of a stage has a group with the same rank of the next stage (:mod:`pillion.engine.gpu_ranks.rank_group`). By
NCCL rows go from device to device, and neither side's thread waits; by gloo, where stages share a GPU, they go through
host memory. In both a stage's next step begins when the next stage has taken the rows of this one.
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

# In a group of two stages the first one gives rows, and the second one takes them.
GIVES, TAKES = range(2)


@dataclass(frozen=True, slots=True)
class StageRendezvous:
    """Holds the descriptors of the files in memory by which the processes of a worker find each other: one for the
    ranks of each stage, where it has several, and one for each rank between two stages."""

    stages: Sequence[int]
    between: Sequence[Sequence[int]]

    @classmethod
    def create(cls, stages: int, ranks: int) -> StageRendezvous:
        """Make the files."""

        def made(count: int) -> list[int]:
            return [os.memfd_create("pillion-rendezvous", os.MFD_CLOEXEC) for _ in range(count)]

        return cls(made(stages if ranks > 1 else 0), [made(ranks) for _ in range(stages - 1)])

    def of(self, place: StagePlace) -> list[int]:
        """Return those of a process, in the order in which a process's share is loaded with them."""
        beside = self.between[max(place.stage - 1, 0) : place.stage + 1]
        return [*self.stages[place.stage : place.stage + 1], *(each[place.rank] for each in beside)]

    def close(self) -> None:
        """Close the descriptors; processes that have met keep their own."""
        for descriptor in (*self.stages, *(one for each in self.between for one in each)):
            os.close(descriptor)


class GpuStageLink:
    """Represents one process's ends of what it has in common with the stages beside its own: ``before`` leads to the
    stage before, ``after`` to the next one; None at the ends of the pipeline. :meth:`join` makes it."""

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
        """Meet the stages beside ``place``. ``rendezvous`` are the descriptors by which it finds the stage before,
        where there is one, and then the next one; the rest is what :meth:`GpuRankGroup.join` takes. Raises
        ConfigError."""
        given = iter(rendezvous)

        def group(side: int) -> GpuRankGroup:
            # A group takes a shard for its rank and its size alone: two neighbouring stages are ranks 0 and 1 of two.
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

    def take(self, rows: torch.Tensor) -> None:
        """Queue, or awaits, that the contiguous ``rows`` are those of the stage before. The first stage has none
        before it. Raises BackendLost."""
        if self._before is not None:
            self._before.spread(rows.view(torch.uint8))

    def give(self, rows: torch.Tensor) -> None:
        """Return the contiguous ``rows`` to the next stage, where there is one; what this process queues on the device
        afterwards may change them. Raises BackendLost."""
        if self._after is not None:
            self._after.spread(rows.view(torch.uint8))

    def wait(self, event: Any) -> None:
        """Wait for a CUDA event: in the first stage for a limited time, in the others as long as the first one lives.
        Raises BackendLost if the device failed, or another process is lost."""
        self._groups[0].wait(event)

    def begin_steps(self) -> None:
        """Wait for the stages beside this one. From then on a wait may take as long as in steps."""
        for group in self._groups:
            group.begin_steps()

    def close(self) -> None:
        """Leave the other stages, without waiting for them. Idempotent."""
        for group in self._groups:
            group.close()
