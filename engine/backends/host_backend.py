"""Backends whose steps run on the calling thread: what they add to :class:`Backend`, and how they launch a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.engine.backends.backend import Backend
from pillion.engine.backends.batch import StepBatch
from pillion.engine.sampling.sampler import sample
from pillion.engine.sampling.sampling_rows import SamplingRows
from pillion.engine.scheduling.step_plan import Sampled


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The flight of a step that was run at once."""

    sampled: Sampled

    def wait(self) -> Sampled:
        """Waits for nothing."""
        return self.sampled


class HostBackend(Backend, Protocol):
    """A backend whose steps run on the calling thread, so that their parts can be called one by one.

    The logits of a forward stay until the next one, which may use their memory again.
    """

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [R, vocab_size] of ``sample_rows``, in that order."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots, each source to the target at its place, before the next forward reads them. Targets are
        leased to this worker."""


def run_at_once(
    backend: HostBackend, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows
) -> FinishedStep:
    """Copies, runs and samples before it returns."""
    if copies:
        backend.copy_blocks(*zip(*copies, strict=True))
    return FinishedStep(sample(backend.forward(batch), rows))
