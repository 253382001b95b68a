"""A worker fenced by its node: silent at once, drained, back in a new epoch over the same model and pool."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until, within
from lab.testbed.redis import running_redis
from pillion.config import WorkerFlags
from pillion.engine.scheduling.step_plan import Outcome
from pillion.engine.worker import worker_epoch
from pillion.engine.worker.heartbeat import EpochTerm, Heartbeats
from pillion.engine.worker.worker import Worker
from pillion.errors import DeadlineExceeded, Unavailable
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.node.pool import Pool
from pillion.v1.kvnode_pb2 import HeartbeatReply
from pillion.wire.registry import ComponentRecord
from tests.support.fake_backend import FakeBackend, greedy
from tests.support.redis_nodes import patient
from tests.support.workers import Answer, Workers, answered_first, connected, running_workers, submit_of

UNAVAILABLE = 14
PROMPT = list(range(20))
# The silence that node and workers tolerate.
SHORT = {"heartbeat_timeout_ms": 300}
# Longer than SHORT: the node counts silence in real time.
WARM_UP_S = 1.0


def fence(workers: Workers, worker: Worker) -> int:
    """Fence the worker as the node does after a silence; return the ended epoch."""
    epoch = worker.epoch.number
    workers.kvnode.pool.ledger.fence(epoch)
    return epoch


async def returned(worker: Worker, old: int) -> None:
    await until("the new epoch", lambda: worker.epoch.number != old and not worker.epoch.over)


async def lost(answer: Answer) -> None:
    """Assert that its end is a retryable error."""
    await answer.ended()
    assert answer.last is not None
    assert answer.last.error is not None
    assert (answer.last.error.code, answer.last.error.retryable) == (UNAVAILABLE, True)


async def test_a_fenced_decode_worker_rejoins_without_reloading() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        worker, backend = workers.decode.worker, workers.decode_backend
        ticket = await workers.ticket(PROMPT)
        backend.hold_after = 40
        answer = await connection.submit(submit_of(1, ticket, PROMPT, 900))
        await until("a token and the commits", lambda: answer.token_ids and len(workers.kvnode.pool.ledger.tree) >= 5)
        old = fence(workers, worker)
        await lost(answer)
        backend.hold_after = None
        backend.gate.set()
        received = list(answer.token_ids)
        assert received == greedy(PROMPT, len(received))
        await returned(worker, old)
        assert workers.decode_backend.bound == 1, "the pool was bound again"
        assert worker.attachment.epoch == old, "the attachment stands"
        other = await workers.ticket(PROMPT)
        assert other.pinned_blocks == 4, "what it had committed is found"
        again = await connection.submit(submit_of(2, other, PROMPT, 30))
        await again.ended()
        assert again.token_ids == greedy(PROMPT, 30)
        assert answer.token_ids == received, "an old epoch's stream emitted again"
        await workers.release(ticket, other)
        await workers.quiet()
        assert (await workers.node.status()).quarantined_blocks == 0
        # A second one changes nothing: the first attachment still ends it all.
        await returned(worker, fence(workers, worker))
        await workers.decode.stop(0.0)
        await until("the worker's end at the node", lambda: len(workers.kvnode.pool.ledger.holders) == 2)
        await workers.quiet()


async def test_a_fenced_prefill_worker_rejoins() -> None:
    async with running_workers(prefill={"max_num_batched_prefill_tokens": 8}) as workers:
        tokens = list(range(41))
        ticket = await workers.ticket(tokens)
        workers.prefill_backend.gate.clear()
        call = workers.prefill_stub.RunPrefill(workers.prefill_range(ticket, tokens, (16, 24)), timeout=WITHIN_S)
        await until("the prefill range", lambda: workers.prefill.worker.epoch.listeners)
        old = fence(workers, workers.prefill.worker)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [one async for one in call if not one.HasField("queued")] == []
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        workers.prefill_backend.gate.set()
        await returned(workers.prefill.worker, old)
        prefill_range = workers.prefill_range(ticket, tokens, (16, 24))
        acks = [
            one
            async for one in workers.prefill_stub.RunPrefill(prefill_range, timeout=WITHIN_S)
            if not one.HasField("queued")
        ]
        assert [ack.end_tokens for ack in acks] == [16, 40]
        await workers.release(ticket)
        await workers.quiet()


async def test_a_worker_reports_drained_only_after_its_step_has_ended() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        worker, ticket = workers.decode.worker, await workers.ticket(PROMPT)
        workers.decode_backend.gate.clear()
        answer = await connection.submit(submit_of(1, ticket, PROMPT))
        await until("a step at the gate", workers.decode_backend.waiting.is_set)
        old = fence(workers, worker)
        await lost(answer)
        # The step may still store: none of its slots is free, and no new request is admitted.
        late = await connection.submit(submit_of(2, ticket, PROMPT))
        await lost(late)
        books = await workers.node.status()
        assert worker.epoch.over
        assert (tuple(books.fenced_components), books.quarantined_blocks) == (("decode-0",), 6)
        await workers.node.check_integrity()
        workers.decode_backend.gate.set()
        await returned(worker, old)
        assert (await workers.node.status()).quarantined_blocks == 0
        await workers.release(ticket)
        await workers.quiet()


async def test_a_fenced_worker_leaves_and_reenters_the_registry() -> None:
    with running_redis() as redis:
        registry = patient(Registry(redis.url, 5000))
        # Slots that it does not return itself would stay for a minute.
        flags = {"redis_url": redis.url, "heartbeat_timeout_ms": 60_000}
        async with running_workers(decode=flags) as workers:

            async def known() -> bool:
                return "decode-0" in {component.component_id for component in await registry.components()}

            async def unknown() -> bool:
                return not await known()

            await until("its record", known)
            workers.decode_backend.gate.clear()
            ticket = await workers.ticket(PROMPT)
            async with connected(workers) as connection:
                await connection.submit(submit_of(1, ticket, PROMPT))
                await until("a step at the gate", workers.decode_backend.waiting.is_set)
                fence(workers, workers.decode.worker)
                await until("the end of its record", unknown)
                workers.decode_backend.gate.set()
                await until("its record again", known)
            await workers.release(ticket)
            await workers.quiet()
        await registry.aclose()


async def test_tokens_not_acknowledged_in_time_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused process may be fenced without knowing, so it sends nothing."""
    async with running_workers(decode=SHORT) as workers, connected(workers) as connection:
        worker, backend = workers.decode.worker, workers.decode_backend
        asked, asking, sent = asyncio.Event(), asyncio.Event(), list[int]()
        # The last block then has room for three more tokens: held outcomes ask for slots in vain.
        backend.hold_after = 22
        real, publish = worker.node.heartbeat, worker.epoch._steps._on_outcome

        def counted(outcome: Outcome) -> None:
            sent.extend(token for update in outcome.updates for token in update.token_ids)
            publish(outcome)

        monkeypatch.setattr(worker.epoch._steps, "_on_outcome", counted)

        async def unanswered(epoch: int, **options: Any) -> HeartbeatReply:
            asked.set()
            await asking.wait()
            return await real(epoch, **options)

        ticket = await workers.ticket(PROMPT)
        answer = await connection.submit(submit_of(1, ticket, PROMPT, 500))
        await until("a step at the gate", backend.waiting.is_set)
        monkeypatch.setattr(worker.node, "heartbeat", unanswered)
        await asked.wait()
        await until("the term's end", lambda: not worker.epoch._steps._may_publish())
        received = len(sent)
        await until("everything that was sent before", lambda: len(answer.token_ids) == received)
        backend.hold_after = None
        backend.gate.set()
        await until("outcomes that are held back", lambda: worker.epoch.held_back >= 3)
        await loop_turns()
        assert len(sent) == len(answer.token_ids) == received
        asking.set()
        await answer.ended()
        assert answer.token_ids == greedy(PROMPT, 500), "a token was lost, or sent twice"
        await workers.release(ticket)
        await workers.quiet()


