"""The decode service over a real node and real gRPC: streams, refusals, cancels, lost connections."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import grpc
import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.engine.streams import stream_session
from pillion.engine.worker import tickets as worker_tickets
from pillion.engine.worker import worker_epoch
from pillion.engine.worker.worker_epoch import WorkerEpoch
from pillion.errors import Internal
from pillion.kernels.step import StepBatch
from pillion.types import FinishReason, SamplingParams
from pillion.v1 import common_pb2, decode_pb2
from pillion.v1.kvnode_pb2 import OpenTicketReply
from tests.support.ahead_backend import AheadBackend
from tests.support.drafts import speculative
from tests.support.fake_backend import FakeBackend, greedy
from tests.support.workers import Answer, Connection, Workers, connected, prompt, running_workers, submit_of

NOT_FOUND, INVALID, EXHAUSTED, DEADLINE, INTERNAL = 5, 3, 8, 4, 13


async def over(answer: Answer) -> None:
    await answer.ended()


async def start(workers: Workers, connection: Connection, key: int, tokens: list[int], count: int = 8) -> Answer:
    ticket = await workers.ticket(tokens)
    answer = await connection.submit(submit_of(key, ticket, tokens, count))
    await until("the first token", lambda: answer.token_ids or answer.last)
    await workers.release(ticket)
    return answer


async def test_a_stream_returns_the_models_answer() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answer = await start(workers, connection, 1, prompt(1, 30), 20)
        await over(answer)
        assert answer.token_ids == greedy(prompt(1, 30), 20)
        assert answer.last is not None
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert answer.last.timings is not None
        assert answer.last.timings.tail_tokens == 30
        assert answer.last.timings.tail_steps == 1
        await workers.quiet()
        # The next turn hits generated tokens: 49 tokens have KV, 12 whole blocks.
        again = await workers.ticket([*prompt(1, 30), *answer.token_ids, 3, 4])
        assert again.pinned_blocks == 12
        await workers.release(again)
        await workers.quiet()


async def test_an_empty_delta_confirms_the_adopted_ticket() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        workers.decode_backend.gate.clear()
        ticket = await workers.ticket(prompt(1, 9))
        answer = await connection.submit(submit_of(1, ticket, prompt(1, 9)))
        await until("the empty delta", lambda: connection.batches)
        assert not answer.token_ids
        await workers.release(ticket)
        workers.decode_backend.gate.set()
        await over(answer)
        assert answer.token_ids == greedy(prompt(1, 9), 8)
        await workers.quiet()


@pytest.mark.parametrize("defect", [RuntimeError("a defect"), asyncio.CancelledError()], ids=["error", "stray cancel"])
async def test_an_exception_after_adopting_a_ticket_releases_it(
    monkeypatch: pytest.MonkeyPatch, defect: BaseException
) -> None:
    prompt = list(range(21))

    def fail(*args: object, **more: object) -> None:
        raise defect

    async with running_workers() as workers, connected(workers) as connection:
        for role in ("decode", "prefill"):
            ticket = await workers.ticket(prompt, hits=False)
            with monkeypatch.context() as patch:
                patch.setattr(WorkerEpoch, "add", fail)
                if role == "decode":
                    answer = await connection.submit(submit_of(1, ticket, prompt, 6))
                    await answer.ended()
                    assert answer.last is not None
                    assert answer.last.error.code == Internal.code
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        async for _ in workers.prefill_stub.RunPrefill(workers.prefill_range(ticket, prompt, [20])):
                            pass
            await workers.release(ticket)
            await workers.quiet()


async def test_an_exception_during_an_answer_ends_only_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones in the same outcome, and its own reader, would wait forever."""
    write = stream_session.finish_to_pb

    def fail_once(reason: FinishReason | None) -> Any:
        monkeypatch.setattr(stream_session, "finish_to_pb", write)
        raise RuntimeError("a defect")

    async with running_workers() as workers, connected(workers) as connection:
        workers.decode_backend.gate.clear()
        tickets = [await workers.ticket(prompt(key, 9)) for key in (1, 2)]
        answers = [
            await connection.submit(submit_of(key, ticket, prompt(key, 9))) for key, ticket in enumerate(tickets, 1)
        ]
        await until("both streams", lambda: len(workers.decode.worker.epoch.listeners) == 2)
        monkeypatch.setattr(stream_session, "finish_to_pb", fail_once)
        workers.decode_backend.gate.set()
        for answer in answers:
            await over(answer)
        await workers.release(*tickets)
        ended = {
            0 if answer.last.error is None else answer.last.error.code: answer for answer in answers if answer.last
        }
        assert set(ended) == {0, Internal.code}
        assert ended[0].token_ids in [greedy(prompt(key, 9), 8) for key in (1, 2)]
        await workers.quiet()


