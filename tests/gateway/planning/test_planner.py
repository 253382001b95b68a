"""The planner as a pure function: tables and properties."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import ConfigError, Unavailable
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, parse_policy
from pillion.gateway.planning.planner import (
    MAX_FETCH_SOURCES,
    PrefixSource,
    RequestPlan,
    make_plan,
    plan_fetch,
    replan,
    shorten,
)
from pillion.wire.registry import ComponentRecord
from tests.support.examples import examples


def node(n: int) -> ComponentRecord:
    return ComponentRecord(component_id=f"kv-{n}", role="kvnode", address="x", node_id=f"kv-{n}")


def prefill(n: int, at: int = 0, tokens: int = 0) -> ComponentRecord:
    return ComponentRecord(
        component_id=f"prefill-{n}", role="prefill", address="x", node_id=f"kv-{at}", queued_tokens=tokens
    )


def decode(n: int, at: int = 0, running: int = 0) -> ComponentRecord:
    streams = {
        "running_requests": running,
        "decoding_requests": running,
        "context_tokens": 100 * running,
        "free_seqs": 64,
        "block_bytes": 2**20,
    }
    return ComponentRecord(component_id=f"decode-{n}", role="decode", address="x", node_id=f"kv-{at}", **streams)


LINE = (node(0), prefill(0), decode(0))


def snapshot(prompt: int = 100, policy: str = "disaggregated", components=LINE, **more) -> ClusterSnapshot:
    fields = {"hits": {}, "block_size": 16, "chunk_tokens": 32, "model": "toy"} | more
    return ClusterSnapshot(prompt_tokens=prompt, policy=parse_policy(policy), components=components, **fields)


def shape(decided: RequestPlan) -> tuple[int, int, tuple[int, ...]]:
    return decided.cached_tokens, decided.split_tokens, decided.chunks


@pytest.mark.parametrize(
    ("prompt", "policy", "hit", "expected"),
    [
        (100, "disaggregated", 0, (0, 96, (32, 32, 32))),
        (96, "disaggregated", 0, (0, 80, (32, 32, 16))),
        (97, "disaggregated", 0, (0, 96, (32, 32, 32))),
        (100, "disaggregated", 3, (48, 96, (32, 16))),
        (100, "disaggregated", 99, (96, 96, ())),
        (96, "disaggregated", 6, (80, 80, ())),
        (16, "disaggregated", 1, (0, 0, ())),
        (1, "disaggregated", 0, (0, 0, ())),
        (100, "colocated", 2, (32, 32, ())),
        (100, "fraction:0.5", 0, (0, 48, (32, 16))),
        (100, "fraction:1/3", 3, (48, 64, (16,))),
        (100, "fraction:0", 0, (0, 0, ())),
        (100, "fraction:1.0", 0, (0, 96, (32, 32, 32))),
    ],
)
def test_the_policy_and_the_prefix_hit_set_the_split(
    prompt: int, policy: str, hit: int, expected: tuple[int, int, tuple[int, ...]]
) -> None:
    assert shape(make_plan(snapshot(prompt, policy, hits={"kv-0": hit}))) == expected


@pytest.mark.parametrize(
    ("answered", "hit", "expected"),
    [
        # The prompt's six whole blocks are cached, and at most a chunk of the answer is missing: computed by the decode
        # worker.
        (36, 6, (96, 96, ())),
        (36, 7, (112, 112, ())),
        (68, 8, (128, 128, ())),
        # If more than a chunk or part of the prompt is missing, a prefill range as usual.
        (68, 7, (112, 160, (32, 16))),
        (36, 5, (80, 128, (32, 16))),
        (36, 0, (0, 128, (32,) * 4)),
    ],
)
def test_the_decode_worker_recomputes_the_end_of_a_replayed_answer(
    answered: int, hit: int, expected: tuple[int, int, tuple[int, ...]]
) -> None:
    decided = make_plan(snapshot(100 + answered, hits={"kv-0": hit}, answered_tokens=answered))
    assert shape(decided) == expected


@pytest.mark.parametrize(
    "text", ["", "automatic", "fraction", "fraction:", "fraction:1.1", "fraction:-0.1", "fraction:nan", "fraction:1/0"]
)
def test_unknown_split_policies_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="split-policy"):
        parse_policy(text)


def test_the_tickets_blocks_move_the_split() -> None:
    half = make_plan(snapshot(policy="fraction:0.5"))
    assert shape(half) == (0, 48, (32, 16))
    assert shape(replan(half, 5)) == (80, 80, ())
    hinted = make_plan(snapshot(hits={"kv-0": 5}))
    assert shape(replan(hinted, 0)) == (0, 96, (32, 32, 32))
    alone = make_plan(snapshot(policy="colocated", hits={"kv-0": 5}))
    assert shape(replan(alone, 2)) == (32, 32, ())


def test_no_prefill_worker_means_co_located() -> None:
    for components in ((node(0), decode(0)), (node(0), decode(0), prefill(0, at=1))):
        decided = make_plan(snapshot(components=components))
        assert (decided.prefill, decided.remote, shape(decided)) == (None, False, (0, 0, ()))
        assert decided.reason == "disaggregated: co-located, no prefill worker; decode-0 is the only one; no prefix"


def test_a_remote_prefill_worker_is_used_if_the_own_node_has_none() -> None:
    nodes = (node(0), node(1), node(2), decode(0))
    far = (prefill(1, 1, tokens=500), prefill(2, 2, tokens=100))
    decided = make_plan(snapshot(components=(*nodes, *far)))
    assert decided.prefill is not None
    assert (decided.prefill.component_id, decided.remote, decided.node_id) == ("prefill-2", True, "kv-0")
    assert shape(decided) == (0, 96, (32, 32, 32))
    assert decided.reason == "disaggregated: prefill-2 computes 96; decode-0 is the only one; no prefix"
    # The own node's unless its queue is longer than another node's; never a node that failed the request.
    for tokens, name in ((100, "prefill-0"), (9000, "prefill-2")):
        near = make_plan(snapshot(components=(*nodes, *far, prefill(0, tokens=tokens))))
        assert near.prefill is not None
        assert (near.prefill.component_id, near.remote) == (name, name != "prefill-0")
    other = make_plan(snapshot(components=(*nodes, *far), avoid=frozenset({"kv-2"})))
    assert other.prefill is not None
    assert other.prefill.component_id == "prefill-1"


def test_fetch_sources_are_live_nodes_with_the_longest_prefix_first() -> None:
    components = (*(node(n) for n in range(8)), decode(0))
    hits = {"kv-0": 1, "kv-1": 5, "kv-2": 0, "kv-3": 6, "kv-9": 6, "kv-4": 4, "kv-5": 3, "kv-6": 2}
    decided = make_plan(snapshot(components=components, hits=hits, avoid=frozenset({"kv-1"})))
    assert [(one.node_id, one.blocks) for one in decided.sources] == [
        ("kv-3", 6), ("kv-4", 4), ("kv-5", 3), ("kv-6", 2), ("kv-0", 1),
    ]  # fmt: skip
    equals = {f"kv-{n}": 3 for n in range(1, 8)}
    first = Counter(
        make_plan(snapshot(components=components, hits=equals, spread=n)).sources[0].node_id for n in range(70)
    )
    assert set(first.values()) == {10}


@pytest.mark.parametrize(
    ("hits", "here", "limit", "expected"),
    [
        ({}, 0, 9, None),
        ({"kv-0": 3}, 3, 9, None),
        ({"kv-1": 3}, 3, 9, None),
        ({"kv-0": 5}, 3, 9, (5, ())),
        ({"kv-1": 5}, 3, 9, (5, ("kv-1",))),
        ({"kv-1": 5, "kv-2": 3, "kv-3": 4}, 3, 9, (5, ("kv-1", "kv-3"))),
        ({"kv-0": 5, "kv-1": 4}, 3, 9, (5, ("kv-1",))),
        ({"kv-1": 12}, 3, 9, (9, ("kv-1",))),
        ({"kv-1": 12}, 9, 9, None),
    ],
)
def test_a_fetch_is_planned_only_if_a_source_has_more_blocks(
    hits, here: int, limit: int, expected: tuple[int, tuple[str, ...]] | None
) -> None:
    sources = [PrefixSource(name, blocks) for name, blocks in hits.items()]
    wanted = plan_fetch(sources, "kv-0", here, limit)
    assert (wanted and (wanted.blocks, wanted.source_node_ids)) == expected


def test_a_prefill_range_that_ended_early_is_a_longer_prompt_tail() -> None:
    whole = make_plan(snapshot(hits={"kv-0": 1}))
    assert shape(whole) == (16, 96, (32, 32, 16))
    assert shape(shorten(whole, 64)) == (16, 64, (32, 16))
    assert shape(shorten(whole, 63)) == (16, 48, (32,))
    assert shape(shorten(whole, 0)) == (16, 16, ())
    assert shorten(whole, 200) == whole
    assert shorten(whole, 64).reason == f"{whole.reason}: the prefill range ended 32 tokens early"


@pytest.mark.parametrize(
    ("components", "missing"),
    [
        ((), "no decode worker of model 'toy' lives"),
        ((node(0), prefill(0)), "no decode worker of model 'toy' lives"),
        ((prefill(0), decode(0)), "no KV node lives for the decode workers of model 'toy': kv-0 is missing"),
        ((node(1), decode(0)), "kv-0 is missing"),
    ],
)
def test_missing_components_are_named(components: tuple[ComponentRecord, ...], missing: str) -> None:
    with pytest.raises(Unavailable, match=missing):
        make_plan(snapshot(components=components))


@pytest.mark.parametrize("policy", ["auto", "colocated", "fraction:0.5", "disaggregated"])
def test_hits_and_load_choose_the_workers_by_every_policy(policy: str) -> None:
    components = (node(0), node(1), decode(0), decode(1, 1, running=9), decode(2, 1), prefill(0),
             prefill(1, 1, tokens=500), prefill(2, 1))  # fmt: skip
    decided = make_plan(snapshot(1000, policy, components, hits={"kv-1": 30}))
    assert (decided.node_id, decided.decode.component_id) == ("kv-1", "decode-2")
    assert decided.prefill is not None
    assert decided.prefill.component_id == "prefill-2"
    busier = tuple(one for one in components if one.component_id != "decode-2")
    least = make_plan(snapshot(1000, policy, busier, hits={"kv-1": 1}))
    assert (least.node_id, least.decode.component_id) == ("kv-0", "decode-0")


def test_what_this_gateway_sent_since_the_heartbeat_counts() -> None:
    components = (node(0), decode(0), decode(1, running=2), prefill(0), prefill(1, tokens=50))
    sent = {"sent_load": {"decode-0": 3}, "sent_tokens": {"prefill-0": 51}}
    decided = make_plan(snapshot(components=components, **sent))
    assert decided.prefill is not None
    assert (decided.decode.component_id, decided.prefill.component_id) == ("decode-1", "prefill-1")


def test_parts_that_failed_are_avoided() -> None:
    components = (node(0), node(1), decode(0), decode(1, 1), prefill(0), prefill(1))
    assert (
        make_plan(snapshot(components=components, avoid=frozenset({"decode-0"}), hits={"kv-0": 5})).decode.component_id
        == "decode-1"
    )
    assert make_plan(snapshot(components=components, avoid=frozenset({"kv-0"}), hits={"kv-0": 5})).node_id == "kv-1"
    # The only decode worker is reused; the only prefill worker is not, since decode workers can prefill.
    decided = make_plan(snapshot(avoid=frozenset({"decode-0", "prefill-0", "kv-0"})))
    assert (decided.decode.component_id, decided.prefill) == ("decode-0", None)


def test_ties_are_spread_evenly() -> None:
    components = (node(0), *(decode(n) for n in range(3)), *(prefill(n) for n in range(3)))
    chosen = Counter(make_plan(snapshot(components=components, spread=n)).decode.component_id for n in range(30))
    assert set(chosen.values()) == {10}


parts_strategy = st.lists(
    st.one_of(
        st.integers(0, 2).map(node),
        st.builds(prefill, st.integers(0, 3), st.integers(0, 2), st.integers(0, 500)),
        st.builds(decode, st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)),
    ),
    max_size=8,
    unique_by=lambda component: component.component_id,
)


@given(
    prompt=st.integers(1, 5000),
    block_size=st.sampled_from([1, 8, 16, 64]),
    chunk=st.integers(1, 700),
    share=st.fractions(0, 1),
    hits=st.dictionaries(st.sampled_from(["kv-0", "kv-1", "kv-2"]), st.integers(0, 400)),
    pinned=st.integers(0, 400),
    components=parts_strategy,
    avoid=st.sets(st.sampled_from(["decode-0", "decode-1", "prefill-0", "kv-0"])),
    spread=st.integers(0, 99),
)
@settings(max_examples=examples(500))
def test_properties(prompt, block_size, chunk, share, hits, pinned, components, avoid, spread) -> None:
    asked = snapshot(prompt, f"fraction:{share}", tuple(components), hits=hits, block_size=block_size,
    chunk_tokens=chunk,
                    avoid=frozenset(avoid), spread=spread)  # fmt: skip
    nodes = {component.node_id for component in components if component.role == "kvnode"}
    try:
        decided = make_plan(asked)
    except Unavailable:
        assert not any(component.role == "decode" and component.node_id in nodes for component in components)
        return
    expected = decided.split_decision.route.cached_blocks
    for one, cached in ((decided, expected), (replan(decided, pinned), pinned)):
        assert one.cached_tokens == min(cached, (prompt - 1) // block_size) * block_size
        assert one.cached_tokens <= one.split_tokens <= (prompt - 1) // block_size * block_size < prompt
        assert one.split_tokens % block_size == 0
        assert sum(one.chunks) == one.split_tokens - one.cached_tokens
        assert all(size > 0 and size % block_size == 0 for size in one.chunks)
        assert all(size <= max(chunk, block_size) for size in one.chunks)
        assert one.total_blocks * block_size >= prompt + 1 > (one.total_blocks - 1) * block_size
        assert one.decode in components
        assert one.node_id == one.decode.node_id
        assert one.node_id in nodes
        assert (one.prefill is None) <= (not one.chunks)
        if one.prefill is not None:
            assert one.prefill in components
            assert one.remote == (one.prefill.node_id != one.node_id)
            assert one.prefill.node_id in nodes
            assert one.prefill.component_id not in avoid
        assert one.reason
        assert {source.node_id for source in one.sources} <= nodes
        assert len(one.sources) <= MAX_FETCH_SOURCES + 1
        assert [source.blocks for source in one.sources] == sorted((s.blocks for s in one.sources), reverse=True)
        known = max((hits.get(n, 0) for n in nodes if n == one.node_id or n not in avoid), default=0)
        wanted = plan_fetch(one.sources, one.node_id, cached, one.limit_blocks)
        assert (wanted.blocks if wanted else cached) == max(cached, min(known, one.limit_blocks))
    busier = [
        decode(int(p.component_id[-1]), int(p.node_id[-1]), p.running_requests + 50) if p == decided.decode else p
        for p in components
    ]
    again = make_plan(replace(asked, components=tuple(busier)))
    rivals = [
        p for p in components if p.role == "decode" and p.node_id == decided.node_id and p.component_id not in avoid
    ]
    if again.decode.component_id == decided.decode.component_id and decided.decode.component_id not in avoid:
        assert len(rivals) == 1


def texts_of(*components: ComponentRecord, **more: object) -> RequestPlan:
    names = frozenset(one.component_id for one in components if one.role == "prefill")
    return make_plan(snapshot(components=components, text_workers=names, **more))


@pytest.mark.parametrize("policy", ["auto", "colocated", "disaggregated", "fraction:0.5"])
def test_a_pooling_text_goes_to_the_least_loaded_prefill_worker(policy: str) -> None:
    line = (node(0), node(1), prefill(0, tokens=900), prefill(1, at=1), decode(0), decode(1, at=1))
    decided = texts_of(*line, policy=policy)
    assert (decided.decode.component_id, decided.node_id, decided.prefill) == ("prefill-1", "kv-1", None)
    assert shape(decided) == (0, 0, ())
    assert decided.on_prefill_worker
    assert decided.decode_only, "the worker opens the ticket itself"
    assert decided.reason == f"{policy}: a whole text; prefill-1 is soonest of 2; no prefix"
    # Tokens (not streams) sent by gateways count; so does a prefix.
    sent = {"prefill-1": 5000}
    assert texts_of(*line, policy=policy, sent_tokens=sent, sent_load=sent).decode.component_id == "prefill-0"
    idle = (node(0), node(1), prefill(0), prefill(1, at=1), decode(0))
    for at in (0, 1):
        cached = texts_of(*idle, policy=policy, hits={f"kv-{at}": 5})
        assert (cached.decode.component_id, cached.cached_tokens) == (f"prefill-{at}", 80)


def test_decode_workers_compute_a_text_without_a_usable_prefill_worker() -> None:
    line = (node(0), prefill(0), decode(0))
    assert texts_of(*line, avoid=frozenset({"prefill-0"})).decode.component_id == "decode-0"
    assert texts_of(*line, prefill(1), avoid=frozenset({"prefill-0"})).decode.component_id == "prefill-1"
    assert texts_of(node(0), prefill(0, at=1), decode(0)).decode.component_id == "decode-0"
    assert make_plan(snapshot(components=line, text_workers=frozenset())).decode.component_id == "decode-0"
