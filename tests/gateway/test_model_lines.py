"""Several models in one gateway: bounds in common, but nobody waits for another model's workers."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from pillion.errors import Overloaded
from pillion.gateway.admission.admission import AdmissionPermit
from pillion.gateway.admission.model_lines import ModelLines
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.links.cluster import Cluster
from pillion.wire.registry import ComponentRecord

A, B = Tenant(name="a", max_inflight_requests=4), Tenant(name="b", max_inflight_requests=10)


def entered(lines: ModelLines, tenant: Tenant = A, tokens: int = 10) -> AdmissionPermit:
    permit = lines.enter(tenant)
    lines.weigh(permit, tokens)
    return permit


async def turn(lines: ModelLines, permit: AdmissionPermit, model: str) -> None:
    await lines.turn(permit, model, 0, time.monotonic(), None)


async def test_a_crowded_model_does_not_hold_up_another() -> None:
    lines = ModelLines(10, 1000, {"busy": 1, "idle": 1}.__getitem__, ("busy", "idle"))
    first = entered(lines)
    await turn(lines, first, "busy")
    waits = entered(lines)
    waiting = asyncio.create_task(turn(lines, waits, "busy"))
    await asyncio.sleep(0)
    assert lines.waiting == 1
    other = entered(lines, B)
    async with asyncio.timeout(5):
        await turn(lines, other, "idle")
    assert not waiting.done()
    lines.leave(first, 5)
    await waiting
    for permit in (waits, other):
        lines.leave(permit)
    assert (lines.requests, lines.tokens, lines.waiting, lines._seats) == (0, 0, 0, {})


async def test_bounds_are_for_all_models_together() -> None:
    lines = ModelLines(5, 100, lambda model: 0, ("one", "two"))
    visits = [entered(lines) for _ in range(4)]
    for number, permit in enumerate(visits):
        await turn(lines, permit, ("one", "two")[number % 2])
    with pytest.raises(Overloaded, match="of tenant 'a'"):
        lines.enter(A)
    last = lines.enter(B)
    with pytest.raises(Overloaded, match=r"max_inflight_tokens \(100\)"):
        lines.weigh(last, 61)
    lines.leave(last)
    for permit in visits:
        lines.leave(permit, 1)
    assert (lines.requests, lines.tokens) == (0, 0)


async def test_who_gives_up_in_the_line_leaves_it() -> None:
    lines = ModelLines(10, 1000, lambda model: 1, ("one",))
    first, second = entered(lines), entered(lines)
    await turn(lines, first, "one")
    waiting = asyncio.create_task(turn(lines, second, "one"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    lines.leave(second)
    assert (lines.requests, lines.waiting) == (1, 0)
    lines.leave(first)
    assert lines._seats == {}


def test_places_are_those_of_the_models_own_workers() -> None:
    cluster = Cluster("g", None, None, 5.0)  # type: ignore[arg-type]
    one = ComponentRecord(component_id="d0", role="decode", address="x", model="one", free_seqs=80, max_step_tokens=256)
    cluster.view.update([one, replace(one, component_id="d1", model="two", free_seqs=4)], 0.0)
    assert (cluster.places("one"), cluster.places("two"), cluster.places("none")) == (100, 20, 0)
