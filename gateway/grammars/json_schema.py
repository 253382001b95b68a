"""Validates that a JSON schema can be enforced, and rewrites it so that llguidance follows it exactly. Sans-IO (I9).

llguidance refuses most unsupported keywords. This module refuses those that it would ignore or only approximate, and
names their place: either an answer fits the whole schema, or the request is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from pillion.gateway.grammars.json_strings import FORMAT_PATTERNS, LONG_CONTROLS, NUL, finite_matches, rust_pattern
from pillion.gateway.grammars.schema_dialects import TYPE_OF, TYPES, is_draft, looks_around, plain_schema
from pillion.gateway.grammars.schema_places import (
    ALONE,
    LISTED,
    NAMED,
    at_pointer,
    endless_references,
    inner_schemas,
    names_in,
    parts_of,
    pointer,
    reference_to,
    schemas_in,
    with_inner,
)

UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy"),
    }
)
MAX_SCHEMA_DEPTH = 100
# llguidance computes numbers as floats, and integers as int64.
MAX_INTEGER = 2**63 - 1
_BESIDE_REFERENCE = frozenset(
    {"title", "description", "default", "examples", "$schema", "$comment", "$defs", "definitions", "components", "type"}
)
_LISTS_MEMBERS = _BESIDE_REFERENCE | {"properties", "required"}
MAX_PASSES = 8
MAX_VIOLATIONS = 8
# Limit of multiples of a fraction that are enforced as multiples of an integer; llguidance needs a state per number
# below.
MAX_STEP = 1000
# Offset of an exclusive integer bound: llguidance lets the bound itself pass if the other one is near.
BESIDE = 1e-9
# White space only as in Python's json, so that no model can write blanks forever, and separators need no sampling.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"
_SHORT_ESCAPES = 'nrbtf\\"'
FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_FREE: tuple[Any, ...] = (None, True, False, {})
# All names without control characters. Anchored, since unanchored patterns make masks slow.
_FURTHER = r"^[^\x00-\x1f\x7f]*$"
_CONTROLS = frozenset(map(chr, [*range(0x20), 0x7F]))
_APPLIED = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")


class _Whole:
    """Properties of a whole schema that the rewriting of its parts depends on.

    A name that can be spelled in two ways could appear twice: as the named property and as a further one, and could
    escape a pattern. llguidance takes other spellings for further properties. If further properties are free, they
    become those of a pattern, whose matches llguidance spells in one way, except control characters. Otherwise escapes
    with four digits are forbidden.

    Attributes:
        lost: control characters that strings matching a pattern must not contain (:func:`rust_pattern`).
        compares: whether the schema has patternProperties.
        names: names of all properties in the schema.
        endless: references without a finite value.
        nowhere: references to nothing in the schema.
        merges: whether several subschemas may apply to one value.
        integers: whether some value has to be an integer.
    """

    def __init__(self, root: Any) -> None:
        schemas = list(schemas_in(root))
        self.compares = any(one.get("patternProperties") for one in schemas)
        self.names = frozenset(name for one in schemas for name in names_in(one)) if self.compares else frozenset()
        self.merges = self.compares or any(not _APPLIED.isdisjoint(one) for one in schemas)
        self.integers = any("integer" in _kinds(one) for one in schemas)
        others = any(any(names_in(one)) and one.get("additionalProperties") not in _FREE for one in schemas)
        controls = any(not _CONTROLS.isdisjoint(name) for one in schemas for name in names_in(one))
        self.lost = LONG_CONTROLS if self.compares or others or controls else NUL
        self.endless = endless_references(root)
        references = {one["$ref"] for one in schemas if isinstance(one.get("$ref"), str)}
        known = set(map(id, schemas))
        targets = {one: _target(root, one) for one in references}
        self.nowhere = frozenset(one for one, to in targets.items() if not isinstance(to, bool) and id(to) not in known)


def schema_faults(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the places of a parsed schema that cannot be enforced, as JSON pointers, with reasons."""
    if isinstance(schema, dict) and _OPTIONS in schema:
        yield f"/{_OPTIONS}", "formatting options are not supported"
    if _is_deep(schema):
        yield "", f"nested more than {MAX_SCHEMA_DEPTH} deep"
        return
    yield from _faults(schema, "", _Whole(schema))


def written(schema: Any) -> Any:
    """Return a validated schema for llguidance, with the rules for white space and escapes."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    whole = _Whole(schema)
    writing = _WRITING if whole.lost == NUL else {**_WRITING, "json_allowed_escapes": _SHORT_ESCAPES}
    return {_OPTIONS: writing, **_followed(schema, whole)}


def plain(schema: Any) -> Any:
    """Return a schema in this module's dialect; one that is too deep is unchanged."""
    return schema if _is_deep(schema) else plain_schema(schema)


