"""Anthropic bodies become gateway requests, field by field; unsupported ones are refused with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.anthropic.anthropic_requests import MessagesRequest, count_tokens_request, messages_request
from pillion.gateway.anthropic.signatures import signature_of
from pillion.gateway.http_api.body_reading import BodyReading, with_reading
from pillion.gateway.http_api.gathered_messages import UNSEEN
from pillion.gateway.http_api.http_errors import ApiError, from_pillion
from pillion.types import (
    ChatMessage,
    ChatOptions,
    GenerateRequest,
    SamplingParams,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolOptions,
)

LEAST: dict[str, Any] = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA, **MARK}
SCOPED = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
USER: dict[str, Any] = {"role": "user", "content": "a"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
LAST = "messages[2].content"


def read(**fields: Any) -> MessagesRequest:
    return messages_request(json.dumps(LEAST | fields).encode(), "r")


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_every_request_field_is_parsed() -> None:
    labels = {"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard", "mcp_servers": [], **MARK}
    asked = read(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=3,
        ignore_eos=True,
        stop_sequences=["a", "b"],
        stream=True,
        priority=-5,
        cache_salt="s",
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        **labels,
    )
    (request,) = asked.requests
    assert (request.model, request.priority, request.cache_salt, request.request_id) == ("m", -5, "s", "r")
    shape = request.sampling.structured_outputs
    assert isinstance(shape, StructuredOutputs)
    assert json.loads(shape.json or "") == SCHEMA
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=3,
        ignore_eos=True,
        max_tokens=2000,
        stop=("a", "b"),
        structured_outputs=shape,
    )
    assert json.loads(request.chat.chat_template_kwargs) == {"reasoning_effort": "low"}
    assert (asked.stream, read().stream) == (True, False)
    assert read(**labels).requests == read().requests
    assert read().requests[0].sampling == SamplingParams(max_tokens=2000)
    assert read().requests[0].chat == ChatOptions()


def test_a_conversation_with_tools_is_parsed() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **MARK}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "Wait."},
                use,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "12 °C"}], **MARK},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
        {"role": "system", "content": "Be brief."},
    ]
    system = [{"type": "text", "text": "x", **MARK}, {"type": "text", "text": "y", "citations": None}]
    asked = read(messages=messages, system=system, tools=[TOOL])
    (request,) = asked.requests
    assert request.messages == (
        ChatMessage("system", "x\ny"),
        ChatMessage("user", "a\nb\nc"),
        ChatMessage("assistant", "Wait.", (ToolCall("t1", "weather", '{"city": "Rome"}'),), reasoning="hm"),
        ChatMessage("tool", "12 °C", tool_call_id="t1", name="weather"),
        ChatMessage("tool", "Error: no", tool_call_id="t2"),
        ChatMessage("user", "And now?"),
        ChatMessage("system", "Be brief."),
    )
    assert request.tools == ToolOptions(
        tools=(Tool(name="weather", description="Tells it.", parameters=json.dumps(SCHEMA, separators=(",", ":"))),)
    )
    wrong = InvalidRequest.of(
        FieldViolation("messages[4].content", "x"),
        FieldViolation("tools.tools[0].parameters", "x"),
        FieldViolation("tools.tools[0].parameters.properties.city", "x"),
        FieldViolation("tools.tools[0].name", "x"),
        FieldViolation("tools.tools", "x"),
        FieldViolation("tools.choice", "x"),
        FieldViolation("sampling.stop[2]", "x"),
        FieldViolation("messages[0].role", "x"),
    )
    named = from_pillion(wrong, asked.names[0]).message
    assert named.split(": x; ") == [
        "messages[3].content",
        "tools[0].input_schema",
        "tools[0].input_schema.properties.city",
        "tools[0].name",
        "tools",
        "tool_choice",
        "stop_sequences[2]",
        "system.role: x",
    ]


def test_the_last_message_of_an_assistant_is_continued() -> None:
    begun = [*LEAST["messages"], {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    assert read(messages=begun).requests[0].chat == ChatOptions(continue_final_message=True)
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    called = [*LEAST["messages"], {"role": "assistant", "content": [use]}]
    assert refusal(messages=called).param == "messages[1]"


@pytest.mark.parametrize(
    ("choice", "read_as"),
    [
        (None, ToolOptions()),
        ({"type": "auto"}, ToolOptions(choice="auto")),
        ({"type": "none"}, ToolOptions(choice="none")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolOptions(choice="required", parallel_tool_calls=False)),
        ({"type": "tool", "name": "f"}, ToolOptions(choice="named", name="f")),
        ({"type": "auto", "disable_parallel_tool_use": False}, ToolOptions(choice="auto", parallel_tool_calls=True)),
    ],
    ids=str,
)
def test_tool_choice_is_read(choice: Any, read_as: ToolOptions) -> None:
    assert read(tool_choice=choice).requests[0].tools == read_as
    assert count_tokens_request(json.dumps({"messages": LEAST["messages"], "tool_choice": choice}).encode())[0].tools


def test_thinking_sets_the_variables_that_templates_know() -> None:
    for kind, thinks in (("enabled", True), ("disabled", False)):
        kwargs = read(thinking={"type": kind}).requests[0].chat.chat_template_kwargs
        assert json.loads(kwargs) == {"enable_thinking": thinks, "thinking": thinks}
    assert read(thinking={"type": "adaptive"}).requests == read().requests
    assert read(thinking={"type": "enabled", "budget_tokens": 1024}).shows_thinking
    assert not read(thinking={"type": "enabled", "display": "omitted"}).shows_thinking
    for budget in (1023, 2000):
        assert read(thinking={"type": "enabled", "budget_tokens": budget}).shows_thinking


@pytest.mark.parametrize(
    ("thinking", "signature", "read_as"),
    [
        ("", signature_of("Größe?\n"), "Größe?\n"),
        ("hm", signature_of("Größe?"), "hm"),
        ("hm", "EqQBCkYIAxgCKkA", "hm"),
        ("", "EqQBCkYIAxgCKkA", ""),
        ("hm", "", "hm"),
    ],
)
def test_a_signature_contains_the_hidden_thinking(thinking: str, signature: str, read_as: str) -> None:
    block = {"type": "thinking", "thinking": thinking, "signature": signature}
    messages = [*LEAST["messages"], {"role": "assistant", "content": [block]}, *LEAST["messages"]]
    reading = BodyReading()
    asked = with_reading(reading, messages_request, json.dumps(LEAST | {"messages": messages}).encode(), "r")
    assert asked.requests[0].messages[1].reasoning == read_as
    # Ignored if it is another server's, or if the text is present.
    assert reading.ignored == ("messages.content.signature" if signature and not (read_as and not thinking) else "")


@pytest.mark.parametrize("signature", [signature_of("hm")[:-1], signature_of("hm") + "?", "pillion./w==", "pillion.ü"])
def test_a_signature_that_was_changed_is_refused(signature: str) -> None:
    block = {"type": "thinking", "thinking": "", "signature": signature}
    messages = [*LEAST["messages"], {"role": "assistant", "content": [block]}]
    assert refusal(messages=messages).param == "messages[1].content[0].signature"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": [IMAGE]}]},
            "messages[2].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "b"}, USER]},
            "messages[0].content[0].type",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": []}]}, LAST),
        ({"messages": [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": None}]}, LAST),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_fields_are_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.param, error.message.partition(": ")[0]) == (param, param)


def test_max_tokens_is_required_except_for_counting() -> None:
    with pytest.raises(ApiError) as caught:
        messages_request(json.dumps({"messages": LEAST["messages"]}).encode(), "r")
    assert (caught.value.param, caught.value.code) == ("max_tokens", "missing_required_parameter")
    request, _ = count_tokens_request(json.dumps({"messages": LEAST["messages"], "system": "x"}).encode())
    assert request.messages == (ChatMessage("system", "x"), ChatMessage("user", "hi"))


def test_invalid_utf8_in_a_tool_schema_is_refused() -> None:
    body = json.dumps(LEAST | {"tools": [TOOL]}).encode().replace(b'"properties"', b'"\xff"')
    with pytest.raises(ApiError) as caught:
        messages_request(body, "r")
    assert caught.value.param == "tools[0].input_schema"


def test_the_deepest_breakpoint_of_each_ttl_counts() -> None:
    short, long = {"cache_control": {"type": "ephemeral"}}, MARK
    text = {"type": "text", "text": "t"}
    # The deepest one counts, and before it the deepest with a longer TTL.
    asked = read(
        system=[{**text, **long}, {**text, "text": "u", **short}],
        messages=[
            {"role": "user", "content": [{**text, "text": "a", **short}, {**text, "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    hour, minutes = asked.breakpoints
    assert (hour.ttl_s, minutes.ttl_s) == (3600, 300)
    assert [(one.role, one.content) for one in hour.messages or ()] == [("system", "t"), ("user", ".")]
    assert [(one.role, one.content) for one in minutes.messages or ()] == [("system", "t\nu"), ("user", "a")]
    # A deeper one with a longer TTL covers the rest; at the top it is the whole prompt.
    (only,) = read(system=[{**text, **short}], tools=[TOOL], **long).breakpoints
    assert (only.messages, only.ttl_s) == (None, 3600)
    (of_tool,) = read(system="s", tools=[TOOL]).breakpoints
    assert [(one.role, one.content) for one in of_tool.messages or ()] == [("system", "s"), ("user", ".")]
    assert read(system="s").breakpoints == ()


def test_a_breakpoint_may_stand_after_a_call_and_its_result() -> None:
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{**call, "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [result]},
    ]
    (after_call,) = read(messages=turns).breakpoints
    assert [one.role for one in after_call.messages or ()] == ["user", "assistant"]
    turns[1]["content"], turns[2]["content"] = [call], [{**result, "cache_control": {"type": "ephemeral"}}]
    (after_result,) = read(messages=turns).breakpoints
    assert [(one.role, one.name) for one in after_result.messages or ()][-1] == ("tool", "weather")


def test_too_many_or_unknown_breakpoints_are_refused() -> None:
    text = {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}
    for many in ({"system": [text] * 5}, {"system": [text] * 4, "cache_control": {"type": "ephemeral"}}):
        with pytest.raises(ApiError) as caught:
            count_tokens_request(json.dumps({"messages": LEAST["messages"], **many}).encode())
        refused = refusal(**many)
        assert "at most 4" in refused.message
        assert (caught.value.status, caught.value.message) == (400, refused.message)
    count_tokens_request(json.dumps({"messages": LEAST["messages"], "system": [text] * 4}).encode())
    for wrong in ({"type": "persistent"}, {"type": "ephemeral", "ttl": "2h"}, {}, "ephemeral"):
        refusal(system=[{**text, "cache_control": wrong}])


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"metadata": {"user_id": "u"}}, None),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, None),
        ({"betas": ["x"], "anthropic_beta": ["y"], "anthropic_version": "z", "diagnostics": {}}, None),
        ({"container": {"id": "x"}, "mcp_servers": [{"url": "x"}], "inference_geo": "eu"}, None),
        ({"system": [{"type": "text", "text": "x", "cache_control": SCOPED}]}, "system.cache_control.scope"),
        ({"tools": [TOOL | {"allowed_callers": ["code_execution_20260120"]}]}, "tools.allowed_callers"),
        ({"speed": "fast", "service_tier": "standard_only", "fallbacks": [{"model": "x"}], "compaction": {}}, None),
        ({"billing_policy": {}, "user_profile_id": "a", "workspace_id": "b", "fallback_credit_token": "c"}, None),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"system": [{"type": "text", "text": "x", "citations": [{}], **MARK}]}, "system.citations"),
        (
            {"tools": [TOOL | {"defer_loading": True, "input_examples": [{}]}]},
            "tools.defer_loading, tools.input_examples",
        ),
        ({"speed": "standard", "service_tier": "auto", "container": None}, ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_fields_without_effect_are_named(fields: dict[str, Any], ignored: str | None) -> None:
    body = json.dumps(LEAST | fields).encode()
    reading = BodyReading()
    asked, named = with_reading(reading, messages_request, body, "r"), reading.ignored
    assert named == (", ".join(sorted(fields)) if ignored is None else ignored)
    plain = {"system": {"system": "x"}, "tools": {"tools": [TOOL]}}
    without = next((plain[name] for name in fields if name in plain), {})
    assert asked.requests == read(**without).requests


LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch="


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ([{"type": "text", "text": f"{LINE}%s;"}, {"type": "text", "text": "You are.", **MARK}], "You are."),
        ([{"type": "text", "text": f"{LINE}%s;\nYou are."}], "You are."),
        (f"{LINE}%s;\n{LINE}%s;\n\nYou are.", "\nYou are."),
    ],
    ids=["a block", "a block's line", "a text's lines"],
)
def test_lines_that_change_with_each_request_are_cut(system: Any, kept: str) -> None:
    """Requests that differ in this line alone have the same prompt in both APIs, breakpoints included."""
    asked = []
    for mark in ("eb6c6", "0aaa9"):
        body = json.dumps(LEAST | {"system": system}).replace("%s", mark).encode()
        reading = BodyReading()
        made = with_reading(reading, messages_request, body, "r")
        assert reading.ignored == "system.line"
        count_body = {name: value for name, value in json.loads(body).items() if name != "max_tokens"}
        counted, _ = count_tokens_request(json.dumps(count_body).encode())
        assert counted.messages == made.requests[0].messages
        asked.append(made)
    assert asked[0] == asked[1]
    assert asked[0].requests[0].messages[0] == ChatMessage("system", kept)


def test_similar_lines_elsewhere_are_kept() -> None:
    messages = [{"role": "user", "content": LINE}]
    system = [{"type": "text", "text": f"You are.\n{LINE}"}, {"type": "text", "text": ""}]
    made = messages_request(json.dumps(LEAST | {"messages": messages, "system": system}).encode(), "r")
    assert made.requests[0].messages == (ChatMessage("system", f"You are.\n{LINE}\n"), ChatMessage("user", LINE))


def test_unreadable_blocks_are_described_or_left_out_and_named() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}, **MARK}
    found = [{"type": "text", "text": "a"}, image, {"type": "tool_reference", "tool_name": "grep"}]
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {}, "caller": {"type": "direct"}}
    messages = [
        *LEAST["messages"],
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": found}]},
    ]
    reading = BodyReading()
    made = with_reading(reading, messages_request, json.dumps(LEAST | {"messages": messages}).encode(), "r")
    assert reading.ignored == "messages.content.content.source, messages.content.redacted_thinking"
    unseen = "[There is an image here, which this model cannot see.]"
    assert made.requests[0].messages[1:] == (
        ChatMessage("assistant", "", (ToolCall("c", "weather", "{}"),)),
        ChatMessage("tool", f"a\n{unseen}\ngrep", tool_call_id="c", name="weather"),
    )
    assert refusal(messages=[{"role": "user", "content": [image]}]).param == "messages[0].content[0].type"


def noted(**fields: Any) -> tuple[GenerateRequest, str]:
    reading = BodyReading()
    asked = with_reading(reading, messages_request, json.dumps(LEAST | fields).encode(), "r")
    (request,) = asked.requests
    return request, reading.ignored


def plain(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


SEARCHED = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
HITS = [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "e", "page_age": None}]
PAGE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The page."}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
# Contents of an earlier assistant turn, with the model's text and the ignored names.
TOLD: list[tuple[Any, str, str]] = [
    (SEARCHED, "", "server_tool_use"),
    ({"type": "web_search_tool_result", "tool_use_id": "s1", "content": HITS}, "", "web_search_tool_result"),
    (
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s1",
            "content": {"type": "web_fetch_result", "url": "u", "content": PAGE, "retrieved_at": "now"},
        },
        "The page.",
        "",
    ),
    (
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [plain("m1"), plain("m2")]},
        "m1\nm2",
        "",
    ),
    ({"type": "compaction", "content": "What was said."}, "What was said.", ""),
    ({"type": "redacted_thinking", "data": "x"}, "", "redacted_thinking"),
    ({"type": "hologram_2027", "text": "of next year", "more": [1]}, "of next year", ""),
    ({"type": "hologram_2027", "text": {"a": 1}, "content": 5, "source": [PDF]}, "", "hologram_2027"),
    (IMAGE, "", "source"),
]


@pytest.mark.parametrize(("block", "text", "named"), TOLD, ids=lambda value: str(value)[:50])
def test_earlier_turns_are_accepted_leniently(block: dict[str, Any], text: str, named: str) -> None:
    said = {"role": "assistant", "content": [plain("I look."), block, plain("Done.")]}
    request, ignored = noted(messages=[USER, said, USER])
    told = "\n".join(filter(None, ("I look.", text, "Done.")))
    assert request.messages == (ChatMessage("user", "a"), ChatMessage("assistant", told), ChatMessage("user", "a"))
    assert ignored == (f"messages.content.{named}" if named else "")
    only = {"role": "assistant", "content": [block | MARK if block != IMAGE else {**IMAGE, **MARK}]}
    request, _ = noted(messages=[USER, only, USER])
    assert [one.content for one in request.messages] == (["a", text, "a"] if text else ["a\na"])


def test_tool_results_reach_the_model() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    found = {"type": "search_result", "source": "u", "title": "t", "content": [plain("hit")]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [plain("x"), found, PAGE, PDF, IMAGE]}
    request, ignored = noted(
        messages=[USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    )
    assert request.messages[-1].content == f"x\nhit\nThe page.\n{UNSEEN}"
    assert ignored == "messages.content.content.document, messages.content.content.source"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, '{"a": 1}'),
        ({"input": None}, ""),
        ({"input": [1]}, '{"INVALID_JSON": "[1]"}'),
        ({"input": '{"b": 2}'}, '{"b": 2}'),
        ({"input": "cut"}, '{"INVALID_JSON": "cut"}'),
    ],
    ids=str,
)
def test_arguments_of_earlier_calls_may_be_anything(arguments: dict[str, Any], told: str) -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}} | arguments
    result = {"type": "tool_result", "tool_use_id": "t", "content": None}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    request, _ = noted(messages=turns)
    assert [call.arguments for call in request.messages[1].tool_calls] == [told]


def test_the_last_user_message_is_read_or_refused() -> None:
    request, ignored = noted(messages=[{"role": "user", "content": [PAGE, plain("Is it true?")]}])
    assert (request.messages[0].content, ignored) == ("The page.\nIs it true?", "")
    talk = [{"role": "user", "content": [PDF, plain("Read.")]}, {"role": "assistant", "content": "Yes."}, USER]
    request, ignored = noted(messages=talk)
    assert [one.content for one in request.messages] == ["Read.", "Yes.", "a"]
    assert ignored == "messages.content.document"
    for shown in (PDF, IMAGE, {"type": "container_upload", "file_id": "f"}):
        assert (
            refusal(messages=[{"role": "user", "content": [shown, plain("x")]}]).param == "messages[0].content[0].type"
        )
    talk = [{"role": "user", "content": []}, {"role": "assistant"}, {"role": "assistant", "content": []}, USER]
    assert noted(messages=talk)[0].messages[-1] == ChatMessage("user", "a")


SERVERS = [
    {"type": kind, "name": kind.rpartition("_")[0], "cache_control": None}
    for kind in (
        *("web_search_20250305", "web_fetch_20260209", "code_execution_20250825", "bash_20250124"),
        *("text_editor_20250728", "computer_20251124", "memory_20250818", "hologram_20300101"),
    )
]


def test_server_tools_are_hidden_from_the_model() -> None:
    options = {"max_uses": 5, "user_location": {"type": "approximate"}}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "x"}
    for choice in (None, {"type": "auto"}, {"type": "any"}):
        request, ignored = noted(tools=[SERVERS[0] | options, TOOL, *SERVERS[1:], toolset], tool_choice=choice)
        assert [tool.name for tool in request.tools.tools] == ["weather"]
        kinds = [one["type"] for one in (*SERVERS, toolset)]
        assert ignored.split(", ") == sorted(f"tools.{name}" for name in kinds)
    asked = messages_request(json.dumps(LEAST | {"tools": [*SERVERS, TOOL]}).encode(), "r")
    wrong = InvalidRequest.of(FieldViolation("tools.tools[0].parameters", "x"))
    assert from_pillion(wrong, asked.names[0]).param == f"tools[{len(SERVERS)}].input_schema"


def test_output_format_is_accepted_as_an_older_name() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    old, new = read(output_format=shape), read(output_config={"format": shape})
    assert old.requests == new.requests
    assert old.requests[0].sampling.structured_outputs == StructuredOutputs(json='{"type":"object"}')
