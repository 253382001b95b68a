"""Tools and reasoning from request to client, with a scripted worker: over HTTP by OpenAI's client, and over gRPC."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import pytest_asyncio

from pillion.errors import InvalidRequest
from pillion.gateway.formats.answer_parts import call_id
from pillion.net import rpc
from pillion.types import (
    AnswerSoFar,
    ChatMessage,
    Delta,
    FinishReason,
    GenerateRequest,
    Resume,
    SamplingParams,
    Tool,
    ToolCall,
    ToolOptions,
)
from pillion.v1 import gateway_pb2_grpc
from pillion.wire.public import delta_from_pb, origin_from_pb, request_to_pb
from tests.support.fake_components import FakeCluster, running_fake_cluster, script_of
from tests.support.http import call

TEMPLATE = (
    "{# <tool_call> <think> </think> #}"
    "{% if tools %}({% for t in tools %}{{ t.function.name }} {% endfor %}tools){% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}:{{ c.function.arguments.city }}{% endfor %}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ARGUMENTS = '{"city": "Zürich 🙂"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
THOUGHT = "<think>\nI look.\n</think>\n\n"
ANSWER = f"{THOUGHT}One moment. \n{CALL % ARGUMENTS}\n{CALL % '{}'}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
ASKED: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
REQUEST = GenerateRequest(
    messages=(ChatMessage("user", "hi"),),
    tools=ToolOptions(tools=(Tool(name="weather", parameters=json.dumps(SCHEMA)), Tool(name="time"))),
    request_id="same",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[FakeCluster]:
    async with running_fake_cluster(ANSWER, template=TEMPLATE) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


def client_of(fakes: FakeCluster) -> openai.AsyncOpenAI:
    url = f"http://{fakes.gateway.http_address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


async def streamed(fakes: FakeCluster, request: GenerateRequest) -> tuple[list[Delta], Any]:
    """Return all deltas of a gRPC stream, and its origin."""
    deltas, origin = [], None
    async with rpc.open_channel(fakes.gateway.grpc_address) as channel:
        async for message in gateway_pb2_grpc.GatewayStub(channel).Generate(request_to_pb(request)):
            origin = origin_from_pb(message.origin) if message.HasField("origin") else origin
            deltas.append(delta_from_pb(message))
    return deltas, origin


def gathered(deltas: list[Delta]) -> tuple[str, str, dict[int, tuple[str, str, str]]]:
    calls: dict[int, tuple[str, str, str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls):
        known = calls.get(part.index, ("", "", ""))
        calls[part.index] = (known[0] + part.id, known[1] + part.name, known[2] + part.arguments)
    return "".join(delta.text for delta in deltas), "".join(delta.reasoning for delta in deltas), calls


async def test_a_complete_answer_has_content_reasoning_and_calls(fakes: FakeCluster) -> None:
    async with client_of(fakes) as client:
        whole = await client.chat.completions.create(**ASKED)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == choice.message.reasoning == "I look."
    calls = choice.message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in calls] == [("weather", ARGUMENTS), ("weather", "{}")]
    assert len({one.id for one in calls}) == 2
    assert all(one.id.startswith("call_") and one.type == "function" for one in calls)
    thought = len(script_of(THOUGHT.rstrip())) - 1
    assert whole.usage.completion_tokens_details.reasoning_tokens == thought
    assert fakes.decode.submits[-1].grammar
    await fakes.settled()


async def test_a_header_names_the_unenforced_parts_of_schemas(fakes: FakeCluster) -> None:
    price = {"type": "string", "pattern": "^(?!0)"}
    schema = {"properties": {"city": {"type": "STRING"}, "price": price, "a,b": {"$ref": "#/none"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    named = {"name": "weather", "input_schema": schema}
    for path, body, where in (
        ("/v1/chat/completions", ASKED | {"tools": [tool], "nobody": 1}, "tools.function.parameters"),
        ("/v1/chat/completions", ASKED | {"tools": [tool], "nobody": 1, "stream": True}, "tools.function.parameters"),
        ("/v1/messages", {**ASKED, "max_tokens": 250, "tools": [named], "nobody": 1}, "tools.input_schema"),
        (
            "/v1/responses",
            {"model": "toy", "input": "hi", "tools": [{"type": "function", **tool["function"]}], "nobody": 1},
            "tools.parameters",
        ),
    ):
        reply = await call(fakes.gateway.http_address, path, body)
        assert reply.status == 200, reply.body
        places = f"{where}/properties/a?b/$ref, {where}/properties/price/pattern"
        assert reply.headers["x-pillion-ignored"] == f"nobody, {places}"
    tool["function"]["strict"] = True
    reply = await call(fakes.gateway.http_address, "/v1/chat/completions", ASKED | {"tools": [tool]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "tools[0].function.parameters")
    assert "at /properties/price/pattern: look-around is not supported" in reply.json["error"]["message"]
    await fakes.settled()


async def test_ids_differ_even_if_the_clients_id_repeats(fakes: FakeCluster) -> None:
    """Return ids of answers and calls, from two turns with one client id, at each API."""
    said, address = {"X-Request-Id": "same"}, fakes.gateway.http_address
    named = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
    responses = {"input": "hi", "tools": [{"type": "function", **TOOLS[0]["function"]}]}
    messages = {"messages": ASKED["messages"], "max_tokens": 250, "tools": [named]}
    for path, body in (
        ("/v1/chat/completions", ASKED),
        ("/v1/responses", responses),
        ("/v1/messages", messages),
    ):
        found: set[str] = set()
        for turn in (1, 2):
            reply = await call(address, path, body, said)
            assert (reply.status, reply.headers["x-request-id"]) == (200, "same"), reply.body
            ids = set(re.findall(r'"(?:id|call_id)":"([^"]*)"', reply.body.decode()))
            assert not any("same" in one for one in ids)
            assert len(ids) > 2
            found |= ids
            assert len(found) == turn * len(ids), "an id has come again"
    both = [gathered((await streamed(fakes, REQUEST))[0])[2] for _ in range(2)]
    assert len({part[0] for calls in both for part in calls.values()}) == 4
    await fakes.settled()


async def test_several_streamed_answers_have_their_own_calls(fakes: FakeCluster) -> None:
    async with client_of(fakes) as client:
        asked = {**ASKED, "n": 2, "logprobs": True}
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        calls: list[dict[int, Any]] = [{}, {}]
        texts, thoughts, tokens, reasons = ["", ""], ["", ""], [0, 0], ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                n, delta = choice.index, choice.delta
                texts[n] += delta.content or ""
                thoughts[n] += getattr(delta, "reasoning_content", None) or ""
                tokens[n] += len(choice.logprobs.content) if choice.logprobs else 0
                assert not (choice.finish_reason and (delta.content or delta.tool_calls))
                reasons[n] = choice.finish_reason or reasons[n]
                assert len(delta.tool_calls or ()) <= 1
                for part in delta.tool_calls or ():
                    if part.id:
                        assert (part.type, part.function.name, part.function.arguments) == ("function", "weather", "")
                        calls[n][part.index] = ""
                    else:
                        calls[n][part.index] += part.function.arguments
            usage = chunk.usage
    assert texts == ["One moment."] * 2
    assert thoughts == ["I look."] * 2
    assert calls == [{0: ARGUMENTS, 1: "{}"}] * 2
    assert reasons == ["tool_calls"] * 2
    assert tokens == [len(fakes.decode.script)] * 2
    assert usage.completion_tokens_details.reasoning_tokens == 2 * (len(script_of(THOUGHT.rstrip())) - 1)
    await fakes.settled()


async def test_custom_tool_calls_contain_their_input(fakes: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'a "b"\n\\ 🙂'
    made_of = f'<tool_call>\n{{"name": "patch", "arguments": {{"input": {json.dumps(text)}}}}}\n</tool_call>'
    monkeypatch.setattr(fakes.decode, "script", script_of(f"{THOUGHT}{made_of}\n{CALL % ARGUMENTS}"))
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /[^x]+/"}}
    custom = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    asked = ASKED | {"tools": [*TOOLS, custom], "n": 2}
    whole = (await call(fakes.gateway.http_address, "/v1/chat/completions", asked)).json
    for choice in whole["choices"]:
        made, function = choice["message"]["tool_calls"]
        assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": text})
        assert (function["type"], function["function"]) == ("function", {"name": "weather", "arguments": ARGUMENTS})
    streamed = (await call(fakes.gateway.http_address, "/v1/chat/completions", asked | {"stream": True})).events
    inputs = ["", ""]
    for choice in (choice for event in streamed for choice in event["choices"]):
        for part in choice["delta"].get("tool_calls", ()):
            assert (part["index"] == 0) is ("custom" in part)
            inputs[choice["index"]] += part.get("custom", {}).get("input", "")
    assert inputs == [text] * 2
    await fakes.settled()


@pytest.mark.parametrize("definition", ["start: a", "start: <think>", "%ignore / /"])
async def test_an_unsupported_tool_grammar_is_refused_by_name(fakes: FakeCluster, definition: str) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
    custom = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    refused = await call(fakes.gateway.http_address, "/v1/chat/completions", ASKED | {"tools": [*TOOLS, custom]})
    assert (refused.status, refused.error["param"]) == (400, "tools[2].custom.format")
    await fakes.settled()


async def test_the_openai_sdks_stream_collects_calls(fakes: FakeCluster) -> None:
    async with client_of(fakes) as client, client.chat.completions.stream(**ASKED) as stream:
        whole = await stream.get_final_completion()
    (message,) = [choice.message for choice in whole.choices]
    assert [one.function.arguments for one in message.tool_calls] == [ARGUMENTS, "{}"]
    assert message.content == "One moment."


async def test_tools_and_calls_are_rendered_into_the_prompt(fakes: FakeCluster) -> None:
    history = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    told = "[user]hi[assistant]weather:Bonn[tool]rain[assistant]"
    for choice, tools in (({}, "(weather time tools)"), ({"tool_choice": "none"}, "")):
        body = {**ASKED, "messages": history, "max_tokens": 1, **choice}
        assert (await call(fakes.gateway.http_address, "/v1/chat/completions", body)).status == 200
        prompt = tuple(fakes.decode.submits[-1].token_ids)
        assert prompt == script_of(tools + told)[:-1]
    reply = await call(fakes.gateway.http_address, "/tokenize", {"messages": history, "tools": TOOLS})
    assert reply.json["tokens"] == list(script_of("(weather time tools)" + told)[:-1])


@pytest.mark.parametrize("named", [{}, {"tool_call_id": "gone"}, {"tool_call_id": "t" * 4096, "name": "weather"}])
async def test_a_result_without_its_call_reaches_the_model(fakes: FakeCluster, named: dict[str, str]) -> None:
    history = [{"role": "tool", "content": "rain", **named}, {"role": "user", "content": "hi"}]
    body = {**ASKED, "messages": history, "max_tokens": 1}
    assert (await call(fakes.gateway.http_address, "/v1/chat/completions", body)).status == 200
    assert (
        tuple(fakes.decode.submits[-1].token_ids) == script_of("(weather time tools)[tool]rain[user]hi[assistant]")[:-1]
    )


async def test_a_long_call_id_is_accepted(fakes: FakeCluster) -> None:
    """Some servers store their model's sealed reasoning in it."""
    made = {"id": "call_1__thought__" + "A" * 8000, "type": "function", "function": {"name": "weather"}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "content": "rain", "tool_call_id": made["id"]},
    ]
    body = {**ASKED, "messages": history, "max_tokens": 1}
    assert (await call(fakes.gateway.http_address, "/v1/chat/completions", body)).status == 200


