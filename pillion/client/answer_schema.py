"""Answers as values of a caller's type: converts the type to a JSON schema, and parses answers.

Pydantic and msgspec do both for their own types. Dataclasses, TypedDicts and builtin types are handled here, because
the SDK depends on neither library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from pillion.types import Delta, FinishReason, SamplingParams, StructuredOutputs, Value

Schema = Mapping[str, Any] | str | type[Value]

_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """A JSON schema as text, and the parser of answers."""

    text: str
    parse: Callable[[str], Any]


class ParsedAnswers:
    """Adds the parsed value of each answer to its last delta; a truncated answer has no value."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse
        self._texts: dict[int, list[str]] = {}

    def note(self, delta: Delta) -> Delta:
        """Return the stream's next delta, with the parsed value if it completes an answer. Raises whatever the caller's
        type raises for an invalid value."""
        texts = self._texts.setdefault(delta.index, [])
        texts.append(delta.text)
        if delta.finish_reason is not FinishReason.STOP or delta.stop_string:
            return delta
        return replace(delta, parsed=self._parse("".join(texts)))


def answer_schema(schema: Schema) -> AnswerSchema:
    """Convert a JSON schema or a type. Raises TypeError for a type without a JSON schema, and ValueError for text that
    is not JSON."""
    if isinstance(schema, str):
        json.loads(schema)
        return AnswerSchema(schema, json.loads)
    if isinstance(schema, Mapping):
        return AnswerSchema(json.dumps(dict(schema), allow_nan=False), json.loads)
    kind: Any = schema
    if hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate_json"):
        return AnswerSchema(json.dumps(_closed(kind.model_json_schema())), kind.model_validate_json)
    if hasattr(kind, "__struct_fields__"):
        msgspec = sys.modules["msgspec"]
        return AnswerSchema(
            json.dumps(_closed(msgspec.json.schema(kind))), lambda text: msgspec.json.decode(text, type=kind)
        )
    reader = _TypeReader()
    described = reader.schema(kind)
    whole = {**described, "$defs": reader.definitions} if reader.definitions else described
    return AnswerSchema(json.dumps(whole), lambda text: _value(kind, json.loads(text)))


def with_schema(sampling: SamplingParams, schema: AnswerSchema | None) -> SamplingParams:
    """Return sampling parameters with the schema as structured output. Raises TypeError if they have one already."""
    if schema is None:
        return sampling
    if sampling.structured_outputs is not None:
        raise TypeError("give schema or structured_outputs, not both")
    return replace(sampling, structured_outputs=StructuredOutputs(json=schema.text))


def _closed(schema: Any) -> Any:
    """Return a schema that forbids additional properties of objects with listed properties."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: value if key in ("default", "const", "enum", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


class _TypeReader:
    """Converts types to JSON schemas; ``definitions`` has those of contained classes, by name."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def schema(self, kind: Any) -> dict[str, Any]:
        """Return the JSON schema of a type. Raises TypeError."""
        if kind is Any:
            return {}
        if kind in _PLAIN or kind is None:
            return {"type": _PLAIN[type(None) if kind is None else kind]}
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is typing.Annotated:
            return self.schema(arguments[0])
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.schema(one) for one in arguments]}
        if kind is list or origin is list:
            return {"type": "array", **({"items": self.schema(arguments[0])} if arguments else {})}
        if origin is tuple and arguments[-1:] == (...,):
            return {"type": "array", "items": self.schema(arguments[0])}
        if origin is tuple:
            items = [self.schema(one) for one in arguments]
            return {
                "type": "array",
                "prefixItems": items,
                "items": False,
                "minItems": len(items),
                "maxItems": len(items),
            }
        if kind is dict or (origin is dict and arguments[0] is str):
            return {"type": "object", **({"additionalProperties": self.schema(arguments[1])} if arguments else {})}
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return {"enum": [one.value for one in kind]}
        if dataclasses.is_dataclass(kind) or is_typeddict(kind):
            return {"$ref": f"#/$defs/{self._defined(kind)}"}
        raise TypeError(f"{kind!r} has no JSON schema here; give a JSON schema, a pydantic model or a msgspec struct")

    def _defined(self, kind: Any) -> str:
        if kind not in self._names:
            name = kind.__name__ if kind.__name__ not in self.definitions else f"{kind.__name__}_{len(self._names)}"
            self._names[kind] = name
            self.definitions[name] = {}
            self.definitions[name] = {
                "type": "object",
                "properties": {field: self.schema(inner) for field, inner in _fields(kind).items()},
                "required": _required(kind),
                "additionalProperties": False,
            }
        return self._names[kind]


def _fields(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that its constructor accepts, or of a TypedDict, with their types."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        return {
            name: get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint
            for name, hint in hints.items()
        }
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _required(kind: Any) -> list[str]:
    if is_typeddict(kind):
        # With string annotations, __required_keys__ ignores Required and NotRequired.
        marks = {name: get_origin(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
        unmarked = kind.__required_keys__
        return [
            name for name, mark in marks.items() if mark is Required or (mark is not NotRequired and name in unmarked)
        ]
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is missing and field.default_factory is missing
    ]


class _UnfitError(ValueError):
    """A value is not of a type; another type of a union may fit."""


def _value(kind: Any, value: Any) -> Any:
    """Convert ``value``, parsed from JSON, to type ``kind``. Raises _UnfitError for a value of another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Annotated:
        return _value(arguments[0], value)
    if origin in (Union, types.UnionType):
        for one in arguments:
            with contextlib.suppress(_UnfitError):
                return _value(one, value)
    elif origin is Literal:
        if any(type(one) is type(value) and one == value for one in arguments):
            return value
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif kind in _PLAIN or kind is None:
        if type(value) is (type(None) if kind is None else kind):
            return value
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if value in [one.value for one in kind]:
            return kind(value)
    elif isinstance(value, list) and (kind is list or origin is list):
        return [_value(arguments[0], one) for one in value] if arguments else value
    elif isinstance(value, list) and origin is tuple:
        inner = arguments[:1] * len(value) if arguments[-1:] == (...,) else arguments
        if len(value) == len(inner):
            return tuple(map(_value, inner, value))
    elif isinstance(value, dict) and (dataclasses.is_dataclass(kind) or is_typeddict(kind)):
        fields = _fields(kind)
        if set(_required(kind)) <= set(value) <= set(fields):
            made: Any = kind
            return made(**{name: _value(fields[name], one) for name, one in value.items()})
    elif isinstance(value, dict) and (kind is dict or origin is dict):
        return {name: _value(arguments[1], one) for name, one in value.items()} if arguments else value
    raise _UnfitError(f"{value!r} is not a {kind!r}")
