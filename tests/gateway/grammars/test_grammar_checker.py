"""Grammars are compiled in a sandbox: bounded time and memory for client input, and errors that name the place."""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import pytest

from lab.testbed.conditions import loop_turns
from lab.testbed.toy_tokenizer import byte_tokenizer, write_tokenizer
from pillion.errors import InvalidRequest, Overloaded, Unavailable
from pillion.gateway.grammars import grammar_checker as module
from pillion.gateway.grammars.answer_grammar import JoinedGrammar, join
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.types import StructuredOutputs
from tests.support.processes import NewChildren

FIELD = "sampling.structured_outputs"


@pytest.fixture
def children() -> NewChildren:
    return NewChildren()


@pytest.fixture
async def checker(children: NewChildren, tmp_path: pathlib.Path):
    made = GrammarChecker(write_tokenizer(tmp_path / "m", byte_tokenizer()) / "tokenizer.json", 300, (257,))
    yield made
    await made.aclose()


def grammar_of(**structured: Any) -> JoinedGrammar:
    return join([structured_piece(StructuredOutputs(**structured))])


async def refusal(checker: GrammarChecker, **structured: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(grammar_of(**structured))
    return caught.value.violations[0].field.removeprefix(f"{FIELD}."), caught.value.violations[0].description


STRING = {"type": "string"}
PLACES: dict[str, tuple[Any, str]] = {
    "a keyword's value": ({"properties": {"age": {"minimum": "x"}}}, "/properties/age/minimum"),
    "a type": ({"properties": {f"p{n}": {"type": "foo" if n == 77 else "null"} for n in range(99)}}, "/properties/p77"),
    "a format": ({"items": {"anyOf": [STRING, {"type": "string", "format": "zip"}]}}, "/items/anyOf/1/format"),
    "a pattern": ({"prefixItems": [True, {"pattern": "(?=a)b"}]}, "/prefixItems/1/pattern"),
    "a reference": ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "/properties/a/$ref"),
    "what is referred to": (
        {
            "$defs": {"a": {"items": {"$ref": "#/$defs/b/c"}}, "b/c": {"type": 3}},
            "properties": {"x": {"$ref": "#/$defs/a"}},
        },
        "/$defs/a/items/$ref",
    ),
    "after references": (
        {
            "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"maxLength": -1}},
            "properties": {"x": {"$ref": "#/$defs/a"}},
        },
        "/$defs/b/maxLength",
    ),
    "an empty range": (
        {
            "type": "object",
            "allOf": [True, {"properties": {"n": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["n"]}],
        },
        "/allOf",
    ),
    "a choice of one": ({"additionalProperties": {"oneOf": [STRING, {"minLength": 3}]}}, "/additionalProperties/oneOf"),
    "a keyword that is unknown": ({"properties": {"a/b": {"uniqueItems": True}}}, "/properties/a~1b/uniqueItems"),
    "a large integer": ({"enum": [1, {"a": [2**60 + 1]}]}, "/enum"),
    "names that may repeat": ({"type": "object", "minProperties": 3, "required": ["a"]}, "/minProperties"),
    "a reference to itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "/$ref"),
    "a reference that needs itself": (
        {"properties": {"x": {"type": "object", "properties": {"y": {"$ref": "#/properties/x"}}, "required": ["y"]}}},
        "/properties/x/properties/y/$ref",
    ),
    "a list of itself": ({"type": "array", "items": {"allOf": [{"$ref": "#"}]}, "minItems": 1}, "/items/allOf/0/$ref"),
    "a reference to what is no schema": ({"x": ["a"], "allOf": [{"$ref": "#/x"}]}, "/allOf/0/$ref"),
    "a reference to another document": ({"allOf": [{"$ref": "https://example.com/a.json"}]}, "/allOf/0/$ref"),
    "an integer of more than 64 bits": ({"items": {"type": "integer", "maximum": 2**64}}, "/items/maximum"),
    "an escape of Rust's": ({"items": {"pattern": r"\pC"}}, "/items/pattern"),
    "a flag of Rust's": ({"items": {"pattern": "(?x)a b"}}, "/items/pattern"),
    "a NUL": ({"items": {"pattern": r"^\x00$"}}, "/items/pattern"),
    "a name of controls": ({"patternProperties": {"^[\x01\x02]": True}}, "/patternProperties"),
    "a range without order": ({"patternProperties": {"[z-a]": True}}, "/patternProperties"),
    "a text beside patterns of names": (
        {"properties": {"a": {"enum": [["\x1b"]]}}, "patternProperties": {"b": True}},
        "/properties/a/enum",
    ),
    "a name beside patterns of names": ({"items": {"required": ["\x00"], "patternProperties": {"b": True}}}, "/items"),
    "how it is written": ({"x-guidance": {"lenient": True}}, "/x-guidance"),
}


async def test_a_refused_schema_names_the_place(checker: GrammarChecker, children: NewChildren) -> None:
    for name, (schema, place) in PLACES.items():
        field, text = await refusal(checker, json=json.dumps(schema))
        assert (field, text.partition(": ")[0].startswith(f"at {place}")) == ("json", True), (name, text)
    (child,) = children()
    assert child.is_running()


async def test_regex_and_grammar_refusals_name_their_field(checker: GrammarChecker) -> None:
    assert (await refusal(checker, regex="a(b"))[0] == "regex"
    field, text = await refusal(checker, grammar='start: "a" other\n')
    assert (field, "other" in text) == ("grammar", True)
    assert (await refusal(checker, grammar="start: start\n"))[0] == "grammar"
    await checker.check(grammar_of(choice=("a",)))
    await checker.check(grammar_of(json_object=True))


async def test_gbnf_becomes_lark(checker: GrammarChecker) -> None:
    structured = await checker.lark(StructuredOutputs(grammar='root ::= "a" [0-9]+'))
    assert "start:" in str(structured.grammar)
    await checker.check(join([structured_piece(structured)]))
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.grammar: not GBNF"):
        await checker.lark(StructuredOutputs(grammar="root ::= ["))
    untouched = StructuredOutputs(grammar='start: "a"')
    assert await checker.lark(untouched) is untouched


async def test_a_cached_grammar_needs_no_process(checker: GrammarChecker, children: NewChildren) -> None:
    good, bad = grammar_of(regex="a|b"), grammar_of(regex="(")
    assert not children(), "it starts with the first grammar"
    answers = await asyncio.gather(*(checker.check(good) for _ in range(9)), return_exceptions=True)
    assert answers == [None] * 9
    with pytest.raises(InvalidRequest) as first:
        await checker.check(bad)
    await checker.aclose()
    await checker.check(good)
    with pytest.raises(InvalidRequest) as second:
        await checker.check(bad)
    assert first.value.violations == second.value.violations
    assert not children()


async def test_the_cache_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_GRAMMARS", 3)
    for n in range(6):
        await checker.check(grammar_of(regex=f"a{n}"))
    assert len(checker._cache) == 3


HOSTILE: dict[str, dict[str, Any]] = {
    "nested arrays": {"json": "[" * 60000 + "]" * 60000},
    "nested schemas": {"json": '{"items":' * 9000 + "{}" + "}" * 9000},
    "a nested value": {"json": '{"const":' + "[" * 600 + "]" * 600 + "}"},
    "nested groups": {"regex": "(" * 30000 + "a" + ")" * 30000},
    "nested rules": {"grammar": "start: " + "(" * 60000 + '"a"' + ")" * 60000},
    "many properties that may be left out": {
        "json": json.dumps({"properties": {f"p{n}": {"type": "null"} for n in range(1500)}})
    },
    "alternatives multiplied": {
        "json": json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"a{n}_{m}": {}}} for m in range(12)]} for n in range(6)]}
        )
    },
    "an endless reference": {"json": json.dumps({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})},
    "rules without words": {"grammar": "start: a\na: b\nb: a"},
}
HARMLESS: dict[str, dict[str, Any]] = {
    "repetitions": {"regex": "(a|b){1,1000000}"},
    "an ambiguous expression": {"regex": "(x+x+)+y(a*)*"},
    "many words": {"json": json.dumps({"enum": [f"word number {n}" for n in range(4000)]})},
    "many choices": {"choice": tuple(f"choice number {n}" for n in range(4096))},
    "many items": {"json": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10**9})},
    "a tree": {"json": json.dumps({"type": "object", "properties": {"child": {"$ref": "#"}, "n": {"type": "null"}}})},
    "unicode": {"json": json.dumps({"properties": {"größe\u2028🙂": {"const": "\x00\ud83d\ude00"}}})},
    "a name with a control character": {"json": json.dumps({"properties": {"\x7f": {"const": "\n\ud83d\ude00"}}})},
}


