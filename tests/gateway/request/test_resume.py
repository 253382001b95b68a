"""Streams whose connection breaks at any message resume, and equal undisturbed ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from pillion import AsyncClient, Client, Conflict, DeadlineExceeded, Delta, InvalidRequest, Overloaded, Unavailable
from pillion.client.client_requests import prompt_request, to_pb
from pillion.client.outputs import OutputCollector, RequestOutput
from pillion.net import rpc
from pillion.types import AnswerSoFar, FinishReason, Resume, SamplingParams, StreamOrigin
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.fake_components import FakeCluster, running_fake_cluster, script_of

PROMPT = "What is the capital of France?"
TEXT = "Größe: 北京 is 🙂 not THE END."
SCRIPTS = {70: "yes", 71: "It is THE one", 72: TEXT}
CASES: dict[str, dict[str, Any]] = {
    "characters": {},
    "a stop string": {"stop": ("THE END", "THE ENX")},
    "a stop string of half the answer": {"stop": ("京 is 🙂 not",)},
    "max_tokens": {"max_tokens": 9},
    "a stop id": {"stop_token_ids": (script_of("🙂")[0],)},
    "a stop string in the text": {"stop": ("THE END", "THE ENX"), "include_stop_str_in_output": True},
    "all of what is special": {"include_stop_str_in_output": True, "skip_special_tokens": False, "n": 2, "seed": 71},
    "tokens alone": {"detokenize": False},
    "a prompt that is cut": {"truncate_prompt_tokens": 9, "bad_words": ("sea",), "allowed_token_ids": (1, 2)},
    "several answers": {"n": 3, "seed": 70, "logprobs": 2},
    "several with a stop string": {"n": 3, "seed": 70, "stop": "THE"},
    "a scored prompt": {"n": 2, "seed": 70, "prompt_logprobs": 1, "max_tokens": 6},
}


class Cutter(gateway_pb2_grpc.GatewayServicer):
    """A gateway connection that breaks after ``cuts`` messages, call by call, then no more.

    Request "once-3" breaks once after three messages, "each-3" every three, and "end" after its last message.
    ``interrupted``: requests that broke before their last message.
    """

    def __init__(self, gateway: grpc.aio.Channel) -> None:
        self._stub = gateway_pb2_grpc.GatewayStub(gateway)
        self.cuts: Iterator[int] = iter(())
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.interrupted: set[str] = set()
        self.edit: Callable[[gateway_pb2.GenerateResponse], None] = lambda _: None
        self.refusals: list[Exception] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.requests.append(request)
        if self.refusals:
            raise self.refusals.pop(0)
        kind, _, after = request.request_id.partition("-")
        left = next(self.cuts, None)
        if kind == "each" or (kind == "once" and not request.HasField("resume")):
            left = int(after)
        call = self._stub.Generate(request, timeout=context.time_remaining())
        try:
            async for message in call:
                self.edit(message)
                yield message
                ended = message.HasField("usage")
                if left is not None:
                    left -= 1
                elif kind == "end" and ended:
                    left = 0
                if left is not None and left <= 0:
                    if not ended:
                        self.interrupted.add(request.request_id)
                    break
        finally:
            call.cancel()
        if left is not None and left <= 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@contextlib.asynccontextmanager
async def cut_gateway() -> AsyncIterator[tuple[FakeCluster, Cutter, str]]:
    async with running_fake_cluster(TEXT) as fakes, rpc.open_channel(fakes.gateway.grpc_address) as channel:
        fakes.decode.scripts = {seed: script_of(text) for seed, text in SCRIPTS.items()}
        fakes.node.pinned = 2
        cutter = Cutter(channel)
        add = lambda server: gateway_pb2_grpc.add_GatewayServicer_to_server(cutter, server)  # noqa: E731
        running = await rpc.start_server("127.0.0.1:0", [("pillion.v1.Gateway", add)])
        try:
            yield fakes, cutter, running.address
        finally:
            await running.stop(0)


def whole(deltas: Iterable[Delta]) -> RequestOutput:
    """Return a stream's output, without values that vary between runs."""
    collector = OutputCollector(None, None, True)
    for delta in deltas:
        collector.add(delta)
    return replace(collector.output(), request_id="", timings=None)


async def read(client: AsyncClient, **fields: Any) -> list[Delta]:
    return [delta async for delta in client.generate(PROMPT, **{"seed": 5, "temperature": 0.5, **fields})]


@pytest.mark.long
async def test_a_stream_cut_anywhere_resumes() -> None:
    async with cut_gateway() as (fakes, cutter, address), AsyncClient(address) as client:
        for name, fields in CASES.items():
            undisturbed = await read(client, **fields)
            wanted, messages = whole(undisturbed), len(undisturbed)
            assert wanted.finished
            # Cut after each message, the last included; and repeatedly after one message. The number of messages
            # depends on merging while the reader is busy.
            labels = [*(f"once-{cut}" for cut in range(1, messages)), "end", "each-1"]
            cutter.requests.clear()
            cutter.interrupted.clear()
            found = await asyncio.gather(*(read(client, request_id=label, **fields) for label in labels))
            for label, deltas in zip(labels, found, strict=True):
                assert whole(deltas) == wanted, f"{name}, cut {label}"
                assert {delta.request_id for delta in deltas} == {label}
                calls = sum(request.request_id == label for request in cutter.requests)
                if label != "each-1":
                    assert calls == 1 + (label in cutter.interrupted)
                assert deltas[-1].timings is not None
                assert deltas[-1].timings.replays == calls - 1
            assert cutter.interrupted, "the first messages are not the last"
        await fakes.settled()


