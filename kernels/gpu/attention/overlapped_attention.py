"""Attention of chunks on Hopper in Gluon: a tile's softmax overlaps the products on the tensor cores.

Triton's pipeliner waits for all products before a softmax, so tensor cores idle meanwhile (2,050 of 5,000 cycles of a
tile are products). Here the waits are explicit. An iteration of the loop, with scores S, weights P, results O:

    wait for the copies of K(n+1) and V(n); a barrier
    S(n+1) = Q K(n+1)    begin
    P = softmax(S(n)); O *= the factor of the new maximum         <-- while S(n+1) multiplies
    O += P V(n)          begin
    request K(n+BUFFERS) and V(n+BUFFERS-1), into the buffers of tiles n and n-1
    wait for both products

So QK of a tile overlaps the softmax of the previous tile (FlashAttention 3: Shah et al., arXiv 2407.08608, section
3.2). There is no warp specialization; the two warp groups of a program share its tiles. Overlapping PV with the next
softmax instead does not work: ptxas moves the wait for PV before that softmax. K and V are gathered by cp.async, row by
row, so slots may have any size.

It computes the same as its reference, :mod:`pillion.kernels.gpu.attention.attention_kernel`, from the same record, with
the same functions for masks, the softmax and partial results. The reference also serves other architectures, float8
pools, float32 and other widths of heads.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from pillion.kernels.gpu.attention.attention_rows import (
    _WORDS,
    _beginning,
    _end_item,
    _queries,
    _rows_of,
    _weighed,
    _whole,
    _words,
)
from pillion.kernels.gpu.dependent import wait_for_earlier

# The architecture of these instructions, and the widths of heads whose tiles fit.
ARCH, HEAD_DIMS = 90, (64, 128, 256, 512)


# fmt: off
@gluon.jit
def _copy(
    pool, slots, tokens, slot_stride, offset, tile,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, LOADS: tl.constexpr,
):
    # fmt: on
    """Start asynchronous copies of the K or V rows of ``tokens``, which are in ``slots``, into a tile."""
    rows = slots.to(tl.int64) * slot_stride + offset + (tokens % BLOCK_SIZE) * HEAD_DIM
    cells = pool + (rows[:, None] + gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOADS))[None, :])
    async_copy.async_copy_global_to_shared(tile, cells)


# fmt: off
@gluon.jit
def _request_tiles(
    pool, table, start, end, slots, slot_stride, offset, keys, values,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BUFFERS: tl.constexpr,
    V_STEP: tl.constexpr, LOADS: tl.constexpr, FIRST: tl.constexpr,
):
    # fmt: on
    """Start copies, in one group, of the key tile from ``start`` on and the value tile before it, whose slots are
    ``slots``. With FIRST there is no tile before. Tiles from ``end`` on are not copied. Returns the keys' slots."""
    places = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LOADS))
    tile = start // BLOCK_N
    if not FIRST:  # noqa: SIM102  (decided when the kernel is compiled)
        if start - BLOCK_N < end:
            tokens = tl.minimum(start - BLOCK_N + places, end - 1)
            into = values.index((tile - 1) % BUFFERS)
            _copy(pool, slots, tokens, slot_stride, offset + V_STEP, into, BLOCK_SIZE, HEAD_DIM, LOADS)
    # Keys past the end repeat the last one; their scores are masked.
    tokens = tl.minimum(start + places, end - 1)
    slots = tl.load(table + tokens // BLOCK_SIZE)
    if start < end:
        _copy(pool, slots, tokens, slot_stride, offset, keys.index(tile % BUFFERS), BLOCK_SIZE, HEAD_DIM, LOADS)
    async_copy.commit_group()
    return slots


# fmt: off
@gluon.jit
def _softmax(
    acc, scores, top, total, start, positions, pool, score_scale, softcap,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, SCORES: tl.constexpr,
    RESULTS: tl.constexpr,
):
    # fmt: on
    """Return the weights of a tile's keys, from ``start`` on, as the left operand of PV, the results rescaled to the
    new maximum, and the new maximum and total."""
    tokens = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    weights, top, total, shrink = _weighed(
        scores, top, total, positions, tokens, score_scale, softcap, WINDOW, SOFTCAP, MASKED
    )
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULTS))[:, None]
    weights = gl.convert_layout(weights.to(pool.dtype.element_ty), gl.DotOperandLayout(0, RESULTS, 2))
    return weights, acc, top, total


@gluon.jit
def _wait_for_tile(BUFFERS: tl.constexpr):
    """Wait until all threads' copies of the next tile are complete, and all warps have finished the previous tile."""
    async_copy.wait_group(BUFFERS - 2)
    tl.debug_barrier()
    fence_async_shared()


