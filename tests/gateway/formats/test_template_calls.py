"""Calls survive a round trip through chat templates: transformers renders a conversation by a template in the shape of
a published one, and the reader returns the same calls."""

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
# GLM-4.7 writes no newlines between the marks.
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
    """Return a template in DeepSeek's form, with the given text around a call's name and after its arguments."""
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
    """Return a template whose calls are one list between two marks."""
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


def _turns(call: str, before: str = "", apart: str = "", behind: str = "", thought: str = "", reply: str = "") -> str:
    """Return a template that writes ``tc`` for one call, with the text before, between and after calls, for reasoning
    and for the content ``m.content``."""
    return f"""
{_TOOLS}
{{%- for m in messages %}}
    {{{{- '<|start|>' + m.role + '\\n' }}}}
    {{%- if m.role == 'assistant' %}}
        {thought}
        {reply or "{{- m.content }}"}
        {{{{- '{before}' }}}}
        {{%- for tc in m.tool_calls %}}
            {call}
            {{{{- '' if loop.last else '{apart}' }}}}
        {{%- endfor %}}
        {{{{- '{behind}' }}}}
    {{%- else %}}
        {{{{- m.content + '<|turn|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|start|>assistant\\n' }}}}{{%- endif %}}
"""


def _thought(begin: str, end: str) -> str:
    return f"{{{{- '{begin}' + m.reasoning_content + '{end}' if m.reasoning_content else '' }}}}"


def _gemma(quote: str, name: str) -> str:
    """Return a template macro for a value in Gemma's notation, with unquoted keys."""
    return f"""
{{%- macro {name}(v) -%}}
    {{%- if v is string -%}}{{{{- '{quote}' + v + '{quote}' -}}}}
    {{%- elif v is mapping -%}}
        {{{{- '{{' -}}}}
        {{%- for k, one in v.items() -%}}{{{{- k + ':' -}}}}{{{{- {name}(one) -}}}}
            {{{{- '' if loop.last else ',' -}}}}{{%- endfor -%}}
        {{{{- '}}' -}}}}
    {{%- elif v is sequence -%}}
        {{{{- '[' -}}}}
        {{%- for one in v -%}}{{{{- {name}(one) -}}}}{{{{- '' if loop.last else ',' -}}}}{{%- endfor -%}}
        {{{{- ']' -}}}}
    {{%- else -%}}{{{{- v | tojson -}}}}{{%- endif -%}}
{{%- endmacro -%}}
"""


def _python(value: str) -> str:
    """Return the template text of a call in Python notation; ``value`` writes the value ``v``."""
    return f"""{{{{- tc.function.name + '(' }}}}
            {{%- for k, v in tc.function.arguments.items() %}}{{{{- k + '=' }}}}{value}
            {{{{- '' if loop.last else ', ' }}}}{{%- endfor %}}{{{{- ')' }}}}"""


_EXAMPLE = "{{- 'Call as [func_name1(a=1), func_name2(b)]' if tools else '' }}"
# Jinja's `string` writes values as Python's `repr` does.
_REPR = "{{- v | string if v is not string else (v | tojson) }}"
GEMMA_4 = _gemma('<|"|>', "value") + _turns(
    "{{- '<|tool_call>call:' + tc.function.name }}{{- value(tc.function.arguments) }}{{- '<tool_call|>' }}",
    thought=_thought("<|channel>thought\\n", "\\n<channel|>"),
)
FUNCTION_GEMMA = _gemma("<escape>", "value") + _turns(
    "{{- '<start_function_call>call:' + tc.function.name }}{{- value(tc.function.arguments) }}"
    "{{- '<end_function_call>' }}"
)
COHERE = _turns(
    """{{- '    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + tc.function.name }}
            {{- '", "parameters": ' + tc.function.arguments | tojson + '}' }}""",
    "<|START_ACTION|>[\\n",
    ",\\n",
    "\\n]<|END_ACTION|>",
    thought=_thought("<|START_THINKING|>", "<|END_THINKING|>"),
    reply="{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' if m.content else '' }}",
)
_JSON = "tc.function | tojson"
ERNIE = _turns(
    f"{{{{- '\\n<tool_call>\\n' + {_JSON} + '\\n</tool_call>\\n' }}}}",
    thought=_thought("<think>\\n", "\\n</think>\\n\\n"),
    reply="{{- '<response>\\n' + m.content + '\\n</response>\\n' if m.content else '' }}",
)


def _elements(head: str, key: str, behind_key: str, end: str, tail: str) -> str:
    """Return the template text of a call as elements, with the given text around names, keys and values."""
    return f"""{{{{- '{head[0]}' + tc.function.name + '{head[1]}' }}}}
            {{%- for k, v in tc.function.arguments.items() %}}
                {{{{- '{key}' + k + '{behind_key}' }}}}
                {_VALUE}
                {{{{- '{end}' }}}}
            {{%- endfor %}}
            {{{{- '{tail}' }}}}"""


