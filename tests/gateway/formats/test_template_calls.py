"""Calls are read as models' chat templates write them: transformers renders a conversation with calls by a template in
the shape of a real one, and the reader gives the same calls again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import AnswerReader, OutputFormat
from pillion.gateway.formats.model_formats import parser_names
from pillion.gateway.formats.reasoning import REASONING_FORMATS
from pillion.gateway.formats.tool_formats import TOOL_FORMATS

_TOOLS = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
_THOUGHT = "{{- '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '' }}"
_VALUE = "{{- v | tojson if v is not string else v }}"
GLM = f"""
[gMASK]<sop>{_TOOLS}
{{%- for m in messages %}}
    {{{{- '<|' + m.role + '|>\\n' }}}}
    {{%- if m.role == 'assistant' %}}
        {_THOUGHT}
        {{{{- '\\n' + m.content.strip() }}}}
        {{%- for tc in m.tool_calls %}}
            {{{{- '\\n<tool_call>' + tc.function.name + '\\n' }}}}
            {{%- for k, v in tc.function.arguments.items() %}}
                {{{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}}}
                {_VALUE}
                {{{{- '</arg_value>\\n' }}}}
            {{%- endfor %}}
            {{{{- '</tool_call>' }}}}
        {{%- endfor %}}
    {{%- else %}}
        {{{{- m.content }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|assistant|>\\n' }}}}{{%- endif %}}
"""
# GLM-4.7 writes no line ends between the marks.
GLM_47 = GLM.replace("</arg_key>\\n", "</arg_key>").replace("</arg_value>\\n", "</arg_value>")
GLM_47 = GLM_47.replace("tc.function.name + '\\n'", "tc.function.name")
MINIMAX = f"""
{_TOOLS}
{{%- for m in messages %}}
    {{{{- ']~b]' + m.role + '\\n' }}}}
    {{%- if m.role == 'assistant' %}}
        {_THOUGHT}
        {{{{- '\\n\\n' + m.content }}}}
        {{{{- '\\n<minimax:tool_call>\\n' }}}}
        {{%- for tc in m.tool_calls %}}
            {{{{- '<invoke name="' + tc.function.name + '">\\n' }}}}
            {{%- for k, v in tc.function.arguments.items() %}}
                {{{{- '<parameter name="' + k + '">' }}}}
                {_VALUE}
                {{{{- '</parameter>\\n' }}}}
            {{%- endfor %}}
            {{{{- '</invoke>\\n' }}}}
        {{%- endfor %}}
        {{{{- '</minimax:tool_call>' }}}}
    {{%- else %}}
        {{{{- m.content + '[e~[\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- ']~b]assistant\\n' }}}}{{%- endif %}}
"""
SEED = f"""
{_TOOLS}
{{%- for m in messages %}}
    {{{{- '<seed:bos>' + m.role + '\\n' }}}}
    {{%- if m.role == 'assistant' %}}
        {_THOUGHT.replace("<think>", "<seed:think>").replace("</think>", "</seed:think>")}
        {{{{- m.content }}}}
        {{%- for tc in m.tool_calls %}}
            {{{{- '\\n<seed:tool_call>\\n<function=' + tc.function.name + '>\\n' }}}}
            {{%- for k, v in tc.function.arguments.items() %}}
                {{{{- '<parameter=' + k + '>' }}}}
                {_VALUE}
                {{{{- '</parameter>\\n' }}}}
            {{%- endfor %}}
            {{{{- '</function>\\n</seed:tool_call>' }}}}
        {{%- endfor %}}
    {{%- else %}}
        {{{{- m.content + '<seed:eos>' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<seed:bos>assistant\\n' }}}}{{%- endif %}}
"""
KIMI = f"""
{_TOOLS}
{{%- for m in messages %}}
    {{{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}}}
    {{%- if m.role == 'assistant' %}}
        {_THOUGHT}
        {{{{- m.content + '<|tool_calls_section_begin|>' }}}}
        {{%- for tc in m.tool_calls %}}
            {{{{- '<|tool_call_begin|>' + tc.id + '<|tool_call_argument_begin|>' }}}}
            {{{{- tc.function.arguments | tojson + '<|tool_call_end|>' }}}}
        {{%- endfor %}}
        {{{{- '<|tool_calls_section_end|>' }}}}
    {{%- else %}}
        {{{{- m.content + '<|im_end|>' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_assistant|>assistant<|im_middle|>' }}}}{{%- endif %}}
"""


def _deepseek(before: str, between: str, behind: str) -> str:
    """Returns a template of DeepSeek's, by what stands around a call's name and behind its arguments."""
    return f"""
{_TOOLS}
{{%- for m in messages %}}
    {{%- if m.role == 'assistant' %}}
        {{{{- '<｜Assistant｜>' }}}}
        {_THOUGHT}
        {{{{- m.content + '<｜tool▁calls▁begin｜>' }}}}
        {{%- for tc in m.tool_calls %}}
            {{{{- '<｜tool▁call▁begin｜>{before}' + tc.function.name + '{between}' }}}}
            {{{{- tc.function.arguments | tojson + '{behind}<｜tool▁call▁end｜>' }}}}
        {{%- endfor %}}
        {{{{- '<｜tool▁calls▁end｜>' }}}}
    {{%- else %}}
        {{{{- '<｜User｜>' + m.content }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<｜Assistant｜>' }}}}{{%- endif %}}
"""


def _list(begin: str, end: str) -> str:
    """Returns a template whose calls are one list between two marks."""
    return f"""
{_TOOLS}
{{%- for m in messages %}}
    {{{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' }}}}
    {{%- if m.role == 'assistant' %}}
        {{{{- m.content + '{begin}' + m.tool_calls | map(attribute='function') | list | tojson + '{end}' }}}}
    {{%- else %}}
        {{{{- m.content + '<|end_of_text|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|start_of_role|>assistant<|end_of_role|>' }}}}{{%- endif %}}
"""


# The formats of tools and of reasoning that each template is found to have.
TEMPLATES = {
    "glm": (GLM, "glm45", "qwen3"),
    "glm 4.7": (GLM_47, "glm45", "qwen3"),
    "minimax": (MINIMAX, "minimax_m2", "qwen3"),
    "seed": (SEED, "seed_oss", "seed_oss"),
    "kimi": (KIMI, "kimi_k2", "qwen3"),
    "deepseek v3": (
        _deepseek("function<｜tool▁sep｜>", "\\n```json\\n", "\\n```"),
        "deepseek_v3",
        "qwen3",
    ),
    "deepseek v3.1": (_deepseek("", "<｜tool▁sep｜>", ""), "deepseek_v31", "qwen3"),
    "granite": (_list("<|tool_call|>", ""), "granite", "none"),
    "hunyuan": (_list("<tool_calls>", "</tool_calls>"), "hunyuan_a13b", "none"),
}
ARGUMENTS = (
    {"city": 'Zürich <a> "b"\n\n', "days": [1, 2.5, None], "more": {"deep": {"x": "}"}}},
    {},
    {"city": "12", "days": []},
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}, "more": {"type": "object"}},
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}}


@pytest.mark.parametrize("thought", ["", "Two cities."])
@pytest.mark.parametrize("content", ["", "Wait."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_templates_write_them(name: str, content: str, thought: str) -> None:
    template, tools, reasoning = TEMPLATES[name]
    assert parser_names(template, "auto", "auto") == (tools, reasoning)
    ids = [f"functions.weather:{number}" for number in range(len(ARGUMENTS))]
    calls = [
        {"id": one, "type": "function", "function": {"name": "weather", "arguments": given}}
        for one, given in zip(ids, ARGUMENTS, strict=True)
    ]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "How is it?"}]
    answer = {"role": "assistant", "content": content, "tool_calls": calls, "reasoning_content": thought}

    def render(messages: list[dict[str, Any]], begins: bool) -> str:
        return str(
            render_jinja_template([messages], chat_template=template, tools=[TOOL], add_generation_prompt=begins)[0][0]
        )

    prompt, whole = render(asked, True), render([*asked, answer], False)
    assert whole.startswith(prompt)
    form = OutputFormat(REASONING_FORMATS.get(reasoning), None, TOOL_FORMATS[tools], {"weather": SCHEMA}, {})
    reader, found, thoughts, texts = AnswerReader(form, AnswerParts("r", 0)), {}, "", ""
    for character in whole.removeprefix(prompt):
        reader.push(character)
        texts += reader.parts.take_content()
        more, deltas = reader.parts.take()
        thoughts += more
        for delta in deltas:
            call = found.setdefault(delta.index, [delta.id, delta.name, ""])
            call[2] += delta.arguments
    reader.flush()
    # A line before the content, which some templates write, is content where no reasoning stands before it.
    assert (texts + reader.parts.take_content()).strip("\n") == content
    assert thoughts == (thought if reasoning != "none" else "")
    assert [(call[1], json.loads(call[2])) for call in found.values()] == [("weather", given) for given in ARGUMENTS]
    if tools == "kimi_k2":
        # The template tells calls apart by these.
        assert [call[0] for call in found.values()] == ids
