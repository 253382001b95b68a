"""Copies of the states of a step's sequences from slots of the pool and back (docs/decisions/states.md).

A sequence's state is float32, layer after layer, in as many slots as it needs, anywhere in the pool. A step reads it
from some slots and writes it into others, so that the old state survives a step whose tokens are partly discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from pillion.kernels.step import Int32, LayerState


class StepStates:
    """The states of S sequences for one step, copies that layers change in place.

    Args:
        shapes: the state of each layer of the model; None for a layer without one.
        query_starts: [S + 1] sequence s owns rows query_starts[s] .. query_starts[s + 1] of the step.
    """

    def __init__(self, shapes: Sequence[LayerState | None], query_starts: Int32) -> None:
        self._shapes = shapes
        self._places = [0]
        for shape in shapes:
            self._places.append(self._places[-1] + (0 if shape is None else shape.values))
        self._rows = [slice(a, b) for a, b in zip(query_starts.tolist(), query_starts[1:].tolist(), strict=False)]
        self._states = torch.zeros(len(self._rows), self._places[-1])

    def read(self, pool: torch.Tensor, reads: Int32) -> None:
        """Read the states from slots [S, pages] of ``pool``, uint8 [slots, block_bytes]; a row of -1 is the empty
        state."""
        for state, slots in zip(self._states, reads.tolist(), strict=True):
            if slots[0] >= 0:
                state.copy_(pool[slots].view(-1).view(torch.float32)[: len(state)])

    def write(self, pool: torch.Tensor, writes: Int32) -> None:
        """Write the states into slots [S, pages] of ``pool``, padded with zeros."""
        filled = torch.zeros(writes.shape[1], pool.shape[1] // self._states.itemsize)
        for state, slots in zip(self._states, writes.tolist(), strict=True):
            filled.view(-1)[: len(state)] = state
            pool[slots] = filled.view(torch.uint8)

    def of_layer(self, layer: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield for each sequence its rows in the step, the last inputs [tokens, channels] of the layer's convolution
        before them, and the layer's matrices; both are changed in place."""
        shape, first = self._shapes[layer], self._places[layer]
        assert shape is not None
        middle = first + prod(shape.inputs)
        for rows, state in zip(self._rows, self._states, strict=True):
            memory = state[middle : self._places[layer + 1]].view(shape.memory or (0,))
            yield rows, state[first:middle].view(shape.inputs), memory
