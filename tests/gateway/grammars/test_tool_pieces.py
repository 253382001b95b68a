"""Call grammars followed by a random writer: every call fits its tool's schema, and the reader parses it."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from lab.testbed.conditions import WITHIN_S, result_of
from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.errors import InvalidRequest
from pillion.gateway.formats.model_formats import choose_formats
from pillion.gateway.formats.reasoning import REASONING_FORMATS
from pillion.gateway.formats.xml_calls import MINIMAX, XML_FORMS
from pillion.gateway.grammars.answer_grammar import Piece, join
from pillion.gateway.grammars.spelled_lark import spelled
from pillion.gateway.grammars.tool_pieces import answer_pieces
from pillion.gateway.http_api.custom_tools import InputText, ToolGrammar, custom_tool
from pillion.types import ChatMessage, GenerateRequest, Tool, ToolOptions
from tests.support.grammars import follow
from tests.support.patches import PATCH, PATCHED
from tests.support.written_calls import ALIKE, CASES, EOS, MODELS, accepts, codec_of, read, written

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (
    Tool(name="weather", parameters=json.dumps(SCHEMA)),
    Tool(name="now", parameters='{"type": "object", "properties": {}, "additionalProperties": false}'),
)


def fit(calls: list[list[str]]) -> None:
    for name, arguments in calls:
        schema = next(json.loads(tool.parameters) for tool in TOOLS if tool.name == name)
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize(
    ("choice", "several"),
    # The number of calls does not depend on what may precede the first one.
    [("required", True), ("named", False), ("auto", True)],
)
def test_calls_are_complete_and_fit_their_schemas(model: str, choice: str, several: bool) -> None:
    codec = codec_of(model)
    formats = choose_formats("", codec, MODELS[model][0], "none")
    options = ToolOptions(tools=TOOLS, choice=choice, name="weather", parallel_tool_calls=several)
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = join(answer_pieces(formats.output_format(request, ""), formats, options, None)).text
    ended = 0
    for seed in range(4):
        ids = written(codec, grammar, seed)
        if ids is None:
            continue
        ended += 1
        content, calls, _ = read(codec, formats, request, "", ids)
        fit(calls)
        if choice != "auto":
            assert content == ""
            assert calls
        if choice == "named":
            assert [name for name, _ in calls] == ["weather"]
        assert several or len(calls) <= 1
    assert ended >= 2


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_kimi_k3_calls_follow_reasoning_and_answer(choice: str) -> None:
    """Each mark is three tokens and a word."""
    codec = codec_of("kimi k3")
    formats = choose_formats("", codec, "kimi_k3", "kimi_k3")
    options = ToolOptions(tools=TOOLS, choice=choice)
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    prompt = "<|open|>think<|sep|>"
    grammar = join(answer_pieces(formats.output_format(request, prompt), formats, options, None)).text
    call = (
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"'
        '<|sep|>Rome<|close|>argument<|sep|><|open|>argument key="days" type="%s"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    )
    answer = "<|open|>response<|sep|>Yes.<|close|>response<|sep|>" if choice == "auto" else ""
    for before in ("So.", f"So.<|close|>think<|sep|>{answer}"):
        text = before + call % "number"
        assert accepts(codec, grammar, text)
        content, calls, _ = read(codec, formats, request, prompt, codec.encode(text).ids)
        assert (content, calls) == ("Yes." if answer and answer in text else "", [["weather", calls[0][1]]])
        assert json.loads(calls[0][1]) == {"city": "Rome", "days": 3}
        assert not accepts(codec, grammar, before + call % "string")


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
@pytest.mark.parametrize("opened", [True, False])
def test_a_call_may_begin_before_the_reasoning_has_ended(choice: str, opened: bool) -> None:
    """The model may write a call's mark instead of the end of reasoning; the grammar must not forbid that."""
    codec = codec_of("hermes with tokens")
    formats = choose_formats("", codec, "hermes", "qwen3")
    options = ToolOptions(tools=TOOLS, choice=choice, name="now" if choice == "named" else "")
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    prompt, begin = ("<think>\n", "") if opened else ("", "<think>\n")
    structured = Piece('"{}"') if choice == "auto" else None
    for piece in (None, structured):
        grammar = join(answer_pieces(formats.output_format(request, prompt), formats, options, piece)).text
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        for text in (f"{begin}So. {call}", f"{begin}So.</think>\n\n{call}"):
            assert accepts(codec, grammar, text)
            assert read(codec, formats, request, prompt, codec.encode(text).ids)[:2] == ("", [["now", "{}"]])
        assert not accepts(codec, grammar, f"{begin}So. <tool_call>\n" + "{}\n</tool_call>")
        assert not accepts(codec, grammar, f"{begin}So.")


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_only_allowed_tools_are_called(choice: str) -> None:
    codec = codec_of("hermes")
    formats = choose_formats("", codec, "hermes", "none")
    options = ToolOptions(tools=TOOLS, choice=choice, allowed=("now",))
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = join(answer_pieces(formats.output_format(request, ""), formats, options, None)).text
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert accepts(codec, grammar, call % ("now", "{}"))
    assert not accepts(codec, grammar, call % ("weather", '{"city": "a", "days": 1}'))


