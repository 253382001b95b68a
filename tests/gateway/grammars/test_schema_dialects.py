"""Schemas of every draft and dialect are normalized to equivalent ones; unsupported parts are left out and named."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from pillion.errors import InvalidRequest, SchemaViolation
from pillion.gateway.formats.model_formats import choose_formats
from pillion.gateway.grammars.json_schema import plain, relax
from pillion.types import ChatMessage, GenerateRequest, Tool, ToolOptions
from tests.support.random_answers import allows, matcher_of
from tests.support.written_calls import MODELS, accepts, call_grammar, codec_of, read, written

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
PASSWORD = r"^(?=.*[a-z])(?=.*\d).{4,}$"
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}
COLOUR = {"enum": ["red"]}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# A schema, texts that fit it, texts that do not.
EQUAL: dict[str, tuple[Any, list[str], list[str]]] = {
    "upper case": ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, ['{"a": ""}'], ['{"a": 1}', "[]"]),
    "Python's types": ({"type": "list", "items": {"type": "float"}}, ["[1.5]"], ['["a"]']),
    "any": ({"type": "array", "items": {"type": "any"}}, ["[1]", '["a"]'], ["1"]),
    "nullable": ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
    "draft 4's bounds": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    "bounds that include": ({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, ["3"], ["4"]),
    "draft 3's required": (
        {"type": "object", "properties": {"a": {"type": "null", "required": True}}},
        ['{"a": null}'],
        ["{}"],
    ),
    "draft 3's multiples": ({"type": "integer", "divisibleBy": 4}, ["8"], ["9"]),
    "no other properties": ({**an_object(a=COLOUR), "additionalProperties": {"not": {}}}, ['{"a": "red"}'], []),
    "never": ({"type": "object", "properties": {"a": {"not": {}}}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
    "counts as text": ({"type": "array", "minItems": "1", "maxItems": 2.0}, ["[1, 2]"], ["[]", "[1, 2, 3]"]),
    "null for a keyword": ({"type": "integer", "minimum": None, "enum": None, "pattern": None}, ["5"], ['"a"']),
    "an empty list of properties": ({"type": "object", "properties": [], "required": []}, ['{"a": 1}'], ["[]"]),
    "a number's format": ({"type": "integer", "format": "int64"}, ["5"], ["5.5"]),
    "64 bits": ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63), "-1"]),
    "a power of two": ({"type": "integer", "maximum": 2**60}, [str(2**60)], [str(2**60 + 1)]),
    "Decimal": ({"type": "string", "pattern": DECIMAL}, ['"1.5"', '"-0"'], ['"-"', '""', '"."', '"1a"']),
    "two looks ahead": ({"type": "string", "pattern": PASSWORD}, ['"abc1"'], ['"abcd"', '"1234"', '"a1"']),
    "no blanks alone": ({"type": "string", "pattern": r"^(?!\s*$).+"}, ['" a"'], ['"  "', '""']),
    "names of text": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": COLOUR},
        ['{"a": "red"}'],
        ['{"a": 1}'],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": COLOUR},
        ['{"xy": "red"}'],
        ['{"y": "red"}', '{"x": 1}'],
    ),
    "names of a list": (
        {"type": "object", "propertyNames": {"enum": ["x"]}, "additionalProperties": COLOUR},
        ['{"x": "red"}', "{}"],
        ['{"y": "red"}', '{"x": 1}'],
    ),
    "nothing unevaluated": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "what demands nothing": ({"type": "null", "uniqueItems": False, "then": {}, "minContains": 2}, ["null"], ["1"]),
    "an anchor": ({"$defs": {"x": {"$anchor": "c", **COLOUR}}, "$ref": "#c"}, ['"red"'], ["1"]),
    "an id": ({"$defs": {"x": {"$id": "http://a/c", **COLOUR}}, "$ref": "http://a/c"}, ['"red"'], ["1"]),
    "a dynamic reference": ({"$defs": {"x": {"$dynamicAnchor": "c", **COLOUR}}, "$dynamicRef": "#c"}, ['"red"'], ["1"]),
    "OpenAPI's components": (
        {"$ref": "#/components/schemas/C", "components": {"schemas": {"C": {"type": "STRING"}}}},
        ['"a"'],
        ["1"],
    ),
    "nested definitions": (
        an_object(a={"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}, b={"$ref": "#/$defs/Node"}),
        ['{"a": {"next": {}}, "b": {}}'],
        ['{"a": {"next": 1}, "b": {}}', '{"a": {}, "b": 1}'],
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_an_equivalent_schema_is_enforced_exactly(name: str) -> None:
    schema, good, bad = EQUAL[name]
    matcher = matcher_of(schema)
    assert matcher is not None
    assert [text for text in good if not allows(matcher, text)] == []
    assert [text for text in bad if allows(matcher, text)] == []


# A property's schema, the part left out, the rest.
LEFT_OUT: dict[str, tuple[Any, list[str], Any]] = {
    "a look ahead": ({"type": "string", "pattern": "^(?!abc)", "maxLength": 5}, ["/pattern"], {"maxLength": 5}),
    "a dangling reference": ({"type": "string", "$ref": "#/$defs/none"}, ["/$ref"], {"type": "string"}),
    "another document": ({"$ref": "https://example.com/a.json"}, ["/$ref"], {}),
    "a type": ({"type": "foo", "minimum": 3}, ["/type"], {"minimum": 3}),
    "more than 64 bits": ({"type": "integer", "minimum": 0, "maximum": 2**64}, ["/maximum"], {"minimum": 0}),
    "a value of 64 bits": ({"enum": [2**60 + 1, "a"]}, ["/enum"], {"type": ["integer", "string"]}),
    "a keyword": ({"type": "array", "uniqueItems": True, "maxItems": 2}, ["/uniqueItems"], {"maxItems": 2}),
    "a format": ({"type": "string", "format": "zip", "minLength": 1}, ["/format"], {"minLength": 1}),
    "a keyword's value": ({"type": "integer", "minimum": "x", "maximum": 5}, ["/minimum"], {"maximum": 5}),
    "no schema": ("string", [""], {}),
    "a choice": ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ["/oneOf"], {"anyOf": [{"type": "string"}, True]}),
}


@pytest.mark.parametrize("model", ["hermes", "llama 4"])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_an_unsupported_place_is_named_and_the_rest_enforced(name: str, model: str) -> None:
    value, places, rest = LEFT_OUT[name]
    schema = {"properties": {"other": COLOUR, "a": value}, "required": ["other", "a"]}
    codec = codec_of(model)
    formats = choose_formats("", codec, MODELS[model][0], "none")
    options = ToolOptions(tools=(Tool(name="f", parameters=json.dumps(schema)), Tool(name="g")), choice="required")
    made = call_grammar(codec, formats, options)
    assert made.left_out == tuple(("tools.tools[0].parameters", f"/properties/a{place}") for place in places)
    for one in ("a", "abcabcabc", 7, -1, 2**65, [1, 1], [1, 2, 3], ""):
        text = {"hermes": '<tool_call>\n{"name": "f", "arguments": {"other": %s, "a": %s}}\n</tool_call>'}.get(
            model, "[f(other=%s, a=%s)]"
        )
        assert not accepts(codec, made.text, text % ('"blue"', json.dumps(one)))
        kinds = value.get("type") if isinstance(value, dict) and value.get("type") != "foo" else None
        held = {**({"type": kinds} if kinds else {}), **rest}
        fits = jsonschema.Draft202012Validator(held).is_valid(one)
        assert accepts(codec, made.text, text % ('"red"', json.dumps(one))) is fits, one
    if model != "hermes":
        return
    strict = ToolOptions(tools=(Tool(name="f", parameters=json.dumps(schema), strict=True),), choice="required")
    with pytest.raises(InvalidRequest) as refused:
        call_grammar(codec, formats, strict)
    violation = refused.value.violations[0]
    assert isinstance(violation, SchemaViolation)
    assert (violation.field, violation.place) == ("tools.tools[0].parameters", f"/properties/a{places[0]}")


@pytest.mark.parametrize("model", ["hermes", "glm", "gemma 4", "llama 4"])
def test_inherited_properties_apply_to_arguments(model: str) -> None:
    base = {"type": "object", "properties": {"n": {"type": "INTEGER"}}, "required": ["n"]}
    schema = {
        "$defs": {"base": base, "middle": {"allOf": [{"$ref": "#/$defs/base"}, {"title": "Middle"}]}},
        "allOf": [{"$ref": "#/$defs/middle"}, {"properties": {"kind": COLOUR}, "required": ["kind"]}],
    }
    codec = codec_of(model)
    formats = choose_formats("", codec, MODELS[model][0], "none")
    options = ToolOptions(tools=(Tool(name="f", parameters=json.dumps(schema), strict=True),), choice="named", name="f")
    made = call_grammar(codec, formats, options)
    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    for seed in range(4):
        ids = written(codec, made.text, seed)
        assert ids is not None
        content, [(_, arguments)], _ = read(codec, formats, request, "", ids)
        found = json.loads(arguments)
        assert (content, found["kind"], type(found["n"])) == ("", "red", int)


JUNK: list[Any] = [None, True, 5, -1.5, "x", [], [1], {}, {"a": 1}, [{"$ref": "#"}], "#/x", {"not": {}}]
WORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "items", "enum"),
    *(
        "const",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "$ref",
        "$id",
        "$anchor",
        "$defs",
        "$schema",
        "$dynamicRef",
        "pattern",
    ),
    *("format", "minimum", "exclusiveMinimum", "maximum", "multipleOf", "minLength", "maxItems", "minProperties"),
    *("nullable", "prefixItems", "unevaluatedProperties", "additionalItems", "if", "then", "contains", "title"),
)


JUNK_CASES = [
    pytest.param(model, strict, marks=() if strict is None and model == "glm" else pytest.mark.long)
    for model in ("hermes", "glm", "gemma 4", "llama 4", "minimax m3")
    for strict in (None, True)
]


@pytest.mark.parametrize(("model", "strict"), JUNK_CASES)
def test_any_value_of_a_keyword_is_handled(model: str, strict: bool | None) -> None:
    """Refuse an invalid keyword for a strict tool; leave it out for others."""
    codec = codec_of(model)
    formats = choose_formats("", codec, MODELS[model][0], "none")
    for n, (word, junk) in enumerate(itertools.product(WORDS, JUNK)):
        inner = {word: junk}
        schema = inner if (n + len(model)) % 2 else {"properties": {"a": inner}, "required": ["a"]}
        tool = Tool(name="f", parameters=json.dumps(schema), strict=strict)
        try:
            call_grammar(codec, formats, ToolOptions(tools=(tool,), choice="required"))
        except InvalidRequest:
            assert strict, schema


def test_leaving_parts_out_always_ends() -> None:
    """For each unsupported schema and position, leaving parts out gives a supported one."""
    hostile: list[Any] = [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#/allOf/0"}]},
        {"patternProperties": {"(?=a)": {}}, "additionalProperties": False},
        {"not": {"type": "null"}, "if": {}, "contains": {}, "$schema": "urn:x", "x-guidance": {}},
        {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"], "minProperties": 9},
        {"prefixItems": [5], "items": False, "additionalItems": {}, "type": ["array", "x"]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "anyOf": [{"$ref": "#/$defs/a"}]},
    ]
    for schema in hostile:
        rest, left_out = relax(plain(schema))
        assert left_out
        assert matcher_of(rest) is not None, (schema, rest)
        assert relax(plain(schema), ["", "/nothing", "/properties/a/x"])[0] == {}
