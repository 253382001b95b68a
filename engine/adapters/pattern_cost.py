"""Bound on the search time of a regular expression: the number of ways in which it can match a name, by its parse tree.

``re`` backtracks to every choice it made, with the GIL held: the time of ``(.*x?)*!`` doubles with each character.
Adapter configs contain untrusted expressions, so they are checked before use.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

# Assumed length of a module's name.
NAME_CHARS = 64
# Max ways of all expressions of a config's key together; some 10 ms per name.
MAX_WAYS = 10**6

_parser: Any = importlib.import_module("re._parser")
# (number of repeats in sequence, ways of everything else).
_Ways = tuple[int, int]


def count_ways(pattern: str) -> int:
    """Return an upper bound on the ways in which an expression can match a name, capped at MAX_WAYS + 1. Raises like
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
        lower, upper, body = value
        return _repeat(int(lower), int(upper), _sequence(body))
    if kind == "BRANCH":
        return 0, _branch(value[1])
    if kind == "GROUPREF_EXISTS":
        return 0, sum(_total(_sequence(items)) for items in value[1:] if items is not None)
    if kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
        return _sequence(value[-1])
    return _sequence(value) if kind == "ATOMIC_GROUP" else (0, 1)


def _repeat(lower: int, upper: int, body: _Ways) -> _Ways:
    """Return the ways of ``lower`` to ``upper`` repetitions of ``body``."""
    if upper <= 1:
        return 0, _total(body) + (lower == 0)
    if body == (0, 1):
        return (0, 1) if lower == upper else (1, 1)
    return 0, min(_total(body) ** min(upper, NAME_CHARS), MAX_WAYS + 1)


def _branch(alternatives: Sequence[Any]) -> int:
    """Return the ways of alternatives: the max sum over those that can match at the same position."""
    prefixes = [(_literal_prefix(items), _total(_sequence(items))) for items in alternatives]
    # Two can only match at the same position if the literal prefix of one begins with the other's.
    return max(sum(ways for other, ways in prefixes if prefix[: len(other)] == other) for prefix, _ in prefixes)


def _literal_prefix(items: Sequence[tuple[Any, Any]]) -> tuple[int, ...]:
    characters: list[int] = []
    for kind, value in items:
        if str(kind) != "LITERAL":
            break
        characters.append(value)
    return tuple(characters)