DEEP = {
    "type": "object",
    "properties": {
        "first": {"type": "boolean"},
        "tree": {"$ref": "#/$defs/tree"},
        "tags": {"type": "array", "items": {"enum": ["a", "<b>", 3, None, True]}, "minItems": 1, "maxItems": 3},
        "either": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 5, "maximum": 9}]},
        "kind": {"const": {"x": [1]}},
        "last": {"type": ["boolean", "string"], "maxLength": 2},
    },
    "required": ["tree", "kind"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "string", "maxLength": 3},
                "trees": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    "model",
    ["gemma 4", *(pytest.param(one, marks=pytest.mark.long) for one in ("gemma without tokens", "llama 4", "olmo"))],
)
def test_arguments_in_other_notations_fit_deep_schemas(model: str) -> None:
    codec, ended, keys = codec_of(model), 0, set()
    formats = choose_formats("", codec, MODELS[model][0], "none")
    options = ToolOptions(tools=(Tool(name="deep", parameters=json.dumps(DEEP)), Tool(name="free")), choice="required")
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = join(answer_pieces(formats.output_format(request, ""), formats, options, None)).text
    for seed in range(8):
        ids = written(codec, grammar, seed)
        if ids is None:
            continue
        content, calls, _ = read(codec, formats, request, "", ids)
        assert (content, bool(calls)) == ("", True)
        for name, arguments in calls:
            ended += 1
            keys |= {*json.loads(arguments)}
            jsonschema.validate(json.loads(arguments), DEEP if name == "deep" else {"type": "object"})
    assert ended >= 4
    assert {"tree", "kind"} < keys


LINES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"line": {"type": "integer"}, "text": {"type": "string"}},
        "required": ["line"],
    },
    "minItems": 1,
    "maxItems": 2,
}
NESTED = {
    "type": "object",
    "properties": {
        "edits": LINES,
        "more": {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["a", 3]}}}},
        "any": {"type": "object"},
        "once": {"type": ["array", "null"], "items": {"type": "integer"}},
        "many": {"type": "array", "items": {"type": "integer"}, "maxItems": 5000},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", ["minimax m3", pytest.param("minimax m3 without tokens", marks=pytest.mark.long)])
def test_minimax_m3_writes_lists_and_objects_as_elements(model: str) -> None:
    codec = codec_of(model)
    formats = choose_formats(f"{{{{ tools }}}}{MINIMAX}<tool_call></mm:think>", codec, "auto", "auto")
    assert (formats.tool_parser, formats.reasoning_parser) == ("minimax_m3", "minimax_m3")
    options = ToolOptions(tools=(Tool(name="f", parameters=json.dumps(NESTED), strict=True),), choice="required")
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = join(answer_pieces(formats.output_format(request, ""), formats, options, None)).text

    def element(key: str, *inner: str) -> str:
        return f"{MINIMAX}<{key}>{''.join(inner)}{MINIMAX}</{key}>"

    def call(*inner: str) -> str:
        return (
            f'{MINIMAX}<tool_call>\n{MINIMAX}<invoke name="f">{"".join(inner)}{MINIMAX}</invoke>\n{MINIMAX}</tool_call>'
        )

    line = element("item", element("line", "7"), element("text", "5\n"))
    tags = element("tags", element("item", "a"), element("item", "3"))
    for arguments, inner in (
        ({}, []),
        ({"edits": [{"line": 7, "text": "5\n"}] * 2}, [element("edits", line, line)]),
        ({"edits": [{"line": 7}]}, [element("edits", element("item", element("line", "7")))]),
        ({"more": {"tags": ["a", 3]}, "any": {"x": [1]}}, [element("more", tags), element("any", '{"x": [1]}')]),
        ({"more": {}}, [element("more")]),
        ({"more": {"tags": []}}, [element("more", element("tags"))]),
        ({"once": [1, 2], "many": [3]}, [element("once", "[1, 2]"), element("many", "[3]")]),
    ):
        text = call(*inner)
        assert accepts(codec, grammar, text), text
        content, [(name, found)], _ = read(codec, formats, request, "", codec.encode(text).ids)
        assert (content, name, json.loads(found)) == ("", "f", arguments)
    for bad in (
        element("edits"),
        element("edits", line, line, line),
        element("edits", element("item", element("text", "5"))),
        element("more", element("tags", element("item", "c"))),
        element("any", element("x", "1")),
        element("once", element("item", "1")),
    ):
        assert not accepts(codec, grammar, call(bad)), bad


