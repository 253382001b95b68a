"""Attention over the paged pool in Triton: a fixed number of programs share the work evenly.

    record --starts[program]--> items --table--> slots --> K and V of the pool
                                  |
                                  +-- a unit that is one item --> out
                                  +-- a unit that was cut --> partials --the last one joins them--> out

The step's record (:mod:`pillion.kernels.gpu.attention.gpu_attention_plan`) assigns work to programs, so neither grids
nor addresses depend on the batch, and a graph can capture all of it. The softmax is FlashAttention's online one (Dao et
al. 2022) with base-2 exponentials. The query heads of a KV head and the rows of a sequence fill a tile together, so K
and V are read once for all of them.

Loads of K and V are not masked: a key after the item's last visible one is replaced by that one, and its score is
masked. Rows after a sequence's end, and slots in no table, are never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.attention.attention_rows import (
    _WORDS,
    _beginning,
    _end_item,
    _load,
    _queries,
    _rows_of,
    _weighed,
    _whole,
    _words,
)
from pillion.kernels.gpu.attention.float8_tiles import _float8_tiles
from pillion.kernels.gpu.dependent import prefetch, wait_for_earlier
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.fp8 import decode_e4m3

# Words of an item, by index, as in pillion.kernels.gpu.attention.gpu_attention_plan. Jitted functions only see
# constants in their own module's namespace.
_TABLE, _HEAD, _BEGIN, _END = map(tl.constexpr, (0, 4, 5, 6))


# fmt: off
@triton.jit
def _tiles(
    acc, top, total, query, positions, pool, scales, table, begin, end, last, slot_stride, piece_offset,
    scale_slot_stride, scale_offset, score_scale, softcap,
    POOL_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,
):
    # fmt: on
    """Fold keys ``begin`` .. ``end`` - 1 into a row tile's state; ``last`` is the last key visible to any row."""
    columns = tl.arange(0, BLOCK_D)
    # In a float8 pool, the BLOCK_SIZE scales of a block's keys or values of one head follow their rows.
    piece: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if FP8 else BLOCK_SIZE * HEAD_DIM
    none = tl.zeros((query.shape[0], BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        read = tl.minimum(tokens, last) if MASKED else tokens
        slots = tl.load(table + read // BLOCK_SIZE).to(tl.int64)
        inside = read % BLOCK_SIZE
        rows = pool + (slots * slot_stride + piece_offset + inside * HEAD_DIM)
        cells = rows[:, None] + columns[None, :]
        keys = _load(cells, columns[None, :], HEAD_DIM, BLOCK_D)
        if FP8:
            factors = scales + (slots * scale_slot_stride + scale_offset + inside)
            folded: tl.constexpr = 1.0 if NATIVE_FP8 else 256.0
            keys = decode_e4m3(keys, query.dtype, NATIVE_FP8)
            scores = dot(query, tl.trans(keys), none)
            scores *= (tl.load(factors) * folded)[None, :]
        else:
            scores = dot(query, tl.trans(keys), none)
        weights, top, total, shrink = _weighed(
            scores, top, total, positions, tokens, score_scale, softcap, WINDOW, SOFTCAP, MASKED
        )
        acc *= shrink[:, None]
        cells += POOL_HEADS * piece
        values = _load(cells, columns[None, :], HEAD_DIM, BLOCK_D)
        if FP8:
            values = decode_e4m3(values, query.dtype, NATIVE_FP8)
            weights *= (tl.load(factors + POOL_HEADS * piece // 4) * folded)[None, :]
        acc = dot(weights.to(query.dtype), values, acc)
    return acc, top, total


# fmt: off
@triton.jit
def _early(
    record, starts_at, pool, slot_stride, layer_offset,
    POOL_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Run the kernel's early part; return the begin and end of the program's items in the record, which is constant
    during a step. Prefetches the first item's first keys and values into the L2; it does not matter that the newest of
    them may not be written yet."""
    mine = record + starts_at + tl.program_id(0)
    start, stop = tl.load(mine), tl.load(mine + 1)
    piece: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if FP8 else BLOCK_SIZE * HEAD_DIM
    if DEPENDENT and start < stop:
        item = record + start
        last = tl.load(item + _END) - 1
        read = tl.minimum(tl.load(item + _BEGIN) + tl.arange(0, BLOCK_N), last)
        slots = tl.load(record + tl.load(item + _TABLE) + read // BLOCK_SIZE).to(tl.int64)
        place = layer_offset + tl.load(item + _HEAD) * piece + read % BLOCK_SIZE * HEAD_DIM
        keys = pool + slots * slot_stride + place
        prefetch(keys, HEAD_DIM * pool.dtype.element_ty.itemsize)
        prefetch(keys + POOL_HEADS * piece, HEAD_DIM * pool.dtype.element_ty.itemsize)
    wait_for_earlier(DEPENDENT)
    return start, stop


# fmt: off
@triton.jit
def _attend(
    queries, pool, scales, record, starts_at, counts_at, first_partial, out, partials, partial_logs, tickets, sinks,
    query_stride, slot_stride, layer_offset, scale_slot_stride, scale_layer_offset, score_scale, softcap,
    KV_HEADS: tl.constexpr, POOL_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, EDGES: tl.constexpr, SINKS: tl.constexpr,
    JOINED: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Run a program's items in sequence. With EDGES, key tiles that all rows see completely need no masks.

    A slot of the pool has POOL_HEADS heads; the queries attend to KV_HEADS of them, of which the first begins at
    ``layer_offset``. Partial results are numbered from row ``first_partial`` on.
    """
    piece: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if FP8 else BLOCK_SIZE * HEAD_DIM
    columns = tl.arange(0, BLOCK_D)
    start, stop = _early(
        record, starts_at, pool, slot_stride, layer_offset, POOL_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, FP8, DEPENDENT
    )
    # Code hoisted out of this loop fills registers during the loop over keys. In float32, and with heads of 128 except
    # float8 with windows, it does not; there, not hoisting spills registers, or the loop over keys takes a tenth more
    # instructions.
    STAYS: tl.constexpr = (BLOCK_D != 128 or (FP8 and WINDOW != 0)) and queries.dtype.element_ty != tl.float32
    for at in tl.range(start, stop, _WORDS, disable_licm=STAYS):
        table, row, rows, shift, head, begin, end, partial = _words(record, at)
        places = tl.arange(0, BLOCK_M)
        token, positions, heads = _rows_of(row, rows, shift, head, places, GROUP)
        query = _queries(queries, token, heads, columns, query_stride, HEAD_DIM, BLOCK_D)

        top, total = _beginning(sinks, heads, partial < 0, SINKS)
        piece_offset = layer_offset + head * piece
        scale_offset = scale_layer_offset + (head * piece + BLOCK_SIZE * HEAD_DIM) // 4
        last = end - 1
        if FP8 and not EDGES:
            acc, top, total = _float8_tiles(
                top, total, query, positions, pool, scales, table, begin, end, slot_stride, piece_offset,
                scale_slot_stride, scale_offset, score_scale, softcap,
                POOL_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, NATIVE_FP8,
            )  # fmt: skip
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            whole_end = begin
            if EDGES:
                whole_begin, whole_end = _whole(row, rows, shift, begin, end, GROUP, BLOCK_N, WINDOW)
                if WINDOW:
                    acc, top, total = _tiles(
                        acc, top, total, query, positions, pool, scales, table, begin, tl.minimum(whole_begin, end),
                        last, slot_stride, piece_offset, scale_slot_stride, scale_offset, score_scale, softcap,
                        POOL_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, FP8, NATIVE_FP8, True,
                    )  # fmt: skip
                acc, top, total = _tiles(
                    acc, top, total, query, positions, pool, scales, table, whole_begin, whole_end, last,
                    slot_stride, piece_offset, scale_slot_stride, scale_offset, score_scale, softcap,
                    POOL_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, FP8, NATIVE_FP8, False,
                )  # fmt: skip
            acc, top, total = _tiles(
                acc, top, total, query, positions, pool, scales, table, whole_end, end, last,
                slot_stride, piece_offset, scale_slot_stride, scale_offset, score_scale, softcap,
                POOL_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, FP8, NATIVE_FP8, True,
            )  # fmt: skip

        _end_item(
            acc, top, total, record, at, places, columns, out, partials, partial_logs, counts_at, first_partial,
            tickets, sinks, tl.arange(0, JOINED), columns,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, JOINED, PARTS, SINKS,
        )  # fmt: skip
