"""Layers with recurrent state on GPUs: calls of their kernels. The pieces of states are in slots of the pool.

    rows --gate, convolve, gate--> convolved                                                                 (LFM2)

    rows --linear.in--> made --convolve--> mixed --unit length--> mixed --solve chunks, delta rule--> remembered
    rows --linear.rates--> rates --> learns, forgets              remembered, gates of made --norm, gate--> gated
    rows --down--> narrow --up--> forgets, or gates             (Kimi-Linear, in place of a part of the matrices above)

    rows --linear.in--> made --convolve--> mixed --state space--> remembered --gate, norm--> gated

    rows --linear.in--> made --convolve--> mixed --scan--> remembered, gates of made --gate--> gated
    mixed --linear.sides--> sides --norms--> narrow, writes, reads   narrow --linear.steps--> steps (Jamba, for scans)

The output projection and the residual stream are gpu_decoder.py's. All layers share buffers of the size of the largest
layer and step. A rank has some of the heads, and the channels of convolutions that they need; the squares of a norm
group that is divided over ranks are all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.gpu_states.state_record import StateRecord
from pillion.engine.models.layer_operations import (
    DeltaRule,
    LayerTensor,
    SelectiveScan,
    ShortConvolution,
    StateOperation,
    StateSpace,
)
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.models.state_layout import LayerPieces
from pillion.kernels.gpu.launch import next_power_of_2
from pillion.kernels.gpu.rows.norms import rms_norm
from pillion.kernels.gpu_states.gpu_convolutions import convolve
from pillion.kernels.gpu_states.gpu_delta_rule import DeltaShape, delta_rule, forget_factors, prepare_rows
from pillion.kernels.gpu_states.gpu_gates import group_squares, norm_gated
from pillion.kernels.gpu_states.gpu_selective_scan import ScanShape, selective_scan
from pillion.kernels.gpu_states.gpu_state_spaces import SpaceShape, state_space

# Multiplies rows by the layer's matrix of a name, into an output buffer, which it returns.
Product = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]


class _SharedGroup(NamedTuple):
    """A norm group divided over ranks: its index, the number of groups, and the values per group in the whole model."""

    number: int
    groups: int
    values: int


@dataclass(frozen=True, slots=True)
class _OwnLayer:
    """This process's part of a layer with recurrent state.

    Attributes:
        inputs, memory, sides: locations (page, offset in values) of the state's pieces, int32 [pieces, 2]: last inputs
        of
            the convolution; the heads' matrices; per-head values of the rows since the current chunk began.
        shape: of the heads; None for a short convolution.
        channels: number of channels that the convolution reads.
        columns: output column of each channel, -1 for none; None if they are in order.
        widths: row width of each buffer, by name.
        group: norm group that is divided over ranks, if any.
    """

    inputs: torch.Tensor
    memory: torch.Tensor
    sides: torch.Tensor
    shape: DeltaShape | SpaceShape | ScanShape | None
    channels: int
    columns: torch.Tensor | None
    widths: dict[str, int]
    group: _SharedGroup | None = None


def _own_layer(operation: StateOperation, pieces: LayerPieces, shard: ModelShard, device: torch.device) -> _OwnLayer:
    """Return this process's part of an operation. ``pieces``: of this process."""
    parts, channels = operation.taps.rows, shard.channels(operation.taps.rows)
    spans = [(start, len(shard.entries(part))) for part, start in zip(parts, channels.starts, strict=True)]
    with_output = [start + offset for start, count in spans for offset in range(count)]
    columns = torch.full((len(channels.numbers),), -1, dtype=torch.int32)
    columns[with_output] = torch.arange(len(with_output), dtype=torch.int32)
    keys, heads = len(shard.state_keys), len(shard.state_heads)
    shape: DeltaShape | SpaceShape | ScanShape | None = None
    group: _SharedGroup | None = None
    match operation:
        case ShortConvolution():
            # The projections lack the channels that pad the last piece.
            columns = columns[: len(with_output)]
            widths = {"made": 3 * len(with_output), "found": len(with_output)}
        case DeltaRule():
            by_rows = operation.forget_up is not None
            rule = DeltaShape(keys, heads, operation.key_dim, operation.head_dim, operation.doubled, by_rows)
            shape, widths = rule, dict(_delta_widths(operation, rule, shard))
        case StateSpace():
            space, values = SpaceShape(heads, operation.head_dim, keys, operation.state_dim), heads * operation.head_dim
            shape, widths = space, {"made": _own_rows(operation.inputs, shard), "mixed": space.mixed}
            widths |= {"remembered": values, "found": values}
            if operation.norm is not None and shard.size > operation.groups:
                whole = operation.heads * operation.head_dim // operation.groups
                group = _SharedGroup(shard.state_keys.start, operation.groups, whole)
                widths["squares"] = next_power_of_2(operation.groups)
        case SelectiveScan():
            values = heads * operation.head_dim
            shape = ScanShape(values, operation.state_dim)
            widths = {"made": _own_rows(operation.inputs, shard), "sides": operation.sides.shape[0]}
            widths |= {"narrow": operation.few, **dict.fromkeys(("mixed", "steps", "remembered", "found"), values)}
    in_order = len(with_output) == len(columns)
    return _OwnLayer(
        inputs=_locations(pieces.inputs, device),
        memory=_locations(pieces.memory, device),
        sides=_locations(pieces.sides, device),
        shape=shape,
        channels=len(columns),
        columns=None if in_order else columns.to(device),
        widths=widths,
        group=group,
    )


