"""Dense GEMM with deterministic split-K, where cuBLAS is slow, or where a row's bits may not depend on the other rows.

    weights [N, K] --tiles [outputs, inputs]--'
    rows [T, K]    --tiles [inputs, rows]-----dot--> partial sums per split --added in order, bias--> out [T, N]

Few rows are bound by the load of the weights. A matrix of 4096 outputs has 64 tiles of 64, too few for 132
multiprocessors, so the inputs are split (split-K), into enough splits for two programs per multiprocessor: all of them
run at once, and each has several tiles of weights in flight. The last program of an output tile to finish adds up the
partial sums in the order of the splits, so no second kernel is needed. It is identified by an integer ticket, which it
resets for the next launch.

A row's bits do not depend on the other rows, nor on their number. Every output is one chain of additions: the number of
splits depends on the matrix's shape alone (:func:`splits_of`), a split is one accumulator over its inputs in order, and
partial sums are added in order. For many rows a program computes all splits itself, and adds them the same way. The
matrix is the left operand of the products of tiles, so that tiles of any number of rows use the same instruction.

In a step, weights are prefetched into the L2 while the previous kernel still runs
(:mod:`pillion.kernels.gpu.dependent`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, prefetch, wait_for_earlier
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.tuned import tuned

# Rows of a tile; a launch uses the smallest tile that fits its rows, or several of the largest.
ROW_TILES = (16, 32, 64, 128)
# Max rows of split-K launches. With more rows, output tiles alone fill the device.
SPLIT_K_MAX_ROWS = 256
# Inputs are split at multiples of this, into enough splits for two programs of 64 outputs for each of an H200's 132
# multiprocessors.
UNIT_INPUTS = 128
PROGRAMS, PROGRAM_OUTPUTS = 264, 64
MIN_UNITS, MAX_SPLITS = 2, 16
# BLOCK_K by bytes per weight; in float32, tiles are multiplied in registers.
_BLOCK_K = {2: 128, 4: 32}
# Max output tiles of a split-K launch, each of which has a ticket.
_MAX_TICKETS = 4 * PROGRAMS


# fmt: off
@triton.jit
def _partial_sums(
    weight_ptrs, row_ptrs, row_mask, begin, end, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # fmt: on
    """Return the sums over inputs ``begin`` .. ``end`` - 1: float32 [outputs, rows], 0 for rows outside of
    ``row_mask``."""
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k in range(begin, end, BLOCK_K):
        if RAGGED:
            k_mask = k + tl.arange(0, BLOCK_K) < end
            left = tl.load(weight_ptrs + k, mask=k_mask[None, :], other=0.0)
            right = tl.load(row_ptrs + k, mask=row_mask & k_mask[:, None], other=0.0)
        else:
            left = tl.load(weight_ptrs + k)
            right = tl.load(row_ptrs + k, mask=row_mask, other=0.0)
        acc = dot(left, right, acc)
    return acc


@triton.jit
def _store(total, bias, out, output, token, outputs, tokens, HAS_BIAS: tl.constexpr):
    """Store sums [outputs, rows], with the bias, as rows of the result."""
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    mask = (output < outputs)[:, None] & (token < tokens)[None, :]
    pointers = out + token.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _product(
    rows, weights, bias, out, partials, tickets, tokens, inputs, outputs, split_inputs,
    RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr, PREFETCHED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Compute one tile of outputs and rows. With SPLIT_K a program computes one split of it, of ``split_inputs``
    inputs, and the tile's last program to finish also adds up the splits."""
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    tiles_t = tl.cdiv(tokens, BLOCK_T)
    tile = tl.program_id(0)
    # Swizzled so that concurrent programs read the same rows and weights.
    n, t = tl.swizzle2d(tile // tiles_t, tile % tiles_t, tiles_n, tiles_t, GROUP_N)
    output = n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = t * BLOCK_T + tl.arange(0, BLOCK_T)
    offset_k = tl.arange(0, BLOCK_K)
    # Outputs past the end repeat the last one and are not stored.
    weight_rows = weights + tl.minimum(output, outputs - 1).to(tl.int64) * inputs
    weight_ptrs = weight_rows[:, None] + offset_k[None, :]
    row_ptrs = rows + token.to(tl.int64)[None, :] * inputs + offset_k[:, None]
    row_mask = (token < tokens)[None, :]
    begin = tl.program_id(1) * split_inputs
    end = tl.minimum(begin + split_inputs, inputs)
    if DEPENDENT and PREFETCHED > 0:
        # Weights are constant. Rows, partial sums and tickets may be in use by kernels that still run.
        size = tl.minimum(end - begin, PREFETCHED * BLOCK_K) * weights.dtype.element_ty.itemsize
        prefetch(weight_rows + begin, size)
    wait_for_earlier(DEPENDENT)
    if SPLIT_K:
        index = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        partial_ptrs = partials + tile * (SPLITS * BLOCK_N * BLOCK_T) + index
        acc = _partial_sums(weight_ptrs, row_ptrs, row_mask, begin, end, RAGGED, BLOCK_N, BLOCK_T, BLOCK_K)
        tl.store(partial_ptrs + tl.program_id(1) * (BLOCK_N * BLOCK_T), acc)
        # The barrier orders the stores of all threads before the ticket, which one thread increments.
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for split in tl.static_range(SPLITS):
                # Written by other multiprocessors, so read from the L2.
                total += tl.load(partial_ptrs + split * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
            _store(total, bias, out, output, token, outputs, tokens, HAS_BIAS)
            tl.store(tickets + tile, 0)
    else:
        if SPLITS == 1:
            total = _partial_sums(weight_ptrs, row_ptrs, row_mask, begin, end, RAGGED, BLOCK_N, BLOCK_T, BLOCK_K)
        else:
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for first in range(0, inputs, split_inputs):
                last = tl.minimum(first + split_inputs, inputs)
                total += _partial_sums(weight_ptrs, row_ptrs, row_mask, first, last, RAGGED, BLOCK_N, BLOCK_T, BLOCK_K)
        _store(total, bias, out, output, token, outputs, tokens, HAS_BIAS)


def splits_of(inputs: int, outputs: int) -> int:
    """Return the number of splits of the inputs. It depends on the matrix's shape alone, because a row's bits depend on
    it."""
    units, tiles = -(-inputs // UNIT_INPUTS), -(-outputs // PROGRAM_OUTPUTS)
    target = max(1, min(PROGRAMS // tiles, units // MIN_UNITS, MAX_SPLITS))
    # Rounded so that each split has at least one unit of inputs.
    return -(-units // -(-units // target))


class DenseGemm:
    """GEMM of rows with unquantized matrices of one type. Owns the workspace: partial sums and tickets.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph. Calls must be ordered on one
    stream.
    """

    def __init__(self, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the workspace for rows [max_rows, K] of ``dtype``: at most 17 MB."""
        self._dtype, self._arch = dtype, arch_of(device)
        rows = next((tile for tile in ROW_TILES if max_rows <= tile), SPLIT_K_MAX_ROWS)
        # In split-K launches, tiles of 64 outputs times splits are at most PROGRAMS; tiles of 128 outputs add at most
        # half a tile per split.
        columns = (PROGRAMS + MAX_SPLITS) * PROGRAM_OUTPUTS
        self._partials = torch.zeros(columns * rows, dtype=torch.float32, device=device)
        self._tickets = torch.zeros(_MAX_TICKETS, dtype=torch.int32, device=device)

    def max_rows(self, weight: torch.Tensor) -> int:
        """Return the max rows for which this replaces cuBLAS with matrix ``weight`` [N, K], by the tuning file."""
        if weight.dtype != self._dtype:
            return 0
        outputs, inputs = weight.shape
        use = tuned("plain_product_rows", self._arch, inputs=inputs, outputs=outputs, bytes=weight.itemsize)
        return use["rows"] if weight.nbytes <= use["most_mb"] * 10**6 else 0

    def compile(self, weight: torch.Tensor, bias: torch.Tensor | None, max_rows: int) -> None:
        """Compile all kernels for products of up to ``max_rows`` rows with ``weight``, by running them on zeros: steps
        must not wait for seconds of compilation."""
        for count in sorted({min(tile, max_rows) for tile in (*ROW_TILES, SPLIT_K_MAX_ROWS + 1)} - {0}):
            self(weight.new_zeros(count, weight.shape[1]), weight, bias, weight.new_zeros(count, weight.shape[0]))

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows [T, K] by ``weight`` [N, K] into ``out`` [T, N], of the rows' type or float32; return it.

        bias: [N] of the rows' type, or None. Raises Internal for misshapen tensors.
        """
        count = len(rows)
        check_tensor("weight", weight, (None, None), self._dtype)
        outputs, inputs = weight.shape
        check_tensor("rows", rows, (None, inputs), self._dtype, weight.device)
        check_tensor("out", out, (count, outputs), (self._dtype, torch.float32), weight.device)
        check(count > 0 and inputs > 0 and outputs > 0, "{} rows by a matrix {}", count, weight.shape)
        if bias is not None:
            check_tensor("bias", bias, (outputs,), self._dtype, weight.device)
        constants = _constants(inputs, outputs, count, self._dtype.itemsize, self._arch)
        splits, split_k = constants["SPLITS"], constants["SPLIT_K"]
        tiles = -(-outputs // constants["BLOCK_N"]) * -(-count // constants["BLOCK_T"])
        if split_k:
            partials = tiles * splits * constants["BLOCK_N"] * constants["BLOCK_T"]
            check(partials <= len(self._partials), "the workspace is too small for {} partial sums", partials)
            check(tiles <= len(self._tickets), "there are too few tickets for {} tiles", tiles)
        _product[(tiles, splits if split_k else 1)](
            rows,
            weight,
            rows if bias is None else bias,
            out,
            self._partials,
            self._tickets,
            count,
            inputs,
            outputs,
            cdiv(cdiv(inputs, UNIT_INPUTS), splits) * UNIT_INPUTS,
            HAS_BIAS=bias is not None,
            **constants,
        )
        return out


def _constants(inputs: int, outputs: int, rows: int, item_bytes: int, arch: int) -> dict[str, Any]:
    """Return the constexprs and launch options of :func:`_product`, except HAS_BIAS."""
    tile = next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])
    use = tuned("plain_product", arch, rows=tile, bytes=item_bytes)
    splits, block_k = splits_of(inputs, outputs), _BLOCK_K[item_bytes]
    ragged = inputs % block_k != 0
    return {
        "RAGGED": ragged,
        "SPLITS": splits,
        "SPLIT_K": splits > 1 and rows <= SPLIT_K_MAX_ROWS,
        # Prefetches need addresses that are multiples of 16 bytes.
        "PREFETCHED": 0 if ragged else use["prefetched"],
        # With input masks, sums of 128 x 128 do not fit into the registers.
        "BLOCK_N": min(use["outputs"], 64) if ragged else use["outputs"],
        "BLOCK_T": tile,
        "BLOCK_K": block_k,
        "GROUP_N": use["group"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
        **dependent(arch),
    }
