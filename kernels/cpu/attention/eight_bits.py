"""Quantization of rows of keys and values to 8 bits, and dequantization of lines of their codes.

A row is one token's key or value of one KV head, with a scale (:mod:`pillion.kernels.kv_codes`); a number is its code's
value times its row's scale. Codes are "fp8_e4m3" (4 bits of exponent, 3 of mantissa, no infinities), identical to the
GPU kernels' for the same row (``kernels/gpu/fp8.py``), or "int8" (-127 .. 127). A row with a NaN has the scale NaN.

A line of 64 codes is 4 values of each of 16 lanes, [4 quarters][2 pairs][4 lanes][2 values]
(:mod:`pillion.kernels.cpu.attention.kv_layout`). Codes are exact in bfloat16. For products of bfloat16 pairs both bytes
of a value come from tables, as for int8 weights; elsewhere codes become float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from pillion.kernels.cpu.language.byte_codes import FP8_SHRINK, LINE, LINE_BYTES, fp8_floats, lookup_values
from pillion.kernels.cpu.language.emit import I32, LANE_BYTES, VF, VI, WORDS, Kernel, Pairs, Ptr, Vec, int_lanes
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.kv_codes import MAX_CODES, MIN_SCALE

# Factors by which to multiply results of :func:`widen_to_floats`; int8 codes become the top bytes of its integers.
FLOAT_FACTORS = {"fp8_e4m3": FP8_SHRINK, "int8": 2.0**-24}


def scale_of(k: Kernel, row: Sequence[Vec], kind: str) -> Vec:
    """Return the scale of a row for codes of ``kind``, in all lanes."""
    largest = k.vector(0.0)
    for value in row:
        largest = k.maximum_abs(largest, value)
    # maximum() keeps the NaN of its second argument.
    return k.maximum(k.vector(MIN_SCALE), k.max_abs_lane(largest) / MAX_CODES[kind])


def encode(k: Kernel, value: Vec, kind: str) -> Any:
    """Return the codes of 16 values divided by their row's scale, rounded to nearest, ties to even."""
    b, limit = k.builder, MAX_CODES[kind]
    if kind == "int8":
        whole = k.rounded(k.minimum(k.maximum(value, -limit), limit))
        return b.trunc(k.whole_lanes(whole).ir, LANE_BYTES)
    bits = b.bitcast(value.ir, VI)
    magnitude = k.minimum(Vec(k, b.bitcast(b.and_(bits, int_lanes(0x7FFFFFFF)), VF)), limit)
    magnitude_bits = b.bitcast(magnitude.ir, VI)
    # Round by dropping 20 bits of the mantissa; then change the exponent's bias from 127 to 7.
    odd = b.and_(b.lshr(magnitude_bits, int_lanes(20)), int_lanes(1))
    normal = b.sub(b.lshr(b.add(b.add(magnitude_bits, int_lanes(0x7FFFF)), odd), int_lanes(20)), int_lanes(120 << 3))
    # Adding 2**14 rounds subnormals: the low bits of the sum's mantissa count multiples of 2**-9.
    subnormal = b.and_(b.bitcast((magnitude + 2.0**14).ir, VI), int_lanes(0xFF))
    # 2**-6 is the smallest normal fp8 number.
    code = b.select((magnitude < 2.0**-6).ir, subnormal, normal)
    return b.trunc(b.or_(code, b.and_(b.lshr(bits, int_lanes(24)), int_lanes(0x80))), LANE_BYTES)


def widen_to_pairs(k: Kernel, line: Ptr, kind: str) -> tuple[Pairs, Pairs]:
    """Load a line of 64 codes as two vectors of 16 bfloat16 pairs, by value of a lane."""
    if not k.isa.bf16_dot:
        # Only emulated matrix tiles need pairs on processors without table look-up.
        first, second, third, fourth = (value * FLOAT_FACTORS[kind] for value in widen_to_floats(k, line, kind))
        return k.pairs(first, second), k.pairs(third, fourth)
    codes, values = k.read(line, LINE, 1), torch.arange(128).to(torch.bfloat16)
    magnitudes = codes
    if kind == "int8":
        function = k.function("llvm.abs.v64i8", LINE, [LINE, ir.IntType(1)])
        magnitudes = k.builder.call(function, [codes, ir.Constant(ir.IntType(1), 0)])
    else:
        values = torch.arange(128).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
        # The code of NaN is never written, but stale memory may contain it, and a stale V is multiplied by 0.
        values[127] = 0.0
    return lookup_values(k, magnitudes, codes, values.view(torch.int16).tolist())


def widen_to_floats(k: Kernel, line: Ptr, kind: str) -> tuple[Vec, ...]:
    """Load a line of 64 codes as four vectors of 16 float32, by value of a lane, to be multiplied by
    ``FLOAT_FACTORS``."""
    if kind == "fp8_e4m3":
        words = k.read(line, WORDS, 2)
        return *fp8_floats(k, words, 0), *fp8_floats(k, words, 1)
    b, codes = k.builder, k.read(line, LINE, 1)
    zeros = ir.Constant(LINE, [0] * LINE_BYTES)
    floats = []
    for value in range(4):
        # One shuffle moves each lane's byte to the top of an integer, so that its sign becomes the integer's.
        order = [at for lane in range(LANES) for at in (*[LINE_BYTES] * 3, _byte_of(lane, value))]
        upper = b.shuffle_vector(codes, zeros, ir.Constant(ir.VectorType(I32, LINE_BYTES), order))
        floats.append(Vec(k, b.sitofp(b.bitcast(upper, VI), VF)))
    return tuple(floats)


def _byte_of(lane: int, value: int) -> int:
    """Return the index in a line [4 quarters][2 pairs][4 lanes][2 values] of one of a lane's 4 values."""
    return lane // 4 * 16 + value // 2 * 8 + lane % 4 * 2 + value % 2
