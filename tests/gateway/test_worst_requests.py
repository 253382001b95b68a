"""The dearest request of each kind, sent to a real gateway: it is refused or served, and the event loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pillion.gateway.tokens.tokenizer import LOOP_BYTES, TokenizerPool
from pillion.net.rpc import open_channel
from pillion.v1 import common_pb2, gateway_pb2
from testbed.conditions import loop_turns
from tests.support import fake_components
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call
from tests.support.loop_work import counted_loop_work

# A real context, so that what just fits is dear as well.
CONTEXT = 2**17
# Calls in one callback. Reading the dearest 16 KiB takes 35,000, 3 ms; a gateway of before made millions.
MAX_CALLS = 60_000
# Turns of the loop beside each job on a thread.
TURNS = 50
MILLION = 2**20
MESSAGE = b'{"role":"user","content":"x"}'
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


def many(item: bytes, size_bytes: int = 8_000_000) -> bytes:
    """A list of as many items as that many bytes hold."""
    return b"[" + b",".join([item] * (size_bytes // (len(item) + 1))) + b"]"


def ids(count: int) -> bytes:
    return b"[" + b",".join([b"100"] * count) + b"]"


def body(**fields: bytes) -> bytes:
    """A JSON body of fields that are JSON already."""
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in fields.items()) + b"}"


def parts(size_bytes: int) -> bytes:
    return b'[{"role":"user","content":' + many(b'{"type":"text"}', size_bytes) + b"}]"


TEXT = json.dumps("x, y" * (CONTEXT // 4 - 1)).encode()
ONE = b"1"
# Path, body, and the field that is blamed; none for what is served.
WORST: dict[str, tuple[str, bytes, str]] = {
    "strings of tokens": (
        "/tokenize",
        body(prompt=TEXT, add_special_tokens=b"false", return_token_strs=b"true"),
        "",
    ),
    "a bare text": ("/tokenize", body(prompt=b'"' + b"x" * 4_000_000 + b'"', add_special_tokens=b"false"), "prompt"),
    "ids that fit": ("/detokenize", body(tokens=ids(CONTEXT)), ""),
    "a million ids": ("/detokenize", body(tokens=ids(MILLION)), "tokens"),
    "an echo that fits": (COMPLETE, body(prompt=ids(CONTEXT - 1), echo=b"true", max_tokens=ONE), ""),
    "an echo of a million": (COMPLETE, body(prompt=ids(MILLION), echo=b"true"), "prompt"),
    "log probabilities": (
        COMPLETE,
        body(prompt=b'"x"', max_tokens=b"60", ignore_eos=b"true", n=b"24", logprobs=b"20"),
        "",
    ),
    "lists of ids": (COMPLETE, body(prompt=b"[" + b",".join([ids(2000)] * 128) + b"]", max_tokens=ONE), ""),
    "empty prompts": (COMPLETE, body(prompt=many(b"[]")), "prompt"),
    "empty texts": (COMPLETE, body(prompt=many(b'""')), "prompt"),
    "a mixture": (COMPLETE, body(prompt=b'["x",' + ids(MILLION)[1:]), "prompt[1]"),
    "a large text": (COMPLETE, body(prompt=b'"' + "你".encode() * 2_000_000 + b'"'), "prompt"),
    "parts": (CHAT, body(messages=parts(8_000_000)), "messages"),
    "parts on the loop": (CHAT, body(messages=parts(LOOP_BYTES - 100), max_tokens=ONE), ""),
    "escaped names": (CHAT, body(messages=many(b'{"\\u0072ole":"user","content":""}')), "messages"),
    "empty messages": (CHAT, body(messages=many(b"{}")), "messages[0].role"),
    "all messages": (CHAT, body(messages=b"[" + b",".join([MESSAGE] * 4096) + b"]", max_tokens=ONE), ""),
    "a long message": (CHAT, body(messages=b'[{"role":"user","content":%b}]' % TEXT), "messages"),
    "tools": (CHAT, body(messages=b"[" + MESSAGE + b"]", tools=many(b"{}")), "tools"),
    "stops": (COMPLETE, body(prompt=b'"x"', stop=many(b'""')), "prompt"),
    "long stops": (COMPLETE, body(prompt=b'"x"', stop=many(b'"' + b"x" * 4000 + b'"')), "stop"),
    "stop ids": (COMPLETE, body(prompt=b'"x"', stop_token_ids=many(ONE)), "stop_token_ids"),
    "biases": (COMPLETE, body(prompt=b'"x"', logit_bias=b"{" + many(b'"1":0')[1:-1] + b"}"), "prompt"),
    "a field many times": (COMPLETE, b"{" + many(b'"user":""')[1:-1] + b',"prompt":"x"}', "prompt"),
    "a long name": (COMPLETE, b'{"' + b"x" * 8_000_000 + b'":1}', "x" * 100),
}


def field(number: int, content: bytes) -> bytes:
    """A field of bytes on the wire; its size in four bytes."""
    size = len(content)
    return (
        bytes((number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21)) + content
    )


def generate(**fields: Any) -> bytes:
    sampling = common_pb2.SamplingParams(max_tokens=1)
    return gateway_pb2.GenerateRequest(sampling=sampling, **fields).SerializeToString()


MESSAGES: dict[str, tuple[bytes, str]] = {
    "empty messages": (b"\x22\x00" * 4_000_000, "messages"),
    "fields of a message": (field(4, b"\x0a\x00" * 4_000_000), "messages"),
    "stops": (field(5, b"\x32\x00" * 4_000_000), "sampling"),
    "biases": (field(5, b"\x6a\x00" * 4_000_000), "sampling"),
    "single ids": (b"\x18\x01" * 4_000_000, "messages"),
    "packed ids": (field(3, b"\x01" * 8_000_000), "token_ids"),
    "a million ids": (generate(token_ids=[100] * MILLION), "token_ids"),
    "ids that fit": (generate(token_ids=[100] * (CONTEXT - 1)), ""),
    "all messages": (generate(messages=[gateway_pb2.ChatMessage(role="user", content="x")] * 4096), ""),
    "a large text": (generate(text="你" * 2_000_000), "text"),
}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the jobs on threads. Each of them ends only when the loop has made TURNS turns beside it."""
    names: list[str] = []
    before = TokenizerPool.run

    async def run(self: TokenizerPool, job: Callable[..., Any], *arguments: Any) -> Any:
        names.append(getattr(job, "__name__", ""))
        passed = threading.Event()

        async def turn() -> None:
            await loop_turns(TURNS)
            passed.set()

        def held(*given: Any) -> Any:
            assert passed.wait(60), "the event loop stood still"
            return job(*given)

        beside = asyncio.create_task(turn())
        try:
            return await before(self, held, *arguments)
        finally:
            await beside

    monkeypatch.setattr(TokenizerPool, "run", run)
    monkeypatch.setattr(fake_components, "MAX_LEN", CONTEXT)
    return names


