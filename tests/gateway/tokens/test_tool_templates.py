"""Tool conversations render as by transformers, with templates in the shape of published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pillion.errors import InvalidRequest
from pillion.gateway.tokens.chat_template import ChatTemplate, template_messages, template_tools
from pillion.types import ChatMessage, Tool, ToolCall

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Où?"}}, "required": ["city"]}
TOOLS = (
    Tool(name="weather", description='Tells the "weather".', parameters=json.dumps(SCHEMA), strict=True),
    Tool(name="now"),
)
MESSAGES = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Weather in Zürich and Bonn?"),
    ChatMessage(
        "assistant",
        "",
        tool_calls=(
            ToolCall("abcdefgh1", "weather", '{"city": "Zürich", "days": [1, 2.5, null]}'),
            ToolCall("abcdefgh2", "weather", '{"city": "Bonn"}'),
        ),
        reasoning="Two cities.",
    ),
    ChatMessage("tool", '{"sky": "<clear>"}', tool_call_id="abcdefgh1", name="weather"),
    ChatMessage("tool", "rain", tool_call_id="abcdefgh2", name="weather"),
    ChatMessage("assistant", "Clear, and rain."),
    ChatMessage("user", "And now?"),
)
# The same as a user of transformers writes it.
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Zürich and Bonn?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Two cities.",
        "tool_calls": [
            {
                "id": "abcdefgh1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None]}},
            },
            {"id": "abcdefgh2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}},
        ],
    },
    {"role": "tool", "content": '{"sky": "<clear>"}', "tool_call_id": "abcdefgh1", "name": "weather"},
    {"role": "tool", "content": "rain", "tool_call_id": "abcdefgh2", "name": "weather"},
    {"role": "assistant", "content": "Clear, and rain."},
    {"role": "user", "content": "And now?"},
]
PLAIN_TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": 'Tells the "weather".', "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "now"}},
]

# Qwen's: JSON between marks, results in user turns, reasoning omitted from older turns.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\nAnswer within <tool_call></tool_call>.<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not (loop.first and tools)) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Llama's: tools in the first user turn, one call per turn, results in a separate role.
LLAMA = """
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.index0 == 1 and tools is not none %}
        {{- "<|start_header_id|>user<|end_header_id|>\\n\\n" }}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
        {%- for t in tools %}
            {{- t | tojson(indent=4) }}
            {{- "\\n\\n" }}
        {%- endfor %}
        {{- message['content'] + "<|eot_id|>" }}
    {%- elif not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}<|eot_id|>" }}
        {%- endfor %}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