async def test_many_streams_over_two_connections_share_steps() -> None:
    flags = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
    async with running_workers(slots=600, decode=flags) as workers:
        async with connected(workers) as one, connected(workers) as two:
            workers.decode_backend.gate.clear()
            ids = [prompt(seed, 3 + 5 * seed) for seed in range(24)]
            tickets = [await workers.ticket(tokens) for tokens in ids]
            answers = [
                await (one, two)[key % 2].submit(submit_of(key, ticket, tokens, 5 + key))
                for key, (ticket, tokens) in enumerate(zip(tickets, ids, strict=True))
            ]
            await until("all streams", lambda: len(workers.decode.worker.epoch.listeners) == 24)
            workers.decode_backend.gate.set()
            await asyncio.gather(*map(over, answers))
            await workers.release(*tickets)
            for key, answer in enumerate(answers):
                assert answer.token_ids == greedy(ids[key], 5 + key)
            assert one.batches < sum(len(a.token_ids) for a in answers) / 2
        assert max(workers.decode_backend.steps) == 32
        await workers.quiet()


async def test_preemption_in_a_small_pool_does_not_change_answers() -> None:
    async with running_workers(slots=40, decode={"max_num_seqs": 8}) as workers, connected(workers) as connection:

        async def one(key: int) -> Answer:
            tokens = prompt(key, 10)
            ticket = await workers.ticket(tokens)
            answer = await connection.submit(submit_of(key, ticket, tokens, 60))
            await until("the first token", lambda: answer.token_ids or answer.last)
            await workers.release(ticket)
            await over(answer)
            return answer

        workers.decode_backend.gate.clear()
        asked = [asyncio.create_task(one(key)) for key in range(6)]
        await until("all six", lambda: len(workers.decode.worker.epoch.listeners) == 6)
        workers.decode_backend.gate.set()
        answers = await asyncio.gather(*asked)
        for key, answer in enumerate(answers):
            assert answer.last is not None
            assert answer.last.error is None
            assert answer.token_ids == greedy(prompt(key, 10), 60)
        assert sum(a.last.timings.preemptions for a in answers if a.last and a.last.timings) > 0
        await workers.quiet()


@pytest.mark.parametrize("backend", [FakeBackend, AheadBackend])
@pytest.mark.parametrize("draft_tokens", [0, 4])
async def test_nan_logits_fail_only_their_stream(backend: type[FakeBackend], draft_tokens: int) -> None:
    """Also if the failed token is in flight already, or follows an accepted draft token."""
    flags = {"speculative_config": speculative(draft_tokens)}
    async with running_workers(backend=backend, decode=flags) as workers, connected(workers) as connection:
        tokens = [random.Random(position).randrange(97) for position in range(900)]
        whole, other = greedy(tokens, 60), prompt(1, 30)
        # First occurs deep in the answer, and never in the other stream.
        broken = next(t for t in reversed(whole) if whole.index(t) > 5 and t not in greedy(other, 40) + other)
        workers.decode_backend.broken = broken
        failing, sound = await start(workers, connection, 1, tokens, 60), await start(workers, connection, 2, other, 40)
        await asyncio.gather(over(failing), over(sound))
        assert failing.token_ids == whole[: whole.index(broken) + 1]
        assert failing.last is not None
        assert failing.last.error is not None
        assert (failing.last.error.code, failing.last.error.retryable) == (INTERNAL, False)
        assert f"token {900 + whole.index(broken) + 1} are not finite" in failing.last.error.message
        assert sound.token_ids == greedy(other, 40)
        assert sound.last is not None
        assert sound.last.error is None
        await workers.quiet()


