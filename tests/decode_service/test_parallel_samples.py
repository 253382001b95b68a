"""Several answers to one prompt over a real node and real gRPC: one prefill, own endings, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.context import Context

from lab.testbed.conditions import loop_turns, until
from pillion.engine.scheduling.step_plan import ResumeOrder
from pillion.prefill_service.prefill_run import PrefillRun
from pillion.types import FinishReason, SamplingParams
from pillion.v1.decode_pb2 import Sibling
from tests.support.fake_backend import greedy
from tests.support.workers import Answer, Connection, Workers, connected, running_workers, submit_of

PROMPT = [(position * 7 + 3) % 97 for position in range(30)]
FREE = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=11, logprobs=2)


async def ask(
    workers: Workers, connection: Connection, parallel_samples: Sequence[Sibling], **other: Any
) -> list[Answer]:
    """Submit key 1 and its parallel samples; release the gateway's ticket once the worker holds it."""
    ticket = await workers.ticket(PROMPT)
    submit = submit_of(
        1, ticket, PROMPT, **{"max_tokens": 9, "sampling": FREE, "siblings": tuple(parallel_samples), **other}
    )
    answers = [connection.answers.setdefault(sample.key, Answer()) for sample in parallel_samples]
    before = connection.batches
    first = await connection.submit(submit)
    await until("the worker's word that it holds the ticket", lambda: connection.batches > before)
    await workers.release(ticket)
    return [first, *answers]


async def over(answers: Sequence[Answer]) -> None:
    await asyncio.gather(*(answer.ended() for answer in answers))


async def test_each_answer_equals_a_single_request_with_its_seed() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answers = await ask(workers, connection, [Sibling(key=5, seed=12), Sibling(key=6, seed=13)])
        await over(answers)
        together = sum(workers.decode_backend.steps)
        await workers.quiet()
        for key, seed in ((21, 11), (22, 12), (23, 13)):
            ticket = await workers.ticket(PROMPT)
            sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=seed)
            alone = await connection.submit(submit_of(key, ticket, PROMPT, 9, sampling=sampling))
            await over([alone])
            await workers.release(ticket)
            assert alone.token_ids == answers[key - 21].token_ids
        assert len({tuple(answer.token_ids) for answer in answers}) == 3
        # The prompt once; where a parallel sample found its parent's partial block, nothing of it again.
        assert 30 + 3 * 8 <= together <= 30 + 3 * 8 + 2 * 3
        await workers.quiet()


async def test_nan_logits_of_a_prompt_fail_all_its_samples() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        workers.decode_backend.broken = PROMPT[-1]
        first, *_ = await ask(workers, connection, [Sibling(key=5, seed=12), Sibling(key=6, seed=13)])
        await over([first])
        assert first.last is not None
        assert first.last.error is not None
        assert "token 30 are not finite" in first.last.error.message
        await workers.quiet()
        workers.decode_backend.broken = -1
        await over(await ask(workers, connection, [Sibling(key=15, seed=12)]))
        await workers.quiet()


async def test_each_token_comes_with_its_log_probability() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answers = await ask(workers, connection, [Sibling(key=5, seed=12)])
        await over(answers)
        for answer in answers:
            assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
            assert all(len(entry.top_ids) == 2 for entry in answer.logprobs)
        await workers.quiet()


async def test_a_failed_submit_also_stands_for_its_parallel_samples() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        connection.answers[5] = Answer()
        ticket = await workers.ticket(PROMPT)
        await workers.release(ticket)
        first = await connection.submit(submit_of(1, ticket, PROMPT, siblings=(Sibling(key=5, seed=12),)))
        await over([first])
        assert first.last is not None
        assert first.last.error is not None
        assert connection.answers[5].last is None
        await over(await ask(workers, connection, [Sibling(key=5, seed=12)]))
        await workers.quiet()


@pytest.mark.parametrize("before_the_first_token", [True, False])
async def test_a_cancelled_parallel_sample_does_not_affect_the_others(before_the_first_token: bool) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        if before_the_first_token:
            workers.decode_backend.gate.clear()
        answers = await ask(workers, connection, [Sibling(key=5, seed=12), Sibling(key=6, seed=13)], max_tokens=40)
        if not before_the_first_token:
            await until("the parallel sample's first token", lambda: answers[1].token_ids)
        await connection.cancel(5)
        workers.decode_backend.gate.set()
        await over([answers[0], answers[2]])
        assert len(answers[2].token_ids) == 40
        assert answers[1].last is None
        await workers.quiet()


