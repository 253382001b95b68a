"""Backend of a stage on the CPU kernels: a forward pass begins with the rows of the stage before, and ends with its
own.

In a stage of several ranks, the backend is a rank's, which synchronizes with the stage's other ranks. No stage returns
logits, since prefill workers do not sample.
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
from pillion.engine.stages.stage_clock import StageInterval
from pillion.engine.stages.stage_rows import StageLink
from pillion.errors import Internal
from pillion.host.core_lending_table import CoreShare
from pillion.kernels.cpu.runtime.program import Program
from pillion.kernels.step import Int32, StepBatch

# For type checkers, the base of StageShare; at run time it precedes one of two backends among the bases.
if TYPE_CHECKING:
    _Backend = CpuBackend
else:
    _Backend = object


class StageShare(_Backend):
    """Mixin that makes a backend's forward pass that of a stage.

    Attributes:
        link: transfers the rows.
        worked: start and end of the last forward pass.
    """

    link: StageLink
    worked = StageInterval(0.0, 0.0)

    def join(self, link: StageLink) -> None:
        """Own the link to adjacent stages from now on. Raises Internal for another model's row size."""
        if link.rows.row_bytes != self.model.plan.hidden.stride:
            raise Internal("the stages have memory for rows of another size")
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
        self.link.receive(self._hidden)
        began_s = time.monotonic()
        super()._run_kernels(program)
        self.worked = StageInterval(began_s, time.monotonic())
        self.link.send(self._hidden)

    def _read_logits(self, count: int, places: npt.NDArray[Any] | None) -> torch.Tensor:
        return torch.empty(0, self.vocab_size)

    def close(self) -> None:
        super().close()
        self.link.close()


class CpuStageBackend(StageShare, CpuBackend):
    """Backend of a stage that is one process."""

    def __init__(
        self, model: CpuModel, threads: int, affinity: Sequence[int], share: CoreShare | None, link: StageLink
    ) -> None:
        CpuBackend.__init__(self, model, threads, affinity, share)
        self.join(link)


class CpuStageRankBackend(StageShare, CpuRankBackend):
    """Backend of one rank of a stage."""

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
