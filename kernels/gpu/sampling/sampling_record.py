"""What the sampler's kernels are told, as arrays of int32 that go to the device in one copy each. numpy alone.

A row's record, RECORD_FIELDS numbers, floats by their bits:

    temperature   0 for rows that take their largest logit, -1 for rows that are none (padding of a graph)
    top_k         0: all
    top_p         1: all
    depth         temperature * log(min_p), what a logit may lack to the largest; -inf: all
    seed          low word, high word
    position      low word, high word

An edit's record, EDIT_FIELDS numbers: row, id, bias, repetition, subtracted. Each (row, id) stands there once, so a
kernel applies edits in any order. What is subtracted is infinite for ids that may not be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]

RECORD_FIELDS = 8
EDIT_FIELDS = 5
# Below this a row takes its largest logit: the sampler's on the CPU says why, and a test that both say the same.
MIN_TEMPERATURE = float(np.float32(1e-5))
_GREEDY, _NO_ROW = np.float32(0.0), np.float32(-1.0)


class Rows(Protocol):
    """Parameters of R rows, each [R]; ``engine.sampling.sampling_rows.SamplingRows`` explains them."""

    @property
    def temperature(self) -> Float32: ...
    @property
    def top_k(self) -> Int64: ...
    @property
    def top_p(self) -> Float32: ...
    @property
    def min_p(self) -> Float32: ...
    @property
    def seeds(self) -> UInt64: ...
    @property
    def positions(self) -> Int64: ...


class Edit(Protocol):
    """Changes of single logits of one row, which ``engine.sampling.sampling_rows.RowEdit`` explains."""

    @property
    def row(self) -> int: ...
    @property
    def biased(self) -> Int64: ...
    @property
    def bias(self) -> Float32: ...
    @property
    def seen(self) -> Int32 | Int64: ...
    @property
    def repetition(self) -> float: ...
    @property
    def answered(self) -> Int32 | Int64: ...
    @property
    def presence(self) -> float: ...
    @property
    def frequency(self) -> float: ...
    @property
    def banned(self) -> Int64: ...


def cuts_any(rows: Rows) -> bool:
    """Whether a drawn row keeps less than its whole vocabulary: such a step needs the kernels that look for cuts."""
    some = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    return bool((some & (rows.temperature >= MIN_TEMPERATURE)).any())


def pack_rows(rows: Rows, padded_to: int = 0) -> Int32:
    """The records [max(R, padded_to), RECORD_FIELDS]; rows behind the R given are none."""
    count = len(rows.positions)
    table = np.zeros((max(count, padded_to), RECORD_FIELDS), np.int32)
    floats = table.view(np.float32)
    floats[:, 0] = _NO_ROW
    floats[:count, 0] = np.where(rows.temperature >= MIN_TEMPERATURE, rows.temperature, _GREEDY)
    # More than any vocabulary has is as good as all of it.
    table[:count, 1] = np.minimum(rows.top_k, np.iinfo(np.int32).max)
    floats[:count, 2] = rows.top_p
    with np.errstate(divide="ignore", invalid="ignore"):
        floats[:count, 3] = np.where(rows.min_p > 0.0, rows.temperature * np.log(rows.min_p), np.float32(-np.inf))
    table[:count, 4:6] = np.ascontiguousarray(rows.seeds, np.uint64).view(np.int32).reshape(count, 2)
    table[:count, 6:8] = np.ascontiguousarray(rows.positions, np.int64).view(np.int32).reshape(count, 2)
    return table


class EditPacker:
    """Flattens a step's edits. Not for several threads: it keeps a slot for each id of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Where an id was met last. What it was before does not matter, so it is never cleared.
        self._slots = np.zeros(vocab_size, np.int32)

    def pack(self, edits: Sequence[Edit]) -> Int32:
        """The records [N, EDIT_FIELDS] of a step's edits, at most one of each row; N may be 0.

        Costs time in proportion to the lengths of the histories, which are not sorted.
        """
        parts = [self._of_row(edit) for edit in edits]
        return np.concatenate(parts) if parts else np.empty((0, EDIT_FIELDS), np.int32)

    def _of_row(self, edit: Edit) -> Int32:
        banned = edit.banned[edit.banned < self._vocab_size]
        ids = np.concatenate((edit.biased, edit.seen, edit.answered, banned)).astype(np.int64, copy=False)
        order = np.arange(len(ids), dtype=np.int32)
        # Of an id that stands there several times, the last one written stays in its slot and makes the record.
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