def test_schemas_that_gemma_call_syntax_cannot_express_are_refused() -> None:
    codec = codec_of("gemma 4")
    formats = choose_formats("", codec, "gemma4", "none")

    def grammar(value: dict[str, Any], key: str = "a") -> str:
        schema = {"type": "object", "properties": {key: value}}
        options = ToolOptions(tools=(Tool(name="f", parameters=json.dumps(schema), strict=True),), choice="required")
        request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
        return join(answer_pieces(formats.output_format(request, ""), formats, options, None)).text

    for value, text in (
        ({"allOf": [{"type": "string"}]}, "does not support 'allOf'"),
        ({"enum": ['<|"|>']}, 'the model cannot write "<|'),
        ({"type": "object", "properties": {"b": {"prefixItems": []}}}, "does not support 'prefixItems'"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(text)) as refused:
            grammar(value)
        assert [one.field for one in refused.value.violations] == ["tools.tools[0].parameters"]
    with pytest.raises(InvalidRequest, match="the model cannot write the property 'a b'"):
        grammar({}, "a b")


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("name", ["cohere_command3", "kimi_k3"])
def test_content_may_be_enclosed_in_the_formats_marks(name: str, tokens: bool) -> None:
    codec = byte_tokenizer()
    own = REASONING_FORMATS[name]
    marks = own.parts or own.marks
    codec.add_special_tokens([AddedToken(text, special=True) for text in (marks if tokens else ())])
    formats = choose_formats("", codec, name, name)
    content = f"{own.answer[0]}yes{own.answer[1]}{own.last}"
    for options, structured in (
        (ToolOptions(), Piece('"yes" | "no"')),
        (ToolOptions(tools=TOOLS), Piece('"yes" | "no"')),
        (ToolOptions(tools=TOOLS), None),
    ):
        request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
        form = formats.output_format(request, "")
        grammar = join(answer_pieces(form, formats, options, structured)).text
        for text in (content, "yes", f"{own.begin}so{own.end}{content}"):
            assert accepts(codec, grammar, text), (text, options)
            assert read(codec, formats, request, "", codec.encode(text).ids)[:2] == ("yes", [])
        assert accepts(codec, grammar, "perhaps") is (structured is None)


def known_at(state: GrammarState) -> tuple[tuple[int, ...], bool, bytes]:
    """Return a worker's state of an answer: forced tokens, whether it ends after them, and the mask."""
    follow(state)
    masks = state.place_masks(state.forced, 1)
    assert masks.wait(WITHIN_S)
    return state.forced, state.completes, masks.bits.tobytes()


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_worker_resumes_inside_a_call(model: str, choice: str, tmp_path: pathlib.Path) -> None:
    """After a preemption or a killed worker the state is rebuilt from the answer's tokens alone, at any position."""
    codec = codec_of(model)
    codec.save(str(tmp_path / "tokenizer.json"))
    formats = choose_formats("", codec, MODELS[model][0], "none")
    options = ToolOptions(tools=TOOLS[:1], choice=choice, parallel_tool_calls=False)
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = join(answer_pieces(formats.output_format(request, ""), formats, options, None)).text
    ids = max((written(codec, grammar, seed) or [] for seed in range(4)), key=len)
    assert ids
    compiler = GrammarCompiler.load(tmp_path, codec.get_vocab_size(), [EOS])
    try:
        going = result_of("a grammar", compiler.start(grammar, (), frozenset([EOS])))
        for end, token in enumerate(ids):
            again = result_of("a grammar", compiler.start(grammar, ids[:end], frozenset([EOS])))
            assert known_at(again) == known_at(going)
            going.take([token])
        follow(going)
        assert going.failure is None
    finally:
        compiler.close()


@pytest.mark.parametrize(("prompt", "opened"), [("", None), ("<think>", True), ("<think></think>", False)])
def test_reasoning_precedes_calls_and_structured_outputs(prompt: str, opened: bool | None) -> None:
    codec = codec_of("hermes with tokens")
    formats = choose_formats("", codec, "hermes", "qwen3")
    thoughts = []
    for options, structured in (
        (ToolOptions(tools=TOOLS, choice="required", parallel_tool_calls=False), None),
        (ToolOptions(), Piece('"yes" | "no"')),
        (ToolOptions(tools=TOOLS, parallel_tool_calls=False), Piece('"yes" | "no"')),
    ):
        request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
        form = formats.output_format(request, prompt)
        assert form is not None
        assert form.opened is opened
        grammar = join(answer_pieces(form, formats, options, structured)).text
        for seed in range(6):
            ids = written(codec, grammar, seed)
            if ids is None:
                continue
            content, calls, thought = read(codec, formats, request, prompt, ids)
            fit(calls)
            thoughts.append(thought)
            assert content in ("yes", "no") if not calls else content == ""
    assert any(thoughts) is (opened is not False)
    assert all(thoughts) is (opened is True)


@pytest.mark.parametrize("prompt", ["", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"])
@pytest.mark.parametrize("tools", ["openai", "none"])
def test_channel_messages_contain_reasoning_calls_and_structured_outputs(prompt: str, tools: str) -> None:
    codec = codec_of("gpt-oss")
    formats = choose_formats("", codec, tools, "openai_gptoss")
    begun, thoughts, contents = prompt.endswith("final<|message|>"), [], []
    shape, called = Piece('"yes" | "no"'), ToolOptions(tools=TOOLS, choice="required")
    asked = [(ToolOptions(), shape)]
    if tools != "none":
        asked += [(called, None), (ToolOptions(tools=TOOLS), shape), (ToolOptions(tools=TOOLS), None)]
    for options, structured in asked:
        request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
        form = formats.output_format(request, prompt)
        assert form is not None
        grammar = join(answer_pieces(form, formats, options, structured)).text
        for seed in range(6):
            ids = written(codec, grammar, seed)
            if ids is None:
                continue
            content, calls, thought = read(codec, formats, request, prompt, ids)
            fit(calls)
            thoughts.append(thought)
            contents.append(content)
            assert "<|" not in content
            if structured is not None and not calls:
                assert content in ("yes", "no")
            if options is called:
                assert len(calls) == 1
                assert begun or content == ""
    assert any(thoughts) is not begun
    assert all(thoughts) is ("analysis" in prompt)
    assert any(contents)


@pytest.mark.parametrize(
    ("choice", "strict", "left_out", "held"),
    [
        ("required", None, [], True),
        ("required", None, ["/properties/unit"], True),
        ("required", None, [""], False),
        ("required", True, [""], True),
        ("required", False, [], True),
        ("required", False, [""], False),
        ("named", False, [], True),
        ("named", False, ["/properties/unit"], True),
        ("auto", False, [], False),
        ("auto", None, [], True),
    ],
)
def test_strict_arguments_follow_the_schema(choice: str, strict: bool | None, left_out: list[str], held: bool) -> None:
    codec = codec_of("hermes")
    formats = choose_formats("", codec, "hermes", "none")
    options = ToolOptions(
        tools=(Tool(name="weather", parameters=json.dumps(SCHEMA), strict=strict),),
        choice=choice,
        name="weather" if choice == "named" else "",
    )
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = join(answer_pieces(formats.output_format(request, ""), formats, options, None, {0: left_out})).text
    matcher = LLMatcher(LLTokenizer(codec.to_str(), eos_token=EOS), grammar)
    text = '<tool_call>\n{"name": "weather", "arguments": {"other": 1}}\n</tool_call>'
    ids = codec.encode(text).ids
    assert (matcher.try_consume_tokens(ids) < len(ids)) is held


def test_special_token_marks_match_llguidance() -> None:
    """The rule for which added tokens have no text is llguidance's."""
    codec = byte_tokenizer()
    special, plain = ["[TOOL_CALLS]", "<think>"], ["</think>", "[ARGS]", "<|python_tag|>"]
    codec.add_special_tokens([AddedToken(text, special=True) for text in special])
    codec.add_tokens([AddedToken(text, special=False) for text in plain])
    tokenizer = LLTokenizer(codec.to_str(), eos_token=EOS)
    known = {**choose_formats("", codec, "mistral", "qwen3").mark_ids}
    known |= choose_formats("", codec, "llama3_json", "qwen3").mark_ids
    for text in (*special, *plain):
        assert tokenizer.is_special_token(codec.token_to_id(text)) is (text in known), text


ODD = 'say "hi" \\n \\\\ \t\x01 </tool> é😀 {"a": 1}'
PATCHES = [
    "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch",
    "*** Begin Patch\n*** Delete File: a b\n*** End Patch\n",
    f"*** Begin Patch\n*** Update File: a\n*** Move to: {ODD}\n@@\n-{ODD}\n+{ODD}\n {ODD}\n@@ {ODD}\n+\n"
    "*** End of File\n*** Add File: b\n+c\n*** End Patch\n",
]
NO_PATCHES = [
    "",
    "*** Begin Patch\n*** End Patch",
    "*** Begin Patch\n*** Add File: a\n*** End Patch",
    "*** Begin Patch\n*** Add File: a\\n+x\n*** End Patch",
    "*** Begin Patch\n*** Add File: \n+x\n*** End Patch",
    "*** Begin Patch\n*** Update File: a\nx\n*** End Patch",
    "*** Begin Patch\n*** Delete File: a\n*** End Patch\n\n",
    '*** Begin Patch\n*** Delete File: a\n*** End Patch"',
]
CLASSES = r"""
start: "=\"" A B | C "\n"i WORD? ("\x5c" "a".."c" "\u00e9")+
A: /[^a\n"]+"/ "x"i
B: /(?s:.)\p{L}\/\x22\S?[\t"]{1,2}\s/ | /q+(\d|\\\\)*q/
C: /("[^"]*")+/i
%import common.WORD
"""
# Grammars, each with an equivalent regular expression, texts that match, and texts that do not.
INPUTS: dict[str, tuple[str, str, str, list[str], list[str]]] = {
    "patch": (
        "lark",
        PATCH,
        PATCHED,
        PATCHES,
        NO_PATCHES,
    ),
    "classes": (
        "lark",
        CLASSES,
        r'="[^a\n"]+"[xX]((?s:.)[^\W\d_]/"\S?[\t"]{1,2}\s|q+(\d|\\\\)*q)|("[^"]*")+\n[a-zA-Z]*(\\[a-c]é)+',
        [
            '="b\t\\\\n"X\né/"\\"\t\n',
            '="\x01"x\\b/"" ',
            '="b"xqqq',
            '="b"xq1\\\\2q',
            '"a\n""\\"\n\\cé\\aé',
            '""\nab\\bé',
        ],
        [
            '="a"Xx/"""\n',
            '="b"x11/"""\n',
            '="b"xa/""""""\n',
            '="b"xq',
            '="b"xq1\\2q',
            '"a\n"" \n\\cé',
            '""\nab\\dé',
            '""\nab\\b',
        ],
    ),
    "a regex": (
        "regex",
        r'-?\d+(,"?[\w/]+"?\n?){0,2}',
        r'-?\d+(,"?[\w/]+"?\n?){0,2}',
        ["5", "-12", '7,ab,"c/d"\n', "7,a\n,b\n"],
        ["", "x", "5,", "7,a,b,c", "7,a,\n"],
    ),
}
HOSTILE = {
    "digits": "1" * 16_384,
    "attributes": "a[" * 8192,
    "classes": f"start: /{'[' * 16_000}/",
    "groups": f"start: /{'(' * 16_000}/",
    "imports": "%import common(" * 1000,
    "quotes": 'start: "' + "\\" * 16_000,
    "too long": " " * 16_385,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_grammar_is_read_once(kind: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert spelled(HOSTILE[kind], "tools") == HOSTILE[kind]
    if kind in ("classes", "groups", "imports", "too long"):
        with pytest.raises(InvalidRequest):
            spelled(HOSTILE[kind], "tools")


_IN_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CALL = {
    "glm45": "<tool_call>patch\n<arg_key>input</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="patch">\n<parameter name="input">%s</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=patch>\n<parameter=input>%s</parameter>\n</function>\n</seed:tool_call>",
    "deepseek_v3": _IN_DEEPSEEK % 'function<｜tool▁sep｜>patch\n```json\n{"input": %s}\n```',
    "deepseek_v31": _IN_DEEPSEEK % 'patch<｜tool▁sep｜>{"input": %s}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.patch:0<|tool_call_argument_begin|>"
    '{"input": %s}<|tool_call_end|><|tool_calls_section_end|>',
    "apertus": '<|tools_prefix|>[{"patch": {"input": %s}}]<|tools_suffix|>',
    "internlm": '<|action_start|><|plugin|>\n{"name": "patch", "parameters": {"input": %s}}\n<|action_end|>',
    "lfm2": "[patch(input=%s)]",
    "xlam": '<tool_call>[{"name": "patch", "arguments": {"input": %s}}]</tool_call>',
    "hy_v3": "<tool_calls>\n<tool_call>patch<tool_sep>\n<arg_key>input</arg_key>\n<arg_value>%s</arg_value>\n"
    "</tool_call>\n</tool_calls>",
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="patch">\n'
    '<steptml:parameter name="input">%s</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
    "<｜tool_calls_end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="patch">\n'
    '<｜DSML｜parameter name="input" string="true">%s'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="patch" index="1"<|sep|>'
    '<|open|>argument key="input" type="string"<|sep|>%s<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "minimax_m3": f'{MINIMAX}<tool_call>\n{MINIMAX}<invoke name="patch">{MINIMAX}<input>%s{MINIMAX}</input>'
    f"{MINIMAX}</invoke>\n{MINIMAX}</tool_call>",
    "granite": '<|tool_call|>[{"name": "patch", "arguments": {"input": %s}}]',
    "hunyuan_a13b": '<tool_calls>[{"name": "patch", "arguments": {"input": %s}}]</tool_calls>',
    "pythonic": "[patch(input=%s)]",
    "llama4_pythonic": "[patch(input=%s)]",
    "olmo3": "<function_calls>patch(input=%s)</function_calls>",
    "gemma4": '<|tool_call>call:patch{input:<|"|>%s<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:patch{input:<escape>%s<escape>}<end_function_call>",
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "patch", "parameters": '
    '{"input": %s}}\n]<|END_ACTION|>',
    "ernie45": '<tool_call>\n{"name": "patch", "arguments": {"input": %s}}\n</tool_call>',
    "phi4_mini_json": 'functools[{"name": "patch", "arguments": {"input": %s}}]',
    "hermes": '<tool_call>\n{"name": "patch", "arguments": {"input": %s}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=patch>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "patch", "parameters": {"input": %s}}',
    "mistral": '[TOOL_CALLS][{"name": "patch", "arguments": {"input": %s}}]',
    "openai": '<|channel|>commentary to=functions.patch <|constrain|>json<|message|>{"input": %s}',
}


# The text around a call does not depend on its input's grammar, nor the grammar on a format's marks.
FIRST_INPUT = next(iter(INPUTS))
INPUT_CASES = [
    *((name, kind, "required") for kind in INPUTS for name in MODELS if name not in ALIKE),
    *(pytest.param(name, FIRST_INPUT, "required", marks=pytest.mark.long) for name in ALIKE),
    *(pytest.param(name, FIRST_INPUT, "auto", marks=pytest.mark.long) for name in MODELS if name not in ALIKE),
]


@pytest.mark.parametrize(("model", "kind", "choice"), INPUT_CASES)
def test_the_input_of_a_custom_tool_follows_its_grammar(model: str, kind: str, choice: str) -> None:
    """A call can be written if its input matches the grammar, by the equivalent regular expression."""
    syntax, definition, meant, good, bad = INPUTS[kind]
    codec = codec_of(model)
    formats = choose_formats("", codec, MODELS[model][0], "none")
    tool = custom_tool("patch", "", ToolGrammar(syntax, definition))
    options = ToolOptions(tools=(*TOOLS, tool), choice=choice, parallel_tool_calls=False)
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = join(answer_pieces(formats.output_format(request, ""), formats, options, None)).text
    call = '[TOOL_CALLS]patch[ARGS]{"input": %s}' if model == "mistral v11" else CALL[MODELS[model][0]]
    for text in good + bad:
        own = bool(re.fullmatch(meant, text))
        assert own is (text in good), text
        plain = MODELS[model][0] in (*XML_FORMS, "gemma4", "functiongemma")
        written = call % (text if plain else json.dumps(text, ensure_ascii=False))
        assert accepts(codec, grammar, written) is own, (text, written)
        if own:
            content, calls, _ = read(codec, formats, request, "", codec.encode(written).ids)
            ((name, arguments),) = calls
            assert (content, name, InputText().push(arguments)) == ("", "patch", text)
