"""Lost parts, disconnects and deadlines: an answer completes or ends with a clear error, and nothing leaks (I1, I6,
I8)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from lab.testbed.conditions import until, within
from pillion import Cancelled, DeadlineExceeded, Delta, FinishReason, Overloaded, PillionError, Unavailable
from pillion.errors import Conflict, Internal, NotFound
from pillion.gateway.links import cluster as links
from pillion.gateway.links.cluster import Served
from pillion.gateway.request import component_calls as calls
from pillion.gateway.request import request_machine, request_runner
from pillion.gateway.request.events import StillQueued
from pillion.gateway.request.request_machine import RequestState
from pillion.gateway.request.request_runner import RequestRunner
from pillion.kvstore.index.index import PrefixHit
from pillion.types import GenerateRequest
from tests.support.fake_components import (
    FakeCluster,
    FakeDecode,
    FakePrefill,
    impatient_client,
    record,
    running_fake_cluster,
)

PROMPT = "What is the capital of France?"
SCRIPT = "Paris, naturally — 巴黎. " * 3


@pytest.fixture(autouse=True)
def _no_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the back-off at its first delay."""
    monkeypatch.setattr(request_machine, "MAX_RETRY_DELAY_MS", request_machine.FIRST_RETRY_DELAY_MS)


async def read(stream) -> list[Delta]:
    return [delta async for delta in stream]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def whole(fakes: FakeCluster, deltas: list[Delta], replays: int) -> None:
    """Check that each token came once, in order, and that usage adds up."""
    assert text_of(deltas) == line_text(fakes)
    assert [one for delta in deltas for one in delta.token_ids] == list(fakes.decode.script)
    last = deltas[-1]
    assert last.finish_reason is FinishReason.STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (30, len(fakes.decode.script))
    timings = last.timings
    assert timings.replays == replays
    assert timings.cached_tokens + timings.prefilled_tokens + timings.tail_tokens == 30


def line_text(fakes: FakeCluster) -> str:
    from lab.testbed.toy_tokenizer import byte_tokenizer

    return byte_tokenizer().decode(list(fakes.decode.script))


@pytest.mark.parametrize("after", [1, 20, 60])
async def test_a_stream_broken_mid_answer_continues(after: int) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.break_after = after
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=1)
        first, second = fakes.decode.submits
        assert (first.attempt, second.attempt) == (1, 2)
        assert second.sampling == first.sampling
        assert tuple(second.token_ids) == (*first.token_ids, *fakes.decode.script[: after - 1])
        assert second.prompt_tokens == 30
        assert [opened.resume for opened in fakes.node.opened] == [False, True]
        await fakes.settled()


async def test_a_stream_lost_in_its_first_step_continues() -> None:
    """A slow worker reports the step's begin, its token and the loss in one delta."""
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.refuses_in_step = True
        fakes.decode.refusals = [(Unavailable.code, True)]
        whole(fakes, await within("the answer", read(fakes.client.generate(PROMPT))), replays=1)
        assert [tuple(submit.token_ids[30:]) for submit in fakes.decode.submits] == [(), fakes.decode.script[:1]]
        await fakes.settled()


async def test_all_streams_of_a_broken_connection_continue() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.break_after = 300
        answers = await asyncio.gather(*(read(fakes.client.generate(PROMPT)) for _ in range(12)))
        for deltas in answers:
            assert text_of(deltas) == line_text(fakes)
        assert sum(deltas[-1].timings.replays for deltas in answers) >= 1
        await fakes.settled()


async def test_a_restarting_decode_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        served, looks = fakes.gateway.cluster.served, 0

        def counted(*model: str) -> Served:
            nonlocal looks
            looks += 1
            return served(*model)

        fakes.decode.hold_after = 5
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("a stream amid its answer", lambda: fakes.decode.holds)
        await fakes.servers["decode"].stop(0)
        monkeypatch.setattr(fakes.gateway.cluster, "served", counted)
        await until("three looks for a worker", lambda: looks >= 3)
        assert not reading.done()
        fakes.decode.go_on()
        await start_again(fakes, "decode")
        whole(fakes, await reading, replays=1)
        await fakes.settled()


