"""Structures, tools and results of every API and server are accepted alike at all APIs, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pillion.gateway.anthropic.anthropic_requests import messages_request
from pillion.gateway.http_api.body_reading import BodyReading, with_reading
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.openai_requests import chat_request, completion_request
from pillion.gateway.responses.responses_requests import responses_request
from pillion.types import ChatMessage, GenerateRequest, StructuredOutputs, ToolOptions

USER = {"role": "user", "content": "hi"}
Read = Callable[[bytes, str], Any]
DOORS: dict[str, tuple[Read, dict[str, Any]]] = {
    "completions": (completion_request, {"prompt": "x"}),
    "chat": (chat_request, {"messages": [USER]}),
    "responses": (responses_request, {"input": "hi"}),
    "messages": (messages_request, {"messages": [USER], "max_tokens": 9}),
}
CHATS = [name for name in DOORS if name != "completions"]
every_door = pytest.mark.parametrize("door", DOORS)
every_chat = pytest.mark.parametrize("door", CHATS)


def read(door: str, fields: dict[str, Any]) -> tuple[GenerateRequest, str]:
    """Return the request parsed from a body at one API, and the ignored names."""
    reader, least = DOORS[door]
    reading = BodyReading()
    asked = with_reading(reading, reader, json.dumps(least | fields).encode(), "r")
    return asked.requests[0], reading.ignored


def refusal(door: str, fields: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(door, fields)
    assert caught.value.status == 400
    return caught.value


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
WRAPPED = {"name": "n", "schema": SCHEMA, "strict": True}
JSON, OBJECT = StructuredOutputs(json=TEXT), StructuredOutputs(json_object=True)
REGEX, GRAMMAR = StructuredOutputs(regex="a+"), StructuredOutputs(grammar='root ::= "a"')
FORMATS: dict[str, tuple[Any, StructuredOutputs | None]] = {
    "chat": ({"type": "json_schema", "json_schema": WRAPPED}, JSON),
    "chat, bare": ({"type": "json_schema", "json_schema": SCHEMA}, JSON),
    "chat, without a type": ({"json_schema": WRAPPED}, JSON),
    "responses": ({"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}, JSON),
    "messages": ({"type": "json_schema", "schema": SCHEMA}, JSON),
    "wrapped twice": ({"type": "json_schema", "schema": WRAPPED}, JSON),
    "llama.cpp": ({"type": "json_object", "schema": SCHEMA}, JSON),
    "tgi": ({"type": "json_object", "value": SCHEMA}, JSON),
    "tgi, json": ({"type": "json", "value": SCHEMA}, JSON),
    "tgi, json_schema": ({"type": "json_schema", "value": WRAPPED}, JSON),
    "tgi, regex": ({"type": "regex", "value": "a+"}, REGEX),
    "together": ({"type": "regex", "pattern": "a+"}, REGEX),
    "fireworks": ({"type": "grammar", "grammar": 'root ::= "a"'}, GRAMMAR),
    "ollama": (SCHEMA, JSON),
    "ollama, json": ("json", OBJECT),
    "a schema as text": (TEXT, JSON),
    "any object": ({"type": "json_object"}, OBJECT),
    "without a schema": ({"type": "json_schema", "json_schema": {"name": "n"}}, OBJECT),
    "text": ({"type": "text"}, None),
    "a word": ("text", None),
    "none": ("", None),
    "null": (None, None),
}
PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "response_format": lambda form: {"response_format": form},
    "format": lambda form: {"format": form},
    "output_format": lambda form: {"output_format": form},
    "text.format": lambda form: {"text": {"format": form}},
    "output_config.format": lambda form: {"output_config": {"format": form}},
}
FIELDS: dict[str, tuple[dict[str, Any], StructuredOutputs]] = {
    "vllm": ({"structured_outputs": {"json": SCHEMA}}, JSON),
    "vllm, wrapped": ({"structured_outputs": {"json": WRAPPED}}, JSON),
    "vllm, old": ({"guided_json": SCHEMA}, JSON),
    "vllm, old text": ({"guided_json": TEXT}, JSON),
    "vllm, old regex": ({"guided_regex": "a+"}, REGEX),
    "vllm, old grammar": ({"guided_grammar": 'root ::= "a"'}, GRAMMAR),
    "vllm, old choice": ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    "sglang": ({"json_schema": TEXT}, JSON),
    "sglang, regex": ({"regex": "a+"}, REGEX),
    "sglang, ebnf": ({"ebnf": 'root ::= "a"'}, GRAMMAR),
    "llama.cpp, schema": ({"json_schema": SCHEMA}, JSON),
    "llama.cpp, grammar": ({"grammar": 'root ::= "a"'}, GRAMMAR),
    "tgi, grammar": ({"grammar": {"type": "json", "value": SCHEMA}}, JSON),
    "tgi, regex": ({"grammar": {"type": "regex", "value": "a+"}}, REGEX),
}


@every_door
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_response_format_is_parsed_the_same_by_every_api(door: str, place: str, form: str) -> None:
    sent, asked = FORMATS[form]
    request, ignored = read(door, PLACES[place](sent))
    assert (request.sampling.structured_outputs, ignored) == (asked, "")


@every_door
@pytest.mark.parametrize("field", FIELDS)
def test_a_structured_output_field_is_parsed_the_same_by_every_api(door: str, field: str) -> None:
    sent, asked = FIELDS[field]
    request, ignored = read(door, sent)
    assert (request.sampling.structured_outputs, ignored) == (asked, "")


@every_door
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "definition": SCHEMA}}, "response_format.definition"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA, "value": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": {"type": "grammar", "grammar": 5}}, "response_format.grammar"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": ["json"]}, "response_format"),
        ({"format": "markdown"}, "format"),
        ({"format": "json", "guided_regex": "a"}, "guided_regex"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"responseFormat": {"type": "json_object"}}, "responseFormat"),
        ({"response_schema": SCHEMA}, "response_schema"),
        ({"schema": SCHEMA}, "schema"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"extra_body": {"guided_json": SCHEMA}}, "extra_body.guided_json"),
        ({"nvext": {"guided_regex": "a"}}, "nvext.guided_regex"),
        ({"generationConfig": {"responseSchema": SCHEMA}}, "generationConfig.responseSchema"),
        ({"parameters": {"grammar": {"type": "regex", "value": "a"}}}, "parameters.grammar"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_unknown_structure_is_refused_by_name(door: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(door, fields).param == param


@every_door
@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"extra_body": {"top_a": 1}}, "extra_body"),
        ({"options": {"format": ""}}, "options"),
        ({"structural_tag": None, "schema": {}}, "schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"response_format": {"type": "text", "description": "d"}}, "response_format.description"),
    ],
    ids=str,
)
def test_fields_that_ask_for_no_structure_are_named(door: str, fields: dict[str, Any], ignored: str) -> None:
    request, named = read(door, fields)
    assert (request.sampling.structured_outputs, named) == (None, ignored)


# Tools in the shapes of all APIs: each is the function f with its description and schema.
ABOUT = {"name": "f", "description": "d"}
TOOLS: dict[str, Any] = {
    "chat": {"type": "function", "function": {**ABOUT, "parameters": SCHEMA}},
    "chat, without a type": {"function": {**ABOUT, "parameters": SCHEMA}},
    "chat, with Anthropic's schema": {"type": "function", "function": {**ABOUT, "input_schema": SCHEMA}},
    "responses": {"type": "function", **ABOUT, "parameters": SCHEMA},
    "cursor": {**ABOUT, "parameters": SCHEMA},
    "messages": {**ABOUT, "input_schema": SCHEMA},
    "messages, custom": {"type": "custom", **ABOUT, "input_schema": SCHEMA},
    "mcp": {**ABOUT, "inputSchema": SCHEMA},
    "gemini": {"functionDeclarations": [{**ABOUT, "parameters": SCHEMA}]},
    "gemini, in snakes": {"function_declarations": [{**ABOUT, "parameters": SCHEMA}]},
    "another type": {"type": "tool", **ABOUT, "input_schema": SCHEMA},
}


@every_chat
@pytest.mark.parametrize("shape", TOOLS)
def test_a_tool_is_parsed_the_same_by_every_api(door: str, shape: str) -> None:
    request, ignored = read(door, {"tools": [TOOLS[shape]]})
    (tool,) = request.tools.tools
    assert (tool.name, tool.description, tool.parameters, ignored) == ("f", "d", TEXT, "")


@every_chat
@pytest.mark.parametrize("shape", ["chat", "responses", "messages", "cursor"])
def test_a_tool_without_a_schema_is_parsed_the_same_by_every_api(door: str, shape: str) -> None:
    sent = json.loads(json.dumps(TOOLS[shape]))
    for held in (sent, sent.get("function", {})):
        held.pop("parameters", held.pop("input_schema", None))
    request, ignored = read(door, {"tools": [sent]})
    assert ([(tool.name, tool.parameters) for tool in request.tools.tools], ignored) == ([("f", "")], "")


@every_chat
@pytest.mark.parametrize("nested", [True, False])
def test_a_custom_tool_is_parsed_the_same_by_every_api(door: str, nested: bool) -> None:
    grammar = {"syntax": "regex", "definition": "a"}
    form = {"type": "grammar", "grammar": grammar} if nested else {"type": "grammar", **grammar}
    custom = {**ABOUT, "format": form}
    request, ignored = read(door, {"tools": [{"type": "custom", **({"custom": custom} if nested else custom)}]})
    (tool,) = request.tools.tools
    assert (tool.name, ignored) == ("f", "")
    assert json.loads(tool.parameters)["properties"]["input"]["x-grammar"] == grammar


@every_chat
def test_a_server_tool_is_left_out_and_named_by_every_api(door: str) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "mcp", "server_url": "x"}]
    request, ignored = read(door, {"tools": tools})
    assert (request.tools.tools, ignored) == ((), "tools.mcp, tools.web_search_20250305")


@every_chat
@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("auto", ToolOptions(choice="auto")),
        ("any", ToolOptions(choice="required")),
        ("required", ToolOptions(choice="required")),
        ("none", ToolOptions(choice="none")),
        ({"type": "any"}, ToolOptions(choice="required")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolOptions(choice="auto", parallel_tool_calls=False)),
        ({"type": "tool", "name": "f"}, ToolOptions(choice="named", name="f")),
        ({"type": "function", "name": "f"}, ToolOptions(choice="named", name="f")),
        ({"type": "function", "function": {"name": "f"}}, ToolOptions(choice="named", name="f")),
        ({"function": {"name": "f"}}, ToolOptions(choice="named", name="f")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            ToolOptions(choice="required", allowed=("f",)),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]}},
            ToolOptions(choice="auto", allowed=("f",)),
        ),
    ],
    ids=str,
)
def test_tool_choice_is_parsed_the_same_by_every_api(door: str, choice: Any, chosen: ToolOptions) -> None:
    request, ignored = read(door, {"tool_choice": choice})
    assert (request.tools, ignored) == (chosen, "")


@every_chat
def test_parallel_calls_are_disabled_the_same_way_by_every_api(door: str) -> None:
    assert read(door, {"parallel_tool_calls": False})[0].tools.parallel_tool_calls is False


@every_chat
@pytest.mark.parametrize(
    "choice", [{"type": "web_search"}, {"type": "function"}, {"type": "some", "name": "f"}], ids=str
)
def test_a_choice_of_an_unknown_tool_is_refused(door: str, choice: Any) -> None:
    assert refusal(door, {"tool_choice": choice}).param == "tool_choice.type"


@every_chat
def test_legacy_function_fields_are_refused(door: str) -> None:
    assert refusal(door, {"functions": [{"name": "f"}]}).param == "functions"
    assert refusal(door, {"function_call": {"name": "f"}}).param == "function_call"
    assert read(door, {"functions": [], "function_call": "none"})[1] == ""


# A call of f and its result, in the shapes of chats and of Messages, followed by a question.
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
RESULTS: dict[str, list[Any]] = {
    "chat": [{"role": "tool", "tool_call_id": "c", "content": "12"}],
    "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "12"}]}],
    "messages, in parts": [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "12"}]}],
        }
    ],
}


@every_chat
@pytest.mark.parametrize("call", [CALLED, USED], ids=["chat", "messages"])
@pytest.mark.parametrize("result", RESULTS)
def test_calls_and_results_are_parsed_the_same_by_every_api(door: str, call: Any, result: str) -> None:
    field = "input" if door == "responses" else "messages"
    request, ignored = read(door, {field: [USER, call, *RESULTS[result], {"role": "user", "content": "so?"}]})
    user, called, answered, asks = request.messages
    assert ([(one.id, one.name, json.loads(one.arguments)) for one in called.tool_calls], called.content) == (
        [("c", "f", {})],
        "",
    )
    assert answered == ChatMessage("tool", "12", tool_call_id="c", name=answered.name)
    assert (user.content, asks.content, ignored) == ("hi", "so?", "")


@every_chat
def test_a_result_and_the_users_text_are_two_messages(door: str) -> None:
    field = "input" if door == "responses" else "messages"
    failed = {"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True}
    said = {"role": "user", "content": [failed, {"type": "text", "text": "so?"}]}
    request, ignored = read(door, {field: [USER, USED, said]})
    assert [(one.role, one.content, one.name) for one in request.messages[2:]] == [
        ("tool", "Error: no", "f"),
        ("user", "so?", ""),
    ]
    assert not ignored


@every_door
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"])
def test_a_token_limit_is_parsed_the_same_by_every_api(door: str, name: str) -> None:
    body = {key: value for key, value in DOORS[door][1].items() if key != "max_tokens"} | {name: 7}
    reading = BodyReading()
    asked = with_reading(reading, DOORS[door][0], json.dumps(body).encode(), "r")
    assert (asked.requests[0].sampling.max_tokens, reading.ignored) == (7, "")


@every_door
@pytest.mark.parametrize("stops", ["a", ["a", "b"]], ids=str)
@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
def test_stop_strings_are_parsed_the_same_by_every_api(door: str, name: str, stops: Any) -> None:
    request, ignored = read(door, {name: stops})
    assert (request.sampling.stop, ignored) == (tuple(stops), "")


@every_door
def test_an_aliased_field_loses_to_its_own_name(door: str) -> None:
    own, other = ("stop_sequences", "stop") if door == "messages" else ("stop", "stop_sequences")
    request, ignored = read(door, {own: ["a"], other: ["b"]})
    assert (request.sampling.stop, ignored) == (("a",), other)


@every_door
def test_minus_one_means_no_token_limit(door: str) -> None:
    names = {"chat": ["max_tokens", "max_completion_tokens"], "responses": ["max_output_tokens"]}
    for name in names.get(door, ["max_tokens"]):
        request, ignored = read(door, {name: -1})
        assert (request.sampling.max_tokens, ignored) == (None, "")
