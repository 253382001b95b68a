"""What of JSON Schema an answer can be held to (I9).

llguidance refuses most of what it does not know. What it would let pass, or follow only nearly, is refused here, with
its place: an answer fits the whole schema, or there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pillion.gateway.grammars.json_strings import LONG_CONTROLS, NUL, format_pattern, rust_pattern

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
# Passes over a schema's references, for finding those without a value that ends; a schema that needs more is tried.
MAX_REFERENCE_ROUNDS = 16
# An answer is written as Python's json writes it, so that no model can write blanks for ever and what stands between
# two values is forced.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"
# Without the one that has four digits.
_SHORT_ESCAPES = 'nrbtf\\"'
# What further properties are held to where that is nothing, or where there are none.
_FREE = (None, True, False, {})
_CONTROLS = frozenset(map(chr, [*range(0x20), 0x7F]))
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ALONE = ("items", "additionalItems", "additionalProperties")
_APPLIED = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")


class _Whole:
    """What holds for all of a schema.

    A name that may be spelled in two ways could come as two properties: as the one that the schema names, and as
    another one, and a pattern could miss it. llguidance takes every spelling of a name for that of a further property.
    Where it holds further properties to nothing, they become those of a pattern, for which it spells all but control
    characters in one way alone. Elsewhere no escape with four digits is written at all.

    Attributes:
        root: the schema.
        lost: the control characters that the strings of its patterns go without (:func:`rust_pattern`).
        compares: whether it has patternProperties.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        schemas = list(_schemas(root))
        self.compares = any(one.get("patternProperties") for one in schemas)
        others = any(any(_names(one)) and one.get("additionalProperties") not in _FREE for one in schemas)
        controls = any(not _CONTROLS.isdisjoint(name) for one in schemas for name in _names(one))
        self.lost = LONG_CONTROLS if self.compares or others or controls else NUL

    def endless(self) -> frozenset[str]:
        """The references that no value fits which ends, such as those that lead back to themselves."""
        schemas = list(_schemas(self.root))
        if any("$id" in one for one in schemas[1:]):
            # It has several roots.
            return frozenset()
        targets: dict[str, Any] = {}
        for reference in {one["$ref"] for one in schemas if isinstance(one.get("$ref"), str)}:
            node = self.root if reference == "#" or reference.startswith("#/") else None
            for part in reference.split("/")[1:]:
                node = _child(node, part)
            targets[reference] = node
        endless, order = {one for one, target in targets.items() if isinstance(target, dict)}, sorted(targets)
        for _ in range(MAX_REFERENCE_ROUNDS):
            before = len(endless)
            for one in order:
                if one in endless and _ends(targets[one], endless):
                    endless.discard(one)
            if len(endless) == before:
                return frozenset(endless)
            order.reverse()
        return frozenset()


def schema_faults(schema: Any) -> Iterator[tuple[str, str]]:
    """Places in a parsed schema, as JSON pointers, and what is wrong there."""
    if isinstance(schema, dict) and _OPTIONS in schema:
        yield f"/{_OPTIONS}", "how an answer is written cannot be chosen"
    if _is_deep(schema):
        yield "", f"nested more than {MAX_SCHEMA_DEPTH} deep"
        return
    whole = _Whole(schema)
    yield from _faults(schema, "", whole, whole.endless())


def written(schema: Any) -> Any:
    """A checked schema as llguidance gets it, with how an answer is written."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    whole = _Whole(schema)
    writing = _WRITING if whole.lost == NUL else {**_WRITING, "json_allowed_escapes": _SHORT_ESCAPES}
    return {_OPTIONS: writing, **_followed(schema, whole)}


def _followed(schema: Any, whole: _Whole) -> Any:
    """A schema in which each string is followed as JSON Schema means it."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "patternProperties" and isinstance(value, dict):
            value = {rust_pattern(name, whole.lost): _followed(inner, whole) for name, inner in value.items()}
        elif key in _NAMED and isinstance(value, dict):
            value = {name: _followed(inner, whole) for name, inner in value.items()}
        elif key in _LISTED and isinstance(value, list):
            value = [_followed(inner, whole) for inner in value]
        elif key in _ALONE:
            value = _followed(value, whole)
        elif key == "pattern" and isinstance(value, str):
            value = rust_pattern(value, whole.lost)
        made[key] = value
    pattern = format_pattern(str(schema.get("format")))
    others = made.get("allOf", [])
    if pattern is not None and isinstance(others, list):
        del made["format"]
        made["allOf"] = [*others, {"pattern": pattern}]
    if whole.lost == NUL and any(_names(schema)) and schema.get("additionalProperties") is not False:
        # Before what applies other schemas here, because llguidance overlooks it behind that.
        made.pop("additionalProperties", None)
        return {"patternProperties": {"": True}, "additionalProperties": False, **made}
    return made


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas that are objects: a schema, then those within it."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += [inner for _, inner in _inner(one)]


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The schemas that stand in a schema, and where."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from (((key, n), inner) for n, inner in enumerate(value))
        elif key in _ALONE:
            yield (key,), value


