"""Parameters of the sampler's kernels, packed as arrays of int32. Imports no torch.

A row's record has RECORD_FIELDS numbers, floats by their bits: each option that is ``of_rows`` in the order of its
declaration (FIELD_OF), then the seed and the position, each as low and high word. Options are written as they are, but:

    temperature   0 for greedy rows, -1 for padding rows
    min_p         temperature * log(min_p), the least difference to the largest logit; -inf: all

An edit's record has EDIT_FIELDS numbers: row, id, bias, repetition, subtrahend. Each (row, id) occurs once, so a
kernel applies edits in any order. The subtrahend of banned ids is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pillion.kernels.step import MIN_TEMPERATURE, Int32, RowEdit, SamplingRows
from pillion.types import SAMPLING_OPTIONS

_OPTIONS = {name: option for name, option in SAMPLING_OPTIONS.items() if option.of_rows}
FIELD_OF = {name: place for place, name in enumerate(_OPTIONS)}
# Index of the seed. Even, because seed and position are written as int64.
KEY_FIELD = len(_OPTIONS) + len(_OPTIONS) % 2
RECORD_FIELDS = KEY_FIELD + 4
EDIT_FIELDS = 5
# Temperature of rows that choose no token.
NO_ROW = -1.0
_TEMPERATURE, _MIN_P = FIELD_OF["temperature"], FIELD_OF["min_p"]
_COPIED = [
    (name, place, _OPTIONS[name].whole) for name, place in FIELD_OF.items() if name not in ("temperature", "min_p")
]
_MAX_INT32 = np.iinfo(np.int32).max
_GREEDY = np.float32(0.0)


def pack_rows(rows: SamplingRows, padded_to: int = 0) -> Int32:
    """Pack the records [max(R, padded_to), RECORD_FIELDS]; rows beyond R are padding."""
    table = np.zeros((max(len(rows), padded_to), RECORD_FIELDS), np.int32)
    write_rows(table, rows)
    return table


def write_rows(table: Int32, rows: SamplingRows | None) -> None:
    """Write the records of R rows, or of none, into ``table`` [at least R, RECORD_FIELDS], C-contiguous; rows beyond R
    become padding."""
    count = 0 if rows is None else len(rows)
    floats, words = table.view(np.float32), table.view(np.int64)
    floats[count:, _TEMPERATURE] = NO_ROW
    if rows is None or not count:
        return
    for name, place, whole in _COPIED:
        if whole:
            # A top_k beyond int32 exceeds any vocabulary.
            table[:count, place] = np.minimum(rows[name], _MAX_INT32)
        else:
            floats[:count, place] = rows[name]
    temperature, min_p = rows["temperature"], rows["min_p"]
    floats[:count, _TEMPERATURE] = np.where(temperature >= MIN_TEMPERATURE, temperature, _GREEDY)
    floats[:count, _MIN_P] = -np.inf
    if min_p.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            floats[:count, _MIN_P] = np.where(min_p > 0.0, temperature * np.log(min_p), np.float32(-np.inf))
    words[:count, KEY_FIELD // 2] = rows.seeds.view(np.int64)
    words[:count, KEY_FIELD // 2 + 1] = rows.positions


class EditPacker:
    """Packs a step's edits. Has scratch memory for each id of the vocabulary. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Index of the last occurrence, by id. Written before it is read, and so never cleared.
        self._slots = np.zeros(vocab_size, np.int32)

    def pack(self, edits: Sequence[RowEdit]) -> Int32:
        """Pack the records [N, EDIT_FIELDS] of a step's edits, at most one per row; N may be 0.

        The time is proportional to the lengths of the histories, which are not sorted.
        """
        parts = [self._of_row(edit) for edit in edits]
        return np.concatenate(parts) if parts else np.empty((0, EDIT_FIELDS), np.int32)

    def _of_row(self, edit: RowEdit) -> Int32:
        banned = edit.banned[edit.banned < self._vocab_size]
        ids = np.concatenate((edit.biased, edit.seen, edit.answered, banned)).astype(np.int64, copy=False)
        order = np.arange(len(ids), dtype=np.int32)
        # The last occurrence of an id stays in its slot and becomes the record.
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
        subtrahend = np.float32(edit.frequency) * counts + np.float32(edit.presence)
        floats[:, 4] = np.where(counts > 0, subtrahend, np.float32(0.0))
        floats[banned_at, 4] = np.inf
        return table
