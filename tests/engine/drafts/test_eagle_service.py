"""Streams with an EAGLE head over a real node: cached prompts, parallel samples, fences and cancellations; nothing
leaks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from lab.testbed.conditions import until
from pillion.engine.drafts import worker_drafts
from pillion.engine.drafts.draft_chains import DraftShape
from pillion.settings.speculative_config import SpeculativeConfig
from tests.engine.drafts.test_draft_service import (
    answers_of,
    chains_of,
    draft_by_no_clock,
    finished,
    held_amid_draft_tokens,
    prompt,
)
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, greedy
from tests.support.fake_head import FakeHead
from tests.support.workers import (
    BLOCK,
    Workers,
    answered_first,
    connected,
    running_workers,
    submit_of,
)

DRAFT_TOKENS = 3


@contextlib.asynccontextmanager
async def heading(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Workers, FakeHead]]:
    """Yield workers whose decode worker has the fake head, and the head."""
    draft_by_no_clock(monkeypatch)
    head = FakeHead(FakeBackend(BLOCK, "head"))
    shape = DraftShape(bytes(32), BLOCK, VOCAB_SIZE, 1024, DRAFT_TOKENS, 256, reads_states=True)
    monkeypatch.setattr(worker_drafts, "load_draft", lambda *arguments, **named: (shape, head))
    config = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=DRAFT_TOKENS)
    async with running_workers(decode={"speculative_config": config}) as workers:
        workers.decode_backend.set_aux_hidden_state_layers((0,))
        yield workers, head


async def test_a_cached_prompt_is_drafted_from_its_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    async with heading(monkeypatch) as (workers, head), connected(workers) as connection:
        answered_first(workers)
        answer = await finished(workers, connection, 1, prompt(1, 30), 60)
        assert answer.token_ids == greedy(prompt(1, 30), 60)
        assert len(workers.decode_backend.steps) < 45
        assert head.contexts[0] >= 30
        await workers.quiet()
        before = len(head.contexts)
        again = await finished(workers, connection, 2, prompt(1, 30), 20)
        assert again.token_ids == answer.token_ids[:20]
        assert head.contexts[before] < 28
        await workers.quiet()


async def test_seeds_and_parallel_samples_get_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        plain = await answers_of(workers, connection)
    async with heading(monkeypatch) as (workers, head), connected(workers) as connection:
        answered_first(workers)
        assert await answers_of(workers, connection) == plain
        assert head.drafted
        await workers.quiet()


async def test_a_fenced_worker_drafts_again_in_its_new_epoch_with_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async with heading(monkeypatch) as (workers, head), connected(workers) as connection:
        worker = workers.decode.worker
        answered_first(workers)
        ticket = await workers.ticket(prompt(1, 30))
        answer = await connection.submit(submit_of(1, ticket, prompt(1, 30), 900))
        await held_amid_draft_tokens(workers, lambda: head.drafted > 8)
        old = worker.epoch.number
        workers.kvnode.pool.fence(old)
        workers.decode_backend.gate.set()
        await answer.ended()
        await until("a new epoch", lambda: worker.epoch.number != old and not worker.epoch.over)
        await workers.release(ticket)
        await workers.quiet()
        answered_first(workers)
        drafted = head.drafted
        again = await finished(workers, connection, 2, prompt(2, 30), 300)
        assert again.token_ids == greedy(prompt(2, 30), 300)
        assert head.drafted > drafted
        await workers.quiet()


async def test_cancelled_streams_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with heading(monkeypatch) as (workers, head), connected(workers) as connection:
        for key in range(1, 4):
            ticket = await workers.ticket(prompt(key, 30))
            drafted = head.drafted
            answer = await connection.submit(submit_of(key, ticket, prompt(key, 30), 900))
            await until("draft_tokens", lambda: head.drafted > drafted or answer.over.is_set())  # noqa: B023
            await connection.cancel(key)
            await workers.release(ticket)
        await workers.quiet()
        assert not (await chains_of(workers)).chains
