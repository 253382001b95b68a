"""The CPU kernels of layers with recurrent state, whose pieces are in slots of the pool.

    x --conv.in--> convolution_inputs --gate, convolve, gate--> convolved                                  (LFM2)

    x --in--> convolution_inputs --convolve--> mixed --unit length--> units --delta rule--> remembered
    x --rates--> rates --> learns, forgets         remembered, gates of convolution_inputs --norm, gate--> gated
    x --down--> narrow --up--> forgets, or gates   (Kimi-Linear, in place of a part of the matrices above)

    x --in--> convolution_inputs --convolve--> mixed --state space--> remembered --gate, norm--> gated

    x --in--> convolution_inputs --convolve--> mixed --scan--> remembered, gates of convolution_inputs --gate--> gated
    mixed --sides--> sides --norms--> narrow, writes, reads         narrow --steps--> steps       (Jamba, for the scan)

The output projection adds to the residual stream, like attention's. With tensor parallelism, each rank has some of the
heads, and accesses the pieces of these and of the channels that they need. If ranks have parts of a norm group, its
squares are all-reduced first:

    remembered --gate, square--> partial --all-reduce--> squares      remembered, squares --norm--> gated
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pillion.engine.backends.cpu.cpu_operations import OperationBuilder
from pillion.engine.models.layer_operations import (
    DeltaRule,
    LayerTensor,
    SelectiveScan,
    ShortConvolution,
    StateOperation,
    StateSpace,
)
from pillion.engine.models.state_layout import LayerPieces, own_pieces
from pillion.kernels.cpu.language.emit import LOG2E
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.runtime.program import Buffer, Columns, Operation
from pillion.kernels.cpu.states.convolutions import Convolve
from pillion.kernels.cpu.states.delta_rule import PrepareDelta, RunDeltaRule
from pillion.kernels.cpu.states.gates import GroupSquares, NormGated
from pillion.kernels.cpu.states.state_spaces import PrepareSpace, RunSelectiveScan, RunStateSpace
from pillion.kernels.state_pieces import PIECE_CHANNELS, PIECE_COLUMNS

# Returns a buffer for the rows of a builder: all tokens, or sampled rows.
BufferOf = Callable[[OperationBuilder], Buffer]


def in_pieces(channels: int) -> int:
    """Return ``channels`` rounded up to whole pieces."""
    return -(-channels // PIECE_CHANNELS) * PIECE_CHANNELS


def inputs_of(builder: OperationBuilder, name: str, channels: int, first: int) -> Buffer:
    """Return the buffer for the product with the matrix ``name``, wide enough for a convolution that reads ``channels``
    columns, in whole pieces, from ``first`` on."""
    width = max(builder.weights.linear(name).pairs * 32, first + in_pieces(channels))
    return builder.buffer("convolution_inputs", width, "float32")


@dataclass(frozen=True, slots=True)
class NormGroups:
    """Groups of a gated norm: ``count`` groups of ``width`` values per row.

    Attributes:
        own_weights: True if each group has its own weights.
        gate_first: True if the gate is applied before the norm.
        sigmoid: True for a sigmoid gate, False for silu.
        shared: (first group, groups, values per group) in the whole model, if several ranks have parts of a group.
    """

    count: int
    width: int
    own_weights: bool = False
    gate_first: bool = False
    sigmoid: bool = False
    shared: tuple[int, int, int] | None = None


class StateEmitter:
    """Emitter of the kernels of layer ``index`` that read and write its recurrent state."""

    def __init__(self, builder: OperationBuilder, index: int) -> None:
        self._builder, self._prefix = builder, f"layers.{index}."
        layout = builder.layout.state_layout
        pieces = None if layout is None else layout.layers[index]
        assert pieces is not None
        self._pieces: LayerPieces = pieces
        self._shard = builder.shard

    def short_convolution(self, operation: ShortConvolution, x: Buffer) -> Iterator[Operation]:
        """Yield the kernel of a short convolution, from projections ``x`` (gate, output gate, values) to
        :func:`convolved`."""
        channels = channels_of(self._builder, operation)
        yield self._convolve(operation, x, convolved(self._builder, channels), part_bytes=channels * 4)

    def delta_rule(self, operation: DeltaRule, x: Buffer) -> Iterator[Operation]:
        """Yield the kernels of a gated delta rule, from normed ``x`` to :func:`gated`."""
        builder, prefix = self._builder, self._prefix
        heads, keys = self._own_heads()
        channels, values = self._shard.channels(operation.taps.rows), heads * operation.head_dim
        count = len(channels.numbers)
        projected = inputs_of(builder, prefix + operation.inputs.name, count, 0)
        yield from builder.gemm(prefix + operation.inputs.name, x, projected, "store")
        rates = builder.buffer("rates", 2 * heads, "float32")
        yield from builder.gemm(prefix + operation.rates.name, x, rates, "store")
        mixed = builder.buffer("mixed", in_pieces(count), "float32")
        yield self._convolve(operation, projected, mixed)
        of_queries, of_keys, of_values = (Columns(mixed, start * 4) for start in channels.starts)
        lanes = -(-operation.key_dim // LANES) * LANES
        units = builder.buffer("units", 2 * keys * lanes, "float32")
        by_rows = operation.forget_up is not None
        learns = builder.buffer("learns", heads, "float32")
        forgets = builder.buffer("forgets", heads * (operation.key_dim if by_rows else 1), "float32")
        yield from self._low_rank_product(x, operation.forget_down, operation.forget_up, forgets)
        row_buffers = {"units": units, "learns": learns, "forgets": forgets}
        prepare = {
            "queries": of_queries,
            "keys": of_keys,
            "rates": rates,
            "decay": self._decay(operation.decay, heads, operation.key_dim if by_rows else 0),
            "shift": builder.weights.tensors[prefix + operation.shift.name],
            **row_buffers,
            "mixed_stride": mixed.stride,
            "heads_stride": learns.stride,
        }
        shape = keys, heads, operation.key_dim
        yield Operation(PrepareDelta(*shape, operation.doubled, by_rows), prepare, builder.when)
        remembered = builder.buffer("remembered", values, "float32")
        run = {
            **row_buffers,
            "values": of_values,
            "out": remembered,
            "heads_stride": learns.stride,
            **self._locations(self._own_pieces(operation).memory),
        }
        yield Operation(RunDeltaRule(*shape, operation.head_dim, by_rows), run, builder.when)
        gates, sigmoid = Columns(projected, count * 4), operation.gate_up is not None
        if sigmoid:
            gate_rows = builder.buffer("gates", values, "float32")
            yield from self._low_rank_product(x, operation.gate_down, operation.gate_up, gate_rows)
            gates = Columns(gate_rows, 0)
        groups = NormGroups(heads, operation.head_dim, sigmoid=sigmoid)
        yield from self._norm_gated(remembered, gates, operation.norm, operation.eps, groups)

    def _low_rank_product(
        self, x: Buffer, down: LayerTensor | None, up: LayerTensor | None, out: Buffer
    ) -> Iterator[Operation]:
        """Yield the kernels of ``x`` times ``down`` times ``up``, into ``out``; none if the model lacks them."""
        if down is None or up is None:
            return
        narrow = self._builder.buffer("narrow", down.shape[0], self._builder.row_dtype)
        yield from self._builder.gemm(self._prefix + down.name, x, narrow, "act_none")
        yield from self._builder.gemm(self._prefix + up.name, narrow, out, "store")

    def state_space(self, operation: StateSpace, x: Buffer) -> Iterator[Operation]:
        """Yield the kernels of a state space (Mamba-2), from normed ``x`` to :func:`gated`."""
        builder, prefix, tensors = self._builder, self._prefix, self._builder.weights.tensors
        heads, groups = self._own_heads()
        channels, values = self._shard.channels(operation.taps.rows), heads * operation.head_dim
        count = len(channels.numbers)
        # Time steps, the last columns, are read in whole vectors, which need less padding than whole pieces.
        projected = inputs_of(builder, prefix + operation.inputs.name, count + heads, values)
        yield from builder.gemm(prefix + operation.inputs.name, x, projected, "store")
        mixed = builder.buffer("mixed", in_pieces(count), "float32")
        yield self._convolve(operation, Columns(projected, values * 4), mixed)
        times, keeps = (builder.buffer(name, heads, "float32") for name in ("times", "keeps"))
        prepare = {
            "steps": Columns(projected, (values + count) * 4),
            "decay": self._decay(operation.decay, heads),
            "shift": tensors[prefix + operation.shift.name],
            "times": times,
            "keeps": keeps,
            "heads_stride": times.stride,
        }
        yield Operation(PrepareSpace(heads), prepare, builder.when)
        remembered = builder.buffer("remembered", values, "float32")
        of_values, writes, reads = (Columns(mixed, start * 4) for start in channels.starts)
        run = {
            "values": of_values,
            "writes": writes,
            "reads": reads,
            "times": times,
            "keeps": keeps,
            "skip": tensors[prefix + operation.skip.name],
            "out": remembered,
            "mixed_stride": mixed.stride,
            "heads_stride": times.stride,
            **self._locations(self._own_pieces(operation).memory),
        }
        yield Operation(RunStateSpace(heads, operation.head_dim, groups, operation.state_dim), run, builder.when)
        yield from self._norm_gated(
            remembered, Columns(projected, 0), operation.norm, operation.eps, self._normed_groups(operation, values)
        )

    def selective_scan(self, operation: SelectiveScan, x: Buffer) -> Iterator[Operation]:
        """Yield the kernels of a selective scan, from normed ``x`` to :func:`gated`. Ranks have whole pieces of the
        convolution's channels."""
        builder, prefix, tensors = self._builder, self._prefix, self._builder.weights.tensors
        heads, columns = len(self._shard.state_heads), operation.state_dim
        values = heads * operation.head_dim
        projected = inputs_of(builder, prefix + operation.inputs.name, values, 0)
        yield from builder.gemm(prefix + operation.inputs.name, x, projected, "store")
        mixed = builder.buffer("mixed", in_pieces(values), "float32")
        yield self._convolve(operation, projected, mixed)
        narrow = builder.buffer("narrow", operation.few, builder.row_dtype)
        writes, reads = (builder.buffer(name, columns, "float32") for name in ("writes", "reads"))
        yield from self._shared_inputs(operation, mixed, (narrow, writes, reads))
        steps = builder.buffer("steps", values, "float32")
        yield from builder.gemm(prefix + operation.steps.name, narrow, steps, "store")
        decay = tensors[prefix + operation.decay.name][: values * columns].exp() * -LOG2E
        remembered = builder.buffer("remembered", values, "float32")
        run = {
            "values": mixed,
            "steps": steps,
            "writes": writes,
            "reads": reads,
            "decay": decay.view(-1, PIECE_COLUMNS, columns).transpose(1, 2).contiguous(),
            "skip": tensors[prefix + operation.skip.name],
            "out": remembered,
            **self._locations(self._own_pieces(operation).memory),
        }
        yield Operation(RunSelectiveScan(heads, operation.head_dim, columns), run, builder.when)
        yield from self._norm_gated(remembered, Columns(projected, values * 4), None, 0.0, NormGroups(1, values))

    def _shared_inputs(self, operation: SelectiveScan, mixed: Buffer, out: tuple[Buffer, ...]) -> Iterator[Operation]:
        """Yield the kernels from convolved values to inputs that all channels share, normed: of time steps, writes and
        reads. Ranks have parts of the values, so their products are all-reduced."""
        builder, name = self._builder, self._prefix + operation.sides.name
        sides = builder.buffer("sides", operation.sides.shape[0], "float32")
        if builder.collective is None:
            yield from builder.gemm(name, mixed, sides, "store")
        else:
            partial, total = builder.collective.sum(sides, builder.rows_of, builder.when)
            yield from builder.gemm(name, mixed, partial, "store")
            yield total
        first, norms = 0, (operation.step_norm, operation.write_norm, operation.read_norm)
        for norm, rows in zip(norms, out, strict=True):
            (width,) = norm.shape
            yield builder.norm(self._prefix + norm.name, rows, Columns(sides, first * 4), width)
            first += width

    def _normed_groups(self, operation: StateSpace, values: int) -> NormGroups:
        """Return the norm groups of this rank's ``values`` values per row."""
        own, num_groups = self._shard.state_keys, operation.groups
        count = 1 if operation.norm is None else len(own)
        shared = None
        if operation.norm is not None and self._shard.size > num_groups:
            shared = own.start, num_groups, operation.heads * operation.head_dim // num_groups
        return NormGroups(count, values // count, own_weights=True, gate_first=operation.gate_first, shared=shared)

    def _norm_gated(
        self, x: Buffer, gates: Columns, norm: LayerTensor | None, eps: float, groups: NormGroups
    ) -> Iterator[Operation]:
        """Yield the kernels of a gated norm of ``x``, in ``groups``, into :func:`gated`; only of the gate if ``norm``
        is None."""
        out = gated(self._builder, groups.count * groups.width)
        squares, group, group_width = None, 0, 0
        if groups.shared is not None:
            group, count, group_width = groups.shared
            squares = self._builder.buffer("group_squares", count, "float32")
            yield from self._squares(x, gates, squares, groups)
        values = {
            "x": x,
            "gates": gates,
            "weight": None if norm is None else self._builder.weights.tensors[self._prefix + norm.name],
            "out": out,
            "groups": groups.count,
            "width": groups.width,
            "weight_bytes": groups.width * 4 if groups.own_weights else 0,
            "squares": squares,
            "group": group,
            "group_width": group_width,
            "eps": eps,
        }
        shared = squares is not None
        spec = NormGated(self._builder.bf16, groups.gate_first, norm is not None, groups.sigmoid, shared)
        yield Operation(spec, values, self._builder.when)

    def _squares(self, x: Buffer, gates: Columns, out: Buffer, groups: NormGroups) -> Iterator[Operation]:
        """Yield the kernels that sum the squares of this rank's part of a norm group, and all-reduce the sums."""
        builder = self._builder
        assert groups.shared is not None
        assert builder.collective is not None
        partial, total = builder.collective.sum(out, builder.rows_of, builder.when)
        values = {
            "x": x,
            "gates": gates,
            "out": partial,
            "groups": groups.shared[1],
            "group": groups.shared[0],
            "width": groups.width,
        }
        yield Operation(GroupSquares(groups.gate_first), values, builder.when)
        yield total

    def _decay(self, decay: LayerTensor, heads: int, rows: int = 0) -> torch.Tensor:
        """Return the decay rates of ``heads``, whose logarithms the model stores, times log2(e) for the kernels;
        repeated ``rows`` times per head if the rows of a head's matrix have separate decays."""
        rates = self._builder.weights.tensors[self._prefix + decay.name].exp() * -LOG2E
        return rates[:heads].repeat_interleave(rows) if rows else rates

    def _own_heads(self) -> tuple[int, int]:
        """Return this process's number of the layer's heads, and of key heads."""
        return len(self._shard.state_heads), len(self._shard.state_keys)

    def _own_pieces(self, operation: StateOperation) -> LayerPieces:
        """Return the locations of the pieces of this process's channels and heads."""
        return own_pieces(self._pieces, operation, self._shard)

    def _convolve(self, operation: StateOperation, x: Buffer | Columns, out: Buffer, part_bytes: int = 0) -> Operation:
        """Return the operation that convolves ``x``. With ``part_bytes``, ``x`` has three parts that many bytes apart:
        the product of the first and the third is convolved, and the result multiplied by the second."""
        taps, tensors, gated = operation.taps, self._builder.weights.tensors, part_bytes > 0
        name, pieces = self._prefix + taps.name, self._own_pieces(operation).inputs
        bias = tensors.get(f"{name}.bias")
        values = {
            "x": x,
            "taps": tensors[name],
            "bias": bias,
            "out": out,
            "part_bytes": part_bytes,
            "pieces": len(pieces),
            **self._locations(pieces),
        }
        spec = Convolve(taps.shape[1], bias is not None, gated, gated and self._builder.bf16)
        return Operation(spec, values, self._builder.when)

    def _locations(self, pieces: tuple[tuple[int, int], ...]) -> dict[str, Any]:
        """Return the kernel arguments that locate ``pieces`` (page, offset)."""
        return {"places": torch.tensor(pieces, dtype=torch.int32), "slot_bytes": self._builder.layout.block_bytes}


def gated(builder: OperationBuilder, values: int) -> Buffer:
    """Return the buffer for the gated outputs of heads with states."""
    return builder.buffer("gated", values, builder.row_dtype)


def channels_of(builder: OperationBuilder, operation: ShortConvolution) -> int:
    """Return the number of channels of a short convolution in this process."""
    (part,) = operation.taps.rows
    return len(builder.shard.entries(part))


def convolved(builder: OperationBuilder, channels: int) -> Buffer:
    """Return the buffer for the output of a short convolution."""
    return builder.buffer("convolved", in_pieces(channels), builder.row_dtype)
