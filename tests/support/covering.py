"""Covering arrays: few cases in which every pair of values of two dimensions occurs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

Row = tuple[object, ...]


def pairs_of(row: Row) -> Iterator[tuple[int, object, int, object]]:
    """Yields (dimension, value, dimension, value) for each pair of a row."""
    for (one, left), (other, right) in itertools.combinations(enumerate(row), 2):
        yield one, left, other, right


def covering_rows(dimensions: Sequence[Sequence[object]]) -> list[Row]:
    """Rows of the product in which every pair of values occurs, chosen greedily; always the same ones."""
    rows = list(itertools.product(*dimensions))
    missing = {pair for row in rows for pair in pairs_of(row)}
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        missing -= set(pairs_of(best))
        chosen.append(best)
    return chosen
