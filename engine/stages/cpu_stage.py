"""Runs a stage on the CPU kernels: its forward pass begins with the rows of the stage before, and ends with its own.

Where a stage is several ranks, its backend is that of a rank, whose forward passes meet those of the stage's other
ranks. No stage gives logits, because prefill workers choose no tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from pillion.engine.backends.backend import Bytes
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import CpuModel
from pillion.engine.ranks.cpu_rank import CpuRankBackend
from pillion.engine.ranks.rank_memory import RankMember
from pillion.engine.stages.stage_clock import Worked
from pillion.engine.stages.stage_rows import StageLink
from pillion.errors import Internal
from pillion.host.core_lending_table import CoreShare
from pillion.kernels.cpu.runtime.program import Program
from pillion.kernels.step import Int32, StepBatch

# A type checker has to know whose methods StageShare calls; at run time it stands before one of two backends.
if TYPE_CHECKING:
    _Backend = CpuBackend
else:
    _Backend = object


class StageShare(_Backend):
    """Makes the forward pass of a backend that of a stage; it stands before that backend among the base classes.

    Attributes:
        link: passes the rows.
        worked: when the last forward pass computed.
    """

    link: StageLink
    worked = Worked(0.0, 0.0)

    def join(self, link: StageLink) -> None:
        """Take the ends of the links to other stages, and owns them from now on. Raises Internal for memory of another
        model."""
        if link.rows.row_bytes != self.model.plan.hidden.stride:
            raise Internal("the stages have memory for rows of another length")
        self.link = link

    def check(self, batch: StepBatch) -> None:
        """Raise Internal for a batch that no stage could run."""
        self.check_step(self._bound_pool(), batch)

    def check_step(self, pool: torch.Tensor, batch: StepBatch) -> None:
        super().check_step(pool, batch)
        if batch.num_tokens > self.link.max_tokens:
            raise Internal(f"{batch.num_tokens} tokens, the stages have memory for {self.link.max_tokens}")

    def _fill(self, pool: torch.Tensor, batch: StepBatch, rows: Int32) -> None:
        super()._fill(pool, batch, rows)
        hidden = self.model.plan.hidden
        self._hidden: Bytes = self.workspace.array(hidden)[: batch.num_tokens * hidden.stride]

    def _run_kernels(self, program: Program) -> None:
        self.link.take(self._hidden)
        began_s = time.monotonic()
        super()._run_kernels(program)
        self.worked = Worked(began_s, time.monotonic())
        self.link.give(self._hidden)

    def _read_logits(self, count: int, places: npt.NDArray[Any] | None) -> torch.Tensor:
        return torch.empty(0, self.vocab_size)

    def close(self) -> None:
        super().close()
        self.link.close()


class CpuStageBackend(StageShare, CpuBackend):
    """Implements the backend of a stage that is one process."""

    def __init__(
        self, model: CpuModel, threads: int, affinity: Sequence[int], share: CoreShare | None, link: StageLink
    ) -> None:
        CpuBackend.__init__(self, model, threads, affinity, share)
        self.join(link)


class CpuStageRankBackend(StageShare, CpuRankBackend):
    """Implements the backend of one rank of a stage."""

    def __init__(
        self,
        model: CpuModel,
        threads: int,
        affinity: Sequence[int],
        share: CoreShare | None,
        link: StageLink,
        member: RankMember,
    ) -> None:
        CpuRankBackend.__init__(self, model, threads, affinity, share, member=member)
        self.join(link)