async def test_think_tags_are_content_if_thinking_is_disabled(fakes: FakeCluster) -> None:
    body = {**ASKED, "chat_template_kwargs": {"enable_thinking": False}, "tools": None}
    (choice,) = (await call(fakes.gateway.http_address, "/v1/chat/completions", body)).json["choices"]
    assert choice["message"]["content"].startswith("<think>")
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert not fakes.decode.submits[-1].grammar


@pytest.mark.parametrize("stop", ["oment", "I look", "weather"])
async def test_stop_strings_apply_only_to_content(fakes: FakeCluster, stop: str) -> None:
    reply = await call(fakes.gateway.http_address, "/v1/chat/completions", {**ASKED, "stop": stop})
    (choice,) = reply.json["choices"]
    stopped = stop == "oment"
    assert choice["finish_reason"] == ("stop" if stopped else "tool_calls")
    assert choice["message"]["content"] == ("One m" if stopped else "One moment.")
    assert ("tool_calls" in choice["message"]) is not stopped
    await fakes.settled()


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "another tool's name"),
    ({"tools": [{"type": "retrieval"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        "",
    ),
    ({"tools": TOOLS * 65}, "tools", "130 tools; at most 128"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2**20}}]}, "tools", "bytes"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "some"}, "tool_choice", "Invalid enum value"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
        "none of the tools",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "send tools"),
    ({"function_call": "auto"}, "function_call", "send tool_choice"),
]


