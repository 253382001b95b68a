"""Attention in parts of a fixed number of keys, so that a row's bits depend on its own sequence alone
(``--batch-invariant``).

    keys of a sequence    0 ......... P ......... 2P ......... 3P ....      P: PART, a multiple of a key tile

    a whole unit          one item: its program folds part after part, and joins each one's result with those before
    a cut unit            one item for each part --partial results--> the merge joins them in the same order

The kernels of :mod:`pillion.kernels.gpu.attention.attention_kernel` cut a unit where the work of the batch falls, and
the roundings of a row's fold follow the cut. Here a fold begins at every multiple of P, and :func:`_join` alone, which
leaves no rounding to the compiler, joins two results. So it changes no bit which units are cut, and the planner chooses
them by the batch (``_in_parts`` in gpu_attention_plan.py).

In addition, a row must see the same key tiles in the same order, whichever tile of rows it is in. Invisible key tiles
change nothing: their weights are 0, its maximum stays, and a part of such keys alone has the logarithm -infinity.
Decodes and chunks may have tiles of different rows and warps, provided that each warp has 16 rows with all keys of a
tile: the instructions that multiply for a row and add up its weights are then the same.

A program accumulates results in its own rows of the partial results, because its registers fit only one tile of them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pillion.kernels.gpu.attention.attention_kernel import _early, _tiles
from pillion.kernels.gpu.attention.attention_rows import (
    _LOG2_E,
    _LOWEST,
    _PARTS,
    _WORDS,
    _queries,
    _rows_of,
    _whole,
    _words,
)
from pillion.kernels.gpu.attention.gpu_attention_plan import PARTS_A_PROGRAM, Tiling
from pillion.kernels.gpu.dependent import wait_for_earlier
from pillion.kernels.gpu.tuned import tuned

# Words of an item, by index, as in pillion.kernels.gpu.attention.gpu_attention_plan.
_ROW, _ROWS, _HEAD, _PARTIAL = map(tl.constexpr, (1, 2, 4, 7))
# Bytes spilled by heads of these widths where parts end, once per part.
SPILL_BYTES = {128: 16, 256: 152}


@triton.jit
def _join(sums, top, total, piece, log):
    """Add a part's results [R, D], whose weights have the logarithms ``log`` [R], to the sums, the maxima and the
    totals of rows."""
    new_top = tl.maximum(top, log)
    weight, shrink = tl.exp2(log - new_top), tl.exp2(top - new_top)
    total = tl.fma(total, shrink, weight)
    shrunk = sums * shrink[:, None]
    sums = tl.fma(piece, tl.broadcast_to(weight[:, None], piece.shape), shrunk)
    return sums, new_top, total


@triton.jit
def _before_all(sinks, heads, SINKS: tl.constexpr):
    """Return the initial maxima and totals of rows; sinks are counted here."""
    if SINKS:
        top = tl.maximum(tl.load(sinks + heads) * _LOG2_E, _LOWEST)
        total = tl.full(heads.shape, 1.0, tl.float32)
    else:
        top = tl.full(heads.shape, _LOWEST, tl.float32)
        total = tl.zeros(heads.shape, tl.float32)
    return top, total


@triton.jit
def _end_part(
    acc, top, total, all_top, all_total, joined, last, item, own, out, partials, partial_logs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """End a part: store its result if the unit is cut; else add it to the ``joined`` parts before it, if any, and store
    the sum of all parts after the ``last`` one. Returns the joined maxima and totals."""
    # Read the item again: its addresses would occupy registers in the loop over keys.
    row, rows = tl.load(item + _ROW, volatile=True), tl.load(item + _ROWS, volatile=True)
    partial = tl.load(item + _PARTIAL, volatile=True)
    columns, places = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_M)
    kept = places < rows
    piece = acc / tl.where(total > 0, total, 1.0)[:, None]
    log = top + tl.log2(total)
    if partial >= 0:
        place = partial + places
        tl.store(partials + (place.to(tl.int64)[:, None] * BLOCK_D + columns), piece, mask=kept[:, None])
        tl.store(partial_logs + place, log, mask=kept)
    else:
        # A partial of -1 means the program's own rows.
        held = partials + ((own + 1 + partial + places).to(tl.int64)[:, None] * BLOCK_D + columns)
        sums = tl.load(held, mask=(kept & joined)[:, None], other=0.0)
        sums, all_top, all_total = _join(sums, all_top, all_total, piece, log)
        if last:
            packed = row + tl.minimum(places, rows - 1)
            heads = tl.load(item + _HEAD, volatile=True) * GROUP + packed % GROUP
            cells = ((packed // GROUP).to(tl.int64) * HEADS + heads)[:, None] * HEAD_DIM + columns
            shown = kept[:, None] & (columns < HEAD_DIM)
            tl.store(out + cells, (sums / all_total[:, None]).to(out.dtype.element_ty), mask=shown)
        else:
            tl.store(held, sums, mask=kept[:, None])
        # Other threads may read this thread's stores.
        tl.debug_barrier()
    return all_top, all_total


# fmt: off
@triton.jit
def _attend_parts(
    queries, pool, scales, record, starts_at, out, partials, partial_logs, sinks, own_at, query_stride, slot_stride,
    layer_offset, scale_slot_stride, scale_layer_offset, score_scale, softcap,
    KV_HEADS: tl.constexpr, POOL_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, SINKS: tl.constexpr, PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Run a program's items in sequence, part by part; its own rows begin at ``own_at``. Key tiles that all rows see
    completely need no masks."""
    piece: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if FP8 else BLOCK_SIZE * HEAD_DIM
    start, stop = _early(
        record, starts_at, pool, slot_stride, layer_offset, POOL_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, FP8, DEPENDENT
    )
    own = own_at + tl.program_id(0) * BLOCK_M
    columns = tl.arange(0, BLOCK_D)
    # Code hoisted out of a loop fills registers during the one over keys; small tiles have enough.
    WIDE: tl.constexpr = BLOCK_D >= 128 and queries.dtype.element_ty != tl.float32
    for at in tl.range(start, stop, _WORDS, disable_licm=True):
        item = record + at
        table, row, rows, shift, head, begin, end, _ = _words(record, at)

        token, positions, heads = _rows_of(row, rows, shift, head, tl.arange(0, BLOCK_M), GROUP)
        query = _queries(queries, token, heads, columns, query_stride, HEAD_DIM, BLOCK_D)
        piece_offset = layer_offset + head * piece
        scale_offset = scale_layer_offset + (head * piece + BLOCK_SIZE * HEAD_DIM) // 4

        all_top, all_total = _before_all(sinks, heads, SINKS)
        for first in tl.range(begin // PART * PART, end, PART, disable_licm=WIDE):
            lower, upper = tl.maximum(first, begin), tl.minimum(first + PART, end)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            whole_begin, whole_end = _whole(row, rows, shift, lower, upper, GROUP, BLOCK_N, WINDOW)
            if WINDOW:
                acc, top, total = _tiles(
                    acc, top, total, query, positions, pool, scales, table, lower, tl.minimum(whole_begin, upper),
                    upper - 1, slot_stride, piece_offset, scale_slot_stride, scale_offset, score_scale, softcap,
                    POOL_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, FP8, NATIVE_FP8, True,
                )  # fmt: skip
            acc, top, total = _tiles(
                acc, top, total, query, positions, pool, scales, table, whole_begin, whole_end, upper - 1,
                slot_stride, piece_offset, scale_slot_stride, scale_offset, score_scale, softcap,
                POOL_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, FP8, NATIVE_FP8, False,
            )  # fmt: skip
            acc, top, total = _tiles(
                acc, top, total, query, positions, pool, scales, table, whole_end, upper, upper - 1,
                slot_stride, piece_offset, scale_slot_stride, scale_offset, score_scale, softcap,
                POOL_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, FP8, NATIVE_FP8, True,
            )  # fmt: skip
            all_top, all_total = _end_part(
                acc, top, total, all_top, all_total, lower > begin, upper == end, item, own, out, partials,
                partial_logs, KV_HEADS * GROUP, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M,
            )  # fmt: skip


# fmt: off
@triton.jit
def _merge_parts(
    record, counts_at, partials, partial_logs, out, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DECODE_M: tl.constexpr,
    CHUNK_M: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Join the parts of cut units, in order. A task is one row of such a unit; programs run tasks in turn, with PARTS
    loads in flight."""
    decodes = tl.load(record + counts_at) * DECODE_M
    decode_merges = tl.load(record + counts_at + 1)
    tasks = decodes + tl.load(record + counts_at + 2) * CHUNK_M
    chunk_merges = tl.load(record + counts_at + 3)
    columns, one = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, 1)
    wait_for_earlier(DEPENDENT)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        chunk = task >= decodes
        size = tl.where(chunk, CHUNK_M, DECODE_M)
        inside = tl.where(chunk, task - decodes, task)
        merge = record + tl.where(chunk, chunk_merges, decode_merges) + inside // size * _WORDS
        place = inside % size
        if place < tl.load(merge + _ROWS):
            packed = tl.load(merge + _ROW) + place
            parts = tl.load(merge + _PARTS)
            first = tl.load(merge + _PARTIAL) + place
            head = tl.load(merge + _HEAD) * GROUP + packed % GROUP
            top, total = _before_all(sinks, head + one, SINKS)
            sums = tl.zeros((1, BLOCK_D), tl.float32)
            for begin in range(0, parts, PARTS):
                for each in tl.static_range(PARTS):
                    part = begin + each + one
                    row = first + part * size
                    log = tl.load(partial_logs + row, mask=part < parts, other=float("-inf"))
                    cells = partials + (row.to(tl.int64)[:, None] * BLOCK_D + columns)
                    piece = tl.load(cells, mask=(part < parts)[:, None], other=0.0)
                    sums, top, total = _join(sums, top, total, piece, log)
            cells = (packed // GROUP).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM + columns
            tl.store(out + cells, (sums / total[:, None]).to(out.dtype.element_ty), mask=columns < HEAD_DIM)


def in_parts(
    kernel: str, arch: int, shape: dict[str, Any], kv_heads: int, max_keys: int, processors: int, **facts: int | str
) -> tuple[tuple[dict[str, Any], Tiling], tuple[dict[str, Any], Tiling], dict[str, int]]:
    """Return the constants of the kernel for decodes, and the division of its work, both for chunks, and constants of
    the merge.

    Args:
        kernel: name in the tuning files, which are searched by ``facts``.
        shape: the constants that do not depend on tiles.
        kv_heads: of a token. max_keys: of the longest sequence; parts are long enough that all of its parts fit the
            partial results.
        processors: of the device.
    """
    use = tuned(kernel, arch, **facts)
    part_keys, room = use["part_keys"], PARTS_A_PROGRAM * use["decode_programs"] * processors
    while kv_heads * -(-max_keys // part_keys) > room:
        part_keys *= 2

    def cut(name: str) -> tuple[dict[str, Any], Tiling]:
        rows, programs = use[f"{name}_rows"], use[f"{name}_programs"] * processors
        tile = {"BLOCK_M": rows, "BLOCK_N": use["keys"], "PART": part_keys}
        more = {"num_warps": use[f"{name}_warps"], "num_stages": use["num_stages"]}
        return {**shape, **tile, **more}, Tiling(rows, use["keys"], programs, part_keys=part_keys)

    return cut("decode"), cut("chunk"), {"PARTS": use["merge_parts"]}