async def start_again(fakes: FakeCluster, role: str) -> None:
    """Restart the KV node or the decode worker at its old address."""
    from pillion.net import rpc
    from pillion.v1 import decode_pb2_grpc, kvnode_pb2_grpc

    def add_decode(server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(fakes.decode, server)

    def add_node(server) -> None:
        kvnode_pb2_grpc.add_KVNodeServicer_to_server(fakes.node, server)

    name, add = {"decode": ("Decode", add_decode), "kvnode": ("KVNode", add_node)}[role]
    again = await rpc.start_server(f"unix:{fakes.folder}/{role}.sock", [(f"pillion.v1.{name}", add)])
    fakes.servers[role].server = again.server


@pytest.mark.parametrize("role", ["kvnode", "decode"])
async def test_a_part_lost_while_a_new_request_is_planned_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The part is alive at look-up, and gone when the index has answered."""
    async with running_fake_cluster(SCRIPT) as fakes:
        cluster = fakes.gateway.cluster
        link = cluster.node("kv-0") if role == "kvnode" else cluster.decode("decode-0")
        answers, served, looks = cluster.index.longest_prefix, cluster.served, 0

        def counted(*model: str) -> Served:
            nonlocal looks
            looks += 1
            return served(*model)

        async def lost_meanwhile(hashes: bytes) -> list[PrefixHit]:
            if link.alive:
                await fakes.servers[role].stop(0)
                await until("the broken connection to be noticed", lambda: not link.alive)
                monkeypatch.setattr(cluster, "served", counted)
            return await answers(hashes)

        monkeypatch.setattr(cluster.index, "longest_prefix", lost_meanwhile)
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("three looks for the part", lambda: looks >= 3 or reading.done())
        assert not reading.done()
        monkeypatch.setattr(cluster.index, "longest_prefix", answers)
        await start_again(fakes, role)
        whole(fakes, await reading, replays=1)
        await fakes.settled()


async def test_a_request_waits_for_workers_whose_records_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow restart outlasts the worker's record; the wait is the same as with a record."""
    monkeypatch.setattr(links, "FIRST_LOOK_S", 0.1)
    async with running_fake_cluster(SCRIPT) as fakes:
        cluster = fakes.gateway.cluster
        cluster.view.grace_s = 0.0
        for component_id in ("kv-0", "decode-0"):
            await fakes.registry.leave(component_id)
        await until("an empty view", lambda: not any(r.role == "decode" for r in cluster.view.records()))
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await asyncio.wait([reading], timeout=2 * links.FIRST_LOOK_S)
        assert not reading.done()
        await fakes.registry.heartbeat(record("kv-0", "kvnode", f"unix:{fakes.folder}/kvnode.sock"))
        await fakes.registry.heartbeat(record("decode-0", "decode", f"unix:{fakes.folder}/decode.sock"))
        whole(fakes, await reading, replays=0)
        await fakes.settled()


async def test_a_request_does_not_wait_long_for_workers_that_left_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MIN_RETURN_WAIT_S", 0.2)
    async with running_fake_cluster(SCRIPT) as fakes:
        cluster = fakes.gateway.cluster
        cluster.view.grace_s = 0.0
        await fakes.registry.leave("decode-0")
        await until("an empty view", lambda: not any(r.role == "decode" for r in cluster.view.records()))
        with pytest.raises(Unavailable, match="no decode worker of model 'toy' lives"):
            await read(fakes.client.generate(PROMPT))
        await fakes.settled()


async def test_waiting_for_a_part_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MIN_RETURN_WAIT_S", 0.2)
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.hold_after = 5
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("a stream amid its answer", lambda: fakes.decode.holds)
        await fakes.servers["decode"].stop(0)
        with pytest.raises(Unavailable, match="no decode worker of model 'toy' lives"):
            await reading
        await fakes.settled()


async def test_another_decode_worker_takes_over() -> None:
    from pillion.net import rpc
    from pillion.v1 import decode_pb2_grpc

    async with running_fake_cluster(SCRIPT) as fakes:
        other = FakeDecode("")
        other.prefill, other.node = fakes.prefill, fakes.node
        other.script = fakes.decode.script
        address = f"unix:{fakes.folder}/other.sock"
        server = await rpc.start_server(
            address, [("pillion.v1.Decode", lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(other, s))]
        )
        try:
            await fakes.registry.heartbeat(record("decode-1", "decode", address))
            await until("a connection to the other decode worker", lambda: other.connections)
            for worker in (fakes.decode, other):
                worker.gate.clear()
            # Ties alternate: both workers get streams, and the survivor takes over those of the other.
            reading = [asyncio.create_task(read(fakes.client.generate(PROMPT))) for _ in range(6)]
            await until("six submits at both workers", lambda: len(fakes.decode.submits) + len(other.submits) == 6)
            assert (len(fakes.decode.submits), len(other.submits)) == (3, 3)
            await fakes.servers["decode"].stop(0)
            other.gate.set()
            answers = await asyncio.gather(*reading)
            assert {text_of(deltas) for deltas in answers} == {line_text(fakes)}
            assert {deltas[-1].timings.decode_worker for deltas in answers} == {"decode-1"}
            await fakes.settled()
        finally:
            await server.stop(0)


@pytest.mark.parametrize(
    ("error", "chunks"),
    [(Unavailable("gone"), 0), (NotFound("no such ticket"), 2), (Overloaded("queue full"), 0), (Internal("bug"), 2)],
)
async def test_a_lost_prefill_range_is_planned_again(error: PillionError, chunks: int) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.prefill.failures = [(chunks, error)]
        deltas = await read(fakes.client.generate(PROMPT))
        whole(fakes, deltas, replays=1)
        assert deltas[-1].timings.prefilled_tokens == 8 * chunks
        assert deltas[-1].timings.plan_reason.startswith("disaggregated: co-located")
        await fakes.settled()


async def test_an_unreachable_prefill_worker_costs_no_replay() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        link = fakes.gateway.cluster.prefill("prefill-0")
        await fakes.servers["prefill"].stop(0)
        await until("its broken connection to be noticed", lambda: not link.alive)
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=0)
        await fakes.settled()


