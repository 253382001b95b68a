"""Backends whose steps run on the calling thread: what they add to :class:`Backend`, and how they launch a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.engine.backends.backend import Backend
from pillion.engine.backends.batch import StepBatch
from pillion.engine.sampling.sampler import sample
from pillion.engine.sampling.sampling_rows import Sampled, SamplingRows


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was run when it was launched."""

    sampled: Sampled

    def wait(self) -> Sampled:
        """Returns the results at once."""
        return self.sampled


class HostBackend(Backend, Protocol):
    """A backend whose steps run on the calling thread, so that forward pass and copies can be called one by one.

    The logits of a forward pass stay valid until the next one, which may use their memory again.
    """

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Writes the batch's KV and returns float32 logits [R, vocab_size] of ``sample_rows``, in that order."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole slots, sources[i] to targets[i], before the next forward pass reads them. The targets are leased
        to this worker.
        """


def run_at_once(
    backend: HostBackend, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows
) -> FinishedStep:
    """Launches a step by running it: copies blocks, runs the forward pass and samples before it returns."""
    if copies:
        backend.copy_blocks(*zip(*copies, strict=True))
    return FinishedStep(sample(backend.forward(batch), rows))