def of_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the normalized schema of a tool's arguments. A top-level reference is resolved, and members in ``allOf``
    are merged, since formats without a notation of objects read only the schema's own."""
    made = plain(schema)
    if not isinstance(made, dict):
        return {}
    for _ in range(MAX_PASSES):
        reference = made.get("$ref")
        target = _target(made, reference) if isinstance(reference, str) else None
        own = {key: value for key, value in made.items() if key != "$ref"}
        if not isinstance(target, dict) or target is made or not own.keys() <= _BESIDE_REFERENCE:
            break
        made = {**target, **own}
    return _merged(made, made, MAX_PASSES)


def _merged(schema: dict[str, Any], root: Any, passes: int) -> dict[str, Any]:
    """Return a schema of ``root`` with the members of its ``allOf``, if these have nothing else."""
    listed, own = schema.get("allOf"), schema.keys() - {"allOf"}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(listed, list) or not own <= _LISTS_MEMBERS or not passes:
        return schema
    if not isinstance(properties, dict) or not isinstance(required, list):
        return schema
    for one in listed:
        inner = _target(root, one["$ref"]) if isinstance(one, dict) and isinstance(one.get("$ref"), str) else one
        if inner is not one and not one.keys() - {"$ref"} <= _BESIDE_REFERENCE:
            return schema
        inner = _merged(inner, root, passes - 1) if isinstance(inner, dict) else {"not": {}}
        more, needed = inner.get("properties", {}), inner.get("required", [])
        if not (inner.keys() <= _LISTS_MEMBERS and isinstance(more, dict) and isinstance(needed, list)):
            return schema
        if properties.keys() & more.keys() or inner.get("type", "object") != "object":
            return schema
        properties, required = {**properties, **more}, [*required, *needed]
    made = {key: schema[key] for key in own} | {"properties": properties}
    return made | ({"required": required} if required else {})


def self_contained(schema: Any, root: Any) -> Any:
    """Return a subschema of ``root`` that is self-contained: its ``$defs`` have all targets of references, by
    pointer."""
    reached: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for one in schemas_in(waiting.pop()):
            reference = one.get("$ref")
            target = _target(root, reference) if isinstance(reference, str) and reference not in reached else None
            if target is not None:
                reached[str(reference)] = target
                waiting.append(target)
    if not reached:
        return schema
    return {**_moved(schema), "$defs": {unquote(one): _moved(target) for one, target in reached.items()}}


def _moved(schema: Any) -> Any:
    """Return a schema with the references of :func:`self_contained`."""
    if not isinstance(schema, dict):
        return schema
    made = with_inner(schema, _moved)
    if isinstance(made.get("$ref"), str):
        made["$ref"] = reference_to(("$defs", unquote(made["$ref"])))
    return made


def root_place(base: str, place: str) -> str:
    """Convert a place in the result of :func:`self_contained` to the place in the root."""
    match parts_of(place):
        case ["$defs", name, *rest] if base and name.startswith("#"):
            return name[1:] + pointer(rest)
    return base + place