# fmt: off
@gluon.jit
def _fold(
    acc, scores, top, total, slots, first, behind, query, keys, values, none, positions, pool, table, end, slot_stride,
    offset, score_scale, softcap,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BUFFERS: tl.constexpr,
    V_STEP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, LOADS: tl.constexpr,
    SCORES: tl.constexpr, RESULTS: tl.constexpr,
):
    # fmt: on
    """Compute the scores of keys ``first`` .. ``behind`` - 1, tile by tile, and meanwhile fold the previous tile, whose
    ``scores`` are passed, into the rows' state. ``slots``: slots of the key tile requested last."""
    for start in range(first, behind, BLOCK_N):
        tile = start // BLOCK_N
        _wait_for_tile(BUFFERS)
        ahead = warpgroup_mma(query, keys.index(tile % BUFFERS).permute([1, 0]), none, use_acc=False, is_async=True)
        weights, acc, top, total = _softmax(
            acc, scores, top, total, start - BLOCK_N, positions, pool, score_scale, softcap,
            BLOCK_N, WINDOW, SOFTCAP, MASKED, SCORES, RESULTS,
        )  # fmt: skip
        acc = warpgroup_mma(weights, values.index((tile - 1) % BUFFERS), acc, is_async=True)
        # Registers are free here. The compiler adds a barrier, because it does not see that these are other buffers.
        slots = _request_tiles(
            pool, table, start + (BUFFERS - 1) * BLOCK_N, end, slots, slot_stride, offset, keys, values,
            BLOCK_SIZE, HEAD_DIM, BLOCK_N, BUFFERS, V_STEP, LOADS, False,
        )  # fmt: skip
        scores, acc = warpgroup_mma_wait(0, deps=[ahead, acc])
    return acc, scores, top, total, slots


# fmt: off
@gluon.jit
def _fold_all(
    acc, scores, top, total, slots, begin, whole_begin, whole_end, query, keys, values, none, positions, pool, table,
    end, slot_stride, offset, score_scale, softcap,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BUFFERS: tl.constexpr,
    V_STEP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LOADS: tl.constexpr, SCORES: tl.constexpr,
    RESULTS: tl.constexpr,
):
    # fmt: on
    """Fold all tiles of an item, given the ``scores`` of the first; those between the whole bounds need no masks."""
    # A tile is folded when the scores of the next one have begun, so their bounds are one tile further.
    if WINDOW:
        acc, scores, top, total, slots = _fold(
            acc, scores, top, total, slots, begin + BLOCK_N, tl.minimum(whole_begin + BLOCK_N, end), query, keys,
            values, none, positions, pool, table, end, slot_stride, offset, score_scale, softcap,
            BLOCK_SIZE, HEAD_DIM, BLOCK_N, BUFFERS, V_STEP, WINDOW, SOFTCAP, True, LOADS, SCORES, RESULTS,
        )  # fmt: skip
    acc, scores, top, total, slots = _fold(
        acc, scores, top, total, slots, whole_begin + BLOCK_N, tl.minimum(whole_end + BLOCK_N, end), query, keys,
        values, none, positions, pool, table, end, slot_stride, offset, score_scale, softcap,
        BLOCK_SIZE, HEAD_DIM, BLOCK_N, BUFFERS, V_STEP, WINDOW, SOFTCAP, False, LOADS, SCORES, RESULTS,
    )  # fmt: skip
    acc, scores, top, total, slots = _fold(
        acc, scores, top, total, slots, whole_end + BLOCK_N, end, query, keys, values, none, positions, pool,
        table, end, slot_stride, offset, score_scale, softcap,
        BLOCK_SIZE, HEAD_DIM, BLOCK_N, BUFFERS, V_STEP, WINDOW, SOFTCAP, True, LOADS, SCORES, RESULTS,
    )  # fmt: skip
    tile = (end - 1) // BLOCK_N
    weights, acc, top, total = _softmax(
        acc, scores, top, total, tile * BLOCK_N, positions, pool, score_scale, softcap,
        BLOCK_N, WINDOW, SOFTCAP, True, SCORES, RESULTS,
    )  # fmt: skip
    _wait_for_tile(BUFFERS)
    acc = warpgroup_mma(weights, values.index(tile % BUFFERS), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, top, total


# fmt: off
@gluon.jit
def _load_queries(
    queries, query, row, rows, head, columns, query_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, LOADS: tl.constexpr,
):
    # fmt: on
    """Load the queries of an item's rows into shared memory."""
    places = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOADS))
    token, _, heads = _rows_of(row, rows, 0, head, places, GROUP)
    query.store(_queries(queries, token, heads, columns, query_stride, HEAD_DIM, HEAD_DIM))


