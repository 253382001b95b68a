"""int8 weights: quantization, the order of their bytes, and how kernels widen them to bfloat16.

One float32 scale for each output column, symmetric: weight = scale * quantum with quanta in -127 .. 127. A quantum has
7 bits and a sign, so bfloat16 holds it exactly: products and sums are those of the bfloat16 kernels, and the scale is
applied once, to the finished sum.

Quanta are stored as sign and magnitude, and a line of 64 in an order that AVX-512 widens with six instructions: both
bytes of the bfloat16 come from tables of 128 entries and are interleaved within each quarter of the line.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir

from pillion.kernels.cpu.language.emit import I8, I32, VF, VI, Kernel, Pairs, Ptr, int_lanes
from pillion.kernels.cpu.language.isa import LANES

MAX_QUANTUM = 127
# A line is one pair of inputs of the 32 columns of a panel: [4 quarters][2 tiles][4 columns][2 inputs].
LINE_BYTES = 64
_QUARTERS = 4
_SIGN = 0x80

_BYTES = ir.VectorType(I8, LINE_BYTES)
_WORDS = ir.VectorType(ir.IntType(16), LINE_BYTES // 2)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N, K] -> int8 [..., N, K] and float32 scales [..., N]. The largest weight of a column becomes +-127."""
    wide = weight.float()
    scales = wide.abs().amax(-1) / MAX_QUANTUM
    # Any scale is right for a column of zeros.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    quanta = (wide / scales.unsqueeze(-1)).round().clamp(-MAX_QUANTUM, MAX_QUANTUM)
    return quanta.to(torch.int8), scales


def pack_lines(quanta: torch.Tensor) -> torch.Tensor:
    """int8 [..., 2 tiles * 16 columns, 2 inputs] -> uint8 lines [..., 64]."""
    coded = quanta.abs().to(torch.uint8) | (quanta < 0).to(torch.uint8) * _SIGN
    lead = coded.shape[:-2]
    return coded.reshape(*lead, 2, _QUARTERS, LANES // _QUARTERS, 2).transpose(-4, -3).reshape(*lead, LINE_BYTES)


def unpack_lines(lines: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_lines`, and the reference of :func:`widen`."""
    lead = lines.shape[:-1]
    coded = lines.view(*lead, _QUARTERS, 2, LANES // _QUARTERS, 2).transpose(-4, -3).reshape(*lead, 2 * LANES, 2)
    magnitude = (coded & MAX_QUANTUM).to(torch.int8)
    return torch.where(coded >= _SIGN, -magnitude, magnitude)


def widen(k: Kernel, line: Ptr) -> tuple[Pairs, Pairs]:
    """Loads 64 quanta and widens them to the pairs of both tiles."""
    if k.isa.bf16_dot == "x86":
        quanta = k.read(line, _BYTES, 1)
        return looked_up(k, quanta, quanta, torch.arange(MAX_QUANTUM + 1).to(torch.bfloat16).view(torch.int16).tolist())
    words = k.read(line, _WORDS, 1)
    return _converted(k, words, 0), _converted(k, words, 1)


def looked_up(k: Kernel, places: Any, signs: Any, patterns: list[int]) -> tuple[Pairs, Pairs]:
    """Widens a line by the table ``patterns``, the bits of 128 bfloat16, in which the lower 7 bits of ``places`` count.

    Looks up both bytes of each bfloat16, adds the top bits of ``signs`` to the upper byte, and interleaves lower and
    upper bytes.
    """
    b = k.builder
    lower = _table(k, places, [pattern & 0xFF for pattern in patterns])
    upper = _table(k, places, [pattern >> 8 for pattern in patterns])
    upper = b.or_(upper, b.and_(signs, ir.Constant(_BYTES, [_SIGN] * LINE_BYTES)))
    tiles = []
    for tile in range(2):
        first = [quarter * 16 + tile * 8 + byte for quarter in range(_QUARTERS) for byte in range(8)]
        order = [at for byte in first for at in (byte, LINE_BYTES + byte)]
        mixed = b.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, LINE_BYTES), order))
        tiles.append(Pairs(k, b.bitcast(mixed, VI)))
    return tiles[0], tiles[1]


def _table(k: Kernel, places: Any, table: list[int]) -> Any:
    """Looks up table[place] for the lower 7 bits of each byte."""
    halves = [ir.Constant(_BYTES, table[:LINE_BYTES]), ir.Constant(_BYTES, table[LINE_BYTES:])]
    function = k.function("llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [_BYTES] * 3)
    return k.builder.call(function, [halves[0], places, halves[1]])


def _converted(k: Kernel, words: Any, tile: int) -> Pairs:
    """Converts by way of float32, whose upper 16 bits are the bfloat16; a word holds both inputs of a column."""
    b = k.builder
    order = [quarter * 8 + tile * 4 + column for quarter in range(_QUARTERS) for column in range(4)]
    word = b.zext(b.shuffle_vector(words, words, ir.Constant(VI, order)), VI)
    first = b.sitofp(b.and_(word, int_lanes(MAX_QUANTUM)), VF)
    second = b.sitofp(b.and_(b.lshr(word, int_lanes(8)), int_lanes(MAX_QUANTUM)), VF)
    pair = b.or_(b.lshr(b.bitcast(first, VI), int_lanes(16)), b.bitcast(second, VI))
    signs = b.or_(
        b.and_(b.shl(word, int_lanes(8)), int_lanes(0x8000)), b.and_(b.shl(word, int_lanes(16)), int_lanes(-(2**31)))
    )
    return Pairs(k, b.or_(pair, signs))
