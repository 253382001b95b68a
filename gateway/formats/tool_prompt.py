"""Tools and messages as chat templates want them, in the shape that transformers gives them. Sans-IO (I9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from pillion.types import ChatMessage, Tool

# About what a message, a call or a tool has around its texts.
ITEM_BYTES = 64


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages with the fields that they have, and no others: templates ask whether a field is there.

    The arguments of calls are objects, and the result of a call has the tool's name, which only the call said.
    """
    names: dict[str, str] = {}
    return [_message(message, names) for message in messages]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form; None without any."""
    return [{"type": "function", "function": _function(tool)} for tool in tools] or None


def message_bytes(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
    """About how many bytes a conversation has."""
    calls = [call for message in messages for call in message.tool_calls]
    return (
        sum(ITEM_BYTES + len(message.content) + len(message.reasoning) for message in messages)
        + sum(ITEM_BYTES + len(call.arguments) for call in calls)
        + sum(ITEM_BYTES + len(tool.description) + len(tool.parameters) for tool in tools)
    )


def _message(message: ChatMessage, names: dict[str, str]) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        # Templates know one of these names.
        written |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": Raw((call.arguments or "{}").encode())},
            }
            for call in message.tool_calls
        ]
        names.update((call.id, call.name) for call in message.tool_calls)
    if message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
    name = message.name or names.get(message.tool_call_id)
    return written | {"name": name} if name else written


def _function(tool: Tool) -> dict[str, Any]:
    written: dict[str, Any] = {"name": tool.name}
    if tool.description:
        written["description"] = tool.description
    if tool.parameters:
        written["parameters"] = Raw(tool.parameters.encode())
    return written
