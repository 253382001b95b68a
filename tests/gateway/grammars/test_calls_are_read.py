"""Every text that a call grammar allows parses into calls whose arguments are objects, in every format."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pillion.gateway.formats.model_formats import choose_formats
from pillion.gateway.formats.tool_formats import TOOL_FORMATS
from pillion.types import ChatMessage, GenerateRequest, Tool, ToolOptions
from tests.support.examples import examples
from tests.support.written_calls import CASES, MODELS, call_grammar, codec_of, read, written

KEYS = (
    "city",
    "a_b",
    "größe",
    "a b",
    'a"b',
    "a<b",
    "a>b",
    "x=y",
    "line\nend",
    "",
    "a-b",
    "$ref",
    "k:",
    "item",
    "/a",
    "<",
)
TEXTS = (
    "red",
    "",
    "a\nb",
    " x ",
    'say "hi"',
    "</parameter>",
    '<|"|>',
    "]",
    "5",
    "true",
    "null",
    "[1]",
    "\\n",
)
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [
            {},
            {"type": "string", "maxLength": 3},
            {"type": "integer", "minimum": -5, "maximum": 99},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"], "maxLength": 2},
            {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
            {"$ref": "#/$defs/leaf"},
            {"const": {"a": [1, None]}},
        ]
    ),
    st.lists(st.sampled_from([*TEXTS, 1, 2.5, None, True]), min_size=1, max_size=3, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.dictionaries(st.sampled_from(KEYS), inner, min_size=1, max_size=2).map(
            lambda properties: {"type": "object", "properties": properties, "additionalProperties": False}
        ),
    ),
    max_leaves=3,
)


@st.composite
def members(draw: st.DrawFn) -> dict[str, Any]:
    """Draw keywords that constrain an object's members, or do not."""
    properties = draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
    made: dict[str, Any] = {"properties": properties} if properties else {}
    if needed := draw(st.lists(st.sampled_from(sorted(properties) or ["city"]), unique=True, max_size=2)):
        made["required"] = needed
    if draw(st.booleans()):
        made["additionalProperties"] = draw(st.sampled_from([True, False, {}, {"type": "integer"}]))
    return made


@st.composite
def roots(draw: st.DrawFn) -> dict[str, Any]:
    """Draw schemas of tool arguments as tool servers send them: few state that arguments are an object."""
    made = draw(members())
    made |= draw(st.sampled_from([{}, {}, {"type": "object"}, {"type": ["object", "null"]}, {"type": "array"}]))
    made |= draw(st.sampled_from([{}, {"title": "T"}, {"$schema": "http://json-schema.org/draft-07/schema#"}]))
    word = draw(st.sampled_from(["", "", "anyOf", "allOf", "oneOf", "$ref", "enum", "const"]))
    if word in ("anyOf", "allOf", "oneOf"):
        made[word] = draw(st.lists(members(), min_size=1, max_size=2))
    elif word in ("enum", "const"):
        made = {"enum": [{"city": "a"}, 5]} if word == "enum" else {"const": 5}
    elif word:
        made["$ref"] = "#/$defs/root"
    return {**made, "$defs": {"leaf": {"enum": ["red", 5]}, "root": draw(members())}}


def test_every_tool_format_is_covered() -> None:
    assert {parser for parser, _, _ in MODELS.values()} | {"generic"} == {*TOOL_FORMATS}


@pytest.mark.parametrize("model", CASES)
@given(schema=roots(), seed=st.integers(0, 2**16), choice=st.sampled_from(["required", "named", "auto"]))
@example({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, 0, "required")
@example({"not": {}}, 3, "required")
@example({"title": "T", "anyOf": [{"required": ["city"]}, {"additionalProperties": {"type": "null"}}]}, 1, "named")
@settings(max_examples=examples(80))
def test_every_text_of_a_call_grammar_parses_as_calls(
    model: str, schema: dict[str, Any], seed: int, choice: str
) -> None:
    codec = codec_of(model)
    formats = choose_formats("", codec, MODELS[model][0], "none")
    options = ToolOptions(
        tools=(Tool(name="get-it.v2", parameters=json.dumps(schema)),), choice=choice, name="get-it.v2"
    )
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    grammar = call_grammar(codec, formats, options)
    ids = written(codec, grammar.text, seed)
    if ids is None:
        return
    content, calls, _ = read(codec, formats, request, "", ids)
    assert choice == "auto" or (content == "" and calls)
    assert {name for name, _ in calls} <= {"get-it.v2"}
    for _, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        # Constraints that are not listed as left out are enforced.
        assert grammar.left_out or schema == {"not": {}} or jsonschema.Draft202012Validator(schema).is_valid(value), (
            value
        )