@pytest.mark.parametrize(("wrong", "param", "words"), WRONG)
async def test_invalid_fields_are_named(fakes: FakeCluster, wrong: dict[str, Any], param: str, words: str) -> None:
    reply = await call(fakes.gateway.http_address, "/v1/chat/completions", {**ASKED, **wrong})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


async def test_a_call_that_was_cut_short_may_be_sent_back(fakes: FakeCluster) -> None:
    begun = '{"city": "Z'
    cut = len(script_of(ANSWER[: ANSWER.index(begun) + len(begun)])) - 1
    async with client_of(fakes) as client:
        whole = await client.chat.completions.create(**ASKED, max_tokens=cut)
        message = whole.choices[0].message
        (made,) = message.tool_calls
        assert (whole.choices[0].finish_reason, made.function.arguments) == ("length", begun)
        result = {"role": "tool", "tool_call_id": made.id, "content": "It was cut short."}
        again = [*ASKED["messages"], message, result]
        assert (await client.chat.completions.create(**{**ASKED, "messages": again})).choices
        tools: Any = [{"type": "function", **one["function"]} for one in TOOLS]
        asked: Any = {"model": "toy", "tools": tools}
        response = await client.responses.create(**asked, input="hi", max_output_tokens=cut)
        call_item = response.output[-1]
        assert (call_item.type, call_item.arguments, call_item.status) == ("function_call", begun, "incomplete")
        result = {"type": "function_call_output", "call_id": call_item.call_id, "output": "It was cut short."}
        items: Any = [{"role": "user", "content": "hi"}, *(one.to_dict() for one in response.output), result]
        assert (await client.responses.create(**asked, input=items)).output
    await fakes.settled()


