"""Streams blamed for a broken connection, and waits of lost streams."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from opentelemetry import trace

from lab.testbed.admitted import admitted_request
from lab.testbed.conditions import loop_turns
from pillion.errors import Cancelled, Conflict, Internal, InvalidRequest, NotFound, PillionError, Unavailable
from pillion.gateway.links.decode_link import DecodeDelta
from pillion.gateway.request import component_calls
from pillion.gateway.request import events as ev
from pillion.gateway.request.component_calls import ComponentCalls
from pillion.v1.decode_pb2 import DecodeError
from tests.gateway.request.test_request import hold
from tests.support.scenes import random_scenes

RETURN_WAIT_S = 7.0
AWAY = (Unavailable, Conflict, Cancelled)
ERRORS = (*AWAY, NotFound, Internal, InvalidRequest)
WORKER = "decode-0"


@dataclass
class LosingCluster:
    """A cluster whose node has the request's ticket, or a new epoch."""

    node_has_ticket: bool
    refused: list[str] = field(default_factory=list)

    @property
    def view(self) -> Any:
        return SimpleNamespace(note_refusal=self.refused.append)

    def holds(self, _: ev.TicketHold) -> bool:
        return self.node_has_ticket

    def return_wait_s(self, *_: object) -> float:
        return RETURN_WAIT_S


def lost_stream(cluster: LosingCluster, error: type[PillionError], deltas: list[DecodeDelta], broken: int) -> Any:
    """Run a stream's calls with these deltas and then an error; return the posted events."""
    events: list[ev.Event] = []

    def broke(defect: BaseException) -> None:
        raise defect

    calls = ComponentCalls(
        admitted_request(),
        0,
        tuple,
        cluster,
        trace.INVALID_SPAN,
        events.append,
        broke,
        SimpleNamespace(assign=lambda _: None),
        _stream=(WORKER, 1),
        _hold=hold(),
    )
    for delta in (*deltas, DecodeDelta(1, error=DecodeError(code=error.code, retryable=True), broken=broken)):
        calls._on_delta(1, delta)
    return events


async def check_scene(rng: Random) -> None:
    said = rng.choices(["queued", "in step", "tokens"], k=rng.randrange(3))
    queued = {"queued": DecodeDelta(1, queued=2), "in step": DecodeDelta(1, queued=0)}
    deltas = [queued.get(name, DecodeDelta(1, (5,))) for name in said]
    error, broken, has_ticket = rng.choice(ERRORS), rng.choice([0, 0, 1, 2]), rng.random() < 0.7
    # A stream with tokens survived many steps, so it may be the cause only if it was alone.
    suspected = broken == 1 if "tokens" in said else broken > 0 and "in step" in said
    cluster = LosingCluster(has_ticket)
    events = lost_stream(cluster, error, deltas, broken)
    assert isinstance(events[-1] if events else None, ev.DecodeLost) is not suspected, "a verdict waits for the node"
    await loop_turns(3)
    lost = events[-1]
    assert isinstance(lost, ev.DecodeLost)
    assert lost.killed == (WORKER if suspected and has_ticket else "")
    broke_within = broken > 0 and ("tokens" in said or "in step" in said)
    waits = not has_ticket or (error in AWAY and not broke_within)
    assert lost.patience_s == (RETURN_WAIT_S if waits else 0.0)
    assert (type(lost.error), lost.retryable) == (error, True)
    assert cluster.refused == ([WORKER] if error is Unavailable else [])


@given(random_scenes())
def test_only_a_stream_that_may_have_broken_a_worker_is_blamed(scenes: list[Random]) -> None:
    async def check() -> None:
        for rng in scenes:
            await check_scene(rng)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(component_calls, "BLAME_DELAY_MS", 0)
        asyncio.run(check())
