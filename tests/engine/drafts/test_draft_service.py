"""Streams with a draft model over a real node: hits, parallel samples, fences, recalls and grammars; nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until, within
from pillion.engine.drafts import draft_chains, draft_control, worker_drafts
from pillion.engine.drafts.draft_chains import DraftChains, DraftShape
from pillion.engine.drafts.draft_control import DraftControl
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.scheduling.sequence import Sequence as Stream
from pillion.engine.worker.heartbeat import Heartbeats
from pillion.kernels.step import StepBatch
from pillion.kvstore.hashing import chain_hashes, request_root
from pillion.settings.speculative_config import SpeculativeConfig
from pillion.v1 import decode_pb2
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, greedy
from tests.support.workers import (
    BLOCK,
    GREEDY,
    ROOT,
    Answer,
    Connection,
    Workers,
    answered,
    answered_first,
    connected,
    prompt,
    running_workers,
    submit_of,
)

DRAFT_TOKENS = 3
NAMESPACE = b"\2" * 32


def as_many_as_fit(control: DraftControl, streams: Sequence[Stream], room: Sequence[int], left: int) -> list[int]:
    shares = []
    for most in room:
        shares.append(min(control.max_draft_tokens, most, left))
        left -= shares[-1]
    return shares


def draft_by_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as much as fits, whatever steps take."""
    monkeypatch.setattr(DraftControl, "shares", as_many_as_fit)
    monkeypatch.setattr(draft_control, "MIN_SPEEDUP", 0.0)


@contextlib.asynccontextmanager
async def drafting(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[tuple[Workers, FakeBackend]]:
    """Yield workers whose decode worker has the fake draft model, and that model's backend.

    Measured times of fakes on a loaded machine could prevent drafting, so they are ignored.
    """
    draft_by_no_clock(monkeypatch)
    monkeypatch.setattr(DraftModel, "seconds_per_token", lambda model, sequences: 0.0)
    backend = FakeBackend(BLOCK, "draft")
    shape = DraftShape(NAMESPACE, BLOCK, VOCAB_SIZE, 1024, DRAFT_TOKENS, 256)
    draft = DraftModel(backend, backend.layout.block_bytes, VOCAB_SIZE)
    monkeypatch.setattr(worker_drafts, "load_draft", lambda *arguments, **named: (shape, draft))
    config = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=DRAFT_TOKENS)
    async with running_workers(decode={"speculative_config": config}, **options) as workers:
        yield workers, backend


async def finished(
    workers: Workers, connection: Connection, key: int, tokens: list[int], count: int, **other: Any
) -> Answer:
    ticket = await workers.ticket(tokens)
    answer = await connection.submit(submit_of(key, ticket, tokens, count, **other))
    await answer.ended()
    await workers.release(ticket)
    return answer


async def held_amid_draft_tokens(workers: Workers, drafted: Callable[[], bool]) -> None:
    """Return once there are draft tokens and the decode worker's next step waits at its backend's gate.

    Before that, each step waits for the node: a stream could otherwise end before its draft has a ticket.
    """
    main = workers.decode_backend
    await until("draft_tokens", drafted)
    main.gate.clear()
    await until("a step that waits", main.waiting.is_set)
    main.before_step = lambda batch: None


async def chains_of(workers: Workers) -> DraftChains:
    found = await workers.decode.worker.epoch._ask(lambda scheduler: scheduler.drafts and scheduler.drafts.draft_chains)
    assert found is not None
    return found