async def test_the_blocking_client_resumes_with_the_drawn_seed() -> None:
    async with cut_gateway() as (fakes, cutter, address):
        with Client(address) as client:

            def ask(**fields: Any) -> list[Delta]:
                return list(client.chat([{"role": "user", "content": "Hi"}], **fields))

            fields = {"n": 3, "seed": 70, "logprobs": 1, "stop": "THE"}
            wanted = whole(await asyncio.to_thread(ask, **fields))
            # Cache hits of the replay do not change this request's usage.
            cutter.cuts, cutter.edit = iter([3, 1, 4]), lambda _: setattr(fakes.node, "pinned", 3)
            assert wanted.num_cached_tokens == 8
            assert whole(await asyncio.to_thread(ask, **fields)) == wanted
            fakes.decode.submits.clear()
            cutter.cuts = iter([2])
            assert whole(await asyncio.to_thread(ask)).outputs[0].text == TEXT
            assert len({submit.sampling.seed for submit in fakes.decode.submits}) == 1
            assert len(fakes.decode.submits) == 2
            cutter.cuts = iter([2, 2])
            batch = await asyncio.to_thread(client.batch, ["a", "b"], concurrency=2)
            assert [output.outputs[0].text for output in batch] == [TEXT] * 2
        await fakes.settled()


async def test_a_temporary_refusal_of_a_resume_is_retried() -> None:
    async with cut_gateway() as (_, cutter, address), AsyncClient(address) as client:
        cutter.cuts = iter([3])

        def refuse_the_next(_: gateway_pb2.GenerateResponse) -> None:
            if len(cutter.requests) == 1:
                cutter.refusals = [Overloaded("full", 1), Unavailable("no decode worker lives")]

        cutter.edit = refuse_the_next
        assert whole(await read(client)).outputs[0].text == TEXT
        # For a stream that is not being resumed a refusal is final.
        cutter.edit, cutter.refusals = lambda _: None, [Overloaded("full", 1)]
        with pytest.raises(Overloaded):
            await read(client)


async def test_streams_are_not_resumed_without_time_or_origin() -> None:
    async with cut_gateway() as (fakes, cutter, address), AsyncClient(address) as client:
        async with AsyncClient(address, resume_timeout_s=0) as plain:
            cutter.cuts = iter([3])
            with pytest.raises(Unavailable, match="Socket closed"):
                await read(plain)
        cutter.cuts = iter([1] * 1000)
        fakes.decode.pace_s = 0.2
        with pytest.raises(DeadlineExceeded):
            await read(client, timeout_s=1.0)
        fakes.decode.pace_s = 0.001
        # A gateway of an older release ignores Resume and restarts the answer.
        cutter.cuts, cutter.requests = iter([3]), []

        def forget(message: gateway_pb2.GenerateResponse) -> None:
            if len(cutter.requests) > 1:
                message.ClearField("origin")

        cutter.edit = forget
        with pytest.raises(Unavailable, match="too old"):
            await read(client)
        await fakes.settled()


async def test_bad_resumes_are_refused_by_field() -> None:
    async with running_fake_cluster(TEXT) as fakes, rpc.open_channel(fakes.gateway.grpc_address) as channel:
        stub, messages = gateway_pb2_grpc.GatewayStub(channel), []
        request = prompt_request(PROMPT, sampling=SamplingParams(max_tokens=4, n=2))
        async for message in stub.Generate(to_pb(request)):
            messages.append(message)
        first = messages[0].origin
        origin = StreamOrigin(first.seed, first.digest, first.cached_tokens)
        assert not any(message.HasField("origin") for message in messages[1:])

        async def ask(resume: Resume, sampling: SamplingParams = request.sampling) -> list[Any]:
            sent = to_pb(replace(request, sampling=sampling, resume=resume))
            try:
                return [message async for message in stub.Generate(sent)]
            except grpc.aio.AioRpcError as error:
                raise rpc.from_rpc_error(error) from None

        async def violations(answers: Iterable[AnswerSoFar], origin: StreamOrigin = origin) -> list[str]:
            with pytest.raises(InvalidRequest) as caught:
                await ask(Resume(origin, tuple(answers)))
            return [violation.field for violation in caught.value.violations]

        one, ended = AnswerSoFar((3, 4)), AnswerSoFar((3,), FinishReason.STOP)
        assert await violations([one]) == ["resume.answers"]
        assert await violations([ended, ended]) == ["resume.answers"]
        assert await violations([one, AnswerSoFar((1, 2, 3, 4, 5))]) == ["resume.answers[1].token_ids"]
        assert await violations([one, AnswerSoFar((300,))]) == ["resume.answers[1].token_ids[0]"]
        assert await violations([one, one], replace(origin, digest=b"x")) == ["resume.origin.digest"]
        assert await violations([one, one], replace(origin, cached_tokens=30)) == ["resume.origin.cached_tokens"]
        with pytest.raises(InvalidRequest, match="best_of"):
            await ask(Resume(origin, (one, one)), SamplingParams(n=2, best_of=3))
        with pytest.raises(Conflict, match="weights of 'toy' here differ"):
            await ask(Resume(replace(origin, digest=bytes(32)), (one, one)))
        (*_, last) = await ask(Resume(origin, (AnswerSoFar((3, 4, 5, 6)), one)))
        assert last.usage.completion_tokens == 8
        await fakes.settled()
