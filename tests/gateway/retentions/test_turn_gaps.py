"""TurnGaps: what it learns of whom, what it decides by that, and its bounds under any traffic."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.gateway.retentions import turn_gaps
from pillion.gateway.retentions.turn_gaps import MAX_TOOL_CHARS, STEP, GapTable, KeepUntil, LetGo, TurnGaps
from pillion.kvstore.ledger.retention_eviction import MAX_WORTH_STEPS
from tests.support.examples import examples


class Traffic:
    """Conversations with one table, at a time that tests set."""

    def __init__(self) -> None:
        self.gaps = TurnGaps()
        self.now = 0.0
        self.numbers = itertools.count()

    def answer(self, tenant: str, *tools: str, chain: list[bytes] | None = None) -> tuple[list[bytes], object]:
        """One turn, at once: of a new conversation, or of one with this chain. Returns the chain, and the decision."""
        blocks = [*(chain or [b"system"]), b"%d" % next(self.numbers)]
        shared = self.gaps.turn(tenant, blocks, self.now, 0 if chain else 1)
        assert shared == 1, "a conversation has forgotten what others have of it"
        return blocks, self.gaps.ended(tenant, blocks, tools, self.now, shared)

    def conversation(self, tenant: str, tool: str, gap_s: float) -> object:
        """A turn that calls a tool and comes back; returns the decision about the call."""
        chain, decided = self.answer(tenant, tool)
        self.now += gap_s
        self.answer(tenant, chain=chain)
        return decided


def worth_at(wish: KeepUntil, age_s: float) -> float:
    return [worth for at, worth in wish.worth if at <= age_s][-1]


@settings(max_examples=examples(25), deadline=None)
@given(
    gaps=st.lists(st.floats(0.1, 900.0), min_size=1, max_size=12),
    left=st.integers(0, 12),
    age_s=st.floats(0.0, 1000.0),
)
def test_a_worth_is_the_most_uses_a_second_of_all_times_to_leave(gaps: list[float], left: int, age_s: float) -> None:
    """By the counts themselves, and by all times at which KV could leave; classes and their neighbours blur it."""
    table = GapTable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_gaps, "HALF_LIFE", 10**9)
        patch.setattr(turn_gaps, "SPREAD", (1.0,))
        patch.setattr(turn_gaps, "MIN_ANSWERS", 0)
        for gap_s in gaps:
            table.came(gap_s)
        for _ in range(left):
            table.gone()
        wish = table.wish()
    edges = [turn_gaps.LEAST_GAP_S * STEP**number for number in range(turn_gaps.CLASSES + 1)]
    age_s = max((edge for edge in edges[1:] if edge <= age_s), default=0.0)
    later = [gap_s for gap_s in gaps if gap_s >= age_s]
    best = 0.0
    for until_s in later:
        seconds = sum(min(gap_s, until_s) - age_s for gap_s in later) + left * (until_s - age_s)
        best = max(best, sum(gap_s <= until_s for gap_s in later) / max(seconds, 1e-3))
    if later and age_s <= wish.until_s and min(later) > age_s * STEP:
        assert best / STEP**2.5 <= worth_at(wish, age_s) <= best * STEP**2.5


@settings(max_examples=examples(40))
@given(median_s=st.floats(0.5, 100.0), spread=st.floats(0.1, 1.0), seed=st.integers(0, 1000))
def test_a_tools_gap_is_learned_whatever_a_few_odd_ones_say(median_s: float, spread: float, seed: int) -> None:
    rng, table = random.Random(seed), GapTable()
    drawn = [median_s * 2.718281828 ** rng.gauss(0.0, spread) for _ in range(150)]
    for number, gap_s in enumerate(drawn):
        table.came(3000.0 if number % 20 == 7 else gap_s)
    # The table forgets, so the quantile is that of the last answers, within a class and their own error.
    error = STEP * 2.718281828 ** (spread * 0.6)
    assert sorted(drawn[-90:])[45] / error <= table.quantile_s(0.5) <= sorted(drawn[-90:])[45] * error


def test_a_call_is_kept_until_its_tools_turns_have_come_and_an_end_is_let_go() -> None:
    traffic = Traffic()
    for _ in range(60):
        quick = traffic.conversation("a", "read", 1.0)
        slow = traffic.conversation("a", "build", 90.0)
    assert isinstance(quick, KeepUntil)
    assert isinstance(slow, KeepUntil)
    assert 1.0 < quick.until_s < 3
    assert 90 < slow.until_s < 200
    # A use comes in about a second, and in about 90, of which less is left as time goes.
    assert 0.6 <= worth_at(quick, 0) <= 1.7 < worth_at(quick, 0.9)
    assert 1 / 130 <= worth_at(slow, 0) <= 1 / 70 < 1 / 30 < worth_at(slow, 80)
    # The slower of two tools counts, and a new tool is taken for the tenant's others.
    _, both = traffic.answer("a", "read", "build")
    assert isinstance(both, KeepUntil)
    assert worth_at(both, 0) == pytest.approx(worth_at(slow, 0), rel=0.1)
    assert isinstance(traffic.answer("a", "new")[1], KeepUntil)
    # All conversations have ended with an answer without a call, and are let go but for the shared system prompt.
    traffic.now += 1000
    traffic.answer("a")
    assert traffic.answer("a")[1] == LetGo(1)
    # Another tenant has learned nothing.
    assert traffic.answer("b")[1] is None
    _, fresh = traffic.answer("b", "build")
    assert isinstance(fresh, KeepUntil)
    assert worth_at(fresh, 0) > 1 / 15


def test_a_tool_whose_results_never_come_is_not_waited_for() -> None:
    traffic = Traffic()
    for _ in range(20):
        traffic.conversation("a", "read", 1.0)
    for _ in range(100):
        traffic.answer("a", "hang")
        traffic.now += 10
    traffic.now += 1000
    traffic.answer("a", "hang")
    assert traffic.answer("a", "hang")[1] == LetGo(1)


def test_nothing_is_let_go_of_a_tenant_whose_turns_nobody_recognizes() -> None:
    """As where a client or a template writes a conversation anew: its KV was let go, and its hits were lost."""
    traffic = Traffic()
    for tool in ("", "hang"):
        for _ in range(100):
            traffic.answer("a", *filter(None, [tool]))
            traffic.now += 10
        traffic.now += 1000
        traffic.answer("a")
        assert traffic.answer("a", *filter(None, [tool]))[1] is None


def test_a_turn_whose_last_block_was_written_anew_is_recognized() -> None:
    """As by templates that end a prompt with the beginning of reasoning, which no later prompt repeats."""
    gaps = TurnGaps()
    for number in range(40):
        system, own, end = b"system", b"own %d" % number, b"end %d" % number
        shared = gaps.turn("a", [system, own, end], number * 100.0, 1)
        gaps.ended("a", [system, own, end], ("read",), number * 100.0, shared)
        later = [system, own, b"answer %d" % number]
        assert gaps.turn("a", later, number * 100.0 + 2, 2) == 1
        gaps.ended("a", later, (), number * 100.0 + 2, 1)
    wish = gaps.ended("a", [b"system", b"x", b"y"], ("read",), 4000.0, 1)
    assert isinstance(wish, KeepUntil)
    assert 2.0 < wish.until_s < 6
    # A block that others have, too, tells no conversation from another one.
    gaps.turn("a", [b"another"], 4000.0, 0)
    open_turns = gaps.conversations
    assert gaps.turn("a", [b"system", b"z"], 4000.0, 1) == 1
    assert gaps.conversations == open_turns


def test_where_turns_may_come_to_another_gateway_nobody_counts_as_gone() -> None:
    gaps = TurnGaps()
    for number in range(200):
        chain = [b"%d" % number]
        shared = gaps.turn("a", chain, number * 10.0, 0, sees_all=False)
        decided = gaps.ended("a", chain, ("run",), number * 10.0, shared)
        assert isinstance(decided, KeepUntil)


def test_a_prompt_that_others_have_whole_is_nobodys_conversation() -> None:
    gaps = TurnGaps()
    for now in range(100):
        shared = gaps.turn("a", [b"s", b"t"], float(now), 2)
        assert gaps.ended("a", [b"s", b"t"], (), float(now), shared) is None
    assert gaps.conversations == 0


@settings(max_examples=examples(30), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 8), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 30), st.booleans()),
        min_size=60,
        max_size=200,
    )
)
def test_any_traffic_is_bounded(steps: list[tuple[int, list[int], int, bool]]) -> None:
    limits = {"MAX_TENANTS": 4, "MAX_TENANT_TOOLS": 5, "MAX_TENANT_CONVERSATIONS": 8, "MAX_CONVERSATIONS": 20}
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(turn_gaps, name, limit)
        gaps, now = TurnGaps(), 0.0
        for number, (tenant, tools, wait_s, again) in enumerate(steps):
            name, chain = f"t{tenant}", [b"%d" % (number if not again else number % 7)]
            now += wait_s
            shared = gaps.turn(name, chain, now, 0)
            decided = gaps.ended(name, chain, [f"{'x' * 100}{tool}"[tool:] for tool in tools], now, shared)
            if isinstance(decided, KeepUntil):
                times = [at for at, _ in decided.worth]
                assert 0 == times[0] <= times[-1] <= decided.until_s <= turn_gaps.MAX_GAP_S
                assert times == sorted(times)
                assert all(worth > 0 for _, worth in decided.worth)
                assert len(times) <= MAX_WORTH_STEPS
            assert gaps.tenants <= 4
            assert gaps.conversations <= 20
            known = gaps._tenants.values()
            assert gaps.conversations == sum(len(one.turns) for one in known)
            for one in known:
                assert len(one.turns) <= 8
                assert len(one.tables) <= 5
                assert len(one.waiting) <= 7
                assert all(len(key) <= MAX_TOOL_CHARS for key in one.waiting)
                assert {key for keys in one.waiting.values() for key in keys} <= one.turns.keys()
