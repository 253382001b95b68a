"""A whole step on the calling thread: how a backend that does not run ahead launches one."""

from __future__ import annotations

from collections.abc import Sequence

from pillion.engine.backends.backend import FinishedStep, HostBackend
from pillion.engine.backends.batch import StepBatch
from pillion.engine.sampling.sampler import sample
from pillion.engine.sampling.sampling_rows import SamplingRows


def run_at_once(
    backend: HostBackend, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows
) -> FinishedStep:
    """Copies, runs and samples before it returns."""
    if copies:
        backend.copy_blocks(*zip(*copies, strict=True))
    return FinishedStep(sample(backend.forward(batch), rows))
