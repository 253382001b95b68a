"""Background requests use idle slots, and do not starve."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lab.testbed.conditions import loop_turns
from pillion.errors import InvalidRequest, Overloaded
from pillion.gateway.admission.admission import Admission
from pillion.gateway.admission.tenants import OPEN, Tenant, cache_salt, flow_of
from pillion.gateway.admission.turns import AdmissionPermit
from pillion.rules.priority import MAX_PRIORITY, NO_FLOW, PRIORITY_AGING_S, queue_order

A, B = Tenant(name="a"), Tenant(name="b")
HIDDEN = A.in_background()


class Line:
    """Requests of one model with four slots, in the order of their turns."""

    def __init__(self, slots: int = 4) -> None:
        self.admission = Admission(100, 10_000, lambda model: slots)
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.permits: dict[str, AdmissionPermit] = {}
        self._numbers = itertools.count()

    async def send(self, tenant: Tenant, label: str, *, waited_s: float = 0.0, deadline_s: float | None = None) -> None:
        order = queue_order(tenant.capped(0), time.monotonic() - waited_s)
        permit = self.permits[label] = self.admission.enter(tenant, order=order)
        self.admission.weigh(permit, 10)

        async def turn() -> None:
            await self.admission.turn(permit, "m", deadline_s)
            self.order.append(label)

        self.tasks.append(asyncio.create_task(turn()))
        await loop_turns(2)

    async def end(self, label: str) -> None:
        self.admission.leave(self.permits.pop(label), 5)
        await loop_turns(2)


@asynccontextmanager
async def line(slots: int = 4) -> AsyncIterator[Line]:
    found = Line(slots)
    yield found
    for task in found.tasks:
        task.cancel()
    await asyncio.gather(*found.tasks, return_exceptions=True)
    for permit in found.permits.values():
        found.admission.leave(permit)
    assert (found.admission.requests, found.admission.tokens) == (0, 0)
    assert (found.admission.waiting, found.admission.running) == (0, 0)


async def test_background_requests_use_at_most_half_of_the_slots() -> None:
    async with line() as one:
        for number in range(4):
            await one.send(HIDDEN, f"h{number}")
        assert one.order == ["h0", "h1"]
        for number in range(2):
            await one.send(B, f"b{number}")
        assert one.order == ["h0", "h1", "b0", "b1"]


@pytest.mark.parametrize("tenant", [A, B])
async def test_the_background_waits_for_all_live_requests(tenant: Tenant) -> None:
    """A tenant that was served nothing yet does not overtake live requests of another one either."""
    async with line() as one:
        for number in range(4):
            await one.send(tenant, f"t{number}")
        await one.send(HIDDEN, "h")
        await one.send(tenant, "t4")
        await one.end("t0")
        assert one.order[-1] == "t4"
        for label in ("t1", "t2"):
            await one.end(label)
            assert one.order[-1] == "t4"
        await one.end("t3")
        assert one.order[-1] == "h"


async def test_an_old_background_request_is_served_first() -> None:
    async with line() as one:
        for number in range(4):
            await one.send(B, f"b{number}")
        await one.send(HIDDEN, "old", waited_s=MAX_PRIORITY * PRIORITY_AGING_S + 1)
        await one.send(HIDDEN, "new")
        await one.send(B, "b4")
        await one.end("b0")
        assert one.order[-1] == "old"
        await one.end("b1")
        assert one.order[-1] == "b4"


async def test_queued_background_requests_cause_no_deadline_refusals() -> None:
    async with line() as one:
        for number in range(3):
            await one.send(HIDDEN, f"h{number}")
        # Slow enough that waiting behind any request exceeds the deadline.
        for number in range(8):
            await one.send(B, f"b{number}", deadline_s=time.monotonic() + 60)
            await one.end(f"b{number}")
        assert one.order == ["h0", "h1", *(f"b{number}" for number in range(8))]


async def test_background_requests_use_at_most_half_of_every_limit() -> None:
    admission = Admission(8, 100, lambda model: 0)
    taken = [admission.enter(A) for _ in range(2)] + [admission.enter(OPEN.in_background()) for _ in range(2)]
    with pytest.raises(Overloaded, match=r"max_inflight_requests \(4\)"):
        admission.enter(OPEN.in_background())
    taken.append(admission.enter(B))
    admission.weigh(taken[0], 40)
    with pytest.raises(Overloaded, match=r"max_inflight_tokens \(50\)"):
        admission.weigh(taken[2], 20)
    admission.weigh(taken[4], 20)
    own = Tenant(name="own", max_inflight_requests=2)
    with pytest.raises(InvalidRequest, match="takes 1 requests at once"):
        admission.enter(own.in_background(), 2)
    for permit in taken:
        admission.leave(permit)
    first = admission.enter(own.in_background())
    with pytest.raises(Overloaded, match="of tenant 'own'"):
        admission.enter(own.in_background())
    admission.leave(admission.enter(own))
    admission.leave(first)


def test_a_background_request_counts_for_its_tenant() -> None:
    assert HIDDEN.background
    assert not A.background
    assert cache_salt(HIDDEN, "x") == cache_salt(A, "x")
    assert HIDDEN.capped(-5) == MAX_PRIORITY


def test_workers_count_background_requests_separately() -> None:
    """Count a tenant's batch separately at workers, so that its other requests are not penalized."""
    flows = {flow_of(tenant, "model") for tenant in (A, HIDDEN, OPEN)}
    assert len(flows) == 3
    assert NO_FLOW in flows
