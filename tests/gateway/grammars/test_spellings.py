"""Patterns and names hold for every JSON spelling of a string; oracles: ``re`` and jsonschema."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.random_answers import allows, answer, exact, matcher_of

# Characters that JSON or llguidance treats specially.
KINDS = '"\\/\n\t\v\x00\x01\x0a\x1b\x1f\x7f az09é\u2028🙂'
CHARACTERS = st.sampled_from(KINDS) | st.characters(exclude_categories=("Cs",))
# Same class in both syntaxes.
MEMBERS = st.one_of(
    CHARACTERS.map(lambda one: f"\\u{ord(one):04x}" if ord(one) < 0x10000 else one),
    st.tuples(CHARACTERS, CHARACTERS)
    .map(sorted)
    .filter(lambda pair: pair[1] < "\uffff")
    .map(lambda pair: "-".join(f"\\u{ord(one):04x}" for one in pair)),
    st.just(r"\d"),
)
CLASSES = st.tuples(st.sampled_from(["", "^"]), st.lists(MEMBERS, min_size=1, max_size=3)).map(
    lambda made: f"[{made[0]}{''.join(made[1])}]"
)
PARTS = st.one_of(
    CLASSES,
    CLASSES,
    st.sampled_from([r"\x00", r"\x01", r"\n", '"', r"\\", "a", r"[\s\S]", r"\d", r"[^\x00-\x1f]", r"[\x00-\x1f\x7f]"]),
)
REPEATED = st.tuples(PARTS, st.sampled_from(["", "", "?", "{2}", "{1,3}", "+"])).map("".join)
PATTERNS = st.recursive(
    REPEATED,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
    ),
    max_leaves=5,
)
WHOLE = st.tuples(st.sampled_from(["^", ""]), PATTERNS, st.sampled_from(["$", ""])).map("".join)
FEW = settings(max_examples=examples(120), deadline=None, suppress_health_check=list(HealthCheck))


def in_python(pattern: str) -> re.Pattern[str]:
    # The flag is part of the text, since jsonschema gets nothing else. In ECMA-262, unlike Unicode, \d is ten digits.
    return re.compile("(?a)" + (pattern[:-1] + r"\Z" if pattern.endswith("$") else pattern))


def spellings(text: str) -> Iterator[str]:
    """Return JSON strings for a text: each character raw, by its short escape, or by four hex digits in both cases."""
    short = {'"': r"\"", "\\": r"\\", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "/": r"\/"}
    ways = []
    for one in text:
        units = one.encode("utf-16-be")
        codes = [int.from_bytes(units[n : n + 2], "big") for n in range(0, len(units), 2)]
        plain = [one] if one >= " " and one not in '"\\' else []
        digits = ["".join(form.format(code) for code in codes) for form in (r"\u{:04x}", r"\u{:04X}")]
        ways.append(list(dict.fromkeys([*plain, *filter(None, [short.get(one)]), *digits])))
    return ('"' + "".join(made) + '"' for made in itertools.product(*ways))


def usual(text: str) -> str:
    """Return a JSON string for a text, as models write it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


@FEW
@given(WHOLE, st.lists(CHARACTERS, max_size=3).map("".join), st.integers(0, 2**32))
@example('^[^"]+$', 'the "big" one', 0)
@example(r"^[^\\]$", "\\", 0)
@example('[^"]{3}', 'a"b', 0)
@example(r'^[^<>:"/\\|?*]+$', 'a"b', 0)
@example(r"^(?:[\x00-\x0f]|[\x10-\x1f])$", '"', 0)
@example(r"^(?:\x00|[\x01-\x1f])$", '"', 0)
@example(r"^\p{Cc}+$", '"', 0)
@example("^[\x00-\x1f]$", "\\", 0)
def test_written_strings_match_the_pattern(pattern: str, text: str, seed: int) -> None:
    matcher = matcher_of({"type": "string", "pattern": pattern})
    if matcher is None:
        return
    reader = in_python(pattern.replace(r"\p{Cc}", r"[\x00-\x1f\x7f-\x9f]"))
    for draw in range(3):
        found = answer(matcher.deep_copy(), random.Random(seed + draw))
        assert found is None or reader.search(json.loads(found)), found
    written = [one for one in spellings(text[:3]) if allows(matcher, one)]
    assert not written or reader.search(text[:3]), written


