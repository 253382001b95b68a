"""Applies masks of grammars: the logits of tokens that a row may not choose become minus infinity.

Most masks allow nearly all tokens or very few, so a mask is turned into the ids of the allowed or of the banned tokens,
whichever are fewer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pillion.engine.sampling.sampling_rows import NO_IDS, Float32, Int64, RowEdit, RowMasks, UInt32

_ONE = np.uint32(1)


def apply_masks(table: Float32, masks: RowMasks, edits: tuple[RowEdit, ...]) -> tuple[Int64, tuple[RowEdit, ...]]:
    """Masks rows of logits [R, V] in place. Returns the rows whose mask is late, and the edits without the bans that
    would leave a row nothing to choose."""
    bits, there = masks.take()
    rows, bits = masks.rows[there], bits[there]
    for row, mask in zip(rows.tolist(), bits, strict=True):
        keep_allowed(table[row], mask)
    return masks.rows[~there], possible_bans(edits, rows, bits)


def possible_bans(edits: tuple[RowEdit, ...], rows: Int64, bits: UInt32) -> tuple[RowEdit, ...]:
    """Returns the edits without the bans that would leave one of ``rows`` [M], whose masks are ``bits`` [M, words],
    nothing to choose."""
    edits_of = {edit.row: edit for edit in edits if len(edit.banned)}
    for row, mask in zip(rows.tolist(), bits, strict=True) if edits_of else ():
        edit = edits_of.get(row)
        if edit is not None and _bans_all(mask, edit.banned):
            edits_of[row] = replace(edit, banned=NO_IDS)
    return tuple(edits_of.get(edit.row, edit) for edit in edits)


def keep_allowed(row: Float32, mask: UInt32) -> None:
    """Makes the logits of a row [V] minus infinity where the mask, uint32 [ceil(V / 32)], has no bit set."""
    if 2 * int(np.bitwise_count(mask).sum()) > len(row):
        row[_ids(~mask, len(row))] = -np.inf
        return
    allowed = _ids(mask, len(row))
    kept = row[allowed]
    row.fill(-np.inf)
    row[allowed] = kept


def _ids(mask: UInt32, width: int) -> Int64:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:width]
    return np.flatnonzero(bits.view(np.bool_))


def _bans_all(mask: UInt32, banned: Int64) -> bool:
    left = mask.copy()
    ids = banned[banned < 32 * len(mask)]
    np.bitwise_and.at(left, ids // 32, ~(_ONE << (ids % 32).astype(np.uint32)))
    return not left.any()
