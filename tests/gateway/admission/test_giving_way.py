"""In a full gateway the least urgent waiting request of the tenant furthest above its share is refused."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.conditions import loop_turns
from pillion.errors import InvalidRequest, Overloaded
from pillion.gateway.admission.admission import RETRY_AFTER_MS, Admission
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.admission.turns import AdmissionPermit
from pillion.rules.priority import PRIORITY_AGING_S, queue_order
from tests.support.examples import examples

A, B, HEAVY = Tenant(name="a"), Tenant(name="b"), Tenant(name="heavy", weight=3.0)
SMALL = Tenant(name="small", max_inflight_requests=3)


class FullGateway:
    """An admission whose clock moves only on demand, and its requests."""

    def __init__(self, requests: int = 8, tokens: int = 1000, slots: int = 2) -> None:
        self.now_s = 1000.0
        self.admission = Admission(requests, tokens, lambda model: slots, clock=lambda: self.now_s)
        self.permits: list[AdmissionPermit] = []
        self.tasks: dict[AdmissionPermit, asyncio.Task[None]] = {}
        self.begun: Counter[AdmissionPermit] = Counter()

    def enter(self, tenant: Tenant, priority: int = 0, answers: int = 1, tokens: int = 1) -> AdmissionPermit:
        permit = self.admission.enter(tenant, answers, order=queue_order(priority, self.now_s))
        try:
            self.admission.weigh(permit, tokens)
        except Overloaded:
            self.admission.leave(permit)
            raise
        self.permits.append(permit)
        return permit

    async def turn(self, permit: AdmissionPermit) -> None:
        async def wait() -> None:
            await self.admission.turn(permit, "m")
            self.begun[permit] += 1

        self.tasks[permit] = asyncio.create_task(wait())
        await loop_turns(2)

    async def come(self, tenant: Tenant, priority: int = 0, tokens: int = 1) -> AdmissionPermit:
        permit = self.enter(tenant, priority, tokens=tokens)
        await self.turn(permit)
        return permit

    def gone(self) -> list[int]:
        """Return the refused requests, as positions in order of arrival."""
        return [number for number, permit in enumerate(self.permits) if permit.given_up is not None]

    async def over(self) -> None:
        """Let all requests leave, and check that nothing remains."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for permit in self.permits:
            self.admission.leave(permit)
        self.admission.check_integrity()
        assert (self.admission.requests, self.admission.tokens) == (0, 0)
        assert (self.admission.running, self.admission.waiting) == (0, 0)


async def test_no_urgent_request_is_refused_beside_a_flood_of_its_own_tenant() -> None:
    gateway = FullGateway(requests=8, slots=2)
    for _ in range(8):
        await gateway.come(OPEN, 10)
    with pytest.raises(Overloaded):
        gateway.enter(OPEN, 10)
    for _ in range(6):
        await gateway.come(OPEN, 0)
        gateway.admission.check_integrity()
    assert gateway.gone() == [2, 3, 4, 5, 6, 7]
    for number in gateway.gone():
        with pytest.raises(Overloaded, match="a request with precedence took its place") as caught:
            await gateway.tasks[gateway.permits[number]]
        assert [quota.subject for quota in caught.value.quotas] == ["max_inflight_requests"]
        assert caught.value.retry_after_ms == RETRY_AFTER_MS
        gateway.admission.leave(gateway.permits[number])
    assert gateway.admission.requests == 8
    with pytest.raises(Overloaded):
        gateway.enter(OPEN, 0)
    await gateway.over()


async def test_a_request_that_is_still_tokenized_gives_way_too() -> None:
    gateway = FullGateway(requests=2)
    first = gateway.admission.enter(OPEN, order=queue_order(10, gateway.now_s))
    second = gateway.enter(OPEN, 10)
    gateway.enter(OPEN, 0)
    gateway.enter(OPEN, 0)
    with pytest.raises(Overloaded, match="a request with precedence took its place"):
        gateway.admission.weigh(first, 5)
    with pytest.raises(Overloaded, match="a request with precedence took its place"):
        await gateway.admission.turn(second, "m")
    gateway.admission.leave(first)
    assert gateway.admission.requests == 2
    await gateway.over()


async def test_age_makes_up_for_priority_in_a_full_gateway() -> None:
    gateway = FullGateway(requests=4, slots=2)
    for _ in range(4):
        await gateway.come(OPEN, 1)
    gateway.now_s += PRIORITY_AGING_S + 1
    with pytest.raises(Overloaded):
        gateway.enter(OPEN, 0)
    await gateway.over()


@pytest.mark.parametrize(
    ("held", "newcomer", "gives_way"),
    [
        # Tenants that find room, are below their share, or whose weight makes it larger; then the flood itself.
        ([(A, 16, 0)], (B, 10), ""),
        ([(A, 16, 0), (B, 8, 0)], (B, 10), "a"),
        ([(A, 11, 0), (HEAVY, 10, 0)], (HEAVY, 10), "a"),
        ([(HEAVY, 14, 0), (B, 9, 0)], (B, 0), None),
        ([(A, 16, 5)], (A, 0), "a"),
        ([(A, 16, 5)], (A, 5), None),
        # The tenant furthest above its share loses one, not the least urgent request overall.
        ([(A, 16, 0), (B, 8, 50)], (Tenant(name="c"), 0), ""),
        ([(A, 16, 0), (B, 8, 50), (Tenant(name="c"), 4, 0)], (Tenant(name="c"), 0), "a"),
        # Background requests go first, even another tenant's.
        ([(B.in_background(), 7, 0), (A, 12, 50)], (A, 0), "b"),
    ],
)
async def test_which_request_is_displaced_by_another_tenant(
    held: list[tuple[Tenant, int, int]], newcomer: tuple[Tenant, int], gives_way: str | None
) -> None:
    gateway = FullGateway(requests=32, slots=1)
    await gateway.come(Tenant(name="first"))
    for tenant, count, priority in held:
        with contextlib.suppress(Overloaded):
            for _ in range(count):
                await gateway.come(tenant, priority)
    if gives_way is None:
        with pytest.raises(Overloaded):
            gateway.enter(*newcomer)
        assert not gateway.gone()
    else:
        gateway.enter(*newcomer)
        assert {gateway.permits[number].tenant.name for number in gateway.gone()} == (
            {gives_way} if gives_way else set()
        )
    gateway.admission.check_integrity()
    await gateway.over()


