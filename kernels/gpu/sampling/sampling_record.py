"""Packs the parameters of the sampler's kernels as arrays of int32. Imports no torch.

A row's record has RECORD_FIELDS numbers, floats by their bits:

    temperature   0 for greedy rows, -1 for padding rows
    top_k         0: all
    top_p         1: all
    depth         temperature * log(min_p), the least difference to the largest logit; -inf: all
    seed          low word, high word
    position      low word, high word

An edit's record has EDIT_FIELDS numbers: row, id, bias, repetition, subtrahend. Each (row, id) occurs once, so a
kernel applies edits in any order. The subtrahend of banned ids is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pillion.kernels.step import MIN_TEMPERATURE, Int32, RowEdit, SamplingRows

RECORD_FIELDS = 8
EDIT_FIELDS = 5
# The temperature of rows that choose no token.
NO_ROW = -1.0
_GREEDY = np.float32(0.0)


def pack_rows(rows: SamplingRows, padded_to: int = 0) -> Int32:
    """Packs the records [max(R, padded_to), RECORD_FIELDS]; rows beyond R are padding."""
    table = np.zeros((max(len(rows), padded_to), RECORD_FIELDS), np.int32)
    write_rows(table, rows)
    return table


def write_rows(table: Int32, rows: SamplingRows | None) -> None:
    """Writes the records of R rows, or of none, into ``table`` [at least R, RECORD_FIELDS], C-contiguous; rows beyond R
    become padding."""
    count = 0 if rows is None else len(rows)
    floats, words = table.view(np.float32), table.view(np.int64)
    floats[count:, 0] = NO_ROW
    if rows is None or not count:
        return
    floats[:count, 0] = np.where(rows.temperature >= MIN_TEMPERATURE, rows.temperature, _GREEDY)
    # A top_k that int32 cannot hold is larger than any vocabulary, so it is cut.
    table[:count, 1] = np.minimum(rows.top_k, np.iinfo(np.int32).max)
    floats[:count, 2] = rows.top_p
    if rows.min_p.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            floats[:count, 3] = np.where(rows.min_p > 0.0, rows.temperature * np.log(rows.min_p), np.float32(-np.inf))
    else:
        floats[:count, 3] = -np.inf
    words[:count, 2] = rows.seeds.view(np.int64)
    words[:count, 3] = rows.positions


class EditPacker:
    """Flattens a step's edits. It keeps scratch memory for each id of the vocabulary and is not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # By id, this is the index of its last occurrence. It is written before it is read, and so never cleared.
        self._slots = np.zeros(vocab_size, np.int32)

    def pack(self, edits: Sequence[RowEdit]) -> Int32:
        """Packs the records [N, EDIT_FIELDS] of a step's edits, at most one of each row; N may be 0.

        The time is proportional to the lengths of the histories, which are not sorted.
        """
        parts = [self._of_row(edit) for edit in edits]
        return np.concatenate(parts) if parts else np.empty((0, EDIT_FIELDS), np.int32)

    def _of_row(self, edit: RowEdit) -> Int32:
        banned = edit.banned[edit.banned < self._vocab_size]
        ids = np.concatenate((edit.biased, edit.seen, edit.answered, banned)).astype(np.int64, copy=False)
        order = np.arange(len(ids), dtype=np.int32)
        # The last occurrence of an id stays in its slot and makes the record.
        self._slots[ids] = order
        kept = self._slots[ids] == order
        record = (np.cumsum(kept) - 1)[self._slots[ids]]
        biased, seen, answered, banned_at = np.split(
            record, np.cumsum([len(edit.biased), len(edit.seen), len(edit.answered)])
        )
        table = np.zeros((int(kept.sum()), EDIT_FIELDS), np.int32)
        floats = table.view(np.float32)
        table[:, 0], table[:, 1], floats[:, 3] = edit.row, ids[kept], 1.0
        floats[biased, 2] = edit.bias
        floats[seen, 3] = edit.repetition
        counts = np.bincount(answered, minlength=len(table)).astype(np.float32)
        owed = np.float32(edit.frequency) * counts + np.float32(edit.presence)
        floats[:, 4] = np.where(counts > 0, owed, np.float32(0.0))
        floats[banned_at, 4] = np.inf
        return table
