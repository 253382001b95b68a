"""Requests go to workers with their adapter loaded unless the queue there costs more than loading elsewhere."""

from __future__ import annotations

import pytest

from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.planning.planner import make_plan
from pillion.gateway.planning.route_planner import MAX_SENT_ADAPTERS, SENT_COUNTS_S, SentAdapters
from tests.support.planner_components import decode, node, prefill, snapshot

OURS, OTHER = "ab" * 32, "cd" * 32
POLICIES = ("auto", "disaggregated")


def chosen(policy, *workers, spread=0, **more):
    plan = make_plan(
        snapshot(components=(node(0), *workers), spread=spread, **({"policy": parse_policy(policy)} | more))
    )
    return plan.decode.component_id, plan.prefill.component_id if plan.prefill else ""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spread", [0, 1])
def test_workers_that_have_the_adapter_are_preferred(policy, spread):
    workers = (
        decode(0, adapters=(OTHER,)),
        decode(1, adapters=(OTHER, OURS)),
        prefill(0, adapters=(OURS,)),
        prefill(1),
    )
    assert chosen(policy, *workers, spread=spread, adapter=OURS) == ("decode-1", "prefill-0")
    assert chosen(policy, decode(0), decode(1), spread=spread, adapter=OURS, own_adapters={"decode-0"})[0] == "decode-0"
    assert chosen(policy, *workers, spread=spread)[0] == f"decode-{spread}", "the model alone runs anywhere"


@pytest.mark.parametrize("policy", POLICIES)
def test_loading_an_adapter_beats_a_long_queue(policy):
    busy = decode(0, streams=64, adapters=(OURS,), free_seqs=0, queued_tokens=4000, waiting_requests=20)
    assert chosen(policy, busy, decode(1), adapter=OURS)[0] == "decode-1"


def test_workers_with_contested_adapter_slots_are_avoided():
    assert chosen("auto", decode(0, adapter_waits=9), decode(1), adapter=OURS)[0] == "decode-1"


def test_recent_requests_count_for_a_while_and_are_bounded():
    sent = SentAdapters()
    sent.note(OURS, {"a"}, 1.0)
    sent.note(OURS, {"b"}, 3.0)
    assert sent.workers(OURS, 4.0) == {"a", "b"}
    assert sent.workers(OURS, 1.1 + SENT_COUNTS_S) == {"b"}
    assert sent.workers(OTHER, 4.0) == set()
    sent.note(OTHER, {"a", "b"}, 3.0)
    sent.forget(OTHER, "a")
    sent.forget("unknown", "a")
    assert sent.workers(OTHER, 4.0) == {"b"}
    for number in range(MAX_SENT_ADAPTERS):
        sent.note(str(number), {"c"}, 4.0)
    assert sent.workers(OURS, 4.0) == set()
    assert sent.workers("0", 4.0) == {"c"}
