"""Hundreds of malformed HTTP bodies (number: PILLION_FUZZ); each is answered, and the gateway serves on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Callable
from typing import Any

from lab.testbed.conditions import WITHIN_S, until
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call, connected, request_bytes

COUNT = int(os.environ.get("PILLION_FUZZ", "400"))
AT_ONCE = 8
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "toy",
        "prompt": ["hello", "there"],
        "max_tokens": 5,
        "n": 2,
        "stop": ["x", "y"],
        "logit_bias": {"5": 1.5},
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 1,
        "seed": 7,
    },
    "/v1/chat/completions": {
        "model": "toy",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_logprobs": 2,
        "logprobs": True,
        "tools": [],
        "stop_token_ids": [1, 2],
    },
    "/tokenize": {"model": "toy", "prompt": "hello", "return_token_strs": True},
    "/detokenize": {"model": "toy", "tokens": [1, 2, 3]},
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}],
            },
        ],
        "stop_sequences": ["x"],
        "stream": True,
        "thinking": {"type": "enabled"},
        "metadata": {"user_id": "u"},
    },
    "/v1/responses": {
        "model": "toy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "stream": True,
    },
    "/v1/embeddings": {
        "model": "toy",
        "input": ["hello", "there"],
        "dimensions": 2,
        "encoding_format": "base64",
        "truncate_prompt_tokens": 4,
    },
    "/v1/rerank": {"model": "toy", "query": "hello", "documents": ["there", {"text": "x"}], "top_n": 1},
    "/v1/score": {"model": "toy", "text_1": "hello", "text_2": ["there", "x"], "max_tokens_per_doc": 5},
    "/v1/classify": {"model": "toy", "input": ["hello", "there"], "use_activation": False},
}
PATHS = tuple(BODIES)
STRANGE = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**63) - 1,
    10**40,
    0.5,
    1e300,
    "",
    "x",
    "\ud800",
    "\x00",
    "ä" * 3000,
    [],
    {},
    [[]],
    {"a": {"b": [1]}},
    [None],
    ["\udfff"],
    [2**70],
    {"": ""},
)


def a_strange_value(draw: random.Random, body: dict[str, Any]) -> bytes:
    """Replace a random node by an unexpected value."""
    node: Any = body
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = draw.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.6:
            node = node[key]
            continue
        node[key] = draw.choice(STRANGE)
        return json.dumps(body).encode()


def a_strange_field(draw: random.Random, body: dict[str, Any]) -> bytes:
    """Add a field of another request, or an unknown one."""
    other = draw.choice(list(BODIES.values()))
    name = draw.choice([*other, "response_format", "suffix", "echo", "x" * 50, "best_of", "cache_salt", "priority"])
    return json.dumps({**body, name: draw.choice(STRANGE)}).encode()


def a_broken_text(draw: random.Random, body: dict[str, Any]) -> bytes:
    """Change, remove or repeat some bytes."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(raw))
        match draw.randrange(4):
            case 0:
                raw[at] = draw.randrange(256)
            case 1:
                del raw[at : at + draw.randint(1, 8)]
            case 2:
                raw[at:at] = bytes(draw.choices(b'[]{}",:\\\x00\xff0e-', k=draw.randint(1, 6)))
            case _:
                raw[at:at] = raw[at : at + 20]
        if not raw:
            break
    return bytes(raw)


def noise(draw: random.Random, body: dict[str, Any]) -> bytes:
    """Return a body that is not JSON, or nested far too deep."""
    if draw.random() < 0.5:
        return draw.randbytes(draw.randrange(200))
    return draw.choice((b"[", b'{"a":', b'{"prompt":[')) * draw.choice((10, 2000, 100_000))


KINDS: tuple[Callable[[random.Random, dict[str, Any]], bytes], ...] = (
    a_strange_value,
    a_strange_field,
    a_broken_text,
    noise,
)


async def test_malformed_bodies_are_answered() -> None:
    draw = random.Random(6)
    statuses: dict[int, int] = {}
    async with running_fake_cluster("abc", max_inflight_requests=1024) as fakes:
        address = fakes.gateway.http_address

        async def one() -> None:
            path = draw.choice(PATHS)
            body = draw.choice(KINDS)(draw, json.loads(json.dumps(BODIES[path])))
            reply = await call(address, path, body)
            assert reply.status in (200, 400, 404), (reply, body)
            if reply.status != 200:
                assert reply.json["error"]["message"], body
            statuses[reply.status] = statuses.get(reply.status, 0) + 1

        async def several(count: int) -> None:
            for _ in range(count):
                await asyncio.wait_for(one(), WITHIN_S)

        await asyncio.gather(*(several(COUNT // AT_ONCE) for _ in range(AT_ONCE)))
        assert statuses[400] > COUNT // 2
        assert (await call(address, "/health")).status == 200
        assert (await call(address, "/v1/completions", {"prompt": "x"})).json["choices"][0]["text"] == "abc"
        await fakes.settled()


HEADS = (
    b"Content-Length: -1",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Content-Encoding: gzip",
    b"Content-Type: text/plain",
    b"Expect: 100-continue",
    b"Upgrade: h2c\r\nConnection: Upgrade",
    b"X-Request-Id: \xff\x00",
    b"traceparent: 00-zz",
    b"Authorization: " + b"x" * 40_000,
    b"Host: \r\n folded",
    b": nameless",
)


def a_broken_request(draw: random.Random) -> bytes:
    """Draw odd headers, an odd request line, broken bytes, two requests at once, or not HTTP."""
    path = draw.choice(PATHS)
    raw = bytearray(request_bytes("POST", path, BODIES[path]))
    if draw.random() < 0.6:
        at = raw.index(b"\r\n") + 2
        raw[at:at] = draw.choice(HEADS) + b"\r\n"
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(min(len(raw), 120))
        raw[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
    if draw.random() < 0.1:
        return draw.choice((draw.randbytes(500), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00" * 9))
    return bytes(raw * draw.choice((1, 1, 1, 3)))


async def test_malformed_http_leaves_nothing() -> None:
    """The connection may close without an answer; nothing remains and no defect is logged."""
    draw = random.Random(6)
    async with running_fake_cluster("abc", max_inflight_requests=1024) as fakes:
        answered = 0

        async def several(count: int) -> None:
            nonlocal answered
            for _ in range(count):
                async with connected(fakes.gateway.http_address) as (reader, writer):
                    with contextlib.suppress(ConnectionError):
                        writer.write(a_broken_request(draw))
                        writer.write_eof()
                        received = await asyncio.wait_for(reader.read(), WITHIN_S)
                        assert not received or received.startswith(b"HTTP/1.1 "), received
                        assert b" 500 " not in received[:20], received
                        answered += bool(received)

        await asyncio.gather(*(several(COUNT // AT_ONCE) for _ in range(AT_ONCE)))
        assert answered > COUNT // 2
        await until("all connections to end", lambda: not fakes.gateway.http.connections)
        assert (await call(fakes.gateway.http_address, "/v1/completions", {"prompt": "x"})).status == 200
        await fakes.settled()
