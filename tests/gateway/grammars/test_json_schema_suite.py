"""The JSON Schema Test Suite, drafts 2020-12 and 7: a schema is followed exactly, or refused.

Copied to tests/support/json_schema_suite (one case per line, with its licence) from jsonschema's source distribution
4.26. Includes the cases that its authors call optional.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.random_answers import allows, answer, exact, matcher_of

pytestmark = pytest.mark.long

SUITE = Path(__file__).parents[2] / "support" / "json_schema_suite"
VALIDATORS = {"draft2020-12": jsonschema.Draft202012Validator, "draft7": jsonschema.Draft7Validator}
# Minimum number of accepted schemas, against regressions.
TAKEN = {"draft2020-12": 196, "draft7": 189}
WALKS = 6
# ``format`` constrains, as in OpenAI's API; ``contentEncoding`` and similar do not, as in draft 2020-12.
OTHER_MEANINGS = frozenset({"format.json", "optional/content.json"})
# Valid values that no answer has: forms of a format that few parsers accept, and draft 7's lone $ref.
NEVER_WRITTEN = re.compile(
    "leap second|mixed format|a long valid ipv6|quoted string|IPv6-address-literal|maxItems ignored"
)
BLANKS = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
PYTHONS = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]"} | {
    r"\s": f"[{BLANKS}]",
    r"\S": f"[^{BLANKS}]",
    ".": "[^\n\r\u2028\u2029]",
    "$": r"\Z",
}


def cases(draft: str) -> Iterator[dict[str, Any]]:
    for line in (SUITE / f"{draft}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["file"] not in OTHER_MEANINGS:
            if isinstance(case["schema"], dict):
                case["schema"] = {"$schema": VALIDATORS[draft].META_SCHEMA["$schema"], **case["schema"]}
            yield case


def written_forms(value: Any) -> Iterator[str]:
    """Return the texts that an answer may have for a value: integers without a fraction, properties in any order."""
    value = plain(value)
    orders = [value]
    if isinstance(value, dict) and len(value) <= 4:
        orders = [dict(items) for items in itertools.permutations(value.items())]
    return (json.dumps(one, ensure_ascii=False) for one in orders)


def plain(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return list(map(plain, value))
    return {name: plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def in_python(schema: Any) -> Any:
    """Return the schema with its ECMA-262 patterns in Python's syntax; the suite has none of them within a class."""
    if isinstance(schema, list):
        return list(map(in_python, schema))
    if not isinstance(schema, dict):
        return schema
    made = {name: in_python(value) for name, value in schema.items()}
    if isinstance(made.get("pattern"), str):
        made["pattern"] = python_pattern(made["pattern"])
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = {python_pattern(name): one for name, one in made["patternProperties"].items()}
    return made


def python_pattern(pattern: str) -> str:
    return re.sub(r"\[[^\]]*\]|\\.|.", lambda found: PYTHONS.get(found[0], found[0]), pattern)


@pytest.mark.parametrize("draft", VALIDATORS)
def test_only_valid_values_can_be_generated(draft: str) -> None:
    wrong, taken = [], 0
    for case in cases(draft):
        matcher = matcher_of(case["schema"])
        if matcher is None:
            continue
        taken += 1
        for one in case["tests"]:
            if NEVER_WRITTEN.search(one["description"]) and one["valid"]:
                continue
            if any(allows(matcher, text) for text in written_forms(one["data"])) is not one["valid"]:
                wrong.append((case["file"], case["description"], one))
    assert wrong == []
    assert taken >= TAKEN[draft]


@pytest.mark.parametrize("draft", VALIDATORS)
def test_random_answers_are_valid(draft: str) -> None:
    wrong, ended = [], 0
    for case in cases(draft):
        matcher = matcher_of(case["schema"])
        if matcher is None:
            continue
        kind = VALIDATORS[draft]
        validator = kind(in_python(exact(json.dumps(case["schema"]))), format_checker=kind.FORMAT_CHECKER)
        for seed in range(WALKS):
            text = answer(matcher.deep_copy(), random.Random(seed))
            ended += text is not None
            if text is not None and not is_valid(validator, text):
                wrong.append((case["file"], case["description"], text))
    assert wrong == []
    assert ended >= 5 * TAKEN[draft]


def is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(exact(text)))
    except re.error:
        # Python's ``re`` has no Unicode classes.
        return True
