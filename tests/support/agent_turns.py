"""Conversations of agents, grown turn by turn in the shapes of tests/clients/bodies: answers are sent back as the
client does, with a tool's result or the user's next message, and with the client's per-request changes."""

from __future__ import annotations

import copy
import json
from typing import Any

SPEAKS_EVERY = 5
RESULT = 'a.py\n  1\tx = "ü" # {n}\n'
# Keys that clients drop from a response's items when sending them back.
_DROPPED = {"Codex": ("id", "status"), "Vercel": ("status",)}


def compact(value: Any) -> str:
    """Return a value as JSON in the style of JavaScript clients."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def called_names(body: dict[str, Any]) -> list[str]:
    """Return the names of a body's tools as the model sees them; a custom tool's is prefixed by a star."""
    names = []
    for tool in body.get("tools", ()):
        match tool:
            case {"type": "namespace"}:
                names += [f"{tool['name']}__{inner['name']}" for inner in tool["tools"]]
            case {"type": "function", "function": function}:
                names.append(function["name"])
            case {"type": "custom"}:
                names.append("*" + tool["name"])
            case {"type": "function"} | {"input_schema": _}:
                names.append(tool["name"])
    return names


class AgentTurns:
    """A client's conversation. ``body`` is its next request, for a whole answer."""

    def __init__(self, sent: dict[str, Any]) -> None:
        self.client, self.path = sent["client"], sent["path"]
        self.body = copy.deepcopy(sent["body"])
        self.body.pop("stream_options", None)
        self.body["stream"] = False
        for name in {"max_tokens", "max_completion_tokens", "max_output_tokens"} & self.body.keys():
            self.body[name] = 2000
        self.turn = 0
        self.tools = called_names(self.body)
        choice = self.body.get("tool_choice", "auto")
        self.must_call = choice == "required" or isinstance(choice, dict)

    @property
    def calls(self) -> bool:
        """Return True if the model calls a tool in this turn."""
        return bool(self.tools) and (self.must_call or self.turn % SPEAKS_EVERY > 0)

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the tool that the model calls in this turn, and its arguments."""
        name = self.tools[self.turn % len(self.tools)]
        if name.startswith("*"):
            return name[1:], {"input": f"*** Begin Patch\n*** Delete File: {self.turn} é\n*** End Patch\n"}
        return name, {"command": f"grep -n '\"é\\n' a{self.turn}.py", "more": [1, {"x": None}]}

    def answered(self, answer: dict[str, Any]) -> None:
        """Append a whole answer and the next messages to the conversation."""
        self.turn += 1
        said = f"Go on, {self.turn}."
        if self.path == "/v1/messages":
            self._answered_blocks(answer, said)
        elif self.path == "/v1/responses":
            self._answered_items(answer, said)
        else:
            message = {name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = compact(json.loads(call["function"]["arguments"]))
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
                for call in message.get("tool_calls", ())
            ]
            self.body["messages"] += [message, *(results or [{"role": "user", "content": said}])]

    def _answered_blocks(self, answer: dict[str, Any], said: str) -> None:
        mark = {"cache_control": {"type": "ephemeral"}}
        messages = self.body["messages"]
        # Claude Code marks the last message, and its header differs per request.
        for block in messages[-1]["content"]:
            block.pop("cache_control", None)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT, **mark}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        content = results or [{"type": "text", "text": said, **mark}]
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": content}]
        first = self.body["system"][0]
        first["text"] = first["text"].replace("cch=", f"cch={self.turn}")

    def _answered_items(self, answer: dict[str, Any], said: str) -> None:
        dropped = next((fields for name, fields in _DROPPED.items() if self.client.startswith(name)), ())
        items = [{name: value for name, value in one.items() if name not in dropped} for one in answer["output"]]
        for item in items:
            if "arguments" in item and not self.client.startswith("Codex"):
                item["arguments"] = compact(json.loads(item["arguments"]))
        outputs = [
            {"type": f"{one['type']}_output", "call_id": one["call_id"], "output": RESULT}
            for one in items
            if one["type"] in ("function_call", "custom_tool_call")
        ]
        user = {"role": "user", "content": [{"type": "input_text", "text": said}]}
        self.body["input"] += [*items, *(outputs or [user])]
        if "client_metadata" in self.body:
            self.body["client_metadata"] = {"turn": str(self.turn)}


def hermes_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in the format of Hermes models."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def shared(one: Any, other: Any) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))