def test_a_lease_is_over_before_the_node_can_fence() -> None:
    now = [100.0]
    term = EpochTerm(5.0, lambda: now[0])
    assert not term.valid(), "nobody has acknowledged anything yet"
    term.renew(99.0)
    assert term.valid()
    now[0] = 104.1
    assert not term.valid(), "the node may have received it as early as it was begun"


class SlowNode:
    """Answers the first heartbeat late: we were paused meanwhile, say. ``now`` is the worker's clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.beats = 0

    async def heartbeat(self, epoch: int) -> HeartbeatReply:
        self.beats += 1
        if self.beats == 1:
            self.now += 0.3
        return HeartbeatReply(fenced=False, recall_blocks=0)


async def test_a_late_heartbeat_reply_does_not_renew_the_term() -> None:
    node, held, failures = SlowNode(), list[bool](), list[object]()
    term = EpochTerm(0.2, lambda: node.now)
    heartbeat = Heartbeats(
        WorkerFlags(heartbeat_ms=10, heartbeat_timeout_ms=200),
        node,  # type: ignore[arg-type]
        1,
        term,
        describe=lambda: ComponentRecord(component_id="w", role="decode", address=""),
        on_lost=failures.append,
        on_fail=failures.append,
        on_renewed=lambda: held.append(term.valid()),
        on_recall=failures.append,
    )
    beating = asyncio.create_task(heartbeat.run())
    await until("two answers", lambda: len(held) >= 2)
    beating.cancel()
    assert held[:2] == [False, True]
    assert not failures


async def test_slots_granted_after_the_fence_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        worker, answered, go_on = workers.decode.worker, asyncio.Event(), asyncio.Event()
        real = worker.node.adopt

        async def late(epoch: int, ticket_id: int, lease_blocks: int, **options: Any) -> Any:
            adopted = await real(epoch, ticket_id, lease_blocks, **options)
            answered.set()
            await go_on.wait()
            return adopted

        monkeypatch.setattr(worker.node, "adopt", late)
        # Short: one call leases all slots.
        ticket = await workers.ticket(PROMPT[:3])
        answer = await connection.submit(submit_of(1, ticket, PROMPT[:3]))
        await answered.wait()
        await returned(worker, fence(workers, worker))
        go_on.set()
        await lost(answer)
        again = await connection.submit(submit_of(2, ticket, PROMPT[:3], 10))
        await again.ended()
        assert again.token_ids == greedy(PROMPT[:3], 10)
        await workers.release(ticket)
        await workers.quiet()


async def test_a_lost_reply_ends_the_epoch_but_not_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown which slots it moved. The worker is silent until it is fenced."""
    async with running_workers() as workers, connected(workers) as connection:
        worker = workers.decode.worker
        old, real = worker.epoch.number, worker.node.commit

        async def unanswered(epoch: int, runs: Any, **options: Any) -> Any:
            await real(epoch, runs, **options)
            raise DeadlineExceeded("no answer in time")

        monkeypatch.setattr(worker.node, "commit", unanswered)
        ticket = await workers.ticket(PROMPT)
        answer = await connection.submit(submit_of(1, ticket, PROMPT))
        await lost(answer)
        monkeypatch.undo()
        assert worker.epoch.over
        with pytest.raises(Unavailable):
            worker.check_open()
        # The node fences a worker like this after a silence as long as the limit.
        fence(workers, worker)
        await returned(worker, old)
        worker.check_open()
        # Commits stand, all of the prompt under this ticket: a new ticket leaves one token to compute.
        other = await workers.ticket(PROMPT)
        again = await connection.submit(submit_of(2, other, PROMPT))
        await again.ended()
        assert again.token_ids == greedy(PROMPT, 8)
        await workers.release(ticket, other)
        await workers.quiet()