@pytest.mark.parametrize("code", [NotFound.code, Conflict.code, Unavailable.code])
async def test_a_ticket_that_the_worker_does_not_find_is_opened_again(code: int) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.refusals = [(code, True)]
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=1)
        assert len({submit.ticket_id for submit in fakes.decode.submits}) == 2
        await fakes.settled()


async def test_a_final_refusal_is_returned_with_its_status() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.refusals = [(Overloaded.code, False)]
        with pytest.raises(Overloaded, match="refused by the script"):
            await read(fakes.client.generate(PROMPT))
        await fakes.settled()


async def test_attempts_are_bounded() -> None:
    async with running_fake_cluster(SCRIPT, max_attempts=3) as fakes:
        fakes.decode.refusals = [(NotFound.code, True)] * 9
        with pytest.raises(Unavailable, match="given up after 3 attempts; the last one: refused by the script"):
            await read(fakes.client.generate(PROMPT))
        assert len(fakes.decode.submits) == 3
        await fakes.settled()


@pytest.mark.parametrize("error", [Unavailable("restarting"), Conflict("no worker has attached"), NotFound("epoch")])
async def test_a_node_that_refuses_a_ticket_is_asked_again(error: PillionError) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.node.failures = [error]
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=1)
        await fakes.settled()


@pytest.mark.parametrize("error", [Unavailable("no worker"), Conflict("fenced"), NotFound("epoch"), Cancelled("over")])
async def test_a_returning_node_is_waited_for(error: PillionError) -> None:
    """Neither new nor running requests fail while the restarted node refuses tickets."""
    async with running_fake_cluster(SCRIPT, max_attempts=2) as fakes:
        fakes.node.failures = [error] * 5
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=1)
        fakes.decode.break_after = 20
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("a stream at the decode worker", lambda: fakes.decode.streams)
        fakes.node.failures = [error] * 5
        whole(fakes, await reading, replays=1)
        assert not fakes.node.failures
        await fakes.settled()


@pytest.mark.parametrize("code", [Unavailable.code, Conflict.code])
async def test_temporary_worker_refusals_cost_no_attempt(code: int) -> None:
    """While stopping or changing its epoch it refuses with a reason that costs no attempt."""
    async with running_fake_cluster(SCRIPT, max_attempts=2) as fakes:
        fakes.decode.refusals = [(code, True)] * 5
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=5)
        await fakes.settled()


