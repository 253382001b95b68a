"""Dequantization of lines of 64 one-byte codes, by tables in registers or as float16, for products and 8-bit KV."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.emit import I8, I32, VF, VI, Kernel, Pairs, Vec
from pillion.kernels.cpu.language.isa import LANES

LINE_BYTES = 64
SIGN = 0x80
QUARTERS = 4
# fp8 numbers are widened to values 256 times too small: their bits then only need a shift to be a float16's. A later
# multiplication compensates.
FP8_SHRINK = 256.0

_BYTES = ir.VectorType(I8, LINE_BYTES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_LANE_WORDS = ir.VectorType(ir.IntType(16), LANES)


def lookup_values(
    k: Kernel, places: Any, signs: Any, patterns: list[int], lowest: int | None = None
) -> tuple[Pairs, Pairs]:
    """Dequantize a line by the table ``patterns``, the bits of 128 bfloat16, indexed by the lower 7 bits of ``places``.

    Looks up both bytes of each bfloat16, adds the top bits of ``signs`` to the upper byte, and interleaves lower and
    upper bytes. ``lowest`` is the upper byte for a sign without magnitude, if that is not zero.
    """
    b = k.builder
    lower = _table(k, places, [pattern & 0xFF for pattern in patterns])
    upper = _table(k, places, [pattern >> 8 for pattern in patterns])
    top = ir.Constant(_BYTES, [SIGN] * LINE_BYTES)
    upper = b.or_(upper, b.and_(signs, top))
    if lowest is not None:
        upper = b.select(b.icmp_unsigned("==", signs, top), ir.Constant(_BYTES, [lowest] * LINE_BYTES), upper)
    tiles = []
    for tile in range(2):
        first = [quarter * 16 + tile * 8 + byte for quarter in range(QUARTERS) for byte in range(8)]
        order = [at for byte in first for at in (byte, LINE_BYTES + byte)]
        mixed = b.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, LINE_BYTES), order))
        tiles.append(Pairs(k, b.bitcast(mixed, VI)))
    return tiles[0], tiles[1]


def _table(k: Kernel, places: Any, table: list[int]) -> Any:
    """Look up each byte of ``places`` in a table of 128 bytes, by its lower 7 bits."""
    halves = [ir.Constant(_BYTES, table[begin : begin + LINE_BYTES]) for begin in (0, LINE_BYTES)]
    function = k.function("llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [_BYTES] * 3)
    return k.builder.call(function, [halves[0], places, halves[1]])


def fp8_floats(k: Kernel, words: Any, half: int) -> tuple[Vec, Vec]:
    """Return the lower and the upper bytes of 16 words as float32, FP8_SHRINK times too small. ``words`` are 32 16-bit
    words; each quarter has 4 of them for each ``half``.

    The sign stays the top bit. The 7 bits below it move one place down, where they are the exponent and mantissa of a
    float16.
    """
    b, mine = k.builder, half_words(k, words, half)
    found = []
    for upper in (b.shl(mine, word_lanes(8)), mine):
        bits = b.and_(b.ashr(upper, word_lanes(1)), word_lanes(0xBF80 - 2**16))
        found.append(Vec(k, b.fpext(b.bitcast(bits, _HALVES), VF)))
    return found[0], found[1]


def half_words(k: Kernel, words: Any, half: int) -> Any:
    """Return the 16 words of one half of 32 16-bit words."""
    order = [quarter * 8 + half * 4 + column for quarter in range(QUARTERS) for column in range(4)]
    return k.builder.shuffle_vector(words, words, ir.Constant(VI, order))


def word_lanes(value: int) -> Any:
    """Return an LLVM vector constant with the 16-bit integer ``value`` in all sixteen lanes."""
    return ir.Constant(_LANE_WORDS, [value] * LANES)
