"""Texts that end with a vector on a prefill worker, over a real node and real gRPC: beside prefill ranges, refused."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.errors import Overloaded
from pillion.v1 import decode_pb2
from pillion.wire.common import hello_to_pb
from tests.support.text_streams import PROMPT, VectorBackend, ask, read, vector_of
from tests.support.workers import connected, prompt, running_workers, submit_of


async def test_a_text_shares_steps_with_a_prefill_range() -> None:
    """One step has room for both, and the blocks of each are found by the next one that begins alike."""
    async with (
        running_workers(prefill={"max_num_batched_prefill_tokens": 64}, backend=VectorBackend) as workers,
        connected(workers, for_texts=True) as texts,
        connected(workers) as streams,
    ):
        backend = workers.prefill_backend
        backend.gate.clear()
        tokens = prompt(1, 50)
        ticket = await workers.ticket(tokens)
        first = asyncio.create_task(ask(workers, texts, 1, [9, 8, 7]))
        await asyncio.to_thread(backend.waiting.wait, WITHIN_S)
        waiting = asyncio.create_task(ask(workers, texts, 2, PROMPT))
        acks = workers.prefill_stub.RunPrefill(workers.prefill_range(ticket, tokens, (16,)))
        epoch = workers.prefill.worker.epoch
        await until("the text and the prefill range to wait", lambda: len(epoch.listeners) == 3)
        backend.gate.set()
        assert read(await first) == vector_of([9, 8, 7])
        assert read(await waiting) == vector_of(PROMPT)
        assert [ack.end_tokens async for ack in acks if not ack.HasField("queued")] == [16]
        assert backend.steps == [3, 41 + 16]
        await workers.release(ticket)
        await workers.quiet()
        longer = [*PROMPT, 5]
        assert read(await ask(workers, texts, 3, longer)) == vector_of(longer)
        assert backend.steps[-1] == len(longer) - len(PROMPT) // 4 * 4
        assert read(await ask(workers, streams, 1, longer)) == vector_of(longer)
        assert workers.decode_backend.steps == [len(longer) - len(PROMPT) // 4 * 4]
        await workers.quiet()


async def test_a_prefill_worker_refuses_to_generate() -> None:
    async with running_workers(backend=VectorBackend) as workers, connected(workers, for_texts=True) as texts:
        ticket = await workers.ticket(PROMPT)
        answer = await texts.submit(submit_of(1, ticket, PROMPT, 3))
        await answer.ended()
        assert answer.last is not None
        assert answer.last.error is not None
        assert answer.last.error.message == "prefill-0 generates nothing: it is a prefill worker"
        await workers.release(ticket)
        await workers.quiet()


async def test_texts_beyond_the_queue_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.prefill_service.assemble.MAX_WAITING_PREFILLS", 1)
    async with (
        running_workers(backend=VectorBackend) as workers,
        connected(workers, for_texts=True) as texts,
    ):
        workers.prefill_backend.gate.clear()
        first = asyncio.create_task(ask(workers, texts, 1, PROMPT))
        await asyncio.to_thread(workers.prefill_backend.waiting.wait, WITHIN_S)
        refused = await ask(workers, texts, 2, PROMPT)
        assert refused.last is not None
        assert refused.last.error is not None
        assert (refused.last.error.code, refused.last.error.retryable) == (Overloaded.code, True)
        assert refused.last.error.message == "prefill-0 has 1 streams (the most that may wait or run)"
        workers.prefill_backend.gate.set()
        assert read(await first) == vector_of(PROMPT)
        await workers.quiet()


async def test_a_prefill_worker_without_vectors_has_no_text_api() -> None:
    async with running_workers() as workers:
        assert not workers.prefill.worker.describe().gives_vectors
        call = workers.text_stub.Connect()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.write(decode_pb2.DecodeCommand(hello=hello_to_pb("test-gateway")))
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