HUNYUAN_3 = _turns(
    _elements(
        ("<tool_call>", "<tool_sep>\\n"),
        "<arg_key>",
        "</arg_key>\\n<arg_value>",
        "</arg_value>\\n",
        "</tool_call>\\n",
    ),
    "<tool_calls>\\n",
    behind="</tool_calls>",
    thought=_thought("<think>", "</think>"),
)
STEP_3 = _turns(
    _elements(
        ('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">'),
        '<steptml:parameter name="',
        '">',
        "</steptml:parameter>",
        "</steptml:invoke><｜tool_call_end｜>",
    ),
    "<｜tool_calls_begin｜>\\n",
    "\\n",
    "\\n<｜tool_calls_end｜>",
    _thought("<think>\\n", "\\n</think>\\n"),
)
DEEPSEEK_32 = _turns(
    _elements(
        ('<｜DSML｜invoke name="', '">\\n'),
        '<｜DSML｜parameter name="',
        "\" string=\"' + ('true' if v is string else 'false') + '\">",
        "</｜DSML｜parameter>\\n",
        "</｜DSML｜invoke>\\n",
    ),
    "\\n\\n<｜DSML｜function_calls>\\n",
    behind="</｜DSML｜function_calls>",
    thought=_thought("<think>", "</think>"),
)
KIMI_K3 = _turns(
    _elements(
        ('<|open|>call tool="', '" index="\' + loop.index | string + \'"<|sep|>'),
        '<|open|>argument key="',
        "\" type=\"' + ('string' if v is string else 'object' if v is mapping else 'array') + '\"<|sep|>",
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
    ),
    "<|close|>response<|sep|><|open|>tools<|sep|>",
    behind="<|close|>tools<|sep|><|close|>message<|sep|>",
    thought=_thought("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
# Tool and reasoning formats to be detected, by template.
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
    "hunyuan that thinks": (
        _turns(
            f"{{{{- {_JSON} }}}}",
            "<tool_calls>[",
            ", ",
            "]</tool_calls>",
            _thought("<think>\\n", "\\n</think>\\n"),
            "{{- '<answer>\\n' + m.content + '\\n</answer>' if m.content else '' }}",
        ),
        "hunyuan_a13b",
        "hunyuan_a13b",
    ),
    "gemma 4": (GEMMA_4, "gemma4", "gemma4"),
    "functiongemma": (FUNCTION_GEMMA, "functiongemma", "none"),
    "cohere": (COHERE, "cohere_command3", "cohere_command3"),
    "ernie": (ERNIE, "ernie45", "ernie45"),
    "granite that thinks": (
        _turns(
            f"{{{{- {_JSON} }}}}",
            "<|tool_call|>[",
            ", ",
            "]",
            _thought("Here is my thought process:\\n", "\\n\\nHere is my response:\\n"),
        ),
        "granite",
        "granite",
    ),
    "phi 4 mini": (_turns(f"{{{{- {_JSON} }}}}", "functools[", ", ", "]"), "phi4_mini_json", "none"),
    "hunyuan 3": (HUNYUAN_3, "hy_v3", "qwen3"),
    "step 3": (STEP_3, "step3", "qwen3"),
    "deepseek v3.2": (DEEPSEEK_32, "deepseek_v32", "qwen3"),
    "kimi k3": (KIMI_K3, "kimi_k3", "kimi_k3"),
    "apertus": (
        _turns(
            "{{- '{' + tc.function.name | tojson + ': ' + tc.function.arguments | tojson + '}' }}",
            "<|tools_prefix|>[",
            ", ",
            "]<|tools_suffix|>",
            _thought("<|inner_prefix|>", "<|inner_suffix|>"),
        ),
        "apertus",
        "apertus",
    ),
    "internlm": (
        _turns(
            """{{- '<|action_start|><|plugin|>\\n{"name": "' + tc.function.name + '", "parameters": ' }}
            {{- tc.function.arguments | tojson + '}<|action_end|>' }}""",
            apart="\\n",
        ),
        "internlm",
        "none",
    ),
    "lfm 2": (
        "{{- '<|tool_list_start|>' if tools }}"
        + _turns(_python(_REPR), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        "lfm2",
        "none",
    ),
    "olmo 3": (
        _turns(_python("{{- v | tojson }}"), "<function_calls>", "\\n", "</function_calls>"),
        "olmo3",
        "none",
    ),
    "llama 4": (
        _EXAMPLE + _turns(_python(_REPR), "<|python_start|>[", ", ", "]<|python_end|>"),
        "llama4_pythonic",
        "none",
    ),
    "pythonic": (_EXAMPLE + _turns(_python(_REPR), "[", ", ", "]"), "pythonic", "none"),
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
    if tools == "pythonic":
        # These calls have no mark, so only an answer that begins with them has any.
        content = ""
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
    # A newline before the content is content unless reasoning precedes it.
    assert (texts + reader.parts.take_content()).strip("\n") == content
    assert thoughts == (thought if reasoning != "none" else "")
    assert [(call[1], json.loads(call[2])) for call in found.values()] == [("weather", given) for given in ARGUMENTS]
    if tools == "kimi_k2":
        assert [call[0] for call in found.values()] == ids
