"""TurnGaps: what it learns of whom, what it decides by that, and its bounds under any traffic."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.gateway.retentions import turn_gaps
from pillion.gateway.retentions.turn_gaps import MAX_TOOL_CHARS, STEP, GapTable, KeepUntil, LetGo, TurnGaps
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
    assert 0.7 <= quick.due_s <= 1.5 < quick.until_s < 10
    assert 65 <= slow.due_s <= 130 < slow.until_s < 400
    # The slower of two tools counts, and a new tool is taken for the tenant's others.
    _, both = traffic.answer("a", "read", "build")
    assert isinstance(both, KeepUntil)
    assert both.due_s == pytest.approx(slow.due_s, rel=0.1)
    assert isinstance(traffic.answer("a", "new")[1], KeepUntil)
    # All conversations have ended with an answer without a call, and are let go but for the shared system prompt.
    traffic.now += 1000
    traffic.answer("a")
    assert traffic.answer("a")[1] == LetGo(1)
    # Another tenant has learned nothing.
    assert traffic.answer("b")[1] is None
    _, fresh = traffic.answer("b", "build")
    assert isinstance(fresh, KeepUntil)
    assert fresh.due_s < 10


def test_a_tool_whose_results_never_come_is_not_waited_for() -> None:
    traffic = Traffic()
    for _ in range(100):
        traffic.answer("a", "hang")
        traffic.now += 10
    traffic.now += 1000
    traffic.answer("a", "hang")
    assert traffic.answer("a", "hang")[1] == LetGo(1)


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
            assert not isinstance(decided, KeepUntil) or 0 < decided.due_s <= decided.until_s <= turn_gaps.MAX_GAP_S
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
