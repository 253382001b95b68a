"""No answer to an accepted schema reaches a state without a continuation.

Random answers to random schemas, whose names, patterns, bounds and references often exclude each other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from decimal import InvalidOperation
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from pillion.errors import InvalidRequest
from pillion.gateway.grammars.answer_grammar import join
from pillion.gateway.grammars.grammar_worker import empty_part, trial
from pillion.gateway.grammars.json_schema import plain, relax, written
from pillion.gateway.grammars.json_strings import finite_matches
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.rules.grammar_limits import PARSER_LIMITS
from pillion.types import StructuredOutputs
from tests.support.examples import examples
from tests.support.random_answers import TOKENIZER, allows, answer, exact, matcher_of, structured_matcher

NAMES = ("a", "b", "ab", "abc", "score", "x1", "y")
PATTERNS = (
    *("^score$", "^a$", "^(a|b)$", "^a", "b", "^[a-c]$", "^x[0-9]$", "^.*$", "^", "^[a-c]{1,2}$", "^y?$", "^[^a]$"),
    *("1", "^(?:ab?|y)$", r"^[^\s\S]$", r"^x\d$|^score$"),
)
WALKS = 8
NUMBER = {"type": "number"}


def leaf(rng: random.Random) -> Any:
    low = rng.randint(-3, 6)
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(0, 3)},
        lambda: {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": rng.randint(0, 3)},
        lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randint(-1, 3)},
        lambda: {
            "type": rng.choice(["integer", "number"]),
            rng.choice(["minimum", "exclusiveMinimum"]): low / rng.choice([1, 10]),
            rng.choice(["maximum", "exclusiveMaximum"]): low + rng.random() * 2,
            "multipleOf": rng.choice([2, 3, 0.75, 1.5, 0.1, 0.3, 5, 0.5]),
        },
        lambda: {"enum": rng.sample([1, 2, "a", "b", None, True, 2.5, "score"], rng.randint(1, 3))},
        lambda: {"enum": rng.sample([1, 2, "a", None], 2), "type": rng.choice(["string", "integer", "null"])},
        lambda: {"const": rng.choice([1, "a", None, {"a": 1}, [1]])},
        lambda: rng.choice([False, True, {}, {"type": "boolean"}, {"type": ["string", "null"]}]),
        lambda: {"format": rng.choice(["date", "ipv4"]), "type": "string", "maxLength": rng.randint(4, 12)},
    )
    return rng.choice(kinds)()


def node(rng: random.Random, depth: int) -> Any:
    kind = rng.random() if depth > 0 else 0.0
    if kind < 0.3:
        return leaf(rng)
    if kind < 0.7:
        return an_object(rng, depth)
    if kind < 0.78:
        return {"type": "array", "items": node(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2}
    if kind < 0.82:
        return {"type": "array", "prefixItems": [node(rng, depth - 1), leaf(rng)], "items": rng.choice([False, True])}
    if kind < 0.95:
        return {rng.choice(["allOf", "allOf", "anyOf"]): [node(rng, depth - 1), node(rng, depth - 1)]}
    return {"$ref": f"#/$defs/{rng.choice('pq')}"}


def an_object(rng: random.Random, depth: int) -> Any:
    def at_times(share: float, key: str, value: Callable[[], Any]) -> dict[str, Any]:
        return {key: value()} if rng.random() < share else {}

    def named(names: tuple[str, ...], most: int) -> dict[str, Any]:
        return {name: node(rng, depth - 1) for name in rng.sample(names, rng.randint(1, most))}

    return {
        "type": "object",
        **at_times(0.7, "properties", lambda: named(NAMES, 3)),
        **at_times(0.6, "patternProperties", lambda: named(PATTERNS, 2 if rng.random() < 0.3 else 1)),
        **at_times(0.6, "additionalProperties", lambda: rng.choice([False, False, True, leaf(rng)])),
        **at_times(0.4, "required", lambda: rng.sample(NAMES, rng.randint(1, 2))),
        **at_times(0.08, "minProperties", lambda: rng.randint(0, 2)),
        **at_times(0.08, "maxProperties", lambda: rng.randint(0, 3)),
        **at_times(0.15, "allOf", lambda: [an_object(rng, depth - 1)] if depth else [True]),
        **at_times(0.02, "propertyNames", lambda: {"pattern": rng.choice(PATTERNS)}),
        **at_times(0.02, "not", lambda: leaf(rng)),
        **at_times(0.02, "dependentRequired", lambda: {"a": ["b"]}),
    }


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**64))
def test_a_random_answer_never_gets_stuck(seed: int) -> None:
    rng = random.Random(seed)
    schema = {"$defs": {"p": an_object(rng, 1), "q": node(rng, 1)}, **an_object(rng, 2)}
    matcher = matcher_of(schema)
    if matcher is None or refusal(json=json.dumps(schema)):
        return
    validator = jsonschema.Draft202012Validator(exact(json.dumps(schema)))
    for walk in range(WALKS):
        text = answer(matcher.deep_copy(), random.Random(walk))
        # jsonschema cannot divide decimals of hundreds of digits.
        with suppress(InvalidOperation):
            assert text is None or validator.is_valid(exact(text)), (schema, text)


def refusal(**structured: Any) -> str:
    """Return why the grammar checker refuses a structure; "" if it is accepted."""
    grammar = join([structured_piece(StructuredOutputs(**structured))]).text
    limits = LLParserLimits(**PARSER_LIMITS)
    return trial(TOKENIZER, limits, grammar) or empty_part(TOKENIZER, limits, grammar)


SCORE = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
OF_SCORE = {"patternProperties": {"^score$": {"type": "integer"}}, "additionalProperties": False}
STUCK: dict[str, Any] = {
    "a pattern of a listed name": SCORE | OF_SCORE,
    "of names in another schema": {"allOf": [SCORE, OF_SCORE]},
    "of a required name": {"required": ["score"], "type": "object", **OF_SCORE},
    "within": {"type": "object", "properties": {"deep": SCORE | OF_SCORE}, "required": ["deep"]},
    "a pattern of no name": SCORE | {"patternProperties": {r"^[^\s\S]$": {}}, "additionalProperties": False},
    "no integer between": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "n": {"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 0.75},
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    "no number behind a bound": {
        "type": "object",
        "properties": {"a": {"const": 1}, "n": NUMBER | {"exclusiveMinimum": 0.3, "maximum": 0.35, "multipleOf": 0.1}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", STUCK)
def test_unsatisfiable_alternatives_are_left_out(name: str) -> None:
    matcher = matcher_of(STUCK[name])
    assert matcher is not None
    validator = jsonschema.Draft202012Validator(STUCK[name])
    texts = [answer(matcher.deep_copy(), random.Random(seed)) for seed in range(24)]
    assert all(text is None or validator.is_valid(json.loads(text)) for text in texts)
    assert any(texts)


@pytest.mark.parametrize(
    ("bounds", "fits", "others"),
    [
        ({"exclusiveMinimum": 2.0, "exclusiveMaximum": 2.8}, ["2.1", "2.79"], ["2", "2.0", "2.8"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "-0"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.1", "-0.5"], ["0", "-0", "-0.0"]),
        ({"exclusiveMaximum": -3, "minimum": -3.5}, ["-3.1", "-3.5"], ["-3", "-3.0"]),
        ({"exclusiveMinimum": 2, "type": "integer"}, ["3", "10"], ["2"]),
    ],
)
def test_an_exclusive_bound_is_never_written(bounds: dict[str, Any], fits: list[str], others: list[str]) -> None:
    matcher = matcher_of(NUMBER | bounds)
    assert matcher is not None
    assert [text for text in fits + others if allows(matcher, text)] == fits


def test_a_multiple_of_that_may_exclude_all_integers_is_refused() -> None:
    schema = {"allOf": [{"type": "integer", "minimum": 1, "maximum": 2}, {"type": "number", "multipleOf": 0.75}]}
    with pytest.raises(InvalidRequest, match=r"at /allOf/1/multipleOf: in a schema with integers"):
        structured_matcher(StructuredOutputs(json=json.dumps(schema)))
    schema["allOf"][1]["multipleOf"] = 0.25
    assert matcher_of(schema) is not None


NOTHING_WITHIN = {"begin": "<f>", "end": "</f>", "content": {"type": "regex", "pattern": "[^\\x00-\\x{10FFFF}]"}}


@pytest.mark.parametrize(
    ("structured", "part"),
    [
        ({"grammar": 'start: "a" B | "c"\nB: /x/ & /y/\n'}, "B"),
        ({"grammar": 'start: "a" | "c" /[^\\s\\S]/\n'}, r"/[^\s\S]/"),
        (
            {
                "structural_tag": json.dumps(
                    {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [NOTHING_WITHIN]}}
                )
            },
            r"/[^\x00-\x{10FFFF}]/",
        ),
    ],
)
def test_an_unsatisfiable_part_is_refused(structured: dict[str, str], part: str) -> None:
    limits = LLParserLimits(**PARSER_LIMITS)
    grammar = join([structured_piece(StructuredOutputs(**structured))]).text
    assert empty_part(TOKENIZER, limits, grammar) == f"no text fits {part}"
    assert not refusal(grammar='start: "a" B\nB: /[a-z]+/ & ~/b/\n')


def test_patterns_with_few_matches_are_enumerated() -> None:
    found = {
        pattern: finite_matches(pattern, 16, 20)
        for pattern in (
            "^a|b$",
            "a",
            "^a+$",
            "^a$b",
            "^(^a)$",
            "^(?i)a$",
            "^.$",
            "(a$",
            "^a)$",
            "^[^a]$",
            "^\\w$",
            "^\\bb$",
        )
    }
    assert set(found.values()) == {None}
    few = {
        "^(a|b)$": "a b",
        "^a$|^bc$": "a bc",
        "^(?:ab){2}$": "abab",
        "^(x(b|c)?)$": "x xb xc",
        "^[a-c]{1,2}$": "a aa ab ac b ba bb bc c ca cb cc",
        r"^\u0041\$$": "A$",
        r"^x[\d]?$": "x x0 x1 x2 x3 x4 x5 x6 x7 x8 x9",
    }
    assert {pattern: " ".join(sorted(finite_matches(pattern, 16, 20) or ())) for pattern in few} == few
    assert finite_matches("^[]$", 16, 20) == finite_matches(r"^[^\s\S]$", 16, 20) == frozenset()
    # Repetitions and alternatives are counted before they are expanded.
    assert finite_matches("^" + "(" * 9 + "a" + "{9999})" * 9 + "$", 10**6, 10**6) is None


def test_unsupported_parts_of_a_schema_can_be_left_out() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "uri-reference", "not": {"const": "x"}},
            "b": {"oneOf": [{"type": "string", "format": "date"}, {"type": "string"}]},
            "c": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        },
        "required": ["a", "c"],
        "minProperties": 9,
        "if": {"required": ["b"]},
    }
    assert matcher_of(schema) is None
    rest, left_out = relax(plain(schema), ["/properties/b/oneOf"])
    assert rest == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"anyOf": [{"type": "string", "format": "date"}, {"type": "string"}]},
            "c": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["a", "c"],
    }
    assert left_out == [
        *("/properties/b/oneOf", "/if", "/properties/a/format", "/properties/a/not", "/properties/c/uniqueItems"),
        "/minProperties",
    ]
    assert matcher_of(rest) is not None
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert relax(plain(deep)) == ({}, [""])


def test_rewriting_a_schema_preserves_property_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "patternProperties": {"^[abc]$": NUMBER, "^x": {}}}
    made = written(schema | {"required": ["c"]})
    assert list(made["properties"]) == ["b", "a", "c"]
    assert made["properties"]["a"] == {"allOf": [{}, NUMBER]}
    assert made["properties"]["c"] == NUMBER
    assert list(made["patternProperties"]) == ["^x"]
