"""Applies logit bias, penalties and banned stop ids, which change single logits.

The order is: bias is added; the repetition penalty divides positive logits and multiplies others (CTRL, Keskar et
al., 2019); presence and frequency penalties are subtracted, as OpenAI defines them; banned tokens get -inf. Repetition
counts tokens of prompt and answer, the other two only those of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pillion.kernels.step import Float32, Int64, RowEdit


@contextmanager
def edited(table: Float32, edits: Sequence[RowEdit]) -> Iterator[None]:
    """Edits the logits ``table`` [R, V] for the duration of the block, and then restores them bit by bit."""
    touched = []
    for edit in edits:
        ids = np.concatenate((edit.biased, edit.seen, edit.answered, _within(edit.banned, table.shape[1])))
        # An id may occur several times: all values are read before the first is written, so each is the old one.
        touched.append((edit.row, ids, table[edit.row, ids]))
    try:
        for edit in edits:
            _apply(table[edit.row], edit)
        yield
    finally:
        for row, ids, before in touched:
            table[row, ids] = before


def _apply(row: Float32, edit: RowEdit) -> None:
    row[edit.biased] += edit.bias
    if len(edit.seen):
        values, penalty = row[edit.seen], np.float32(edit.repetition)
        # A token that was seen several times is written several times, always with the same value.
        row[edit.seen] = np.where(values > 0, values / penalty, values * penalty)
    if len(edit.answered):
        ids, counts = np.unique(edit.answered, return_counts=True)
        row[ids] -= np.float32(edit.frequency) * counts.astype(np.float32) + np.float32(edit.presence)
    row[_within(edit.banned, len(row))] = -np.inf


def _within(ids: Int64, width: int) -> Int64:
    """Drops ids that have no logit: a tokenizer may have end tokens beyond the model's vocabulary."""
    return ids[ids < width]
