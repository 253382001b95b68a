"""The HTTP API as an OpenAPI document.

routes, and the types of bodies --describe--> /openapi.json --docs_page.page--> /docs, without scripts

A field is described once, in the docstring of its body or of the type that it is parsed as.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from starlette.routing import Route

from pillion._version import VERSION
from pillion.gateway.http_api.body_reading import harmless_values, is_ignored
from pillion.gateway.http_api.http_call import Endpoint, Methods
from pillion.gateway.http_api.json_objects import OTHER
from pillion.gateway.http_api.openai_fields import READ_AS, READ_LATER
from pillion.types import ChatOptions, SamplingParams

REF = "#/components/schemas/"
_ABOUT = (
    "OpenAI's API with vLLM's additions, and further endpoints of the same port. Unknown fields have no effect, and"
    " null means absent. The response header x-pillion-ignored names the fields that had no effect. Fields whose"
    " omission would change the answer are refused, and so is, at the top of a body, a name that is one edit away from"
    " a known one."
)
POLICY = "x-pillion-policy"
CARRIED_OUT, NO_EFFECT, REFUSED = "carried out", "no effect", "refused"
_HARMLESS = "Requests an unsupported feature; accepted with a value that changes nothing."
_ERRORS = {
    400: "A field is wrong, misspelled or refused; the message starts with its name.",
    401: "An API key is missing or unknown.",
    403: "The key lacks a permission, or a browser sent the call for a page of another origin.",
    404: "The model, or the resource in the path, does not exist.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The body has another content type.",
    429: "A limit or a quota is reached; retry after Retry-After.",
    431: "Path and headers are too large.",
    500: "An internal error of the gateway or a worker.",
    503: "A component that the call needs is not running.",
}
_OF_ALL, _OF_KEYS, _OF_BODIES = (431, 500), (400, 401, 403, 404, 429, 503), (408, 413, 415)


def describe(routes: Sequence[Route], root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of ``routes``, whose applications are Endpoints or Methods."""
    paths: dict[str, Any] = {}
    bodies: list[Any] = []
    errors: dict[str, Any] = {}
    taken: set[str] = set()
    for route, endpoint in _endpoints(routes):
        path, name = route.path_format, endpoint.handler.__name__
        # Operation ids are unique, but a handler may have several paths.
        name = f"{name}_{re.sub('[^A-Za-z0-9]+', '_', path).strip('_')}" if name in taken else name
        taken.add(name)
        operation: dict[str, Any] = {"summary": _summary(endpoint.handler), "operationId": name}
        form = endpoint.error_form
        errors[form.name] = form.schema
        operation["responses"] = {"200": {"description": "The answer."}} | {
            str(form.statuses.get(status, status)): {"description": text, "content": _json(form.name)}
            for status, text in _ERRORS.items()
            if status in _OF_ALL + endpoint.statuses
            or (status in _OF_KEYS and endpoint.needs_key)
            or (status in _OF_BODIES and endpoint.body is not None)
        }
        if endpoint.needs_key:
            operation["security"] = [{"key": []}, {}]
        if route.param_convertors:
            named = ({"name": name, "in": "path", "required": True} for name in route.param_convertors)
            operation["parameters"] = [one | {"schema": {"type": "string"}} for one in named]
        if endpoint.body is not None:
            bodies.append(endpoint.body)
            content = _json(endpoint.body.__name__, endpoint.body_type)
            if endpoint.example is not None:
                content[endpoint.body_type]["example"] = endpoint.example
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    key = {"type": "http", "scheme": "bearer", "description": "Required if the gateway runs with --api-keys."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pillion", "version": VERSION, "description": _ABOUT},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": _schemas(bodies) | errors, "securitySchemes": {"key": key}},
    }


def _schemas(bodies: list[Any]) -> dict[str, Any]:
    """Return the schemas of bodies, and of the objects within them, by name."""
    found: dict[str, Any] = {}
    waiting = list(bodies)
    while waiting:
        kind = waiting.pop(0)
        if kind.__name__ not in found:
            found[kind.__name__] = _object(READ_AS.get(kind, kind), waiting)
    return found


def _object(kind: Any, met: list[Any]) -> dict[str, Any]:
    """Return the schema of a struct, and append the structs in it to ``met``.

    A raw field has the type that it is parsed as later; an unsupported one only the values that change nothing.
    """
    config = kind.__struct_config__
    meanings = _meanings(ChatOptions) | _meanings(SamplingParams)
    for base in reversed(kind.__mro__):
        meanings |= _meanings(base)
    properties: dict[str, Any] = {}
    if config.tag is not None:
        properties[config.tag_field] = {"enum": [config.tag], "description": "Type of the object."}
    for field in msgspec.structs.fields(kind):
        found = _schema(READ_LATER.get(field.name, field.type) if field.type is Raw else field.type, met)
        policy = NO_EFFECT if is_ignored(field) else CARRIED_OUT
        if field.type is Raw and field.name not in READ_LATER:
            found = {"enum": [*harmless_values(field.name), None], "description": _HARMLESS}
            policy = REFUSED
        elif field.type is Raw and not field.required:
            found = {"anyOf": [found, {"type": "null"}]}
        meaning = {"description": meanings.get(field.name, ""), POLICY: policy}
        properties[field.encode_name] = meaning | found
    return {
        "type": "object",
        "description": _summary(kind),
        "properties": properties,
        "required": [
            *([config.tag_field] if config.tag is not None else []),
            *(field.name for field in msgspec.structs.fields(kind) if field.required),
        ],
    }


def _schema(kind: Any, met: list[Any]) -> dict[str, Any]:
    """Return the schema of a field's type. Structs are referred to by name, and appended to ``met``."""
    known = msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind
    match known:
        case msgspec.inspect.StructType(tag=tag) if tag == OTHER:
            return {"type": "object"}
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
    """Return the first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split())


def _meanings(kind: type) -> dict[str, str]:
    """Return the descriptions of a class's attributes, by name, from its own docstring."""
    section = inspect.cleandoc(kind.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