async def test_the_worst_bodies_leave_the_loop_to_others(jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster("abc" * 20, chunk_size=8192, max_inflight_tokens=10**8) as fakes:
        fakes.decode.per_delta = 60
        for name, (path, raw, blamed) in WORST.items():
            assert len(raw) < 2**23, name
            jobs.clear()
            with counted_loop_work(monkeypatch) as work:
                reply = await call(fakes.gateway.http_address, path, raw)
            assert reply.status == (400 if blamed else 200), (name, reply.body[:300])
            if blamed:
                assert reply.error["param"].startswith(blamed), (name, reply.body[:300])
            assert work.calls < MAX_CALLS, (name, work)
            assert work.json_bytes <= LOOP_BYTES, (name, work)
            assert jobs[-1] == "whole" or name != "log probabilities"
            assert jobs, name
        await fakes.settled()


async def test_the_worst_messages_leave_the_loop_to_others(jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_fake_cluster("abc", chunk_size=8192, max_inflight_tokens=10**8) as fakes,
        open_channel(fakes.gateway.grpc_address) as channel,
    ):
        for name, (raw, blamed) in MESSAGES.items():
            jobs.clear()
            stream = channel.unary_stream("/pillion.v1.Gateway/Generate")(raw)
            with counted_loop_work(monkeypatch) as work, contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stream:
                    pass
            code = await stream.code()
            expected = grpc.StatusCode.INVALID_ARGUMENT if blamed else grpc.StatusCode.OK
            assert code is expected, (name, await stream.details())
            assert not blamed or f"{blamed}: " in await stream.details(), name
            assert work.calls < MAX_CALLS, (name, work)
            assert jobs[0] == "read_generate", name
        await fakes.settled()