"""
# Mistral's: lists of tools and calls, ids of nine characters, results by id.
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "system" %}
        {{- message["content"] }}
    {%- elif message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""
# Qwen3-Coder's: elements, with a loop over the arguments' items.
CODER = """
{%- for tool in tools or [] %}{{- "\\n<function>\\n<name>" ~ tool.function.name ~ "</name>" }}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
        {%- for args_name, args_value in tool_call.function.arguments | items %}
            {{- '<parameter=' + args_name + '>\\n' }}
            {%- set args_value = args_value if args_value is string else args_value | tojson | safe %}
            {{- args_value }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- message.content + (' of ' + message.name if message.name is defined else '') + '<|im_end|>\\n' }}
{%- endfor %}
"""
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "coder": CODER}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("with_tools", [True, False])
async def test_prompts_are_those_of_transformers(name: str, with_tools: bool) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIALS)
    try:
        rendered = await template.render(MESSAGES, tools=TOOLS if with_tools else ())
    finally:
        await template.aclose()
    ((expected,), _) = render_jinja_template(
        conversations=[PLAIN],
        chat_template=TEMPLATES[name],
        tools=PLAIN_TOOLS if with_tools else None,
        add_generation_prompt=True,
        **SPECIALS,
    )
    assert rendered == expected
    assert "weather" in rendered


def test_messages_have_only_their_given_fields() -> None:
    assert template_messages((ChatMessage("user", "x"),)) == [{"role": "user", "content": "x"}]
    assert template_tools(()) is None
    called = ChatMessage("assistant", "", tool_calls=(ToolCall("c", "weather", ""),))
    first, second = template_messages((called, ChatMessage("tool", "rain", tool_call_id="c")))
    assert bytes(first["tool_calls"][0]["function"]["arguments"]) == b"{}"
    assert second == {"role": "tool", "content": "rain", "tool_call_id": "c", "name": "weather"}


# gpt-oss's: messages in channels, the first call of a message, and reasoning only before calls.
HARMONY = """
{%- for tool in tools or [] %}{{- "// " + tool.function.description + "\\ntype " + tool.function.name }}{%- endfor %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if message.content and message.thinking %}{{- raise_exception("content and thinking") }}{%- endif %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" + message.content }}
        {{- "<|end|>" }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""


async def test_messages_in_channels_have_one_call_each_with_its_result() -> None:
    called, *results, answer, user = MESSAGES[2:]
    turn = (replace(called, content="Wait."), *reversed(results), replace(answer, reasoning="Done."), user)
    template = ChatTemplate(HARMONY, SPECIALS)
    try:
        rendered = await template.render(turn, tools=TOOLS)
    finally:
        await template.aclose()
    assert rendered == (
        '// Tells the "weather".\ntype weather// \ntype now'
        "<|start|>assistant<|channel|>analysis<|message|>Two cities.\n\nWait.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Zürich", "days": [1, 2.5, null]}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>{"sky": "<clear>"}<|end|>'
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>rain<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Clear, and rain.<|end|>"
        "<|start|>user<|message|>And now?<|end|><|start|>assistant"
    )


async def test_a_template_without_tools_refuses_them() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", SPECIALS)
    with pytest.raises(InvalidRequest, match=r"tools\.tools: the model's chat template does not support tools"):
        await template.render((ChatMessage("user", "x"),), tools=TOOLS)


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("{{ messages[-1] | tojson }}", "reasoning_content"),
        ("{{ messages[-1] | tojson }}{{ messages[0].reasoning_content }}", "reasoning_content"),
        (
            "{{ messages[-1] | tojson }}{{ messages[0].reasoning_content or messages[0].reasoning }}",
            "reasoning_content",
        ),
        ("{{ messages[-1] | tojson }}{{ messages[0].reasoning }}", "reasoning"),
        ("{{ messages[-1] | tojson }}{{ messages[0]['reasoning'] }}", "reasoning"),
        ("{{ messages[-1] | tojson }}{{ messages[0].thinking }}", "thinking"),
        ("{{ messages[-1] | tojson }}Think with reasoning, in {{ reasoning_effort }}.", "reasoning_content"),
    ],
)
async def test_earlier_reasoning_has_the_one_key_that_the_template_reads(source: str, key: str) -> None:
    template = ChatTemplate(source, SPECIALS)
    try:
        written = await template.render((ChatMessage("assistant", "So.", reasoning="Hm."),))
    finally:
        await template.aclose()
    assert json.JSONDecoder().raw_decode(written)[0] == {"role": "assistant", "content": "So.", key: "Hm."}


async def test_system_messages_dropped_by_a_template_move_to_the_user_message() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}"
        "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('twice') }}{% endif %}"
        "[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    )
    template = ChatTemplate(source, SPECIALS, spells_out=True)
    try:
        user = ChatMessage("user", "Hi.")
        told = await template.render((ChatMessage("system", "Be brief."), user), tools=TOOLS)
        bare = await template.render((user,), tools=TOOLS)
        assert told == bare.replace("[user]", "[user]Be brief.\n\n")
        assert '"name":"weather"' in told
        assert told.endswith("</tool_call>\n\nHi.")
        twice = await template.render((ChatMessage("system", "Be brief."), user, user), tools=TOOLS)
        assert twice == f"{told}\n\nHi."
        assert await template.render((ChatMessage("system", "Be brief."), user)) == "[user]Be brief.\n\nHi."
    finally:
        await template.aclose()
