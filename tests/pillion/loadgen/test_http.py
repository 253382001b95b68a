"""The small HTTP client: bytes split anywhere, and a server that misbehaves in every possible way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.testbed.certs import make_certs
from lab.testbed.conditions import loop_turns
from lab.testbed.ports import free_port
from pillion.errors import ConfigError
from pillion.loadgen.openai_target import EventReader, OpenAITarget, message_of
from pillion.loadgen.target import AnswerMessage, AnswerRequest, TargetError, TokenCounts

EVENT_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
ASK = AnswerRequest(2, ids=(5, 6))


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(message), message) for message in (*pieces, b""))


def event(text, **more):
    choice = {"index": 0, "text": text, "finish_reason": None, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
ANSWER = EVENT_HEAD + chunked(event("a") + event("b"), LAST)


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=9), max_size=5), st.data())
def test_events_are_the_same_however_the_bytes_are_cut(texts, data):
    body = b": a comment\r\n\r\n" + b"".join(event(text) for text in texts)
    places = sorted(data.draw(st.lists(st.integers(1, len(body) - 1), max_size=4, unique=True)))
    pieces = [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]
    raw = EVENT_HEAD + chunked(*pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    reader, found = EventReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += reader.feed(raw[begin:end])
    assert [message_of(payload).text for payload in found] == texts
    assert (reader.status, reader.done, reader.reusable) == (200, True, True)


def test_bodies_with_and_without_a_content_length_are_read():
    reader = EventReader()
    assert list(reader.feed(b"HTTP/1.1 404 No\r\nContent-Length: 5\r\n\r\nabc")) == []
    assert list(reader.feed(b"de")) == [b"abcde"]
    assert (reader.status, reader.done, reader.reusable) == (404, True, True)
    reader = EventReader()
    found = list(reader.feed(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event("x")))
    reader.end()
    assert len(found) == 1
    assert not reader.reusable
    cut = EventReader()
    list(cut.feed(EVENT_HEAD + chunked(event("x"))[:-3]))
    with pytest.raises(ValueError, match="in the middle"):
        cut.end()


@pytest.mark.parametrize("raw", [b"nonsense\r\n\r\n", EVENT_HEAD + b"xyz\r\n", b"x" * 70_000])
def test_malformed_responses_are_errors(raw):
    with pytest.raises(ValueError):  # noqa: PT011
        list(EventReader().feed(raw))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"choices": [{"text": "a"}]}, AnswerMessage("a", 1)),
        # A token whose text is not certain yet.
        ({"choices": [{"text": "", "finish_reason": None}]}, AnswerMessage("", 1)),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, AnswerMessage("", 0)),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, AnswerMessage("", 0)),
        ({"choices": [{"delta": {"content": "a"}}]}, AnswerMessage("a", 1)),
        ({"choices": [{"delta": {"role": "assistant", "content": "a"}}]}, AnswerMessage("a", 1)),
        ({"choices": [{"delta": {"content": ""}}]}, AnswerMessage("", 1)),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, AnswerMessage("", 1)),
        ({"choices": [{"delta": {}, "finish_reason": "length"}]}, AnswerMessage("", 0)),
        ({"choices": [], "usage": USAGE}, AnswerMessage("", 0, TokenCounts(2, 1, 2))),
        (
            {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": None}},
            AnswerMessage("", 0, TokenCounts(3, 0, 0)),
        ),
    ],
)
def test_events_with_tokens_are_recognized(event, message):
    assert message_of(json.dumps(event).encode()) == message


class Closing(bytes):
    """An answer after which the server closes the connection without announcing it."""


class Reset(bytes):
    """No answer but a TCP reset."""


@contextlib.asynccontextmanager
async def server(*answers, tls=None, model="m", **files):
    """Give each request, over all connections, the next of ``answers``, and record the requests."""
    left, requests, connections = list(answers), [], []

    async def serve(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                requests.append((head.decode(), await reader.readexactly(length)))
                answer = left.pop(0)
                if isinstance(answer, Reset):
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                    return
                writer.write(answer)
                if isinstance(answer, Closing):
                    writer.close()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    target = OpenAITarget(model, True, 0.0, target=url, api_key="secret", **files)
    try:
        yield target, requests, connections
    finally:
        await target.aclose()
        for writer in connections:
            writer.close()
        listening.close()
        # The server's ends see it before the loop is gone.
        await loop_turns(1)


async def pieces(target, request=ASK):
    return [message async for message in target.stream(request)]


async def test_a_streams_connection_is_reused():
    async with server(ANSWER, ANSWER) as (target, requests, connections):
        for _ in range(2):
            answer = await pieces(target)
            assert [message.text for message in answer] == ["a", "b", ""]
            assert answer[-1].counts == TokenCounts(2, 1, 2)
        assert len(connections) == 1
    head, body = requests[0]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in head
    assert json.loads(body)["prompt"] == [5, 6]
    assert json.loads(body)["ignore_eos"] is True


async def test_conversations_go_to_the_chat_page():
    async with server(ANSWER) as (target, requests, _):
        await pieces(target, AnswerRequest(2, messages=({"role": "user", "content": "hi"},)))
    assert requests[0][0].startswith("POST /v1/chat/completions ")
    assert json.loads(requests[0][1])["messages"] == [{"role": "user", "content": "hi"}]


async def test_a_kept_connection_that_the_server_closed_is_replaced():
    for answers in ((Closing(ANSWER), ANSWER), (ANSWER, Reset(), ANSWER)):
        async with server(*answers) as (target, _, connections):
            await pieces(target)
            # Whether its end is known here yet or not.
            assert len(await pieces(target)) == 3
            assert len(connections) == 2


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (b'HTTP/1.1 429 Slow\r\nContent-Length: 13\r\n\r\n{"error":"no"}', "HTTP 429", "error"),
        (b"HTTP/1.1 503 Gone\r\nContent-Length: 0\r\n\r\n", "HTTP 503", ""),
        (EVENT_HEAD + chunked(event("a"), b'data: {"error":{"message":"lost it"}}\n\n'), "error event", "lost it"),
        (EVENT_HEAD + chunked(b"data: {broken\n\n"), "bad event", "{broken"),
        (EVENT_HEAD + chunked(b'data: {"choices": 5}\n\n'), "bad event", "TypeError"),
        (b"nonsense\r\n\r\n", "connection", "ValueError"),
        (Closing(b""), "connection", "without an answer"),
        (Reset(), "connection", "ConnectionResetError"),
    ],
)
async def test_failures_are_typed_and_do_not_affect_later_requests(answer, status, words):
    async with server(answer, ANSWER) as (target, _, _):
        with pytest.raises(TargetError) as caught:
            await pieces(target)
        assert caught.value.status == status
        assert words in caught.value.message
        assert len(await pieces(target)) == 3


async def test_a_stream_left_early_closes_its_connection():
    async with server(EVENT_HEAD + chunked(event("a")), ANSWER) as (target, _, connections):
        stream = target.stream(ASK)
        await anext(stream)
        await stream.aclose()
        assert len(await pieces(target)) == 3
        assert len(connections) == 2


async def test_the_default_model_is_the_first_listed():
    models = b'{"data": [{"id": "one"}, {"id": "two"}]}'
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models)
    async with server(reply, ANSWER, model="") as (target, requests, _):
        assert await target.describe() == {"models": ["one", "two"]}
        await pieces(target)
    assert json.loads(requests[1][1])["model"] == "one"
    async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]") as (target, _, _):
        with pytest.raises(TargetError, match="say --model"):
            await target.describe()


async def test_an_unreachable_server():
    target = OpenAITarget("m", True, 0.0, target=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TargetError, match="connection"):
        await pieces(target)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
async def test_tls_and_an_untrusted_certificate(tmp_path):
    make_certs(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    names = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
    files = {option: str(tmp_path / name) for option, name in names.items()}
    async with server(ANSWER, tls=context, **files) as (trusting, _, connections):
        assert len(await pieces(trusting)) == 3
        port = connections[0].get_extra_info("sockname")[1]
        with pytest.raises(TargetError, match="CERTIFICATE_VERIFY_FAILED"):
            await pieces(OpenAITarget("m", True, 0.0, target=f"https://127.0.0.1:{port}"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": "127.0.0.1:8000"},
        {"target": "ftp://x"},
        {"target": "https://x", "ca": "/nowhere"},
        {"target": "http://x", "api_key": "a\nb"},
    ],
)
def test_an_invalid_target_is_rejected(arguments):
    with pytest.raises(ConfigError):
        OpenAITarget("m", True, 0.0, **arguments)
