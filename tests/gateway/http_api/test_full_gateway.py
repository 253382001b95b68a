"""A full gateway during a flood: every API refuses alike, and no urgent request is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lab.testbed.conditions import until
from pillion import Overloaded
from pillion.gateway.admission.answer_times import AnswerTimes
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import Reply, call

ANSWER = "abc"
MOST, SLOTS = 8, 2
USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "toy", "messages": USER, "max_tokens": 3},
    "/v1/completions": {"model": "toy", "prompt": "hello", "max_tokens": 3},
    "/v1/responses": {"model": "toy", "input": USER, "max_output_tokens": 16},
    "/v1/messages": {"model": "toy", "messages": USER, "max_tokens": 3},
    "grpc": {},
}


async def ask(fakes: FakeCluster, api: str, priority: int) -> tuple[int, int]:
    """Return the status (200 for a gRPC success) and the retry delay in ms."""
    if api != "grpc":
        reply: Reply = await call(fakes.gateway.http_address, api, BODIES[api] | {"priority": priority})
        if reply.status == 200:
            return 200, 0
        assert reply.headers["retry-after"] == str(-(-int(reply.headers["retry-after-ms"]) // 1000))
        return reply.status, int(reply.headers["retry-after-ms"])
    try:
        assert [delta async for delta in fakes.client.generate("hello", priority=priority, max_tokens=3)]
    except Overloaded as error:
        return 429, error.retry_after_ms
    return 200, 0


@pytest.mark.parametrize("api", BODIES)
async def test_urgent_requests_are_answered_despite_a_flood(api: str) -> None:
    async with running_fake_cluster(ANSWER, max_inflight_requests=MOST, max_running_requests=SLOTS) as fakes:
        admission = fakes.gateway.gateway.admission
        fakes.decode.gate.clear()
        flood = [asyncio.create_task(ask(fakes, api, 10)) for _ in range(MOST)]
        await until("the flood to fill the gateway", lambda: (admission.running, admission.waiting) == (2, 6))
        assert (await ask(fakes, api, 10))[0] == 429
        urgent = [asyncio.create_task(ask(fakes, api, 0)) for _ in range(MOST - SLOTS)]
        await until("the flood to give way", lambda: sum(task.done() for task in flood) == MOST - SLOTS)
        await until("the urgent ones to wait", lambda: admission.waiting == MOST - SLOTS)
        admission.check_integrity()
        assert not any(task.done() for task in urgent)
        fakes.decode.gate.set()
        assert await asyncio.gather(*urgent) == [(200, 0)] * (MOST - SLOTS)
        outcomes = await asyncio.gather(*flood)
        assert sorted(outcomes) == [(200, 0)] * SLOTS + [(429, 1000)] * (MOST - SLOTS)
        await fakes.settled()
        admission.check_integrity()


async def ask_in_time(fakes: FakeCluster, api: str, timeout_s: float) -> tuple[int, int]:
    """Call :func:`ask` with a client timeout."""
    if api != "grpc":
        told = {"X-Stainless-Read-Timeout": str(timeout_s)}
        reply = await call(fakes.gateway.http_address, api, BODIES[api], told)
        return reply.status, int(reply.headers.get("retry-after-ms", "0"))
    try:
        assert [delta async for delta in fakes.client.generate("hello", max_tokens=3, timeout_s=timeout_s)]
    except Overloaded as error:
        return 429, error.retry_after_ms
    return 200, 0


@pytest.mark.parametrize("api", BODIES)
async def test_a_request_that_would_be_late_is_refused_at_once(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes ten thousand seconds beside another one, and a client waits for a thousand."""
    monkeypatch.setattr(AnswerTimes, "seconds", lambda self, *_: 1e4)
    async with running_fake_cluster(ANSWER, max_running_requests=SLOTS) as fakes:
        admission = fakes.gateway.gateway.admission
        fakes.decode.gate.clear()
        running = [asyncio.create_task(ask(fakes, api, 0)) for _ in range(SLOTS - 1)]
        await until("a request that runs", lambda: admission.running == SLOTS - 1)
        status, retry_after_ms = await ask_in_time(fakes, api, 1000.0)
        assert status == 429
        assert retry_after_ms == pytest.approx(1e4 * 1.25e3 - 1e6, rel=0.1)
        monkeypatch.setattr(AnswerTimes, "seconds", lambda self, *_: 0.0)
        running.append(asyncio.create_task(ask(fakes, api, 0)))
        await until("no more slots", lambda: admission.running == SLOTS)
        late = asyncio.create_task(ask_in_time(fakes, api, 1000.0))
        await until("a request that waits", lambda: admission.waiting == 1)
        monkeypatch.setattr(AnswerTimes, "seconds", lambda self, *_: 1e4)
        fakes.decode.gate.set()
        assert (await late)[0] == 429
        assert await asyncio.gather(*running) == [(200, 0)] * SLOTS
        assert len(fakes.decode.submits) == SLOTS
        await fakes.settled()
        assert (admission.requests, admission.running, admission.waiting) == (0, 0, 0)
        admission.check_integrity()


@pytest.mark.parametrize("told", ["", "0", "-3", "nan", "inf", "soon", "1e9"])
async def test_an_invalid_timeout_header_is_ignored(told: str) -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        path = "/v1/completions"
        reply = await call(fakes.gateway.http_address, path, BODIES[path], {"X-Stainless-Read-Timeout": told})
        assert reply.status == 200
        await fakes.settled()


WHOLE = {path: body for path, body in BODIES.items() if path != "grpc"} | {
    "/v1/embeddings": {"model": "toy", "input": "hello"}
}


@pytest.mark.parametrize("header", ["X-Stainless-Read-Timeout", "X-Stainless-Timeout"])
@pytest.mark.parametrize("path", WHOLE)
async def test_a_unary_request_timeout_frees_everything(path: str, header: str) -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        fakes.decode.gate.clear()
        reply = await call(fakes.gateway.http_address, path, WHOLE[path], {header: "0.2"})
        assert reply.status == 504
        assert b"timeout_error" in reply.body
        fakes.decode.gate.set()
        await fakes.settled()


async def test_a_streams_timeout_applies_to_each_event() -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        fakes.decode.pace_s = 0.1
        path = "/v1/completions"
        body = BODIES[path] | {"stream": True}
        reply = await call(fakes.gateway.http_address, path, body, {"X-Stainless-Read-Timeout": "0.15"})
        assert reply.status == 200
        assert len(reply.events) >= 3
        await fakes.settled()