async def test_draft_model_blocks_are_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with drafting(monkeypatch) as (workers, draft), connected(workers) as connection:
        answered_first(workers)
        answer = await finished(workers, connection, 1, prompt(1, 30), 60)
        assert answer.token_ids == greedy(prompt(1, 30), 60)
        assert len(workers.decode_backend.steps) < 45
        await workers.quiet()
        root = request_root(NAMESPACE, cache_salt=ROOT.hex())
        hashes = chain_hashes(root, [*prompt(1, 30), *answer.token_ids], BLOCK)
        ticket = await workers.node.open_ticket(workers.session.epoch, hashes[:-32], len(hashes) // 32)
        assert ticket.pinned_blocks > 15
        await workers.release(ticket)
        first, before = draft.steps[0], len(draft.steps)
        assert first >= 30
        await finished(workers, connection, 2, prompt(1, 30), 20)
        assert max(draft.steps[before:]) < first / 2
        await workers.quiet()


async def test_seeds_and_parallel_samples_get_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        plain = await answers_of(workers, connection)
    async with drafting(monkeypatch) as (workers, draft), connected(workers) as connection:
        answered_first(workers)
        assert await answers_of(workers, connection) == plain
        assert draft.steps
        await workers.quiet()


async def answers_of(workers: Workers, connection: Connection) -> list[list[int]]:
    sampled = replace(GREEDY, temperature=1.0, seed=7)
    parallel_samples = [decode_pb2.Sibling(key=key, seed=key) for key in (2, 3)]
    others = [connection.answers.setdefault(sample.key, Answer()) for sample in parallel_samples]
    first = await finished(workers, connection, 1, prompt(1, 30), 30, sampling=sampled, siblings=parallel_samples)
    for other in others:
        await other.ended()
    return [answer.token_ids for answer in (first, *others)]


async def test_a_fenced_worker_drafts_again_in_its_new_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafting(monkeypatch) as (workers, draft), connected(workers) as connection:
        worker = workers.decode.worker
        answered_first(workers)
        ticket = await workers.ticket(prompt(1, 30))
        answer = await connection.submit(submit_of(1, ticket, prompt(1, 30), 900))
        await held_amid_draft_tokens(workers, lambda: len(draft.steps) > 8)
        old = worker.epoch.number
        workers.kvnode.pool.fence(old)
        workers.decode_backend.gate.set()
        await answer.ended()
        assert answer.last is not None
        assert answer.last.error is not None
        await until("a new epoch", lambda: worker.epoch.number != old and not worker.epoch.over)
        await workers.release(ticket)
        await workers.quiet()
        answered_first(workers)
        before = len(draft.steps)
        again = await finished(workers, connection, 2, prompt(2, 30), 300)
        assert again.token_ids == greedy(prompt(2, 30), 300)
        assert len(draft.steps) > before
        await workers.quiet()


async def test_drafts_free_memory_for_a_prompt_waiting_at_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_chains, "PAUSE_S", math.inf)
    node = {"decode_reserve_percent": 0}
    async with drafting(monkeypatch, slots=64, node=node) as (workers, draft), connected(workers) as connection:
        main, heartbeats = workers.decode_backend, workers.decode.worker.epoch.heartbeats
        answered_first(workers)
        wait_for_node = main.before_step

        def until_drafted(batch: StepBatch) -> None:
            wait_for_node(batch)
            if draft.steps:
                main.gate.clear()

        main.before_step = until_drafted
        first = await workers.ticket(prompt(1, 40))
        answer = await connection.submit(submit_of(1, first, prompt(1, 40), 60))
        await until("a step that waits", main.waiting.is_set)
        await answered(workers)
        recalls = recalls_of(heartbeats, monkeypatch)
        books = await workers.node.status()
        held = books.leased_blocks + books.pinned_blocks
        # More than stream and draft leave free, but not more than the stream alone does.
        wanted = (64 - held + 4) * BLOCK
        asked = asyncio.create_task(workers.ticket(prompt(3, wanted)))
        await until("a prompt that waits", lambda: len(workers.kvnode.pool.waiting) == 1)
        await until("the node's recall at the worker", lambda: recalls)
        # The slots are recalled in a few steps, each of which waits for the node. The stream still runs then.
        last_step, goes_on = len(main.steps) + 4, threading.Event()

        def few_steps(batch: StepBatch) -> None:
            wait_for_node(batch)
            assert len(main.steps) < last_step or goes_on.wait(WITHIN_S), "the prompt has no ticket"

        main.before_step = few_steps
        main.gate.set()
        second = await within("the prompt's ticket", asked)
        assert not answer.over.is_set()
        await workers.release(second)
        goes_on.set()
        await answer.ended()
        assert answer.token_ids == greedy(prompt(1, 40), 60)
        await workers.release(first)
        await workers.quiet()


def recalls_of(heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets each recall before the scheduler of the heartbeats' worker does."""
    recalls: list[int] = []
    hear = heartbeats.on_recall

    def heard(blocks: int) -> None:
        hear(blocks)
        recalls.append(blocks)

    monkeypatch.setattr(heartbeats, "on_recall", heard)
    return recalls


async def test_a_cancelled_stream_leaves_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafting(monkeypatch) as (workers, draft), connected(workers) as connection:
        answered_first(workers)
        for key in range(1, 6):
            ticket = await workers.ticket(prompt(key, 30))
            answer = await connection.submit(submit_of(key, ticket, prompt(key, 30), 900))
            # The first ends before its draft's ticket arrives. One without useful drafts ends by itself.
            passes = len(draft.steps) + (key > 1)
            await until("passes", lambda: len(draft.steps) >= passes or answer.over.is_set())  # noqa: B023
            await connection.cancel(key)
            await workers.release(ticket)
        await workers.quiet()
        chains = await chains_of(workers)
        assert not chains.chains


async def test_lost_blocks_at_the_node_cost_only_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafting(monkeypatch) as (workers, draft), connected(workers) as connection:
        answered_first(workers)
        await finished(workers, connection, 1, prompt(1, 30), 20)
        await workers.quiet()
        ledger = workers.kvnode.pool.ledger
        while len(ledger.tree.policy):
            ledger.free.append(ledger._evicted(ledger.tree.evict()))
        before = len(draft.steps)
        answer = await finished(workers, connection, 2, prompt(1, 30), 20)
        assert answer.token_ids == greedy(prompt(1, 30), 20)
        assert max(draft.steps[before:]) >= 30, "its prompt was not computed again"
        await workers.quiet()


async def test_a_failing_draft_model_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafting(monkeypatch) as (workers, draft), connected(workers) as connection:
        answered_first(workers)

        def fail(batch: object) -> None:
            raise RuntimeError("no")

        draft.before_step = fail
        answer = await finished(workers, connection, 1, prompt(1, 30), 20)
        assert answer.token_ids == greedy(prompt(1, 30), 20)
        draft.before_step = lambda batch: None
        # NaN logits draft nothing.
        draft.broken = answer.token_ids[3]
        again = await finished(workers, connection, 2, prompt(1, 30), 20)
        assert again.token_ids == answer.token_ids
        await workers.quiet()


async def test_stopping_midway_returns_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafting(monkeypatch) as (workers, draft), connected(workers) as connection:
        answered_first(workers)
        ticket = await workers.ticket(prompt(1, 30))
        await connection.submit(submit_of(1, ticket, prompt(1, 30), 900))
        await held_amid_draft_tokens(workers, lambda: len(draft.steps) > 8)
        stopping = asyncio.create_task(workers.decode.stop(0.0))
        await loop_turns()
        workers.decode_backend.gate.set()
        await stopping
        await workers.release(ticket)
        await workers.quiet()
