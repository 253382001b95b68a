"""Bound on the search time of a regular expression: counts, from its parse tree, the ways in which it can try one name.

``re`` backtracks to every choice it made, with the GIL held: ``(.*x?)*!`` takes twice as long per character. Adapter
configs contain such expressions, so they are checked before use.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

NAME_CHARS = 64
# Max ways of all expressions of a config's key; some 10 ms per name.
MAX_WAYS = 10**6

_parser: Any = importlib.import_module("re._parser")
# (sequential repeats, ways of everything else).
_Ways = tuple[int, int]


def count_ways(pattern: str) -> int:
    """Return an upper bound on the ways in which an expression can try a name, capped at MAX_WAYS + 1. Raises like
    :func:`re.compile`."""
    return _total(_sequence(_parser.parse(pattern)))


def _total(ways: _Ways) -> int:
    repeats, others = ways
    # Sequential repeats divide the name's characters among them.
    return min(math.comb(NAME_CHARS + min(repeats, 8), min(repeats, 8)) * others, MAX_WAYS + 1)


def _sequence(items: Sequence[tuple[Any, Any]]) -> _Ways:
    repeats, others = 0, 1
    for kind, value in items:
        more, factor = _item(str(kind), value)
        repeats, others = repeats + more, min(others * factor, MAX_WAYS + 1)
    return repeats, others


def _item(kind: str, value: Any) -> _Ways:
    if kind.endswith("_REPEAT"):
        least, most, inside = value
        return _repeat(int(least), int(most), _sequence(inside))
    if kind == "BRANCH":
        return 0, _branch(value[1])
    if kind == "GROUPREF_EXISTS":
        return 0, sum(_total(_sequence(items)) for items in value[1:] if items is not None)
    if kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
        return _sequence(value[-1])
    return _sequence(value) if kind == "ATOMIC_GROUP" else (0, 1)


def _repeat(least: int, most: int, inside: _Ways) -> _Ways:
    if most <= 1:
        return 0, _total(inside) + (least == 0)
    if inside == (0, 1):
        return (0, 1) if least == most else (1, 1)
    return 0, min(_total(inside) ** min(most, NAME_CHARS), MAX_WAYS + 1)


def _branch(alternatives: Sequence[Any]) -> int:
    found = [(_beginning(items), _total(_sequence(items))) for items in alternatives]
    # Alternatives can only match at the same place if one's literal prefix begins with the other's.
    return max(sum(ways for other, ways in found if beginning[: len(other)] == other) for beginning, _ in found)


def _beginning(items: Sequence[tuple[Any, Any]]) -> tuple[int, ...]:
    found: list[int] = []
    for kind, value in items:
        if str(kind) != "LITERAL":
            break
        found.append(value)
    return tuple(found)
