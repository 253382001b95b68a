"""Causal depthwise convolution over the last tokens of a sequence.

Channels are divided into pieces of PIECE_CHANNELS. A thread processes a piece through all rows of a sequence; the last
inputs stay in registers. Rows, factors and results are padded to whole pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.states.state_pages import STATE_NUMBERS, STATE_POINTERS, each_sequence_piece
from pillion.kernels.state_pieces import PIECE_CHANNELS

_VECTORS = PIECE_CHANNELS // LANES
_PIECE_BYTES = PIECE_CHANNELS * 4


@dataclass(frozen=True, slots=True)
class Convolve(KernelSpec):
    """Convolution of each sequence's rows; the inputs before them come from its state.

    x          [T, ...] float32: inputs [pieces * PIECE_CHANNELS]. With ``gated`` they are three parts, ``part_bytes``
               apart: the first times the third is convolved, and the second multiplies the result (LFM2)
    taps       [taps, pieces * PIECE_CHANNELS] float32, the last tap for the token itself
    bias       [pieces * PIECE_CHANNELS] float32, with ``bias``
    out        [T, pieces * PIECE_CHANNELS]: float32 after silu; with ``gated`` of the model's type, without silu

    In each channel products are added up from the oldest token to the row's own.
    """

    layout = RecordLayout(
        "convolve",
        pointers=("x", "taps", "bias", "out", *STATE_POINTERS),
        numbers=("x_stride", "part_bytes", "out_stride", "pieces", *STATE_NUMBERS),
    )

    taps: int
    bias: bool
    gated: bool = False
    bf16: bool = False

    def emit(self, call: KernelCall) -> None:
        k, args, vectors, before = call.k, call.args, range(_VECTORS), range(self.taps - 1)
        pieces = args.number("pieces")
        with each_sequence_piece(call, pieces) as (state, piece):
            column, old, new = piece * _PIECE_BYTES, state.old(piece), state.new(piece)
            factors = args.pointer("taps") + column
            rows = [factors + pieces * (tap * _PIECE_BYTES) for tap in range(self.taps)]
            taps = [[k.load(row + v * VECTOR_BYTES) for row in rows] for v in vectors]
            bias = [k.load(args.pointer("bias") + column + v * VECTOR_BYTES) for v in vectors if self.bias]
            inputs = [[k.variable(k.vector(0.0)) for _ in before] for _ in vectors]
            with k.when(state.exists):
                for v in vectors:
                    for token in before:
                        inputs[v][token].value = k.load(old + (token * _PIECE_BYTES + v * VECTOR_BYTES))
            with k.range(state.end, state.begin) as row:
                for v in vectors:
                    source = args.pointer("x") + row * args.number("x_stride") + column + v * VECTOR_BYTES
                    window = [*(variable.value for variable in inputs[v]), self._input(call, source)]
                    total = window[0] * taps[v][0]
                    for value, factor in zip(window[1:], taps[v][1:], strict=True):
                        total = k.fma(value, factor, total)
                    self._store(call, row, piece, v, source, total + bias[v] if self.bias else total)
                    for variable, value in zip(inputs[v], window[1:], strict=True):
                        variable.value = value
            for v in vectors:
                for token in before:
                    k.store(new + (token * _PIECE_BYTES + v * VECTOR_BYTES), inputs[v][token].value)

    def _input(self, call: KernelCall, source: Ptr) -> Vec:
        k = call.k
        return k.load(source) * k.load(source + call.args.number("part_bytes") * 2) if self.gated else k.load(source)

    def _store(self, call: KernelCall, row: Int, piece: Int, vector: int, source: Ptr, total: Vec) -> None:
        k, args = call.k, call.args
        factor = k.load(source + args.number("part_bytes")) if self.gated else k.sigmoid(total)
        lane_bytes = 2 if self.gated and self.bf16 else 4
        out = args.pointer("out") + row * args.number("out_stride")
        at = out + piece * (PIECE_CHANNELS * lane_bytes) + vector * (LANES * lane_bytes)
        k.store_float(at, total * factor, lane_bytes == 2)
