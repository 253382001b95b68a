"""Stop strings, for any chunking."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.gateway.tokens.answer_text import AnswerText, StopMatcher, StopStrings, new_detokenizer, stop_strings
from tests.support.examples import examples

CODEC = byte_tokenizer()
letters = st.text("abc", max_size=40)
stops_strategy = st.lists(st.text("abc", min_size=1, max_size=8), max_size=8)


def expected(text: str, stops: list[str]) -> tuple[str, str]:
    """Match letter by letter: the earliest end of any stop string wins; among those, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], text[min(starts) : end]
    return text, ""


@given(letters, stops_strategy, st.lists(st.integers(0, 6), max_size=30))
@settings(max_examples=examples(500))
def test_matching_equals_the_plain_definition_in_any_chunks(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, got, rest = StopMatcher(StopStrings(stops)), "", text
    final, found = expected(text, stops)
    for size in [*cuts, len(text)]:
        piece, rest = rest[:size], rest[size:]
        got += matcher.push(piece)
        assert final.startswith(got), "text after a stop string, or part of one, leaked"
        held = 0 if matcher.stopped else len(text) - len(rest) - len(got)
        assert held < max(map(len, stops), default=1)
    if not matcher.stopped:
        got += matcher.flush()
    assert (got, matcher.found, matcher.stopped) == (final, found, found in stops)


class CountedLabels(list[str]):
    """A list that counts its accesses."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked += 1
        return super().__getitem__(index)


def test_cost_per_character_does_not_depend_on_the_number_of_stop_strings() -> None:
    one = "a" * 255 + "z"
    others = [("bcd"[n % 3] + "dcb"[n % 3]) * 127 + chr(ord("e") + n) for n in range(15)]
    # Partial matches again and again: the worst case if each stop string is tried at each position.
    text = ("a" * 255 + "y" + others[3][:200] + "ay" * 200 + "abcd") * 4
    for stops in ([], [one], [one, *others]):
        strings = StopStrings(stops)
        labels = strings._labels = CountedLabels(strings._labels)
        matcher = StopMatcher(strings)
        assert "".join(map(matcher.push, text)) + matcher.flush() == text
        assert labels.looked <= 2 * len(text), f"{labels.looked} look-ups for {len(text)} characters"


def test_equal_stop_strings_share_one_matcher_table() -> None:
    assert stop_strings(("a", "b")) is stop_strings(("a", "b"))


def test_a_partial_match_is_released() -> None:
    matcher = StopMatcher(StopStrings(["</s>"]))
    assert [matcher.push(p) for p in ("a<", "/", "b", "</s")] == ["a", "", "</b", ""]
    assert matcher.flush() == "</s"


def run(text: str, stops: tuple[str, ...], step: int, stop_ids: frozenset[int] = frozenset()) -> tuple[str, int, bool]:
    answer, got, ids = AnswerText(new_detokenizer(CODEC), stop_strings(stops), stop_ids), "", CODEC.encode(text).ids
    for at in range(0, len(ids), step):
        piece = answer.push(ids[at : at + step])
        got += piece.text
        if answer.stopped:
            assert len(piece.token_ids) <= step
            break
    return got + answer.flush().text, answer.completion_tokens, answer.stopped


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_an_answer_does_not_depend_on_batches(step: int) -> None:
    assert run("größer als€STOP danach", ("€STOP",), step) == ("größer als", 19, True)
    assert run("größer als€STO", ("€STOP",), step)[0] == "größer als€STO"


def test_a_stop_string_completed_by_the_flush_is_matched() -> None:
    codec_ids = CODEC.encode("ab😀").ids[:-1]
    answer = AnswerText(new_detokenizer(CODEC), stop_strings(("b\ufffd",)), frozenset())
    text = answer.push(codec_ids).text
    assert text == "a"
    assert answer.flush().text == ""
    assert (answer.stopped, answer.stop_string) == (True, "b\ufffd")


def test_a_stop_id_has_no_text() -> None:
    dot = CODEC.encode(".").ids[0]
    assert run("one.", (), 1, frozenset({dot})) == ("one", 4, False)


def test_flush_happens_once() -> None:
    answer = AnswerText(new_detokenizer(CODEC), stop_strings(("xyz",)), frozenset())
    assert answer.push(CODEC.encode("ax").ids).text == "a"
    assert [answer.flush().text, answer.flush().text] == ["x", ""]
