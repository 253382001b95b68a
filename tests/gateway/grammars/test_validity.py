"""Random answers over hundreds of schemas are valid, checked by jsonschema."""

from __future__ import annotations

import importlib.resources
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from pillion.gateway.request.validation import MAX_STRUCTURED_BYTES
from pillion.types import StructuredOutputs
from tests.support.examples import examples
from tests.support.random_answers import answer, exact, matcher_of, structured_matcher

FORMATS = ("date", "ipv4", "ipv6", "uuid", "email", "date-time", "time", "hostname", "duration", "uri")
NAMES = ("name", "größe", 'a "quote"', "a/b~c", "x.y", "", "🙂", "back\\slash", "$ref", "line\nend")

Kind = Callable[[random.Random], Any]


def leaf(rng: random.Random) -> Any:
    low = rng.randint(-500, 500)
    return rng.choice(
        [
            {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)},
            {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "ab", "^(?:x|yz)+", "[0-9]$", r"^\w+-\d{3}$"])},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.random() * 10 + 0.5},
            {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample([1, 2.5, "a", "ü", None, True, [], {"a": [1]}, "", -7], 4)},
            {"const": rng.choice([0, "x\ny", {"a": 1, "b": [True, None]}, [1, [2]], 1.25])},
            {"type": ["string", "null", "integer"]},
        ]
    )


def an_object(rng: random.Random, inner: Kind = leaf) -> Any:
    names = rng.sample(NAMES, rng.randint(1, 6))
    required = rng.sample(names, rng.randint(0, len(names)))
    made = {"type": "object", "properties": {name: inner(rng) for name in names}, "required": required}
    return made | rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": leaf(rng)}])


def a_map(rng: random.Random) -> Any:
    most = rng.randint(1, 4)
    return rng.choice(
        [
            {"type": "object", "additionalProperties": leaf(rng), "maxProperties": most},
            {"type": "object", "additionalProperties": leaf(rng), "minProperties": 1},
            {"type": "object", "patternProperties": {"^[a-c]+$": leaf(rng)}, "additionalProperties": False},
        ]
    )


def an_array(rng: random.Random, inner: Kind = leaf) -> Any:
    least = rng.randint(0, 2)
    first = [inner(rng) for _ in range(rng.randint(1, 3))]
    return rng.choice(
        [
            {"type": "array", "items": inner(rng), "minItems": least, "maxItems": least + rng.randint(0, 3)},
            {"type": "array", "prefixItems": first, "items": rng.choice([False, inner(rng)]), "minItems": len(first)},
            {"type": "array", "items": {"anyOf": [inner(rng), inner(rng)]}, "maxItems": 4},
        ]
    )


def a_choice(rng: random.Random) -> Any:
    tagged = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{n}"}, "value": leaf(rng)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for n in range(rng.randint(2, 4))
    ]
    return {rng.choice(["anyOf", "oneOf"]): tagged}


def everything_of(rng: random.Random) -> Any:
    first = an_object(rng)
    first.pop("additionalProperties", None)
    return {"allOf": [first, {"properties": {"more": leaf(rng)}, "required": ["more"]}]}


def a_tree(rng: random.Random) -> Any:
    node = {
        "type": "object",
        "properties": {
            "value": leaf(rng),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def a_reference(rng: random.Random) -> Any:
    return {
        "$defs": {"a/b": leaf(rng), "c": an_array(rng)},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a~1b"}, "y": {"$ref": "#/$defs/c", "description": "why"}},
        "required": ["x", "y"],
    }


def nested(rng: random.Random) -> Any:
    return an_object(rng, lambda rng: rng.choice([leaf, an_array, a_map, an_object])(rng))


KINDS: tuple[Kind, ...] = (
    leaf,
    an_object,
    a_map,
    an_array,
    a_choice,
    everything_of,
    a_tree,
    a_reference,
    nested,
    lambda rng: an_array(rng, an_object),
)
OF_EACH_KIND = examples(40)


def schemas() -> Iterator[tuple[str, Any]]:
    """Draw schemas of our own kinds, and of a package."""
    for number, kind in enumerate(KINDS):
        for n in range(OF_EACH_KIND):
            yield f"kind {number}, {n}", kind(random.Random(1000 * number + n))
    for file in sorted(importlib.resources.files("check_jsonschema.builtin_schemas.vendor").iterdir(), key=str):
        if file.name.endswith(".json") and file.stat().st_size <= MAX_STRUCTURED_BYTES:  # type: ignore[attr-defined]
            yield file.name, json.loads(file.read_text(encoding="utf-8"))


def test_every_complete_answer_fits_its_schema() -> None:
    """Own kinds are all accepted; others may be refused, and accepted ones are followed."""
    wrong, taken, ended, cut = [], 0, 0, 0
    for name, schema in schemas():
        matcher = matcher_of(schema)
        assert matcher is not None or name.endswith(".json"), (name, schema)
        if matcher is None:
            continue
        taken += 1
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        validator = kind(exact(json.dumps(schema)), format_checker=kind.FORMAT_CHECKER)
        for seed in range(2):
            text = answer(matcher.deep_copy(), random.Random(seed))
            if text is None:
                cut += 1
            elif not validator.is_valid(exact(text)):
                wrong.append((name, schema, text))
            else:
                ended += 1
    assert wrong == []
    assert taken > len(KINDS) * OF_EACH_KIND
    assert ended > 8 * cut


@pytest.mark.parametrize("seed", range(2))
def test_json_object_mode_produces_objects(seed: int) -> None:
    text = answer(structured_matcher(StructuredOutputs(json_object=True)), random.Random(seed))
    assert text is None or isinstance(json.loads(text), dict)
