"""The rule of a canary, its figures and its pace: tables and properties."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.errors import ConfigError
from pillion.records.bundle import Bundle, BundleAnswer, BundleRequest
from pillion.records.canary import CanaryOutcome, CanaryRule, CanaryTally, TokenPace, is_in_share, kind_of, parse_rule
from pillion.types import SamplingParams
from tests.pillion.records.test_bundle import bundle_of


def bundle(operation: str = "chat", temperature: float = 0.0, answers: int = 1, grammar: str = "") -> Bundle:
    """Return a bundle with empty answers to a request of this kind."""
    request = BundleRequest(
        operation=operation,
        label="x",
        prompt_tokens=1,
        sampling=SamplingParams(temperature=temperature),
        grammar=grammar,
    )
    return bundle_of(request=request, answers=(BundleAnswer(tokens=1),) * answers)


EQUAL, OTHER = CanaryOutcome(name="equal"), CanaryOutcome(name="differs", position=3)


@pytest.mark.parametrize(
    ("rule", "wanted", "outcomes", "verdict"),
    [
        ("", 3, [EQUAL] * 2, None),
        ("", 3, [EQUAL] * 3, True),
        ("", 200, [EQUAL, OTHER], False),
        ("", 200, [CanaryOutcome(name="prompt")], False),
        ("", 200, [CanaryOutcome(name="error")], False),
        ("differs=0.5", 4, [OTHER] * 2, None),
        ("differs=0.5", 4, [OTHER] * 2 + [EQUAL] * 2, True),
        ("differs=0.5", 4, [OTHER] * 3, False),
        ("distance=0.1", 1, [CanaryOutcome(name="equal", distance=0.3, compared_tokens=2)], False),
        ("distance=0.1", 1, [CanaryOutcome(name="equal", distance=0.3, compared_tokens=4)], True),
        ("distance=0.1", 1, [EQUAL], True),
        ("slower=1.5", 3, [CanaryOutcome(name="equal", slower=one) for one in (1, 1.4, 9)], True),
        ("slower=1.5", 3, [CanaryOutcome(name="equal", slower=one) for one in (1, 1.6, 9)], False),
    ],
)
def test_a_canary_rule_gives_the_expected_verdict(
    rule: str, wanted: int, outcomes: list[CanaryOutcome], verdict: bool | None
) -> None:
    tally = CanaryTally(parse_rule(rule), wanted)
    for outcome in outcomes:
        tally.note(bundle(), outcome)
    assert tally.verdict() is verdict


@given(st.lists(st.booleans(), max_size=8), st.integers(1, 8), st.floats(0, 1))
def test_an_early_stop_agrees_with_the_full_canary(differ: list[bool], wanted: int, most: float) -> None:
    tally = CanaryTally(CanaryRule(differs=most), wanted)
    for one in differ:
        if tally.verdict() is None:
            tally.note(bundle(), OTHER if one else EQUAL)
    if tally.verdict() is False:
        for _ in range(wanted - tally.all.requests):
            tally.note(bundle(), EQUAL)
        assert tally.broken()


def test_rules_are_read() -> None:
    assert parse_rule("differs=0.02, slower=1.2") == CanaryRule(0.02, math.inf, 1.2)
    for text in ("differs", "differs=x", "differs=-1", "differs=nan", "worse=1", "slower=1,slower=2"):
        with pytest.raises(ConfigError, match="--rule"):
            parse_rule(text)


def test_request_kinds_are_tallied_separately() -> None:
    assert kind_of(bundle()) == "chat greedy"
    assert kind_of(bundle("text_completion", 0.5, 2, "start: A")) == "text drawn grammar n > 1"
    tally = CanaryTally(CanaryRule(), 9)
    for one in (bundle(), bundle(temperature=1.0), bundle()):
        tally.note(one, EQUAL)
    assert {row: figures.requests for row, figures in tally.rows.items()} == {
        ("toy", "chat greedy"): 2,
        ("toy", "chat drawn"): 1,
    }


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(1, 10**4), st.floats(0, 100)), max_size=20))
def test_replays_keep_to_the_pace(tokens_per_s: int, replays: list[tuple[int, float]]) -> None:
    pace, now, begun = TokenPace(tokens_per_s), 0.0, []
    for tokens, later_s in replays:
        now += later_s
        now += pace.spend(tokens, now)
        begun.append((now, tokens))
    for (first_s, tokens), (then_s, _) in itertools.pairwise(begun):
        assert then_s - first_s >= tokens / tokens_per_s - 1e-6


def test_the_recorded_fraction_is_close_to_its_setting() -> None:
    ids = [f"{number:024x}" for number in range(2000)]
    assert [sum(is_in_share(one, share) for one in ids) for share in (0.0, 1.0)] == [0, 2000]
    assert 400 < sum(is_in_share(one, 0.25) for one in ids) < 600