async def test_drafted_tokens_change_no_answer() -> None:
    async with (
        running_workers(decode={"speculative_config": speculative(4)}) as workers,
        connected(workers) as connection,
    ):
        # Enough pairs of tokens that the answer hits one now and then, and then diverges.
        tokens = [random.Random(position).randrange(97) for position in range(900)]
        answer = await start(workers, connection, 1, tokens, 60)
        await over(answer)
        assert answer.token_ids == greedy(tokens, 60)
        assert [count for count in workers.decode_backend.steps[3:] if count > 1], "nothing was drafted"
        assert answer.last is not None
        assert answer.last.timings is not None
        judged = sum(count - 1 for count in workers.decode_backend.steps if 1 < count <= 5)
        assert 0 < answer.last.timings.guessed_tokens == judged
        assert answer.last.timings.accepted_tokens < judged
        assert answer.draft_tokens == sorted(answer.draft_tokens)
        assert any(drafted for drafted, _ in answer.draft_tokens[:-1])
        await workers.quiet()


@pytest.mark.parametrize("backend", [FakeBackend, AheadBackend])
async def test_another_tenants_stream_does_not_wait_for_a_flood(backend: type[FakeBackend]) -> None:
    """The flood has all slots and a queue. The other one comes last and ends first; all answers are complete."""
    flags, texts = {"max_num_seqs": 2}, [prompt(seed, 9) for seed in range(6)]
    async with running_workers(slots=1024, backend=backend, decode=flags) as workers, connected(workers) as connection:
        gate = workers.decode_backend.gate
        tickets = [await workers.ticket(text) for text in texts]
        answers: list[Answer] = []
        for key, text in enumerate(texts):
            lone = key == len(texts) - 1
            if lone:
                await until("two to have tokens", lambda: sum(bool(one.token_ids) for one in answers) == 2)
                gate.clear()
            flow = common_pb2.Flow(key=b"lone" if lone else b"flood")
            submit = submit_of(key + 1, tickets[key], text, 5 if lone else 200, flow=flow)
            answers.append(await connection.submit(submit))
            await until("the worker to have it", lambda: len(workers.decode.worker.epoch.listeners) == len(answers))
        gate.set()
        await answers[-1].ended()
        assert not any(one.last for one in answers[:-1])
        await asyncio.gather(*map(over, answers))
        assert [one.token_ids for one in answers] == [
            *(greedy(text, 200) for text in texts[:-1]),
            greedy(texts[-1], 5),
        ]
        await workers.release(*tickets)
        await workers.quiet()


async def test_cancel_and_a_lost_connection_free_everything() -> None:
    async with running_workers() as workers:
        async with connected(workers) as connection:
            answers = [await start(workers, connection, key, prompt(key, 20), 900) for key in range(4)]
            await connection.cancel(0)
            await connection.cancel(0)
            await connection.cancel(77)
            await until("the cancel", lambda: len(workers.decode.worker.epoch.listeners) == 3)
            assert answers[0].last is None
        await until("the connection's end", lambda: not workers.decode.worker.epoch.listeners)
        await workers.quiet()
        async with connected(workers) as connection:
            await over(await start(workers, connection, 0, prompt(9, 5)))
        await workers.quiet()


async def test_half_closing_ends_the_connection() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        await start(workers, connection, 1, prompt(1, 20), 900)
        await connection.call.done_writing()
        assert await connection.call.code() is grpc.StatusCode.OK
        await workers.quiet()


async def test_cancel_before_the_ticket_is_adopted() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        for key in range(20):
            ticket = await workers.ticket(prompt(key, 40))
            await connection.submit(submit_of(key, ticket, prompt(key, 40), 900))
            await connection.cancel(key)
            await workers.release(ticket)
        await over(await start(workers, connection, 99, prompt(3, 5)))
        await until("no stream to be left", lambda: not workers.decode.worker.epoch.listeners)
        await workers.quiet()


