"""Where the answers of a replay differ: tables and a property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.records.bundle import BundleAnswer
from pillion.records.comparison import ReplayedAnswer, first_difference, logprob_distance
from pillion.types import TokenLogprob


def recorded(ids: str, finish_reason: str = "length", logprobs: tuple[float | None, ...] = ()) -> BundleAnswer:
    """Return an answer whose tokens are the letters' numbers."""
    return BundleAnswer(tokens=len(ids), token_ids=tuple(map(ord, ids)), finish_reason=finish_reason, logprobs=logprobs)


def replayed(ids: str, finish_reason: str = "length", top: str = "") -> ReplayedAnswer:
    """Return its replay, in which the letters of ``top`` are the most likely at every position: -1, -2 and so on."""
    likely = {ord(letter): -1.0 - n for n, letter in enumerate(top)}
    logprobs = [TokenLogprob(ord(one), likely.get(ord(one), -0.5), (*likely,), (*likely.values(),)) for one in ids]
    return ReplayedAnswer([*map(ord, ids)], logprobs, finish_reason)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (recorded("abc"), replayed("abc"), ""),
        (recorded("abc", "tool_calls"), replayed("abc", "stop"), ""),
        (recorded("ab", ""), replayed("abc"), ""),
        (recorded("", ""), replayed("abc"), ""),
        (
            recorded("abc"),
            replayed("abd", top="dc"),
            "answer 0 at position 2: recorded 99 (-2.000000), replayed 100 (-1.000000), margin 1.000000",
        ),
        (
            recorded("abc"),
            replayed("xbc", top="xy"),
            "answer 0 at position 0: recorded 97 (not among the 2 likeliest), replayed 120 (-1.000000)",
        ),
        (
            recorded("ab", "stop"),
            replayed("abc", top="c"),
            "answer 0 at position 2: recorded its end (stop), replayed 99 (-1.000000)",
        ),
        (
            recorded("abc"),
            replayed("ab", "stop"),
            "answer 0 at position 2: recorded 99, replayed its end (stop)",
        ),
        (
            recorded("ab", ""),
            replayed("a", "stop"),
            "answer 0 at position 1: recorded 98, replayed its end (stop)",
        ),
        (
            recorded("ab", "stop"),
            replayed("ab", "length"),
            "answer 0 at position 2: recorded its end (stop), replayed its end (length)",
        ),
    ],
)
def test_the_first_difference_is_described(old: BundleAnswer, new: ReplayedAnswer, words: str) -> None:
    found = first_difference([old], [new])
    assert ("" if found is None else str(found)) == words


_IDS = st.text("ab", max_size=5)


@given(st.lists(st.tuples(_IDS, _IDS), min_size=1, max_size=3))
def test_the_first_difference_is_where_the_first_unequal_answer_diverges(pairs: list[tuple[str, str]]) -> None:
    found = first_difference([recorded(old) for old, _ in pairs], [replayed(new) for _, new in pairs])
    unequal = [index for index, (old, new) in enumerate(pairs) if old != new]
    assert (found is None) == (not unequal)
    if found is not None:
        old, new = pairs[found.answer]
        assert found.answer == unequal[0]
        assert old[: found.position] == new[: found.position]
        assert old[found.position : found.position + 1] != new[found.position : found.position + 1]


def test_logprob_distances_use_only_equal_tokens_with_recorded_logprobs() -> None:
    old = [recorded("aabx", logprobs=(None, -0.5, -0.75, -9.0)), recorded("ab")]
    assert logprob_distance(old, [replayed("aabc"), replayed("ab")]) == (0.25, 2)


def test_a_replay_need_not_exceed_an_unfinished_answer() -> None:
    assert [replayed("ab", "").covers(recorded(ids, "")) for ids in ("ab", "abc")] == [True, False]
    assert not replayed("ab", "").covers(recorded("ab"))
    assert replayed("a", "stop").covers(recorded("abc"))
