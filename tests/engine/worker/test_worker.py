"""A worker's life around its streams: the node's end, the registry, stopping. Fencing: test_fencing.py."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lab.testbed.conditions import WITHIN_S, until, within
from lab.testbed.redis import running_redis
from pillion.config import DecodeFlags
from pillion.decode_service.assemble import start_decode
from pillion.engine.worker import worker as worker_module
from pillion.engine.worker.worker import WARM_UP_TOKENS
from pillion.errors import ConfigError
from pillion.kvstore.index import registry as registry_module
from pillion.kvstore.index.registry import Registry
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, factory, greedy
from tests.support.redis_nodes import patient
from tests.support.workers import BLOCK, connected, running_workers, submit_of

UNAVAILABLE = 14
PROMPT = list(range(20))


async def test_a_worker_exits_when_its_node_exits() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        ticket, backend = await workers.ticket(PROMPT), workers.decode_backend
        backend.hold_after = 20
        answer = await connection.submit(submit_of(1, ticket, PROMPT, 900))
        await until("a step at the gate and a token", lambda: backend.waiting.is_set() and answer.token_ids)
        await workers.kvnode.stop(0.0)
        reason = await within("the decode worker to fail", workers.decode.wait_failed())
        assert "KV node" in reason
        assert "KV node" in await within("the prefill worker to fail", workers.prefill.wait_failed())
        await answer.ended()
        assert answer.last is not None
        assert answer.last.error is not None
        assert (answer.last.error.code, answer.last.error.retryable) == (UNAVAILABLE, True)
        backend.gate.set()


async def test_a_task_that_is_cancelled_by_nobody_ends_the_worker() -> None:
    """Without updates to the node nothing would be committed, and every prompt would wait for ever."""
    async with running_workers() as workers:
        epoch = workers.decode.worker.epoch
        next(iter(epoch._tasks)).cancel()
        assert "cancelled unexpectedly" in await within("the worker to fail", workers.decode.wait_failed())


async def test_stopping_lets_streams_finish_and_refuses_new_ones() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        workers.decode_backend.gate.clear()
        tickets = [await workers.ticket(PROMPT), await workers.ticket(PROMPT)]
        answer = await connection.submit(submit_of(1, tickets[0], PROMPT, 12))
        await until("the stream", lambda: workers.decode.worker.epoch.listeners)
        stopping = asyncio.create_task(workers.decode.stop(WITHIN_S))
        await until("the stop to be noticed", lambda: workers.decode.worker.draining)
        late = await connection.submit(submit_of(2, tickets[1], PROMPT))
        await late.ended()
        assert late.last is not None
        assert late.last.error is not None
        assert late.last.error.code == UNAVAILABLE
        workers.decode_backend.gate.set()
        await stopping
        assert answer.token_ids == greedy(PROMPT, 12)
        assert answer.last is not None
        assert answer.last.error is None
        await workers.release(*tickets)
        await workers.quiet()


async def test_the_registry_shows_the_worker_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    # Deregistration also calls Redis.
    monkeypatch.setattr(registry_module, "REGISTRY_DEADLINE_MS", 30_000)
    with running_redis() as redis:
        url = redis.url
        async with running_workers(decode={"redis_url": url, "served_model_name": "shown"}) as workers:
            registry = patient(Registry(url, 5000))
            (record,) = await until("the worker's record", registry.components)
            assert record.component_id == "decode-0"
            assert (record.role, record.model, record.address) == ("decode", "shown", workers.decode.address)
            assert (record.node_id, record.vocab_size, record.block_size_tokens) == ("kvnode-0", VOCAB_SIZE, BLOCK)
            assert record.max_model_len_tokens == 1024
            assert bytes.fromhex(record.namespace) == workers.decode.worker.model.namespace()
            await workers.decode.stop(0.0)
            assert await registry.components() == []
            await registry.aclose()


async def test_a_worker_with_another_layout_is_refused_at_start() -> None:
    async with running_workers() as workers:
        flags = DecodeFlags(
            attach_socket=str(workers.folder / "a.sock"), listen=f"unix:{workers.folder}/e.sock", block_size=8
        )
        with pytest.raises(ConfigError):
            await start_decode(flags, backend_factory=factory(FakeBackend(8)))


class _DelayedTurn:
    """A turn that comes when the test says so."""

    def __init__(self) -> None:
        self.waited_for, self.come = threading.Event(), threading.Event()

    @property
    def waiting(self) -> bool:
        return not self.come.is_set()

    def wait(self) -> float:
        self.waited_for.set()
        assert self.come.wait(WITHIN_S), f"waited {WITHIN_S:g} s for the test to let it come"
        return 0.0


class _NotedWarmUps(FakeBackend):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.warm_ups: list[int] = []

    def warm_up(self, max_tokens: int) -> None:
        self.warm_ups.append(max_tokens)


async def test_a_standby_worker_is_warm_before_its_turn_to_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then nobody sees it."""
    attached, attach = [], worker_module.attach
    monkeypatch.setattr(worker_module, "attach", lambda *a, **named: attached.append(a) or attach(*a, **named))
    async with running_workers() as workers:
        backend, turn, socket = _NotedWarmUps(BLOCK), _DelayedTurn(), workers.folder / "e.sock"
        flags = DecodeFlags(
            component_id="decode-1",
            attach_socket=str(workers.folder / "a.sock"),
            listen=f"unix:{socket}",
            block_size=BLOCK,
            cpu_threads=1,
        )
        attached.clear()
        starting = asyncio.create_task(start_decode(flags, backend_factory=factory(backend), turn=turn))
        await until("it to stand by", turn.waited_for.is_set)
        assert (backend.warm_ups, attached, socket.exists()) == ([WARM_UP_TOKENS], [], False)
        turn.come.set()
        serving = await starting
        try:
            assert len(attached) == len(backend.warm_ups) == 1
            assert socket.exists()
        finally:
            await serving.stop(0.0)


async def test_a_slow_registry_does_not_shorten_the_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grace period of a stop begins when the worker is told to end, not when the registry knows."""
    loop, grace_s, left = asyncio.get_running_loop(), 3600.0, asyncio.Event()
    async with running_workers() as workers, connected(workers) as connection:
        worker, backend = workers.decode.worker, workers.decode_backend
        backend.hold_after = 20
        answer = await connection.submit(submit_of(1, await workers.ticket(PROMPT), PROMPT, 900))
        await until("a token", lambda: answer.token_ids)
        with monkeypatch.context() as patch:
            # For the worker, it is as if the registry had answered late.
            now = loop.time
            patch.setattr(loop, "time", lambda: now() - 2 * grace_s)

            async def leave(component_id: str) -> None:
                patch.undo()
                left.set()

            patch.setattr(worker.epoch.heartbeats, "leave", leave)
            drain = asyncio.create_task(worker.drain(grace_s))
            await left.wait()
        await within("the drain", drain)
        assert not worker.epoch.idle.is_set()
        backend.hold_after = None
        backend.gate.set()