BAD: dict[str, dict[str, Any]] = {
    "token_ids": {"token_ids": (1, 97)},
    "empty": {"token_ids": (), "prompt_tokens": 0},
    "too long": {"token_ids": (1,) * 1024, "prompt_tokens": 1024},
    "huge id": {"token_ids": (1, 2**32 - 1), "prompt_tokens": 2},
    "prompt_tokens": {"prompt_tokens": 50},
    "root_hash": {"root_hash": b"short"},
    "too many places for states": {"kept_tokens": range(9)},
    "max_tokens": {"max_tokens": 1, "prompt_tokens": 8},
    "sampling": {"sampling": SamplingParams()},
    "temperature": {"sampling": SamplingParams(temperature=float("nan"), top_p=1.0, top_k=0, seed=0)},
    "top_p": {"sampling": SamplingParams(temperature=1.0, top_p=0.0, top_k=0, seed=0)},
    "top_k": {"sampling": SamplingParams(temperature=1.0, top_p=1.0, top_k=-7, seed=0)},
}


async def test_bad_submits_are_refused_one_by_one() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        ticket = await workers.ticket(prompt(1, 9))
        for key, other in enumerate(BAD.values()):
            answer = await connection.submit(submit_of(key, ticket, prompt(1, 9), **other))
            await over(answer)
            assert answer.last is not None
            assert answer.last.error is not None
            assert (answer.last.error.code, answer.last.error.retryable) == (INVALID, False), list(BAD)[key]
        await over(await connection.submit(submit_of(100, ticket, prompt(1, 9))))
        assert connection.answers[100].token_ids == greedy(prompt(1, 9), 8)
        await workers.release(ticket)
        await workers.quiet()


async def refusal(connection: Connection, key: int, ticket: OpenTicketReply, tokens: list[int], **other: object) -> int:
    answer = await connection.submit(submit_of(key, ticket, tokens, **other))  # type: ignore[arg-type]
    await over(answer)
    assert answer.last is not None
    assert answer.last.error is not None
    assert answer.last.error.retryable
    return answer.last.error.code


async def test_tickets_that_do_not_match_the_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers() as workers, connected(workers) as connection:
        tokens = prompt(1, 30)
        await over(await start(workers, connection, 1, tokens))
        await workers.quiet()
        ticket = await workers.ticket(tokens)
        assert ticket.pinned_blocks == 7
        assert await refusal(connection, 2, OpenTicketReply(ticket_id=12345), tokens) == NOT_FOUND
        assert await refusal(connection, 3, ticket, prompt(2, 30)) == NOT_FOUND
        assert await refusal(connection, 4, ticket, tokens[:28]) == NOT_FOUND
        assert await refusal(connection, 5, ticket, tokens, root_hash=b"\6" * 32) == NOT_FOUND
        live = await connection.submit(submit_of(6, ticket, tokens, 500))
        await until("a token", lambda: live.token_ids)
        workers.decode_backend.gate.clear()
        with monkeypatch.context() as patch:
            patch.setattr(worker_tickets, "IN_USE_TIMEOUT_S", 0.1)
            assert await refusal(connection, 7, ticket, tokens) == NOT_FOUND
        workers.decode_backend.gate.set()
        await connection.cancel(6)
        await workers.release(ticket)
        await workers.quiet()


async def test_queued_streams_time_out_and_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.decode_service.assemble.MAX_WAITING_SEQS", 1)
    async with running_workers(decode={"max_num_seqs": 1}) as workers, connected(workers) as connection:
        workers.decode_backend.gate.clear()
        tickets = [await workers.ticket(prompt(key, 9)) for key in range(4)]
        two = [await connection.submit(submit_of(key, tickets[key], prompt(key, 9))) for key in range(2)]
        assert await refusal(connection, 2, tickets[2], prompt(2, 9)) == EXHAUSTED
        workers.decode_backend.gate.set()
        await asyncio.gather(*map(over, two))
        workers.decode_backend.gate.clear()
        timed = await connection.submit(submit_of(3, tickets[3], prompt(3, 9), timeout_ms=50))
        await over(timed)
        assert timed.last is not None
        assert timed.last.error is not None
        assert timed.last.error.code == DEADLINE
        workers.decode_backend.gate.set()
        await workers.release(*tickets)
        await workers.quiet()


