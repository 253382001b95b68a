"""Operations of all attention kernels on a tile of rows: masks, the softmax, partial results and their merge.

Nothing here creates a tensor: columns and places come from the caller. So these functions also serve kernels in Gluon,
where the creator of a tensor specifies its layout in the threads.

A program that has stored a partial result increments the unit's ticket; the program that counts the last one merges all
of the unit's parts, in their order, and resets the ticket for the next launch. Which program that is changes no bit:
tickets are integers, and no sum depends on the order of arrival.

A sink, one more term of a row's fold without a value, is counted once per row: at the begin of an item that is a whole
unit, else in the merge of the unit's partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words of items and merges, by index, as in pillion.kernels.gpu.attention.gpu_attention_plan. Jitted functions only see
# constants in their own module's namespace.
_TABLE, _ROW, _ROWS, _SHIFT, _HEAD, _BEGIN, _END, _PARTIAL = map(tl.constexpr, range(8))
_PARTS, _WORDS = tl.constexpr(5), tl.constexpr(8)
# Initial maximum of a row's scores: below every real score, and finite, because a row that has seen no key subtracts it
# from itself.
_LOWEST = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _words(record, at):
    """Return a pointer to the block table of the item at offset ``at`` of the record, and the item's other words."""
    item = record + at
    row, rows, shift = tl.load(item + _ROW), tl.load(item + _ROWS), tl.load(item + _SHIFT)
    head, begin, end = tl.load(item + _HEAD), tl.load(item + _BEGIN), tl.load(item + _END)
    return record + tl.load(item + _TABLE), row, rows, shift, head, begin, end, tl.load(item + _PARTIAL)


@triton.jit
def _rows_of(row, rows, shift, head, places, GROUP: tl.constexpr):
    """Return tokens, positions and query heads of an item's rows ``places``; those after the last one repeat it."""
    packed = row + tl.minimum(places, rows - 1)
    token = packed // GROUP
    return token, token + shift, head * GROUP + packed % GROUP


