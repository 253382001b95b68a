"""Dequantization of lines of 64 one-byte codes, by tables in registers or as float16, for products and 8-bit KV."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.emit import HALVES, I8, I32, LANE_WORDS, VF, VI, Kernel, Pairs, Vec
from pillion.kernels.cpu.language.isa import LANES

LINE_BYTES = 64
# Sign bit of a code.
SIGN = 0x80
QUARTERS = 4
# fp8 codes are widened to values 256 times too small, because a shift of their bits then makes them float16. A later
# multiplication compensates.
FP8_SHRINK = 256.0

# LLVM type of a line.
LINE = ir.VectorType(I8, LINE_BYTES)


def lookup_values(
    k: Kernel, indices: Any, signs: Any, patterns: list[int], lowest: int | None = None
) -> tuple[Pairs, Pairs]:
    """Dequantize a line by the table ``patterns``, the bits of 128 bfloat16; bytes of ``indices`` index it by 7 bits.

    Looks up both bytes of each bfloat16, adds the top bits of ``signs`` to the upper byte, and interleaves lower and
    upper bytes. ``lowest`` is the upper byte of a sign without magnitude (0x80), if that is not zero.
    """
    b = k.builder
    lower = _lookup(k, indices, [pattern & 0xFF for pattern in patterns])
    upper = _lookup(k, indices, [pattern >> 8 for pattern in patterns])
    top = ir.Constant(LINE, [SIGN] * LINE_BYTES)
    upper = b.or_(upper, b.and_(signs, top))
    if lowest is not None:
        upper = b.select(b.icmp_unsigned("==", signs, top), ir.Constant(LINE, [lowest] * LINE_BYTES), upper)
    tiles = []
    for tile in range(2):
        first = [quarter * 16 + tile * 8 + byte for quarter in range(QUARTERS) for byte in range(8)]
        order = [at for byte in first for at in (byte, LINE_BYTES + byte)]
        mixed = b.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, LINE_BYTES), order))
        tiles.append(Pairs(k, b.bitcast(mixed, VI)))
    return tiles[0], tiles[1]


def _lookup(k: Kernel, indices: Any, table: list[int]) -> Any:
    """Look up the lower 7 bits of each byte of ``indices`` in a table of 128 bytes."""
    halves = [ir.Constant(LINE, table[begin : begin + LINE_BYTES]) for begin in (0, LINE_BYTES)]
    function = k.function("llvm.x86.avx512.vpermi2var.qi.512", LINE, [LINE] * 3)
    return k.builder.call(function, [halves[0], indices, halves[1]])


def fp8_floats(k: Kernel, words: Any, half: int) -> tuple[Vec, Vec]:
    """Return the lower and the upper fp8 codes of the 16 words of one ``half`` of 32 16-bit words, as float32,
    FP8_SHRINK times too small.

    The sign stays the top bit. The 7 bits below it move down by one bit, to the exponent and mantissa of a float16.
    """
    b, selected = k.builder, half_words(k, words, half)
    floats = []
    for upper in (b.shl(selected, word_lanes(8)), selected):
        bits = b.and_(b.ashr(upper, word_lanes(1)), word_lanes(0xBF80 - 2**16))
        floats.append(Vec(k, b.fpext(b.bitcast(bits, HALVES), VF)))
    return floats[0], floats[1]


def half_words(k: Kernel, words: Any, half: int) -> Any:
    """Return the 16 words of one half of 32 16-bit words; each quarter has 4 words of each half."""
    order = [quarter * 8 + half * 4 + column for quarter in range(QUARTERS) for column in range(4)]
    return k.builder.shuffle_vector(words, words, ir.Constant(VI, order))


def word_lanes(value: int) -> Any:
    """Return an LLVM vector constant with the 16-bit integer ``value`` in all sixteen lanes."""
    return ir.Constant(LANE_WORDS, [value] * LANES)
