"""Conversations of agents, grown turn by turn in the shapes of tests/clients/bodies: what came is sent back as the
client sends it, with a tool's result or the user's next words, and what changes in each request of a client changes.
"""

from __future__ import annotations

import copy
import json
from typing import Any

# A user speaks at every so many turns; the others bring the results of tools.
SPEAKS_EVERY = 5
RESULT = 'a.py\n  1\tx = "ü" # {n}\n'
# What clients leave out of an item of a response when they send it back.
_DROPPED = {"Codex": ("id", "status"), "Vercel": ("status",)}


def compact(value: Any) -> str:
    """Returns a value as clients in JavaScript write it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def called_names(body: dict[str, Any]) -> list[str]:
    """Returns the names by which a model knows a body's tools; a custom tool's has a star before it."""
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
    """A client's conversation. ``body`` is its next request, which asks for a whole answer."""

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
        """Whether the model calls a tool in this turn."""
        return bool(self.tools) and (self.must_call or self.turn % SPEAKS_EVERY > 0)

    def call(self) -> tuple[str, dict[str, Any]]:
        """Returns the tool that the model calls in this turn, and its arguments."""
        name = self.tools[self.turn % len(self.tools)]
        if name.startswith("*"):
            return name[1:], {"input": f"*** Begin Patch\n*** Delete File: {self.turn} é\n*** End Patch\n"}
        return name, {"command": f"grep -n '\"é\\n' a{self.turn}.py", "more": [1, {"x": None}]}

    def answered(self, answer: dict[str, Any]) -> None:
        """Adds a whole answer and what follows it to the conversation."""
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
        # Claude Code has its mark at the last message, and its header differs in each request.
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
    """Returns a call as a model of Hermes' format writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def shared(one: Any, other: Any) -> int:
    """Returns how many items two sequences share from their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))
