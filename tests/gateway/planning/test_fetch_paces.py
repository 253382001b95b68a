"""Fetch costs between nodes, learnt per pair, and their use by planners: the choice between fetching and recomputing a
prefix is within a tenth of the better one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.gateway.planning.plan_cost import FetchCost
from pillion.gateway.planning.route_planner import FetchPace, FetchPaces, RoutePlanner
from pillion.gateway.planning.split_decision import Fetched
from tests.support.examples import examples
from tests.support.planner_components import BLOCK, decode, node, snapshot

# Round trips per fetch, and the size of a block.
ROUND_TRIPS, BLOCK_BYTES = 3, 256 * 1024
SIZES = (4, 40, 8, 64, 16, 100, 30)


def link(round_trip_s: float, bits_per_s: float) -> FetchCost:
    """Return the true cost of fetches over a link."""
    return FetchCost(ROUND_TRIPS * round_trip_s, BLOCK_BYTES * 8 / bits_per_s)


LINKS = {
    "20 ms, 100 Mbit": link(0.02, 1e8),
    "0.2 ms, a gigabit": link(0.0002, 1e9),
    "20 ms, 10 gigabit": link(0.02, 1e10),
    "0.2 ms, 25 gigabit": link(0.0002, 2.5e10),
}


@pytest.mark.parametrize("truth", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("blocks", [1, 6, 20, 60, 120])
def test_the_choice_between_fetching_and_computing_is_near_optimal(truth: FetchCost, blocks: int) -> None:
    planner = RoutePlanner()
    for now, size in enumerate(SIZES):
        planner.fetch_paces.observe("kv-1", "kv-0", size, truth.seconds(size), now)
    seen = snapshot(2000, (node(0), node(1), decode(0)), hits={"kv-1": blocks})
    decided = planner.plan(seen, len(SIZES))
    side = decided.split_decision.route.decode
    computed_s, fetched_s = side.model.range_s(0, blocks * BLOCK, side.max_step_tokens), truth.seconds(blocks)
    taken_s = computed_s if decided.split_decision.route.fetched is Fetched.NOTHING else fetched_s
    assert taken_s <= 1.1 * min(computed_s, fetched_s)


def test_the_links_above_call_for_both_choices() -> None:
    """A planner that always fetches would pass the property above if all links were fast."""
    made = set()
    for truth in LINKS.values():
        planner = RoutePlanner()
        for now, size in enumerate(SIZES):
            planner.fetch_paces.observe("kv-1", "kv-0", size, truth.seconds(size), now)
        decided = planner.plan(snapshot(2000, (node(0), node(1), decode(0)), hits={"kv-1": 60}), len(SIZES))
        made.add(decided.split_decision.route.fetched)
    assert made == {Fetched.NOTHING, Fetched.OF_NODES}


def test_each_pair_of_nodes_has_its_own_pace() -> None:
    """Of two nodes with the prefix, first ask the one with the faster link, and the other one, which has more, for no
    more than that."""
    planner, parts = RoutePlanner(), (node(0), node(1), node(2), decode(0))
    for size in SIZES:
        planner.fetch_paces.observe("kv-1", "kv-0", size, LINKS["20 ms, 100 Mbit"].seconds(size) * 10, 1.0)
        planner.fetch_paces.observe("kv-2", "kv-0", size, LINKS["0.2 ms, 25 gigabit"].seconds(size), 1.0)
    decided = planner.plan(snapshot(2000, parts, hits={"kv-1": 60, "kv-2": 50}), 1.0)
    assert [(one.node_id, one.blocks) for one in decided.sources] == [("kv-2", 50), ("kv-1", 50)]
    assert decided.cached_tokens == 50 * BLOCK
    assert "with blocks of kv-2, blocks of kv-1 cost more to fetch" in decided.reason
    alone = planner.plan(snapshot(2000, parts, hits={"kv-1": 60}), 1.0)
    assert (alone.sources, alone.cached_tokens) == ((), 0)
    # A bucket is asked for the blocks behind the slow link.
    facts = {"hits": {"kv-1": 60}, "bucket_hits": {"kv-0": 100}, "bucket_block_s": 1e-4}
    planner.bucket_pace.observe(100, 0.01, 1.0)
    far = planner.plan(snapshot(2000, parts, **facts), 1.0)
    assert [(one.node_id, one.blocks) for one in far.sources] == [("kv-0", 100)]


@given(
    call_s=st.floats(0.0, 0.5),
    block_s=st.floats(1e-5, 0.1),
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=20),
    lost_s=st.lists(st.floats(0.01, 5.0), max_size=3),
)
@settings(max_examples=examples(200))
def test_fetch_costs_are_fitted_to_observed_fetches(
    call_s: float, block_s: float, sizes: list[int], lost_s: list[float]
) -> None:
    """Interpolate between observed fetches; failed fetches make none cheaper."""
    truth, pace = FetchCost(call_s, block_s), FetchPace()
    for size in sizes:
        pace.observe(size, truth.seconds(size), 0.0)
    found = pace.cost(0.0)
    assert found.call_s >= 0
    assert found.block_s >= 0
    # A line through the mean, between the true one and the proportional one.
    rate = max(truth.seconds(size) / size for size in sizes)
    assert block_s * 0.999 <= found.block_s <= rate * 1.001
    assert found.call_s <= call_s * 1.001 + 1e-9
    for lost in lost_s:
        before = pace.cost(0.0)
        pace.observe(0, lost, 0.0)
        after = pace.cost(0.0)
        assert after.seconds(max(sizes)) >= before.seconds(max(sizes)) * 0.999
    later = pace.cost(FetchPace.HALVING_S)
    assert later.seconds(10) == pytest.approx(pace.cost(0.0).seconds(10) / 2)


def test_the_number_of_measured_node_pairs_is_bounded() -> None:
    paces = FetchPaces()
    for number in range(FetchPaces.MAX_PAIRS + 1):
        paces.observe(f"kv-{number}", "kv", 1, 1.0, 0.0)
        paces.observe("kv-0", "kv", 1, 1.0, 0.0)
    assert paces.cost("kv-1", "kv", 0.0) is None, "it was measured longest ago"
    assert paces.cost("kv-0", "kv", 0.0) is not None
    assert paces.cost("kv", "kv-0", 0.0) is None
