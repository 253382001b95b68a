"""Products of rows with a quantized matrix, dequantized by the kernel in registers.

    rows [T, K] --gathered in the matrix's order, if it has one--> tiles --'
    words --> weights (code_values.py) ---------------------------------dot, scales of groups--> out [T, N]

Weights are exact, or rounded once, as if the matrix had been dequantized at load: in bfloat16 by 2**-8 of their size at
most, and by little more for signed numbers. float32 rows are multiplied by float32 weights.

A row's bits do not depend on the other rows. Every output is one chain of additions: the number of splits of the inputs
depends on the matrix's shape alone (:func:`splits_of`), a split is one accumulator over its units in order, and partial
sums are added in order. Few rows are memory-bound and would leave the device idle, so their splits are computed by
separate programs and added up by a second kernel (split-K). For many rows a program computes all splits itself, and
adds them the same way. The matrix is the left operand of the products of tiles, so that tiles of any number of rows use
the same instruction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, prefetch, wait_for_earlier
from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.products.dense_gemm import MAX_SPLITS, MIN_UNITS, PROGRAM_OUTPUTS, PROGRAMS, ROW_TILES
from pillion.kernels.gpu.products.gpu_packing import BITS, COLUMNS, PackedKind, PackedMatrix
from pillion.kernels.gpu.products.packed_tiles import packed_part, tile_constants
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.torch.quantized_matrix import CODINGS

# Max rows of split-K launches.
SPLIT_K_MAX_ROWS = 64
# Units of a program's words, 8 to 16 KB each, prefetched into the L2 while the previous kernel still runs.
_EARLY_UNITS = tl.constexpr(4)
_COLUMNS = tl.constexpr(COLUMNS)


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _product(
    rows, words, scales, offsets, factors, table, bias, out, tokens, inputs, outputs, padded, units,
    CODING: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    EXACT: tl.constexpr, DEPTH: tl.constexpr, PLACES: tl.constexpr, PER_WORD: tl.constexpr, TAIL: tl.constexpr,
    RAGGED: tl.constexpr, ORDERED: tl.constexpr, NATIVE_FP8: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, GROUP_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Compute one tile of outputs and tokens; with SPLIT_K one split of its inputs, into ``out`` [SPLITS, T, N]."""
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    tiles_t = tl.cdiv(tokens, BLOCK_T)
    split = tl.program_id(1)
    # Swizzled so that concurrent programs read the same rows and words, which are then in the cache.
    n, t = tl.swizzle2d(tl.program_id(0) // tiles_t, tl.program_id(0) % tiles_t, tiles_n, tiles_t, GROUP_N)
    output = n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = t * BLOCK_T + tl.arange(0, BLOCK_T)
    read = tl.minimum(token, tokens - 1)
    output_read = tl.minimum(output, outputs - 1)
    depth = tl.cdiv(units, SPLITS)
    if DEPENDENT and TAIL == 0:
        # Words are constant, and the words of a unit and tile are contiguous. Rows and partial sums may be in use by
        # kernels that still run.
        unit = tl.minimum(split * depth + tl.arange(0, _EARLY_UNITS), units - 1)
        first = tl.maximum(tl.minimum(n * BLOCK_N, padded - BLOCK_N), 0)
        prefetch(words + (unit * padded + first) * _COLUMNS, tl.minimum(BLOCK_N, padded) * _COLUMNS * 4)
    wait_for_earlier(DEPENDENT)
    if SPLIT_K or SPLITS == 1:
        begin = split * depth
        total = packed_part(
            rows, words, scales, offsets, factors, words, table, read, output_read, begin,
            tl.minimum(begin + depth, units), inputs, padded, CODING, BIAS, GROUP, SCALE, SHIFT, EXACT, DEPTH,
            PLACES, PER_WORD, TAIL, RAGGED, ORDERED, NATIVE_FP8, BLOCK_N, BLOCK_T,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for begin in range(0, units, depth):
            total += packed_part(
                rows, words, scales, offsets, factors, words, table, read, output_read, begin,
                tl.minimum(begin + depth, units), inputs, padded, CODING, BIAS, GROUP, SCALE, SHIFT, EXACT, DEPTH,
                PLACES, PER_WORD, TAIL, RAGGED, ORDERED, NATIVE_FP8, BLOCK_N, BLOCK_T,
            )  # fmt: skip
    mask = (output < outputs)[:, None] & (token < tokens)[None, :]
    place = (split * tokens + token).to(tl.int64) if SPLIT_K else token.to(tl.int64)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place[None, :] * outputs + output[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _sum(
    partials,
    bias,
    out,
    tokens,
    outputs,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add up the partial sums [SPLITS, T, N] of a block of one token's outputs in order, and add the bias."""
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(1)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * tokens + token).to(tl.int64) * outputs
        total += tl.load(partials + place + output, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * outputs + output, total.to(out.dtype.element_ty), mask=inside)


def splits_of(kind: PackedKind) -> int:
    """Return the number of splits of the inputs. It depends on the matrix's shape alone, because a row's bits depend on
    it."""
    tiles = -(-kind.outputs // PROGRAM_OUTPUTS)
    target = max(1, min(PROGRAMS // tiles, kind.units // MIN_UNITS, MAX_SPLITS))
    # Rounded so that each split has at least one unit of inputs.
    return -(-kind.units // -(-kind.units // target))


class QuantizedGemm:
    """GEMM of rows with packed matrices. Owns the workspace: gathered rows, and partial sums of splits.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph.
    """

    def __init__(self, matrices: Iterable[PackedMatrix], max_rows: int, dtype: torch.dtype, device: torch.device):
        """Allocate the workspace for products of rows [max_rows, K] of ``dtype`` with these matrices."""
        kinds, ordered = set(), [0]
        for matrix in matrices:
            kinds.add(matrix.kind)
            ordered.append(0 if matrix.order is None else matrix.kind.inputs)
        parts = [splits_of(kind) * min(max_rows, SPLIT_K_MAX_ROWS) * kind.outputs for kind in kinds]
        self._partials = torch.zeros(max(parts, default=0), dtype=torch.float32, device=device)
        self._gathered = torch.zeros(max_rows * max(ordered), dtype=dtype, device=device)
        self._table = CODINGS["nf4"].to(device)
        self._max_rows, self._dtype, self._arch = max_rows, dtype, arch_of(device)

    def compile(self, matrix: PackedMatrix, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        """Compile all kernels for products with ``matrix``, by running them on zeros: steps must not wait for seconds
        of compilation."""
        kind, zeros = matrix.kind, matrix.scales.new_zeros
        for count in sorted({min(tile, self._max_rows) for tile in ROW_TILES}):
            rows, out = zeros(count, kind.inputs, dtype=self._dtype), zeros(count, kind.outputs, dtype=out_dtype)
            self(rows, matrix, bias, out)

    def __call__(
        self, rows: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows [T, K], at most ``max_rows``, by ``matrix`` into ``out`` [T, N], of the rows' type or float32;
        return it.

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
        split_k, splits = constants["SPLIT_K"], constants["SPLITS"]
        if split_k:
            check(splits * count * kind.outputs <= len(self._partials), "more parts than the workspace holds")
        tiles = cdiv(kind.outputs, constants["BLOCK_N"]) * cdiv(count, constants["BLOCK_T"])
        _product[(tiles, splits if split_k else 1)](
            rows,
            matrix.words,
            matrix.scales,
            matrix.scales if matrix.offsets is None else matrix.offsets,
            self._table if matrix.factors is None else matrix.factors,
            self._table,
            rows if bias is None else bias,
            self._partials if split_k else out,
            count,
            kind.inputs,
            kind.outputs,
            kind.padded,
            kind.units,
            HAS_BIAS=bias is not None and not split_k,
            **constants,
        )
        if split_k:
            use = tuned("quantized_sum", self._arch)
            _sum[(cdiv(kind.outputs, use["block"]), count)](
                self._partials,
                rows if bias is None else bias,
                out,
                count,
                kind.outputs,
                SPLITS=splits,
                HAS_BIAS=bias is not None,
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
        "SPLIT_K": splits > 1 and rows <= SPLIT_K_MAX_ROWS,
        "BLOCK_N": use["outputs"],
        "BLOCK_T": use.get("rows", tile),
        "GROUP_N": use["group"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
        # Large tiles are compute-bound, and have no registers left for a prefetch.
        **(dependent(arch) if rows <= SPLIT_K_MAX_ROWS else {"DEPENDENT": False}),
    }
