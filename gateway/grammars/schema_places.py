"""Subschemas of a schema, and targets of its references. Sans-IO (I9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

# Keywords with subschemas: by name, in a list, and alone.
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
ALONE = ("items", "additionalItems", "additionalProperties")
MAX_REFERENCE_STEPS = 50_000


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all its subschemas, except true and false."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += [inner for _, inner in inner_schemas(one)]


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the direct subschemas of a schema, with their paths."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in LISTED and isinstance(value, list):
            yield from (((key, n), inner) for n, inner in enumerate(value))
        elif key in ALONE:
            yield (key,), value


def with_inner(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with ``change`` applied to its direct subschemas."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: change(inner) for name, inner in value.items()}
        elif key in LISTED and isinstance(value, list):
            value = [change(inner) for inner in value]
        elif key in ALONE:
            value = change(value)
        made[key] = value
    return made


def names_in(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the property names in a schema's own keywords."""
    properties, required = schema.get("properties"), schema.get("required")
    yield from properties if isinstance(properties, dict) else ()
    yield from (name for name in required if isinstance(name, str)) if isinstance(required, list) else ()


def pointer(path: Iterable[str | int]) -> str:
    """Convert a path within a schema to a JSON pointer."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def reference_to(path: Iterable[str | int]) -> str:
    """Convert a path within a schema to a reference."""
    return f"#{quote(pointer(path), safe='/~$!')}"


def parts_of(text: str) -> list[str]:
    """Return the parts of a JSON pointer."""
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def at_pointer(root: Any, base: tuple[str | int, ...], text: str) -> tuple[str | int, ...] | None:
    """Return the path in ``root`` of a JSON pointer that begins at path ``base``; None if it leads to no schema."""
    node, path = root, list(base)
    for part in base:
        node = node[part]
    for part in parts_of(text):
        if isinstance(node, dict) and part in node:
            node = node[part]
            path.append(part)
        elif isinstance(node, list) and part.isdecimal() and len(part) < 9 and int(part) < len(node):
            node = node[int(part)]
            path.append(int(part))
        else:
            return None
    return tuple(path) if isinstance(node, dict | bool) else None


def endless_references(root: Any) -> frozenset[str]:
    """Return the references in a schema that no finite value fits, e.g. those to themselves."""
    schemas = list(schemas_in(root))
    targets: dict[str, Any] = {}
    for one in schemas:
        reference = one.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            targets[reference] = None
    for reference in targets:
        node = root
        for part in reference.split("/")[1:]:
            node = _child(node, part)
        targets[reference] = node
    return _EndlessReferences(targets).endless()


def _child(node: Any, part: str) -> Any:
    """Return the child of a JSON value for a part of a pointer, or None."""
    part = unquote(part).replace("~1", "/").replace("~0", "~")
    if isinstance(node, dict):
        return node.get(part)
    listed = isinstance(node, list) and part.isdecimal() and len(part) < 9
    return node[int(part)] if listed and int(part) < len(node) else None


class _EndlessReferences:
    """Fixpoint iteration for the references that no finite value fits: initially all, and each one that a value fits
    may make values of others finite."""

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._targets = targets
        self._endless = {one for one, target in targets.items() if isinstance(target, dict)}
        self._steps_left = MAX_REFERENCE_STEPS

    def endless(self) -> frozenset[str]:
        """Return the references that no finite value fits; none if that takes more than MAX_REFERENCE_STEPS."""
        order, before = list(self._targets), -1
        while before != len(self._endless) and self._steps_left > 0:
            before = len(self._endless)
            for one in order:
                if one in self._endless and self._is_finite(self._targets[one]):
                    self._endless.discard(one)
            # Alternating directions follow a chain of references to its end in one pass.
            order.reverse()
        return frozenset(self._endless if self._steps_left > 0 else ())

    def _is_finite(self, schema: Any) -> bool:
        """Return whether some finite JSON value may fit a schema, by its reference, combinations and type, and by the
        required contents of objects and lists; True if undecided."""
        self._steps_left -= 1
        if not isinstance(schema, dict) or self._steps_left < 0:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._endless:
            return False
        if not (
            all(self._each(schema, "allOf")) and any(self._each(schema, "anyOf")) and any(self._each(schema, "oneOf"))
        ):
            return False
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not {"object", "array"}.issuperset(map(str, kinds)) or "enum" in schema or "const" in schema:
            return True
        return ("object" in kinds and self._object_is_finite(schema)) or (
            "array" in kinds and self._array_is_finite(schema)
        )

    def _each(self, schema: Mapping[str, Any], key: str) -> Iterator[bool]:
        options = schema.get(key)
        return map(self._is_finite, options) if isinstance(options, list) and options else iter((True,))

    def _object_is_finite(self, schema: Mapping[str, Any]) -> bool:
        properties, needed = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(needed, list):
            return True
        return all(self._is_finite(properties.get(name)) for name in needed if isinstance(name, str))

    def _array_is_finite(self, schema: Mapping[str, Any]) -> bool:
        min_items, items = schema.get("minItems"), schema.get("items")
        first = items if isinstance(items, list) else schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        if not isinstance(min_items, int):
            return True
        return all(map(self._is_finite, first[: max(min_items, 0)])) and (
            min_items <= len(first) or self._is_finite(items)
        )
