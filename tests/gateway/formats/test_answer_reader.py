"""Reasoning, content and calls are parsed from an answer's text, however it is chunked, without losing text."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.formats.answer_parts import MAX_HELD_CHARS, MAX_REREAD_CHARS, AnswerParts, call_id
from pillion.gateway.formats.answer_reader import AnswerReader, OutputFormat
from pillion.gateway.formats.reasoning import REASONING_FORMATS
from pillion.gateway.formats.tool_formats import TOOL_FORMATS
from pillion.gateway.formats.xml_calls import MAX_DEPTH, MINIMAX, typed, types_of

SCHEMAS: dict[str, Any] = {
    "f": {
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "u": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "l": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        }
    },
    "g": {},
}
Read = tuple[str, str, list[tuple[str, str]]]


def read(
    text: str,
    tools: str = "",
    reasoning: str = "",
    opened: bool | None = None,
    cuts: list[int] | None = None,
    ends: bool = True,
) -> Read:
    """Return content, reasoning and calls of an answer read in pieces; ``ends`` if it ends by itself."""
    form = OutputFormat(REASONING_FORMATS.get(reasoning), opened, TOOL_FORMATS.get(tools), SCHEMAS, {})
    reader = AnswerReader(form, AnswerParts("r", 0))
    content, thought = "", ""
    calls: list[list[str]] = []

    def take() -> None:
        nonlocal content, thought
        content += reader.parts.take_content()
        more, deltas = reader.parts.take()
        thought += more
        for delta in deltas:
            if delta.name:
                assert delta.index == len(calls)
                assert tools == "kimi_k2" or delta.id == call_id("r", 0, delta.index)
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments

    at = 0
    for cut in (*sorted(cuts or ()), len(text)):
        reader.push(text[at:cut])
        at = cut
        take()
    reader.flush(cut=not ends)
    take()
    return content, thought, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        ("hermes", "Hi <tool_ca", "Hi ", []),
        ("hermes", "1 <", "1 ", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_', "", [("f", "{}")]),
        ("mistral", "Hi [TOOL_", "Hi ", []),
        ("llama3_json", "Hi <|pyth", "Hi ", []),
        ("qwen3_coder", "Hi <tool", "Hi ", []),
    ],
)
def test_a_partial_mark_of_a_cut_answer_is_not_text(
    tools: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(text, tools, ends=False) == (content, "", calls)


def test_a_partial_content_mark_of_a_cut_answer_is_not_text() -> None:
    assert read("</think><answer>x</ans", "hermes", "hunyuan_a13b", opened=True, ends=False) == ("x", "", [])
    assert read("</think> <ans", "hermes", "hunyuan_a13b", opened=True, ends=False) == ("", "", [])
    # Ordinary words may begin like word marks.
    assert read("I like f", "phi4_mini_json", ends=False) == ("I like f", "", [])


def test_a_partial_reasoning_mark_of_a_cut_answer_is_not_text() -> None:
    assert read("x</thi", reasoning="qwen3", opened=True, ends=False) == ("", "x", [])


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ENDED_BY_A_CALL: list[tuple[str, str, str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "qwen3", f"I think so.\n{CALL}", "", "I think so.", [("f", '{"a": 1}')]),
    ("hermes", "qwen3", f"I think so.{CALL}</think>Hi", "Hi", "I think so.", [("f", '{"a": 1}')]),
    (
        "hermes",
        "qwen3",
        f"I may write <tool_call> or <tool_call>{{}}.</think>\nHi {CALL} there",
        "Hi there",
        "I may write <tool_call> or <tool_call>{}.",
        [("f", '{"a": 1}')],
    ),
    ("hermes", "qwen3", "only thoughts <tool_call>", "", "only thoughts <tool_call>", []),
    (
        "qwen3_coder",
        "qwen3",
        "So.\n<tool_call>\n<function=f>\n<parameter=s>\n</think>\n</parameter>\n</function>\n</tool_call>",
        "",
        "So.",
        [("f", '{"s": "</think>"}')],
    ),
    (
        "kimi_k2",
        "kimi_k2",
        "So. <|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        "So.",
        [("f", "{}")],
    ),
    ("glm45", "glm47", "So.\n<tool_call>g</tool_call>", "", "So.", [("g", "{}")]),
    ("mistral", "mistral", 'So. [TOOL_CALLS][{"name": "g", "arguments": {}}]', "", "So.", [("g", "{}")]),
    ("apertus", "apertus", 'So. <|tools_prefix|>[{"g": {}}]<|tools_suffix|>', "", "So.", [("g", "{}")]),
    (
        "kimi_k3",
        "kimi_k3",
        'So. <|open|>tools<|sep|><|open|>call tool="g" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        "",
        "So.",
        [("g", "{}")],
    ),
    (
        "kimi_k3",
        "kimi_k3",
        "So.<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="g" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
        "Hi",
        "So.",
        [("g", "{}")],
    ),
    (
        "kimi_k3",
        "kimi_k3",
        "So.<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>",
        "Hi",
        "So.",
        [],
    ),
    ("kimi_k3", "kimi_k3", "So.<|close|>think<|sep|>Hi <|close|>message<|sep|>", "Hi", "So.", []),
    # Without marks an object within reasoning is reasoning.
    (
        "llama3_json",
        "qwen3",
        '{"name": "f", "parameters": {}}</think>{"name": "g", "parameters": {}}',
        "",
        '{"name": "f", "parameters": {}}',
        [("g", "{}")],
    ),
]


@pytest.mark.parametrize(("tools", "reasoning", "text", "content", "thought", "calls"), ENDED_BY_A_CALL)
def test_a_call_ends_the_reasoning(
    tools: str, reasoning: str, text: str, content: str, thought: str, calls: list[tuple[str, str]]
) -> None:
    for cuts in ([], [*range(1, len(text))], *([n] for n in range(1, len(text)))):
        assert read(text, tools, reasoning, opened=True, cuts=cuts) == (content, thought, calls)


def test_reasoning_is_assumed_where_models_always_think() -> None:
    for name in ("deepseek_r1", "glm45", "glm47", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3", "step3"):
        form = REASONING_FORMATS[name]
        assert form.begins_in_reasoning("<|assistant|>") is True
        assert form.begins_in_reasoning("<|assistant|><think></think>\n") is False
        assert read("So.</think>Hi", reasoning=name, opened=True) == ("Hi", "So.", [])
    assert REASONING_FORMATS["qwen3"].begins_in_reasoning("<|assistant|>") is None


WRITTEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        'Hi. \n<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "x</tool_call>\\""}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"a":[{}]},"name":"g"}</tool_call>\n',
        "Hi.",
        [("f", '{"a": 1, "s": "x</tool_call>\\""}'), ("g", '{"a":[{}]}')],
    ),
    ("hermes", '<tool_call>{"name":"f"}</tool_call> and ', "and", [("f", "{}")]),
    # Text before and after calls stays separated as written.
    ("hermes", 'One <tool_call>{"name":"f"}</tool_call>\n\ntwo', "One two", [("f", "{}")]),
    ("hermes", 'One<tool_call>{"name":"f"}</tool_call>\ntwo', "One\ntwo", [("f", "{}")]),
    (
        "qwen3_coder",
        "One\n<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call><function=g></function></tool_call> two",
        "One\ntwo",
        [("g", "{}"), ("g", "{}")],
    ),
    ("glm45", "One<tool_call>g</tool_call> two", "One two", [("g", "{}")]),
    ("olmo3", "One<function_calls>f(a=1)</function_calls> two", "One two", [("f", '{"a": 1}')]),
    ("granite", '<tool_call> [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("granite", 'Hi. <tool_call>[{"name": "g", "arguments": {}}]</tool_call>', "Hi.", [("g", "{}")]),
    ("granite", '<|tool_call|> [{"name": "g", "arguments": {}}]', "", [("g", "{}")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=s>\nx\ny\n</function>\n</tool_call>",
        "",
        [("f", '{"a": 1, "s": "x\\ny"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\nsay <parameter=a> here\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"s": "say <parameter=a> here"}')],
    ),
    (
        "seed_oss",
        "<seed:tool_call><function=f><parameter=a>1<parameter=s>x</function></seed:tool_call>",
        "",
        [("f", '{"a": 1, "s": "x"}')],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="s">x<parameter name="a">2</parameter>'
        "</invoke></minimax:tool_call>",
        "",
        [("f", '{"s": "x", "a": 2}')],
    ),
    ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call>", "", [("f", '{"s": "x"}')]),
    ("llama3_json", 'Sure: {"name": "f", "parameters": {"a": 1}} done', "Sure: done", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        'Try {"x": {"name": "g"}} or {"name": "h", "parameters": {}}.',
        'Try {"x": {"name": "g"}} or {"name": "h", "parameters": {}}.',
        [],
    ),
    (
        "apertus",
        'Hi <|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|> bye',
        "Hi bye",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("apertus", '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>', '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>', []),
    (
        "internlm",
        'Hi.<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>\n',
        "Hi.",
        [("f", '{"a": 1}')],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[f(a=1), g(s="x")]<|tool_call_end|>Looking.',
        "Looking.",
        [("f", '{"a": 1}'), ("g", '{"s": "x"}')],
    ),
    (
        "xlam",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("xlam", 'Hi.\n```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', "Hi.", [("f", '{"a": 1}')]),
    ("xlam", 'Hi.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "Hi.", [("f", '{"a": 1}')]),
    ("xlam", 'Hi.<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', "Hi.", [("f", '{"a": 1}')]),
    ("xlam", '[{"name": "other", "arguments": {}}]', '[{"name": "other", "arguments": {}}]', []),
    (
        "hy_v3",
        "Hi<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>g<tool_sep>\n</tool_call>\n</tool_calls>",
        "Hi",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
        '<steptml:parameter name="a">1</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="g"></steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek_v32",
        'Hi.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">5'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="x" string="false">{"y": [1]}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Hi.",
        [("f", '{"s": "5", "x": {"y": [1]}}'), ("g", "{}")],
    ),
    (
        "kimi_k3",
        'Hi.<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>5'
        '<|close|>argument<|sep|><|open|>argument key="&quot;&amp;quot;" type="object"<|sep|>{"y": [1]}'
        '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>no<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "Hi.",
        [("f", '{"s": "5", "\\"&quot;": {"y": [1]}, "n": "no"}'), ("g", "{}")],
    ),
    (
        "minimax_m3",
        f'Hi.{MINIMAX}<tool_call>\n{MINIMAX}<invoke name="f">{MINIMAX}<s>{MINIMAX}</s>{MINIMAX}<a>5{MINIMAX}</a>'
        f"{MINIMAX}<l>{MINIMAX}<item>{MINIMAX}<s>a<b>\n{MINIMAX}</s>{MINIMAX}<n>3{MINIMAX}</n>{MINIMAX}</item>\n"
        f'{MINIMAX}<item>{MINIMAX}</item>{MINIMAX}</l>{MINIMAX}<o>{{"x": [1]}}{MINIMAX}</o>{MINIMAX}<x>'
        f"{MINIMAX}<item>1{MINIMAX}</item>{MINIMAX}</x>{MINIMAX}</invoke>\n"
        f'{MINIMAX}<invoke name="g">{MINIMAX}</invoke>\n{MINIMAX}</tool_call>',
        "Hi.",
        [("f", '{"s": "", "a": 5, "l": [{"s": "a<b>\\n", "n": 3}, {}], "o": {"x": [1]}, "x": ["1"]}'), ("g", "{}")],
    ),
    (
        "minimax_m3",
        f'{MINIMAX}<invoke name="f">{MINIMAX}<o>{MINIMAX}<y>1{MINIMAX}<z>2{MINIMAX}</z>{MINIMAX}</o>{MINIMAX}<s>h',
        "",
        [("f", '{"o": {"y": "1", "z": "2"}, "s": "h')],
    ),
    ("minimax_m3", f"{MINIMAX}<tool_call>nothing", f"{MINIMAX}<tool_call>nothing", []),
    ("kimi_k3", '<|open|>call tool="g"<|sep|><|close|>call<|sep|>', "", [("g", "{}")]),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="g" i', '<|open|>tools<|sep|><|open|>call tool="g" i', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>rest', "rest", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "half', "", [("f", '{"s": "half')]),
    ("hermes", "  <tool_call> no call <tool_call", "  <tool_call> no call <tool_call", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "a b"}', '<tool_call>{"name": "a b"}', []),
    ("hermes", '<tool_call><tool_call>{"name":"g","arguments":{}}', "<tool_call>", [("g", "{}")]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3} ', '{"name": "Bob", "age": 3} ', []),
    ("llama3_json", '<|python_tag|>{"name":"other","parameters":{"x":"}"}}', "", [("other", '{"x":"}"}')]),
    ("llama3_json", 'Hello {"name":"f"}; ', 'Hello {"name":"f"}; ', []),
    ("llama3_json", '{"name":"f","parameters":{}};x', ";x", [("f", "{}")]),
    (
        "mistral",
        'ok [TOOL_CALLS] [{"name":"f","arguments":{"a":1}}, {"name":"g","arguments":{}}]',
        "ok",
        [("f", '{"a":1}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    ("glm45", "<tool_call> is a mark, and so on", "<tool_call> is a mark, and so on", []),
    ("glm45", "<tool_call>word", "<tool_call>word", []),
    ("glm45", "a<tool_call>g</tool_call>b", "ab", [("g", "{}")]),
    (
        "glm45",
        "<tool_call>f<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>s</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        [("f", '{"a": 3, "s": "3"}')],
    ),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>x", "<arg_key>a</arg_key>x", [("f", "{}")]),
    ("minimax_m2", '<invoke name="f"><parameter name="b">True</parameter></invoke>', "", [("f", '{"b": true}')]),
    ("minimax_m2", "<minimax:tool_call>nothing", "<minimax:tool_call>nothing", []),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜> so", "so", [("f", "{}")]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜>none", []),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", []),
    ("granite", '<|tool_call|> [{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("granite", "<|tool_call|> a list", "<|tool_call|> a list", []),
    ("hunyuan_a13b", '<tool_calls>[{"name": "f"}]</tool_calls> so', "so", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f and no more", "[TOOL_CALLS]f and no more", []),
    (
        "qwen3_coder",
        "ok\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\n"
        'a "b"\né\n\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>\n'
        "<function=g></function>",
        "ok",
        [("f", '{"a": 12, "s": "a \\"b\\"\\né\\n", "b": true}'), ("g", "{}")],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=u>5</parameter><parameter=a>five</parameter>zzz",
        "zzz",
        [("f", '{"u": 5, "a": "five"}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n12", "", [("f", '{"a": 12')]),
    (
        "openai",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        ' <|constrain|>json<|message|>{"a": 1}<|call|>',
        "Let me see.",
        [("f", '{"a": 1}')],
    ),
    ("openai", "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", "", [("f", "{}")]),
    ("openai", "to=g<|channel|>commentary json<|message|>{}<|call|>", "", [("g", "{}")]),
    ("openai", 'to=functions.g<|channel|>commentary json<|message|>{"s": "<|en"}', "", [("g", '{"s": "<|en"}')]),
    ("openai", "<|channel|>analysis to=functions.g code<|message|> <|call|>", "", [("g", " {}")]),
    ("openai", "<|start|>assistant<|channel|>final <|constrain|>json<|message|>[1] <|return|>", "[1]", []),
    (
        "openai",
        "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>\nTwo.\n",
        "One.\n\nTwo.\n",
        [],
    ),
    ("openai", "<|channel|>final<|message|>One.<|end|><|channel|>final<|message|> ", "One.", []),
    ("openai", "to be, or not <|message|>", "to be, or not <|message|>", []),
    (
        "openai",
        "<|channel|>fin a l<|message|>x<|start|>user<|message|>y",
        "<|channel|>fin a l<|message|>x<|start|>user<|message|>y",
        [],
    ),
    ("qwen3_coder", "<tool_call> <function=f x", "<tool_call> <function=f x", []),
    (
        "pythonic",
        "[f(a=1, s='it\\'s \\x41\\u00e9\\U0001f600\\ud83d\\ude00\\ud83d\\q', "
        "b=True, o={\"x\": [None, -1.5], 'y': (1, .5)}), g()]",
        "",
        [
            (
                "f",
                '{"a": 1, "s": "it\'s Aé😀😀\\ud83d\\\\q", "b": true, "o": {"x": [null, -1.5], "y": [1, 0.5]}}',
            ),
            ("g", "{}"),
        ],
    ),
    ("pythonic", "[f(s=word, a=0x10,)] so", "so", [("f", '{"s": "word", "a": 16}')]),
    ("pythonic", "[link](https://x)", "[link](https://x)", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[f(1, 2)] so", "1, 2)] so", [("f", "{")]),
    ("pythonic", "[f(a=1, b 2)]", ", b 2)]", [("f", '{"a": 1')]),
    ("pythonic", "[f(a=1), text", ", text", [("f", '{"a": 1}')]),
    ("pythonic", "[f(s='half", "", [("f", '{"s": "half')]),
    ("llama4_pythonic", "Well <|python_start|>[other(a=[1])]<|python_end|>", "Well", [("other", '{"a": [1]}')]),
    ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>", "<|python_start|>print(1)<|python_end|>", []),
    ("olmo3", "<function_calls>f(b=true)\n g()\n</function_calls> so", "so", [("f", '{"b": true}'), ("g", "{}")]),
    ("olmo3", "<function_calls>none</function_calls>", "<function_calls>none</function_calls>", []),
    (
        "gemma4",
        'Hi <|tool_call>call:f{s:<|"|>a "b", {c}<|"|>,o:{x:[{y:<|"|><|"|>}],z:null},b:true}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        "Hi",
        [("f", '{"s": "a \\"b\\", {c}", "o": {"x": [{"y": ""}], "z": null}, "b": true}'), ("g", "{}")],
    ),
    ("gemma4", "<|tool_call>call f", "<|tool_call>call f", []),
    ("gemma4", '<|tool_call>call:f{s: "plain", "a":1}', "", [("f", '{"s": "plain", "a": 1}')]),
    ("functiongemma", "<start_function_call>call:f{s:<escape>x<escape>}<end_function_call>", "", [("f", '{"s": "x"}')]),
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("cohere_command3", '<|START_ACTION|>{"tool_name": "g"}<|END_ACTION|>', "", [("g", "{}")]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("phi4_mini_json", "Python has functools[1] for fun", "Python has functools[1] for fun", []),
    ("ernie45", '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n', "", [("g", "{}")]),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), WRITTEN)
def test_tool_calls_are_separated_from_content(
    tools: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(text, tools) == (content, "", calls)
    assert read(text, tools, cuts=list(range(len(text)))) == (content, "", calls)


@given(st.sampled_from(WRITTEN), st.booleans(), st.lists(st.integers(0, 300), max_size=12))
def test_chunking_does_not_change_the_parts(written: Any, thinks: bool, cuts: list[int]) -> None:
    tools, text, _, calls = written
    whole = ("<think>\nwell </thin\n</think>\n\n" if thinks else "") + text
    cuts = [min(cut, len(whole)) for cut in cuts]
    once = read(whole, tools, "qwen3")
    assert read(whole, tools, "qwen3", None, cuts) == once
    assert read(whole, tools, "qwen3", None, list(range(len(whole)))) == once
    assert once[2] == calls
    assert once[1] == ("well </thin" if thinks else "")


MARKS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "</parameter>"),
        *("<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", ', '"arguments": {', "}"),
        *(
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|constrain|>",
            "to=functions.f",
            "assistant",
            "final",
        ),
        *(
            "[f(",
            "(",
            ")",
            "a=",
            "'",
            "<function_calls>",
            "f(",
            "<|python_start|>",
            "<|tool_call>call:f{",
            "a:",
            '<|"|>',
        ),
        *('"parameters": {', '"s": "', '"', "\\", " ", "\n", "; ", "[", "]", ",", "f", "é", "<", "text"),
    ]
)


@given(
    st.lists(MARKS, max_size=14).map("".join),
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.sampled_from([None, True, False]),
    st.lists(st.integers(0, 80), max_size=8),
)
def test_random_text_parses_alike_in_any_chunks(text: str, tools: str, opened: bool | None, cuts: list[int]) -> None:
    once = read(text, tools, "qwen3", opened)
    assert read(text, tools, "qwen3", opened, [min(cut, len(text)) for cut in cuts]) == once
    # No word is lost: each is content, reasoning, a name or arguments.
    everything = "".join([once[0], once[1], *(part for call in once[2] for part in call)])
    assert everything.count("text") == text.count("text") or "qwen3" in tools or '"' in text


@pytest.mark.parametrize(
    ("name", "opened", "text", "content", "thought"),
    [
        ("qwen3", None, "<think>\na\n</think>\n\nb", "b", "a"),
        ("qwen3", None, "\n<think>a</think>b </think>", "b </think>", "a"),
        ("qwen3", True, "a\n</think>\n\nb", "b", "a"),
        ("qwen3", True, "<think>a</think>b", "b", "a"),
        ("qwen3", False, "<think>a</think>b", "<think>a</think>b", ""),
        ("qwen3", None, " plain ", " plain ", ""),
        ("qwen3", None, "<thi", "<thi", ""),
        ("qwen3", None, "<think>cut </thi", "", "cut </thi"),
        ("deepseek_r1", True, "a</think>b", "b", "a"),
        ("mistral", None, "[THINK]a[/THINK]b", "b", "a"),
        ("seed_oss", None, "<seed:think>a</seed:think>b", "b", "a"),
        ("gemma4", None, "<|channel>thought\na\n<channel|>b", "b", "a"),
        ("granite", None, "Here is my thought process:\na\n\nHere is my response: b", "b", "a"),
        ("granite", None, "Here's my thought process: a Here's my response: b", "b", "a"),
        ("granite", None, "Here is my", "Here is my", ""),
        ("hunyuan_a13b", None, "<think>\na\n</think>\n<answer>\nb </answ</answer>", "b </answ", "a"),
        ("hunyuan_a13b", False, "\n<answer>\nb\n</answer>\nand </answer>", "band </answer>", ""),
        ("hunyuan_a13b", None, "no <answer>b</answer>", "no <answer>b</answer>", ""),
        ("ernie45", True, "a\n</think>\n\n<response>\nb </response>\n", "b", "a"),
        ("ernie45", None, "<think>a</think> <respo", "<respo", "a"),
        ("cohere_command3", None, "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "b", "a"),
        ("cohere_command3", False, "<|START_RESPONSE|>b", "b", ""),
        (
            "openai_gptoss",
            None,
            "<|channel|>analysis<|message|>a <|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|> c<|return|>",
            "c",
            "a\n\nb",
        ),
        ("openai_gptoss", True, "a<|start|>assistant<|channel|>final<|message|>b", "b", "a"),
        ("openai_gptoss", False, "a <|end|>", "a", ""),
        ("openai_gptoss", None, "<|channel|>analysis to=python code<|message|>a<|call|>", "", "a"),
        ("openai_gptoss", None, "<|channel|>commentary to=functions.f json<|message|>{}", "{}", ""),
        ("openai_gptoss", None, "plain, and <b>", "plain, and <b>", ""),
    ],
)
def test_reasoning_is_separated_from_content(
    name: str, opened: bool | None, text: str, content: str, thought: str
) -> None:
    assert read(text, "", name, opened) == (content, thought, [])
    assert read(text, "", name, opened, list(range(len(text)))) == (content, thought, [])


@pytest.mark.parametrize(
    ("name", "prompt", "opened"),
    [
        ("qwen3", "<|im_start|>assistant\n", None),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "what is <think>?<|im_end|>\n<|im_start|>assistant\n", None),
        ("openai_gptoss", "<|end|><|start|>assistant", None),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>", False),
        ("deepseek_r1", "<|Assistant|>", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("cohere_command3", "<|CHATBOT_TOKEN|><|START_RESPONSE|>", False),
        ("deepseek_r1", "<|Assistant|><think>\n\n</think>\n\n", False),
    ],
)
def test_the_prompt_determines_whether_the_answer_begins_with_reasoning(
    name: str, prompt: str, opened: bool | None
) -> None:
    assert REASONING_FORMATS[name].begins_in_reasoning(prompt) is opened


def test_arguments_are_streamed() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"s": "one two three"}}\n</tool_call>'
    form = OutputFormat(None, None, TOOL_FORMATS["hermes"], SCHEMAS, {})
    reader, sizes = AnswerReader(form, AnswerParts("r", 0)), []
    for character in text:
        reader.push(character)
        sizes += [len(delta.arguments) for delta in reader.parts.take()[1]]
    assert sizes == [0, *[1] * len('{"s": "one two three"}')]


# Texts that look like a call until their end, and would be reread from each of their marks.
FALSE_CALLS = {
    "objects": ("hermes", '<tool_call>{"a":[\\"'),
    "objects of Llama": ("llama3_json", '<|python_tag|>{"a":[\\"'),
    "lists of Mistral": ("mistral", '[TOOL_CALLS][{"a":[\\"'),
    "names": ("hermes", '<tool_call>{"name'),
    "brackets": ("hermes", '<tool_call>{"a":' + "[" * 60),
    "functions": ("qwen3_coder", "<tool_call> <function=x"),
    "parameters": ("qwen3_coder", "<function=f><parameter=a>1"),
    "white space": ("hermes", "      "),
    "white space after marks": ("mistral", "[TOOL_CALLS]      "),
    "names of GLM": ("glm45", "<tool_call>f "),
    "keys of GLM": ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_"),
    "names of MiniMax M3": ("minimax_m3", f'{MINIMAX}<invoke name="f">{MINIMAX}<a'),
    "heads of Kimi K3": ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"'),
    "calls of MiniMax": ("minimax_m2", '<minimax:tool_call><invoke name="f'),
    "sections": ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    "numbers": ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"),
    "lists": ("hunyuan_a13b", '<tool_calls>[{"a":[\\"'),
    "reasoning": ("hermes", "</thin"),
    "arguments in Python": ("olmo3", "<function_calls>f(a=1, "),
    "lists in Python": ("pythonic", "[f(a=[("),
    "keys in Python": ("olmo3", "<function_calls>f(a="),
    "texts in Python": ("olmo3", "<function_calls>f(a='\\u00"),
    "texts of Gemma": ("gemma4", '<|tool_call>call:f{a:<|"|><|'),
    "marks of Gemma": ("gemma4", "<|tool_call>call:f"),
    "words that are marks": ("phi4_mini_json", "functools["),
    "channels": ("openai", "<|channel|>commentary to=functions.f "),
    "starts": ("openai", "<|start|>assistant<"),
}


def count_work(text: str, tools: str) -> tuple[int, int]:
    """Count calls of Python and C functions to read a text in small pieces: sum, maximum per piece."""
    form = OutputFormat(REASONING_FORMATS["qwen3"], "</thin" in text or None, TOOL_FORMATS[tools], SCHEMAS, {})
    reader, calls, most = AnswerReader(form, AnswerParts("r", 0)), 0, 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for at in range(0, len(text), 4):
            before = calls
            reader.push(text[at : at + 4])
            reader.parts.take_content()
            reader.parts.take()
            most = max(most, calls - before)
        before = calls
        reader.flush()
        most = max(most, calls - before)
    finally:
        sys.setprofile(None)
    return calls, most


_ALIKE = ("lists in Python", "keys in Python", "arguments in Python", "marks of Gemma", "words that are marks")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in _ALIKE else ()) for name in FALSE_CALLS]
)
def test_parsing_is_linear_in_the_length_of_any_text(name: str) -> None:
    tools, unit = FALSE_CALLS[name]
    size = 2 * MAX_REREAD_CHARS
    once, _ = count_work((unit * size)[:size], tools)
    twice, most = count_work((unit * size)[: 2 * size], tools)
    assert twice < 2.2 * once
    # Held text is emitted at once; a bounded part of it is reread, at some calls per character.
    assert most < 5 * MAX_REREAD_CHARS


@pytest.mark.parametrize("unit", ["  ", "\n \t"])
def test_buffered_white_space_is_not_copied_per_token(unit: str) -> None:
    parts = AnswerParts("r", 0)
    parts.content("x")
    longest = 0

    def count(_: FrameType, event: str, function: Any) -> None:
        nonlocal longest
        if event == "c_call" and function.__name__ in ("rstrip", "lstrip"):
            longest = max(longest, len(function.__self__))

    sys.setprofile(count)
    try:
        for _ in range(1000):
            parts.content(unit)
    finally:
        sys.setprofile(None)
    assert longest == len(unit)
    parts.content("y")
    assert parts.take_content() == "x" + unit * 1000 + "y"


@pytest.mark.parametrize("cuts", [[], list(range(0, 2 * MAX_HELD_CHARS, 1009))])
@pytest.mark.parametrize(
    ("tools", "begin"),
    [
        ("hermes", '<tool_call>{"arguments": {"s": "'),
        ("hermes", '<tool_call>{"name": "f", "x": ['),
        ("hermes", "<tool_call> "),
        ("llama3_json", '{"arguments": {"s": "'),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]"),
        ("qwen3_coder", "<tool_call>\n"),
    ],
)
def test_the_buffered_text_of_a_call_is_bounded(tools: str, begin: str, cuts: list[int]) -> None:
    filler = " " if begin.endswith((" ", "\n")) else "z"
    text = begin + filler * MAX_HELD_CHARS
    form = OutputFormat(None, None, TOOL_FORMATS[tools], SCHEMAS, {})
    reader = AnswerReader(form, AnswerParts("r", 0))
    reader.push(text)
    assert reader.parts.take_content() or filler == " "
    call = {"hermes": '<tool_call>{"name":"g"}', "llama3_json": '<|python_tag|>{"name":"g"}'}.get(tools)
    if call is None:
        call = "[TOOL_CALLS]g{}" if tools == "mistral" else "<function=g></function>"
    cuts = [cut for cut in cuts if cut < len(text)]
    assert read(text + "z" + call, tools, cuts=cuts) == (text + "z", "", [("g", "{}")])


def test_rescanning_after_false_calls_is_bounded() -> None:
    broken = '<tool_call>{"x": "' + "y" * (MAX_REREAD_CHARS // 2) + '<tool_call>{"name": "g"}'
    # The object within the unterminated string is found; if the string is too long, it is not searched.
    content, _, calls = read(broken, "hermes")
    assert (content, calls) == (broken.removesuffix('<tool_call>{"name": "g"}'), [("g", "{}")])
    content, _, calls = read(broken + "and " + broken, "hermes")
    assert len(calls) == 1
    assert content.endswith('{"name": "g"}')


@pytest.mark.parametrize("step", [1009, 10**9])
@pytest.mark.parametrize(
    ("key", "text", "spelled"),
    [
        ("o", '{"x": "' + "z" * MAX_HELD_CHARS + '"}', None),
        ("a", "z" * (MAX_HELD_CHARS + 5) + '"', json.dumps("z" * (MAX_HELD_CHARS + 5) + '"')),
        ("u", "[" + "z" * (MAX_HELD_CHARS + 5), json.dumps("[" + "z" * (MAX_HELD_CHARS + 5))),
    ],
)
def test_a_parameter_that_is_too_long_to_hold_is_streamed(key: str, text: str, spelled: str | None, step: int) -> None:
    whole = f"<function=f><parameter={key}>\n{text}\n</parameter></function>"
    cuts = list(range(0, len(whole), step))
    expected = f'{{"{key}": {text if spelled is None else spelled}}}'
    assert read(whole, "qwen3_coder", cuts=cuts) == ("", "", [("f", expected)])


def test_a_deep_list_is_checked_without_parsing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    decode = msgspec.json.decode
    monkeypatch.setattr(msgspec.json, "decode", lambda *args, **kinds: made.append(decode(*args, **kinds)) or made[-1])
    text = "[" + ",".join(["[[[]]]"] * 5000) + "]"
    assert typed(text, {"array"}) == text
    assert [type(one) for one in made] == [msgspec.Raw]
    assert typed(text[:-1], {"array"}) == json.dumps(text[:-1])


@pytest.mark.parametrize("schema", [{"type": 5}, {"type": [5, None]}, {"anyOf": 3}, {"enum": "x"}])
def test_an_unknown_type_is_ignored(schema: dict[str, Any]) -> None:
    assert types_of({"properties": {"a": schema}}, "a") == {"string"}


def test_types_of_a_deeply_nested_schema_are_found() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert types_of({"properties": {"a": deep}}, "a") == {"integer"}


def test_call_ids_are_unique_and_alphanumeric() -> None:
    ids = {call_id(request, answer, number) for request in "ab" for answer in (0, 1) for number in (0, 1)}
    assert len(ids) == 8
    assert all(one.startswith("call_") and one[5:].isalnum() for one in ids)
    short = call_id("a", 0, 0, short=True)
    assert len(short) == 9
    assert short.isalnum()
    assert json.dumps(short) == f'"{short}"'


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=g>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
    "glm45": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</parameter>\n</invoke>\n'
    '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": f'{MINIMAX}<tool_call>\n{MINIMAX}<invoke name="f">{MINIMAX}<o>{MINIMAX}<s>x{MINIMAX}</s>'
    f'{MINIMAX}</o>{MINIMAX}</invoke>\n{MINIMAX}<invoke name="g">{MINIMAX}</invoke>\n{MINIMAX}</tool_call>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
    "<｜tool▁call▁end｜>\n"
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "hunyuan_a13b": '<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_calls>',
    "cohere_command3": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
    '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
    "olmo3": "<function_calls>f(a=[1], s='x\\n')\ng()\n</function_calls>",
    "llama4_pythonic": "<|python_start|>[f(a=[1], o={'x': 'y'}), g()]<|python_end|>",
    "gemma4": '<|tool_call>call:f{s:<|"|>x<|"|>,o:{a:1}}<tool_call|><|tool_call>call:g{}<tool_call|>',
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("before", ["", "Wait. "])
def test_a_call_that_was_cut_does_not_become_text(name: str, before: str) -> None:
    text = before + WRITTEN[name]
    whole = read(text, name)
    for end in range(len(before), len(text) + 1):
        content, _, calls = read(text[:end], name, ends=False)
        assert content.strip() == before.strip(), text[:end]
        assert [one for one, _ in calls] == [one for one, _ in whole[2]][: len(calls)]


def test_elements_within_elements_are_read_to_a_bounded_depth() -> None:
    """Nested elements do not deepen the stack."""
    begin = f'{MINIMAX}<tool_call>{MINIMAX}<invoke name="f">' + f"{MINIMAX}<o>" * 5000
    _, _, [(name, arguments)] = read(begin, "minimax_m3", cuts=[*range(0, len(begin), 1000)])
    assert name == "f"
    assert arguments.count("{") <= MAX_DEPTH + 1


def test_text_after_a_false_mark_is_content_in_a_cut_answer() -> None:
    assert read("a <tool_call> is a mark, and", "hermes", ends=False)[0] == "a <tool_call> is a mark, and"
    assert read("a <function=x\n is a mark", "qwen3_coder", ends=False)[0] == "a <function=x\n is a mark"
