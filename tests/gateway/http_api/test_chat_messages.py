"""Chat messages: earlier turns are accepted, with the fields of any client or server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pillion.gateway.http_api.body_reading import BodyReading, with_reading
from pillion.gateway.http_api.gathered_messages import UNSEEN
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.openai_requests import chat_request, tokenize_request
from pillion.types import ChatMessage, ToolCall

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = (ChatMessage("user", "hi"), ChatMessage("assistant", "", (ToolCall("c1", "f", "{}"),)))


def told(messages: list[Any]) -> tuple[tuple[ChatMessage, ...], str]:
    """Return messages as /v1/chat/completions and /tokenize read them, and the ignored names."""
    raw, reading, other = json.dumps({"messages": messages}).encode(), BodyReading(), BodyReading()
    asked = with_reading(reading, chat_request, raw, "r").requests[0].messages
    assert with_reading(other, tokenize_request, raw)[1].messages == asked
    assert reading.ignored == other.ignored
    return asked, reading.ignored


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments, **more}}]}


@pytest.mark.parametrize("empty", [{"content": None}, {"content": ""}, {"content": []}, {}], ids=str)
def test_empty_contents(empty: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", **empty}, CALLED, {"role": "tool", "tool_call_id": "c1", **empty}, USER]
    read, ignored = told(messages)
    assert read == (TOLD[0], ChatMessage("assistant", ""), TOLD[1], ChatMessage("tool", "", tool_call_id="c1"), TOLD[0])
    assert not ignored
    assert told([{"role": "system", **empty}, USER])[0][0] == ChatMessage("system", "")


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [
        (None, ""),
        ("", ""),
        ("null", ""),
        ({}, "{}"),
        ({"a": {"b": [1, None]}}, '{"a": {"b": [1, null]}}'),
        ([1, "x"], r'{"INVALID_JSON": "[1, \"x\"]"}'),
        ("[]", '{"INVALID_JSON": "[]"}'),
        (5, '{"INVALID_JSON": "5"}'),
        ('{"city": "Zür', r'{"INVALID_JSON": "{\"city\": \"Zür"}'),
        ('{"city": "a\nb"', r'{"INVALID_JSON": "{\"city\": \"a\nb\""}'),
        ("[" * 100_000, f'{{"INVALID_JSON": "{"[" * 100_000}"}}'),
        ('{"city":  "Zürich"}', '{"city":  "Zürich"}'),
    ],
    ids=lambda text: str(text)[:20],
)
def test_partial_arguments_of_a_call_are_kept(arguments: Any, read_as: str) -> None:
    ((message,), _) = told([called(arguments)])
    assert message.tool_calls == (ToolCall("c", "f", read_as),)


def test_calls_and_results_without_ids_are_matched_in_order() -> None:
    two = [{"function": {"name": "f"}}, {"id": None, "function": {"name": "g", "arguments": "{}"}}]
    messages = [
        USER,
        {"role": "assistant", "tool_calls": two},
        {"role": "tool", "name": "g", "content": "of g"},
        {"role": "tool", "content": "of f"},
        {"role": "assistant", "function_call": {"name": "h", "arguments": "{}"}},
        {"role": "function", "name": "h", "content": "of h"},
    ]
    read, ignored = told(messages)
    assert [[call.id for call in one.tool_calls] for one in read if one.tool_calls] == [
        ["call00100", "call00101"],
        ["call00400"],
    ]
    results = [(one.role, one.content, one.tool_call_id) for one in read if one.role != "assistant"][1:]
    assert results == [("tool", "of g", "call00101"), ("tool", "of f", "call00100"), ("tool", "of h", "call00400")]
    assert not ignored


@pytest.mark.parametrize(
    ("message", "read_as", "ignored"),
    [
        ({"content": [{"type": "output_text", "text": "a"}, {"type": "text", "text": "b"}]}, ("a\nb", ""), ""),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, ("No.", ""), ""),
        ({"content": None, "refusal": "No."}, ("No.", ""), ""),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"text": "a"}]}, ("a", "hm"), ""),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"text": "m"}]}]},
            ("", "h\nm"),
            "",
        ),
        ({"content": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "a"}]}, ("a", "hm"), ""),
        ({"content": "a", "reasoning": "hm", "reasoning_content": None}, ("a", "hm"), ""),
        (
            {"content": [{"type": "hologram", "x": 1}, {"type": "poem", "text": "a"}]},
            ("a", ""),
            "messages.content.hologram, messages.content.x",
        ),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ("", ""), "messages.content.image_url"),
        (
            {"content": "a", "audio": {"id": "x"}, "annotations": [{}]},
            ("a", ""),
            "messages.annotations, messages.audio",
        ),
        ({"content": "a", "annotations": [], "audio": None}, ("a", ""), ""),
        (
            {"content": "a", "thinking_blocks": [{}], "images": [], "prefix": True, "type": "message"},
            ("a", ""),
            "messages.images, messages.prefix, messages.thinking_blocks, messages.type",
        ),
        (
            {"content": "a", "provider_specific_fields": {"x": 1}, "extra_content": {}, "reasoning_details": [{}]},
            ("a", ""),
            "messages.extra_content, messages.provider_specific_fields, messages.reasoning_details",
        ),
        (
            {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "scope": "x"}}]},
            ("a", ""),
            "messages.content.cache_control",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_assistant_contents_are_split_into_text_and_reasoning(
    message: dict[str, Any], read_as: tuple[str, str], ignored: str
) -> None:
    (_, read, _), named = told([USER, {"role": "assistant", **message}, USER])
    assert (read, named) == (ChatMessage("assistant", read_as[0], reasoning=read_as[1]), ignored)


def test_calls_of_other_kinds_are_left_out_and_named() -> None:
    calls = [{"id": "x", "type": "web_search_call", "web_search_call": {}}, {**CALL, "index": 1, "extra_content": {}}]
    read, ignored = told([USER, {"role": "assistant", "tool_calls": calls}])
    assert read == TOLD
    assert ignored == (
        "messages.tool_calls.extra_content, messages.tool_calls.index, messages.tool_calls.web_search_call"
    )


def test_images_of_a_tool_are_described() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "a"}, image, {"type": "resource"}]
    read, ignored = told([USER, CALLED, {"role": "tool", "tool_call_id": "c1", "content": parts}, USER])
    assert (read[2].content, ignored) == (f"a\n{UNSEEN}", "messages.content.image_url, messages.content.resource")


@pytest.mark.parametrize(
    ("part", "last_alone"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, False),
        ({"type": "input_audio", "input_audio": {}}, False),
        ({"type": "video_url"}, False),
        ({"type": "hologram"}, True),
    ],
    ids=str,
)
def test_images_of_a_user_are_refused(part: dict[str, Any], last_alone: bool) -> None:
    shown = {"role": "user", "content": [{"type": "text", "text": "x"}, part]}
    with pytest.raises(ApiError) as caught:
        told([USER, shown, {"role": "assistant", "content": "ok"}])
    assert (caught.value.param, caught.value.code) == ("messages[1].content[1].type", "unsupported_value")
    if last_alone:
        assert told([shown, USER])[1] == "messages.content.hologram"
    else:
        with pytest.raises(ApiError, match=r"messages\[0\].content\[1\].type"):
            told([shown, USER])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": None, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ("hello", "messages[0]"),
    ],
    ids=str,
)
def test_invalid_messages(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        told([message])
    assert (caught.value.status, caught.value.param) == (400, param)
