"""int8 weights: how they are made from larger ones, and how kernels widen them to bfloat16.

One float32 scale for each output column, symmetric: weight = scale * quantum with quanta in -127 .. 127. A quantum has 7
bits and a sign, so bfloat16 holds it exactly: products and sums are those of the bfloat16 kernels, and the scale is
applied once, to the finished sum.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir

from kernels.cpu.emit import LANES, Kernel
from kernels.cpu.values import Pairs, Ptr

MAX_QUANTUM = 127
# A pair of inputs, 32 columns.
LINE_BYTES = 64

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_V16 = ir.VectorType(_I16, LANES)
_V32 = ir.VectorType(_I32, LANES)
_VF = ir.VectorType(ir.FloatType(), LANES)
_BYTES = ir.VectorType(_I8, LINE_BYTES)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N, K] -> int8 [..., N, K] and float32 scales [..., N]. The largest weight of a column becomes +-127."""
    wide = weight.float()
    scales = wide.abs().amax(-1) / MAX_QUANTUM
    # A column of zeros has any scale.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    quanta = (wide / scales.unsqueeze(-1)).round().clamp(-MAX_QUANTUM, MAX_QUANTUM)
    return quanta.to(torch.int8), scales


def reference_widen(line: torch.Tensor) -> torch.Tensor:
    """What :func:`widen` computes: int8 [2 tiles, 16 columns, 2 inputs] -> bfloat16 of the same shape."""
    return line.to(torch.bfloat16)


def widen(k: Kernel, line: Ptr) -> tuple[Pairs, Pairs]:
    """64 quanta [2 tiles][16 columns][2 inputs] -> the pairs of both tiles."""
    if k.isa.bf16_dot == "x86":
        return _looked_up(k, k.read(line, _BYTES, 1))
    return _converted(k, line), _converted(k, line + LINE_BYTES // 2)


def _looked_up(k: Kernel, quanta: Any) -> tuple[Pairs, Pairs]:
    """Both bytes of |quantum| from tables of 128, the sign into the upper one, then upper and lower bytes in turn."""
    b = k.builder
    size = b.call(k.function("llvm.abs.v64i8", _BYTES, [_BYTES, ir.IntType(1)]), [quanta, ir.IntType(1)(0)])
    patterns = torch.arange(2 * LINE_BYTES).to(torch.bfloat16).view(torch.int16).tolist()
    lower = _table(k, size, [pattern & 0xFF for pattern in patterns])
    upper = _table(k, size, [pattern >> 8 for pattern in patterns])
    upper = b.or_(upper, b.and_(quanta, ir.Constant(_BYTES, [-128] * LINE_BYTES)))
    tiles = []
    for first in (0, LINE_BYTES // 2):
        order = [at for byte in range(first, first + LINE_BYTES // 2) for at in (byte, LINE_BYTES + byte)]
        mixed = b.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(_I32, LINE_BYTES), order))
        tiles.append(Pairs(k, b.bitcast(mixed, _V32)))
    return tiles[0], tiles[1]


def _table(k: Kernel, places: Any, table: list[int]) -> Any:
    """table[place] for each byte; the table has 128 entries."""
    halves = [ir.Constant(_BYTES, table[:LINE_BYTES]), ir.Constant(_BYTES, table[LINE_BYTES:])]
    function = k.function("llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [_BYTES] * 3)
    return k.builder.call(function, [halves[0], places, halves[1]])


def _converted(k: Kernel, half: Ptr) -> Pairs:
    """By way of float32, of whose bits the upper 16 are the bfloat16."""
    b = k.builder
    both = b.sext(k.read(half, _V16, 1), _V32)
    first = b.ashr(b.shl(both, _ints(24)), _ints(24))
    second = b.ashr(both, _ints(8))
    low, high = (b.bitcast(b.sitofp(quanta, _VF), _V32) for quanta in (first, second))
    return Pairs(k, b.or_(b.lshr(low, _ints(16)), high))


def _ints(value: int) -> Any:
    return ir.Constant(_V32, [value] * LANES)