def relax(schema: Any, places: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Relax a normalized schema by removing ``places`` (JSON pointers) and whatever cannot be enforced. Returns the
    rest and the removed places. What fits the schema fits the rest."""
    left_out = list(places)
    for place in left_out:
        schema = without(schema, place)
    for _ in range(MAX_PASSES):
        faults = [place for place, _ in schema_faults(schema)]
        if not faults:
            return schema, left_out
        for place in faults:
            schema = without(schema, place)
        left_out += faults
    return {}, [""]


def without(schema: Any, place: str) -> Any:
    """Return a schema without the keyword at ``place``, a JSON pointer. A schema there is reduced to its type, or to
    nothing; if nothing is there, the schema around it is."""
    node, path, parts, keyword = schema, list[str | int](), parts_of(place), ""
    while parts and isinstance(node, dict):
        key, rest = parts[0], parts[1:]
        inner = node.get(key)
        if key in NAMED and isinstance(inner, dict) and rest and rest[0] in inner:
            step: tuple[str | int, ...] = (key, rest[0])
        elif key in LISTED and isinstance(inner, list) and rest and rest[0].isdecimal() and int(rest[0]) < len(inner):
            step = (key, int(rest[0]))
        elif key in ALONE and key in node and not isinstance(inner, list):
            step = (key,)
        else:
            keyword = key if key in node else ""
            break
        path += step
        for part in step:
            node = node[part]
        parts = parts[len(step) :]
    if keyword:
        return _replaced(schema, path, _lacking(node, keyword))
    if path and node != (bare := _type_of(node)):
        return _replaced(schema, path, bare)
    return {}


def _type_of(schema: Any) -> Any:
    """Return a schema of a schema's type alone."""
    return {"type": schema["type"]} if isinstance(schema, dict) and len(schema) > 1 and "type" in schema else {}


def _lacking(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    """Return a schema without a keyword and those that depend on it."""
    related = {
        **dict.fromkeys(("properties", "patternProperties"), "additionalProperties"),
        "prefixItems": "items",
        "items": "additionalItems",
    }
    made = {key: value for key, value in schema.items() if key not in (keyword, related.get(keyword))}
    if keyword == "oneOf":
        # Without "exactly one", several may match.
        made.setdefault("anyOf", schema[keyword])
    if keyword in ("enum", "const"):
        values = schema[keyword] if isinstance(schema[keyword], list) else [schema[keyword]]
        made.setdefault("type", sorted({TYPE_OF.get(type(value), "null") for value in values}))
    return made


def _replaced(schema: Any, path: list[str | int], new: Any) -> Any:
    """Put ``new`` at a path in a schema, and return the schema."""
    if not path:
        return new
    node = schema
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = new
    return schema


def _target(root: Any, reference: str) -> Any:
    """Return the target of a reference within the schema, or None."""
    path = at_pointer(root, (), unquote(reference[1:])) if reference[:1] == "#" else None
    if path is None:
        return None
    for part in path:
        root = root[part]
    return root


def _followed(schema: Any, whole: _Whole) -> Any:
    """Return a schema with its patterns and formats rewritten for llguidance."""
    if not isinstance(schema, dict):
        return schema
    schema = _numbers_followed(_names_followed(schema, whole))
    made = with_inner(schema, lambda inner: _followed(inner, whole))
    if isinstance(patterns := made.get("patternProperties"), dict):
        made["patternProperties"] = {rust_pattern(name, whole.lost): inner for name, inner in patterns.items()}
    if isinstance(made.get("pattern"), str):
        made["pattern"] = rust_pattern(made["pattern"], whole.lost)
    pattern = FORMAT_PATTERNS.get(str(schema.get("format")))
    others = made.get("allOf", [])
    if pattern is not None and isinstance(others, list):
        del made["format"]
        made["allOf"] = [*others, {"pattern": pattern}]
    if whole.lost == NUL and any(names_in(schema)) and schema.get("additionalProperties") is not False:
        # First, since llguidance ignores "additionalProperties" after keywords that apply other schemas.
        made.pop("additionalProperties", None)
        return {"patternProperties": {_FURTHER: True}, "additionalProperties": False, **made}
    return made


def _names_followed(schema: dict[str, Any], whole: _Whole) -> dict[str, Any]:
    """Return a schema in which no pattern of names can be left without a name.

    llguidance excludes listed names from those that a pattern matches. If none is left, it still offers a comma, after
    which it is stuck. So a pattern that matches only names in the schema is replaced by these names.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not (isinstance(patterns, dict) and patterns and isinstance(properties, dict)):
        return schema
    listed, others = {**properties}, {}
    most, longest = len(whole.names), max(map(len, whole.names), default=0)
    for pattern, inner in patterns.items():
        texts = finite_matches(pattern, most, longest)
        if texts is None or not texts <= whole.names:
            others[pattern] = inner
            continue
        for name in sorted(texts):
            listed[name] = {"allOf": [listed[name], inner]} if name in listed else inner
    made: dict[str, Any] = {"properties": listed, "patternProperties": others}
    if "additionalProperties" in schema:
        made["additionalProperties"] = schema["additionalProperties"]
    # These three first, since llguidance ignores some of them after keywords that apply other schemas.
    return {key: value for key, value in made.items() if value != {}} | {
        key: value for key, value in schema.items() if key not in made
    }


def _numbers_followed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of numbers such that llguidance detects whether any fits: it computes with floats, and ignores
    that a multiple of a fraction may have to be an integer."""
    step, kinds, bounds = _step(schema), _kinds(schema), schema
    schema = {**schema, **_beside(schema)}
    if not step or not {"integer", "number"}.issuperset(map(str, kinds)):
        return schema
    if kinds == ["integer"]:
        step = Fraction(step.numerator)
        schema = {**schema, "multipleOf": step.numerator} if step <= MAX_STEP else schema
    steps = {key: bound / step for key in _NUMBERS[:4] if (bound := _exact(bounds.get(key))) is not None}
    first = [math.floor(n) + 1 if key[0] == "e" else math.ceil(n) for key, n in steps.items() if "inimum" in key]
    last = [math.ceil(n) - 1 if key[0] == "e" else math.floor(n) for key, n in steps.items() if "aximum" in key]
    none = first and last and max(first) > min(last)
    return {**schema, "enum": []} if none else schema


def _beside(schema: dict[str, Any]) -> dict[str, float]:
    """Return a schema's exclusive integer bounds, moved slightly away from zero."""
    low, high = _exact(schema.get("exclusiveMinimum")), _exact(schema.get("exclusiveMaximum"))
    made = {"exclusiveMinimum": float(low) + BESIDE} if low is not None and low.denominator == 1 and low >= 0 else {}
    if high is not None and high.denominator == 1 and high <= 0:
        made["exclusiveMaximum"] = float(high) - BESIDE
    return made


def _step(schema: dict[str, Any]) -> Fraction:
    """Return the schema's multipleOf; 0 if there is none."""
    return abs(_exact(schema.get("multipleOf")) or Fraction(0))


def _exact(number: Any) -> Fraction | None:
    """Return the exact value of a JSON number; None for anything else."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < math.inf:
        return None
    return Fraction(str(number))


def _kinds(schema: dict[str, Any]) -> list[Any]:
    """Return a schema's types as a list."""
    named = schema.get("type")
    return named if isinstance(named, list) else [named]


def _is_deep(schema: Any) -> bool:
    """Return whether a schema is nested too deeply for readers that recurse."""
    level, depth = [schema], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level, depth = [value for values in inner for value in values], depth + 1
    return bool(level)


def _faults(schema: Any, path: str, whole: _Whole) -> Iterator[tuple[str, str]]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield path, "a schema is an object, true or false"
        return
    for key, value in schema.items():
        reason = _fault(key, value, whole)
        if reason:
            yield path + pointer([key]), reason
    if whole.compares and any(map(_has_long_control, names_in(schema))):
        yield path, "a property's name with a control character cannot be compared with patternProperties"
    for place, inner in inner_schemas(schema):
        yield from _faults(inner, path + pointer(place), whole)
    if "prefixItems" in schema and "additionalItems" in schema:
        yield f"{path}/additionalItems", "prefixItems goes with items, which means the same"
    if "additionalItems" in schema and _APPLIED & schema.keys():
        yield f"{path}/additionalItems", "items of another schema that holds here too would count as listed"
    step = _step(schema)
    mixed = whole.merges and whole.integers and (_kinds(schema) != ["integer"] or step.numerator > MAX_STEP)
    if mixed and step and 1 not in (step.numerator, step.denominator):
        yield f"{path}/multipleOf", "beside integers, only an integer or one divided by an integer"
    least = schema.get("minProperties")
    if isinstance(least, int) and least > _certain(schema) + 1:
        text = "a name may come twice among properties that are not listed, so at most one more than required"
        yield f"{path}/minProperties", text


def _certain(schema: dict[str, Any]) -> int:
    """Return the minimum number of an object's properties, by its required names."""
    needed = schema.get("required")
    return len(set(map(str, needed))) if isinstance(needed, list) else 0


def _fault(key: str, value: Any, whole: _Whole) -> str:
    """Return what is wrong with a single keyword, or ""."""
    if key in UNSUPPORTED:
        return "this keyword is not supported"
    if key == "$schema" and not is_draft(str(value)):
        return "unknown draft of JSON Schema"
    if key == "type" and any(one not in TYPES for one in (value if isinstance(value, list) else [value])):
        return "unknown type"
    if key == "format" and (not isinstance(value, str) or value not in FORMATS):
        return f"Unknown format: {value}"
    if key in _NUMBERS and not all(map(_is_exact, _leaves(value))) and not (key == "maximum" and value == MAX_INTEGER):
        return "an integer of more than 64 bits, or one that no float is equal to, is not exact here"
    if key in ("const", "enum") and whole.lost == LONG_CONTROLS and _has_long_control(value):
        return "beside patternProperties, or names with control characters, no string has control characters"
    if key == "$ref" and isinstance(value, str):
        if value in whole.nowhere:
            return "the reference has no target in the schema"
        return "no finite value fits: it refers to itself" if value in whole.endless else ""
    patterns = [value] if key == "pattern" else value if key == "patternProperties" else ()
    for pattern in patterns if isinstance(patterns, list | dict) else ():
        if isinstance(pattern, str) and looks_around(pattern):
            return "look-around is not supported, except look-ahead at the beginning of a pattern"
        try:
            rust_pattern(pattern if isinstance(pattern, str) else "", whole.lost)
        except ValueError as error:
            return str(error)
    return ""


def _is_exact(number: Any) -> bool:
    """Return whether llguidance represents a number exactly, if it is an integer."""
    return not isinstance(number, int) or (abs(number) <= MAX_INTEGER and int(float(number)) == number)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the scalars in a value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _has_long_control(value: Any) -> bool:
    """Return whether a string in a value has a control character without a short escape."""
    return any(not set(LONG_CONTROLS).isdisjoint(one) for one in _leaves(value) if isinstance(one, str))
