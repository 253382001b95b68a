"""The shape of an answer as a type of the caller's: its JSON schema, and the value that an answer's text becomes.

A pydantic model and a msgspec struct bring both themselves. Dataclasses, TypedDicts and what stands in them are read
here, because the SDK alone brings neither library.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from pillion.types import Delta, FinishReason, SamplingParams, StructuredOutputs

# A JSON schema as a mapping or as text, or a type.
Schema = Mapping[str, Any] | str | type[Any]

_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """A JSON schema as text, and what makes a value of an answer's text."""

    text: str
    parse: Callable[[str], Any]


class ParsedAnswers:
    """Adds the value of each answer to its last delta. One that was cut short has none."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse
        self._texts: dict[int, list[str]] = {}

    def note(self, delta: Delta) -> Delta:
        """The stream's next delta. Raises what the caller's type raises for a value that it does not take."""
        texts = self._texts.setdefault(delta.index, [])
        texts.append(delta.text)
        if delta.finish_reason is not FinishReason.STOP or delta.stop_string:
            return delta
        return replace(delta, parsed=self._parse("".join(texts)))


def answer_schema(schema: Schema) -> AnswerSchema:
    """Reads a schema or a type. Raises TypeError for one that has no JSON schema, ValueError for what is no JSON."""
    if isinstance(schema, str):
        json.loads(schema)
        return AnswerSchema(schema, json.loads)
    if isinstance(schema, Mapping):
        return AnswerSchema(json.dumps(dict(schema), allow_nan=False), json.loads)
    kind: Any = schema
    if hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate_json"):
        return AnswerSchema(json.dumps(_closed(kind.model_json_schema())), kind.model_validate_json)
    if hasattr(kind, "__struct_fields__"):
        # The caller's struct has imported it.
        msgspec = sys.modules["msgspec"]
        return AnswerSchema(
            json.dumps(_closed(msgspec.json.schema(kind))), lambda text: msgspec.json.decode(text, type=kind)
        )
    found = _TypeReader()
    described = found.schema(kind)
    whole = {**described, "$defs": found.definitions} if found.definitions else described
    return AnswerSchema(json.dumps(whole), lambda text: _value(kind, json.loads(text)))


def with_schema(sampling: SamplingParams, schema: AnswerSchema | None) -> SamplingParams:
    """The sampling parameters with the schema as their shape. Raises TypeError where they have one."""
    if schema is None:
        return sampling
    if sampling.structured_outputs is not None:
        raise TypeError("give schema or structured_outputs, not both")
    return replace(sampling, structured_outputs=StructuredOutputs(json=schema.text))


def _closed(schema: Any) -> Any:
    """The schema of a type without room for properties that the type does not have."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: value if key in ("default", "const", "enum", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if made.get("type") == "object" and isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


class _TypeReader:
    """Reads types; ``definitions`` are the schemas of the classes in them, by name."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def schema(self, kind: Any) -> dict[str, Any]:
        """The JSON schema of a type. Raises TypeError."""
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
    """The fields of a dataclass that are set by name, or of a TypedDict, and their types."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        return {
            name: get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint
            for name, hint in hints.items()
        }
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _required(kind: Any) -> list[str]:
    if is_typeddict(kind):
        # Where annotations are texts, the class itself does not know which of them say that they are not required.
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


def _value(kind: Any, found: Any) -> Any:
    """What JSON's ``found``, which fits the schema of ``kind``, is as that type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return _value(arguments[0], found)
    if origin in (Union, types.UnionType):
        return _value(next(one for one in arguments if _fits(one, found)), found)
    if kind is float:
        return float(found)
    if origin is list:
        return [_value(arguments[0], one) for one in found]
    if origin is tuple and arguments[-1:] == (...,):
        return tuple(_value(arguments[0], one) for one in found)
    if origin is tuple:
        return tuple(_value(inner, one) for inner, one in zip(arguments, found, strict=True))
    if origin is dict:
        return {name: _value(arguments[1], one) for name, one in found.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(found)
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        fields = _fields(kind)
        made: Any = kind
        return made(**{name: _value(fields[name], one) for name, one in found.items()})
    return found


def _fits(kind: Any, found: Any) -> bool:
    """Whether JSON's ``found`` may be of a type, as far as tells members of a union apart."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is typing.Annotated:
        return _fits(arguments[0], found)
    if origin is Literal:
        return any(type(one) is type(found) and one == found for one in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(one, found) for one in arguments)
    if kind is float:
        return isinstance(found, int | float) and not isinstance(found, bool)
    if kind in _PLAIN or kind is None:
        return type(found) is (type(None) if kind is None else kind)
    if kind is list or origin is list:
        return isinstance(found, list) and (not arguments or all(_fits(arguments[0], one) for one in found))
    if origin is tuple:
        inner = arguments[:1] * len(found) if arguments[-1:] == (...,) and isinstance(found, list) else arguments
        return isinstance(found, list) and len(found) == len(inner) and all(map(_fits, inner, found))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return found in [one.value for one in kind]
    if not isinstance(found, dict):
        return False
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        fields = _fields(kind)
        known = set(_required(kind)) <= set(found) <= set(fields)
        return known and all(_fits(fields[name], one) for name, one in found.items())
    return not arguments or all(_fits(arguments[1], one) for one in found.values())
