"""Defines how a part of a model exchanges values with the other parts, which other processes run (the room "ranks")."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pillion.engine.backends.backend import BackendLost
from pillion.engine.models.model_shard import ModelShard


class SharedLogits(Protocol):
    """Holds the logits of all parts, each of which has some tokens of the vocabulary."""

    def room(self, rows: int) -> torch.Tensor:
        """Returns the tensor for this part's logits [rows, its tokens]."""

    def gather(self, rows: int) -> list[tuple[range, torch.Tensor]]:
        """Brings the logits that all parts have put into their :meth:`room` to the first part, which returns each
        part's tokens with their logits. The others return nothing."""


class GpuMeeting(Protocol):
    """Represents one process's side of the exchange. All processes make the same calls in the same order, on the thread
    that runs steps.

    Attributes:
        shard: the process's share of the model.
        capturable: whether CUDA graphs may contain the calls.
    """

    @property
    def shard(self) -> ModelShard: ...
    @property
    def capturable(self) -> bool: ...

    def sum(self, values: torch.Tensor) -> None:
        """Adds up the contiguous ``values`` of all processes, in place."""

    def spread(self, values: torch.Tensor) -> None:
        """Copies the first process's contiguous ``values`` into those of the other processes."""

    def meet(self) -> None:
        """Queues a call on the device after which every process has ended what it queued before."""

    def agree(self, fine: bool) -> bool:
        """Waits for all processes; returns whether all of them say ``fine``."""

    def begin_steps(self) -> None:
        """Waits for all processes; from then on no process makes another wait longer than a step."""

    def wait(self, event: Any) -> None:
        """Waits for a CUDA event. Raises BackendLost if the device failed, or another process is lost."""

    def gone(self, reason: str) -> BackendLost:
        """Tells the other processes that this one fails, for ``reason``; returns the error to raise."""

    def logits(self, vocab_size: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> SharedLogits:
        """Makes buffers for logits of up to ``max_rows`` rows."""

    def close(self) -> None:
        """Leaves the other processes, without waiting for them. Idempotent."""
