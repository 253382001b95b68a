"""Patterns of a schema have the meaning of ECMA-262 even where Rust's syntax differs."""

from __future__ import annotations

import calendar
import json
from contextlib import suppress

import pytest

from pillion.errors import InvalidRequest
from pillion.gateway.grammars.answer_grammar import join
from pillion.gateway.grammars.json_strings import rust_pattern
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.gateway.request.validation import MAX_STRUCTURED_BYTES
from pillion.types import StructuredOutputs
from tests.support.random_answers import allows, matcher_of


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("^.$", "a\u0085", "\n\r\u2028"),
        (r"^\s$", " \ufeff\u2028", "a\u0085"),
        (r"^\S$", "a\u0085", " \ufeff\u2028"),
        (r"^[\sa]$", " \ufeffa", "b\u0085"),
        (r"^[^\sa]$", "b\u0085", " \ufeffa"),
        (r"^[\S]$", "a\u0085", " \ufeff"),
        ("^[[a]$", "[a", "b]"),
        ("^[a&&b]$", "a&b", "c"),
        ("^[a~~b]$", "a~b", "c"),
        ("^[a-]$", "a-", "b"),
        ("^[+--]$", "+,-", ".*"),
        ("^[--/]$", "-./", ",0"),
        ("^[.]$", ".", "a"),
        (r"^[\]a]$", "]a", "b\\"),
        (r"^[\u0061-c]$", "abc", "du"),
        (r"^[^]$", "a\n", ""),
        (r"^\.$", ".", "a"),
        (r"^\[a&&b\.$", "", "a"),
    ],
)
def test_a_pattern_has_the_meaning_of_ecma_262(pattern: str, matching: str, other: str) -> None:
    matcher = matcher_of({"type": "string", "pattern": pattern})
    assert matcher is not None
    assert all(allows(matcher, json.dumps(one, ensure_ascii=False)) for one in matching)
    assert not any(allows(matcher, json.dumps(one, ensure_ascii=False)) for one in other)


@pytest.mark.parametrize(
    "hostile", ["[", r"[\u0061", r"\u{", r"[\p{", "[]", "[^", "\\\\", "[a-", "[\\", "[[a]"], ids=repr
)
def test_a_hostile_pattern_is_read_in_one_pass(hostile: str) -> None:
    """Would take minutes or forever if a part were retried at each position; the timeout would end the run."""
    pattern = hostile * (MAX_STRUCTURED_BYTES // len(hostile))
    with suppress(ValueError):
        assert len(rust_pattern(pattern)) >= len(pattern) // 2


def test_an_unsupported_pattern_is_refused_by_name() -> None:
    structured = StructuredOutputs(json=json.dumps({"pattern": "." * 40_000}))
    with pytest.raises(InvalidRequest, match=r"sampling\.structured_outputs\.json: a grammar of \d+ bytes; at most"):
        join([structured_piece(structured)])


@pytest.mark.parametrize("year", [1, 4, 96, 100, 400, 1900, 1904, 2000, 2021, 2024, 2100, 9999])
@pytest.mark.parametrize("name", ["date", "date-time"])
def test_february_has_29_days_in_leap_years(name: str, year: int) -> None:
    matcher = matcher_of({"type": "string", "format": name})
    assert matcher is not None
    rest = "T10:00:00Z" * (name == "date-time")
    assert allows(matcher, f'"{year:04}-02-28{rest}"')
    assert allows(matcher, f'"{year:04}-02-29{rest}"') is calendar.isleap(year)


def test_a_format_and_a_pattern_are_both_enforced() -> None:
    matcher = matcher_of({"format": "date", "pattern": "^20", "allOf": [{"pattern": "1$"}]})
    assert matcher is not None
    assert allows(matcher, '"2024-03-01"')
    assert not allows(matcher, '"1924-03-01"')
    assert not allows(matcher, '"2024-03-02"')
