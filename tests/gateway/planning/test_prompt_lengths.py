"""What gateways know of the lengths of prompts, and what it makes of prices: short prompts overtake long ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.planning.plan_cost import UNKNOWN_LENGTHS, Demand, Queue
from pillion.gateway.planning.planner import make_plan
from tests.support.planner_components import decode, is_shared, lengths_of, node, prefill, snapshot

MIXED = lengths_of(100.0, 100.0, 100.0, 100.0, 2000.0)


def test_followers_cost_what_goes_first() -> None:
    """A prompt that is longer than others on the average goes behind them, so that they lose less by it."""
    assert [MIXED.follower_share(tokens) for tokens in (100, 480, 960)] == [1.0, 1.0, 0.5]
    assert UNKNOWN_LENGTHS.follower_share(700) == 1.0


def test_a_worker_is_mostly_busy_with_long_prompts() -> None:
    assert MIXED.mean_tokens == pytest.approx(480)
    assert MIXED.typical_tokens == pytest.approx((4 * 100**2 + 2000**2) / 2400)
    assert UNKNOWN_LENGTHS.typical_tokens == 0.0


def test_each_kind_of_worker_has_its_own_lengths() -> None:
    demand = Demand()
    for second, long in enumerate([False, False, False, True] * 50):
        demand.note(second / 4, 1984 if long else 0, 16 if long else 100)
    assert demand.prefill_lengths.now().mean_tokens == pytest.approx(1984)
    assert demand.decode_lengths.now().mean_tokens == pytest.approx((3 * 100 + 16) / 4, rel=0.1)
    every, shared = demand.per_s(50.0)
    assert every == pytest.approx(4, rel=0.15)
    assert shared == pytest.approx(1, rel=0.15)
    # Those that come no more are forgotten.
    for second in range(400):
        demand.note(50 + second, 0, 700)
    assert demand.decode_lengths.now() == pytest.approx((700, 700))
    assert demand.prefill_lengths.now() == UNKNOWN_LENGTHS


def queue(prompts_s: float, prompts: int, typical: float = 2000.0) -> Queue:
    return Queue(prompts_s, prompts, 0.001, 0.01, typical)


def test_a_short_prompt_overtakes_a_queue_of_long_ones() -> None:
    assert queue(6.0, 3).own_wait_s(2000, 2000) == 6.0
    assert queue(6.0, 3).own_wait_s(100, 100) == pytest.approx(3 * 0.1 * 100 / 2000)
    assert queue(6.0, 3).own_wait_s(1, 1) == 0.01, "the step under way ends first"
    assert queue(0.004, 1).own_wait_s(1, 1) == 0.004, "which is shorter than that"
    # It does not overtake many that are as short, nor those of which it knows nothing.
    assert queue(6.0, 60, typical=100.0).own_wait_s(100, 100) == 6.0
    assert queue(6.0, 0).own_wait_s(100, 100) == 6.0
    # What it waits for beside prompts does not become less.
    assert queue(6.0, 3)._replace(held_s=2.0).own_wait_s(1, 1) == 2.01
    # To divide a prompt makes none of its parts more urgent.
    parts = [queue(60.0, 3).own_wait_s(part, 1000) for part in (250, 250, 500)]
    assert sum(parts) == pytest.approx(queue(60.0, 3).own_wait_s(1000, 1000))


def waits_s(prompts_s: float, prompts: int, tokens: int) -> float:
    """Returns how long a prompt of so many tokens waits behind some prompts."""
    return queue(prompts_s, prompts, typical=0.0).own_wait_s(tokens, tokens)


SECONDS = st.floats(0.0, 100.0)


@given(
    prompts_s=SECONDS,
    prompts=st.integers(1, 50),
    tokens=st.integers(1, 5000),
    more_s=SECONDS,
    more=st.integers(0, 50),
    longer=st.integers(0, 5000),
)
def test_neither_a_longer_queue_nor_a_longer_prompt_waits_less(
    prompts_s: float, prompts: int, tokens: int, more_s: float, more: int, longer: int
) -> None:
    least_s = waits_s(prompts_s, prompts, tokens)
    for extra_s, further, beyond in itertools.product((0.0, more_s), (0, more), (0, longer)):
        assert waits_s(prompts_s + extra_s, prompts + further, tokens + beyond) >= least_s * (1 - 1e-9)


def test_a_short_prompt_stays_where_it_overtakes_the_queue() -> None:
    """The prefill worker's step is long, and the decode worker's prompts wait for it without much harm."""
    busy = {"queued_tokens": 6000, "running_requests": 3}
    components = (node(0), prefill(**busy), decode(streams=2, **(busy | {"running_requests": 5})))
    lengths = {"decode_lengths": lengths_of(2000.0), "prefill_lengths": lengths_of(2000.0)}
    assert not is_shared(make_plan(snapshot(100, components, **lengths)))
    assert is_shared(make_plan(snapshot(2000, components, **lengths)))
