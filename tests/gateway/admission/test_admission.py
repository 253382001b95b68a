"""Global and per-tenant limits, turns, and requests that leave while queued."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lab.testbed.conditions import loop_turns
from pillion.errors import DeadlineExceeded, InvalidRequest, Overloaded
from pillion.gateway.admission.admission import Admission, TenantSlots
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.admission.turns import AdmissionPermit
from pillion.gateway.links.cluster import Cluster
from pillion.rules.priority import queue_order
from pillion.wire.registry import ComponentRecord

A, B = Tenant(name="a"), Tenant(name="b")


def refused(error: pytest.ExceptionInfo[Overloaded]) -> str:
    (quota,) = error.value.quotas
    return quota.subject


async def turn(admission: Admission, permit: AdmissionPermit, timeout_s: float | None = None) -> None:
    await admission.turn(permit, "m", None if timeout_s is None else time.monotonic() + timeout_s)


async def settle() -> None:
    await loop_turns(5)


def test_global_and_per_tenant_limits() -> None:
    admission = Admission(8, 100)
    mine = [admission.enter(A) for _ in range(4)]
    with pytest.raises(Overloaded) as caught:
        admission.enter(A)
    assert refused(caught) == "a/max_inflight_requests"
    theirs = [admission.enter(B) for _ in range(2)]
    with pytest.raises(Overloaded) as caught:
        admission.enter(B)
    assert refused(caught) == "b/max_inflight_requests"
    # A flood leaves room for the next tenant while there is any.
    theirs += [admission.enter(Tenant(name=name)) for name in "cd"]
    with pytest.raises(Overloaded) as caught:
        admission.enter(Tenant(name="e"))
    assert refused(caught) == "max_inflight_requests"
    admission.weigh(mine[0], 40)
    with pytest.raises(Overloaded) as caught:
        admission.weigh(mine[1], 11)
    assert refused(caught) == "a/max_inflight_tokens"
    # One prompt per tenant is always admitted while the gateway itself has room.
    admission.weigh(theirs[0], 60)
    with pytest.raises(Overloaded) as caught:
        admission.weigh(theirs[1], 1)
    assert refused(caught) == "max_inflight_tokens"
    for permit in mine + theirs:
        admission.leave(permit)
    assert (admission.requests, admission.tokens, admission.running) == (0, 0, 0)
    admission.enter(A)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_three_that_flood_leave_room_for_a_fourth(events: list[tuple[str, bool]]) -> None:
    """In any order of arrivals a newcomer is admitted, and the flooding tenants still get their share."""
    admission = Admission(40, 4000)
    inside: dict[str, list[AdmissionPermit]] = {name: [] for name in "abc"}
    for name, goes in events:
        if goes and inside[name]:
            admission.leave(inside[name].pop())
            continue
        with contextlib.suppress(Overloaded):
            while True:
                inside[name].append(admission.enter(Tenant(name=name)))
                admission.weigh(inside[name][-1], 100)
    permit = admission.enter(Tenant(name="d"))
    admission.weigh(permit, 100)
    admission.leave(permit)
    for permit in itertools.chain(*inside.values()):
        admission.leave(permit)
    assert (admission.requests, admission.tokens) == (0, 0)
    admission.check_integrity()


def test_tenant_limits_apply_and_only_gateway_limits_without_keys() -> None:
    admission = Admission(8, 100)
    small = Tenant(name="small", max_inflight_requests=2, max_inflight_tokens=5)
    permits = [admission.enter(small) for _ in range(2)]
    with pytest.raises(Overloaded):
        admission.enter(small)
    admission.weigh(permits[0], 4)
    with pytest.raises(Overloaded):
        admission.weigh(permits[1], 2)
    with pytest.raises(InvalidRequest):
        admission.enter(small, 3)
    for _ in range(6):
        admission.enter(OPEN)


async def test_queued_requests_are_ordered_by_rank_and_fair_share() -> None:
    admission, order = Admission(100, 1000, lambda model: 1), []

    async def one(name: str, tenant: Tenant, priority: int) -> None:
        permit = admission.enter(tenant, order=queue_order(priority, time.monotonic()))
        admission.weigh(permit, 10)
        await turn(admission, permit)
        order.append(name)
        await loop_turns(1)
        admission.leave(permit, 5)

    firsts = [admission.enter(tenant) for tenant in (A, B)]
    for first in firsts:
        await turn(admission, first)
    asked = [("a1", A, 0), ("a2", A, 0), ("a3", A, -3), ("b1", B, 0), ("b2", B, 50)]
    tasks = [asyncio.create_task(one(*arguments)) for arguments in asked]
    await settle()
    assert (admission.waiting, admission.running) == (5, 2)
    for first in firsts:
        admission.leave(first)
    await asyncio.gather(*tasks)
    assert [name for name in order if name.startswith("a")] == ["a3", "a1", "a2"]
    assert order[:4] in (["a3", "b1", "a1", "b2"], ["b1", "a3", "b2", "a1"])
    assert (admission.requests, admission.tokens, admission.running, admission.waiting) == (0, 0, 0, 0)


async def test_a_cancelled_waiter_leaves_nothing() -> None:
    admission = Admission(10, 1000, lambda model: 1)
    running, waits, stays = (admission.enter(A) for _ in range(3))
    await turn(admission, running)
    task = asyncio.create_task(turn(admission, waits))
    other = asyncio.create_task(turn(admission, stays))
    await settle()
    task.cancel()
    await settle()
    assert task.cancelled()
    assert admission.waiting == 1
    admission.leave(waits)
    admission.leave(running)
    await other
    admission.leave(stays)
    assert (admission.requests, admission.running, admission.waiting) == (0, 0, 0)


async def test_a_turn_granted_during_a_cancel_is_returned() -> None:
    admission = Admission(10, 1000, lambda model: 1)
    running, waits, stays = (admission.enter(A) for _ in range(3))
    await turn(admission, running)
    task, other = asyncio.create_task(turn(admission, waits)), asyncio.create_task(turn(admission, stays))
    await settle()
    admission.leave(running)
    task.cancel()
    await settle()
    assert task.cancelled()
    admission.leave(waits)
    await other
    third, fourth = (admission.enter(A) for _ in range(2))
    task, other = asyncio.create_task(turn(admission, third)), asyncio.create_task(turn(admission, fourth))
    await settle()
    task.cancel()
    admission.leave(stays)
    await settle()
    admission.leave(third)
    await other
    admission.leave(fourth)
    assert (admission.requests, admission.running, admission.waiting) == (0, 0, 0)


async def test_a_request_with_more_answers_than_slots_runs_alone() -> None:
    admission = Admission(10, 1000, lambda model: 2)
    many = admission.enter(A, 4)
    await turn(admission, many)
    one = admission.enter(A)
    task = asyncio.create_task(turn(admission, one))
    await settle()
    assert admission.waiting == 1
    admission.leave(many)
    await task
    admission.leave(one)


async def test_a_changed_slot_count_applies_at_the_next_event() -> None:
    slots = [1]
    admission = Admission(10, 1000, lambda model: slots[0])
    permits = [admission.enter(A) for _ in range(4)]
    tasks = [asyncio.create_task(turn(admission, permit)) for permit in permits]
    await settle()
    assert admission.running == 1
    slots[0] = 0
    admission.leave(permits[0])
    await asyncio.gather(*tasks)
    assert admission.running == 3


async def test_a_deadline_nearer_than_the_predicted_wait_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    admission = Admission(100, 1000, lambda model: 1)
    monkeypatch.setattr("pillion.gateway.admission.admission.time.monotonic", lambda: clock[0])
    permits = [admission.enter(A) for _ in range(8)]
    for permit in permits:
        admission.weigh(permit, 10)
    tasks = [asyncio.create_task(admission.turn(permit, "m")) for permit in permits]
    await settle()
    for permit in permits[:5]:
        clock[0] += 2.0
        admission.leave(permit)
        await settle()
    # One runs and two wait: the third slot is free after about six seconds.
    late = admission.enter(A)
    with pytest.raises(Overloaded) as caught:
        await admission.turn(late, "m", clock[0] + 5.0)
    assert refused(caught) == "deadline"
    assert caught.value.retry_after_ms == pytest.approx(6000, rel=0.01)
    newcomer, other = admission.enter(B), admission.enter(B)
    await admission.turn(newcomer, "m", clock[0] + 5.0)
    task = asyncio.create_task(admission.turn(other, "m", clock[0] + 5.0))
    await settle()
    assert not task.done()
    admission.leave(newcomer)
    await task
    for waiting in tasks:
        waiting.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_idle_tenants_first_request_needs_no_slot() -> None:
    """Let its second request wait as all do; background requests always wait and do not count as its work."""
    admission = Admission(100, 1000, lambda model: 2)
    tasks = {}

    def ask(name: str, tenant: Tenant) -> AdmissionPermit:
        permit = admission.enter(tenant, order=queue_order(0, time.monotonic()))
        tasks[name] = asyncio.create_task(turn(admission, permit))
        return permit

    async def done() -> set[str]:
        await settle()
        return {name for name, task in tasks.items() if task.done()}

    flood = [ask(f"a{number}", A) for number in range(5)]
    assert await done() == {"a0", "a1"}
    ask("hidden", B.in_background())
    first = ask("b0", B)
    ask("b1", B)
    assert await done() == {"a0", "a1", "b0"}
    ask("other", Tenant(name="c"))
    assert await done() == {"a0", "a1", "b0", "other"}
    admission.leave(first)
    assert await done() == {"a0", "a1", "b0", "other", "b1"}
    admission.leave(flood[0])
    admission.leave(flood[1])
    assert await done() == {"a0", "a1", "b0", "other", "b1", "a2"}, "A has nothing there now, and so is a newcomer"
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_a_queued_request_fails_when_its_deadline_passes() -> None:
    admission = Admission(10, 1000, lambda model: 1)
    running, waits = admission.enter(A), admission.enter(A)
    await turn(admission, running)
    with pytest.raises(DeadlineExceeded):
        await turn(admission, waits, timeout_s=0.01)
    assert admission.waiting == 0


async def test_a_shared_queue_gives_each_tenant_its_slots() -> None:
    slots, order = TenantSlots(2), []

    async def job(tenant: Tenant) -> None:
        async with slots.of(tenant):
            order.append(tenant.name)
            await loop_turns(1)

    tasks = [asyncio.create_task(job(A)) for _ in range(20)]
    tasks.append(asyncio.create_task(job(B)))
    await asyncio.gather(*tasks)
    assert order.index("b") == 2
    kept, forgotten = slots.of(A), slots.of(B)
    slots.retain({"a"})
    assert slots.of(A) is kept
    assert slots.of(B) is not forgotten


async def test_request_slots_are_worker_capacity_plus_a_margin() -> None:
    cluster = Cluster("g", SimpleNamespace(refusal=""), None, 5.0)  # type: ignore[arg-type]
    assert cluster.request_slots("") == 0
    worker = ComponentRecord(
        component_id="d0", role="decode", address="x", running_requests=60, free_seqs=20, max_step_tokens=256
    )
    cluster.view.update([worker], 0.0)
    assert cluster.request_slots("") == 100
    small = replace(worker, component_id="d1", running_requests=0, free_seqs=4)
    # Two gateways share one worker's slots evenly, plus what the other one leaves unused.
    me, other = (
        ComponentRecord(component_id=name, role="gateway", address="x", running_requests=50) for name in ("g", "h")
    )
    for running, granted in ((50, 10), (10, 10), (3, 17), (0, 20)):
        cluster.view.update([small, me, replace(other, running_requests=running)], 100.0)
        assert cluster.request_slots("") == granted
    # A worker that reports no slots might have many.
    cluster.view.update([small, replace(worker, max_step_tokens=0)], 200.0)
    assert cluster.request_slots("") == 0