def _delta_widths(operation: DeltaRule, shape: DeltaShape, shard: ModelShard) -> Iterator[tuple[str, int]]:
    """Yield the name and row width of each buffer of a delta rule."""
    values = shape.heads * shape.head_dim
    yield from (("made", _own_rows(operation.inputs, shard)), ("rates", _own_rows(operation.rates, shard)))
    yield from (("mixed", shape.mixed), ("remembered", values), ("found", values))
    yield from (("learns", shape.heads), ("forgets", shape.factors))
    ups = [up for up in (operation.forget_up, operation.gate_up) if up is not None]
    if ups:
        yield "narrow", max(up.shape[1] for up in ups)
        yield "few", max(_own_rows(up, shard) for up in ups)


def _own_rows(tensor: LayerTensor, shard: ModelShard) -> int:
    """Return the number of a matrix's rows in this process."""
    return len(shard.indices(tensor.rows))


def _locations(pieces: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Return the pages of pieces and their offsets in float32 values, int32 [pieces, 2]."""
    locations = [(page, offset // 4) for page, offset in pieces]
    return torch.tensor(locations, dtype=torch.int32, device=device).view(-1, 2)


class GpuStates:
    """Buffers of a model's layers with recurrent state, allocated before the pool."""

    def __init__(self, model: GpuModel, layout: KVLayout, max_seqs: int) -> None:
        """Allocate the buffers of ``model`` for steps of up to ``max_seqs`` sequences, whose states are laid out by
        ``layout``."""
        assert layout.state_layout is not None
        self.model, self._layout, self._max_seqs = model, layout, max_seqs
        self.own: dict[int, _OwnLayer] = {}
        for index, layer in model.layers.items():
            pieces = layout.state_layout.layers[index]
            for operation in layer.operations:
                if isinstance(operation, StateOperation):
                    assert pieces is not None
                    self.own[index] = _own_layer(operation, pieces, model.shard, model.device)
        widest: dict[str, int] = {}
        for name, width in (pair for own in self.own.values() for pair in own.widths.items()):
            widest[name] = max(width, widest.get(name, 0))
        # Float32 buffers; others have the model's type.
        self._buffers = {
            name: torch.zeros(
                model.max_tokens * width,
                dtype=torch.float32 if name in ("remembered", "learns", "forgets", "squares") else model.dtype,
                device=model.device,
            )
            for name, width in widest.items()
        }
        rules = [own.shape for own in self.own.values() if isinstance(own.shape, DeltaShape)]
        solved = max((shape.solved_values(model.max_tokens, max_seqs) for shape in rules), default=0)
        self.solved = torch.zeros(solved, dtype=torch.float32, device=model.device)

    def buffer(self, index: int, name: str, count: int) -> torch.Tensor:
        """Return the first ``count`` rows of a buffer, with layer ``index``'s width."""
        width = self.own[index].widths[name]
        return self._buffers[name][: count * width].view(count, width)

    def over(self, pool: torch.Tensor) -> StatesInPool:
        """Return the operations on states in a pool of bytes [slots, block_bytes]."""
        return StatesInPool(self, pool.view(torch.float32), self._layout.state_pages, self._max_seqs)


class StatesInPool:
    """Operations on the recurrent states in one pool. ``record``: the running step's states."""

    def __init__(self, layers: GpuStates, pool: torch.Tensor, pages: int, max_seqs: int) -> None:
        self._layers, model = layers, layers.model
        self._model = model
        self.record = StateRecord(pool, model.max_tokens, max_seqs, pages, model.device)

    def projection_buffer(self, index: int, count: int) -> torch.Tensor:
        """Return the buffer for the projection of ``count`` rows that layer ``index``'s operation reads."""
        return self._layers.buffer(index, "made", count)

    def run(self, index: int, operation: StateOperation, rows: torch.Tensor, product: Product) -> torch.Tensor:
        """Run an operation of layer ``index`` on the step's rows [T, ...], and write the states. Returns rows in a
        shared buffer. ``product`` multiplies by the layer's matrices."""
        match operation:
            case ShortConvolution():
                out = self._buffer(index, "found", rows)
                self._convolve(index, operation.taps, rows, out, gated=True)
                return out
            case DeltaRule():
                return self._delta_rule(index, operation, rows, product)
            case StateSpace():
                return self._state_space(index, operation, rows, product)
            case SelectiveScan():
                return self._selective_scan(index, operation, rows, product)

    def _delta_rule(self, index: int, operation: DeltaRule, rows: torch.Tensor, product: Product) -> torch.Tensor:
        own = self._layers.own[index]
        shape = own.shape
        assert isinstance(shape, DeltaShape)
        made = product(operation.inputs.name, rows, self._buffer(index, "made", rows))
        rates = product(operation.rates.name, rows, self._buffer(index, "rates", rows))
        mixed = self._buffer(index, "mixed", rows)
        self._convolve(index, operation.taps, made[:, : own.channels], mixed)
        decay, shift = (self._vector(index, one) for one in (operation.decay, operation.shift))
        learns, forgets = (self._buffer(index, name, rows) for name in ("learns", "forgets"))
        prepare_rows(mixed, rates, decay, shift, learns, forgets, shape)
        forget_rows = self._low_rank_product(index, operation.forget_down, operation.forget_up, rows, product)
        if forget_rows is not None:
            forget_factors(forget_rows, decay, shift, forgets, shape)
        remembered = self._buffer(index, "remembered", rows)
        delta_rule(
            mixed, learns, forgets, self._layers.solved, remembered, self.record.step, own.memory, own.sides, shape
        )
        gates = self._low_rank_product(index, operation.gate_down, operation.gate_up, rows, product)
        out, norm = self._buffer(index, "found", rows), self._vector(index, operation.norm)
        norm_gated(
            remembered,
            made[:, own.channels :] if gates is None else gates,
            norm,
            out,
            operation.eps,
            groups=shape.heads,
            sigmoid=gates is not None,
        )
        return out

    def _state_space(self, index: int, operation: StateSpace, rows: torch.Tensor, product: Product) -> torch.Tensor:
        own = self._layers.own[index]
        shape = own.shape
        assert isinstance(shape, SpaceShape)
        made = product(operation.inputs.name, rows, self._buffer(index, "made", rows))
        remembered, out = (self._buffer(index, name, rows) for name in ("remembered", "found"))
        values = remembered.shape[1]
        gates, inputs, steps = made.tensor_split([values, values + own.channels], 1)
        mixed = self._buffer(index, "mixed", rows)
        self._convolve(index, operation.taps, inputs, mixed)
        decay, shift, skip = (self._vector(index, one) for one in (operation.decay, operation.shift, operation.skip))
        state_space(mixed, steps, decay, shift, skip, remembered, self.record.step, own.memory, own.sides, shape)
        norm = None if operation.norm is None else self._vector(index, operation.norm)
        first, squares = operation.gate_first, None
        if own.group is not None:
            squares = self._squares(index, own.group, remembered, gates, gate_first=first)
        groups = 1 if norm is None else shape.groups
        norm_gated(remembered, gates, norm, out, operation.eps, groups=groups, gate_first=first, squares=squares)
        return out

    def _selective_scan(
        self, index: int, operation: SelectiveScan, rows: torch.Tensor, product: Product
    ) -> torch.Tensor:
        own, model = self._layers.own[index], self._model
        shape = own.shape
        assert isinstance(shape, ScanShape)
        made = product(operation.inputs.name, rows, self._buffer(index, "made", rows))
        inputs, gates = made.tensor_split([own.channels], 1)
        mixed = self._buffer(index, "mixed", rows)
        self._convolve(index, operation.taps, inputs, mixed)
        sides = product(operation.sides.name, mixed, self._buffer(index, "sides", rows))
        if model.ranks is not None:
            model.ranks.sum(sides, in_order=model.invariant)
        few, writes, reads = sides.tensor_split([operation.few, operation.few + shape.state_dim], 1)
        narrow = self._buffer(index, "narrow", rows)
        for norm, x, out in (
            (operation.step_norm, few, narrow),
            (operation.write_norm, writes, writes),
            (operation.read_norm, reads, reads),
        ):
            weight = model.layers[index].norms[norm.name].weight
            rms_norm(x, weight, out, model.config.rms_norm_eps, model.weights.norm_is_wide)
        steps = product(operation.steps.name, narrow, self._buffer(index, "steps", rows))
        decay, skip = (self._vector(index, one) for one in (operation.decay, operation.skip))
        remembered, out = (self._buffer(index, name, rows) for name in ("remembered", "found"))
        selective_scan(mixed, steps, writes, reads, decay, skip, remembered, self.record.step, own.memory, shape)
        norm_gated(remembered, gates, None, out, 0.0)
        return out

    def _squares(
        self, index: int, group: _SharedGroup, rows: torch.Tensor, gates: torch.Tensor, *, gate_first: bool
    ) -> torch.Tensor:
        """Return the mean squares [T] of a norm group that is divided over ranks."""
        model, squares = self._model, self._buffer(index, "squares", rows)
        assert model.ranks is not None
        group_squares(rows, gates, squares, group.number, group.values, gate_first=gate_first)
        model.ranks.sum(squares, in_order=model.invariant)
        return squares[:, group.number]

    def _convolve(
        self, index: int, taps: LayerTensor, rows: torch.Tensor, out: torch.Tensor, *, gated: bool = False
    ) -> None:
        own, bias = self._layers.own[index], self._model.layers[index].biases[taps.name]
        factors = self._vector(index, taps)[: own.channels]
        bias = None if bias is None else bias[: own.channels]
        convolve(rows, factors, bias, out, self.record.step, own.inputs, gated=gated, columns=own.columns)

    def _low_rank_product(
        self, index: int, down: LayerTensor | None, up: LayerTensor | None, rows: torch.Tensor, product: Product
    ) -> torch.Tensor | None:
        """Return rows times ``down`` times ``up``; None if the model lacks them."""
        if down is None or up is None:
            return None
        narrow, out = (self._buffer(index, name, rows) for name in ("narrow", "few"))
        return product(up.name, product(down.name, rows, narrow), out)

    def _buffer(self, index: int, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self._layers.buffer(index, name, len(rows))

    def _vector(self, index: int, tensor: LayerTensor) -> torch.Tensor:
        values = self._model.layers[index].matrices[tensor.name]
        assert isinstance(values, torch.Tensor)
        return values
