"""The real `openai` client's Responses over HTTP: whole answers, streams, functions, structured outputs, failures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio

from pillion.errors import Overloaded, Unavailable
from pillion.types import Delta, FinishReason, TokenLogprob, ToolCallDelta
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import call
from tests.support.scripted import ScriptedGateway, called, ended, said, thought_said_and_called

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: Any = {"model": "toy", "input": "hi"}
ANSWER = "Größe: 北京 12"


class Town(pydantic.BaseModel):
    name: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[FakeCluster]:
    async with running_fake_cluster(ANSWER, max_inflight_requests=1024) as running:
        yield running


@pytest.fixture
def scripted(fakes: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> ScriptedGateway:
    monkeypatch.setattr(fakes.gateway.gateway, "generate", fakes.gateway.gateway.generate)
    return ScriptedGateway(fakes)


def client_of(fakes: FakeCluster) -> openai.AsyncOpenAI:
    url = f"http://{fakes.gateway.http_address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> tuple[list[Any], Any]:
    """Return the events of a stream, and the response of the last one."""
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


def without_ids(response: Any) -> dict[str, Any]:
    return json.loads(
        response.model_dump_json(exclude={"id", "created_at", "completed_at"}).replace(response.id, "response")
    )


@pytest.mark.parametrize("per_delta", [1, 5, 100])
@pytest.mark.parametrize(
    ("more", "text", "status"),
    [
        ({"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5}, ANSWER, "completed"),
        ({"max_output_tokens": 4, "tools": [], "user": "me"}, "Grö", "incomplete"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 1}, ANSWER, "completed"),
    ],
    ids=str,
)
async def test_a_response_equals_its_stream(
    fakes: FakeCluster, more: dict[str, Any], text: str, status: str, per_delta: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of tokens per delta."""
    monkeypatch.setattr(fakes.decode, "per_delta", per_delta)
    fakes.node.pinned = 2
    async with client_of(fakes) as client:
        whole = await client.responses.create(**ASKED, **more)
        assert (whole.output_text, whole.status, whole.object, whole.store) == (text, status, "response", False)
        assert whole.id == whole._request_id.replace("req-", "resp_")
        echoed = {name: value for name, value in more.items() if name != "include"}
        assert {name: getattr(whole, name) for name in echoed} == echoed
        if status == "incomplete":
            assert whole.incomplete_details.reason == "max_output_tokens"
        usage = whole.usage
        assert usage.input_tokens_details.cached_tokens == 8
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        events, last = await streamed(client, **ASKED, **more)
        assert events[-1].type == f"response.{status}"
        assert without_ids(last) == without_ids(whole)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert "".join(event.delta for event in deltas) == text
        if "include" in more:
            (part,) = whole.output[0].content
            # The last token ends the answer and has no text.
            assert b"".join(bytes(one.bytes) for one in part.logprobs[:-1]).decode() == text
            assert len(part.logprobs) == usage.output_tokens
            assert all(len(one.top_logprobs) == 1 for one in part.logprobs)
            assert [one.logprob for event in deltas for one in event.logprobs] == [one.logprob for one in part.logprobs]
    fakes.node.pinned = 0
    await fakes.settled()


async def test_events_are_in_order(fakes: FakeCluster) -> None:
    raw = (await call(fakes.gateway.http_address, "/v1/responses", {**ASKED, "stream": True})).body.decode()
    names = [block.split("\n")[0].removeprefix("event: response.") for block in raw.split("\n\n")[:-1]]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta"}


