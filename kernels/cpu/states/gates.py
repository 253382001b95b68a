"""Gates and norms of the outputs of recurrent layers, and gates of attention's output.

Strides are bytes from row to row. ``width`` is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.rows.rows import norm_factor, squares_factor


@dataclass(frozen=True, slots=True)
class NormGated(KernelSpec):
    """RMS norm of rows of groups, gated by silu of ``gates``.

    x        [T, groups, width] float32, overwritten
    gates    [T, groups, width] float32
    weight   [width] float32 for each group, ``weight_bytes`` apart
    out      [T, groups, width] of the model's type

    ``gate_first``: gates are applied before the norm, not after. Without ``normed`` rows are only gated, and ``weight``
    is unused. ``sigmoid``: the gate is a sigmoid instead of silu.

    ``shared``: x is this rank's part of the group ``group``, whose ``group_width`` values are divided over ranks;
    ``squares`` [T, groups] are the sums of :class:`GroupSquares` over these ranks.
    """

    layout = RecordLayout(
        "norm_gated",
        pointers=("x", "gates", "weight", "out", "squares"),
        numbers=(
            "groups",
            "width",
            "x_stride",
            "gates_stride",
            "out_stride",
            "weight_bytes",
            "group",
            "group_width",
            "squares_stride",
        ),
        reals=("eps",),
    )

    bf16: bool
    gate_first: bool = False
    normed: bool = True
    sigmoid: bool = False
    shared: bool = False

    def emit(self, call: KernelCall) -> None:
        k, args, size = call.k, call.args, 2 if self.bf16 else 4
        groups, width = args.number("groups"), args.number("width")
        with call.even_share(call.step.number("num_tokens") * groups) as item:
            row, group = item // groups, item % groups
            x = args.pointer("x") + row * args.number("x_stride") + group * width * 4
            gates = args.pointer("gates") + row * args.number("gates_stride") + group * width * 4
            weight = args.pointer("weight") + group * args.number("weight_bytes")
            out = args.pointer("out") + row * args.number("out_stride") + group * width * size
            first = self.gate_first or not self.normed
            if self.shared:
                at = args.pointer("squares") + row * args.number("squares_stride") + args.number("group") * 4
                factor = squares_factor(k, k.broadcast(at), args.number("group_width"), args.real("eps"))
            else:
                gate = (lambda at: _gate_of(call, gates + at, self.sigmoid)) if first else None
                factor = norm_factor(k, _squares(call, x, width, gate), width, args.real("eps"))
            with k.range(width // LANES) as i:
                value = k.load(x + i * VECTOR_BYTES)
                if self.normed:
                    value = value * factor * k.load(weight + i * VECTOR_BYTES)
                if not first:
                    value = value * _gate_of(call, gates + i * VECTOR_BYTES, self.sigmoid)
                k.store_float(out + i * (LANES * size), value, self.bf16)


@dataclass(frozen=True, slots=True)
class GroupSquares(KernelSpec):
    """Sum of squares of this rank's part of a group that is divided over ranks: that of ``x`` [T, width], in the column
    ``group`` of ``out`` [T, groups] float32; other columns become 0. With ``gate_first``, x is gated first, in
    place."""

    layout = RecordLayout(
        "group_squares",
        pointers=("x", "gates", "out"),
        numbers=("groups", "group", "width", "x_stride", "gates_stride", "out_stride"),
    )

    gate_first: bool

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        with call.even_share(call.step.number("num_tokens")) as row:
            x = args.pointer("x") + row * args.number("x_stride")
            gates = args.pointer("gates") + row * args.number("gates_stride")
            out = args.pointer("out") + row * args.number("out_stride")
            gate = (lambda at: _gate_of(call, gates + at)) if self.gate_first else None
            squares = _squares(call, x, args.number("width"), gate)
            with k.range(args.number("groups")) as group:
                k.store_first(out + group * 4, k.vector(0.0))
            k.store_first(out + args.number("group") * 4, k.sum(squares))


def _squares(call: KernelCall, x: Ptr, width: Int, gate: Callable[[Int], Vec] | None) -> Vec:
    """Return the sums of squares of ``width`` values, per lane. With ``gate``, a function of the byte offset, the
    values are first multiplied by it, in place."""
    k = call.k
    squares = k.variable(k.vector(0.0))
    with k.range(width // LANES) as i:
        value = k.load(x + i * VECTOR_BYTES)
        if gate is not None:
            value = value * gate(i * VECTOR_BYTES)
            k.store(x + i * VECTOR_BYTES, value)
        squares.value = k.fma(value, value, squares.value)
    total: Vec = squares.value
    return total


def _gate_of(call: KernelCall, at: Ptr, sigmoid: bool = False) -> Vec:
    """Load gates; return their silu, or with ``sigmoid`` their sigmoid."""
    gate = call.k.load(at)
    return call.k.sigmoid(gate) if sigmoid else gate * call.k.sigmoid(gate)


@dataclass(frozen=True, slots=True)
class GateRows(KernelSpec):
    """Product of ``x`` [rows, width], bfloat16 or float32, with the sigmoid of ``gates`` [T, width / each] float32, in
    place. ``each``: values that share a gate, 1 or a multiple of 16."""

    layout = RecordLayout("gate_rows", pointers=("x", "gates"), numbers=("width", "x_stride", "gates_stride"))

    bf16: bool
    rows_of: str = "tokens"
    each: int = 1

    def emit(self, call: KernelCall) -> None:
        k, args, samples = call.k, call.args, call.step.pointer("sample_rows")
        vector_bytes = LANES * (2 if self.bf16 else 4)
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row:
            token = k.load_int(samples + row * 4, 32) if self.rows_of == "samples" else row
            x = args.pointer("x") + row * args.number("x_stride")
            gates = args.pointer("gates") + token * args.number("gates_stride")
            if self.each == 1:
                with k.range(args.number("width") // LANES) as i:
                    self._gate(call, x + i * vector_bytes, k.sigmoid(k.load(gates + i * VECTOR_BYTES)))
            else:
                vectors = self.each // LANES
                with k.range(args.number("width") // self.each) as head:
                    factor = k.sigmoid(k.broadcast(gates + head * 4))
                    with k.range(vectors) as i:
                        self._gate(call, x + (head * vectors + i) * vector_bytes, factor)

    def _gate(self, call: KernelCall, at: Ptr, factor: Vec) -> None:
        call.k.store_float(at, call.k.load_float(at, self.bf16) * factor, self.bf16)
