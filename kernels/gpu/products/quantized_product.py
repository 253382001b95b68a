"""Multiplies rows by a quantized matrix, whose weights a kernel computes from the codes in its registers.

    rows [T, K] --gathered in the matrix's order, where it has one--> tiles --'
    words --shift, mask--> codes --value * scale + offset in float32--> rounded to the rows' type --dot--> out [T, N]

A weight is rounded once, as if the matrix had been widened when it was loaded: in bfloat16 by 2**-9 of its size at
most. float32 rows are multiplied by float32 weights.

A row's bits do not depend on the other rows. Every output is one chain of additions: the inputs are cut into
``splits_of`` parts, by the matrix's shape alone, a part is one accumulator over its units in order, and the parts'
sums are added in order. Few rows leave the device idle and wait for memory, so programs share the parts and a
second kernel adds them; of many rows a program computes all parts itself, and adds them in the same way. The matrix is
the left operand of the products of tiles, so that tiles of any number of rows use the same instruction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.fp8 import NATIVE_FP8_ARCH, decode_e4m3
from pillion.kernels.gpu.launch import arch_of, check, check_tensor, interpreting
from pillion.kernels.gpu.products.gpu_packing import BITS, COLUMNS, LEAST_GROUP, OUTPUTS, PackedKind, PackedMatrix
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.torch.quantized_matrix import CODINGS

# A tile has one of these numbers of rows; a launch takes the smallest tile that holds its rows, or several of the
# largest.
ROW_TILES = (16, 32, 64, 128)
# Launches of at most this many rows share the parts of a matrix among programs.
SHARED_ROWS = 64
# The parts of a matrix are as many as fill two programs for each of an H200's 132 multiprocessors, 64 outputs each.
_PROGRAMS, _PROGRAM_OUTPUTS = 264, 64
_LEAST_UNITS, _MOST_SPLITS = 2, 16
# For each coding, this is by how much the bits of a code, read as a number, exceed the number that the code stands for.
_BIAS = {"uint4": 0.0, "int4": 8.0, "int8": 128.0}
_COLUMNS, _LEAST_GROUP = tl.constexpr(COLUMNS), tl.constexpr(LEAST_GROUP)
# _MAGIC is the bits of 2**23, whose last digit is 1: a number below 2**23 in its low bits is added to it. They are
# among those of _ABOVE, which are above all codes of half a word.
_ABOVE = tl.constexpr(0x7FFF0000)
_MAGIC, _MAGIC_VALUE = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)


@triton.jit
def _values(
    words, table, PLACE: tl.constexpr, CODING: tl.constexpr, BIAS: tl.constexpr, NATIVE_FP8: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Returns the float32 values of the codes at one place of each word, as multiples of the result of
    :func:`_step`."""
    if CODING == "fp8_e4m3":
        return decode_e4m3(((words >> (8 * PLACE)) & 0xFF).to(tl.uint8), tl.float32, NATIVE_FP8)
    if CODING == "nf4":
        return tl.load(table + ((words >> (4 * PLACE)) & 0xF))
    if CODING == "fp4_e2m1":
        # Exponent and mantissa become those of a float16, whose bias differs by 14, also for subnormals. This takes
        # fewer instructions than to look a value up.
        code = words >> (4 * PLACE)
        bits = ((code & 0x8) << 12) | ((code & 0x7) << 9)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    # A code stays at its place in its half of the word, where it is a multiple of a power of 2: one instruction masks
    # its neighbours and leaves the bits of a float, which all codes of the half get at once. A conversion of integers
    # would take longer than that sum, which is exact.
    if CODING == "int8":
        half, shift, mask = words >> (16 * (PLACE // 2)), 8 * (PLACE % 2), 0xFF
    else:
        half, shift, mask = words >> (16 * (PLACE // 4)), 4 * (PLACE % 4), 0xF
    # The exact products of float32 leave no registers for the halves.
    bits = half & (mask << shift) | _MAGIC if FLOAT32 else (half | _ABOVE) & (_MAGIC | (mask << shift))
    return bits.to(tl.float32, bitcast=True) - (_MAGIC_VALUE + BIAS * (1 << shift))


@triton.jit
def _step(PLACE: tl.constexpr, CODING: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Returns the factor by which the results of :func:`_values` are too small; it is a power of 2, so that scales are
    multiplied by it exactly."""
    if CODING == "fp8_e4m3":
        return 1.0 if NATIVE_FP8 else 256.0
    if CODING == "nf4":
        return 1.0
    if CODING == "fp4_e2m1":
        return 16384.0
    return 1.0 / (1 << (8 * (PLACE % 2) if CODING == "int8" else 4 * (PLACE % 4)))


@triton.jit
def _factors(values, first, output, padded, columns, GROUP: tl.constexpr):
    """Loads scales or offsets of a tile of codes [outputs, COLUMNS] whose first input is ``first``."""
    if GROUP == 0:
        found = tl.load(values + output)[:, None]
    else:
        group = values + first // GROUP * padded + output
        found = tl.load(group)[:, None]
        if GROUP == _LEAST_GROUP:
            found = tl.where(columns[None, :] < GROUP, found, tl.load(group + padded)[:, None])
    return found


# fmt: off
@triton.jit
def _part(
    rows, words, scales, offsets, table, token, output, begin, end, inputs, padded,
    CODING: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, SHIFTED: tl.constexpr, RAGGED: tl.constexpr,
    PLACES: tl.constexpr, PER_WORD: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # fmt: on
    """Sums units ``begin`` .. ``end`` - 1: float32 [outputs, tokens]."""
    columns = tl.arange(0, _COLUMNS)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    # Offsets into the matrix have 32 bits, because no matrix has 2**31 words.
    cells = words + output[:, None] * _COLUMNS + columns[None, :]
    row = rows + token.to(tl.int64)[None, :] * inputs + columns[:, None]
    for unit in range(begin, end):
        packed = tl.load(cells + unit * padded * _COLUMNS)
        for place in tl.static_range(PER_WORD):
            first = (unit * PER_WORD + place) * _COLUMNS
            if RAGGED:
                right = tl.load(row + first, mask=(first + columns < inputs)[:, None], other=0.0)
            else:
                right = tl.load(row + first)
            values = _values(packed, table, place, CODING, BIAS, NATIVE_FP8, rows.dtype.element_ty == tl.float32)
            if place % PLACES == 0:
                scale = _factors(scales, first, output, padded, columns, GROUP)
                if SHIFTED:
                    offset = _factors(offsets, first, output, padded, columns, GROUP)
            factor = scale * _step(place, CODING, NATIVE_FP8)
            if SHIFTED:
                weights = tl.fma(values, tl.broadcast_to(factor, values.shape), tl.broadcast_to(offset, values.shape))
            else:
                weights = values * factor
            acc = dot(weights.to(right.dtype), right, acc)
    return acc


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _product(
    rows, words, scales, offsets, table, bias, out, tokens, inputs, outputs, padded, units,
    CODING: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, SHIFTED: tl.constexpr, RAGGED: tl.constexpr,
    PLACES: tl.constexpr, PER_WORD: tl.constexpr, NATIVE_FP8: tl.constexpr, ADDED: tl.constexpr, SPLITS: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, GROUP_N: tl.constexpr,
):
    # fmt: on
    """Computes one tile of outputs and tokens. With SHARED it takes one part of the inputs, and writes to ``out``
    [SPLITS, T, N]."""
    wide = padded // BLOCK_N
    long = tl.cdiv(tokens, BLOCK_T)
    part = tl.program_id(1)
    # Programs are numbered so that those which run at the same time read the same rows and words, which are then in the
    # cache.
    n, t = tl.swizzle2d(tl.program_id(0) // long, tl.program_id(0) % long, wide, long, GROUP_N)
    output = n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = t * BLOCK_T + tl.arange(0, BLOCK_T)
    read = tl.minimum(token, tokens - 1)
    depth = tl.cdiv(units, SPLITS)
    if SHARED or SPLITS == 1:
        begin = part * depth
        total = _part(
            rows, words, scales, offsets, table, read, output, begin, tl.minimum(begin + depth, units), inputs, padded,
            CODING, BIAS, GROUP, SHIFTED, RAGGED, PLACES, PER_WORD, NATIVE_FP8, BLOCK_N, BLOCK_T,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for begin in range(0, units, depth):
            total += _part(
                rows, words, scales, offsets, table, read, output, begin, tl.minimum(begin + depth, units), inputs,
                padded, CODING, BIAS, GROUP, SHIFTED, RAGGED, PLACES, PER_WORD, NATIVE_FP8, BLOCK_N, BLOCK_T,
            )  # fmt: skip
    kept = (output < outputs)[:, None] & (token < tokens)[None, :]
    place = (part * tokens + token).to(tl.int64) if SHARED else token.to(tl.int64)
    if ADDED:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place[None, :] * outputs + output[:, None], total.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["tokens"])
def _sum(partials, bias, out, tokens, outputs, SPLITS: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the parts [SPLITS, T, N] of one token's outputs in order, and the bias."""
    token = tl.program_id(1)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        place = (part * tokens + token).to(tl.int64) * outputs
        total += tl.load(partials + place + output, mask=inside, other=0.0)
    if ADDED:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * outputs + output, total.to(out.dtype.element_ty), mask=inside)


def splits_of(kind: PackedKind) -> int:
    """Returns into how many parts the inputs are cut, by the matrix's shape alone: a row's bits depend on them."""
    tiles = -(-kind.outputs // _PROGRAM_OUTPUTS)
    wanted = max(1, min(_PROGRAMS // tiles, kind.units // _LEAST_UNITS, _MOST_SPLITS))
    # The number of parts is rounded so that each part has at least one unit of inputs.
    return -(-kind.units // -(-kind.units // wanted))


class QuantizedProduct:
    """Multiplies rows by packed matrices. Owns the workspace: gathered rows, and the sums of parts.

    A call allocates nothing and does not synchronise, so that it can be captured in a CUDA graph.
    """

    def __init__(self, matrices: Iterable[PackedMatrix], max_rows: int, dtype: torch.dtype, device: torch.device):
        """Reserves the workspace. ``matrices`` are all those by which rows [max_rows, K] of ``dtype`` will be
        multiplied."""
        kinds, ordered = set(), [0]
        for matrix in matrices:
            kinds.add(matrix.kind)
            ordered.append(0 if matrix.order is None else matrix.kind.inputs)
        parts = [splits_of(kind) * min(max_rows, SHARED_ROWS) * kind.outputs for kind in kinds]
        self._partials = torch.zeros(max(parts, default=0), dtype=torch.float32, device=device)
        self._gathered = torch.zeros(max_rows * max(ordered), dtype=dtype, device=device)
        self._table = CODINGS["nf4"].to(device)
        self._max_rows, self._dtype, self._arch = max_rows, dtype, arch_of(device)

    def compile(self, matrix: PackedMatrix, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        """Compiles every kernel that products by a matrix need, by running them over zeros: a compilation takes
        seconds, which no step may wait for."""
        kind, made = matrix.kind, matrix.scales.new_zeros
        for count in sorted({min(tile, self._max_rows) for tile in ROW_TILES}):
            rows, out = made(count, kind.inputs, dtype=self._dtype), made(count, kind.outputs, dtype=out_dtype)
            self(rows, matrix, bias, out)

    def __call__(
        self, rows: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiplies rows [T, K], at most ``max_rows``, into ``out`` [T, N], of the rows' type or float32; returns it.

        bias: [N] of the rows' type, or None. Raises Internal for misshapen tensors.
        """
        kind, count = matrix.kind, len(rows)
        floats = (torch.bfloat16, torch.float16, torch.float32)
        check_tensor("rows", rows, (None, kind.inputs), floats, matrix.words.device)
        check_tensor("out", out, (count, kind.outputs), (rows.dtype, torch.float32), rows.device)
        check(count > 0, "no rows to multiply")
        if bias is not None:
            check_tensor("bias", bias, (kind.outputs,), rows.dtype, rows.device)
        if matrix.order is not None:
            check(count * kind.inputs <= len(self._gathered), "more rows than the workspace holds")
            gathered = self._gathered[: count * kind.inputs].view(count, kind.inputs)
            rows = torch.index_select(rows, 1, matrix.order, out=gathered)
        constants = _constants(kind, matrix.offsets is not None, count, rows.element_size(), self._arch)
        shared, splits = constants["SHARED"], constants["SPLITS"]
        if shared:
            check(splits * count * kind.outputs <= len(self._partials), "more parts than the workspace holds")
        tiles = kind.padded // constants["BLOCK_N"] * triton.cdiv(count, constants["BLOCK_T"])
        _product[(tiles, splits if shared else 1)](
            rows,
            matrix.words,
            matrix.scales,
            matrix.scales if matrix.offsets is None else matrix.offsets,
            self._table,
            rows if bias is None else bias,
            self._partials if shared else out,
            count,
            kind.inputs,
            kind.outputs,
            kind.padded,
            kind.units,
            ADDED=bias is not None and not shared,
            **constants,
        )
        if shared:
            use = tuned("quantized_sum", self._arch)
            _sum[(triton.cdiv(kind.outputs, use["block"]), count)](
                self._partials,
                rows if bias is None else bias,
                out,
                count,
                kind.outputs,
                SPLITS=splits,
                ADDED=bias is not None,
                BLOCK=use["block"],
                num_warps=use["num_warps"],
            )
        return out


def _places_of(kind: PackedKind, item_bytes: int, arch: int) -> int:
    """Returns for how many places of a word, one after the other, the kernel loads a scale of each output once."""
    if kind.group % kind.unit == 0:
        return kind.per_word
    # The exact products of float32, and those of an sm_80, leave no registers for scales.
    held = kind.unit % kind.group == 0 and item_bytes < 4 and arch >= 90
    return max(1, kind.group // COLUMNS) if held else 1


def _constants(kind: PackedKind, shifted: bool, rows: int, item_bytes: int, arch: int) -> dict[str, Any]:
    tile = next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])
    use = tuned("quantized_product", arch, rows=tile, bits=BITS[kind.coding], coding=kind.coding, bytes=item_bytes)
    check(OUTPUTS % use["outputs"] == 0, f"a tile of {use['outputs']} outputs does not divide {OUTPUTS}")
    splits = splits_of(kind)
    return {
        "CODING": kind.coding,
        "BIAS": _BIAS.get(kind.coding, 0.0),
        "GROUP": kind.group,
        "SHIFTED": shifted,
        "RAGGED": kind.inputs % kind.unit != 0,
        "PLACES": _places_of(kind, item_bytes, arch),
        "PER_WORD": kind.per_word,
        "NATIVE_FP8": kind.coding == "fp8_e4m3" and arch >= NATIVE_FP8_ARCH and not interpreting(),
        "SPLITS": splits,
        "SHARED": splits > 1 and rows <= SHARED_ROWS,
        "BLOCK_N": use["outputs"],
        "BLOCK_T": tile,
        "GROUP_N": use["group"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
    }
