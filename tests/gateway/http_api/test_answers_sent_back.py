"""The server's own answer of several calls can be sent back at every API, even if the template allows one call per
message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.tokens.test_published_templates import OWN, SCHEMA
from tests.support import fake_components
from tests.support.fake_components import running_fake_cluster, script_of
from tests.support.http import call

ANSWER = '{"name": "weather", "parameters": {"city": "Zurich"}}; {"name": "weather", "parameters": {"city": "Bonn"}}'
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
USER = {"role": "user", "content": "Weather?"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]},
    MESSAGES: {
        "max_tokens": 500,
        "messages": [USER],
        "tools": [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}],
    },
    RESPONSES: {"input": [USER], "tools": [{"type": "function", **FUNCTION}]},
}


def sent_back(path: str, answer: Any) -> list[Any]:
    """Return the items of the next request: the answer as received, and the results of its calls."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        results = zip(message["tool_calls"], ("Sunny", "Rainy"), strict=True)
        return [message, *({"role": "tool", "tool_call_id": one["id"], "content": text} for one, text in results)]
    if path == MESSAGES:
        results = zip((one for one in answer["content"] if one["type"] == "tool_use"), ("Sunny", "Rainy"), strict=True)
        blocks = [{"type": "tool_result", "tool_use_id": one["id"], "content": text} for one, text in results]
        return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": blocks}]
    results = zip((one for one in answer["output"] if one["type"] == "function_call"), ("Sunny", "Rainy"), strict=True)
    outputs = ({"type": "function_call_output", "call_id": one["call_id"], "output": text} for one, text in results)
    return [*answer["output"], *outputs]


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_of_several_calls_can_be_sent_back(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_components, "MAX_LEN", 4096)
    body = {"model": "toy", **BODIES[path]}
    async with running_fake_cluster(template=OWN["single calls"], tool_call_parser="llama3_json") as fakes:
        fakes.decode.script = script_of(ANSWER)
        first = await call(fakes.gateway.http_address, path, body)
        assert first.status == 200, first.body
        items = "input" if path == RESPONSES else "messages"
        body[items] = [USER, *sent_back(path, first.json)]
        second = await call(fakes.gateway.http_address, path, body)
        assert second.status == 200, second.body
        ids = list(fakes.decode.submits[-1].token_ids)
        reply = await call(fakes.gateway.http_address, "/detokenize", {"model": "toy", "tokens": ids})
    assert reply.json["prompt"].endswith(
        '[user]Weather?[assistant]{"name": "weather", "parameters": {"city": "Zurich"}}[tool]Sunny'
        '[assistant]{"name": "weather", "parameters": {"city": "Bonn"}}[tool]Rainy[assistant]'
    )


async def test_a_message_dropped_by_the_template_is_an_error() -> None:
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    async with running_fake_cluster(template=silent) as fakes:
        said = [USER, {"role": "assistant", "content": "Sunny"}, USER]
        reply = await call(fakes.gateway.http_address, CHAT, {"model": "toy", "messages": said})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "leaves out a text of role assistant, 'Sunny'" in reply.error["message"]
