"""Sums of the products of one tile of a packed matrix with a tile of rows, for every kernel with such products.

    words --shift, mask--> weights (code_values.py) --dot with rows--> sums [outputs, rows] of float32

With exact weights, a group's products are summed separately, and its float32 scale multiplies that sum: fewer
roundings, and one multiplication per group instead of one per weight. A row's bits follow from the matrix and the order
of its inputs alone.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.fp8 import NATIVE_FP8_ARCH
from pillion.kernels.gpu.launch import check, interpreting
from pillion.kernels.gpu.products.code_values import (
    code_step,
    code_values,
    exact,
    group_factors,
    nf4_table,
    nf4_weights,
    small_scale,
    small_zero,
)
from pillion.kernels.gpu.products.gpu_packing import (
    COLUMNS,
    MIN_GROUP,
    MIN_SUM,
    ZERO_BASE,
    PackedKind,
)

# Excess of the bits of a code, read as a number, by coding.
_BIAS = {"uint4": 0.0, "int4": 8.0, "int8": 128.0}
_COMPILED = tl.constexpr(not interpreting())
_COLUMNS, _ZERO_BASE = tl.constexpr(COLUMNS), tl.constexpr(ZERO_BASE)


# fmt: off
@triton.jit
def packed_part(
    rows, words, scales, offsets, factors, columns_of, table, token, output, begin, end, inputs, padded,
    CODING: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    EXACT: tl.constexpr, DEPTH: tl.constexpr, PLACES: tl.constexpr, PER_WORD: tl.constexpr, TAIL: tl.constexpr,
    RAGGED: tl.constexpr, ORDERED: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # fmt: on
    """Sum units ``begin`` .. ``end`` - 1: float32 [outputs, tokens].

    token: the rows [BLOCK_T] to read. output: the outputs [BLOCK_N] of the matrix, with its padding. columns_of: with
    ORDERED the input of each column, else not read.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    row = rows + token.to(tl.int64)[None, :] * inputs
    factor = scales + output
    FACTORS: tl.constexpr = SCALE == "e8m0" or SCALE == "e5m3" or SCALE == "two_halves"
    if FACTORS:
        factor = factors + output
    whole = end
    if TAIL:
        whole = tl.minimum(end, inputs // (PER_WORD * _COLUMNS))
    for unit in range(begin, whole):
        for piece in tl.static_range(_COLUMNS // DEPTH):
            columns = piece * DEPTH + tl.arange(0, DEPTH)
            # 32-bit offsets suffice, because no matrix has 2**31 words.
            packed = tl.load(words + output[:, None] * _COLUMNS + columns[None, :] + unit * padded * _COLUMNS)
            acc = _unit(
                acc, packed, unit, row, scales, offsets, factor, columns_of, table, output, columns, inputs, padded,
                CODING, BIAS, GROUP, SCALE, SHIFT, EXACT, DEPTH, piece, PLACES, PER_WORD, PER_WORD, False, ORDERED,
                NATIVE_FP8,
            )  # fmt: skip
    if TAIL:  # noqa: SIM102  (decided when the kernel is compiled, unlike the next condition)
        if end > whole:
            SHARE: tl.constexpr = PER_WORD // TAIL
            shared = words + whole * padded * _COLUMNS + output[:, None] * (_COLUMNS // SHARE)
            for piece in tl.static_range(_COLUMNS // DEPTH):
                columns = piece * DEPTH + tl.arange(0, DEPTH)
                packed = tl.load(shared + (columns // SHARE)[None, :]) >> (columns % SHARE * (32 // SHARE))[None, :]
                if CODING == "fp4_e2m1" and TAIL == 2:
                    # Two codes in a byte are in order: move them to the first two places of half a word.
                    high = ((packed & 8) << 12) | ((packed & 0x80) << 5)
                    packed = high | ((packed & 7) << 6) | ((packed & 0x70) >> 1)
                elif CODING == "signed4" and TAIL == 2:
                    high = ((packed & 8) << 12) | ((packed & 0x80) << 4)
                    packed = high | ((packed & 7) << 4) | ((packed & 0x70) >> 4)
                acc = _unit(
                    acc, packed, whole, row, scales, offsets, factor, columns_of, table, output, columns, inputs,
                    padded, CODING, BIAS, GROUP, SCALE, SHIFT, EXACT, DEPTH, piece, PLACES, PER_WORD, TAIL, RAGGED,
                    ORDERED, NATIVE_FP8,
                )  # fmt: skip
    if EXACT and (GROUP == 0 or FACTORS):
        acc *= tl.load(factor)[:, None]
    return acc


@triton.constexpr_function
def _scales_in_word(scale, shift):
    """Return the scales per word (PackedKind.per_scale_word)."""
    if scale == "bfloat16" and shift == "none":
        return 2
    return 4 if scale == "e8m0" or scale == "e5m3" else 1


@triton.jit
def _words(
    values, unit, PLACE: tl.constexpr, COLUMN: tl.constexpr, output, padded, PER_WORD: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Load the words of scales or offsets common to SHARED inputs of a unit, one of them at a place's COLUMN."""
    number = unit * (PER_WORD * _COLUMNS // SHARED) + (PLACE * _COLUMNS + COLUMN) // SHARED
    return tl.load(values + number * padded + output)


@triton.constexpr_function
def _byte_of(place, piece, group, per_scale_word):
    """Return the index of a tile's scale in its word, by the place of its codes and its piece of the columns. A scale
    with another number beside it is the upper half of its word."""
    if per_scale_word == 1:
        return 1
    return (place * COLUMNS // group + piece) % per_scale_word if group else 0


# fmt: off
@triton.jit
def _unit(
    acc, packed, unit, row, scales, offsets, factor, columns_of, table, output, columns, inputs, padded,
    CODING: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    EXACT: tl.constexpr, DEPTH: tl.constexpr, PIECE: tl.constexpr, PLACES: tl.constexpr, PER_WORD: tl.constexpr,
    COUNT: tl.constexpr, RAGGED: tl.constexpr, ORDERED: tl.constexpr, NATIVE_FP8: tl.constexpr,
):
    # fmt: on
    """Add the products of a unit's first COUNT places to ``acc``, of the columns of one PIECE of it."""
    SUMMED: tl.constexpr = EXACT and GROUP != 0 and SCALE == "float32"
    SCALES: tl.constexpr = _scales_in_word(SCALE, SHIFT)
    BESIDE: tl.constexpr = SHIFT != "none" and SCALE == "float32"
    OFFSETS: tl.constexpr = SHIFT == "offsets" and SCALE == "two_halves"
    LOOKED_UP: tl.constexpr = _COMPILED and _is_looked_up(CODING, GROUP, SHIFT, row.dtype.element_ty == tl.float32)
    scale = acc
    beside = acc
    part = acc
    table_words = packed
    for place in tl.static_range(COUNT):
        first = (unit * PER_WORD + place) * _COLUMNS
        column = first + columns
        if ORDERED:
            column = tl.load(columns_of + first + columns, mask=first + columns < inputs, other=0)
        cells = row + column[:, None]
        right = tl.load(cells, mask=(first + columns < inputs)[:, None], other=0.0) if RAGGED else tl.load(cells)
        if SCALE != "float32":
            if place * _COLUMNS % (SCALES * GROUP) == 0:
                scale_words = _words(scales, unit, place, PIECE * DEPTH, output, padded, PER_WORD, SCALES * GROUP)
            if EXACT:
                scale = scale_words[:, None]
            else:
                scale = _small_scales(scale_words, columns, place, GROUP, SCALE, SCALES, DEPTH)
        elif place % PLACES == 0 and (SUMMED or not EXACT):
            scale = group_factors(scales, first, output, padded, columns, GROUP)
            if LOOKED_UP:
                table_words = nf4_table(scale, right.dtype == tl.bfloat16)
        if BESIDE and place % PLACES == 0:
            beside = group_factors(offsets, first, output, padded, columns, GROUP)
            if EXACT:
                beside = beside.to(tl.bfloat16)
            elif SHIFT == "zeros":
                beside = (beside + _ZERO_BASE) * scale
        elif OFFSETS:
            if place * _COLUMNS % (2 * GROUP) == 0:
                beside = _words(offsets, unit, place, 0, output, padded, PER_WORD, 2 * GROUP)[:, None]
        elif SHIFT != "none" and not BESIDE and not EXACT:
            beside = (small_zero(scale_words, SCALE)[:, None] + _ZERO_BASE) * scale
        if EXACT:
            weights = exact(
                packed, beside, scale, place, CODING, SHIFT, SUMMED, SCALE, _byte_of(place, PIECE, GROUP, SCALES),
                _byte_of(place, PIECE, GROUP, 2) if OFFSETS else 0,
            )  # fmt: skip
            if SUMMED:
                if place % PLACES == 0:
                    part = tl.zeros(acc.shape, tl.float32)
                part = dot(weights, right, part)
                if place % PLACES == PLACES - 1 or place == COUNT - 1:
                    acc += part * scale
            else:
                acc = dot(weights, right, acc)
        elif LOOKED_UP:
            weights = nf4_weights(packed, table_words, place, right.dtype == tl.bfloat16)
            acc = dot(weights, right, acc)
        else:
            found = _in_float32(
                packed, table, scale, beside, factor, place, CODING, BIAS, SCALE, SHIFT, NATIVE_FP8,
                right.dtype == tl.float32,
            )  # fmt: skip
            acc = dot(found.to(right.dtype), right, acc)
    return acc


@triton.constexpr_function
def _is_looked_up(coding, group, shift, float32):
    """Return whether weights are looked up: those of NF4 with 16 bits, if a tile's outputs have one scale each."""
    return coding == "nf4" and group != MIN_GROUP and shift == "none" and not float32


@triton.jit
def _small_scales(
    words, columns, PLACE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SCALES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the scales of a tile's codes from words of SCALES of them, float32."""
    scale = small_scale(words, _byte_of(PLACE, 0, GROUP, SCALES), SCALE)[:, None]
    if GROUP < DEPTH:
        second = small_scale(words, _byte_of(PLACE, 1, GROUP, SCALES), SCALE)[:, None]
        scale = tl.where(columns[None, :] < GROUP, scale, second)
    return scale


@triton.jit
def _in_float32(
    packed, table, scale, beside, factor, PLACE: tl.constexpr, CODING: tl.constexpr, BIAS: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, NATIVE_FP8: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return the weights of the codes at one place of each word, value * scale + offset in float32. FLOAT32: rows are
    float32."""
    values = code_values(packed, table, PLACE, CODING, BIAS, NATIVE_FP8, FLOAT32)
    by = scale * code_step(PLACE, CODING, NATIVE_FP8)
    if SCALE == "e8m0" or SCALE == "e5m3":
        by *= tl.load(factor)[:, None]
    if SHIFT != "none":
        found = tl.fma(values, tl.broadcast_to(by, values.shape), tl.broadcast_to(beside, values.shape))
    else:
        found = values * by
    return found


def tile_constants(kind: PackedKind, dtype: torch.dtype, arch: int, *, ordered: bool = False) -> dict[str, Any]:
    """Return the constants of :func:`packed_part` except the sizes of a tile, for rows of a type."""
    exact_weights = _is_exact(kind, dtype)
    check(exact_weights or kind.scale != "two_halves", "signed numbers multiply rows of bfloat16, not {}", dtype)
    return {
        "CODING": kind.coding,
        "BIAS": _BIAS.get(kind.coding, 0.0),
        "GROUP": kind.group,
        "SCALE": kind.scale,
        "SHIFT": kind.shift,
        "EXACT": exact_weights,
        # A tile is as deep as the smallest groups, so that each of its outputs needs one scale.
        "DEPTH": MIN_GROUP if exact_weights and kind.group == MIN_GROUP else COLUMNS,
        "PLACES": _places_of(kind) if exact_weights else _places_held(kind, dtype.itemsize, arch),
        "PER_WORD": kind.per_word,
        "TAIL": kind.tail,
        "RAGGED": kind.tail > 0 and kind.inputs % kind.unit != kind.tail * COLUMNS,
        "ORDERED": ordered,
        "NATIVE_FP8": kind.coding == "fp8_e4m3" and arch >= NATIVE_FP8_ARCH and not interpreting(),
    }


def _places_of(kind: PackedKind) -> int:
    """Return the number of consecutive places of a word with the same scale."""
    return gcd(max(1, kind.group // COLUMNS), kind.per_word) if kind.group else kind.per_word


def _is_exact(kind: PackedKind, dtype: torch.dtype) -> bool:
    """Return whether weights without their float32 scales are made as numbers of ``dtype``, two at a time. Not for
    float32, which is for comparisons, nor float16, whose powers of two have too small a range for scales."""
    if kind.scale == "two_halves":
        return dtype == torch.bfloat16
    if dtype != torch.bfloat16 or kind.coding == "nf4" or kind.shift == "offsets":
        return False
    if kind.coding == "fp4_e2m1" or kind.scale != "float32":
        return kind.scale != "float32"
    return kind.group != MIN_GROUP and _places_of(kind) * COLUMNS >= MIN_SUM


def _places_held(kind: PackedKind, item_bytes: int, arch: int) -> int:
    """Return the number of consecutive places of a word for which the kernel loads a scale of each output once."""
    if kind.group % kind.unit == 0:
        return kind.per_word
    # The exact products of float32, and those of an sm_80, leave no registers for scales.
    held = kind.unit % kind.group == 0 and item_bytes < 4 and (arch >= 90 or kind.coding == "nf4")
    return max(1, kind.group // COLUMNS) if held else 1
