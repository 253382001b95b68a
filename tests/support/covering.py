"""Covering arrays: few cases that include every value, or every pair of values of two dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Row = tuple[object, ...]
Made = TypeVar("Made")


def pairs_of(row: Row) -> Iterator[tuple[int, object, int, object]]:
    """Yield (dimension, value, dimension, value) for each pair of a row."""
    for (one, left), (other, right) in itertools.combinations(enumerate(row), 2):
        yield one, left, other, right


def covering_rows(dimensions: Sequence[Sequence[object]]) -> list[Row]:
    """Return rows of the product that cover every pair of values, chosen greedily and deterministically."""
    rows = {row: set(pairs_of(row)) for row in itertools.product(*dimensions)}
    missing = set().union(*rows.values())
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(missing & rows[row]))
        missing -= rows[best]
        chosen.append(best)
    return chosen


def each_value(cases: Sequence[Made], row_of: Callable[[Made], Row]) -> list[Made]:
    """Return a few of the cases that cover every occurring value, chosen greedily and deterministically."""
    missing = {value for case in cases for value in enumerate(row_of(case))}
    chosen: list[Made] = []
    while missing:
        best = max(cases, key=lambda case: len(missing.intersection(enumerate(row_of(case)))))
        missing.difference_update(enumerate(row_of(best)))
        chosen.append(best)
    return chosen