@pytest.mark.parametrize("together", [False, True])
async def test_reasoning_text_and_calls_are_items(
    fakes: FakeCluster, scripted: ScriptedGateway, together: bool
) -> None:
    scripted.together = together
    scripted.script = thought_said_and_called("c1", "c2")
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
    async with client_of(fakes) as client:
        whole = await client.responses.create(**ASKED, tools=[tool], tool_choice="required")
        reasoning, message, weather, time = whole.output
        assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Let me see.", [])
        assert (message.content[0].text, whole.output_text) == ("I look.", "I look.")
        assert (weather.call_id, weather.name, weather.arguments) == ("c1", "weather", '{"city": "Rome"}')
        assert (time.call_id, time.name, time.arguments) == ("c2", "time", "{}")
        assert len({item.id for item in whole.output}) == 4
        assert {item.status for item in whole.output} == {"completed"}
        assert whole.usage.output_tokens_details.reasoning_tokens == 4
        assert (whole.tools[0].name, whole.tool_choice) == ("weather", "required")
        events, last = await streamed(client, **ASKED, tools=[tool], tool_choice="required")
        assert without_ids(last) == without_ids(whole)
        done = [event for event in events if event.type.endswith("arguments.done")]
        assert [event.arguments for event in done] == ['{"city": "Rome"}', "{}"]
        added = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert added == ["reasoning", "message", "function_call", "function_call"]
        async with client.responses.stream(**ASKED, tools=[tool]) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == added
        result = {"type": "function_call_output", "call_id": "c1", "output": "12"}
        await client.responses.create(model="toy", input=[{"role": "user", "content": "hi"}, *whole.output, result])
        messages = scripted.requests[-1].messages
        assert [message.role for message in messages] == ["user", "assistant", "tool"]
        assert (messages[1].content, messages[1].reasoning) == ("I look.", "Let me see.")
        assert [one.id for one in messages[1].tool_calls] == ["c1", "c2"]


async def test_custom_and_namespaced_calls_are_separate_items(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    scripted.script = [
        called(0, id="c1", name="patch"),
        called(0, '{"inp'),
        called(0, 'ut": "a\\'),
        called(0, 'n\\"b\\ud83d'),
        called(0, '\\ude00"}'),
        called(1, '{"x": 1}', id="c2", name="mcp__box__open"),
        called(2, '{"input": ""}', id="c3", name="other__say"),
        ended(FinishReason.TOOL_CALLS),
    ]
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools: Any = [
        {"type": "custom", "name": "patch", "description": "Changes files.", "format": grammar},
        {
            "type": "namespace",
            "name": "mcp__box__",
            "description": "d",
            "tools": [{"type": "function", "name": "open"}],
        },
        {"type": "namespace", "name": "other", "description": "", "tools": [{"type": "custom", "name": "say"}]},
        {"type": "web_search", "external_web_access": True},
    ]
    async with client_of(fakes) as client:
        raw = await client.responses.with_raw_response.create(**ASKED, tools=tools)
        assert raw.headers["x-pillion-ignored"] == "tools.web_search"
        whole = raw.parse()
        patch, opened, say = whole.output
        assert (patch.type, patch.call_id, patch.name) == ("custom_tool_call", "c1", "patch")
        assert (patch.input, patch.id[:4]) == ('a\n"b\U0001f600', "ctc_")
        assert (opened.type, opened.name, opened.arguments) == ("function_call", "open", '{"x": 1}')
        assert (opened.namespace, say.namespace, say.name, say.input) == ("mcp__box__", "other", "say", "")
        assert [tool.type for tool in whole.tools] == ["custom", "namespace", "namespace"]
        events, last = await streamed(client, **ASKED, tools=tools)
        assert without_ids(last) == without_ids(whole)
        inputs = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
        deltas = [event.delta for event in inputs if event.type.endswith(".delta")]
        assert (deltas, inputs[len(deltas)].input) == (["a", '\n"b', "\U0001f600"], patch.input)
        assert {event.item_id for event in inputs[: len(deltas) + 1]} == {last.output[0].id}
        result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
        image = {"type": "input_image", "image_url": "data:image/png;base64,x", "detail": "auto"}
        picture = {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "so"}, image],
        }
        items: Any = [{"role": "user", "content": "hi"}, *whole.output, result, picture]
        await client.responses.create(model="toy", input=items, tools=tools)
        request = scripted.requests[-1]
        assert [json.loads(one.arguments) for one in request.messages[1].tool_calls] == [
            {"input": patch.input},
            {"x": 1},
            {"input": ""},
        ]
        names = ["patch", "mcp__box__open", "other__say"]
        assert [one.name for one in request.messages[1].tool_calls] == names
        assert [one.name for one in request.tools.tools] == names
        assert [message.content for message in request.messages[2:]] == [
            "done",
            "so\n[There is an image here, which this model cannot see.]",
        ]
        assert request.tools.tools[1].description == "d"
        held = json.loads(request.tools.tools[0].parameters)["properties"]["input"]["x-grammar"]
        assert held == {"syntax": "lark", "definition": 'start: "a"'}


