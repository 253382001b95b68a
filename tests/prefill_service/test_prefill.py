"""The prefill service over a real node and real gRPC: acknowledgements, hand-off, refusals, cancels."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import pytest
import torch

from lab.testbed.conditions import WITHIN_S, until
from pillion.config import MAX_STEP_TOKENS
from pillion.engine.worker import worker_epoch
from pillion.kernels.step import StepBatch
from pillion.types import FinishReason
from pillion.v1 import common_pb2, prefill_pb2
from pillion.v1.prefill_pb2 import ChunkAck, RunPrefillRequest
from tests.support.fake_backend import greedy
from tests.support.workers import Workers, connected, prompt, running_workers, submit_of


def call_of(workers: Workers, prefill_range: RunPrefillRequest) -> Any:
    return workers.prefill_stub.RunPrefill(prefill_range, timeout=WITHIN_S)


async def acks_of(workers: Workers, prefill_range: RunPrefillRequest) -> list[ChunkAck]:
    return [message async for message in call_of(workers, prefill_range) if not message.HasField("queued")]


async def next_ack(call: Any) -> ChunkAck:
    """Return the next acknowledgement; a message that the prefill range has begun comes before the first one."""
    while (message := await call.read()).HasField("queued"):
        assert message.queued.position == 0
    return message


async def code_of(workers: Workers, prefill_range: RunPrefillRequest) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await acks_of(workers, prefill_range)
    return caught.value.code()


async def test_chunks_are_acknowledged_and_the_decode_worker_continues() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        tokens = prompt(1, 50)
        ticket = await workers.ticket(tokens)
        acks = await acks_of(workers, workers.prefill_range(ticket, tokens, (16, 16, 8)))
        assert [(ack.chunk_index, ack.end_tokens) for ack in acks] == [(0, 16), (1, 32), (2, 40)]
        assert all(ack.queue_ms >= 0 and ack.compute_ms >= 0 for ack in acks)
        answer = await connection.submit(submit_of(1, ticket, tokens, 9))
        await answer.ended()
        assert answer.token_ids == greedy(tokens, 9)
        assert answer.last is not None
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert answer.last.timings is not None
        assert answer.last.timings.tail_tokens == 10
        await workers.release(ticket)
        await workers.quiet()


async def test_steps_of_65536_tokens() -> None:
    """Both roles compute a long prompt in one step each: what the messages between gateway, workers and node carry at
    once is 16,384 blocks."""
    whole = {"max_model_len": 200_000}
    async with (
        running_workers(
            slots=40_000,
            prefill=whole | {"max_num_batched_prefill_tokens": MAX_STEP_TOKENS},
            decode=whole | {"max_num_batched_tokens": MAX_STEP_TOKENS},
        ) as workers,
        connected(workers) as connection,
    ):
        tokens = prompt(1, 2 * MAX_STEP_TOKENS)
        ticket = await workers.ticket(tokens)
        chunks = (512,) * (MAX_STEP_TOKENS // 512)
        acks = await acks_of(workers, workers.prefill_range(ticket, tokens, chunks))
        assert [ack.chunk_index for ack in acks] == list(range(len(chunks)))
        answer = await connection.submit(submit_of(1, ticket, tokens, 2))
        await answer.ended()
        assert answer.token_ids == greedy(tokens, 2)
        assert workers.prefill_backend.steps == [MAX_STEP_TOKENS]
        assert workers.decode_backend.steps == [MAX_STEP_TOKENS, 1]
        await workers.release(ticket)
        await workers.quiet()


@pytest.mark.parametrize(("text_tokens", "shift"), [(64, 4096), (65, 0), (0, 0)])
async def test_short_prompts_use_the_rotary_rows_of_the_original_length(text_tokens: int, shift: int) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        seen: list[StepBatch] = []
        for server, backend in ((workers.prefill, workers.prefill_backend), (workers.decode, workers.decode_backend)):
            prepared = replace(server.worker.model.prepared, original_tokens=64)
            server.worker.model = replace(server.worker.model, prepared=prepared)
            backend.before_step = seen.append
        tokens = prompt(1, 50)
        ticket = await workers.ticket(tokens)
        await acks_of(workers, workers.prefill_range(ticket, tokens, (16, 16), text_tokens=text_tokens))
        answer = await connection.submit(submit_of(1, ticket, tokens, text_tokens - 50 if text_tokens else 100))
        await answer.ended()
        assert sum(batch.num_tokens for batch in seen) >= 50
        assert all((batch.table_rows - batch.positions == shift).all() for batch in seen)
        await workers.release(ticket)
        await workers.quiet()


async def test_prefill_ranges_are_packed_into_the_budget() -> None:
    async with running_workers(prefill={"max_num_batched_prefill_tokens": 24}) as workers:
        workers.prefill_backend.gate.clear()
        tickets = [await workers.ticket(prompt(seed, 41)) for seed in range(6)]
        prefill_ranges = [workers.prefill_range(t, prompt(seed, 41), (16, 24)) for seed, t in enumerate(tickets)]
        running = [asyncio.create_task(acks_of(workers, prefill_range)) for prefill_range in prefill_ranges]
        await until("all prefill ranges", lambda: len(workers.prefill.worker.epoch.listeners) == len(prefill_ranges))
        workers.prefill_backend.gate.set()
        for acks in await asyncio.gather(*running):
            assert [ack.end_tokens for ack in acks] == [16, 40]
        assert workers.prefill_backend.steps.count(24) >= 9
        await workers.release(*tickets)
        await workers.quiet()


async def test_an_acknowledgement_does_not_wait_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers(prefill={"max_num_batched_prefill_tokens": 16}) as workers:
        backend = workers.prefill_backend
        forward = backend.forward

        def one_step(batch: StepBatch) -> torch.Tensor:
            """The gate falls after the first step, so the second one hangs."""
            logits = forward(batch)
            backend.gate.clear()
            return logits

        monkeypatch.setattr(backend, "forward", one_step)
        tickets = [await workers.ticket(prompt(seed, 17)) for seed in range(2)]
        prefill_ranges = [workers.prefill_range(t, prompt(seed, 17), (16,)) for seed, t in enumerate(tickets)]
        running = [asyncio.create_task(acks_of(workers, prefill_range)) for prefill_range in prefill_ranges]
        done, waiting = await asyncio.wait(running, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        assert [ack.end_tokens for ack in done.pop().result()] == [16]
        backend.gate.set()
        assert [ack.end_tokens for ack in await asyncio.wait_for(waiting.pop(), WITHIN_S)] == [16]
        await workers.release(*tickets)
        backend.gate.set()
        await workers.quiet()


async def test_blocks_committed_by_another_attempt_are_acknowledged_at_once() -> None:
    async with running_workers() as workers:
        tokens = prompt(1, 41)
        ticket = await workers.ticket(tokens)
        prefill_range = workers.prefill_range(ticket, tokens, (16, 24))
        call = call_of(workers, prefill_range)
        await next_ack(call)
        call.cancel()
        workers.prefill_backend.steps.clear()
        assert [ack.chunk_index for ack in await acks_of(workers, prefill_range)] == [0, 1]
        assert 16 not in workers.prefill_backend.steps
        assert [ack.compute_ms for ack in await acks_of(workers, prefill_range)] == [0.0, 0.0]
        await workers.release(ticket)
        await workers.quiet()


@pytest.mark.parametrize("after_acks", [0, 1])
async def test_cancel_frees_within_one_step(after_acks: int) -> None:
    async with running_workers(prefill={"max_num_batched_prefill_tokens": 8}) as workers:
        tokens = prompt(1, 201)
        ticket = await workers.ticket(tokens)
        call = call_of(workers, workers.prefill_range(ticket, tokens, (40,) * 5))
        for _ in range(after_acks):
            await next_ack(call)
        call.cancel()
        await workers.release(ticket)
        await workers.quiet()
        await until("no stream to be left", lambda: not workers.prefill.worker.epoch.listeners)
        workers.prefill_backend.steps.clear()
        other = await workers.ticket(prompt(2, 17))
        await acks_of(workers, workers.prefill_range(other, prompt(2, 17), (16,)))
        assert workers.prefill_backend.steps == [8, 8], "the cancelled prefill range computes on"
        await workers.release(other)
        await workers.quiet()


BAD: dict[str, dict[str, Any]] = {
    "no tokens": {"token_ids": (), "chunk_tokens": ()},
    "partial block": {"token_ids": (1,) * 6, "chunk_tokens": (6,)},
    "sums": {"chunk_tokens": (8,)},
    "too many places for states": {"kept_tokens": range(9)},
    "partial chunk": {"chunk_tokens": (6, 10)},
    "empty chunk": {"chunk_tokens": (16, 0)},
    "start": {"start_tokens": 3},
    "vocabulary": {"token_ids": (97,) * 16},
    "too long": {"start_tokens": 1020},
    "parent": {"parent_hash": b""},
    "flow": {"flow": common_pb2.Flow(key=b"x" * 33)},
}


async def test_bad_prefill_ranges_are_refused() -> None:
    async with running_workers() as workers:
        tokens = prompt(1, 41)
        ticket = await workers.ticket(tokens)
        for name, other in BAD.items():
            code = await code_of(workers, workers.prefill_range(ticket, tokens, (16,), **other))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, name
        assert len(await acks_of(workers, workers.prefill_range(ticket, tokens, (16, 24)))) == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in workers.prefill_stub.RunPrefill(prefill_pb2.RunPrefillRequest()):
                pass
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await workers.release(ticket)
        await workers.quiet()


async def test_another_tenants_range_runs_before_a_flood() -> None:
    """It comes last, and its first chunk is computed before any of the flood's but the one that had begun."""
    begun: list[list[int]] = []

    def begin(batch: StepBatch) -> None:
        for start, end in pairwise(batch.query_starts.tolist()):
            if batch.positions[start] == 0:
                begun.append(batch.token_ids[start:end].tolist())

    async with running_workers(slots=1024, prefill={"max_num_batched_prefill_tokens": 16}) as workers:
        backend = workers.prefill_backend
        backend.before_step = begin
        backend.gate.clear()
        texts = [prompt(seed, 41) for seed in range(8)]
        tickets = [await workers.ticket(tokens) for tokens in texts]

        async def run(number: int) -> None:
            flow = common_pb2.Flow(key=b"lone" if number == len(texts) - 1 else b"flood")
            prefill_range = workers.prefill_range(tickets[number], texts[number], (16, 24), flow=flow)
            assert len(await acks_of(workers, prefill_range)) == 2

        runs = [asyncio.create_task(run(0))]
        await until("a step at the gate", backend.waiting.is_set)
        for number in range(1, len(texts)):
            runs.append(asyncio.create_task(run(number)))
            await until("it to wait", lambda count=number: len(workers.prefill.worker.epoch.listeners) > count)  # type: ignore[misc]
        backend.gate.set()
        await asyncio.gather(*runs)
        assert begun[:2] == [texts[0][:16], texts[-1][:16]]
        await workers.release(*tickets)
        await workers.quiet()