@pytest.mark.parametrize("held", [True, False])
async def test_a_lost_connection_frees_all_answers(held: bool) -> None:
    async with running_workers() as workers:
        async with connected(workers) as connection:
            if held:
                workers.decode_backend.gate.clear()
            answers = await ask(workers, connection, [Sibling(key=5, seed=12), Sibling(key=6, seed=13)], max_tokens=900)
            if not held:
                await until("all first tokens", lambda: all(answer.token_ids for answer in answers))
        workers.decode_backend.gate.set()
        await workers.quiet()
        await until("no stream to be left", lambda: not workers.decode.worker.epoch.listeners)


async def test_parallel_samples_in_a_pool_too_small_for_all() -> None:
    async with running_workers(slots=24) as workers, connected(workers) as connection:
        answers = await ask(
            workers,
            connection,
            [Sibling(key=5, seed=12), Sibling(key=6, seed=13), Sibling(key=7, seed=14)],
            max_tokens=40,
        )
        await over(answers)
        for answer in answers:
            assert answer.last is not None
            assert answer.last.error is None
            assert len(answer.token_ids) == 40
        await workers.quiet()


async def test_parallel_samples_of_a_resumed_answer_are_refused() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        ticket = await workers.ticket(PROMPT)
        first = await connection.submit(
            submit_of(1, ticket, PROMPT, prompt_tokens=28, siblings=(Sibling(key=5, seed=12),))
        )
        await over([first])
        assert first.last is not None
        assert first.last.error is not None
        assert first.last.error.code == 3
        assert not first.last.error.retryable
        await workers.release(ticket)
        await workers.quiet()


async def test_a_stream_ends_when_it_fills_the_pool() -> None:
    async with running_workers(slots=10) as workers, connected(workers) as connection:
        greedily = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=1)
        (answer,) = await ask(workers, connection, [], max_tokens=500, sampling=greedily)
        await over([answer])
        assert answer.last is not None
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert answer.token_ids == greedy(PROMPT, 10)
        await workers.quiet()


async def test_a_prompt_larger_than_the_pool_is_refused_for_good() -> None:
    async with running_workers(slots=6) as workers, connected(workers) as connection:
        ticket = await workers.ticket(PROMPT[:10])
        answer = await connection.submit(submit_of(1, ticket, PROMPT))
        await over([answer])
        assert answer.last is not None
        assert answer.last.error is not None
        assert not answer.last.error.retryable
        await workers.release(ticket)
        await workers.quiet()


async def test_a_failed_worker_ends_every_stream_with_an_error() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        workers.decode_backend.gate.clear()
        tickets = [await workers.ticket(PROMPT), await workers.ticket(PROMPT)]
        first = await connection.submit(submit_of(1, tickets[0], PROMPT, 40, siblings=(Sibling(key=5, seed=12),)))
        second = await connection.submit(submit_of(2, tickets[1], PROMPT, 40))
        await until("all three", lambda: len(workers.decode.worker.epoch.listeners) == 3)
        workers.decode.worker.fail("a test says so")
        workers.decode_backend.gate.set()
        await over([first, second])
        await workers.release(*tickets)


async def test_parallel_samples_count_towards_the_stream_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.decode_service.assemble.MAX_WAITING_SEQS", 4)
    async with running_workers(decode={"max_num_seqs": 4}) as workers, connected(workers) as connection:
        workers.decode_backend.gate.clear()
        tickets = [await workers.ticket(PROMPT) for _ in range(6)]
        answers = []
        for number, ticket in enumerate(tickets):
            parallel_samples = tuple(Sibling(key=100 * (number + 1) + sample, seed=sample) for sample in range(4))
            for sample in parallel_samples:
                connection.answers[sample.key] = Answer()
            answers.append(await connection.submit(submit_of(number + 1, ticket, PROMPT, 5, siblings=parallel_samples)))
        await until("five refusals", lambda: sum(answer.over.is_set() for answer in answers) == 5)
        await until("the sequences of the sixth", lambda: len(workers.decode.worker.epoch.listeners) == 5)
        assert all(answer.last.error.code == 8 for answer in answers if answer.last and answer.last.error)
        workers.decode_backend.gate.set()
        await over(answers)
        await workers.release(*tickets)
        await workers.quiet()


async def test_a_cancel_right_after_a_resume_opens_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers() as workers:
        worker, asked = workers.decode.worker, []

        async def resume(order: ResumeOrder) -> None:
            asked.append(order)

        monkeypatch.setattr(worker.epoch.tickets, "resume", resume)
        worker.epoch.listeners[77] = PrefillRun(workers.prefill.worker, Context())
        worker.epoch.resume(ResumeOrder(seq_id=77, block_hashes=b"", total_blocks=1))
        worker.epoch.cancel(77)
        await loop_turns()
        assert not asked
