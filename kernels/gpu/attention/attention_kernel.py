"""Computes attention over the paged pool in Triton: a fixed number of programs share the work evenly.

    record --starts[program]--> items --table--> slots --> K and V of the pool
                                  |
                                  +-- a unit that is one item --> out
                                  +-- a unit that was cut --> partials --merge--> out

The step's record (:mod:`pillion.kernels.gpu.attention.gpu_attention_plan`) assigns work to programs, so neither grids
nor addresses depend on the batch, and a graph can capture all of it. The softmax is FlashAttention's online one (Dao et
al. 2022) with base-2 exponentials. The query heads of a KV head and the rows of a sequence fill a tile together, so K
and V are read once for all of them.

A sink, one more term of a row's fold that has no value, is counted once for each row: where an item begins that is a
whole unit, or else where the unit's partial results are merged.

Loads of K and V are not masked: a key after the last one that the item may see is replaced by that one, whose score is
then masked. Rows after a sequence's end, and slots that no table names, are never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import prefetch, wait_for_earlier
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.fp8 import decode_e4m3

# These are the words of an item, by index, as in pillion.kernels.gpu.attention.gpu_attention_plan. Jitted functions
# only see constants of their own module.
_TABLE, _ROW, _ROWS, _SHIFT, _HEAD, _BEGIN, _END, _PARTIAL = map(tl.constexpr, range(8))
_PARTS, _WORDS = tl.constexpr(5), tl.constexpr(8)
# The maximum of a row's scores begins with this number. It is below every real score, and finite, because a row that
# has seen no key yet subtracts it from itself.
_LOWEST = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(scores, softcap):
    """Returns softcap * tanh(scores / softcap), in powers of 2; large scores overflow to infinity, whose quotient is
    0."""
    grown = tl.exp2(scores * (2.0 * _LOG2_E / softcap))
    return (softcap * _LOG2_E) * (1.0 - 2.0 / (grown + 1.0))


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
    """Folds keys ``begin`` .. ``end`` - 1 into a row tile's state; ``last`` is the last key that any row may see."""
    columns = tl.arange(0, BLOCK_D)
    # In a pool of float8, the BLOCK_SIZE scales of a block's keys or values of one head follow their rows.
    piece: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if FP8 else BLOCK_SIZE * HEAD_DIM
    none = tl.zeros((query.shape[0], BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        read = tl.minimum(tokens, last) if MASKED else tokens
        slots = tl.load(table + read // BLOCK_SIZE).to(tl.int64)
        inside = read % BLOCK_SIZE
        rows = pool + (slots * slot_stride + piece_offset + inside * HEAD_DIM)
        cells = rows[:, None] + columns[None, :]
        keys = tl.load(cells) if BLOCK_D == HEAD_DIM else tl.load(cells, mask=columns[None, :] < HEAD_DIM, other=0)
        if FP8:
            factors = scales + (slots * scale_slot_stride + scale_offset + inside)
            folded: tl.constexpr = 1.0 if NATIVE_FP8 else 256.0
            keys = decode_e4m3(keys, query.dtype, NATIVE_FP8)
            scores = dot(query, tl.trans(keys), none)
            scores *= (tl.load(factors) * folded)[None, :]
        else:
            scores = dot(query, tl.trans(keys), none)
        if SOFTCAP:
            scores = _capped(scores * score_scale, softcap)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW:
                seen &= tokens[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        if SOFTCAP:
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
        else:
            # Scores are multiplied by a positive factor, so the maximum can be taken before that, and the product costs
            # no instruction of its own.
            new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
            weights = tl.exp2(scores * score_scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        cells += POOL_HEADS * piece
        values = tl.load(cells) if BLOCK_D == HEAD_DIM else tl.load(cells, mask=columns[None, :] < HEAD_DIM, other=0)
        if FP8:
            values = decode_e4m3(values, query.dtype, NATIVE_FP8)
            weights *= (tl.load(factors + POOL_HEADS * piece // 4) * folded)[None, :]
        acc = dot(weights.to(query.dtype), values, acc)
        top = new_top
    return acc, top, total


# fmt: off
@triton.jit
def _store(
    acc, top, total, token, heads, places, rows, partial, out, partials, partial_logs,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Stores a row tile's result if the item is a whole unit, else a partial result and the logarithm of its weight."""
    columns = tl.arange(0, BLOCK_D)
    # A row that sees no key of this item has a total of 0: its partial result is 0, with a logarithm of -infinity.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    kept = places < rows
    if partial < 0:
        cells = (token.to(tl.int64) * WIDTH + heads * HEAD_DIM)[:, None] + columns[None, :]
        shown = kept[:, None] & (columns[None, :] < HEAD_DIM)
        tl.store(out + cells, acc.to(out.dtype.element_ty), mask=shown)
    else:
        places = partial + places
        cells = places.to(tl.int64)[:, None] * BLOCK_D + columns[None, :]
        tl.store(partials + cells, acc, mask=kept[:, None])
        tl.store(partial_logs + places, top + tl.log2(total), mask=kept)


@triton.jit
def _whole(row, rows, shift, begin, end, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Returns the first and the last bound of the key tiles that every row may attend to as a whole: from the last
    row's window up to the first row's position."""
    whole_begin = begin
    if WINDOW:
        lowest = tl.maximum((row + rows - 1) // GROUP + shift - (WINDOW - 1), 0)
        whole_begin = tl.maximum(begin, tl.cdiv(lowest, BLOCK_N) * BLOCK_N)
        whole_begin = tl.minimum(whole_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    whole_end = tl.minimum(row // GROUP + shift + 1, end) // BLOCK_N * BLOCK_N
    return whole_begin, tl.maximum(whole_end, whole_begin)


@triton.jit
def _beginning(sinks, heads, partial, BLOCK_M: tl.constexpr, SINKS: tl.constexpr):
    """Returns the maximum and the total of rows that have seen no key yet, which in a whole unit have seen the sinks of
    their ``heads``."""
    top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        whole = partial < 0
        top = tl.where(whole, tl.maximum(tl.load(sinks + heads) * _LOG2_E, _LOWEST), _LOWEST)
        total += tl.where(whole, 1.0, 0.0)
    return top, total


# fmt: off
@triton.jit
def _early(
    record, starts_at, pool, slot_stride, layer_offset,
    POOL_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Runs the kernel's early part; returns where the program's items begin and end in the record, which is constant
    during a step. The first item's first keys, and their values, are brought into the L2. The newest of them may not be
    written yet, which does not matter there."""
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
    queries, pool, scales, record, starts_at, out, partials, partial_logs, sinks, query_stride, slot_stride,
    layer_offset, scale_slot_stride, scale_layer_offset, score_scale, softcap,
    KV_HEADS: tl.constexpr, POOL_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, EDGES: tl.constexpr, SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Runs a program's items, one after the other. With EDGES, key tiles that all rows see whole need no masks.

    A slot of the pool has POOL_HEADS heads; the queries attend KV_HEADS of them, of which the first begins at
    ``layer_offset``.
    """
    piece: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if FP8 else BLOCK_SIZE * HEAD_DIM
    columns = tl.arange(0, BLOCK_D)
    start, stop = _early(
        record, starts_at, pool, slot_stride, layer_offset, POOL_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, FP8, DEPENDENT
    )
    for at in range(start, stop, _WORDS):
        item = record + at
        table = record + tl.load(item + _TABLE)
        row = tl.load(item + _ROW)
        rows = tl.load(item + _ROWS)
        shift = tl.load(item + _SHIFT)
        head = tl.load(item + _HEAD)
        begin = tl.load(item + _BEGIN)
        end = tl.load(item + _END)
        partial = tl.load(item + _PARTIAL)
        places = tl.arange(0, BLOCK_M)
        packed = row + tl.minimum(places, rows - 1)
        token = packed // GROUP
        positions = token + shift
        heads = head * GROUP + packed % GROUP
        cells = (token.to(tl.int64) * query_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
        if BLOCK_D == HEAD_DIM:
            query = tl.load(queries + cells)
        else:
            query = tl.load(queries + cells, mask=columns[None, :] < HEAD_DIM, other=0.0)

        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        top, total = _beginning(sinks, heads, partial, BLOCK_M, SINKS)
        piece_offset = layer_offset + head * piece
        scale_offset = scale_layer_offset + (head * piece + BLOCK_SIZE * HEAD_DIM) // 4
        last = end - 1
        whole_end = begin
        if EDGES:
            whole_begin, whole_end = _whole(row, rows, shift, begin, end, GROUP, BLOCK_N, WINDOW)
            if WINDOW:
                acc, top, total = _tiles(
                    acc, top, total, query, positions, pool, scales, table, begin, tl.minimum(whole_begin, end), last,
                    slot_stride, piece_offset, scale_slot_stride, scale_offset, score_scale, softcap,
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

        _store(
            acc, top, total, token, heads, places, rows, partial, out, partials, partial_logs,
            KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _merge(
    record,
    counts_at,
    partials,
    partial_logs,
    out,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DECODE_M: tl.constexpr,
    CHUNK_M: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Joins partial results. A task is one row of a row tile that was cut; programs run tasks in turn."""
    decodes = tl.load(record + counts_at) * DECODE_M
    decode_merges = tl.load(record + counts_at + 1)
    tasks = decodes + tl.load(record + counts_at + 2) * CHUNK_M
    chunk_merges = tl.load(record + counts_at + 3)
    # The record is constant during a step.
    wait_for_earlier(DEPENDENT)
    columns = tl.arange(0, BLOCK_D)
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
            top = _LOWEST
            total = 0.0
            if SINKS:
                top = tl.maximum(tl.load(sinks + head) * _LOG2_E, _LOWEST)
                total = 1.0
            acc = tl.zeros((BLOCK_D,), tl.float32)
            for begin in range(0, parts, PARTS):
                part = begin + tl.arange(0, PARTS)
                rows = first + part * size
                there = part < parts
                logs = tl.load(partial_logs + rows, mask=there, other=float("-inf"))
                cells = rows.to(tl.int64)[:, None] * BLOCK_D + columns[None, :]
                pieces = tl.load(partials + cells, mask=there[:, None], other=0.0)
                new_top = tl.maximum(top, tl.max(logs, 0))
                weights = tl.exp2(logs - new_top)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.sum(weights, 0)
                acc = acc * shrink + tl.sum(pieces * weights[:, None], 0)
                top = new_top
            row = out + (packed // GROUP).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
            tl.store(row + columns, (acc / total).to(out.dtype.element_ty), mask=columns < HEAD_DIM)
