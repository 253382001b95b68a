"""Estimates how long a regular expression may search: it bounds, by the parse tree, the ways in which the expression
can try one name.

``re`` goes back to each choice that it made, and holds the interpreter meanwhile: ``(.*x?)*!`` takes twice as long for
every further character. An adapter's config comes with such expressions, so that they are weighed before they are used.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

# The names of linear layers that an expression is matched with are shorter than this, but for some of single experts,
# which have a few characters more.
NAME_CHARS = 64
# The expressions of one key of a config may have this many ways together, which take some 10 ms for each name.
MAX_WAYS = 10**6

_parser: Any = importlib.import_module("re._parser")
# An expression's ways are counted as repeats that follow each other, and as the ways of everything else.
_Ways = tuple[int, int]


def ways_of(pattern: str) -> int:
    """Returns a bound on the ways in which an expression can try a name; more than MAX_WAYS where they are too many.
    Raises what :func:`re.compile` raises."""
    return _total(_sequence(_parser.parse(pattern)))


def _total(ways: _Ways) -> int:
    repeats, others = ways
    # Repeats that follow each other share the name's characters.
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
    # Every round has all ways of the repeated expression.
    return 0, min(_total(inside) ** min(most, NAME_CHARS), MAX_WAYS + 1)


def _branch(alternatives: Sequence[Any]) -> int:
    found = [(_beginning(items), _total(_sequence(items))) for items in alternatives]
    # Two alternatives can match at one place only if one begins as the other does.
    return max(sum(ways for other, ways in found if beginning[: len(other)] == other) for beginning, _ in found)


def _beginning(items: Sequence[tuple[Any, Any]]) -> tuple[int, ...]:
    found: list[int] = []
    for kind, value in items:
        if str(kind) != "LITERAL":
            break
        found.append(value)
    return tuple(found)