async def test_a_ticket_of_an_earlier_node_epoch_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster(SCRIPT, max_attempts=2) as fakes:
        monkeypatch.setattr(fakes.gateway.cluster, "holds", lambda hold: False)
        fakes.decode.refusals = [(NotFound.code, True)] * 5
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=5)
        await fakes.settled()


@pytest.mark.parametrize("role", ["kvnode", "decode"])
async def test_waiting_for_a_part_that_refuses_is_bounded(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr(links, "MIN_RETURN_WAIT_S", 0.2)
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.node.failures = [Unavailable("no worker has attached")] * 99 if role == "kvnode" else []
        fakes.decode.refusals = [(Unavailable.code, True)] * 99 if role == "decode" else []
        with pytest.raises(Unavailable, match=r"given up after \d+ s without the components that it needs"):
            await read(fakes.client.generate(PROMPT))
        await fakes.settled()


async def test_a_request_that_killed_two_workers_is_not_sent_to_a_third() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.prefill.breaks_at = [0]
        fakes.decode.is_killed_by = lambda submit: len(fakes.decode.submits) in (2, 3)
        lost = r"two workers were lost in a step with this request \(prefill-0, decode-0\)"
        with pytest.raises(Internal, match=lost):
            await read(fakes.client.generate(PROMPT))
        assert (len(fakes.prefill.prefill_ranges), len(fakes.decode.submits)) == (1, 2)
        await until("the connection again", lambda: fakes.gateway.cluster.decode("decode-0").alive)
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=1)
        await fakes.settled()


@pytest.mark.parametrize(("in_prefill", "in_decode"), [(1, 0), (0, 5), (1, 5)])
async def test_waiting_in_a_queue_costs_no_attempt(in_prefill: int, in_decode: int) -> None:
    async with running_fake_cluster(SCRIPT, max_attempts=1) as fakes:
        fakes.prefill.breaks_at, fakes.decode.breaks_in_line = [2] * in_prefill, in_decode
        answer = await within("the answer", read(fakes.client.generate(PROMPT)))
        whole(fakes, answer, replays=in_prefill + in_decode)
        await fakes.settled()


async def test_workers_lost_with_their_node_are_not_blamed_on_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        monkeypatch.setattr(fakes.gateway.cluster, "holds", lambda hold: False)
        fakes.decode.is_killed_by = lambda submit: len(fakes.decode.submits) <= 3
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=3)
        await fakes.settled()


async def test_streams_beside_a_worker_killing_request_continue() -> None:
    """They had tokens from that worker, so they are not suspects."""
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.pace_s = 0.05
        beside = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("a stream at the decode worker", lambda: fakes.decode.streams)
        fakes.decode.is_killed_by = lambda submit: submit.prompt_tokens < 10
        with pytest.raises(Internal, match="two workers were lost in a step"):
            await read(fakes.client.generate("Kill!"))
        fakes.decode.pace_s = 0.0
        assert text_of(await beside) == line_text(fakes)
        await fakes.settled()


async def test_a_full_node_raises_overloaded() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.node.failures = [Overloaded("the prompt can never fit")]
        with pytest.raises(Overloaded, match="never fit"):
            await read(fakes.client.generate(PROMPT))
        await fakes.settled()


async def test_waiting_for_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ADMISSION_WAIT_S", 0.2)
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.node.gate.clear()
        with pytest.raises(Overloaded, match="no KV memory came free at kv-0"):
            await read(fakes.client.generate(PROMPT))
        await fakes.settled()
        await until("the ticket to be forgotten", lambda: fakes.node.forgotten)


async def test_a_node_that_restarts_gets_a_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MIN_RETURN_WAIT_S", 0.2)
    async with running_fake_cluster(SCRIPT) as fakes:
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=0)
        await fakes.servers["kvnode"].stop(0)
        with pytest.raises(Unavailable, match="no KV node lives"):
            await read(fakes.client.generate(PROMPT))
        await start_again(fakes, "kvnode")
        await until("a model to be served", fakes.client.models)
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=0)
        assert len({opened.epoch for opened in fakes.node.opened}) == 2
        await fakes.settled()


async def test_requests_are_served_during_a_redis_outage() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        with fakes.redis.stopped():
            whole(fakes, await read(fakes.client.generate(PROMPT)), replays=0)
            assert not (await fakes.client.status()).index_available
            await fakes.settled()