async def test_hostile_grammars_are_refused_in_bounded_time(checker: GrammarChecker) -> None:
    turning = asyncio.create_task(loop_turns(100))
    for name, structured in HOSTILE.items():
        with pytest.raises(InvalidRequest) as caught:
            await checker.check(grammar_of(**structured))
        assert caught.value.violations[0].field.startswith(FIELD), name
        assert len(caught.value.message) < 1000
    for structured in HARMLESS.values():
        await checker.check(grammar_of(**structured))
    assert turning.done(), "the event loop went on"


async def test_a_grammar_out_of_time_is_stopped_and_remembered(
    children: NewChildren, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_CPU_S", 0.02)
    box = GrammarChecker(write_tokenizer(tmp_path / "m", byte_tokenizer()) / "tokenizer.json", 300, (257,))
    slow = {
        "properties": {f"n{n}": {"properties": {f"k{m}": {"type": "integer"} for m in range(40)}} for n in range(60)}
    }
    try:
        for _ in range(2):
            assert "of computing" in (await refusal(box, json=json.dumps(slow)))[1]
        assert not children()
        await box.check(grammar_of(regex="a"))
    finally:
        await box.aclose()


async def test_a_kill_from_outside_blames_no_grammar(checker: GrammarChecker, children: NewChildren) -> None:
    await checker.check(grammar_of(regex="a"))
    (child,) = children()
    child.kill()
    with pytest.raises(Unavailable):
        await checker.check(grammar_of(regex="b"))
    await checker.check(grammar_of(regex="b"))


async def test_the_queue_is_bounded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_GRAMMARS", 2)
    box = GrammarChecker(write_tokenizer(tmp_path / "m", byte_tokenizer()) / "tokenizer.json", 300, (257,))
    try:
        checks = [box.check(grammar_of(regex=f"a{n}")) for n in range(4)]
        answers = await asyncio.gather(*checks, return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == [
            "NoneType",
            "NoneType",
            "Overloaded",
            "Overloaded",
        ]
        assert isinstance(answers[3], Overloaded)
    finally:
        await box.aclose()


async def test_a_cancelled_caller_does_not_affect_others(checker: GrammarChecker) -> None:
    leaving = asyncio.create_task(checker.check(grammar_of(regex="a")))
    staying = asyncio.create_task(checker.check(grammar_of(regex="a")))
    await loop_turns(3)
    leaving.cancel()
    await staying
    assert leaving.cancelled() or leaving.cancelling()
