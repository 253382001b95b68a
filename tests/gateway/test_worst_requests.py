"""The most expensive request of each kind is refused or served by a real gateway without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
import pytest

from lab.testbed.conditions import loop_turns
from pillion.gateway.anthropic import anthropic_requests
from pillion.gateway.anthropic.anthropic_requests import messages_request
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.model_calls import ParsedCall
from pillion.gateway.http_api.request_bodies import MAX_COMMAS
from pillion.gateway.request import client_json
from pillion.gateway.responses import responses_requests
from pillion.gateway.responses.responses_requests import responses_request
from pillion.gateway.tokens.tokenizer import LOOP_BYTES, TokenizerPool
from pillion.net.rpc import open_channel
from pillion.types import ChatMessage
from pillion.v1 import common_pb2, gateway_pb2
from tests.support import fake_components
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call
from tests.support.loop_work import counted_loop_work

# A real context, so that requests just below the limit are expensive as well.
CONTEXT = 2**17
# Max calls per callback. The worst 16 KiB need 35,000, 3 ms; earlier versions made millions.
MAX_CALLS = 60_000
# Lists, objects and non-integers that one call may create from JSON.
MAX_MADE = client_json.MAX_PARSED_ITEMS + 1
TURNS = 50
MILLION = 2**20
# Bytes of the max number of empty lists in a body.
MANY = 3_000_000
MESSAGE = b'{"role":"user","content":"x"}'
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


def many(item: bytes, size_bytes: int = 8_000_000) -> bytes:
    """Return a list of the max number of items in these bytes."""
    return b"[" + b",".join([item] * (size_bytes // (len(item) + 1))) + b"]"


def ids(count: int) -> bytes:
    return b"[" + b",".join([b"100"] * count) + b"]"


def body(**fields: bytes) -> bytes:
    """Return a JSON body of fields that are JSON already."""
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in fields.items()) + b"}"


def parts(size_bytes: int) -> bytes:
    return b'[{"role":"user","content":' + many(b'{"type":"text"}', size_bytes) + b"}]"


TEXT = json.dumps("x, y" * (CONTEXT // 4 - 1)).encode()
ONE = b"1"
# Counts tools, and writes calls as objects after a mark.
TEMPLATE = (
    "{# <tool_call> #}{{ tools | map(attribute='function.name') | join if tools }}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% endfor %}[assistant]"
)
USER = b"[" + MESSAGE + b"]"
# Max bytes of all tools, of a structure, and of the arguments of calls (counted by character).
TOOLS, SHAPE, ARGUMENTS = 500_000, 120_000, 3_700_000
LONG_FLOAT = b"1.2345678901234567890123456789e-300"


def object_of(item: bytes, size_bytes: int) -> bytes:
    return b'{"a":' + many(item, size_bytes) + b"}"


def text_of(raw: bytes) -> bytes:
    """Return JSON as a string in JSON."""
    return json.dumps(raw.decode()).encode()


def called(arguments: bytes) -> bytes:
    call = b'{"id":"a","function":{"name":"f","arguments":%b}}' % text_of(arguments)
    return b'[%b,{"role":"assistant","tool_calls":[%b]}]' % (MESSAGE, call)


def tools(parameters: bytes) -> bytes:
    return b'[{"type":"function","function":{"name":"f","parameters":%b}}]' % parameters


def schema_format(schema: bytes) -> bytes:
    return b'{"type":"json_schema","json_schema":{"name":"x","schema":%b}}' % schema


def used(arguments: bytes) -> bytes:
    block = b'{"type":"tool_use","id":"a","name":"f","input":%b}' % arguments
    return b'[%b,{"role":"assistant","content":[%b]},%b]' % (MESSAGE, block, MESSAGE)


RESPOND, MESSAGES_PATH, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
# Path, body, and the blamed field (empty if served). Bodies are built when sent: all have 250 MB.
WORST: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "strings of tokens": (
        "/tokenize",
        lambda: body(prompt=TEXT, add_special_tokens=b"false", return_token_strs=b"true"),
        "",
    ),
    "a bare text": (
        "/tokenize",
        lambda: body(prompt=b'"' + b"x" * 4_000_000 + b'"', add_special_tokens=b"false"),
        "prompt",
    ),
    "ids that fit": ("/detokenize", lambda: body(tokens=ids(CONTEXT)), ""),
    "a million ids": ("/detokenize", lambda: body(tokens=ids(MILLION)), "tokens"),
    "an echo that fits": (COMPLETE, lambda: body(prompt=ids(CONTEXT - 1), echo=b"true", max_tokens=ONE), ""),
    "an echo of a million": (COMPLETE, lambda: body(prompt=ids(MILLION), echo=b"true"), "prompt"),
    "log probabilities": (
        COMPLETE,
        lambda: body(prompt=b'"x"', max_tokens=b"60", ignore_eos=b"true", n=b"24", logprobs=b"20"),
        "",
    ),
    "lists of ids": (COMPLETE, lambda: body(prompt=b"[" + b",".join([ids(2000)] * 128) + b"]", max_tokens=ONE), ""),
    "empty prompts": (COMPLETE, lambda: body(prompt=many(b"[]", MANY)), "prompt"),
    "empty texts": (COMPLETE, lambda: body(prompt=many(b'""')), "prompt"),
    "a mixture": (COMPLETE, lambda: body(prompt=b'["x",' + ids(MILLION)[1:]), "prompt[1]"),
    "a large text": (COMPLETE, lambda: body(prompt=b'"' + "你".encode() * 2_000_000 + b'"'), "prompt"),
    "parts": (CHAT, lambda: body(messages=parts(8_000_000)), "messages"),
    "parts on the loop": (CHAT, lambda: body(messages=parts(LOOP_BYTES - 100), max_tokens=ONE), ""),
    "escaped names": (CHAT, lambda: body(messages=many(b'{"\\u0072ole":"user","content":""}')), "messages"),
    "empty messages": (CHAT, lambda: body(messages=many(b"{}", MANY)), "messages[0]"),
    "all messages": (CHAT, lambda: body(messages=b"[" + b",".join([MESSAGE] * 4096) + b"]", max_tokens=ONE), ""),
    "a long message": (CHAT, lambda: body(messages=b'[{"role":"user","content":%b}]' % TEXT), "messages"),
    "tools": (CHAT, lambda: body(messages=b"[" + MESSAGE + b"]", tools=many(b"{}", MANY)), "tools"),
    "stops": (COMPLETE, lambda: body(prompt=b'"x"', stop=many(b'""')), "prompt"),
    "long stops": (COMPLETE, lambda: body(prompt=b'"x"', stop=many(b'"' + b"x" * 4000 + b'"')), "stop"),
    "stop ids": (COMPLETE, lambda: body(prompt=b'"x"', stop_token_ids=many(ONE)), "stop_token_ids"),
    "allowed ids": (COMPLETE, lambda: body(prompt=b'"x"', allowed_token_ids=many(ONE, 2**17)), "allowed_token_ids"),
    "as many allowed ids as may be": (COMPLETE, lambda: body(prompt=b'"x"', allowed_token_ids=many(ONE, 2**15)), ""),
    "bad words": (COMPLETE, lambda: body(prompt=b'"x"', bad_words=many(b'"x"', 2**16)), "bad_words"),
    "as many bad words as may be": (
        COMPLETE,
        lambda: body(prompt=b'"x"', bad_words=many(b'"' + b"x" * 256 + b'"', 259 * 256)),
        "",
    ),
    "biases": (COMPLETE, lambda: body(prompt=b'"x"', logit_bias=b"{" + many(b'"1":0')[1:-1] + b"}"), "prompt"),
    "a field many times": (COMPLETE, lambda: b"{" + many(b'"user":""')[1:-1] + b',"prompt":"x"}', "prompt"),
    "lists in lists": (CHAT, lambda: body(messages=many(b"[[[[]]]]")), "messages"),
    "objects of nothing": (RESPOND, lambda: body(input=many(b"{}")), "input"),
    # JSON within a body: passed on, or parsed in parts of bounded size.
    "arguments": (CHAT, lambda: body(messages=called(object_of(b"[[[[]]]]", ARGUMENTS))), "messages"),
    "arguments that pass": (CHAT, lambda: body(messages=called(object_of(b"[[[[]]]]", 700_000)), max_tokens=ONE), ""),
    "long numbers": (CHAT, lambda: body(messages=called(object_of(LONG_FLOAT, ARGUMENTS))), ""),
    "parameters": (CHAT, lambda: body(messages=USER, tools=tools(object_of(b"[[[[]]]]", 1_000_000))), "tools"),
    "parameters that fit": (CHAT, lambda: body(messages=USER, tools=tools(object_of(b"[]", TOOLS))), "tools"),
    "long numbers of tools": (CHAT, lambda: body(messages=USER, tools=tools(object_of(LONG_FLOAT, TOOLS))), ""),
    "a schema": (
        CHAT,
        lambda: body(messages=USER, response_format=schema_format(object_of(b"[[[[]]]]", 760_000))),
        "resp",
    ),
    "a schema that fits": (
        CHAT,
        lambda: body(messages=USER, response_format=schema_format(object_of(b"[]", SHAPE))),
        "resp",
    ),
    "a schema as text": (
        CHAT,
        lambda: body(messages=USER, structured_outputs=body(json=text_of(many(b"[]", SHAPE)))),
        "struc",
    ),
    "a tag": (
        COMPLETE,
        lambda: body(prompt=b'"x"', response_format=body(type=b'"structural_tag"', format=many(b"{}", MANY))),
        "resp",
    ),
    "fields of a provider": (
        CHAT,
        lambda: body(
            messages=b'[{"role":"user","content":"x","provider_specific_fields":%b}]' % many(b"[]", MANY),
            max_tokens=ONE,
        ),
        "",
    ),
    "items without a field": (RESPOND, lambda: body(input=many(b"{}", MANY)), "input[0]"),
    "log probabilities of items": (
        RESPOND,
        lambda: body(
            input=b'[{"role":"user","content":[{"type":"input_text","text":"x","logprobs":%b}]}]' % many(b"[]", MANY)
        ),
        "",
    ),
    "functions of responses": (
        RESPOND,
        lambda: body(input=b'"x"', tools=b'[{"type":"function","name":"f","parameters":%b}]' % object_of(b"[]", TOOLS)),
        "tools",
    ),
    "arguments of an input": (COUNT, lambda: body(messages=used(object_of(b"[[[[]]]]", ARGUMENTS))), "messages"),
    "schemas of inputs": (
        MESSAGES_PATH,
        lambda: body(
            messages=USER, max_tokens=ONE, tools=b'[{"name":"f","input_schema":%b}]' % object_of(b"{}", TOOLS)
        ),
        "tools",
    ),
    "users that go on": (
        MESSAGES_PATH,
        lambda: body(messages=many(b'{"role":"user","content":"%b"}' % (b"x" * 1200)), max_tokens=ONE),
        "prompt is too long",
    ),
    "assistants that go on": (
        RESPOND,
        lambda: body(input=many(b'{"role":"assistant","content":"%b"}' % (b"x" * 1200))),
        "input",
    ),
    "a long name": (COMPLETE, lambda: b'{"' + b"x" * 8_000_000 + b'":1}', "prompt"),
}


def field(number: int, content: bytes) -> bytes:
    """Encode a bytes field in protobuf wire format, its size in four bytes."""
    size = len(content)
    return (
        bytes((number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21)) + content
    )


def generate(**fields: Any) -> bytes:
    sampling = common_pb2.SamplingParams(max_tokens=1)
    return gateway_pb2.GenerateRequest(sampling=sampling, **fields).SerializeToString()


USER_MESSAGE = gateway_pb2.ChatMessage(role="user", content="x")


def asked_of(arguments: bytes) -> gateway_pb2.ChatMessage:
    call = gateway_pb2.ToolCall(id="a", name="f", arguments=arguments.decode())
    return gateway_pb2.ChatMessage(role="assistant", content="x", tool_calls=[call])


def tool_of(parameters: bytes) -> gateway_pb2.ToolOptions:
    return gateway_pb2.ToolOptions(tools=[gateway_pb2.Tool(name="f", parameters=parameters.decode())])


MESSAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty messages": (lambda: b"\x22\x00" * 4_000_000, "messages"),
    "fields of a message": (lambda: field(4, b"\x0a\x00" * 4_000_000), "messages"),
    "stops": (lambda: field(5, b"\x32\x00" * 4_000_000), "sampling"),
    "biases": (lambda: field(5, b"\x6a\x00" * 4_000_000), "sampling"),
    "single ids": (lambda: b"\x18\x01" * 4_000_000, "messages"),
    "packed ids": (lambda: field(3, b"\x01" * 8_000_000), "token_ids"),
    "a million ids": (lambda: generate(token_ids=[100] * MILLION), "token_ids"),
    "ids that fit": (lambda: generate(token_ids=[100] * (CONTEXT - 1)), ""),
    "all messages": (lambda: generate(messages=[gateway_pb2.ChatMessage(role="user", content="x")] * 4096), ""),
    "a large text": (lambda: generate(text="你" * 2_000_000), "text"),
    "arguments": (lambda: generate(messages=[asked_of(object_of(b"[[[[]]]]", ARGUMENTS))]), "messages"),
    "parameters": (
        lambda: generate(messages=[USER_MESSAGE], tools=tool_of(object_of(b"[[[[]]]]", TOOLS))),
        "tools.tools",
    ),
    "long numbers": (lambda: generate(messages=[USER_MESSAGE], tools=tool_of(object_of(LONG_FLOAT, TOOLS))), ""),
}


def containers(value: Any) -> int:
    """Count the lists, objects and non-integers of a value."""
    waiting, found = [value], 0
    while waiting:
        one = waiting.pop()
        found += isinstance(one, (list, tuple, dict, float, msgspec.Struct))
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif isinstance(one, msgspec.Struct):
            waiting += msgspec.structs.astuple(one)
    return found


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Record the max number of objects that one call creates from JSON on a thread, which holds the GIL; MAX_MADE of
    them take less than 20 ms. The event loop parses at most LOOP_BYTES."""
    made, loop = [0], threading.get_ident()

    def counted(decode: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any, **options: Any) -> Any:
            value = decode(*given, **options)
            if threading.get_ident() != loop:
                made[0] = max(made[0], containers(value))
            return value

        return count

    monkeypatch.setattr(msgspec.json, "decode", counted(msgspec.json.decode))
    monkeypatch.setattr(client_json, "_decode", counted(client_json._decode))
    return lambda: made[0]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of thread jobs; each ends only after TURNS iterations of the loop."""
    names: list[str] = []
    before = TokenizerPool.run

    async def run(self: TokenizerPool, job: Callable[..., Any], *arguments: Any, **size: Any) -> Any:
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
            return await before(self, held, *arguments, **size)
        finally:
            await beside

    monkeypatch.setattr(TokenizerPool, "run", run)
    monkeypatch.setattr(fake_components, "MAX_LEN", CONTEXT)
    return names


async def test_the_worst_bodies_do_not_block_the_event_loop(
    jobs: list[str], largest: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_fake_cluster("abc" * 20, template=TEMPLATE, chunk_size=8192, max_inflight_tokens=10**8) as fakes:
        fakes.decode.per_delta = 60
        for name, (path, make, blamed) in WORST.items():
            raw = make()
            assert len(raw) < 2**23, name
            jobs.clear()
            with counted_loop_work(monkeypatch) as work:
                reply = await call(fakes.gateway.http_address, path, raw)
            unread = raw.count(b",") > MAX_COMMAS
            assert reply.status == (413 if unread else 400 if blamed else 200), (name, reply.body[:300])
            if unread:
                assert reply.json["error"]["message"] == f"the body has more than {MAX_COMMAS} items", name
            elif blamed:
                error = reply.json["error"]
                assert (error.get("param") or error["message"]).startswith(blamed), (name, reply.body[:300])
            assert work.calls < MAX_CALLS, (name, work)
            assert work.json_bytes <= LOOP_BYTES, (name, work)
            assert unread or jobs, name
            assert name != "log probabilities" or jobs[-1] == "whole"
            assert largest() <= MAX_MADE, name
        await fakes.settled()


# APIs that merge messages into one, the field of those messages, and their role.
JOINING: tuple[tuple[Callable[[bytes, str], ParsedCall], str, bytes], ...] = (
    (messages_request, "messages", b"user"),
    (responses_request, "input", b"assistant"),
)
REQUIRED: dict[str, dict[str, bytes]] = {"messages": {"max_tokens": ONE}, "input": {}}


def test_consecutive_messages_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged pairwise, 6,000 messages of 600 characters would copy 11 GB."""
    copied = 0

    class WeighedMessage(ChatMessage):
        def __init__(self, *given: Any, **named: Any) -> None:
            nonlocal copied
            super().__init__(*given, **named)
            copied += len(self.content) + len(self.reasoning)

    for module in (anthropic_requests, responses_requests):
        monkeypatch.setattr(module, "ChatMessage", WeighedMessage)
    size = 3_700_000
    for read, field, role in JOINING:
        said = many(b'{"role":"%b","content":"%b"}' % (role, b"x" * 600), size)
        assert len(read(body(**{field: said}, **REQUIRED[field]), "r").requests[0].messages) == 1
        assert copied < 4 * size
        copied = 0