async def test_tickets_that_do_not_match_the_prefill_range_are_refused() -> None:
    async with running_workers() as workers:
        tokens = prompt(1, 41)
        ticket = await workers.ticket(tokens)
        for other in ({"ticket_id": 4711}, {"start_tokens": 16}):
            assert (
                await code_of(workers, workers.prefill_range(ticket, tokens, (16,), **other))
                is grpc.StatusCode.NOT_FOUND
            )
        await acks_of(workers, workers.prefill_range(ticket, tokens, (16,)))
        wrong = workers.prefill_range(ticket, prompt(2, 41), (16, 16))
        assert await code_of(workers, wrong) is grpc.StatusCode.NOT_FOUND
        await workers.release(ticket)
        await workers.quiet()


async def test_the_number_of_prefill_ranges_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.prefill_service.assemble.MAX_WAITING_PREFILLS", 1)
    async with running_workers() as workers:
        workers.prefill_backend.gate.clear()
        tickets = [await workers.ticket(prompt(seed, 17)) for seed in range(2)]
        prefill_ranges = [workers.prefill_range(ticket, prompt(seed, 17), (16,)) for seed, ticket in enumerate(tickets)]
        first = asyncio.create_task(acks_of(workers, prefill_ranges[0]))
        await until("the first prefill range", lambda: workers.prefill.worker.epoch.listeners)
        assert await code_of(workers, prefill_ranges[1]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        workers.prefill_backend.gate.set()
        assert len(await first) == 1
        assert len(await acks_of(workers, prefill_ranges[1])) == 1
        await workers.release(*tickets)
        await workers.quiet()


async def test_a_failed_step_fails_its_prefill_ranges_and_the_loop_continues() -> None:
    def fail(batch: StepBatch) -> None:
        workers.prefill_backend.before_step = lambda batch: None
        raise RuntimeError("the arithmetic broke")

    async with running_workers() as workers:
        tokens = prompt(1, 41)
        ticket = await workers.ticket(tokens)
        workers.prefill_backend.before_step = fail
        prefill_range = workers.prefill_range(ticket, tokens, (16, 24))
        assert await code_of(workers, prefill_range) is grpc.StatusCode.INTERNAL
        assert len(await acks_of(workers, prefill_range)) == 2
        await workers.release(ticket)
        await workers.quiet()


async def test_two_prefill_ranges_of_one_prompt_commit_the_same_blocks() -> None:
    async with running_workers(prefill={"max_num_batched_prefill_tokens": 32}) as workers:
        tokens = prompt(1, 41)
        tickets = [await workers.ticket(tokens) for _ in range(3)]
        prefill_ranges = [workers.prefill_range(ticket, tokens, (8,) * 5) for ticket in tickets]
        for acks in await asyncio.gather(*(acks_of(workers, prefill_range) for prefill_range in prefill_ranges)):
            assert [ack.end_tokens for ack in acks] == [8, 16, 24, 32, 40]
        assert (await workers.node.status()).committed_blocks == 10
        await workers.release(*tickets)
        await workers.quiet()


async def test_a_prefill_range_reports_its_start_before_its_step_ends() -> None:
    async with running_workers() as workers:
        tokens = prompt(1, 50)
        ticket = await workers.ticket(tokens)
        workers.prefill_backend.gate.clear()
        call = call_of(workers, workers.prefill_range(ticket, tokens, (16, 24)))
        first = await call.read()
        assert first.HasField("queued")
        assert first.queued.position == 0
        workers.prefill_backend.gate.set()
        assert [(await next_ack(call)).end_tokens for _ in range(2)] == [16, 40]
        await workers.release(ticket)
        await workers.quiet()


async def test_a_queued_prefill_range_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_epoch, "QUEUE_HEARTBEAT_MS", 100)
    told, begun = threading.Event(), asyncio.Event()

    async def read(prefill_range: RunPrefillRequest) -> list[ChunkAck]:
        messages, is_long = [], len(prefill_range.token_ids) == 800
        if not is_long:
            # If the short one came first, the long one would have to queue.
            await begun.wait()
        async for message in call_of(workers, prefill_range):
            messages.append(message)
            begun.set()
            if message.HasField("queued") and is_long and len(messages) > 1:
                told.set()
        return messages

    async with running_workers(prefill={"max_num_batched_prefill_tokens": 4}) as workers:
        backend, long, short = workers.prefill_backend, prompt(1, 801), prompt(2, 9)
        # Steps are short beside an answer, and continue until the long prefill range has had one.
        monkeypatch.setattr(backend, "before_step", lambda batch: told.wait(0.05))
        tickets = [await workers.ticket(tokens) for tokens in (long, short)]
        prefill_ranges = [
            workers.prefill_range(tickets[0], long, (800,)),
            workers.prefill_range(tickets[1], short, (4, 4)),
        ]
        found = await asyncio.gather(*(read(prefill_range) for prefill_range in prefill_ranges))
        for prefill_range, messages in zip(prefill_ranges, found, strict=True):
            acks = [one for one in messages if not one.HasField("queued")]
            assert [ack.chunk_index for ack in acks] == list(range(len(prefill_range.chunk_tokens)))
            assert acks[-1].end_tokens == prefill_range.start_tokens + len(prefill_range.token_ids)
        signs = [one for one in found[0] if one.HasField("queued")]
        assert {(one.end_tokens, one.queued.position) for one in signs} == {(0, 0)}
        await workers.release(*tickets)
        await workers.quiet()