async def test_a_silent_worker_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = TurnedClock()
    monkeypatch.setattr(request_runner, "time", clock)
    monkeypatch.setattr(request_runner, "LOGGED_SILENCE_S", 0.1)
    monkeypatch.setattr(request_runner, "MAX_SILENCE_S", 0.3)
    async with running_fake_cluster(SCRIPT, max_attempts=2) as fakes:
        fakes.decode.gate.clear()
        runner = await fakes.gateway.gateway.generate(GenerateRequest(text=PROMPT))
        (machine,) = runner._samples.machines

        def decodes(attempt: int) -> bool:
            return machine.attempt == attempt and machine.state is RequestState.DECODING

        def ended(attempt: int) -> bool:
            clock.now_s += request_runner.MAX_SILENCE_S
            return machine.attempt > attempt or runner.ended

        for attempt in (1, 2):
            await until("a worker that decodes", lambda n=attempt: decodes(n))
            await until("the attempt's end", lambda n=attempt: ended(n))
        with pytest.raises(Unavailable, match="given up after 2 attempts; the last one: no progress report"):
            await read(runner)
        await fakes.settled()
        assert len(fakes.decode.cancelled) == 2
    told = [record.getMessage() for record in caplog.records if "silent for" in record.getMessage()]
    for attempt in (1, 2):
        assert any(f"is decoding (prefill-0, decode-0) in attempt {attempt}," in text for text in told), told


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_long_queue_is_not_silence(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A worker that reports a queued request keeps it for any time; it is not restarted elsewhere."""
    monkeypatch.setattr(request_runner, "MAX_SILENCE_S", 0.2)
    told, clock = list[int](), TurnedClock()
    monkeypatch.setattr(request_runner, "time", clock)
    async with running_fake_cluster(SCRIPT, max_attempts=2) as fakes:
        worker: FakePrefill | FakeDecode = fakes.prefill if where == "prefill" else fakes.decode
        monkeypatch.setattr(RequestRunner, "_handle", spying(RequestRunner._handle, told, clock))
        worker.gate.clear()
        worker.tells_queued = True
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        # Many times the max silence by the request's clock, which is read repeatedly.
        await until("signs of life", lambda: len(told) >= 8)
        worker.gate.set()
        whole(fakes, await reading, replays=0)
        assert set(told) == {{"prefill": 2, "decode": 3}[where]}
        await fakes.settled()


class TurnedClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def monotonic(self) -> float:
        return self.now_s


def spying(handle: Callable[..., Any], told: list[int], clock: TurnedClock) -> Callable[..., Any]:
    """Call ``handle``, recording queue positions; then advance the clock by half of the max silence."""

    def spy(runner: RequestRunner, index: int | None, event: Any) -> Any:
        done = handle(runner, index, event)
        if isinstance(event, StillQueued):
            told.append(event.position)
            clock.now_s += request_runner.MAX_SILENCE_S / 2
        return done

    return spy


async def stuck(fakes: FakeCluster, stage: str) -> None:
    """Block the next request at ``stage``."""
    {"ticket": fakes.node, "prefill": fakes.prefill, "decode": fakes.decode}[stage].gate.clear()


def reached(fakes: FakeCluster, stage: str) -> bool:
    return bool({"ticket": fakes.node.waiting, "prefill": fakes.prefill.running, "decode": fakes.decode.streams}[stage])


@pytest.mark.parametrize("stage", ["ticket", "prefill", "decode"])
async def test_cancelling_frees_everything_at_every_stage(stage: str) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        await stuck(fakes, stage)
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("the stage to be reached", lambda: reached(fakes, stage))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await fakes.settled()
        # A stream that waits for its prompt's blocks counts as well.
        assert len(fakes.decode.cancelled) == (stage != "ticket")
        # Withdrawing a ticket that was not granted yet is asynchronous.
        await until("the node to be told", lambda: bool(fakes.node.forgotten) == (stage == "ticket"))


async def test_leaving_the_iteration_mid_stream_cancels() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.hold_after = 5
        stream = fakes.client.generate(PROMPT)
        async for delta in stream:
            if delta.text:
                break
        await stream.aclose()
        await fakes.settled()
        assert len(fakes.decode.cancelled) == 1


async def test_a_client_disconnect_cancels() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.gate.clear()
        readings = [asyncio.create_task(read(fakes.client.generate(PROMPT))) for _ in range(5)]
        await until("five streams", lambda: len(fakes.decode.streams) == 5)
        await fakes.client.close()
        outcomes = await asyncio.gather(*readings, return_exceptions=True)
        assert all(isinstance(outcome, Cancelled | asyncio.CancelledError) for outcome in outcomes)
        await fakes.settled()


# Retry with longer deadlines: on a stalled machine one may pass before the request reaches its stage.
MORE_AND_MORE_TIME_S = (0.2, 2.0, 8.0, 32.0)


@pytest.mark.parametrize("stage", ["ticket", "prefill", "decode"])
async def test_deadlines_are_propagated_and_free_everything(stage: str) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        await stuck(fakes, stage)
        came: list[Any] = {
            "ticket": fakes.node.opened, "prefill": fakes.prefill.prefill_ranges, "decode": fakes.decode.submits
        }[stage]  # fmt: skip
        for timeout_s in MORE_AND_MORE_TIME_S:
            with pytest.raises(DeadlineExceeded):
                await read(fakes.client.generate(PROMPT, timeout_s=timeout_s))
            await fakes.settled()
            if came:
                break
        else:
            raise AssertionError(f"no request came as far as its {stage} in {timeout_s} s")
        if stage == "decode":
            assert 0 < fakes.decode.submits[0].timeout_ms <= timeout_s * 1000


async def test_the_gateway_enforces_the_deadline_itself() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        await stuck(fakes, "decode")
        for timeout_s in MORE_AND_MORE_TIME_S:
            try:
                runner = await fakes.gateway.gateway.generate(GenerateRequest(text=PROMPT), timeout_s=timeout_s)
                break
            except DeadlineExceeded:
                pass
        with pytest.raises(DeadlineExceeded, match="the request's deadline passed"):
            await read(runner)
        await fakes.settled()
        with pytest.raises(DeadlineExceeded, match="while it was tokenized"):
            await fakes.gateway.gateway.generate(GenerateRequest(text=PROMPT), timeout_s=0.0)
        await fakes.settled()


async def test_a_stopping_gateway_frees_everything() -> None:
    async with running_fake_cluster(SCRIPT) as fakes, impatient_client(fakes) as client:
        fakes.decode.gate.clear()
        readings = [asyncio.create_task(read(client.generate(PROMPT))) for _ in range(3)]
        await until("three streams", lambda: len(fakes.decode.streams) == 3)
        await fakes.gateway.stop(0.1)
        outcomes = await asyncio.gather(*readings, return_exceptions=True)
        assert all(isinstance(outcome, PillionError) for outcome in outcomes)
        await until("everything to be released", lambda: not fakes.node.held and not fakes.decode.streams)


async def test_a_defect_ends_one_request_and_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        fakes.decode.gate.clear()
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("a stream at the decode worker", lambda: fakes.decode.streams)

        def broken(*_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr("pillion.gateway.tokens.answer_text.AnswerText.push", broken)
        fakes.decode.gate.set()
        with pytest.raises(Internal, match="the gateway's log"):
            await reading
        await fakes.settled()
        monkeypatch.undo()
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=0)
        await fakes.settled()


async def test_an_unexpected_cancel_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a cancel looks like the request's own, so its reader would wait forever."""
    async with running_fake_cluster(SCRIPT) as fakes:

        async def cancelled(*_: object) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(fakes.gateway.cluster, "hits", cancelled)
        with pytest.raises(Internal, match="the gateway's log"):
            await within("the request to end", read(fakes.client.generate(PROMPT)))
        await fakes.settled()
        monkeypatch.undo()
        whole(fakes, await read(fakes.client.generate(PROMPT)), replays=0)
        await fakes.settled()


async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    async with running_fake_cluster(SCRIPT) as fakes:
        core = fakes.gateway.gateway
        runner = await core.generate(GenerateRequest(text=PROMPT))
        await until("the end of the request", lambda: runner.ended)
        (delta,) = [delta async for delta in runner]
        assert delta.text == line_text(fakes)
        assert delta.token_ids == fakes.decode.script
        assert delta.usage is not None
        await fakes.settled()