async def test_a_tenants_own_limit_affects_no_other_tenant() -> None:
    gateway = FullGateway(requests=8, slots=1)
    await gateway.come(A)
    for _ in range(3):
        await gateway.come(A, 10)
    for _ in range(2):
        await gateway.come(SMALL, 0)
    await gateway.come(SMALL, 5)
    with pytest.raises(Overloaded, match="of tenant 'small'"):
        gateway.enter(SMALL, 5)
    gateway.enter(SMALL, 0)
    assert [gateway.permits[number].tenant.name for number in gateway.gone()] == ["small"]
    (number,) = gateway.gone()
    with pytest.raises(Overloaded) as caught:
        await gateway.tasks[gateway.permits[number]]
    assert [quota.subject for quota in caught.value.quotas] == ["small/max_inflight_requests"]
    await gateway.over()


async def test_enough_requests_give_way_for_a_prompt_or_none() -> None:
    gateway = FullGateway(requests=100, tokens=100, slots=1)
    await gateway.come(OPEN, 0, tokens=20)
    for _ in range(8):
        await gateway.come(OPEN, 10, tokens=10)
    with pytest.raises(Overloaded, match="max_inflight_tokens"):
        gateway.enter(OPEN, 0, tokens=81)
    assert not gateway.gone()
    gateway.enter(OPEN, 0, tokens=25)
    assert len(gateway.gone()) == 3
    assert gateway.admission.tokens == 95
    await gateway.over()


async def test_the_refusal_has_a_retry_delay() -> None:
    gateway = FullGateway(requests=4, slots=0)
    running = [await gateway.come(OPEN) for _ in range(4)]
    for _ in range(8):
        gateway.now_s += 2.0
        gateway.admission.leave(running.pop(0))
        running.append(await gateway.come(OPEN))
    with pytest.raises(Overloaded) as caught:
        gateway.enter(OPEN)
    assert caught.value.retry_after_ms == pytest.approx(2000, rel=0.01)
    with pytest.raises(Overloaded) as caught:
        gateway.enter(OPEN, answers=3)
    assert caught.value.retry_after_ms == pytest.approx(6000, rel=0.01)
    await gateway.over()


TENANTS = st.sampled_from([OPEN, A, B, HEAVY, SMALL, A.in_background(), HEAVY.in_background()])
COMES = st.tuples(st.just("comes"), TENANTS, st.sampled_from([0, 0, 5, 10]), st.integers(1, 3), st.integers(1, 40))
EVENTS = st.one_of(COMES, COMES, st.tuples(st.sampled_from(["turn", "ends", "cancelled", "time"]), st.integers(0, 60)))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(EVENTS, max_size=80))
def test_no_request_is_lost_or_served_twice(events: list[tuple]) -> None:
    """Each admitted request is served once, refused once or leaves by itself; and the counts add up."""
    asyncio.run(_happen(events))


async def _happen(events: list[tuple]) -> None:
    gateway = FullGateway(requests=10, tokens=120, slots=3)
    left: set[AdmissionPermit] = set()
    for kind, *rest in events:
        inside = [permit for permit in gateway.permits if permit not in left]
        if kind == "comes":
            tenant, priority, answers, tokens = rest
            with contextlib.suppress(Overloaded, InvalidRequest):
                gateway.enter(tenant, priority, answers, tokens)
        elif kind == "time":
            gateway.now_s += rest[0]
        elif inside:
            permit = inside[rest[0] % len(inside)]
            if kind == "turn" and permit not in gateway.tasks:
                await gateway.turn(permit)
            elif kind == "cancelled" and permit in gateway.tasks:
                gateway.tasks[permit].cancel()
            elif kind == "ends" and (gateway.begun[permit] or permit.given_up is not None):
                gateway.admission.leave(permit, 5)
                left.add(permit)
        gateway.admission.check_integrity()
        await loop_turns(2)
        gateway.admission.check_integrity()
        assert gateway.admission.requests <= 10
    for permit in gateway.permits:
        refused = permit.given_up is not None
        assert gateway.begun[permit] + refused <= 1
        task = gateway.tasks.get(permit)
        if refused and task is not None:
            assert task.cancelled() or isinstance(task.exception(), Overloaded)
    for permit in left:
        gateway.permits.remove(permit)
    await gateway.over()


async def test_a_call_without_an_order_neither_displaces_nor_gives_way() -> None:
    gateway = FullGateway(requests=2)
    kept = gateway.admission.enter(OPEN)
    assert kept.order == math.inf
    gateway.enter(OPEN, 10)
    with pytest.raises(Overloaded):
        gateway.admission.enter(OPEN)
    gateway.enter(OPEN, 0)
    with pytest.raises(Overloaded):
        gateway.enter(OPEN, 0)
    assert kept.given_up is None
    gateway.admission.leave(kept)
    await gateway.over()
