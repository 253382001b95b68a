"""Suffix decoding against a naive search over the text itself and earlier answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.drafts import recent_answers
from pillion.engine.drafts.lookup_drafters import SuffixDrafter, make_lookup_drafter
from pillion.engine.drafts.recent_answers import END, MAX_RINGS, MIN_MATCH_TOKENS, AnswerRing, RecentAnswers
from pillion.settings.speculative_config import SpeculativeConfig
from tests.engine.drafts.test_drafts import looked_up, sequence_of
from tests.support.drafts import speculative
from tests.support.examples import examples

ROOT = bytes(32)
CONFIG = SpeculativeConfig(method="suffix", num_speculative_tokens=16)


def drafter_of(answers: list[list[int]], **changes: float) -> SuffixDrafter:
    drafter = SuffixDrafter(replace(CONFIG, **changes))
    for answer in answers:
        drafter._answers.add(ROOT, np.array(answer, dtype=np.int32))
    return drafter


def naive(text: list[int], tokens: list[int], places: list[int], config: SpeculativeConfig) -> tuple[list[int], int]:
    """Return what most often follows the longest suffix of ``text`` at ``places`` of ``tokens``, newest first."""

    depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor

    def length(place: int) -> int:
        most = min(int(depth / (1 + factor)), len(text), place + 1)
        return next((n for n in range(most) if tokens[place - n] != text[-1 - n]), most)

    matched = max(map(length, places), default=0)
    if matched < 2:
        return [], 0
    places = [place for place in places if length(place) == matched]
    needed, drafted = config.suffix_decoding_min_token_prob * len(places), []
    most = min(int(matched * factor), depth - matched)
    while len(drafted) < most:
        rest = [*tokens, END]
        followed = [rest[place + 1 + len(drafted)] for place in places]
        token, count = Counter(followed).most_common(1)[0]
        if token == END or count < needed:
            break
        places = [place for place, other in zip(places, followed, strict=True) if other == token]
        drafted.append(token)
    return drafted, matched


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=examples(150))
@given(TEXTS, st.integers(2, 9), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 3.0]))
def test_drafts_continue_matches_in_the_text_itself(text: list[int], depth: int, least: float, factor: float) -> None:
    config = replace(
        CONFIG,
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_min_token_prob=least,
        suffix_decoding_max_spec_factor=factor,
    )
    pair = text[-2:]
    places = [i for i in range(len(text) - 2, 0, -1) if text[i - 1 : i + 1] == pair][:32]
    assert looked_up(SuffixDrafter(config), text, 16) == naive(text, text, places, config)[0]


@settings(max_examples=examples(150))
@given(st.lists(TEXTS, max_size=6), TEXTS)
def test_matches_in_earlier_answers_are_found(answers: list[list[int]], text: list[int]) -> None:
    ring = AnswerRing(100)
    for answer in answers:
        ring.add(np.array(answer, dtype=np.int32))
    tokens = [token for answer in answers for token in (*answer, END)]
    found = ring.matches(np.array(text, dtype=np.int32)).tolist()
    end = text[-MIN_MATCH_TOKENS:]
    least = MIN_MATCH_TOKENS
    true = [i for i in range(len(tokens) - 1, least - 2, -1) if tokens[i - least + 1 : i + 1] == end]
    expected = true if len(text) >= least else []
    # Other places may have the same hash: compare the tokens.
    same = [place for place in found if tokens[max(0, place - least + 1) : place + 1] == end]
    assert same == expected[: len(same)]
    assert len(same) == min(len(expected), 32) or len(found) == 32
    drafted, _ = naive(text, tokens, found, CONFIG)
    pair = text[-2:]
    own, matched = naive(
        text, text, [i for i in range(len(text) - 2, 0, -1) if text[i - 1 : i + 1] == pair][:32], CONFIG
    )
    longer = naive(text, tokens, found, CONFIG)[1] > matched
    assert looked_up(drafter_of(answers), text, 16) == (drafted if longer else own)


def test_a_ring_forgets_its_oldest_tokens_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_answers, "FIRST_RING_TOKENS", 16)
    monkeypatch.setattr(recent_answers, "MAX_RING_TOKENS", 64)
    ring = AnswerRing(3)
    for number in range(40):
        answer = np.array([number, number + 1, number + 2, number + 3], dtype=np.int32)
        ring.add(answer)
        assert ring.matches(answer).tolist()[0] == 5 * number + 3
        assert ring.first == max(0, 5 * (number - 2))
    assert len(ring.tokens) == 64
    assert ring.matches(np.array([36, 37, 38], dtype=np.int32)).tolist() == [], "the fourth answer from the end"
    ring.add(np.arange(1000, dtype=np.int32))
    assert ring.matches(np.array([997, 998, 999], dtype=np.int32)).tolist() == [ring.end - 2]
    assert ring.matches(np.array([7, 8, 9], dtype=np.int32)).tolist() == []


def test_tenants_share_nothing_and_memory_is_bounded() -> None:
    answers = RecentAnswers(10)
    for number in range(MAX_RINGS + 20):
        answers.add(number.to_bytes(32, "big"), np.arange(100, dtype=np.int32))
    assert answers.ring((0).to_bytes(32, "big")) is None, "the roots that were not used for longest are forgotten"
    assert answers.cached_tokens <= recent_answers.MAX_CACHED_TOKENS
    drafter = drafter_of([[5, 6, 7, 8, 9]])
    assert looked_up(drafter, [1, 5, 6, 7], 16) == [8, 9]
    other = sequence_of([1, 5, 6, 7])
    other.parent_hash = b"\1" * 32
    assert drafter.draft([(other, 16)])[0].tolist() == []


def test_an_answer_is_remembered_once_it_has_ended() -> None:
    drafter = make_lookup_drafter(speculative(8, "suffix"))
    first = sequence_of([1, 2, 3])
    for token in (7, 8, 9, 10):
        first.append(token)
    first.close(0.0, commit_rest=False, resume=True)
    drafter.sequence_finished(first)
    assert looked_up(drafter, [1, 2, 3], 8) == [], "a preempted stream comes back"
    first.close(0.0, commit_rest=False, resume=False)
    drafter.sequence_finished(first)
    assert looked_up(drafter, [1, 2, 3], 8) == [7, 8, 9]
    assert looked_up(drafter, [4, 1, 2, 3, 7, 8], 8) == [9, 10]


def test_no_answers_are_kept_if_disabled() -> None:
    drafter = drafter_of([[5, 6, 7, 8, 9]], suffix_decoding_max_cached_requests=0)
    assert looked_up(drafter, [1, 5, 6, 7], 16) == []