@FEW
@given(WHOLE, st.data())
def test_strings_that_match_the_pattern_can_be_written(pattern: str, data: st.DataObject) -> None:
    """Except for a NUL, unless the pattern's class contains both the quote and the backslash."""
    text = data.draw(st.from_regex(in_python(pattern)))
    assume("\0" not in text and not re.search("[\ud800-\udfff]", text))
    matcher = matcher_of({"type": "string", "pattern": pattern})
    if matcher is None:
        assert "0000" in pattern or r"\x00" in pattern, "a NUL alone is refused"
        return
    assert allows(matcher, usual(text))


NAMES = ("f", "größe", "a/b", 'a "b"', "back\\slash", "x🙂", "tab\t", "esc\x1b", "del\x7f")
FURTHER: dict[str, dict[str, Any]] = {
    "nothing is said": {},
    "anything": {"additionalProperties": True},
    "held to a schema": {"additionalProperties": {"type": "boolean"}},
    "a pattern": {"patternProperties": {"^[^\\\\]*$": {"type": ["integer", "boolean"]}}},
    "a pattern and a schema": {
        "patternProperties": {"^z": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    },
    "of another schema": {"allOf": [{"required": ["z"]}, {"minProperties": 1}]},
    "after another schema": {"anyOf": [{"type": "object", "properties": {"z": True}}]},
}


def plain(name: str) -> bool:
    return not re.search(r"[\x00-\x08\x0b\x0e-\x1f\x7f]", name)


@pytest.mark.parametrize("further", FURTHER)
@pytest.mark.parametrize("name", NAMES)
def test_a_property_name_is_matched_in_any_spelling(name: str, further: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, **FURTHER[further]}
    matcher = matcher_of(schema)
    if matcher is None:
        assert "patternProperties" in schema
        assert not plain(name)
        return
    needed = ', "z": 1' if further == "of another schema" else ""
    values = ("1", "true")
    for spelled in itertools.islice(spellings(name), 64):
        for value in values:
            assert not allows(matcher, f"{{{spelled}: true{needed}}}"), spelled
            assert not allows(matcher, f"{{{spelled}: 1, {spelled}: {value}{needed}}}")
            assert not allows(matcher, f"{{{json.dumps(name, ensure_ascii=False)}: 1, {spelled}: {value}{needed}}}")
    assert any(allows(matcher, f"{{{spelled}: 1{needed}}}") for spelled in spellings(name))


def test_a_name_that_a_pattern_matches_is_not_additional() -> None:
    matcher = matcher_of({"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "null"}})
    assert matcher is not None
    for spelled in spellings("ab"):
        assert not allows(matcher, f"{{{spelled}: null}}")
    assert allows(matcher, '{"ab": 1, "b": null}')


SCHEMAS = st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "string"}])


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if draw(st.booleans()):
        names = st.lists(CHARACTERS, min_size=1, max_size=2).map("".join) | st.sampled_from(NAMES)
        schema["properties"] = draw(st.dictionaries(names, SCHEMAS, max_size=3))
        schema["required"] = [name for name in schema["properties"] if draw(st.booleans())]
    if draw(st.booleans()):
        schema["patternProperties"] = {draw(WHOLE): draw(SCHEMAS)}
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.sampled_from([True, False]) | SCHEMAS)
    if draw(st.booleans()):
        schema["allOf"] = [{"properties": draw(st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=2))}]
    return schema


@FEW
@given(objects(), st.integers(0, 2**32))
@example({"properties": {'"': True}, "patternProperties": {r"^\x00$": True}, "additionalProperties": False}, 0)
@example(
    {"properties": {'"': True}, "patternProperties": {r"^[\x01-\x04\x1f]$": True}, "additionalProperties": False}, 0
)
@example({"type": "object", "patternProperties": {r"^\d": {"type": "integer"}}}, 22474)
def test_random_objects_fit_with_each_name_once(schema: dict[str, Any], seed: int) -> None:
    matcher = matcher_of(schema)
    if matcher is None:
        return
    judged = json.loads(json.dumps(schema))
    for pattern in tuple(judged.get("patternProperties", ())):
        judged["patternProperties"][in_python(pattern).pattern] = judged["patternProperties"].pop(pattern)
    validator = jsonschema.Draft202012Validator(judged)
    named = {*schema.get("properties", ()), *(name for one in schema.get("allOf", ()) for name in one["properties"])}
    for draw in range(4):
        text = answer(matcher.deep_copy(), random.Random(seed + draw))
        if text is not None:
            assert validator.is_valid(exact(text)), text
            pairs = json.loads(text, object_pairs_hook=list)
            names = [name for name, _ in pairs if name in named]
            assert len(names) == len(set(names)), text
