"""Describes what a GPU's steps need of layers that carry a state from token to token."""

from __future__ import annotations

from typing import Protocol

import torch

from pillion.engine.backends.gpu.gpu_step import StepShape
from pillion.engine.models.layer_operations import DeltaRule, ShortConvolution, StateSpace
from pillion.kernels.step import StateSlots, StepBatch

StateOperation = ShortConvolution | DeltaRule | StateSpace


class PoolStates(Protocol):
    """Represents the states of a model's layers in the slots of one pool, and those of the step that runs."""

    def check(self, states: StateSlots | None, num_seqs: int) -> None:
        """Raises Internal for slots that the pool does not have, and where a step of so many sequences names none."""

    def send(self, batch: StepBatch, shape: StepShape) -> None:
        """Begins the copy of what a step's kernels read of its states on the current stream."""

    def clear(self) -> None:
        """Makes the next step one without sequences, which reads and writes no state."""

    def run(self, index: int, operation: StateOperation, rows: torch.Tensor) -> torch.Tensor:
        """Computes an operation of layer ``index`` over the step's rows [T, ...], and writes their states. Returns rows
        of a buffer that all layers share."""


class StateLayers(Protocol):
    """Represents the layers of a model that have states, with their buffers, which are made before there is a pool."""

    def room(self, count: int, width: int) -> torch.Tensor:
        """Returns the buffer for a product of ``count`` rows that such a layer reads."""

    def over(self, pool: torch.Tensor) -> PoolStates:
        """Returns the states in a pool of bytes [slots, block_bytes]."""