async def test_a_failed_step_fails_its_streams_and_the_loop_continues() -> None:
    def fail(batch: StepBatch) -> None:
        workers.decode_backend.before_step = lambda batch: None
        raise RuntimeError("the arithmetic broke")

    async with running_workers() as workers, connected(workers) as connection:
        workers.decode_backend.before_step = fail
        tickets = [await workers.ticket(prompt(1, 9)), await workers.ticket(prompt(2, 9))]
        assert await refusal(connection, 1, tickets[0], prompt(1, 9)) == INTERNAL
        await over(await connection.submit(submit_of(2, tickets[1], prompt(2, 9))))
        assert connection.answers[2].token_ids == greedy(prompt(2, 9), 8)
        await workers.release(*tickets)
        await workers.quiet()


@pytest.mark.parametrize("hello", [None, common_pb2.Hello(protocol=99, component_id="x")])
async def test_the_first_message_must_be_a_valid_hello(hello: common_pb2.Hello | None) -> None:
    async with running_workers() as workers:
        call = workers.decode_stub.Connect()
        command = decode_pb2.DecodeCommand(cancel=decode_pb2.Cancel(key=1))
        await call.write(decode_pb2.DecodeCommand(hello=hello) if hello else command)
        code = await call.code()
        assert code is (grpc.StatusCode.FAILED_PRECONDITION if hello else grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_key_in_use_ends_the_connection() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        ticket = await workers.ticket(prompt(1, 9))
        for _ in range(2):
            await connection.submit(submit_of(1, ticket, prompt(1, 9), 900))
        assert await connection.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await workers.release(ticket)
        await workers.quiet()


async def test_a_stream_reports_its_start_before_its_step_ends() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        tokens = prompt(1, 20)
        ticket = await workers.ticket(tokens)
        workers.decode_backend.gate.clear()
        answer = await connection.submit(submit_of(1, ticket, tokens, 3))
        await until("the beginning", lambda: answer.queued)
        assert answer.queued == [0]
        workers.decode_backend.gate.set()
        await asyncio.wait_for(answer.over.wait(), WITHIN_S)
        assert (answer.queued, answer.token_ids) == ([0], greedy(tokens, 3))
        await workers.release(ticket)
        await workers.quiet()


async def test_queued_streams_report_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queued stream reports its position; a decoding one nothing, and neither does any while the step hangs."""
    monkeypatch.setattr(worker_epoch, "QUEUE_HEARTBEAT_MS", 100)
    async with running_workers(decode={"max_num_seqs": 1}) as workers, connected(workers) as connection:
        backend, prompts = workers.decode_backend, [prompt(seed, 9) for seed in range(3)]
        # Steps are short beside an answer, and continue until the signs are there.
        told = threading.Event()
        monkeypatch.setattr(backend, "before_step", lambda batch: told.wait(0.05))
        tickets = [await workers.ticket(one) for one in prompts]
        first = await connection.submit(submit_of(1, tickets[0], prompts[0], 900))
        await until("the first stream to decode", lambda: first.token_ids)
        others: list[Answer] = []
        for n in (2, 3):
            others.append(await connection.submit(submit_of(n, tickets[n - 1], prompts[n - 1], 2)))
            await until("a sign of life", lambda: others[-1].queued)
        early = len(first.queued)
        await until("further ones", lambda: all(len(one.queued) > 3 for one in others))
        assert [one.queued[-1] for one in others] == [1, 2]
        assert len(first.queued) == early
        backend.gate.clear()
        told.set()
        await until("the step to hang", backend.waiting.is_set)
        monkeypatch.setattr(worker_epoch, "QUEUE_HEARTBEAT_MS", 20)
        unanswered: list[None] = []
        positions = WorkerEpoch.positions

        async def counted(epoch: WorkerEpoch) -> dict[int, int]:
            found = await positions(epoch)
            unanswered.extend([] if found else [None])
            return found

        monkeypatch.setattr(WorkerEpoch, "positions", counted)
        await until("a question without an answer", lambda: unanswered)
        await (await connection.submit(submit_of(4, tickets[0], (), prompt_tokens=0))).ended()
        before = [len(one.queued) for one in others]
        await until("further ones", lambda: len(unanswered) >= 4)
        assert [len(one.queued) for one in others] == before
        backend.gate.set()
        for answer in (first, *others):
            await answer.ended()
        assert [len(answer.token_ids) for answer in (first, *others)] == [900, 2, 2]
        await workers.release(*tickets)
        await workers.quiet()
