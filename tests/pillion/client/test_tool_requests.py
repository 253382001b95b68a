"""Tools and messages with calls, as callers of the SDK write them."""

from __future__ import annotations

from typing import Any

import pytest

from pillion.client.client_requests import message_of, tool_options
from pillion.client.outputs import OutputCollector
from pillion.errors import InvalidRequest
from pillion.types import ChatMessage, Delta, FinishReason, Tool, ToolCall, ToolCallDelta, ToolOptions

FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
READ = Tool(name="f", description="d", parameters='{"type": "object"}', strict=True)


@pytest.mark.parametrize(
    ("choice", "read", "name"),
    [
        ("", "", ""),
        ("required", "required", ""),
        ("f", "named", "f"),
        ({"type": "function", "function": {"name": "f"}}, "named", "f"),
    ],
)
def test_tools_are_accepted_as_dicts_and_objects(choice: Any, read: str, name: str) -> None:
    found = tool_options([{"type": "function", "function": FUNCTION}, Tool(name="g")], choice, False)
    assert found == ToolOptions(tools=(READ, Tool(name="g")), choice=read, name=name, parallel_tool_calls=False)


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"name": "f"}, r"tools\[0\]: "),
        ("f", r"tools\[0\]: "),
        ({"function": {"name": "f", "x": 1}}, r"tools\[0\]\.function\.x"),
        ({"function": {"name": "f", "parameters": {1j: 2}}}, r"tools\[0\]\.function\.parameters"),
    ],
)
def test_a_wrong_tool_is_named(tool: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        tool_options([tool], "", None)


def test_messages_with_calls() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "so", "tool_calls": [call]}
    expected = ChatMessage("assistant", "", tool_calls=(ToolCall("c", "f", "{}"),), reasoning="so")
    assert message_of(sent, "m") == message_of({**sent, "tool_calls": [ToolCall("c", "f", "{}")]}, "m") == expected
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    assert message_of(result, "m") == ChatMessage("tool", "x", tool_call_id="c")
    for role in ("assistant", "tool"):
        assert (
            message_of({"role": role, "content": None}, "m") == message_of({"role": role}, "m") == ChatMessage(role, "")
        )
    parts = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert message_of({"role": "assistant", "content": parts}, "m") == ChatMessage("assistant", "a\nb")
    for arguments, read_as in (({"a": ["ä"]}, '{"a": ["ä"]}'), (None, ""), ({}, "")):
        call["function"] = {"name": "f", "arguments": arguments}
        assert message_of({"role": "assistant", "tool_calls": [call]}, "m").tool_calls == (ToolCall("c", "f", read_as),)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"role": "user"}, "m.content"),
        ({"content": "x"}, "m: a message is an object with a role"),
        ({"role": "user", "content": "x", "when": "now"}, "m: a message is an object with a role"),
        ({"role": "user", "content": ["x"]}, "m.content"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, r"m.tool_calls\[0\].id"),
    ]
    for message, field in wrong:
        with pytest.raises(InvalidRequest, match=field):
            message_of(message, "m")


def test_streamed_call_fragments_are_joined() -> None:
    collector = OutputCollector(None, None, False)
    parts = [(0, "a", "f", ""), (0, "", "", '{"x"'), (0, "", "", ": 1}"), (1, "b", "g", "{}")]
    for part in parts:
        collector.add(Delta("r", "", tool_calls=(ToolCallDelta(*part),), reasoning="t"))
    collector.add(Delta("r", "", finish_reason=FinishReason.TOOL_CALLS))
    (answer,) = collector.output().outputs
    assert answer.tool_calls == [ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}")]
    assert (answer.reasoning, answer.finish_reason) == ("tttt", "tool_calls")
