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
from pillion.gateway.grammars.schema_dialects import MAX_PASSES, TYPE_OF, TYPES, is_draft, looks_around, plain_schema
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
_IGNORED_WITH_REF = frozenset(
    {"title", "description", "default", "examples", "$schema", "$comment", "$defs", "definitions", "components", "type"}
)
_MERGED_KEYS = _IGNORED_WITH_REF | {"properties", "required"}
MAX_VIOLATIONS = 8
# Max ``multipleOf`` of integers that replaces a fraction with this numerator; llguidance needs a state per integer
# below.
MAX_STEP = 1000
# Added to exclusive integer bounds: llguidance accepts the bound itself if the opposite bound is near.
BOUND_OFFSET = 1e-9
# White space only as in Python's json: a model cannot write blanks forever, and does not sample separators.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"
FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_ALLOWS_ALL: tuple[Any, ...] = (None, True, False, {})
_CONTROLS = frozenset(map(chr, [*range(0x20), 0x7F]))
_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")


class _Whole:
    """Properties of a whole schema that the rewriting of its subschemas depends on.

    JSON can spell a name in several ways, e.g. with escapes. llguidance takes another spelling of a listed property for
    an additional one, so that the name could appear twice, or evade a pattern. Therefore unrestricted additional
    properties become a pattern, since llguidance gives matches of patterns a single spelling, control characters
    excepted. Otherwise escapes with four digits are forbidden.

    Attributes:
        excluded: control characters that strings matching a pattern must not contain (:func:`rust_pattern`).
        has_patterns: whether the schema has patternProperties.
        names: names of all properties in the schema if it has patternProperties.
        endless: references without a finite value.
        dangling: references without a target in the schema.
        merges: whether several subschemas may apply to one value.
        integers: whether some value has to be an integer.
    """

    def __init__(self, root: Any) -> None:
        schemas = list(schemas_in(root))
        self.has_patterns = any(one.get("patternProperties") for one in schemas)
        self.names = frozenset(name for one in schemas for name in names_in(one)) if self.has_patterns else frozenset()
        self.merges = self.has_patterns or any(not _APPLICATORS.isdisjoint(one) for one in schemas)
        self.integers = any("integer" in _kinds(one) for one in schemas)
        restricted = any(any(names_in(one)) and one.get("additionalProperties") not in _ALLOWS_ALL for one in schemas)
        controls = any(not _CONTROLS.isdisjoint(name) for one in schemas for name in names_in(one))
        self.excluded = LONG_CONTROLS if self.has_patterns or restricted or controls else NUL
        self.endless = endless_references(root)
        references = {one["$ref"] for one in schemas if isinstance(one.get("$ref"), str)}
        known = set(map(id, schemas))
        targets = {one: _target(root, one) for one in references}
        self.dangling = frozenset(
            one for one, to in targets.items() if not isinstance(to, bool) and id(to) not in known
        )


