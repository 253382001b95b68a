"""Lines of a batch: a journal after any end of its writer, and invalid inputs."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.gateway.batches.batch_lines import (
    MAX_BATCH_LINES,
    MAX_INPUT_ERRORS,
    InputCheck,
    JournalEntry,
    output_line,
    read_request,
    unserved_line,
    whole_entries,
)
from tests.support.examples import examples

CHAT = "/v1/chat/completions"
GOOD = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}
OTHER = {**GOOD, "custom_id": "b"}
entries = st.builds(
    JournalEntry,
    st.integers(1, 10**6),
    st.booleans(),
    st.dictionaries(st.text(max_size=4), st.text(max_size=8), max_size=3).map(lambda one: json.dumps(one).encode()),
)


def replayed(journal: bytes) -> tuple[list[JournalEntry], int]:
    found = list(whole_entries(io.BytesIO(journal)))
    return [entry for entry, _ in found], sum(size for _, size in found)


@given(st.lists(entries, max_size=4))
@settings(max_examples=examples(60))
def test_a_journal_cut_at_any_byte_keeps_its_whole_entries(written: list[JournalEntry]) -> None:
    packed = [entry.encoded() for entry in written]
    journal = b"".join(packed)
    ends = [sum(map(len, packed[:count])) for count in range(len(packed) + 1)]
    for cut in range(len(journal) + 1):
        whole = sum(end <= cut for end in ends[1:])
        assert replayed(journal[:cut]) == (written[:whole], ends[whole])


@given(st.lists(entries, min_size=1, max_size=4), st.data())
@settings(max_examples=examples(100))
def test_entries_after_a_damaged_one_are_ignored(written: list[JournalEntry], data: st.DataObject) -> None:
    """A power cut may lose pages of the file and leave zeros in place of an entry."""
    journal = bytearray(b"".join(entry.encoded() for entry in written))
    at = data.draw(st.integers(0, len(journal) - 1))
    journal[at] ^= data.draw(st.integers(1, 255))
    found, size = replayed(bytes(journal))
    assert found == written[: len(found)]
    assert size <= at
    torn = bytes(journal[:at]) + bytes(len(journal) - at)
    assert replayed(torn)[1] <= at


def test_entries_survive_a_round_trip() -> None:
    entry = JournalEntry(7, True, b'{"a": "b c d"}')
    packed = entry.encoded()
    assert list(whole_entries([packed])) == [(entry, len(packed))]
    assert not list(whole_entries([packed[:-1]]))


def judged(*lines: Any, endpoint: str = CHAT, most: int = 1000) -> list[tuple[str, int | None]]:
    check = InputCheck(endpoint, most)
    for line in lines:
        check.add(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
    return [(error.code, error.line) for error in check.end()]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({**OTHER, "custom_id": ""}, "invalid_custom_id"),
        ({**OTHER, "custom_id": "x" * 513}, "invalid_custom_id"),
        ({**OTHER, "method": "GET"}, "invalid_method"),
        ({**OTHER, "url": "/v1/completions"}, "mismatched_url"),
        ({**OTHER, "body": []}, "invalid_body"),
        ({**OTHER, "more": 1}, "invalid_json_line"),
        ({"custom_id": "a"}, "invalid_json_line"),
        (b"{", "invalid_json_line"),
        (b'"\xff"', "invalid_json_line"),
        (b"[" * 100_000 + b"\n", "line_too_long"),
        ({**OTHER, "body": {"x": "y" * 1000}}, "line_too_long"),
        (GOOD, "duplicate_custom_id"),
    ],
)
def test_a_bad_line_is_named(line: Any, code: str) -> None:
    assert judged(GOOD, b"\n", line) == [(code, 3)]


def test_inputs_are_bounded() -> None:
    assert judged() == judged(b"\n", b"  \n") == [("empty_file", None)]
    check = InputCheck(CHAT, 1000)
    for number in range(MAX_BATCH_LINES + 1):
        assert not check.exhausted
        check.add(json.dumps({**GOOD, "custom_id": str(number)}).encode())
    assert check.exhausted
    assert [error.code for error in check.end()] == ["too_many_requests"]
    wrong = InputCheck(CHAT, 1000)
    while not wrong.exhausted:
        wrong.add(b"x\n")
    assert len(wrong.end()) == MAX_INPUT_ERRORS


def test_the_offset_of_each_request_is_recorded() -> None:
    texts = [json.dumps({**GOOD, "custom_id": "ä"}).encode() + b"\n", b"\n", json.dumps(GOOD).encode()]
    check = InputCheck(CHAT, 1000)
    for text in texts:
        check.add(text)
    assert check.end() == ()
    assert check.spans == {1: (0, len(texts[0])), 3: (len(texts[0]) + 1, len(texts[2]))}
    assert bytes(read_request(texts[2]).body) == b'{"messages": []}'


def test_a_line_may_begin_with_a_byte_order_mark() -> None:
    mark, check = b"\xef\xbb\xbf", InputCheck(CHAT, 1000)
    texts = [mark + json.dumps(GOOD).encode() + b"\n", mark + b"\n"]
    for text in texts:
        check.add(text)
    assert (check.end(), list(check.spans)) == ((), [1])
    assert bytes(read_request(texts[0]).body) == b'{"messages": []}'


def test_output_lines_have_openais_form() -> None:
    said = json.loads(output_line("batch_ab", 3, "mine", 200, "r-1", b'{"x":1}'))
    response = {"status_code": 200, "request_id": "r-1", "body": {"x": 1}}
    assert said == {"id": "batch_req_ab_3", "custom_id": "mine", "response": response, "error": None}
    said = json.loads(unserved_line("batch_ab", 3, "mine", "batch_expired", "late"))
    error = {"code": "batch_expired", "message": "late"}
    assert said == {"id": "batch_req_ab_3", "custom_id": "mine", "response": None, "error": error}