def test_too_long_messages_are_not_joined() -> None:
    """Its size is known in advance."""
    for read, field, role in JOINING:
        said = many(b'{"role":"%b","content":"%b"}' % (role, b"x" * 1200))
        with pytest.raises(ApiError, match="more than 4194304 characters in your messages") as caught:
            read(body(**{field: said}, **REQUIRED[field]), "r")
        assert caught.value.param == field


async def test_the_worst_messages_do_not_block_the_event_loop(
    jobs: list[str], largest: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_fake_cluster("abc", template=TEMPLATE, chunk_size=8192, max_inflight_tokens=10**8) as fakes,
        open_channel(fakes.gateway.grpc_address) as channel,
    ):
        for name, (make, blamed) in MESSAGES.items():
            jobs.clear()
            stream = channel.unary_stream("/pillion.v1.Gateway/Generate")(make())
            with counted_loop_work(monkeypatch) as work, contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stream:
                    pass
            code = await stream.code()
            expected = grpc.StatusCode.INVALID_ARGUMENT if blamed else grpc.StatusCode.OK
            assert code is expected, (name, await stream.details())
            assert not blamed or f"{blamed}: " in await stream.details(), name
            assert work.calls < MAX_CALLS, (name, work)
            assert jobs[0] == "read_generate", name
            assert largest() <= MAX_MADE, name
        await fakes.settled()
