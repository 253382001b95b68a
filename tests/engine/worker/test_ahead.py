"""Workers whose device runs ahead, over a real node and real gRPC: the streams are those of a device that does not, and
nothing that a step under way uses goes back to the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until, within
from pillion.engine.worker.worker import Worker
from pillion.kernels.step import StepBatch
from pillion.types import SamplingParams, TokenLogprob
from tests.support.ahead_backend import AheadBackend, watch
from tests.support.fake_backend import FakeBackend, greedy
from tests.support.workers import Answer, Connection, Workers, connected, prompt, running_workers, submit_of

INTERNAL, UNAVAILABLE = 13, 14
Heard = list[tuple[list[int], list[TokenLogprob]]]


@contextlib.asynccontextmanager
async def ahead_workers(**flags: Any) -> AsyncIterator[tuple[Workers, AheadBackend]]:
    """Run both workers ahead. Asserts that nothing is left in the end, and nothing was taken from a running step."""
    async with running_workers(backend=AheadBackend, **flags) as workers:
        decode, prefill = workers.decode_backend, workers.prefill_backend
        assert isinstance(decode, AheadBackend)
        assert isinstance(prefill, AheadBackend)
        found = watch(workers.kvnode.pool.ledger, decode, prefill)
        yield workers, decode
        await workers.quiet()
        await until("the last landing", lambda: not (decode.under_way or prefill.under_way))
        assert not found


async def start(workers: Workers, connection: Connection, key: int, tokens: list[int], **flags: Any) -> Answer:
    ticket = await workers.ticket(tokens)
    answer = await connection.submit(submit_of(key, ticket, tokens, **flags))
    await until("the first token", lambda: answer.token_ids or answer.last)
    await workers.release(ticket)
    return answer


async def start_together(
    workers: Workers, connection: Connection, texts: dict[int, list[int]], **flags: Any
) -> list[Answer]:
    """Start a stream for each key; the first step ends once the worker knows all of them."""
    backend = workers.decode_backend
    backend.gate.clear()
    starting = asyncio.gather(*(start(workers, connection, key, text, **flags) for key, text in texts.items()))
    await until("all streams", lambda: len(workers.decode.worker.epoch.listeners) == len(texts))
    backend.gate.set()
    return await starting


async def over(answer: Answer) -> None:
    await answer.ended()
    assert answer.last is not None


async def test_a_prompt_is_prefilled_and_answered_while_the_host_does_not_know_the_tokens() -> None:
    async with (
        ahead_workers(prefill={"max_num_batched_prefill_tokens": 8}) as (workers, decode),
        connected(workers) as connection,
    ):
        tokens = prompt(1, 45)
        ticket = await workers.ticket(tokens)
        prefill_range = workers.prefill_range(ticket, tokens, (16, 28))
        acks = [
            one
            async for one in workers.prefill_stub.RunPrefill(prefill_range, timeout=WITHIN_S)
            if not one.HasField("queued")
        ]
        assert [ack.end_tokens for ack in acks] == [16, 44]
        answer = await connection.submit(submit_of(1, ticket, tokens, 60))
        await over(answer)
        await workers.release(ticket)
        assert answer.token_ids == greedy(tokens, 60)
        assert decode.steps[0] == 1, "the decode worker had but the last token to compute"
        # All but the first token, or slightly fewer: a decode that waits for a slot lands first.
        assert 30 < decode.resolved <= 59
        assert decode.most_under_way == 2
        assert workers.prefill_backend.most_under_way == 2  # type: ignore[attr-defined]


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "frequency_penalty": 1.0},
    {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 12, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {5: 3.0}},
)


async def all_kinds(workers: Workers) -> Heard:
    """Start streams of every kind of sampling beside each other; one in three has stop ids."""

    async def one(connection: Connection, key: int) -> Answer:
        params = {"top_p": 1.0, "top_k": 0, "seed": key, **KINDS[key % len(KINDS)]}
        stops = tuple(range(20)) if key % 3 == 0 else ()
        answer = await start(
            workers,
            connection,
            key,
            prompt(key, 9),
            max_tokens=30,
            sampling=SamplingParams(**params),
            stop_token_ids=stops,
        )
        await over(answer)
        return answer

    async with connected(workers) as connection:
        answers = await asyncio.gather(*(one(connection, key) for key in range(2 * len(KINDS))))
    return [(answer.token_ids, answer.logprobs) for answer in answers]


async def test_running_ahead_changes_no_kind_of_sampling() -> None:
    flags = {"max_num_seqs": 8}
    async with running_workers(decode=flags) as workers:
        assert type(workers.decode_backend) is FakeBackend
        expected = await all_kinds(workers)
    async with ahead_workers(decode=flags) as (workers, decode):
        assert await all_kinds(workers) == expected
        assert decode.resolved
        assert decode.late_choices, "streams with penalties run ahead, too"
    assert len({tuple(tokens) for tokens, _ in expected}) == len(expected)


async def test_preemption_in_a_small_pool_does_not_change_answers() -> None:
    async with (
        ahead_workers(slots=40, decode={"max_num_seqs": 8}) as (workers, decode),
        connected(workers) as connection,
    ):
        texts = {key: prompt(key, 10) for key in range(6)}
        answers = await start_together(workers, connection, texts, max_tokens=60)
        for key, answer in enumerate(answers):
            await over(answer)
            assert answer.token_ids == greedy(prompt(key, 10), 60)
        assert sum(a.last.timings.preemptions for a in answers if a.last and a.last.timings) > 0
        assert decode.resolved


async def test_cancels_at_any_time_leak_nothing() -> None:
    draw = Random(3)
    async with ahead_workers(slots=120, decode={"max_num_seqs": 6}) as (workers, _), connected(workers) as connection:
        for turn in range(12):
            answers = [
                await start(workers, connection, 10 * turn + key, prompt(key + turn, 6 + 5 * key), max_tokens=900)
                for key in range(3)
            ]
            moment = draw.randrange(12)
            await until("so many tokens", lambda: len(answers[-1].token_ids) >= moment)  # noqa: B023
            for key in range(3):
                await connection.cancel(10 * turn + key)
            for key, answer in enumerate(answers):
                received = list(answer.token_ids)
                assert received == greedy(prompt(key + turn, 6 + 5 * key), len(received))
        await until("the cancels", lambda: not workers.decode.worker.epoch.listeners)


async def test_a_step_that_fails_on_the_device_fails_only_its_streams() -> None:
    async with ahead_workers() as (workers, decode), connected(workers) as connection:

        def fail(batch: StepBatch) -> None:
            if len(decode.steps) > 5:
                raise ArithmeticError("broken")

        decode.before_step = fail
        answer = await start(workers, connection, 1, prompt(1, 9), max_tokens=900)
        await over(answer)
        assert answer.last is not None
        assert answer.last.error is not None
        assert answer.last.error.code == INTERNAL
        assert answer.token_ids == greedy(prompt(1, 9), len(answer.token_ids))
        decode.before_step = lambda batch: None
        again = await start(workers, connection, 2, prompt(1, 9), max_tokens=8)
        await over(again)
        assert again.token_ids == greedy(prompt(1, 9), 8)


async def returned(worker: Worker, old: int) -> None:
    await until("the new epoch", lambda: worker.epoch.number != old and not worker.epoch.over)


@pytest.mark.parametrize("gone", ["fenced", "closed"])
async def test_an_epoch_ends_only_when_every_step_has_landed(gone: str) -> None:
    async with ahead_workers() as (workers, decode), connected(workers) as connection:
        worker, pool = workers.decode.worker, workers.kvnode.pool
        stuck, go = threading.Event(), threading.Event()

        def hang(batch: StepBatch) -> None:
            if batch.num_tokens == batch.num_seqs == 3:
                stuck.set()
                assert go.wait(WITHIN_S), f"waited {WITHIN_S:g} s for the test to let the step go"

        decode.before_step = hang
        # They need slots in different steps, so at least one can always run.
        texts = {key: prompt(key, 8 + key) for key in range(1, 4)}
        answers = await start_together(workers, connection, texts, max_tokens=900)
        await until("a step ahead of one that does not end", lambda: stuck.is_set() and len(decode.under_way) == 2)
        old = worker.epoch.number
        leaving: Callable[[], Any] = worker.close if gone == "closed" else worker.epoch.close
        if gone == "fenced":
            pool.ledger.fence(old)
            await until("the end", lambda: worker.epoch.over)
        left = asyncio.create_task(leaving())
        await loop_turns(200)
        assert not left.done()
        assert len(decode.under_way) == 2
        assert pool.ledger.holders[old].leased
        go.set()
        await within("the epoch to end", left)
        assert not decode.under_way
        if gone == "fenced":
            await returned(worker, old)
            again = await start(workers, connection, 9, prompt(1, 9), max_tokens=8)
            await over(again)
            assert again.token_ids == greedy(prompt(1, 9), 8)
        for key, answer in enumerate(answers, 1):
            assert answer.token_ids == greedy(prompt(key, 8 + key), len(answer.token_ids))
