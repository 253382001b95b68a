"""Products of rows with a plain matrix, where cuBLAS is slow, or where a row's bits may not depend on the other rows.

    weights [N, K] --tiles [outputs, inputs]--'
    rows [T, K]    --tiles [inputs, rows]-----dot--> sums of parts --added in order, bias--> out [T, N]

Few rows wait for the weights. A matrix of 4096 outputs has 64 tiles of 64, too few for 132 processors, so the inputs
are also cut into parts, enough for two programs per processor: all of them run at once, and each has several tiles of
weights in flight. The last program of a tile to arrive adds up the parts' sums, in the order of the parts, so no second
kernel is needed. An integer ticket determines which one that is; it resets the ticket for the next launch.

A row's bits do not depend on the other rows, nor on their number. Every output is one chain of additions: the number of
parts is :func:`splits_of` the matrix's shape alone, a part is one accumulator over its inputs in order, and parts are
added in order. For many rows a program computes all parts itself, and adds them the same way. The matrix is the left
operand of the products of tiles, so that tiles of any number of rows use the same instruction.

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
# Max rows of launches that share the parts of a matrix among programs. With more rows, tiles alone are enough.
SHARED_ROWS = 256
# The inputs of a matrix are cut at multiples of this, into enough parts for two programs of 64 outputs for each of an
# H200's 132 multiprocessors.
UNIT_INPUTS = 128
_PROGRAMS, _PROGRAM_OUTPUTS = 264, 64
_MIN_UNITS, _MAX_SPLITS = 2, 16
# Inputs of a tile of weights, by the bytes of one: in float32, products of tiles are computed in registers.
_TILE_INPUTS = {2: 128, 4: 32}
# Max tiles of outputs and rows of matrices whose parts are shared.
_MAX_TICKETS = 4 * _PROGRAMS


# fmt: off
@triton.jit
def _part(
    cells, row, seen, begin, end, RAGGED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # fmt: on
    """Sum inputs ``begin`` .. ``end`` - 1: float32 [outputs, rows]. Rows that are not ``seen`` are zeros."""
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for first in range(begin, end, BLOCK_K):
        if RAGGED:
            inside = first + tl.arange(0, BLOCK_K) < end
            left = tl.load(cells + first, mask=inside[None, :], other=0.0)
            right = tl.load(row + first, mask=seen & inside[:, None], other=0.0)
        else:
            left = tl.load(cells + first)
            right = tl.load(row + first, mask=seen, other=0.0)
        acc = dot(left, right, acc)
    return acc


@triton.jit
def _store(total, bias, out, output, token, outputs, tokens, ADDED: tl.constexpr):
    """Store sums [outputs, rows], with the bias, as rows of the result."""
    if ADDED:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    kept = (output < outputs)[:, None] & (token < tokens)[None, :]
    cells = out + token.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(cells, total.to(out.dtype.element_ty), mask=kept)


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _product(
    rows, weights, bias, out, partials, tickets, tokens, inputs, outputs, depth,
    RAGGED: tl.constexpr, ADDED: tl.constexpr, SPLITS: tl.constexpr, SHARED: tl.constexpr, PREFETCHED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Compute one tile of outputs and rows; with SHARED one part of it, of ``depth`` inputs, and the tile's result in
    the last of its programs to arrive."""
    wide = tl.cdiv(outputs, BLOCK_N)
    long = tl.cdiv(tokens, BLOCK_T)
    tile = tl.program_id(0)
    # Swizzled so that concurrent programs read the same rows and weights.
    n, t = tl.swizzle2d(tile // long, tile % long, wide, long, GROUP_N)
    output = n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = t * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_K)
    # Outputs after the last one are computed as that one, and not stored.
    line = weights + tl.minimum(output, outputs - 1).to(tl.int64) * inputs
    cells = line[:, None] + column[None, :]
    row = rows + token.to(tl.int64)[None, :] * inputs + column[:, None]
    seen = (token < tokens)[None, :]
    begin = tl.program_id(1) * depth
    end = tl.minimum(begin + depth, inputs)
    if DEPENDENT and PREFETCHED > 0:
        # Weights are constant. Rows, parts and tickets may be in use by kernels that still run.
        prefetch(line + begin, tl.minimum(end - begin, PREFETCHED * BLOCK_K) * weights.dtype.element_ty.itemsize)
    wait_for_earlier(DEPENDENT)
    if SHARED:
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        mine = partials + tile * (SPLITS * BLOCK_N * BLOCK_T) + cell
        found = _part(cells, row, seen, begin, end, RAGGED, BLOCK_N, BLOCK_T, BLOCK_K)
        tl.store(mine + tl.program_id(1) * (BLOCK_N * BLOCK_T), found)
        # The barrier orders the stores of all threads before the ticket, which one thread increments.
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for part in tl.static_range(SPLITS):
                # Written by other processors: read from the L2.
                total += tl.load(mine + part * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
            _store(total, bias, out, output, token, outputs, tokens, ADDED)
            tl.store(tickets + tile, 0)
    else:
        if SPLITS == 1:
            total = _part(cells, row, seen, begin, end, RAGGED, BLOCK_N, BLOCK_T, BLOCK_K)
        else:
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for first in range(0, inputs, depth):
                last = tl.minimum(first + depth, inputs)
                total += _part(cells, row, seen, first, last, RAGGED, BLOCK_N, BLOCK_T, BLOCK_K)
        _store(total, bias, out, output, token, outputs, tokens, ADDED)


def splits_of(inputs: int, outputs: int) -> int:
    """Return the number of parts of the inputs, by the matrix's shape alone: a row's bits depend on it."""
    units, tiles = -(-inputs // UNIT_INPUTS), -(-outputs // _PROGRAM_OUTPUTS)
    wanted = max(1, min(_PROGRAMS // tiles, units // _MIN_UNITS, _MAX_SPLITS))
    # Rounded so that each part has at least one unit of inputs.
    return -(-units // -(-units // wanted))


class DenseGemm:
    """Product of rows with plain matrices of one type. Owns the workspace: sums of parts, and tickets.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph. Calls must be ordered on one
    stream.
    """

    def __init__(self, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the workspace for rows [max_rows, K] of ``dtype``: at most 17 MB."""
        self._dtype, self._arch = dtype, arch_of(device)
        rows = next((tile for tile in ROW_TILES if max_rows <= tile), SHARED_ROWS)
        # A matrix whose parts are shared has at most _PROGRAMS tiles and parts, and a tile may be one of 128 outputs.
        columns = (_PROGRAMS + _MAX_SPLITS) * _PROGRAM_OUTPUTS
        self._partials = torch.zeros(columns * rows, dtype=torch.float32, device=device)
        self._tickets = torch.zeros(_MAX_TICKETS, dtype=torch.int32, device=device)

    def most_rows(self, weight: torch.Tensor) -> int:
        """Return the max rows for which this replaces cuBLAS for a matrix [N, K], by the tuning file."""
        if weight.dtype != self._dtype:
            return 0
        outputs, inputs = weight.shape
        use = tuned("plain_product_rows", self._arch, inputs=inputs, outputs=outputs, bytes=weight.itemsize)
        return use["rows"] if weight.nbytes <= use["most_mb"] * 10**6 else 0

    def compile(self, weight: torch.Tensor, bias: torch.Tensor | None, most_rows: int) -> None:
        """Compile every kernel that products of up to ``most_rows`` rows with a matrix need, by running them over
        zeros: compiling takes seconds, which no step may wait for."""
        for count in sorted({min(tile, most_rows) for tile in (*ROW_TILES, SHARED_ROWS + 1)} - {0}):
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
        splits, shared = constants["SPLITS"], constants["SHARED"]
        tiles = -(-outputs // constants["BLOCK_N"]) * -(-count // constants["BLOCK_T"])
        if shared:
            cells = tiles * splits * constants["BLOCK_N"] * constants["BLOCK_T"]
            check(cells <= len(self._partials), "{} sums of parts are more than the workspace holds", cells)
            check(tiles <= len(self._tickets), "{} tiles are more than there are tickets", tiles)
        _product[(tiles, splits if shared else 1)](
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
            ADDED=bias is not None,
            **constants,
        )
        return out


def _constants(inputs: int, outputs: int, rows: int, item_bytes: int, arch: int) -> dict[str, Any]:
    tile = next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])
    use = tuned("plain_product", arch, rows=tile, bytes=item_bytes)
    splits, columns = splits_of(inputs, outputs), _TILE_INPUTS[item_bytes]
    ragged = inputs % columns != 0
    return {
        "RAGGED": ragged,
        "SPLITS": splits,
        "SHARED": splits > 1 and rows <= SHARED_ROWS,
        # A prefetch needs addresses that are multiples of 16 bytes.
        "PREFETCHED": 0 if ragged else use["prefetched"],
        # Masks of inputs and 128 x 128 sums do not fit into the registers together.
        "BLOCK_N": min(use["outputs"], 64) if ragged else use["outputs"],
        "BLOCK_T": tile,
        "BLOCK_K": columns,
        "GROUP_N": use["group"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
        **dependent(arch),
    }
