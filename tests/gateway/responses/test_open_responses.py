"""Answers of /v1/responses match the OpenResponses specification's models, which require fields that OpenAI's client
does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openresponses_types import types

from pillion.types import Delta, FinishReason
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call
from tests.support.scripted import ScriptedGateway, ended, said, thought_said_and_called

FUNCTION = {"type": "function", "name": "weather"}
ASKED: list[dict[str, Any]] = [
    {},
    {"tools": [FUNCTION], "tool_choice": FUNCTION, "parallel_tool_calls": False, "max_tool_calls": 3},
    {"tools": [FUNCTION | {"strict": True, "parameters": {"type": "object"}, "description": "d"}]},
    {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}},
    {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low", "summary": "auto"}},
    {"instructions": "Be brief.", "metadata": {"a": "b"}, "truncation": "auto", "temperature": 0, "top_logprobs": 0},
]
SCRIPTS: list[list[Delta]] = [
    [said("a"), ended()],
    [said("a"), ended(FinishReason.LENGTH)],
    thought_said_and_called("t1", "t2"),
    [ended()],
]
# Models that validate the events, by event type.
EVENTS = {
    name.value: kind
    for kind in vars(types).values()
    if isinstance(kind, type) and kind.__name__.endswith("StreamingEvent")
    for name in kind.model_fields["type"].annotation
}


@pytest.mark.parametrize("more", ASKED, ids=str)
async def test_responses_and_their_events_fit_the_specification(more: dict[str, Any]) -> None:
    async with running_fake_cluster() as fakes:
        scripted, checked = ScriptedGateway(fakes), set()
        for script in SCRIPTS:
            scripted.script = script
            whole = await call(fakes.gateway.http_address, "/v1/responses", {"input": "hi", **more})
            types.ResponseResource.model_validate_json(whole.body)
            streamed = await call(fakes.gateway.http_address, "/v1/responses", {"input": "hi", "stream": True, **more})
            for block in streamed.body.decode().split("\n\n")[:-1]:
                event = json.loads(block.split("\ndata: ")[1])
                if event["type"] in EVENTS:
                    EVENTS[event["type"]].model_validate(event)
                    checked.add(event["type"])
        assert {"response.created", "response.completed", "response.incomplete"} <= checked
        assert {"response.output_item.done", "response.function_call_arguments.done"} <= checked
