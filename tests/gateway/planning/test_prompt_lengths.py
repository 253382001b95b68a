"""Waiting time of a prompt: short prompts overtake long ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.planning.plan_cost import Queue
from pillion.gateway.planning.planner import make_plan
from tests.support.planner_components import decode, is_shared, node, prefill, snapshot


def waits_s(prompts_s: float, prompts: int, tokens: int) -> float:
    """Return the wait of a prompt behind others, by lengths in tokens."""
    return Queue(prompts_s, prompts, 0.001, 0.01).own_wait_s(tokens)


def test_a_short_prompt_overtakes_a_queue_of_long_ones() -> None:
    assert waits_s(6.0, 3, 2000) == 6.0
    assert waits_s(6.0, 3, 100) == pytest.approx(3 * 0.1)
    assert waits_s(6.0, 3, 1) == 0.01, "the step under way ends first"
    assert waits_s(0.004, 1, 1) == 0.004, "which is shorter than that"
    assert waits_s(6.0, 60, 100) == 6.0
    assert waits_s(6.0, 0, 100) == 6.0
    assert Queue(6.0, 3, 0.001, 0.01, other_wait_s=2.0).own_wait_s(1) == 2.01
    # Splitting a prompt makes none of its parts more urgent.
    assert sum(waits_s(60.0, 3, part) for part in (250, 250, 500)) == pytest.approx(waits_s(60.0, 3, 1000))


SECONDS = st.floats(0.0, 100.0)


@given(
    prompts_s=SECONDS,
    prompts=st.integers(1, 50),
    tokens=st.integers(1, 5000),
    more_s=SECONDS,
    more=st.integers(0, 50),
    longer=st.integers(0, 5000),
)
def test_longer_queues_and_prompts_never_wait_less(
    prompts_s: float, prompts: int, tokens: int, more_s: float, more: int, longer: int
) -> None:
    least_s = waits_s(prompts_s, prompts, tokens)
    for extra_s, further, beyond in itertools.product((0.0, more_s), (0, more), (0, longer)):
        assert waits_s(prompts_s + extra_s, prompts + further, tokens + beyond) >= least_s * (1 - 1e-9)


def test_a_short_prompt_stays_where_it_overtakes_the_queue() -> None:
    """The prefill worker's step is long; waiting prompts cost the decode worker little."""
    busy = {"queued_tokens": 6000, "running_requests": 3}
    components = (node(0), prefill(**busy), decode(streams=2, **(busy | {"running_requests": 5})))
    assert not is_shared(make_plan(snapshot(100, components)))
    assert is_shared(make_plan(snapshot(2000, components)))
