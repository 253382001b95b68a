"""This module describes the HTTP API as an OpenAPI document.

routes, and the types that bodies are read as --describe--> /openapi.json --docs_page.page--> /docs, without scripts

What a field means is said once: in the docstrings of the bodies, and of the types that their fields end up in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from starlette.routing import Route

from pillion._version import VERSION
from pillion.gateway.http_api.http_call import Endpoint, Methods
from pillion.gateway.http_api.http_errors import ANTHROPIC_ERRORS
from pillion.gateway.http_api.openai_fields import HARMLESS, READ_AS, READ_LATER
from pillion.types import ChatOptions, SamplingParams

REF = "#/components/schemas/"
_ABOUT = "OpenAI's API with vLLM's additions to it, and Anthropic's Messages."
_HARMLESS = "Asks for what is not supported here; taken with the value that changes nothing."
_ERRORS = {
    "400": "A field is wrong, unknown or not supported; the message begins with its name.",
    "401": "An API key is needed, or this one is not known.",
    "404": "The model is not served here.",
    "429": "A bound or a quota is met; Retry-After says when to come again.",
    "503": "No worker serves the model now.",
}
_CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
_PROMPT = {"model": "demo", "prompt": "The capital of France is"}
# What each body may look like, by path. A test sends them.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT | {"max_tokens": 32},
    "/v1/completions": _PROMPT | {"max_tokens": 16},
    "/v1/responses": {"model": "demo", "input": "What is the capital of France?", "max_output_tokens": 32},
    "/v1/messages": _CHAT | {"max_tokens": 32},
    "/v1/messages/count_tokens": _CHAT,
    "/v1/files": {"purpose": "batch", "file": "@requests.jsonl"},
    "/v1/batches": {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "/v1/cache/prefixes": _PROMPT | {"name": "france", "ttl_s": 3600},
    "/v1/load_lora_adapter": {"lora_name": "style", "lora_path": "/srv/adapters/style"},
    "/v1/unload_lora_adapter": {"lora_name": "style"},
    "/tokenize": _PROMPT,
    "/detokenize": {"model": "demo", "tokens": [1, 2, 3]},
}
_ERROR_BODIES: dict[str, Any] = {
    "Error": {
        "type": "object",
        "description": "What an error's body holds.",
        "properties": {
            "error": {
                "type": "object",
                "description": "The error, with OpenAI's type and code.",
                "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "description": "What an error's body holds at Anthropic's door.",
        "properties": {
            "type": {"enum": ["error"], "description": "What this object is."},
            "error": {
                "type": "object",
                "description": "The error, with Anthropic's type.",
                "properties": {name: {"type": "string"} for name in ("type", "message")},
            },
            "request_id": {"type": "string", "description": "The request's id."},
        },
    },
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of ``routes``, whose applications are Endpoints, or Methods of several."""
    paths: dict[str, Any] = {}
    bodies: list[Any] = []
    for route, endpoint in _endpoints(routes):
        path = route.path_format
        operation: dict[str, Any] = {"summary": _summary(endpoint.handler), "operationId": endpoint.handler.__name__}
        anthropic = endpoint.error_form is ANTHROPIC_ERRORS
        error = _json("AnthropicError" if anthropic else "Error")
        operation["responses"] = {"200": {"description": "The answer."}} | {
            "529" if anthropic and status == "503" else status: {"description": text, "content": error}
            for status, text in _ERRORS.items()
            if endpoint.body is not None or (status == "401" and endpoint.needs_key)
        }
        if endpoint.needs_key:
            operation["security"] = [{"key": []}, {}]
        if route.param_convertors:
            named = ({"name": name, "in": "path", "required": True} for name in route.param_convertors)
            operation["parameters"] = [one | {"schema": {"type": "string"}} for one in named]
        if endpoint.body is not None:
            bodies.append(endpoint.body)
            content = _json(endpoint.body.__name__, endpoint.body_type)
            if path in EXAMPLES:
                content[endpoint.body_type]["example"] = EXAMPLES[path]
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    key = {"type": "http", "scheme": "bearer", "description": "Needed where the gateway runs with --api-keys."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pillion", "version": VERSION, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": _schemas(bodies) | _ERROR_BODIES, "securitySchemes": {"key": key}},
    }


def _schemas(bodies: Iterable[Any]) -> dict[str, Any]:
    """The schemas of bodies and of the objects in them, by name."""
    found: dict[str, Any] = {}
    waiting = list(bodies)
    while waiting:
        kind = waiting.pop(0)
        if kind.__name__ not in found:
            found[kind.__name__] = _object(READ_AS.get(kind, kind), waiting)
    return found


def _object(kind: Any, met: list[Any]) -> dict[str, Any]:
    """The schema of a struct; the structs in it are added to ``met``. A field that is read raw has the type that it is
    read as later; of one that is not supported only the values that change nothing are shown, and it is left out where
    there is none but null."""
    config = kind.__struct_config__
    meanings = _meanings(ChatOptions) | _meanings(SamplingParams)
    for base in reversed(kind.__mro__):
        meanings |= _meanings(base)
    properties: dict[str, Any] = {}
    if config.tag is not None:
        properties[config.tag_field] = {"enum": [config.tag], "description": "What this object is."}
    for field in msgspec.structs.fields(kind):
        found = _schema(READ_LATER.get(field.name, field.type) if field.type is Raw else field.type, met)
        if field.type is Raw and field.name not in READ_LATER:
            values = HARMLESS.get(field.name, ())
            if not values:
                continue
            found = {"enum": [*values, None], "description": _HARMLESS}
        elif field.type is Raw and not field.required:
            found = {"anyOf": [found, {"type": "null"}]}
        properties[field.name] = {"description": meanings.get(field.name, "")} | found
    return {
        "type": "object",
        "description": _summary(kind),
        "properties": properties,
        "required": [
            *([config.tag_field] if config.tag is not None else []),
            *(field.name for field in msgspec.structs.fields(kind) if field.required),
        ],
        "additionalProperties": False,
    }


def _schema(kind: Any, met: list[Any]) -> dict[str, Any]:
    """The schema of a field's type. Structs are added to ``met``, and are described under their names."""
    known = msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind
    match known:
        case msgspec.inspect.StructType():
            met.append(known.cls)
            return {"$ref": REF + known.cls.__name__}
        case msgspec.inspect.UnionType():
            return {"anyOf": [_schema(one, met) for one in known.types]}
        case msgspec.inspect.ListType():
            return {"type": "array", "items": _schema(known.item_type, met)}
        case msgspec.inspect.DictType():
            return {"type": "object", "additionalProperties": _schema(known.value_type, met)}
        case msgspec.inspect.Metadata():
            return _schema(known.type, met) | (known.extra_json_schema or {})
        case msgspec.inspect.LiteralType():
            return {"enum": list(known.values)}
    names = {
        "BoolType": "boolean",
        "IntType": "integer",
        "FloatType": "number",
        "StrType": "string",
        "NoneType": "null",
    }
    name = names.get(type(known).__name__)
    return {"type": name} if name else {}


def _endpoints(routes: Sequence[Route]) -> Iterator[tuple[Route, Endpoint]]:
    for route in routes:
        app: Any = route.app
        for endpoint in app.endpoints if isinstance(app, Methods) else (app,):
            yield route, endpoint


def _json(name: str, kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": {"$ref": REF + name}}}


def _summary(described: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split())


def _meanings(kind: type) -> dict[str, str]:
    """What a class's own docstring says about its attributes, by name."""
    section = inspect.cleandoc(kind.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
