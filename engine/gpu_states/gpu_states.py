"""Calls the GPU kernels of layers that carry a state from token to token, whose pieces lie in slots of the pool.

    rows --gate, convolve, gate--> convolved                                                                 (LFM2)

    rows --linear.in--> made --convolve--> mixed --unit length--> mixed --solve chunks, delta rule--> remembered
    rows --linear.rates--> rates --> learns, forgets              remembered, gates of made --norm, gate--> gated
    rows --down--> narrow --up--> forgets, or gates             (Kimi-Linear, in place of a part of the matrices above)

    rows --linear.in--> made --convolve--> mixed --state space--> remembered --gate, norm--> gated

The product after them, and its sum with the residual stream, are the model's. Buffers are those of the largest layer,
for steps of the most tokens, and all layers share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.gpu.gpu_model import GpuMatrix, GpuModel
from pillion.engine.gpu_states.state_record import StateRecord
from pillion.engine.models.layer_operations import DeltaRule, LayerTensor, ShortConvolution, StateSpace
from pillion.kernels.gpu_states.gpu_convolutions import convolve
from pillion.kernels.gpu_states.gpu_delta_rule import DeltaShape, delta_rule, forget_factors, prepare_rows
from pillion.kernels.gpu_states.gpu_gates import norm_gated
from pillion.kernels.gpu_states.gpu_state_spaces import SpaceShape, state_space

StateOperation = ShortConvolution | DeltaRule | StateSpace
# Pieces' places are in values of this many bytes.
_VALUE_BYTES = 4
# These buffers are float32, and the others have the type of the model.
_WIDE = ("remembered", "learns", "forgets")


def delta_shape(operation: DeltaRule) -> DeltaShape:
    """Returns the heads of a delta rule as its kernels have them."""
    heads = operation.key_heads, operation.heads, operation.key_dim, operation.head_dim
    return DeltaShape(*heads, operation.doubled, operation.forget_up is not None)


def _widths(operation: StateOperation) -> Iterator[tuple[str, int]]:
    """Yields the buffers that an operation needs, and how many values a row of each has."""
    match operation:
        case ShortConvolution(taps):
            yield from (("made", 3 * taps.shape[0]), ("found", taps.shape[0]))
        case DeltaRule():
            shape, values = delta_shape(operation), operation.heads * operation.head_dim
            yield from (("made", operation.inputs.shape[0]), ("rates", operation.rates.shape[0]))
            yield from (("mixed", shape.mixed), ("remembered", values), ("found", values))
            yield from (("learns", shape.heads), ("forgets", shape.factors))
            if operation.forget_down is not None and operation.forget_up is not None:
                few, many = operation.forget_down.shape[0], operation.forget_up.shape[0]
                yield from (("narrow", few), ("few", many))
            if operation.gate_down is not None and operation.gate_up is not None:
                yield from (("narrow", operation.gate_down.shape[0]), ("few", operation.gate_up.shape[0]))
        case StateSpace():
            values = operation.heads * operation.head_dim
            yield from (("made", operation.inputs.shape[0]), ("mixed", _space_shape(operation).mixed))
            yield from (("remembered", values), ("found", values))


def _space_shape(operation: StateSpace) -> SpaceShape:
    return SpaceShape(operation.heads, operation.head_dim, operation.groups, operation.state_dim)


@dataclass(frozen=True, slots=True)
class _Places:
    """Holds where the pieces of a layer's state are, int32 [pieces, 2]: those of its convolution's last inputs, those
    of its matrices, and those of the rows since a chunk began that heads have beside values."""

    inputs: torch.Tensor
    memory: torch.Tensor
    sides: torch.Tensor


class GpuStates:
    """Holds the buffers of a model's layers that have states, which are made before there is a pool."""

    def __init__(self, model: GpuModel, layout: KVLayout, max_seqs: int) -> None:
        """Makes the buffers of ``model``, whose states lie in slots as ``layout`` says, for steps of at most so many
        sequences."""
        assert layout.state_layout is not None
        self.model, self._layout, self._max_seqs = model, layout, max_seqs
        every = [one for layer in model.layers.values() for one in layer.operations if isinstance(one, StateOperation)]
        widest: dict[str, int] = {}
        for name, width in (pair for operation in every for pair in _widths(operation)):
            widest[name] = max(width, widest.get(name, 0))
        self._buffers = {
            name: torch.zeros(
                model.max_tokens * width,
                dtype=torch.float32 if name in _WIDE else model.dtype,
                device=model.device,
            )
            for name, width in widest.items()
        }
        rules = [delta_shape(one) for one in every if isinstance(one, DeltaRule)]
        solved = max((shape.solved_values(model.max_tokens, max_seqs) for shape in rules), default=0)
        self.solved = torch.zeros(solved, dtype=torch.float32, device=model.device)
        self.places: dict[int, _Places] = {}
        for index, pieces in enumerate(layout.state_layout.layers):
            if pieces is not None:
                parts = (self._values(part) for part in (pieces.inputs, pieces.memory, pieces.sides))
                self.places[index] = _Places(*parts)

    def _values(self, pieces: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Returns the pages of pieces, and their places there in values, int32 [pieces, 2]."""
        places = [(page, offset // _VALUE_BYTES) for page, offset in pieces]
        return torch.tensor(places, dtype=torch.int32, device=self.model.device).view(-1, 2)

    def buffer(self, name: str, count: int, width: int) -> torch.Tensor:
        """Returns the first ``count`` rows of a buffer, as if it had so many values a row."""
        return self._buffers[name][: count * width].view(count, width)

    def over(self, pool: torch.Tensor) -> StatesInPool:
        """Returns what reads and writes layers' states in the slots of a pool of bytes [slots, block_bytes]."""
        return StatesInPool(self, pool.view(torch.float32), self._layout.state_pages, self._max_seqs)


class StatesInPool:
    """Holds the states of a model's layers in the slots of one pool; ``record`` has those of the step that runs."""

    def __init__(self, layers: GpuStates, pool: torch.Tensor, pages: int, max_seqs: int) -> None:
        self._layers, model = layers, layers.model
        self._model = model
        self.record = StateRecord(pool, model.max_tokens, max_seqs, pages, model.device)

    def room(self, count: int, width: int) -> torch.Tensor:
        """Returns the buffer for a product of ``count`` rows that a layer with a state reads."""
        return self._layers.buffer("made", count, width)

    def run(self, index: int, operation: StateOperation, rows: torch.Tensor) -> torch.Tensor:
        """Computes an operation of layer ``index`` over the step's rows [T, ...], and writes their states. Returns rows
        of a buffer that all layers share."""
        match operation:
            case ShortConvolution():
                out = self._buffer("found", rows, operation.taps.shape[0])
                self._convolve(index, operation.taps, rows, out, gated=True)
                return out
            case DeltaRule():
                return self._delta_rule(index, operation, rows)
            case StateSpace():
                return self._state_space(index, operation, rows)

    def _delta_rule(self, index: int, operation: DeltaRule, rows: torch.Tensor) -> torch.Tensor:
        shape, values = delta_shape(operation), operation.heads * operation.head_dim
        made = self._product(index, operation.inputs, rows, "made")
        rates = self._product(index, operation.rates, rows, "rates")
        mixed = self._buffer("mixed", rows, shape.mixed)
        self._convolve(index, operation.taps, made[:, : shape.mixed], mixed)
        decay, shift = (self._vector(index, one) for one in (operation.decay, operation.shift))
        learns, forgets = self._buffer("learns", rows, shape.heads), self._buffer("forgets", rows, shape.factors)
        prepare_rows(mixed, rates, decay, shift, learns, forgets, shape)
        few = self._of_few(index, operation.forget_down, operation.forget_up, rows)
        if few is not None:
            forget_factors(few, decay, shift, forgets, shape)
        remembered = self._buffer("remembered", rows, values)
        places, solved = self._layers.places[index], self._layers.solved
        step = self.record.step
        delta_rule(mixed, learns, forgets, solved, remembered, step, places.memory, places.sides, shape)
        # The buffer of factors' products is free again.
        gates = self._of_few(index, operation.gate_down, operation.gate_up, rows)
        out, norm = self._buffer("found", rows, values), self._vector(index, operation.norm)
        norm_gated(
            remembered,
            made[:, shape.mixed :] if gates is None else gates,
            norm,
            out,
            operation.eps,
            groups=operation.heads,
            sigmoid=gates is not None,
        )
        return out

    def _state_space(self, index: int, operation: StateSpace, rows: torch.Tensor) -> torch.Tensor:
        shape, values = _space_shape(operation), operation.heads * operation.head_dim
        made = self._product(index, operation.inputs, rows, "made")
        gates, inputs, steps = made.tensor_split([values, values + shape.mixed], 1)
        mixed = self._buffer("mixed", rows, shape.mixed)
        self._convolve(index, operation.taps, inputs, mixed)
        decay, shift, skip = (self._vector(index, one) for one in (operation.decay, operation.shift, operation.skip))
        remembered = self._buffer("remembered", rows, values)
        places, step = self._layers.places[index], self.record.step
        state_space(mixed, steps, decay, shift, skip, remembered, step, places.memory, places.sides, shape)
        out = self._buffer("found", rows, values)
        norm = None if operation.norm is None else self._vector(index, operation.norm)
        groups = 1 if norm is None else operation.groups
        norm_gated(remembered, gates, norm, out, operation.eps, groups=groups, gate_first=operation.gate_first)
        return out

    def _convolve(
        self, index: int, taps: LayerTensor, rows: torch.Tensor, out: torch.Tensor, *, gated: bool = False
    ) -> None:
        bias = self._model.layers[index].biases[taps.name]
        inputs = self._layers.places[index].inputs
        convolve(rows, self._vector(index, taps), bias, out, self.record.step, inputs, gated=gated)

    def _of_few(
        self, index: int, down: LayerTensor | None, up: LayerTensor | None, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the product of the rows with one matrix and then with another; None where there are none."""
        if down is None or up is None:
            return None
        return self._product(index, up, self._product(index, down, rows, "narrow"), "few")

    def _product(self, index: int, matrix: LayerTensor, rows: torch.Tensor, buffer: str) -> torch.Tensor:
        """Multiplies rows by a matrix of a layer into a buffer."""
        out = self._buffer(buffer, rows, matrix.shape[0])
        return self._model.product(
            rows, self._tensor(index, matrix), self._model.layers[index].biases[matrix.name], out
        )

    def _buffer(self, name: str, rows: torch.Tensor, width: int) -> torch.Tensor:
        return self._layers.buffer(name, len(rows), width)

    def _tensor(self, index: int, tensor: LayerTensor) -> GpuMatrix:
        return self._model.layers[index].matrices[tensor.name]

    def _vector(self, index: int, tensor: LayerTensor) -> torch.Tensor:
        found = self._tensor(index, tensor)
        assert isinstance(found, torch.Tensor)
        return found