def schema_faults(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield each place of a parsed schema that cannot be enforced, as a JSON pointer, and the reason."""
    if isinstance(schema, dict) and _OPTIONS in schema:
        yield f"/{_OPTIONS}", "formatting options are not supported"
    if _is_deep(schema):
        yield "", f"nested more than {MAX_SCHEMA_DEPTH} deep"
        return
    yield from _faults(schema, "", _Whole(schema))


def written(schema: Any) -> Any:
    """Return a validated schema as llguidance gets it: rewritten, with options for white space and escapes."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    whole = _Whole(schema)
    writing = _SPACING if whole.excluded == NUL else {**_SPACING, "json_allowed_escapes": 'nrbtf\\"'}
    return {_OPTIONS: writing, **_rewritten(schema, whole)}


def plain(schema: Any) -> Any:
    """Return a schema normalized by :func:`plain_schema`; one that is nested too deeply is unchanged."""
    return schema if _is_deep(schema) else plain_schema(schema)


def of_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the normalized schema of a tool's arguments. A reference at the top is resolved, and properties in
    ``allOf`` are merged, since formats with a notation per argument use only the schema's own properties."""
    plain_form = plain(schema)
    if not isinstance(plain_form, dict):
        return {}
    for _ in range(MAX_PASSES):
        reference = plain_form.get("$ref")
        target = _target(plain_form, reference) if isinstance(reference, str) else None
        siblings = {key: value for key, value in plain_form.items() if key != "$ref"}
        if not isinstance(target, dict) or target is plain_form or not siblings.keys() <= _IGNORED_WITH_REF:
            break
        plain_form = {**target, **siblings}
    return _merged(plain_form, plain_form, MAX_PASSES)


def _merged(schema: dict[str, Any], root: Any, passes: int) -> dict[str, Any]:
    """Return a schema with the properties of its ``allOf`` merged into its own; unchanged if these subschemas have
    anything else. ``root`` resolves references."""
    listed, own = schema.get("allOf"), schema.keys() - {"allOf"}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(listed, list) or not own <= _MERGED_KEYS or not passes:
        return schema
    if not isinstance(properties, dict) or not isinstance(required, list):
        return schema
    for one in listed:
        inner = _target(root, one["$ref"]) if isinstance(one, dict) and isinstance(one.get("$ref"), str) else one
        if inner is not one and not one.keys() - {"$ref"} <= _IGNORED_WITH_REF:
            return schema
        inner = _merged(inner, root, passes - 1) if isinstance(inner, dict) else {"not": {}}
        more, needed = inner.get("properties", {}), inner.get("required", [])
        if not (inner.keys() <= _MERGED_KEYS and isinstance(more, dict) and isinstance(needed, list)):
            return schema
        if properties.keys() & more.keys() or inner.get("type", "object") != "object":
            return schema
        properties, required = {**properties, **more}, [*required, *needed]
    merged = {key: schema[key] for key in own} | {"properties": properties}
    return merged | ({"required": required} if required else {})


def self_contained(schema: Any, root: Any) -> Any:
    """Return a subschema of ``root`` with all targets of its references in its own ``$defs``, by their pointers in
    ``root``."""
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
    return {**_retargeted(schema), "$defs": {unquote(one): _retargeted(target) for one, target in reached.items()}}


def _retargeted(schema: Any) -> Any:
    """Return a copy of a schema whose references point into ``$defs``, as in :func:`self_contained`."""
    if not isinstance(schema, dict):
        return schema
    made = with_inner(schema, _retargeted)
    if isinstance(made.get("$ref"), str):
        made["$ref"] = reference_to(("$defs", unquote(made["$ref"])))
    return made


def root_place(base: str, place: str) -> str:
    """Convert a JSON pointer in the result of :func:`self_contained` for the subschema at ``base`` to one in
    ``root``."""
    match parts_of(place):
        case ["$defs", name, *rest] if base and name.startswith("#"):
            return name[1:] + pointer(rest)
    return base + place


def relax(schema: Any, places: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Relax a normalized schema: remove ``places`` (JSON pointers) and whatever cannot be enforced. Return the relaxed
    schema, which all values of the original fit, and the removed places."""
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
    """Return a schema without the keyword at ``place``, a JSON pointer. If a subschema is at ``place``, it is reduced
    to its type, or to {}; if nothing is, the nearest enclosing schema is."""
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
        return _replaced(schema, path, _without_keyword(node, keyword))
    if path and node != (bare := _type_of(node)):
        return _replaced(schema, path, bare)
    return {}


def _type_of(schema: Any) -> Any:
    """Return a schema with only the ``type`` of another one, {} if it has none."""
    return {"type": schema["type"]} if isinstance(schema, dict) and len(schema) > 1 and "type" in schema else {}


def _without_keyword(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    """Return a schema without a keyword and the keywords that depend on it."""
    related = {
        **dict.fromkeys(("properties", "patternProperties"), "additionalProperties"),
        "prefixItems": "items",
        "items": "additionalItems",
    }
    made = {key: value for key, value in schema.items() if key not in (keyword, related.get(keyword))}
    if keyword == "oneOf":
        # At least one still has to match.
        made.setdefault("anyOf", schema[keyword])
    if keyword in ("enum", "const"):
        values = schema[keyword] if isinstance(schema[keyword], list) else [schema[keyword]]
        made.setdefault("type", sorted({TYPE_OF.get(type(value), "null") for value in values}))
    return made


def _replaced(schema: Any, path: list[str | int], new: Any) -> Any:
    """Set the value at ``path`` in a schema to ``new``, in place; return the schema, or ``new`` for an empty path."""
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


def _rewritten(schema: Any, whole: _Whole) -> Any:
    """Return a schema with its patterns and formats rewritten for llguidance."""
    if not isinstance(schema, dict):
        return schema
    schema = _numbers_rewritten(_names_rewritten(schema, whole))
    made = with_inner(schema, lambda inner: _rewritten(inner, whole))
    if isinstance(patterns := made.get("patternProperties"), dict):
        made["patternProperties"] = {rust_pattern(name, whole.excluded): inner for name, inner in patterns.items()}
    if isinstance(made.get("pattern"), str):
        made["pattern"] = rust_pattern(made["pattern"], whole.excluded)
    pattern = FORMAT_PATTERNS.get(str(schema.get("format")))
    others = made.get("allOf", [])
    if pattern is not None and isinstance(others, list):
        del made["format"]
        made["allOf"] = [*others, {"pattern": pattern}]
    if whole.excluded == NUL and any(names_in(schema)) and schema.get("additionalProperties") is not False:
        # First, since llguidance ignores "additionalProperties" after keywords that apply other schemas.
        made.pop("additionalProperties", None)
        # All names without control characters. Anchored, since unanchored patterns make masks slow.
        any_name = r"^[^\x00-\x1f\x7f]*$"
        return {"patternProperties": {any_name: True}, "additionalProperties": False, **made}
    return made


def _names_rewritten(schema: dict[str, Any], whole: _Whole) -> dict[str, Any]:
    """Return a schema in which every pattern of names matches a name that is not listed.

    llguidance excludes listed names from those that a pattern matches. If none remains, it still allows a comma, after
    which no token fits. So a pattern that matches only names in the schema is replaced by these names.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not (isinstance(patterns, dict) and patterns and isinstance(properties, dict)):
        return schema
    listed, others = {**properties}, {}
    max_texts, max_chars = len(whole.names), max(map(len, whole.names), default=0)
    for pattern, inner in patterns.items():
        texts = finite_matches(pattern, max_texts, max_chars)
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


def _numbers_rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of numbers whose contradictions llguidance detects: by itself it computes with floats, and
    ignores that a multiple of a fraction may have to be an integer."""
    step, kinds, bounds = _step(schema), _kinds(schema), schema
    schema = {**schema, **_offset_bounds(schema)}
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


def _offset_bounds(schema: dict[str, Any]) -> dict[str, float]:
    """Return a schema's exclusive integer bounds as floats, moved away from zero by BOUND_OFFSET."""
    low, high = _exact(schema.get("exclusiveMinimum")), _exact(schema.get("exclusiveMaximum"))
    bounds = (
        {"exclusiveMinimum": float(low) + BOUND_OFFSET} if low is not None and low.denominator == 1 and low >= 0 else {}
    )
    if high is not None and high.denominator == 1 and high <= 0:
        bounds["exclusiveMaximum"] = float(high) - BOUND_OFFSET
    return bounds


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
    """Return whether a schema is nested deeper than MAX_SCHEMA_DEPTH, too deep for recursive functions."""
    level, depth = [schema], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level, depth = [value for values in inner for value in values], depth + 1
    return bool(level)


def _faults(schema: Any, path: str, whole: _Whole) -> Iterator[tuple[str, str]]:
    """Yield :func:`schema_faults` of the subschema at ``path``, a JSON pointer."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield path, "a schema is an object, true or false"
        return
    for key, value in schema.items():
        reason = _fault(key, value, whole)
        if reason:
            yield path + pointer([key]), reason
    if whole.has_patterns and any(map(_has_long_control, names_in(schema))):
        yield path, "a property's name with a control character cannot be compared with patternProperties"
    for place, inner in inner_schemas(schema):
        yield from _faults(inner, path + pointer(place), whole)
    if "prefixItems" in schema and "additionalItems" in schema:
        yield f"{path}/additionalItems", "with prefixItems, the keyword for further items is items"
    if "additionalItems" in schema and _APPLICATORS & schema.keys():
        yield f"{path}/additionalItems", "not supported if another schema applies here too"
    step = _step(schema)
    mixed = whole.merges and whole.integers and (_kinds(schema) != ["integer"] or step.numerator > MAX_STEP)
    if mixed and step and 1 not in (step.numerator, step.denominator):
        yield f"{path}/multipleOf", "in a schema with integers, only an integer or 1 divided by an integer is supported"
    least = schema.get("minProperties")
    if isinstance(least, int) and least > _min_properties(schema) + 1:
        text = "names of unlisted properties may repeat, so at most one more than the required properties"
        yield f"{path}/minProperties", text


def _min_properties(schema: dict[str, Any]) -> int:
    """Return the number of an object's required properties."""
    needed = schema.get("required")
    return len(set(map(str, needed))) if isinstance(needed, list) else 0


def _fault(key: str, value: Any, whole: _Whole) -> str:
    """Return why a keyword cannot be enforced, "" if it can."""
    if key in UNSUPPORTED:
        return "this keyword is not supported"
    if key == "$schema" and not is_draft(str(value)):
        return "unknown draft of JSON Schema"
    if key == "type" and any(one not in TYPES for one in (value if isinstance(value, list) else [value])):
        return "unknown type"
    if key == "format" and (not isinstance(value, str) or value not in FORMATS):
        return f"Unknown format: {value}"
    if key in _NUMBERS and not all(map(_is_exact, _leaves(value))) and not (key == "maximum" and value == MAX_INTEGER):
        return "integers must fit into 64 bits and be exact as floats"
    if key in ("const", "enum") and whole.excluded == LONG_CONTROLS and _has_long_control(value):
        return "with patternProperties, or names with control characters, strings cannot contain control characters"
    if key == "$ref" and isinstance(value, str):
        if value in whole.dangling:
            return "the reference has no target in the schema"
        return "no finite value fits: it refers to itself" if value in whole.endless else ""
    patterns = [value] if key == "pattern" else value if key == "patternProperties" else ()
    for pattern in patterns if isinstance(patterns, list | dict) else ():
        if isinstance(pattern, str) and looks_around(pattern):
            return "look-around is not supported, except look-ahead at the beginning of a pattern"
        try:
            rust_pattern(pattern if isinstance(pattern, str) else "", whole.excluded)
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
