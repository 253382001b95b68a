"""Products of rows with a quantized matrix, dequantized by the kernel in registers.

    rows [T, K] --gathered in the matrix's order, if it has one--> tiles --'
    words --> weights (code_values.py) ---------------------------------dot, scales of groups--> out [T, N]

Weights are exact, or rounded once, as if the matrix had been dequantized at load: in bfloat16 by 2**-8 of their size at
most, and by little more for signed numbers. float32 rows are multiplied by float32 weights.

A row's bits do not depend on the other rows. Every output is one chain of additions: the inputs are cut into
``splits_of`` parts, by the matrix's shape alone, a part is one accumulator over its units in order, and the parts' sums
are added in order. Few rows leave the device idle and wait for memory, so programs share the parts and a second kernel
adds them; for many rows a program computes all parts itself, and adds them the same way. The matrix is the left operand
of the products of tiles, so that tiles of any number of rows use the same instruction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, prefetch, wait_for_earlier
from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.products.gpu_packing import BITS, COLUMNS, PackedKind, PackedMatrix
from pillion.kernels.gpu.products.packed_tiles import packed_part, tile_constants
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.torch.quantized_matrix import CODINGS

# Rows of a tile; a launch uses the smallest tile that fits its rows, or several of the largest.
ROW_TILES = (16, 32, 64, 128)
# Max rows of launches that share the parts of a matrix among programs.
SHARED_ROWS = 64
# Target number of parts: two programs of 64 outputs for each of an H200's 132 multiprocessors.
_PROGRAMS, _PROGRAM_OUTPUTS = 264, 64
_MIN_UNITS, _MAX_SPLITS = 2, 16
# Units of a program's words, 8 to 16 KB each, prefetched into the L2 while the previous kernel still runs.
_EARLY_UNITS = tl.constexpr(4)
_COLUMNS = tl.constexpr(COLUMNS)


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _product(
    rows, words, scales, offsets, factors, table, bias, out, tokens, inputs, outputs, padded, units,
    CODING: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    EXACT: tl.constexpr, DEPTH: tl.constexpr, PLACES: tl.constexpr, PER_WORD: tl.constexpr, TAIL: tl.constexpr,
    RAGGED: tl.constexpr, ORDERED: tl.constexpr, NATIVE_FP8: tl.constexpr, ADDED: tl.constexpr, SPLITS: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, GROUP_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Compute one tile of outputs and tokens. With SHARED, compute one part of the inputs, into ``out`` [SPLITS, T,
    N]."""
    wide = tl.cdiv(outputs, BLOCK_N)
    long = tl.cdiv(tokens, BLOCK_T)
    part = tl.program_id(1)
    # Swizzled so that concurrent programs read the same rows and words, which are then in the cache.
    n, t = tl.swizzle2d(tl.program_id(0) // long, tl.program_id(0) % long, wide, long, GROUP_N)
    output = n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = t * BLOCK_T + tl.arange(0, BLOCK_T)
    read = tl.minimum(token, tokens - 1)
    made = tl.minimum(output, outputs - 1)
    depth = tl.cdiv(units, SPLITS)
    if DEPENDENT and TAIL == 0:
        # Words are constant, and a unit's of one tile are one piece of memory. Rows and parts may be in use.
        unit = tl.minimum(part * depth + tl.arange(0, _EARLY_UNITS), units - 1)
        first = tl.maximum(tl.minimum(n * BLOCK_N, padded - BLOCK_N), 0)
        prefetch(words + (unit * padded + first) * _COLUMNS, tl.minimum(BLOCK_N, padded) * _COLUMNS * 4)
    wait_for_earlier(DEPENDENT)
    if SHARED or SPLITS == 1:
        begin = part * depth
        total = packed_part(
            rows, words, scales, offsets, factors, words, table, read, made, begin, tl.minimum(begin + depth, units),
            inputs, padded, CODING, BIAS, GROUP, SCALE, SHIFT, EXACT, DEPTH, PLACES, PER_WORD, TAIL, RAGGED, ORDERED,
            NATIVE_FP8, BLOCK_N, BLOCK_T,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for begin in range(0, units, depth):
            total += packed_part(
                rows, words, scales, offsets, factors, words, table, read, made, begin,
                tl.minimum(begin + depth, units), inputs, padded, CODING, BIAS, GROUP, SCALE, SHIFT, EXACT, DEPTH,
                PLACES, PER_WORD, TAIL, RAGGED, ORDERED, NATIVE_FP8, BLOCK_N, BLOCK_T,
            )  # fmt: skip
    kept = (output < outputs)[:, None] & (token < tokens)[None, :]
    place = (part * tokens + token).to(tl.int64) if SHARED else token.to(tl.int64)
    if ADDED:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place[None, :] * outputs + output[:, None], total.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["tokens"])
def _sum(
    partials,
    bias,
    out,
    tokens,
    outputs,
    SPLITS: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add the parts [SPLITS, T, N] of one token's outputs in order, and the bias."""
    wait_for_earlier(DEPENDENT)
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
    """Return the number of parts of the inputs, by the matrix's shape alone: a row's bits depend on it."""
    tiles = -(-kind.outputs // _PROGRAM_OUTPUTS)
    wanted = max(1, min(_PROGRAMS // tiles, kind.units // _MIN_UNITS, _MAX_SPLITS))
    # Rounded so that each part has at least one unit of inputs.
    return -(-kind.units // -(-kind.units // wanted))


class QuantizedGemm:
    """Product of rows with packed matrices. Owns the workspace: gathered rows, and the sums of parts.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph.
    """

    def __init__(self, matrices: Iterable[PackedMatrix], max_rows: int, dtype: torch.dtype, device: torch.device):
        """Reserve the workspace. ``matrices``: all those by which rows [max_rows, K] of ``dtype`` will be
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
        """Compile every kernel that products with a matrix need, by running them over zeros: compiling takes seconds,
        which no step may wait for."""
        kind, made = matrix.kind, matrix.scales.new_zeros
        for count in sorted({min(tile, self._max_rows) for tile in ROW_TILES}):
            rows, out = made(count, kind.inputs, dtype=self._dtype), made(count, kind.outputs, dtype=out_dtype)
            self(rows, matrix, bias, out)

    def __call__(
        self, rows: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows [T, K], at most ``max_rows``, into ``out`` [T, N], of the rows' type or float32; return it.

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
        constants = _constants(kind, count, rows.dtype, self._arch)
        shared, splits = constants["SHARED"], constants["SPLITS"]
        if shared:
            check(splits * count * kind.outputs <= len(self._partials), "more parts than the workspace holds")
        tiles = cdiv(kind.outputs, constants["BLOCK_N"]) * cdiv(count, constants["BLOCK_T"])
        _product[(tiles, splits if shared else 1)](
            rows,
            matrix.words,
            matrix.scales,
            matrix.scales if matrix.offsets is None else matrix.offsets,
            self._table if matrix.factors is None else matrix.factors,
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
            _sum[(cdiv(kind.outputs, use["block"]), count)](
                self._partials,
                rows if bias is None else bias,
                out,
                count,
                kind.outputs,
                SPLITS=splits,
                ADDED=bias is not None,
                BLOCK=use["block"],
                num_warps=use["num_warps"],
                **dependent(self._arch),
            )
        return out


def _constants(kind: PackedKind, rows: int, dtype: torch.dtype, arch: int) -> dict[str, Any]:
    tile = next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])
    use = tuned("quantized_product", arch, rows=tile, bits=BITS[kind.coding], coding=kind.coding, bytes=dtype.itemsize)
    splits = splits_of(kind)
    return tile_constants(kind, dtype, arch) | {
        "SPLITS": splits,
        "SHARED": splits > 1 and rows <= SHARED_ROWS,
        "BLOCK_N": use["outputs"],
        "BLOCK_T": use.get("rows", tile),
        "GROUP_N": use["group"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
        # Large tiles compute for long, and have no registers left for a prefetch.
        **(dependent(arch) if rows <= SHARED_ROWS else {"DEPENDENT": False}),
    }
