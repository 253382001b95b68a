"""What of JSON Schema an answer can be held to (I9).

llguidance refuses most of what it does not know. What it would let pass, or follow only nearly, is refused here, with
its place: an answer fits the whole schema, or there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pillion.gateway.grammars.json_strings import format_pattern, rust_pattern

# Keywords of some draft that constrain a value and cannot be followed.
UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy"),
    }
)
# Objects and lists within one another; llguidance reads a few more.
MAX_SCHEMA_DEPTH = 100
# Numbers are followed as floats; an integer beyond this may be another one there.
MAX_EXACT_INTEGER = 2**53
MAX_VIOLATIONS = 8
# An answer is written as Python's json writes it, so that no model can write blanks for ever and what stands between
# two values is forced.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ALONE = ("items", "additionalItems", "additionalProperties")
_APPLIED = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")


def schema_faults(schema: Any) -> Iterator[tuple[str, str]]:
    """Places in a parsed schema, as JSON pointers, and what is wrong there."""
    if isinstance(schema, dict) and _OPTIONS in schema:
        yield f"/{_OPTIONS}", "how an answer is written cannot be chosen"
    if _is_deep(schema):
        yield "", f"nested more than {MAX_SCHEMA_DEPTH} deep"
        return
    yield from _faults(schema, "")


def written(schema: Any) -> Any:
    """A checked schema as llguidance gets it, with how an answer is written."""
    if schema is True:
        schema = {}
    return {_OPTIONS: _WRITING, **_followed(schema)} if isinstance(schema, dict) else schema


def _followed(schema: Any) -> Any:
    """A schema in which each string is followed as JSON Schema means it."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            name_of = rust_pattern if key == "patternProperties" else str
            value = {name_of(name): _followed(inner) for name, inner in value.items()}
        elif key in _LISTED and isinstance(value, list):
            value = [_followed(inner) for inner in value]
        elif key in _ALONE:
            value = _followed(value)
        elif key == "pattern" and isinstance(value, str):
            value = rust_pattern(value)
        made[key] = value
    pattern = format_pattern(str(schema.get("format")))
    others = made.get("allOf", [])
    if pattern is not None and isinstance(others, list):
        del made["format"]
        made["allOf"] = [*others, {"pattern": pattern}]
    return made


def _is_deep(schema: Any) -> bool:
    """Whether a schema is nested too deeply for what reads it by recursion."""
    level, depth = [schema], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level, depth = [value for values in inner for value in values], depth + 1
    return bool(level)


def _faults(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield path, "a schema is an object, true or false"
        return
    for key, value in schema.items():
        place = f"{path}/{_escaped(key)}"
        if key in UNSUPPORTED and not (key == "uniqueItems" and value is False):
            yield place, "no answer can be held to this keyword here"
        elif key in _NUMBERS and not _is_exact(value):
            yield place, f"an integer beyond {MAX_EXACT_INTEGER} is not exact here"
        elif key in _NAMED and isinstance(value, dict):
            for name, inner in value.items():
                yield from _faults(inner, f"{place}/{_escaped(name)}")
        elif key in _LISTED and isinstance(value, list):
            for n, inner in enumerate(value):
                yield from _faults(inner, f"{place}/{n}")
        elif key in _ALONE:
            yield from _faults(value, place)
    if schema.get("uniqueItems") is False:
        # It asks for nothing, and llguidance does not know it.
        del schema["uniqueItems"]
    if "prefixItems" in schema and "additionalItems" in schema:
        yield f"{path}/additionalItems", "prefixItems goes with items, which means the same"
    if "additionalItems" in schema and _APPLIED & schema.keys():
        yield f"{path}/additionalItems", "items of another schema that holds here too would count as listed"
    least, needed = schema.get("minProperties"), schema.get("required")
    certain = len(set(map(str, needed))) if isinstance(needed, list) else 0
    if isinstance(least, int) and least > certain + 1:
        text = "a name may come twice among properties that are not listed, so at most one more than required"
        yield f"{path}/minProperties", text


def _is_exact(value: Any) -> bool:
    """Whether no integer in ``value`` is beyond what a float holds."""
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    return not isinstance(value, int) or abs(value) <= MAX_EXACT_INTEGER


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