async def test_text_after_a_call_does_not_cut_it(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    """A merged delta may contain a call's end, text after it, and the next call."""
    parts = (ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "c2", "time", "{}"))
    scripted.script = [
        called(0, '{"a": 1', id="c1", name="weather"),
        Delta("r", "And", (1,), tool_calls=parts),
        ended(FinishReason.LENGTH),
    ]
    async with client_of(fakes) as client:
        whole = await client.responses.create(**ASKED)
        first, message, second = whole.output
        assert (first.call_id, first.arguments, second.call_id, second.arguments) == ("c1", '{"a": 1}', "c2", "{}")
        assert (message.content[0].text, second.status) == ("And", "incomplete")
        assert without_ids((await streamed(client, **ASKED))[1]) == without_ids(whole)


async def test_a_structured_response_is_parsed_by_the_sdk(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    scripted.script = [said('{"name":'), said(' "Rome"}'), ended()]
    async with client_of(fakes) as client:
        parsed = await client.responses.parse(**ASKED, text_format=Town)
        assert parsed.output_parsed == Town(name="Rome")
        shape = scripted.requests[-1].sampling.structured_outputs
        assert shape is not None
        assert json.loads(shape.json or "")["required"] == ["name"]
        assert parsed.text.format.name == "Town"
        async with client.responses.stream(**ASKED, text_format=Town) as stream:
            assert (await stream.get_final_response()).output_parsed == Town(name="Rome")


async def test_log_probabilities_wait_for_their_text_or_the_end(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    probs = [TokenLogprob(65 + n, -n / 4) for n in range(5)]
    scripted.script = [
        said(reasoning="a", logprobs=(probs[0],)),
        Delta("r", "", (1,), logprobs=(probs[1],)),
        said("é", logprobs=(probs[2],)),
        said("f", logprobs=(probs[3],)),
        ended(logprobs=(probs[4],)),
    ]
    asked = {**ASKED, "include": ["message.output_text.logprobs"]}
    async with client_of(fakes) as client:
        whole = await client.responses.create(**asked)
        shown = [one.logprob for one in whole.output[1].content[0].logprobs]
        assert shown == [one.logprob for one in probs[1:]]
        events, last = await streamed(client, **asked)
        assert without_ids(last) == without_ids(whole)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [[one.logprob for one in event.logprobs] for event in deltas] == [shown[:2], shown[2:3], shown[3:]]


async def test_a_failing_stream_returns_its_partial_answer(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    async with client_of(fakes) as client:
        for error, code in ((Unavailable("lost"), "server_error"), (Overloaded("full"), "rate_limit_exceeded")):
            scripted.script = [said("a"), said("b"), error]
            events, last = await streamed(client, **ASKED)
            assert (events[-1].type, last.status) == ("response.failed", "failed")
            assert (last.error.code, last.error.message.split(".")[0]) == (code, error.message)
            assert (last.output_text, last.output[0].status) == ("ab", "incomplete")
        scripted.script = [Overloaded("full", 1500)]
        with pytest.raises(openai.RateLimitError):
            await streamed(client, **ASKED)
        scripted.script = [ended()]
        assert (await client.responses.create(**ASKED)).output == []


async def test_errors_name_the_field(fakes: FakeCluster) -> None:
    async with client_of(fakes) as client:
        wrong: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
            (openai.BadRequestError, "max_output_tokens", {"max_output_tokens": -2}),
            (openai.BadRequestError, "input", {"input": "x" * 300}),
            (openai.BadRequestError, "previous_response_id", {"previous_response_id": "resp_1"}),
            (openai.BadRequestError, "background", {"background": True}),
            (openai.BadRequestError, "tool_choice.type", {"tool_choice": {"type": "local_shell"}}),
            (openai.NotFoundError, "model", {"model": "gpt-4"}),
        ]
        for kind, param, fields in wrong:
            with pytest.raises(kind) as caught:
                await client.responses.create(**ASKED | fields)
            assert caught.value.param == param
    await fakes.settled()
