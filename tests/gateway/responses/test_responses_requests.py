"""Bodies of /v1/responses become gateway requests, field by field; unsupported fields are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.http_api.body_reading import BodyReading, with_reading
from pillion.gateway.http_api.http_errors import ApiError, from_pillion
from pillion.gateway.responses.responses_requests import LOST_CALL, ResponsesRequest, responses_request
from pillion.types import ChatMessage, GenerateRequest, SamplingParams, StructuredOutputs, Tool, ToolCall, ToolOptions

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}
# No-op values that clients send.
NOTHING = {
    "store": False,
    "background": False,
    "previous_response_id": None,
    "conversation": None,
    "service_tier": "auto",
    "truncation": "disabled",
    "context_management": [],
    "include": ["reasoning.encrypted_content"],
}


def read(**fields: Any) -> ResponsesRequest:
    return responses_request(json.dumps({"input": "hi", **fields}).encode(), "r")


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_every_request_field_is_parsed() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 3,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": 2,
        "ignore_eos": True,
    }
    asked = read(
        **sampling,
        model="m",
        instructions="Be brief.",
        max_output_tokens=9,
        stop=["a", "b"],
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream=True,
        priority=-5,
        cache_salt="s",
        reasoning={"effort": "low", "summary": "auto"},
        chat_template_kwargs={"enable_thinking": False},
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, "verbosity": "medium"},
    )
    (request,) = asked.requests
    assert request.messages == (ChatMessage("system", "Be brief."), ChatMessage("user", "hi"))
    assert (request.model, request.priority, request.cache_salt, request.request_id) == ("m", -5, "s", "r")
    shape = request.sampling.structured_outputs
    assert isinstance(shape, StructuredOutputs)
    assert json.loads(shape.json or "") == SCHEMA
    assert request.sampling == SamplingParams(
        **sampling, max_tokens=9, stop=("a", "b"), logprobs=2, structured_outputs=shape
    )
    assert json.loads(request.chat.chat_template_kwargs) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (asked.stream, asked.logprobs, read().stream, read().logprobs) == (True, True, False, False)
    object_asked = read(text={"format": {"type": "json_object"}}).requests[0].sampling
    assert object_asked.structured_outputs == StructuredOutputs(json_object=True)
    assert read(text={"format": {"type": "text"}}).requests == read().requests == read(**NOTHING).requests
    assert read().requests[0].sampling == SamplingParams()
    assert read(metadata={"a": "b"}, user="u", safety_identifier="s", prompt_cache_key="k").requests == read().requests


def test_conversation_items_are_parsed() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": [{"token": "W"}]}],
        },
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c1",
            "name": "weather",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "13"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
    ]
    asked = read(input=items, tools=[TOOL], parallel_tool_calls=False)
    assert asked.requests[0].messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "a\nb"),
        ChatMessage(
            "assistant",
            "Wait.",
            (ToolCall("c1", "weather", "{}"), ToolCall("c2", "time", "{}")),
            reasoning="hm",
        ),
        ChatMessage("tool", "12", tool_call_id="c1", name="weather"),
        ChatMessage("tool", "13", tool_call_id="c3"),
        ChatMessage("assistant", "", reasoning="so"),
    )
    tool = Tool(
        name="weather", description="Tells it.", parameters=json.dumps(SCHEMA, separators=(",", ":")), strict=True
    )
    assert asked.requests[0].tools == ToolOptions(tools=(tool,), parallel_tool_calls=False)
    wrong = InvalidRequest.of(
        FieldViolation("messages[3].content", "x"),
        FieldViolation("messages", "x"),
        FieldViolation("tools.tools[0].parameters", "x"),
        FieldViolation("sampling.max_tokens", "x"),
        FieldViolation("sampling.stop[2]", "x"),
    )
    named = from_pillion(wrong, asked.names[0]).message
    assert named == "input[6].content: x; input: x; tools[0].parameters: x; max_output_tokens: x; stop[2]: x"


@pytest.mark.parametrize(
    ("choice", "read_as"),
    [
        (None, ToolOptions()),
        ("auto", ToolOptions(choice="auto")),
        ("required", ToolOptions(choice="required")),
        ("none", ToolOptions(choice="none")),
        ({"type": "function", "name": "f"}, ToolOptions(choice="named", name="f")),
        ({"type": "custom", "name": "f"}, ToolOptions(choice="named", name="f")),
        ({"type": "function", "name": "f", "namespace": "a"}, ToolOptions(choice="named", name="a__f")),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}],
            },
            ToolOptions(choice="required", allowed=("f", "g")),
        ),
    ],
    ids=str,
)
def test_tool_choice_is_read(choice: Any, read_as: ToolOptions) -> None:
    assert read(tool_choice=choice).requests[0].tools == read_as


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].tool_call_id"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}, {"role": "assistant", "content": "x"}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        (
            {
                "tools": [
                    {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "gbnf", "definition": ""}}
                ]
            },
            "tools[0].format.syntax",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "local_shell"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}},
            "tool_choice.tools",
        ),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning.effort"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"user": "u" * 513}, "user"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_fields_are_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.param, error.message.partition(": ")[0]) == (param, param)


def test_too_many_strings_are_refused_unread() -> None:
    error = refusal(input=[{"role": "user", "content": "x"}] * 20_000)
    assert (error.param, "strings" in error.message) == ("input", True)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (NOTHING, "include"),
        ({"client_metadata": {"x-codex-turn-metadata": "{}"}}, "client_metadata"),
        ({"store": True, "user": "u", "prompt_cache_key": "k", "service_tier": "flex"}, None),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "x"}, "safety_identifier": "s"}, None),
        ({"truncation": "auto", "max_tool_calls": 5}, None),
        ({"context_management": [{"type": "compaction", "compact_threshold": 9}]}, "context_management"),
        ({"include": ["file_search_call.results", "of.next.year"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {}}, ""),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"moderation": {"model": "m"}, "access_programs": {}, "image": {}}, None),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed", "context": "auto"}}, "reasoning.context, reasoning.summary"),
        ({"reasoning": {"summary": "none"}}, ""),
        ({"tools": [TOOL | {"allowed_callers": ["programmatic"]}]}, "tools.allowed_callers"),
        ({"tools": [TOOL | {"defer_loading": True, "output_schema": {}}]}, "tools.defer_loading, tools.output_schema"),
        ({"tools": [TOOL | {"defer_loading": False}]}, ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_fields_without_effect_are_named(fields: dict[str, Any], ignored: str | None) -> None:
    reading = BodyReading()
    asked, named = (
        with_reading(reading, responses_request, json.dumps({"input": "hi", **fields}).encode(), "r"),
        reading.ignored,
    )
    assert named == (", ".join(sorted(fields)) if ignored is None else ignored)
    without = read(tools=[TOOL]) if "tools" in fields else read()
    assert asked.requests == without.requests


def test_a_call_that_was_cut_can_be_sent_back() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"at', "status": "incomplete"}
    (message,) = read(input=[item]).requests[0].messages
    assert message.tool_calls == (ToolCall("c", "f", r'{"INVALID_JSON": "{\"at"}'),)


def test_items_are_accepted_back_with_their_extra_fields() -> None:
    said = {"type": "output_text", "text": "ok", "annotations": [{"type": "url_citation"}], "logprobs": [{}]}
    sent = {"type": "message", "role": "assistant", "content": [said], "id": "msg_1", "status": "completed"}
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x", "id": "rs_1"}
    items = [
        {"role": "user", "content": "a"},
        encrypted,
        sent | {"phase": "commentary"},
        {"role": "user", "content": "b"},
    ]
    reading = BodyReading()
    asked, named = with_reading(reading, responses_request, json.dumps({"input": items}).encode(), "r"), reading.ignored
    assert named == (
        "input.content.annotations, input.content.logprobs, input.encrypted_content, input.id, "
        "input.phase, input.status"
    )
    said_here = (ChatMessage("user", "a"), ChatMessage("assistant", "ok"), ChatMessage("user", "b"))
    assert asked.requests[0].messages == said_here


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation as input"),
        ({"conversation": "c"}, "send the whole conversation as input"),
        ({"prompt": {"id": "p"}}, "nothing is stored here"),
        ({"background": True}, "/v1/batches"),
    ],
)
def test_stateful_fields_are_refused_with_advice(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(**fields).message


def noted(**fields: Any) -> tuple[GenerateRequest, str]:
    reading = BodyReading()
    asked = with_reading(reading, responses_request, json.dumps({"input": "hi", **fields}).encode(), "r")
    (request,) = asked.requests
    return request, reading.ignored


def part(text: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,x"}
# Contents of an earlier turn, with the model's text and its role, and the ignored names.
TOLD: list[tuple[dict[str, Any], tuple[str, str] | None, str]] = [
    (
        {"type": "web_search_call", "action": {"type": "search", "query": "x"}},
        None,
        "input.action, input.web_search_call",
    ),
    (
        {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec"}},
        None,
        "input.action, input.local_shell_call",
    ),
    ({"type": "local_shell_call_output", "call_id": "s", "output": "a.txt"}, ("user", "a.txt"), ""),
    ({"type": "computer_call_output", "call_id": "c", "output": SCREEN}, None, "input.computer_call_output"),
    ({"type": "mcp_call", "name": "f", "arguments": "{}", "output": "hit"}, ("assistant", "hit"), ""),
    ({"type": "compaction", "encrypted_content": "e"}, None, "input.compaction, input.encrypted_content"),
    ({"type": "compaction", "summary": [part("Short.", "summary_text")]}, ("assistant", "Short."), ""),
    ({"type": "item_reference", "id": "x"}, None, "input.id, input.item_reference"),
    ({"type": "hologram", "content": [part("of next year", "holo"), {"type": "x"}]}, ("assistant", "of next year"), ""),
    ({"type": "hologram", "content": {"a": 1}, "output": 5, "shape": {}}, None, "input.hologram, input.shape"),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, ("assistant", "No."), ""),
    ({"role": "assistant", "content": [{"type": "output_audio"}]}, ("assistant", ""), "input.content.output_audio"),
    ({"role": "assistant", "content": None}, ("assistant", ""), ""),
    ({"role": "assistant"}, ("assistant", ""), ""),
    (
        {"role": "user", "content": [{"type": "input_file", "file_id": "f"}, part("b", "input_text")]},
        ("user", "b"),
        "input.content.file_id, input.content.input_file",
    ),
]


@pytest.mark.parametrize(("item", "told", "named"), TOLD, ids=lambda value: str(value)[:50])
def test_earlier_turns_are_accepted_leniently(item: dict[str, Any], told: tuple[str, str] | None, named: str) -> None:
    around = [{"role": "user", "content": "a"}, item, {"role": "assistant", "content": "Done."}]
    request, ignored = noted(input=[*around, {"role": "user", "content": "c"}])
    said = [] if told is None or told == ("assistant", "") else [told]
    middle = (
        [("assistant", f"{said[0][1]}\nDone.")]
        if said and said[0][0] == "assistant"
        else [*said, ("assistant", "Done.")]
    )
    assert [(one.role, one.content) for one in request.messages] == [("user", "a"), *middle, ("user", "c")]
    assert ignored == named


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(None, ""), ({"a": 1}, '{"a": 1}'), ([1], '{"INVALID_JSON": "[1]"}'), ("null", ""), ("{}", "{}")],
    ids=str,
)
def test_arguments_of_earlier_calls_may_be_anything(arguments: Any, told: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    request, _ = noted(input=[call, {"type": "function_call_output", "call_id": "c", "output": None}])
    assert [one.arguments for one in request.messages[0].tool_calls] == [told]
    assert request.messages[1] == ChatMessage("tool", "", tool_call_id="c", name="f")


def test_a_result_of_a_referenced_call_reaches_the_model() -> None:
    reference, result = (
        {"type": "item_reference", "id": "fc"},
        {"type": "function_call_output", "call_id": "c", "output": "12"},
    )
    request, ignored = noted(input=[{"role": "user", "content": "a"}, reference, result])
    assert [(one.role, one.content) for one in request.messages] == [("user", "a"), ("user", f"{LOST_CALL}\n12")]
    assert ignored == "input.id, input.item_reference"


SERVERS = ("web_search", "local_shell", "shell", "apply_patch", "mcp", "file_search", "code_interpreter", "of_2030")


def test_server_tools_are_hidden_from_the_model() -> None:
    dropped = [{"type": kind, "environment": {"type": "x"}} for kind in SERVERS]
    spaced = {"type": "namespace", "name": "n", "tools": [TOOL, dropped[0]]}
    request, ignored = noted(tools=[*dropped, TOOL, spaced])
    assert [tool.name for tool in request.tools.tools] == ["weather", "n__weather"]
    assert ignored == ", ".join(sorted(f"tools.{kind}" for kind in SERVERS))
    asked = responses_request(json.dumps({"input": "x", "tools": [*dropped, TOOL, spaced]}).encode(), "r")
    assert [tool["name"] for tool in json.loads(bytes(asked.echoed["tools"]))] == ["weather", "n"]
    for named, read_as in (
        (
            [{"type": "web_search"}, {"type": "function", "name": "weather"}],
            ToolOptions(choice="auto", allowed=("weather",)),
        ),
        ([{"type": "mcp", "server_label": "x"}], ToolOptions(choice="none")),
    ):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": named}
        request, ignored = noted(tool_choice=choice)
        assert (request.tools, ignored) == (read_as, f"tool_choice.tools.{named[0]['type']}")


def test_json_schemas_of_other_servers_are_accepted() -> None:
    (request,) = read(text={"format": {"type": "json_object", "schema": {"type": "object"}}}).requests
    assert request.sampling.structured_outputs == StructuredOutputs(json='{"type":"object"}')
