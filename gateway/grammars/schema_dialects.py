"""Converts a client's schema, of any draft or dialect, to draft 2020-12 with references as pointers from its root. What
cannot be converted is left unchanged, to be refused elsewhere. Sans-IO (I9).

    drafts 3 and 4     exclusiveMinimum: true, required: true, divisibleBy
    later drafts       $id, $anchor, $dynamicRef, unevaluatedProperties, propertyNames
    OpenAPI, Gemini    nullable, the format of a number, "STRING", "minItems": "1"
    other writers      null for a keyword, [] for an object, "float", definitions away from the root
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

from pillion.gateway.grammars.schema_places import (
    NAMED,
    at_pointer,
    inner_schemas,
    parts_of,
    pointer,
    reference_to,
    schemas_in,
    with_inner,
)

Path = tuple[str | int, ...]

MAX_PASSES = 8
# Max subschemas moved into $defs per pass.
MAX_MOVED = 10_000

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_TYPES = {one: one for one in TYPES} | {
    "str": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "none": "null",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "any": "",
    "type_unspecified": "",
}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains")
_VALUES = ("const", "default", "example", "examples")
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "example", "deprecated"})
_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "dependentSchemas"})
_REFERENCES = frozenset(
    {"$ref", "$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"}
)
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), ({}, True)),
    "propertyNames": ({}, True, {"type": "string"}),
    "uniqueItems": (False,),
    "not": (False,),
    "allOf": ([],),
}
_REQUIRED_SIBLINGS = {"then": ("if",), "else": ("if",), "minContains": ("contains",), "maxContains": ("contains",)}
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[3467]|draft/20(19-09|20-12))/schema#?")
_DEFINITIONS = ("$defs", "definitions")
_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_SET_REPEATED = re.compile(r"\^?(\\[dDsSwW]|\[\^?(?:\\.|[^\]\\])+\])\*\$")


def plain_schema(schema: Any) -> Any:
    """Return the equivalent of a parsed schema in draft 2020-12. It must not be nested too deeply for recursion."""
    made = _plain(schema)
    if any(not _REFERENCES.isdisjoint(one) for one in schemas_in(made)):
        return _with_references(made)
    return made


def _plain(schema: Any) -> Any:
    """Return :func:`plain_schema` of a schema, except for references."""
    if not isinstance(schema, dict):
        return schema
    needed = [
        name
        for name, inner in (_object(schema.get("properties")) or {}).items()
        if isinstance(inner, dict) and inner.get("required") is True
    ]
    made = {key: {} if key in NAMED and value == [] else value for key, value in schema.items()}
    made = with_inner({k: v for k, v in made.items() if v is not None or k in _VALUES}, _plain)
    if made.get("not") == {} or made.get("not") is True:
        return False
    made = {key: value for key, value in made.items() if not _has_no_effect(key, value, made)}
    if needed:
        others = made.get("required")
        made["required"] = [*dict.fromkeys([*(others if isinstance(others, list) else ()), *needed])]
    elif isinstance(made.get("required"), bool):
        del made["required"]
    for word in _COUNTS:
        value = made.get(word)
        if (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and value.isdecimal()):
            made[word] = int(value)
    _normalize_types(made)
    _convert_bounds(made)
    _convert_members(made)
    if isinstance(made.get("pattern"), str):
        _split_look_ahead(made, made["pattern"])
    return made


def is_draft(name: str) -> bool:
    """Return whether llguidance accepts a draft's URI."""
    return _DRAFTS.fullmatch(name) is not None


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _has_no_effect(key: str, value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a keyword with ``value`` has no effect in ``schema``."""
    if key == "$schema":
        return not isinstance(value, str) or ("//json-schema.org/" in value and not is_draft(value))
    if key == "additionalItems" and "prefixItems" not in schema:
        return not isinstance(schema.get("items"), list)
    # In Python, True == 1.
    trivial = any(
        value == one and isinstance(value, bool) is isinstance(one, bool) for one in _WITHOUT_EFFECT.get(key, ())
    )
    return trivial or (key in _REQUIRED_SIBLINGS and schema.keys().isdisjoint(_REQUIRED_SIBLINGS[key]))


def _normalize_types(made: dict[str, Any]) -> None:
    """Replace the type names in a schema by JSON Schema's, in place, and drop formats of numbers."""
    given, nullable = made.get("type"), made.pop("nullable", False)
    listed = given if isinstance(given, list) else [given]
    names = [one for one in listed if isinstance(one, str)]
    if listed and len(names) == len(listed):
        named = list(dict.fromkeys(_TYPES.get(one.lower(), one) for one in names))
        if nullable is True and "" not in named and "null" not in named:
            named.append("null")
        if "" in named:
            del made["type"]
        else:
            made["type"] = named if isinstance(given, list) or len(named) > 1 else named[0]
        # A number's format is its storage width.
        if "string" not in named and "" not in named:
            made.pop("format", None)
    if made.get("format") in ("", "password"):
        del made["format"]


def _convert_bounds(made: dict[str, Any]) -> None:
    """Convert boolean exclusive bounds and divisibleBy, of drafts 3 and 4, in place."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(exclusive), bool):
            excludes = made.pop(exclusive)
            if excludes and bound in made:
                made[exclusive] = made.pop(bound)
    if "divisibleBy" in made and "multipleOf" not in made:
        made["multipleOf"] = made.pop("divisibleBy")


def _convert_members(made: dict[str, Any]) -> None:
    """Convert unevaluatedProperties, unevaluatedItems and propertyNames to plainer keywords, in place, where these mean
    the same."""
    if _APPLICATORS.isdisjoint(made):
        for far, near in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if far in made and not isinstance(made.get(near), list):
                value = made.pop(far)
                made.setdefault(near, _plain(value))
    names = _object(made.get("propertyNames"))
    if names is None or not {"properties", "patternProperties"}.isdisjoint(made):
        return
    keywords = {key: value for key, value in names.items() if key not in _ANNOTATIONS}
    if keywords.get("type") == "string":
        del keywords["type"]
    others = made.get("additionalProperties", True)
    match keywords:
        case {"pattern": str() as pattern} if len(keywords) == 1:
            made["patternProperties"] = {pattern: others}
        case {"enum": [*listed]} if len(keywords) == 1 and all(isinstance(one, str) for one in listed):
            made["properties"] = dict.fromkeys(listed, others)
        case _:
            return
    made["additionalProperties"] = False
    del made["propertyNames"]


def _split_look_ahead(made: dict[str, Any], pattern: str) -> None:
    """Split a schema's pattern with leading look-aheads into several patterns, all of which must match, in place."""
    parts = _PART.findall(pattern)
    at, ahead = 1, []
    while parts[:1] == ["^"] and parts[at : at + 2] == ["(", "?"] and parts[at + 2 : at + 3] in (["="], ["!"]):
        end = _group_end(parts, at)
        inner = "".join(parts[at + 3 : end])
        only = _SET_REPEATED.fullmatch(inner)
        if parts[at + 2] == "=":
            ahead.append(f"^(?:{inner.removeprefix('^')})")
        elif only is not None:
            ahead.append(_complement(only[1]))
        else:
            return
        at = end + 1
    depth = 0
    for part in parts[at:]:
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            return
    others = made.get("allOf", [])
    if ahead and not any("(?" in one.replace("(?:", "") for one in ahead) and isinstance(others, list):
        made["pattern"] = f"^{''.join(parts[at:])}"
        made["allOf"] = [*others, *({"pattern": one} for one in ahead)]


def looks_around(pattern: str) -> bool:
    """Return whether a pattern has look-ahead or look-behind."""
    parts = _PART.findall(pattern)
    return any(
        parts[at : at + 2] == ["(", "?"] and "".join(parts[at + 2 : at + 4]).startswith(("=", "!", "<=", "<!"))
        for at in range(len(parts))
    )


def _group_end(parts: list[str], at: int) -> int:
    """Return the index of the part that closes the group at index ``at``, or the number of parts."""
    depth = 0
    for index in range(at, len(parts)):
        depth += (parts[index] == "(") - (parts[index] == ")")
        if not depth:
            return index
    return len(parts)


def _complement(pattern: str) -> str:
    """Return the complement of a character class or an escape such as ``\\d``."""
    if pattern[0] == "\\":
        return "\\" + pattern[1].swapcase()
    return f"[{pattern[2:]}" if pattern[1] == "^" else f"[^{pattern[1:]}"


class _Place(NamedTuple):
    """A subschema: its path, its base URI, and the nearest enclosing schema with definitions, maybe itself."""

    path: Path
    schema: dict[str, Any]
    base: str
    scope: _Scope | None


class _Scope(NamedTuple):
    """A schema with definitions, and the nearest enclosing one, or None."""

    path: Path
    schema: dict[str, Any]
    around: _Scope | None


def _places(root: dict[str, Any]) -> Iterator[_Place]:
    """Yield the place of a schema, and those of its subschemas."""
    alone = "draft-0" in str(root.get("$schema"))
    waiting = [_Place((), root, "", None)]
    while waiting:
        path, schema, base, scope = waiting.pop()
        own = schema.get("$id")
        # Up to draft 7, "$ref" overrides its siblings.
        if isinstance(own, str) and not own.startswith("#") and not (alone and "$ref" in schema):
            base = urljoin(base, own).rstrip("#")
        if any(isinstance(schema.get(word), dict) for word in _DEFINITIONS):
            scope = _Scope(path, schema, scope)
        yield _Place(path, schema, base, scope)
        for inner, one in inner_schemas(schema):
            if isinstance(one, dict):
                waiting.append(_Place((*path, *inner), one, base, scope))


class _Targets:
    """Targets of a schema's references."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.places = list(_places(root))
        self._resources: dict[str, Path] = {"": ()}
        self._anchors: dict[tuple[str, str], Path] = {}
        self._dynamic: dict[str, list[Path]] = {}
        self._defined: dict[str, list[Path]] = {}
        for place in self.places:
            self._resources.setdefault(place.base, place.path)
            for word in ("$anchor", "$dynamicAnchor", "$id", "id"):
                name = place.schema.get(word)
                if isinstance(name, str) and (word in ("$anchor", "$dynamicAnchor") or name.startswith("#")):
                    self._anchors.setdefault((place.base, name.lstrip("#")), place.path)
                    if word == "$dynamicAnchor":
                        self._dynamic.setdefault(name, []).append(place.path)
            for word in _DEFINITIONS:
                for name in _object(place.schema.get(word)) or ():
                    self._defined.setdefault(name, []).append((*place.path, word, name))

    def path(self, reference: str, place: _Place) -> Path | None:
        """Resolve a ``$ref`` that appears at ``place``; None if it has no target."""
        before, _, fragment = reference.partition("#")
        base = urljoin(place.base, before) if before else place.base
        fragment = unquote(fragment)
        if base not in self._resources:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((base, fragment))
        resource = self._resources[base]
        target = at_pointer(self._root, resource, fragment)
        if target is not None or before:
            return target
        # Schemas embedded in another one often keep their references.
        parts = parts_of(fragment)
        if len(parts) < 2 or parts[0] not in _DEFINITIONS:
            return None
        scope = place.scope
        while scope is not None and parts[1] not in (_object(scope.schema.get(parts[0])) or ()):
            scope = scope.around
        if scope is not None:
            return at_pointer(self._root, scope.path, fragment)
        named = self._defined.get(parts[1], [])
        return named[0] if len(named) == 1 and len(parts) == 2 else None

    def dynamic(self, reference: str, place: _Place) -> Path | None:
        """Return the target of a dynamic reference; None if there is none, or if it depends on the referrer."""
        name = reference.removeprefix("#")
        named = self._dynamic.get(name, [])
        return self.path(reference, place) if len(named) < 2 and len(self._resources) < 3 else None


def _with_references(root: dict[str, Any], passes: int = MAX_PASSES) -> dict[str, Any]:
    """Return a schema whose references are pointers from its root; targets that are not subschemas move into
    ``$defs``."""
    targets = _Targets(root)
    subschema_paths = {place.path for place in targets.places}
    hoisted: dict[str, Any] = {}
    moved = 0
    for place in targets.places:
        for word in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference = place.schema.get(word)
            if not isinstance(reference, str):
                continue
            path = (targets.path if word == "$ref" else targets.dynamic)(reference, place)
            if path is None or (word != "$ref" and "$ref" in place.schema):
                continue
            del place.schema[word]
            target_pointer = pointer(path)
            target = _at(root, path)
            if (
                path not in subschema_paths
                and isinstance(target, dict)
                and target_pointer not in hoisted
                and moved < MAX_MOVED
            ):
                hoisted[target_pointer] = _plain(target)
                moved += sum(1 for _ in schemas_in(hoisted[target_pointer]))
            place.schema["$ref"] = reference_to(("$defs", target_pointer) if target_pointer in hoisted else path)
    for place in targets.places:
        for word in ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"):
            place.schema.pop(word, None)
    if not hoisted or not passes:
        return root
    extended = {**root, "$defs": {**(_object(root.get("$defs")) or {}), **hoisted}}
    # The moved schemas may have further references.
    return _with_references(extended, passes - 1)


def _at(node: Any, path: Path) -> Any:
    for part in path:
        node = node[part]
    return node