@triton.jit
def _load(cells, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of WIDTH values in tiles of BLOCK ``columns``, padded with zeros."""
    return tl.load(cells) if BLOCK == WIDTH else tl.load(cells, mask=columns < WIDTH, other=0)


@triton.jit
def _queries(queries, token, heads, columns, query_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the queries of rows, [rows, BLOCK_D]."""
    cells = (token.to(tl.int64) * query_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
    return _load(queries + cells, columns[None, :], HEAD_DIM, BLOCK_D)


@triton.jit
def _capped(scores, softcap):
    """Return softcap * tanh(scores / softcap), in powers of 2; large scores overflow to infinity, whose quotient is
    0."""
    grown = tl.exp2(scores * (2.0 * _LOG2_E / softcap))
    return (softcap * _LOG2_E) * (1.0 - 2.0 / (grown + 1.0))


@triton.jit
def _lowest(positions, WINDOW: tl.constexpr):
    """Return the first keys visible to rows at ``positions``, possibly below 0: those of their last WINDOW keys, or for
    a negative WINDOW, the last multiples of -WINDOW."""
    return positions // -WINDOW * -WINDOW if WINDOW < 0 else positions - (WINDOW - 1)


@triton.jit
def _weighed(
    scores, top, total, positions, tokens, score_scale, softcap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Mask a tile's scores. Returns their weights, the rows' new maximum and total, and the factor by which previous
    sums shrink."""
    if SOFTCAP:
        scores = _capped(scores * score_scale, softcap)
    if MASKED:
        seen = tokens[None, :] <= positions[:, None]
        if WINDOW:
            seen &= tokens[None, :] >= _lowest(positions, WINDOW)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    if SOFTCAP:
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
    else:
        # The factor is positive, so the maximum can be taken before multiplying, which saves an instruction.
        new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weights, new_top, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def _whole(row, rows, shift, begin, end, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return the bounds of the key tiles that are completely visible to every row: from the last row's window up to the
    first row's position."""
    whole_begin = begin
    if WINDOW:
        lowest = tl.maximum(_lowest((row + rows - 1) // GROUP + shift, WINDOW), 0)
        whole_begin = tl.maximum(begin, tl.cdiv(lowest, BLOCK_N) * BLOCK_N)
        whole_begin = tl.minimum(whole_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    whole_end = tl.minimum(row // GROUP + shift + 1, end) // BLOCK_N * BLOCK_N
    return whole_begin, tl.maximum(whole_end, whole_begin)


@triton.jit
def _beginning(sinks, heads, counts_sinks, SINKS: tl.constexpr):
    """Return the initial maximum and total of rows. With ``counts_sinks`` they begin with the sinks of their
    ``heads``."""
    total = (heads & 0).to(tl.float32)
    top = total + _LOWEST
    if SINKS:
        top = tl.where(counts_sinks, tl.maximum(tl.load(sinks + heads) * _LOG2_E, _LOWEST), top)
        total += tl.where(counts_sinks, 1.0, 0.0)
    return top, total


# fmt: off
@triton.jit
def _store(
    acc, top, total, token, heads, places, columns, rows, partial, out, partials, partial_logs,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Store a row tile's result if the item is a whole unit, else a partial result and the logarithm of its weight."""
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


# fmt: off
@triton.jit
def _join(
    merge, parts, first, places, columns, partials, partial_logs, out, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    """Add up the ``parts`` partial results of a unit's rows ``places`` in sequence, with PARTS loads ahead. Sums are
    fused multiplications, so their bits depend on no layout and no number of threads."""
    kept = places < tl.load(merge + _ROWS)
    packed = tl.load(merge + _ROW) + tl.where(kept, places, 0)
    heads = tl.load(merge + _HEAD) * GROUP + packed % GROUP
    top, total = _beginning(sinks, heads, True, SINKS)
    acc = ((places & 0)[:, None] + (columns & 0)[None, :]).to(tl.float32)
    for begin in range(0, parts, PARTS):
        for ahead in tl.static_range(PARTS):
            part = begin + ahead
            rows = first + part * BLOCK_M + places
            there = kept & (part < parts)
            # Just written by other programs: only the L2 is coherent.
            logs = tl.load(partial_logs + rows, mask=there, other=float("-inf"), cache_modifier=".cg")
            cells = partials + (rows.to(tl.int64)[:, None] * BLOCK_D + columns[None, :])
            pieces = tl.load(cells, mask=there[:, None], other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, logs)
            weights = tl.exp2(logs - new_top)
            shrink = tl.exp2(top - new_top)
            total = tl.fma(total, shrink, weights)
            acc = tl.fma(pieces, weights[:, None], acc * shrink[:, None])
            top = new_top
    cells = (packed // GROUP).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM
    shown = kept[:, None] & (columns[None, :] < HEAD_DIM)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (cells[:, None] + columns[None, :]), result, mask=shown)


# fmt: off
@triton.jit
def _join_last(
    record, counts_at, number, places, columns, tickets, partials, partial_logs, out, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    JOINED: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    """Count the stored partial result ``number``, and merge the unit's parts if it is the last one: JOINED rows at a
    time, indexed by ``places`` from 0."""
    merges = tl.load(record + counts_at + 1)
    owners = merges + tl.load(record + counts_at) * _WORDS
    merge = record + tl.load(record + owners + number)
    parts = tl.load(merge + _PARTS)
    first = tl.load(merge + _PARTIAL)
    # The barrier orders the stores of all threads before the count, whose memory order is device-wide.
    tl.debug_barrier()
    if tl.atomic_add(tickets + first, 1, sem="acq_rel") == parts - 1:
        tl.store(tickets + first, 0)
        for begin in range(0, tl.load(merge + _ROWS), JOINED):
            _join(
                merge, parts, first, begin + places, columns, partials, partial_logs, out, sinks,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, PARTS, SINKS,
            )  # fmt: skip


# fmt: off
@triton.jit
def _end_item(
    acc, top, total, record, at, places, columns, out, partials, partial_logs, counts_at, first_partial, tickets, sinks,
    joined_places, joined_columns,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    JOINED: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    """Store the result of the item at offset ``at`` of the record, and merge the unit's parts if this is the last of
    them."""
    # Read the item again: its values would occupy registers in the loop over keys.
    item = record + at
    row, rows = tl.load(item + _ROW, volatile=True), tl.load(item + _ROWS, volatile=True)
    head, partial = tl.load(item + _HEAD, volatile=True), tl.load(item + _PARTIAL, volatile=True)
    token, _, heads = _rows_of(row, rows, 0, head, places, GROUP)
    _store(
        acc, top, total, token, heads, places, columns, rows, partial, out, partials, partial_logs,
        KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    if partial >= 0:
        _join_last(
            record, counts_at, (partial - first_partial) // BLOCK_M, joined_places, joined_columns, tickets, partials,
            partial_logs, out, sinks, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, JOINED, PARTS, SINKS,
        )  # fmt: skip