async def test_calls_before_a_stop_string_finish_with_tool_calls() -> None:
    async with running_fake_cluster(f"{CALL % ARGUMENTS}\nDone. More.", template=TEMPLATE) as fakes:
        body = {**ASKED, "stop": "Done"}
        (choice,) = (await call(fakes.gateway.http_address, "/v1/chat/completions", body)).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "Done")
    assert len(choice["message"]["tool_calls"]) == 1


async def test_calls_are_streamed_over_grpc(fakes: FakeCluster) -> None:
    deltas, _ = await streamed(fakes, REQUEST)
    text, reasoning, calls = gathered(deltas)
    assert (text, reasoning) == ("One moment.", "I look.")
    assert [(name, arguments) for _, name, arguments in calls.values()] == [("weather", ARGUMENTS), ("weather", "{}")]
    assert deltas[-1].finish_reason is FinishReason.TOOL_CALLS
    model, other = await fakes.client.models()
    assert other == replace(model, name="models/toy", alias_of="toy")
    assert (model.tool_call_parser, model.reasoning_parser) == ("hermes", "qwen3")
    asked = replace(REQUEST, messages=(), text="hi")
    with pytest.raises(InvalidRequest, match=r"tools\.tools.*only a conversation"):
        await fakes.gateway.gateway.generate(asked)
    calls_first = ChatMessage("user", "x", tool_calls=(ToolCall("c", "weather", "{}"),))
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.tool_calls"):
        await fakes.gateway.gateway.generate(replace(REQUEST, messages=(calls_first,)))


async def test_a_resumed_stream_returns_the_rest(fakes: FakeCluster) -> None:
    sampling = SamplingParams(n=2)
    whole, _ = await streamed(fakes, replace(REQUEST, sampling=sampling))
    script = fakes.decode.script
    text, thought, expected = gathered([delta for delta in whole if delta.index == 0])
    for cut in (1, 25, 60, 100, len(script) - 1):
        begun = replace(REQUEST, sampling=replace(sampling, max_tokens=cut))
        first, origin = await streamed(fakes, begun)
        # Cut as by a lost gateway, so parts emitted only at the end are missing.
        seen = [delta for delta in first if delta.finish_reason is None and delta.index == 0]
        tokens = tuple(token for delta in seen for token in delta.token_ids)
        answers = (AnswerSoFar(tokens), AnswerSoFar(script, FinishReason.TOOL_CALLS))
        rest, _ = await streamed(fakes, replace(REQUEST, sampling=sampling, resume=Resume(origin, answers)))
        calls = {n: (call_id(origin.answer_id, 0, n), name, given) for n, (_, name, given) in expected.items()}
        assert gathered(seen + [delta for delta in rest if delta.index == 0]) == (text, thought, calls)
        assert rest[-1].usage == replace(whole[-1].usage)
        assert rest[-1].usage.reasoning_tokens == 2 * (len(script_of(THOUGHT.rstrip())) - 1)
    await fakes.settled()


WRITTEN = {
    "hermes": CALL % ARGUMENTS,
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich 🙂\n</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
}


@pytest.mark.parametrize(
    "parser",
    ["hermes", "llama3_json", *(pytest.param(one, marks=pytest.mark.long) for one in ("qwen3_coder", "mistral"))],
)
async def test_a_worker_dies_in_the_middle_of_a_call(parser: str) -> None:
    """Wherever the answer breaks, the client gets the same call."""
    async with running_fake_cluster(WRITTEN[parser], template=TEMPLATE, tool_call_parser=parser) as fakes:
        length = len(fakes.decode.script)
        for several, after in ((False, length // 4), (True, length), (False, length - 3)):
            request = replace(REQUEST, sampling=SamplingParams(n=2 if several else 1))
            fakes.decode.break_after, before = after, fakes.decode.connections
            deltas, _ = await streamed(fakes, request)
            assert fakes.decode.connections > before
            for n in range(1 + several):
                text, _, calls = gathered([delta for delta in deltas if delta.index == n])
                assert [(name, json.loads(found)) for _, name, found in calls.values()] == [
                    ("weather", json.loads(ARGUMENTS))
                ]
                assert text == ""
            assert deltas[-1].finish_reason is FinishReason.TOOL_CALLS
            assert fakes.decode.submits[-1].grammar
        await fakes.settled()