async def test_a_worker_exits_if_the_node_grants_no_new_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_epoch, "REATTACH_RETRY_S", 0.01)
    async with running_workers() as workers:
        asked = []

        async def refused(epoch: int) -> int:
            asked.append(epoch)
            raise Unavailable("not now")

        monkeypatch.setattr(workers.decode.worker.node, "reattach", refused)
        old = fence(workers, workers.decode.worker)
        reason = await within("the decode worker to fail", workers.decode.wait_failed())
        assert "no new epoch" in reason
        assert asked == [old] * worker_epoch.MAX_REATTACH_TRIES
        with pytest.raises(Unavailable):
            workers.decode.worker.check_open()


async def test_stopping_ends_a_pending_reattach(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers() as workers:
        worker = workers.decode.worker

        async def never(epoch: int) -> int:
            return await asyncio.Future()

        monkeypatch.setattr(worker.node, "reattach", never)
        fence(workers, worker)
        await until("the fence to be noticed", lambda: worker.epoch.over)
        await within("the decode worker to stop", workers.decode.stop(0.0))
        await until("its end at the node", lambda: not workers.kvnode.pool.ledger.status().fenced_components)
        await workers.node.check_integrity()


async def test_stopping_ends_the_wait_for_a_node_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers() as workers:
        worker, waits, ended = workers.decode.worker, threading.Event(), list[bool]()

        def renew(*words: Any) -> None:
            waits.set()
            ended.append(words[-1].wait(WITHIN_S))

        monkeypatch.setattr(worker.attachment, "pool_id", "kept")
        monkeypatch.setattr(worker.attachment, "renew", renew)
        worker._on_node_gone()
        await until("the worker to wait for its node", waits.is_set)
        await within("the decode worker to stop", workers.decode.stop(0.0))
        assert ended == [True], "its thread uses the attachment, and was not waited for"


async def test_a_recall_by_the_node_returns_free_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for memory at the node makes a decode worker return free slots while a stream runs."""
    async with running_workers() as workers, connected(workers) as connection:
        backend = workers.decode_backend
        pool, returned, recalls = workers.kvnode.pool, list[int](), list[int]()
        return_slots, heartbeat = pool.return_slots, pool.heartbeat

        def record_slots(epoch: int, slots: Sequence[int]) -> None:
            return_slots(epoch, slots)
            returned.extend(slots)

        def record_recall(epoch: int) -> HeartbeatReply:
            reply = heartbeat(epoch)
            if reply.recall_blocks and epoch == workers.decode.worker.epoch.number:
                recalls.append(reply.recall_blocks)
            return reply

        monkeypatch.setattr(pool, "return_slots", record_slots)
        monkeypatch.setattr(pool, "heartbeat", record_recall)
        answers, tickets = [], []
        backend.gate.clear()
        for key in (1, 2, 3, 4):
            prompt = [key, *PROMPT]
            tickets.append(await workers.ticket(prompt))
            answers.append(await connection.submit(submit_of(key, tickets[-1], prompt, 900)))
        await until("all streams", lambda: len(workers.decode.worker.epoch.listeners) == 4)
        backend.hold_after = 12
        backend.gate.set()
        await until("a token of each", lambda: backend.waiting.is_set() and all(a.token_ids for a in answers))
        await workers.release(*tickets)
        # Slots of ended streams become free slots until they are recalled.
        for key in (2, 3, 4):
            await connection.cancel(key)
        assert not returned
        # Otherwise the stream could take all of them before the recall and their return.
        answered_first(workers)
        waiting = asyncio.create_task(workers.node.open_ticket(workers.session.epoch, b"", pool.ledger.num_slots))
        asked = 0

        def let_steps_pass() -> list[int]:
            """Run some steps for each arrived recall: the first may come before the streams have ended."""
            nonlocal asked
            if not returned and len(recalls) >= asked + 2:
                asked, backend.hold_after = len(recalls), len(backend.steps) + 12
                backend.gate.set()
            return returned

        await until("slots of the free ones", let_steps_pass)
        assert answers[0].last is None, "the stream still runs"
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await connection.cancel(1)
        backend.hold_after = None
        backend.gate.set()
        await workers.quiet()


class SlowToWarm(FakeBackend):
    """A backend whose warm-up takes longer than a worker may be silent."""

    def warm_up(self, max_tokens: int) -> None:
        time.sleep(WARM_UP_S)


async def test_a_worker_is_not_fenced_while_it_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts from its first heartbeat: it is neither fenced nor killed before."""
    beats, fenced_unheard = Counter[int](), list[int]()
    heartbeat, fence = Pool.heartbeat, Ledger.fence

    def counted(pool: Pool, epoch: int) -> HeartbeatReply:
        beats[epoch] += 1
        return heartbeat(pool, epoch)

    def noted(ledger: Ledger, epoch: int) -> Any:
        # A later heartbeat may be late on a busy machine.
        if not beats[epoch]:
            fenced_unheard.append(epoch)
        return fence(ledger, epoch)

    monkeypatch.setattr(Pool, "heartbeat", counted)
    monkeypatch.setattr(Ledger, "fence", noted)
    async with running_workers(node=SHORT, decode=SHORT, prefill=SHORT, backend=SlowToWarm) as workers:
        epochs = [component.worker.attachment.epoch for component in (workers.prefill, workers.decode)]
        await until("a heartbeat of each", lambda: all(beats[epoch] for epoch in epochs))
        assert not fenced_unheard
        await workers.quiet()