# fmt: off
@gluon.jit
def _attend_overlapped(
    queries, pool, scales, record, starts_at, counts_at, first_partial, out, partials, partial_logs, tickets, sinks,
    query_stride, slot_stride, layer_offset, scale_slot_stride, scale_layer_offset, score_scale, softcap,
    KV_HEADS: tl.constexpr, POOL_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BUFFERS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, JOINED: tl.constexpr, PARTS: tl.constexpr,
    WARPS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Run a program's items in sequence. Its arguments are those of
    :func:`pillion.kernels.gpu.attention.attention_kernel._attend`, whose scales it does not read."""
    # Sums of 512 columns would fill all registers of a warp group, so each has half of the keys, then half of the
    # columns, of the same rows. Weights are exchanged through shared memory.
    HALVES: tl.constexpr = 2 if HEAD_DIM > 256 else 1
    # A row of K or V is 8 values in each of some lanes.
    LANES: tl.constexpr = HEAD_DIM // HALVES // 8
    LOADS: tl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS // HALVES, HALVES], [1, 0])
    SCORES: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // HALVES, HALVES], [16, BLOCK_N // HALVES, 16])
    RESULTS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // HALVES, HALVES], [16, HEAD_DIM // HALVES, 16])
    SHARED: tl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    V_STEP: tl.constexpr = POOL_HEADS * BLOCK_SIZE * HEAD_DIM
    query = gl.allocate_shared_memory(pool.dtype.element_ty, [BLOCK_M, HEAD_DIM], SHARED)
    keys = gl.allocate_shared_memory(pool.dtype.element_ty, [BUFFERS, BLOCK_N, HEAD_DIM], SHARED)
    values = gl.allocate_shared_memory(pool.dtype.element_ty, [BUFFERS, BLOCK_N, HEAD_DIM], SHARED)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOADS))
    own_start = record + starts_at + tl.program_id(0)
    start, stop = tl.load(own_start), tl.load(own_start + 1)
    wait_for_earlier(DEPENDENT)
    # Code hoisted out of this loop fills registers during those over keys.
    for at in tl.range(start, stop, _WORDS, disable_licm=True):
        table, row, rows, shift, head, begin, end, partial = _words(record, at)
        offset = layer_offset + head * (BLOCK_SIZE * HEAD_DIM)
        # Wait until all warps have finished the previous item, because its tiles are overwritten.
        tl.debug_barrier()
        slots = gl.zeros([BLOCK_N], gl.int32, gl.SliceLayout(1, LOADS))
        for ahead in gl.static_range(BUFFERS - 1):
            slots = _request_tiles(
                pool, table, begin + ahead * BLOCK_N, end, slots, slot_stride, offset, keys, values,
                BLOCK_SIZE, HEAD_DIM, BLOCK_N, BUFFERS, V_STEP, LOADS, ahead == 0,
            )  # fmt: skip
        _load_queries(queries, query, row, rows, head, columns, query_stride, GROUP, HEAD_DIM, BLOCK_M, LOADS)
        places = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        _, positions, heads = _rows_of(row, rows, shift, head, places, GROUP)
        top, total = _beginning(sinks, heads, partial < 0, SINKS)
        _wait_for_tile(BUFFERS)
        first = begin // BLOCK_N % BUFFERS
        scores = warpgroup_mma(query, keys.index(first).permute([1, 0]), none, use_acc=False, is_async=True)
        slots = _request_tiles(
            pool, table, begin + (BUFFERS - 1) * BLOCK_N, end, slots, slot_stride, offset, keys, values,
            BLOCK_SIZE, HEAD_DIM, BLOCK_N, BUFFERS, V_STEP, LOADS, False,
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=[scores])
        acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, RESULTS)
        whole_begin, whole_end = _whole(row, rows, shift, begin, end, GROUP, BLOCK_N, WINDOW)
        acc, top, total = _fold_all(
            acc, scores, top, total, slots, begin, whole_begin, whole_end, query, keys, values, none, positions, pool,
            table, end, slot_stride, offset, score_scale, softcap,
            BLOCK_SIZE, HEAD_DIM, BLOCK_N, BUFFERS, V_STEP, WINDOW, SOFTCAP, LOADS, SCORES, RESULTS,
        )  # fmt: skip
        _end_item(
            acc, gl.convert_layout(top, gl.SliceLayout(1, RESULTS)),
            gl.convert_layout(total, gl.SliceLayout(1, RESULTS)), record, at,
            gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, RESULTS)),
            gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULTS)), out, partials, partial_logs, counts_at,
            first_partial, tickets, sinks, gl.arange(0, JOINED, layout=gl.SliceLayout(1, LOADS)), columns,
            KV_HEADS, GROUP, HEAD_DIM, HEAD_DIM, BLOCK_M, JOINED, PARTS, SINKS,
        )  # fmt: skip
