"""The auto policy as a pure function: choices, reasons, and limits of the influence of load and hits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.plan_cost import DEFAULT_MODEL, MIN_FETCH_S, Models
from pillion.gateway.planning.planner import make_plan, plan_fetch, replan, shorten
from pillion.gateway.planning.route_planner import FetchPace
from pillion.gateway.planning.split_decision import Fetched
from pillion.wire.registry import ComponentRecord
from tests.support.examples import examples
from tests.support.planner_components import COST, decode, is_shared, line, node, prefill, snapshot


@pytest.mark.parametrize(
    ("prompt", "components", "expected"),
    [
        # Idle: a short prompt saves the call, a long one avoids the decode worker's smaller steps.
        (40, line(), False),
        (2000, line(), True),
        # Beside many streams a step has little room for a prompt tail.
        (2000, line(decode=decode(streams=30)), True),
        (300, line(decode=decode(streams=30)), True),
        # Busy prefill workers: the decode worker's free capacity is used first.
        (300, line(prefill=prefill(queued_tokens=20_000)), False),
        (2000, line(prefill=prefill(queued_tokens=200_000)), False),
        (300, line(decode=decode(queued_tokens=20_000)), True),
        # The target is missed already: prompt tails there do not grow.
        (2000, line(decode=decode(streams=60), prefill=prefill(queued_tokens=3000)), True),
        # Without a target, a step of the whole budget would stall twenty streams.
        (2000, line(decode=decode(streams=20, target_itl_ms=0.0)), True),
        (2000, (node(0), decode()), False),
    ],
)
def test_the_worker_that_computes_the_prompt(
    prompt: int, components: tuple[ComponentRecord, ...], expected: bool
) -> None:
    decided = make_plan(snapshot(prompt, components))
    assert is_shared(decided) == expected
    assert decided.reason.startswith("auto: ")
    assert decided.decode.component_id in decided.reason
    if expected:
        assert "prefill-0 computes" in decided.reason
    else:
        assert "co-located" in decided.reason


def test_the_reason_names_the_compared_costs() -> None:
    decided = make_plan(snapshot(hits={"kv-0": 10}))
    split = decided.split_tokens
    assert decided.reason.startswith(f"auto: prefill-0 computes {split - 160}: ")
    assert " s alone, " in decided.reason
    assert decided.reason.endswith("with prefill-0; decode-0 is the only one; prefix of 160 tokens")
    assert make_plan(snapshot(components=(node(0), decode()))).reason == (
        "auto: co-located, no prefill worker; decode-0 is the only one; no prefix"
    )
    blind = make_plan(snapshot(index_available=False))
    assert blind.reason.endswith("; decode-0 is the only one, the index is away; no prefix")
    assert make_plan(snapshot(15)).reason == "auto: nothing to share out; decode-0 is the only one; no prefix"
    assert shorten(decided, split - 16).reason == decided.reason + ": the prefill range ended 16 tokens early"


def test_the_tickets_blocks_change_the_split() -> None:
    hinted = make_plan(snapshot(hits={"kv-0": 100}))
    assert (hinted.cached_tokens, hinted.split_tokens >= 1600) == (1600, True)
    less = replan(hinted, 10)
    assert (less.cached_tokens, is_shared(less)) == (160, True)
    assert less.reason.endswith("prefix of 160 tokens (1600 expected)")
    whole = replan(hinted, 124)
    assert (whole.cached_tokens, whole.split_tokens, whole.chunks) == (1984, 1984, ())


def test_a_hit_is_worth_what_it_saves() -> None:
    components = (node(0), node(1), decode(0, 0), decode(1, 1))
    hits = {"kv-0": 60}
    assert make_plan(snapshot(1000, components, hits=hits, fetch_block_s=1.0)).node_id == "kv-0"
    # The hot node's queue is so long that the other one finishes sooner, even recomputing everything.
    hot = (node(0), node(1), decode(0, 0, queued_tokens=5000), decode(1, 1))
    decided = make_plan(snapshot(1000, hot, hits=hits, fetch_block_s=1.0))
    assert (decided.node_id, decided.cached_tokens, decided.sources) == ("kv-1", 0, ())
    assert "decode-1 is soonest of 2, decode-0 has more of the prefix and is busier" in decided.reason
    assert "blocks of kv-0 cost more to fetch" in decided.reason
    fetched = make_plan(snapshot(1000, hot, hits=hits, fetch_block_s=1e-4))
    assert (fetched.node_id, fetched.cached_tokens) == ("kv-1", 960)
    assert [source.node_id for source in fetched.sources] == ["kv-0"]
    assert "with blocks of kv-0" in fetched.reason


def test_a_popular_prefix_does_not_overload_its_node() -> None:
    """All requests share a long prefix on one node, and still use all four nodes."""
    components = tuple(component for n in range(4) for component in (node(n), decode(n, n)))
    streams: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for number in range(80):
        decided = make_plan(
            snapshot(600, components, hits={"kv-0": 36}, sent_load=streams, sent_tokens=tokens, spread=number)
        )
        streams[decided.decode.component_id] += 1
        tokens[decided.decode.component_id] += decided.prompt_tokens - decided.split_tokens
    assert len(streams) == 4
    assert max(streams.values()) < 3 * min(streams.values())


def test_equal_workers_get_equal_shares_of_requests() -> None:
    components = (node(0), *(decode(n) for n in range(3)), *(prefill(n) for n in range(3)))
    for prompt in (40, 2000):
        plans = [make_plan(snapshot(prompt, components, spread=n)) for n in range(30)]
        assert set(Counter(decided.decode.component_id for decided in plans).values()) == {10}
        assert set(Counter(d.prefill and d.prefill.component_id for d in plans).values()) == {10}


def test_a_remote_prefill_worker_is_charged_for_its_transfers() -> None:
    components = (node(0), node(1), decode(0, 0, streams=30), prefill(0, 0), prefill(1, 1))
    near = make_plan(snapshot(components=components))
    assert near.prefill is not None
    assert near.prefill.component_id == "prefill-0"
    busy = tuple(replace(p, queued_tokens=9000) if p.component_id == "prefill-0" else p for p in components)
    far = make_plan(snapshot(components=busy, fetch_block_s=1e-4))
    assert far.prefill is not None
    assert (far.prefill.component_id, far.remote) == ("prefill-1", True)
    slow = make_plan(snapshot(components=busy, fetch_block_s=1.0))
    assert slow.prefill is not None
    assert slow.prefill.component_id == "prefill-0"


def test_parts_that_failed_are_avoided() -> None:
    components = (node(0), node(1), decode(0, 0), decode(1, 1, streams=60), prefill(0, 0), prefill(1, 1))
    assert make_plan(snapshot(components=components, avoid=frozenset({"decode-0"}))).decode.component_id == "decode-1"
    assert make_plan(snapshot(components=components, avoid=frozenset({"kv-0"}), hits={"kv-0": 90})).node_id == "kv-1"
    lost = make_plan(snapshot(avoid=frozenset({"decode-0", "prefill-0", "kv-0"})))
    assert (lost.decode.component_id, lost.prefill) == ("decode-0", None)


def test_sent_work_counts_at_once_and_old_reports_fade() -> None:
    assert is_shared(make_plan(snapshot()))
    assert not is_shared(make_plan(snapshot(sent_tokens={"prefill-0": 50_000})))
    assert not is_shared(make_plan(snapshot(components=line(prefill=prefill(queued_tokens=20_000)))))
    # 1,600 tokens take some 2 s, and the report is 2 s old. Longer silence does not show that work is done.
    few, beside = prefill(queued_tokens=1600), decode(streams=4)
    assert not is_shared(make_plan(snapshot(600, line(decode=beside, prefill=few))))
    assert is_shared(make_plan(snapshot(600, line(decode=beside, prefill=replace(few, heartbeat_age_ms=2000)))))
    assert not is_shared(
        make_plan(snapshot(components=line(prefill=prefill(queued_tokens=20_000, heartbeat_age_ms=30_000))))
    )


def test_unmeasured_workers_are_treated_like_others() -> None:
    fresh = {"step_cost_s": (), "largest_step_tokens": 0}
    models = Models([decode(0, **fresh)], [prefill(0)])
    assert models.of(decode(0, **fresh)) == StepModel._make(COST)
    assert Models([decode(0, **fresh)], []).of(decode(0, **fresh)) == DEFAULT_MODEL
    # A decode worker without chunks has less data per token than a prefill worker.
    cheap = decode(0, step_cost_s=(2e-3, 1e-5, 1e-5, 1e-7, 1e-9), largest_step_tokens=30)
    assert Models([cheap], [prefill(0)]).of(cheap) == (2e-3, COST[1], 1e-5, 1e-7, COST[4])
    assert Models([cheap], [prefill(0)]).of(replace(cheap, largest_step_tokens=200)).token_s == 1e-5


def test_chunks_pay_for_attention_to_earlier_tokens() -> None:
    model = StepModel(0.0, 0.0, 0.0, 1.0, 0.0)
    assert model.range_s(0, 1024, 1024) == pytest.approx(1024)
    assert model.range_s(0, 1024, 256) == pytest.approx(256 + 512 + 768 + 1024)
    assert model.range_s(100, 1124, 512) == pytest.approx(612 + 1124)
    pairs = StepModel(0.0, 0.0, 0.0, 0.0, 1.0)
    assert pairs.range_s(0, 3, 1) == pairs.range_s(0, 3, 3) == 1 + 2 + 3


def test_the_fetch_rate_follows_recent_fetches() -> None:
    pace = FetchPace()
    pace.observe(0, 0.0, now=1.0)
    assert pace.block_s(1.0) == 0.0
    pace.observe(10, 0.1, now=2.0)
    assert pace.block_s(2.0) == pytest.approx(0.01)
    for now in range(3, 63):
        pace.observe(10, 1.0, now)
    assert pace.block_s(62.0) == pytest.approx(0.1, rel=0.01)
    silent = FetchPace()
    silent.observe(0, 0.5, now=1.0)
    assert silent.block_s(1.0) == 0.5
    # A source that times out gets worse, and one without new observations recovers.
    pace.observe(0, 10.0, now=63.0)
    slow_s = pace.block_s(63.0)
    assert slow_s > 0.15
    assert pace.block_s(63.0 + FetchPace.HALVING_S) == pytest.approx(slow_s / 2)


def test_fetch_sources_are_chosen_by_pace() -> None:
    """A bucket has 60 blocks, another node 30: each is used while it saves time, and no fetch may exceed the time to
    compute."""
    components = (node(0), node(1), decode(0, 0))
    facts = {"hits": {"kv-1": 30}, "bucket_hits": {"kv-0": 60}}
    cases = {
        (1e-4, 1e-4): (Fetched.OF_BUCKET, 60, ["kv-0", "kv-1"], "with blocks of a bucket"),
        (1e-4, 1.0): (Fetched.OF_NODES, 30, ["kv-1"], "blocks of a bucket cost more to fetch"),
        (1.0, 1.0): (Fetched.NOTHING, 0, [], "blocks of kv-1 cost more to fetch"),
    }
    for (fetch_block_s, bucket_block_s), (fetched, blocks, sources, words) in cases.items():
        decided = make_plan(
            snapshot(1000, components, fetch_block_s=fetch_block_s, bucket_block_s=bucket_block_s, **facts)
        )
        assert decided.split_decision is not None
        assert (decided.split_decision.route.fetched, decided.cached_tokens) == (fetched, blocks * 16)
        assert sorted(source.node_id for source in decided.sources) == sources
        assert words in decided.reason
        wanted = plan_fetch(decided.sources, "kv-0", 0, decided.limit_blocks, decided.split_decision)
        assert (wanted.blocks if wanted else 0) == blocks
        if wanted is not None:
            side = decided.split_decision.route.decode
            assert wanted.limit_s == side.model.range_s(0, blocks * 16, side.max_step_tokens) > MIN_FETCH_S
    assert decided.split_decision.fetch_limit_s(0, 1) == MIN_FETCH_S


LOADS = st.integers(0, 40_000)
COSTS = st.one_of(
    st.just(()),
    st.tuples(*(st.floats(low, high) for low, high in ((1e-4, 1e-1), (1e-6, 1e-2), (0, 1e-2), (0, 1e-5), (0, 1e-5)))),
)
parts_strategy = st.lists(
    st.one_of(
        st.integers(0, 2).map(node),
        st.builds(prefill, st.integers(0, 3), st.integers(0, 2), queued_tokens=LOADS, step_cost_s=COSTS),
        st.builds(
            decode,
            st.integers(0, 3),
            st.integers(0, 2),
            st.integers(0, 64),
            queued_tokens=LOADS,
            step_cost_s=COSTS,
            largest_step_tokens=st.sampled_from([0, 30, 256]),
            target_itl_ms=st.sampled_from([0.0, 20.0, 200.0]),
            target_itl_steps=st.sampled_from([0.0, 2.5]),
            free_seqs=st.integers(0, 64),
        ),
    ),
    max_size=9,
    unique_by=lambda component: component.component_id,
)


@given(
    prompt=st.integers(1, 5000),
    block_size=st.sampled_from([1, 16, 64]),
    chunk=st.integers(1, 700),
    hits=st.dictionaries(st.sampled_from(["kv-0", "kv-1", "kv-2", "kv-9"]), st.integers(0, 400)),
    pinned=st.integers(0, 400),
    components=parts_strategy,
    avoid=st.sets(st.sampled_from(["decode-0", "decode-1", "prefill-0", "kv-0"])),
    fetch_block_s=st.sampled_from([0.0, 1e-4, 1.0]),
    spread=st.integers(0, 99),
)
@settings(max_examples=examples(300))
def test_properties(prompt, block_size, chunk, hits, pinned, components, avoid, fetch_block_s, spread) -> None:
    nodes = {component.node_id for component in components if component.role == "kvnode"}
    seated = [component for component in components if component.role == "decode" and component.node_id in nodes]
    if not seated:
        return
    decided = make_plan(
        snapshot(
            prompt,
            (*components,),
            block_size=block_size,
            chunk_tokens=chunk,
            hits=hits,
            avoid=frozenset(avoid),
            fetch_block_s=fetch_block_s,
            spread=spread,
        )
    )
    assert decided.decode in seated
    if any(component.component_id not in avoid and component.node_id not in avoid for component in seated):
        assert decided.decode.component_id not in avoid
        assert decided.node_id not in avoid
    if decided.prefill is not None:
        assert decided.prefill in components
        assert decided.prefill.component_id not in avoid
        assert decided.prefill.node_id in nodes
    assert {source.node_id for source in decided.sources} <= nodes
    limit = (prompt - 1) // block_size * block_size
    for one in (decided, replan(decided, pinned)):
        assert 0 <= one.cached_tokens <= one.split_tokens <= limit < prompt
        assert one.split_tokens % block_size == one.cached_tokens % block_size == 0
        assert sum(one.chunks) == one.split_tokens - one.cached_tokens
        assert all(0 < size <= max(chunk, block_size) and size % block_size == 0 for size in one.chunks)
        assert (one.prefill is not None) >= bool(one.chunks)
        assert one.reason.startswith("auto: ")
    assert replan(decided, pinned).cached_tokens == min(pinned * block_size, limit)
    known = max((blocks for name, blocks in hits.items() if name in nodes), default=0)
    assert decided.cached_tokens <= known * block_size


@given(
    prompt=st.integers(17, 5000),
    cost=COSTS.filter(bool),
    queue=LOADS,
    more=st.integers(0, 40_000),
    streams=st.integers(0, 40),
    further=st.integers(0, 20),
    waiting=st.integers(0, 20_000),
    target=st.sampled_from([(0.0, 0.0), (30.0, 0.0), (200.0, 0.0), (0.0, 2.5)]),
    hit=st.integers(0, 100),
)
@settings(max_examples=examples(300))
def test_the_split_is_monotone_in_load(prompt, cost, queue, more, streams, further, waiting, target, hit) -> None:
    """More prefill load never moves the split right, more decode load never left."""
    targets = dict(zip(("target_itl_ms", "target_itl_steps"), target, strict=True))

    def split(prefill_tokens: int, decode_streams: int, decode_tokens: int) -> int:
        components = (
            node(0),
            *(prefill(n, queued_tokens=prefill_tokens, step_cost_s=cost) for n in range(2)),
            decode(0, 0, decode_streams, queued_tokens=decode_tokens, step_cost_s=cost, **targets),
        )
        return make_plan(snapshot(prompt, components, hits={"kv-0": hit})).split_tokens

    before = split(queue, streams, waiting)
    assert split(queue + more, streams, waiting) <= before
    assert split(queue, streams, waiting + more) >= before
    if not target[1]:
        # If their prompt part bounds steps, streams barely lengthen a long tail, and a short one by a step.
        assert split(queue, streams + further, waiting) >= before


LENDING: dict[str, Any] = {"core_lending_table": "table-1", "core_share": 0.5}
UNMEASURED: dict[str, Any] = {"step_cost_s": (), "largest_step_tokens": 0}


@pytest.mark.parametrize(
    ("known", "lends", "sent", "prompt", "is_tried"),
    [
        # A multi-stage worker publishes no lending table, beside a decode worker that borrows its cores.
        (UNMEASURED, False, 0, 2000, True),
        (UNMEASURED, True, 0, 2000, True),
        ({}, True, 0, 2000, False),
        ({"step_cost_s": ()}, True, 0, 2000, False),
        (UNMEASURED, True, 512, 2000, False),
        # Its calls would take longer than the whole prompt.
        (UNMEASURED | {"block_bytes": 2**40}, True, 0, 64, False),
        # Workers that lend each other all cores are equally fast.
        (UNMEASURED | LENDING, True, 0, 2000, False),
    ],
)
def test_a_prefill_worker_that_was_never_measured_is_tried_once(
    known: dict[str, Any], lends: bool, sent: int, prompt: int, is_tried: bool
) -> None:
    """Until then a lone prompt is never cheaper there, since it is priced as the decode worker."""
    far = 1 if "block_bytes" in known else 0
    own = {"max_step_tokens": 512} | (LENDING if lends else {})
    components = (node(0), node(1), prefill(at=far, **known), decode(**own))
    plan = make_plan(snapshot(prompt, components, sent_tokens={"prefill-0": sent}, fetch_block_s=1.0))
    assert is_shared(plan) is is_tried
    assert ("to learn its pace" in plan.reason) is is_tried
