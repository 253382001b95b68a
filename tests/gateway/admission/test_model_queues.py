"""Several models in one gateway: shared limits, but no waiting for another model's workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from lab.testbed.conditions import WITHIN_S, loop_turns
from pillion.errors import Overloaded
from pillion.gateway.admission.admission import Admission
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.admission.turns import AdmissionPermit
from pillion.gateway.links.cluster import Cluster
from pillion.wire.registry import ComponentRecord

A, B = Tenant(name="a", max_inflight_requests=4), Tenant(name="b", max_inflight_requests=10)


def entered(admission: Admission, tenant: Tenant = A, tokens: int = 10) -> AdmissionPermit:
    permit = admission.enter(tenant)
    admission.weigh(permit, tokens)
    return permit


async def turn(admission: Admission, permit: AdmissionPermit, model: str) -> None:
    await admission.turn(permit, model)


async def test_a_crowded_model_does_not_hold_up_another() -> None:
    admission = Admission(10, 1000, {"busy": 1, "idle": 1}.__getitem__)
    first = entered(admission)
    await turn(admission, first, "busy")
    waits = entered(admission)
    waiting = asyncio.create_task(turn(admission, waits, "busy"))
    await loop_turns(1)
    assert admission.waiting == 1
    other = entered(admission, B)
    async with asyncio.timeout(WITHIN_S):
        await turn(admission, other, "idle")
    assert not waiting.done()
    admission.leave(first, 5)
    await waiting
    for permit in (waits, other):
        admission.leave(permit)
    assert (admission.requests, admission.tokens, admission.waiting, admission.running) == (0, 0, 0, 0)


async def test_limits_are_shared_by_all_models() -> None:
    admission = Admission(5, 100, lambda model: 0)
    permits = [entered(admission) for _ in range(4)]
    for number, permit in enumerate(permits):
        await turn(admission, permit, ("one", "two")[number % 2])
    with pytest.raises(Overloaded, match="of tenant 'a'"):
        admission.enter(A)
    last = admission.enter(B)
    with pytest.raises(Overloaded, match=r"max_inflight_tokens \(100\)"):
        admission.weigh(last, 61)
    admission.leave(last)
    for permit in permits:
        admission.leave(permit, 1)
    assert (admission.requests, admission.tokens) == (0, 0)


async def test_a_cancelled_request_leaves_the_queue() -> None:
    admission = Admission(10, 1000, lambda model: 1)
    first, second = entered(admission), entered(admission)
    await turn(admission, first, "one")
    waiting = asyncio.create_task(turn(admission, second, "one"))
    await loop_turns(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    admission.leave(second)
    assert (admission.requests, admission.waiting) == (1, 0)
    admission.leave(first)
    assert admission.running == 0


def test_slots_are_those_of_the_models_own_workers() -> None:
    cluster = Cluster("g", SimpleNamespace(refusal=""), None, 5.0)  # type: ignore[arg-type]
    one = ComponentRecord(component_id="d0", role="decode", address="x", model="one", free_seqs=80, max_step_tokens=256)
    cluster.view.update([one, replace(one, component_id="d1", model="two", free_seqs=4)], 0.0)
    assert (cluster.request_slots("one"), cluster.request_slots("two"), cluster.request_slots("none")) == (100, 20, 0)
