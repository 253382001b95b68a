"""Conversations of all shapes render by published chat templates: as by transformers if that loses no text, else after
rewrites, with every text in the prompt."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pillion.errors import InvalidRequest
from pillion.gateway.formats.model_formats import parser_names
from pillion.gateway.formats.tool_formats import SPELLED_OUT, spelling
from pillion.gateway.http_api.openai_requests import chat_request
from pillion.gateway.tokens import chat_template, template_worker
from pillion.gateway.tokens.chat_template import ChatTemplate, knows_tools
from pillion.types import ChatOptions

PUBLISHED = pathlib.Path(__file__).parents[2] / "support" / "chat_templates"
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
_END = "{% if add_generation_prompt %}[assistant]{% endif %}"
# Behaviour of templates whose licences forbid copying them here.
OWN = {
    # Llama 3.1: one call per message, whose content is dropped.
    "single calls": """
{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '[assistant]{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- '[' + m.role + ']' + m.content | trim }}
    {%- endif %}
{%- endfor %}"""
    + _END,
    # Gemma 2: no system message, and alternating roles.
    "no system": """
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '[' + m.role + ']' + m.content | trim }}
{%- endfor %}"""
    + _END,
    "whole tools": """
{%- for t in tools %}
    {{- t.function.name + ': ' + t.function.description }}
    {%- for name, one in t.function.parameters.properties | items %}{{- name + ' ' + one.type }}{%- endfor %}
{%- endfor %}
{%- for m in messages %}
    {{- '[' + m.role + ']' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- else %}
        {{- m.content }}
    {%- endfor %}
{%- endfor %}"""
    + _END,
    "no calls": "<|tool_list_start|>{{ tools | tojson }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + _END,
    # DeepSeek R1: arguments as strings, and calls only with null content.
    "null contents": """
{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}
{%- for m in messages %}
    {{- '[' + m.role + ']' }}
    {%- if m.content is none %}
        {%- for call in m.tool_calls %}{{- call.function.name + '|' + call.function.arguments }}{%- endfor %}
    {%- else %}
        {{- m.content }}
    {%- endif %}
{%- endfor %}"""
    + _END,
    # Command R+: without tools, None instead of an empty list; reads one part of a content.
    "listed tools": "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content[0].text if m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% endfor %}" + _END,
}
TEMPLATES = {path.stem: path.read_text() for path in sorted(PUBLISHED.glob("*.jinja"))} | OWN

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Which?"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ANY = {"type": "function", "function": {"name": "anything", "parameters": {"type": "object"}}}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(number: str, city: str, name: str = "weather") -> dict[str, Any]:
    arguments = json.dumps({"city": city} if city else {})
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made: dict[str, Any], content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(made), **more}


def result(number: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": content}


BRIEF, ASKS, ANSWERS, GOES_ON = (
    says(role, text)
    for role, text in (("system", "Briefly"), ("user", "Asking"), ("assistant", "Answering"), ("user", "Goingon"))
)
FIRST, SECOND = call("call_0a1b2c3d4e5f", "Zurich"), call("call_5f4e3d2c1b0a", "Bonn")
SUNNY, RAINY = result(FIRST["id"], "Sunny"), result(SECOND["id"], "Rainy")
SHORT, KIMI, CLAUDE = (
    call("abcdefgh1", "Zurich"),
    call("functions.weather:0", "Zurich"),
    call("toolu_01A_b-c", "Zurich"),
)
ON = (ANSWERS, GOES_ON)
CONVERSATIONS: dict[str, tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]] = {
    "a question": ((ASKS,), ()),
    "turns": ((BRIEF, ASKS, *ON), ()),
    "parts": ((BRIEF, says("user", [{"type": "text", "text": "Asking"}, {"type": "text", "text": "Twice"}])), ()),
    "system late": ((BRIEF, ASKS, ANSWERS, says("system", "Reminding"), GOES_ON), ()),
    "system twice": ((BRIEF, says("system", "Reminding"), ASKS), ()),
    "system at last": ((ASKS, ANSWERS, says("system", "Reminding")), ()),
    "a developer": ((says("developer", "Briefly"), ASKS), ()),
    "assistant first": ((ANSWERS, ASKS), ()),
    "assistant after system": ((BRIEF, ANSWERS, ASKS), ()),
    "user twice": ((ASKS, GOES_ON), ()),
    "assistant twice": ((ASKS, ANSWERS, says("assistant", "Adding"), GOES_ON), ()),
    "an empty answer": ((ASKS, says("assistant", ""), GOES_ON), ()),
    "a null answer": ((ASKS, says("assistant", None), GOES_ON), ()),
    "offered": ((BRIEF, ASKS), (WEATHER,)),
    "bare tools": ((ASKS,), (WEATHER, CLOCK, ANY)),
    "bare tools, later": ((ASKS, *ON), (CLOCK,)),
    "short id": ((ASKS, calls(SHORT), result("abcdefgh1", "Sunny")), (WEATHER,)),
    "OpenAI's id": ((BRIEF, ASKS, calls(FIRST), SUNNY), (WEATHER,)),
    "Kimi's id": ((ASKS, calls(KIMI, content=""), result(KIMI["id"], "Sunny"), *ON), (WEATHER,)),
    "Claude's id": ((ASKS, calls(CLAUDE), result(CLAUDE["id"], "Sunny"), *ON), (WEATHER,)),
    "a result of parts": ((ASKS, calls(FIRST), result(FIRST["id"], [{"type": "text", "text": "Sunny"}])), (WEATHER,)),
    "two calls": ((BRIEF, ASKS, calls(FIRST, SECOND), SUNNY, RAINY), (WEATHER,)),
    "two calls, later": ((BRIEF, ASKS, calls(FIRST, SECOND), SUNNY, RAINY, *ON), (WEATHER,)),
    "results in another order": ((ASKS, calls(FIRST, SECOND), RAINY, SUNNY), (WEATHER,)),
    "content before a call": ((BRIEF, ASKS, calls(FIRST, content="Waiting"), SUNNY, *ON), (WEATHER,)),
    "thoughts, content, two calls": (
        (BRIEF, ASKS, calls(FIRST, SECOND, content="Waiting", reasoning_content="Hm"), SUNNY, RAINY, *ON),
        (WEATHER,),
    ),
    "user after a result": ((ASKS, calls(FIRST), SUNNY, GOES_ON), (WEATHER,)),
    "user after a call": ((ASKS, calls(FIRST), GOES_ON), (WEATHER,)),
    "two rounds": ((ASKS, calls(FIRST), SUNNY, calls(SECOND), RAINY, *ON), (WEATHER,)),
    "tools no longer offered": ((ASKS, calls(FIRST), SUNNY, *ON), ()),
    "a call without arguments": ((ASKS, calls(call("abcdefgh1", "", "clock")), result("abcdefgh1", "Noon"), *ON), ()),
    "a result alone": ((ASKS, result("abcdefgh9", "Sunny"), *ON), (WEATHER,)),
    "all at once": (
        (
            *(BRIEF, says("system", "Reminding"), says("assistant", "Greeting"), ASKS),
            calls(FIRST, SECOND, content="Waiting", reasoning_content="Hm"),
            *(SUNNY, RAINY, GOES_ON, says("system", "Urging"), says("assistant", ""), says("user", "Ending")),
        ),
        (WEATHER, CLOCK),
    ),
}


class BoxOfThisProcess:
    """Stand-in for the rendering process, whose start takes longer than all conversations."""

    def __init__(self, handler: pathlib.Path, setup: dict[str, Any], limits: Any) -> None:
        self._handle = template_worker.opened(json.loads(json.dumps(setup)))

    async def run(self, job: Any, size_bytes: int) -> dict[str, str]:
        return self._handle(json.loads(msgspec.json.encode(job)))


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ChatTemplate]:
    return TEMPLATES[request.param], opened(TEMPLATES[request.param], monkeypatch)


def opened(source: str, monkeypatch: pytest.MonkeyPatch) -> ChatTemplate:
    monkeypatch.setattr(chat_template, "BoxedProcess", BoxOfThisProcess)
    name, _ = parser_names(source, "auto", "auto")
    return ChatTemplate(source, SPECIALS, spells_out=name in SPELLED_OUT, spelling=spelling(name))


async def rendered(box: ChatTemplate, messages: Any, tools: Any, options: ChatOptions | None = None) -> str:
    body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
    asked = chat_request(json.dumps(body).encode(), "r").requests[0]
    return await box.render(asked.messages, options or asked.chat, asked.tools.tools)


def joined(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def written(messages: Any) -> Iterator[dict[str, Any]]:
    """Return the messages as a user of transformers writes them: contents are strings, and arguments objects."""
    names: dict[str, str] = {}
    for message in copy.deepcopy(messages):
        message["content"] = joined(message["content"])
        message["role"] = message["role"].replace("developer", "system")
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
            names[one["id"]] = one["function"]["name"]
        if message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
        yield message


def texts(messages: Any, tools: Any) -> Iterator[str]:
    for message in messages:
        yield from (
            (one["text"] for one in message["content"])
            if isinstance(message["content"], list)
            else (message["content"] or "",)
        )
        for one in message.get("tool_calls", ()):
            yield from (one["function"]["name"], *json.loads(one["function"]["arguments"]).values())
    yield from (tool["function"]["name"] for tool in tools)


async def test_every_text_is_in_the_prompt_as_transformers_has_it(template: tuple[str, ChatTemplate]) -> None:
    source, box = template
    for name, (messages, tools) in CONVERSATIONS.items():
        prompt = await rendered(box, messages, tools)
        expected = [text for text in texts(messages, tools) if text not in prompt]
        assert not expected, (name, prompt)
        if not knows_tools(source) and (tools or any("tool_calls" in one for one in messages)):
            continue
        try:
            given = {"conversations": [list(written(messages))], "tools": copy.deepcopy(tools) or None}
            ((oracle,), _) = render_jinja_template(
                **given, chat_template=source, add_generation_prompt=True, **SPECIALS
            )
        except Exception:
            continue
        if all(text in oracle for text in texts(messages, tools)):
            assert prompt == oracle, name


async def test_a_rewritten_conversation_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = (BRIEF, ASKS, says("assistant", "It is "))
    going_on = ChatOptions(continue_final_message=True)
    prompt = await rendered(opened(OWN["no system"], monkeypatch), begun, (), going_on)
    assert prompt == "[user]Briefly\n\nAsking[assistant]It is"


async def test_no_rewrite_is_tried_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_worker, "_REWRITES_CPU_S", -1.0)
    box = opened(OWN["no system"], monkeypatch)
    with pytest.raises(InvalidRequest, match="refuses this conversation: System role not supported"):
        await rendered(box, (BRIEF, ASKS), ())


# Templates whose output for a message depends on later ones: tools or the system message move to the last user turn.
MOVING = {"mistral-7b-v0.3", "mistral-small-3.2", "mistral-nemo", "devstral-small", "pixtral", "phi-3.5"}


async def test_each_prompt_begins_with_the_previous_turns_prompt(template: tuple[str, ChatTemplate]) -> None:
    """Even if both are rewritten, so that the earlier one is a prefix cache hit."""
    source, box = template
    if any(source == TEMPLATES[name] for name in MOVING):
        return
    silent = ChatOptions(add_generation_prompt=False)
    for messages, tools in (
        ((BRIEF, ASKS, calls(FIRST, SECOND), SUNNY, RAINY, *ON), (WEATHER, CLOCK)),
        (
            (BRIEF, ASKS, calls(FIRST), SUNNY, GOES_ON, says("assistant", ""), says("system", "Reminding"), ASKS),
            (WEATHER,),
        ),
        ((ANSWERS, says("user", "Asking"), ANSWERS, GOES_ON), ()),
    ):
        before = ""
        for end, message in enumerate(messages):
            if message["role"] == "assistant" and end:
                now = await rendered(box, messages[:end], tools, silent)
                assert now.startswith(before)
                before = now
