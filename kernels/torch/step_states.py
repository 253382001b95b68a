"""Recurrent states of a step's sequences, copied from slots of the pool and back (docs/decisions/states.md).

A sequence's state is float32, layer after layer, in one or more slots of the pool. A step writes the new state into
other slots than it reads the old one from, so that the old one survives if some of the step's tokens are discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from pillion.kernels.step import Int32, LayerState


class StepStates:
    """Copies of S sequences' states for one step, which layers update in place.

    Args:
        shapes: the state of each layer of the model; None for a layer without one.
        query_starts: [S + 1] sequence s owns rows query_starts[s] .. query_starts[s + 1] of the step.
    """

    def __init__(self, shapes: Sequence[LayerState | None], query_starts: Int32) -> None:
        self._shapes = shapes
        self._offsets = [0]
        for shape in shapes:
            self._offsets.append(self._offsets[-1] + (0 if shape is None else shape.values))
        self._rows = [slice(a, b) for a, b in zip(query_starts.tolist(), query_starts[1:].tolist(), strict=False)]
        self._states = torch.zeros(len(self._rows), self._offsets[-1])

    def read(self, pool: torch.Tensor, reads: Int32) -> None:
        """Read the states from slots [S, pages] of ``pool``, uint8 [slots, block_bytes]; a row of -1 is the empty
        state."""
        for state, slots in zip(self._states, reads.tolist(), strict=True):
            if slots[0] >= 0:
                state.copy_(pool[slots].view(-1).view(torch.float32)[: len(state)])

    def write(self, pool: torch.Tensor, writes: Int32) -> None:
        """Write the states into slots [S, pages] of ``pool``, padded with zeros."""
        padded = torch.zeros(writes.shape[1], pool.shape[1] // self._states.itemsize)
        for state, slots in zip(self._states, writes.tolist(), strict=True):
            padded.view(-1)[: len(state)] = state
            pool[slots] = padded.view(torch.uint8)

    def of_layer(self, layer: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield each sequence's rows in the step, its convolution inputs [tokens, channels] before these rows, and its
        recurrent matrices; callers update both in place."""
        shape, first = self._shapes[layer], self._offsets[layer]
        assert shape is not None
        middle = first + prod(shape.inputs)
        for rows, state in zip(self._rows, self._states, strict=True):
            memory = state[middle : self._offsets[layer + 1]].view(shape.memory or (0,))
            yield rows, state[first:middle].view(shape.inputs), memory
