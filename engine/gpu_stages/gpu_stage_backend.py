"""Backend of a pipeline stage on a GPU.

    receive rows --> run the stage's layers, which write KV into the pool --> wait for them --> send rows

The rows of the residual stream are sent outside of CUDA graphs and without padding, so stages need not agree on graphs.
Within a stage of several ranks, sums are all-reduced (``engine/gpu_ranks``).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.gpu.device_memory import event_on
from pillion.engine.backends.gpu.gpu_backend import BoundPool, GpuBackend, GpuLimits
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.gpu.gpu_step import StepShape
from pillion.engine.gpu_stages.gpu_stage_link import GpuStageLink
from pillion.engine.stages.stage_clock import StageInterval
from pillion.kernels.step import SamplingRows, StepBatch


class GpuStageBackend(GpuBackend):
    """:class:`pillion.engine.stages.staged_backend.StageBackend` on a GPU.

    ``worked``: interval of the last forward pass.
    """

    worked = StageInterval(0.0, 0.0)

    def __init__(
        self,
        model: GpuModel,
        layout: KVLayout,
        limits: GpuLimits,
        *,
        enforce_eager: bool = False,
        link: GpuStageLink,
    ) -> None:
        """Takes ownership of ``link``."""
        super().__init__(model, layout, limits, enforce_eager=enforce_eager)
        self._sampler = None
        self._link = link

    def check(self, batch: StepBatch) -> None:
        """Raise Internal for a batch that the stages would reject."""
        self.check_step(batch)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV, which is complete on return, and send the rows to the next stage. Returns no logits."""
        return self._forward(self._bound_or_raise(), batch)[0]

    def warm_up(self, max_tokens: int) -> None:
        """Capture CUDA graphs over the bound pool, and wait for the adjacent stages."""
        super().warm_up(max_tokens)
        self._link.begin_steps()

    def settle(self) -> None:
        """Wait like :meth:`GpuBackend.settle`; raise BackendLost if a stage is lost meanwhile."""
        if self._model.device.type == "cuda":
            self._link.wait(event_on(self._model.device))
        super().settle()

    def close(self) -> None:
        """Release like :meth:`GpuBackend.close`, and leave the other stages. Idempotent."""
        super().close()
        self._link.close()

    def _forward(
        self, bound: BoundPool, batch: StepBatch, sampling: SamplingRows | None = None
    ) -> tuple[torch.Tensor, bool]:
        return super()._forward(bound, replace(batch, sample_rows=batch.sample_rows[:0]))

    def _compute(self, bound: BoundPool, shape: StepShape, num_tokens: int) -> torch.Tensor:
        rows = self._model.residual[:num_tokens]
        self._link.receive(rows)
        began = self._mark()
        logits = super()._compute(bound, shape, num_tokens)
        self.worked = self._worked_since(began)
        self._link.send(rows)
        return logits

    def _mark(self) -> Any:
        """Return a CUDA event at the end of all queued work; in Triton's interpreter, the time.monotonic()."""
        if self._model.device.type != "cuda":
            return time.monotonic()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._model.device))
        return event

    def _worked_since(self, began: Any) -> StageInterval:
        """Wait for all queued work; return the interval since the mark ``began``."""
        ended = self._mark()
        if isinstance(ended, float):
            return StageInterval(began, ended)
        self._link.wait(ended)
        now = time.monotonic()
        return StageInterval(now - began.elapsed_time(ended) / 1000, now)
