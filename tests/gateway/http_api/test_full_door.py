"""A full gateway beside a flood: each API says the same to who gives way, and no urgent request is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pillion import Overloaded
from testbed.conditions import until
from tests.support.fake_components import running_fake_cluster
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


async def ask(fakes: Any, api: str, priority: int) -> tuple[int, int]:
    """The status, 200 for what gRPC serves, and after how many ms a refused client may come again."""
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
async def test_a_flood_costs_no_urgent_request_its_answer(api: str) -> None:
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