def _names(schema: Mapping[str, Any]) -> Iterator[str]:
    """The names of properties in a schema's own keywords."""
    properties, required = schema.get("properties"), schema.get("required")
    yield from properties if isinstance(properties, dict) else ()
    yield from (name for name in required if isinstance(name, str)) if isinstance(required, list) else ()


def _child(node: Any, part: str) -> Any:
    """What stands in a JSON value under a part of a pointer; None where nothing does."""
    part = unquote(part).replace("~1", "/").replace("~0", "~")
    if isinstance(node, dict):
        return node.get(part)
    return node[int(part)] if isinstance(node, list) and part.isdecimal() and int(part) < len(node) else None


def _ends(schema: Any, endless: set[str]) -> bool:
    """Whether some value that fits a schema ends, as far as its own keywords tell, where no value does that fits what
    one of ``endless`` references."""
    if not isinstance(schema, dict):
        return True

    def end(key: str) -> Iterator[bool]:
        options = schema.get(key)
        return (_ends(one, endless) for one in options) if isinstance(options, list) and options else iter((True,))

    if schema.get("$ref") in endless or not (all(end("allOf")) and any(end("anyOf")) and any(end("oneOf"))):
        return False
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not {"object", "array"}.issuperset(map(str, kinds)) or "enum" in schema or "const" in schema:
        return True
    return ("object" in kinds and _object_ends(schema, endless)) or ("array" in kinds and _array_ends(schema, endless))


def _object_ends(schema: Mapping[str, Any], endless: set[str]) -> bool:
    properties, needed = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(needed, list):
        return True
    return all(_ends(properties.get(name), endless) for name in needed if isinstance(name, str))


def _array_ends(schema: Mapping[str, Any], endless: set[str]) -> bool:
    least, items = schema.get("minItems"), schema.get("items")
    first = items if isinstance(items, list) else schema.get("prefixItems")
    first = first if isinstance(first, list) else []
    if not isinstance(least, int):
        return True
    return all(_ends(one, endless) for one in first[: max(least, 0)]) and (least <= len(first) or _ends(items, endless))


def _is_deep(schema: Any) -> bool:
    """Whether a schema is nested too deeply for what reads it by recursion."""
    level, depth = [schema], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level, depth = [value for values in inner for value in values], depth + 1
    return bool(level)


def _faults(schema: Any, path: str, whole: _Whole, endless: frozenset[str]) -> Iterator[tuple[str, str]]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield path, "a schema is an object, true or false"
        return
    for key, value in schema.items():
        reason = _fault(key, value, whole, endless)
        if reason:
            yield f"{path}/{_escaped(key)}", reason
    if whole.compares and any(map(_has_long_control, _names(schema))):
        yield path, "a property's name with a control character cannot be compared with patternProperties"
    for place, inner in _inner(schema):
        yield from _faults(inner, path + "".join(f"/{_escaped(str(part))}" for part in place), whole, endless)
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


def _fault(key: str, value: Any, whole: _Whole, endless: frozenset[str]) -> str:
    """What is wrong with a keyword by itself; "" for nothing."""
    if key in UNSUPPORTED and not (key == "uniqueItems" and value is False):
        return "no answer can be held to this keyword here"
    if key in _NUMBERS and not _is_exact(value):
        return f"an integer beyond {MAX_EXACT_INTEGER} is not exact here"
    if key in ("const", "enum") and whole.lost == LONG_CONTROLS and _has_long_control(value):
        return "beside patternProperties, or names with control characters, no string has control characters"
    if key == "$ref" and isinstance(value, str):
        if not _leads_to_a_schema(value):
            return "a reference within a schema leads to where a schema stands, such as $defs"
        return "no value fits it that ends: it leads back to itself" if value in endless else ""
    patterns = [value] if key == "pattern" else value if key == "patternProperties" else ()
    for pattern in patterns if isinstance(patterns, list | dict) else ():
        try:
            rust_pattern(pattern if isinstance(pattern, str) else "", whole.lost)
        except ValueError as error:
            return str(error)
    return ""


def _leads_to_a_schema(reference: str) -> bool:
    """Whether what a reference names would be followed as a schema: a keyword's name and what stands under it."""
    _, _, fragment = reference.partition("#")
    if not fragment.startswith("/"):
        return True
    parts = [part.replace("~1", "/").replace("~0", "~") for part in unquote(fragment).split("/")[1:]]
    while parts:
        key = parts.pop(0)
        if key in _NAMED or (key in _LISTED and parts and parts[0].isdigit()):
            if not parts:
                return False
            del parts[0]
        elif key not in _ALONE:
            return False
    return True


def _is_exact(value: Any) -> bool:
    """Whether no integer in ``value`` is beyond what a float holds."""
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    return not isinstance(value, int) or abs(value) <= MAX_EXACT_INTEGER


def _has_long_control(value: Any) -> bool:
    """Whether a string in a value has a control character that has no short escape."""
    if isinstance(value, str):
        return any(one in LONG_CONTROLS for one in value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_long_control, inner))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
