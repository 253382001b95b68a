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
# Key of a property: whether the field is carried out, has no effect, or is refused.
POLICY = "x-pillion-policy"
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


def describe(routes: Sequence[Route], root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of ``routes``, whose applications are Endpoints or Methods."""
    paths: dict[str, Any] = {}
    bodies: list[Any] = []
    errors: dict[str, Any] = {}
    used_names: set[str] = set()
    for route, endpoint in _endpoints(routes):
        path, name = route.path_format, endpoint.handler.__name__
        # Operation ids are unique, but a handler may have several paths.
        name = f"{name}_{re.sub('[^A-Za-z0-9]+', '_', path).strip('_')}" if name in used_names else name
        used_names.add(name)
        operation: dict[str, Any] = {"summary": _summary(endpoint.handler), "operationId": name}
        form = endpoint.error_form
        errors[form.name] = form.schema
        operation["responses"] = {"200": {"description": "The answer."}} | {
            str(form.statuses.get(status, status)): {"description": text, "content": _json(form.name)}
            for status, text in _ERRORS.items()
            if status in (431, 500, *endpoint.statuses)
            or (status in (400, 401, 403, 404, 429, 503) and endpoint.needs_key)
            or (status in (408, 413, 415) and endpoint.body is not None)
        }
        if endpoint.needs_key:
            operation["security"] = [{"key": []}, {}]
        if route.param_convertors:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in route.param_convertors
            ]
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
    schemas: dict[str, Any] = {}
    pending = list(bodies)
    while pending:
        kind = pending.pop(0)
        if kind.__name__ not in schemas:
            schemas[kind.__name__] = _object(READ_AS.get(kind, kind), pending)
    return schemas


def _object(kind: Any, pending: list[Any]) -> dict[str, Any]:
    """Return the schema of a struct, and append the structs that it refers to to ``pending``.

    A raw field has the schema of the type that it is parsed as later; an unsupported one has only harmless values.
    """
    config = kind.__struct_config__
    descriptions = _descriptions(ChatOptions) | _descriptions(SamplingParams)
    for base in reversed(kind.__mro__):
        descriptions |= _descriptions(base)
    properties: dict[str, Any] = {}
    if config.tag is not None:
        properties[config.tag_field] = {"enum": [config.tag], "description": "Type of the object."}
    for field in msgspec.structs.fields(kind):
        schema = _schema(READ_LATER.get(field.name, field.type) if field.type is Raw else field.type, pending)
        policy = "no effect" if is_ignored(field) else "carried out"
        if field.type is Raw and field.name not in READ_LATER:
            text = "Requests an unsupported feature; accepted with a value that changes nothing."
            schema = {"enum": [*harmless_values(field.name), None], "description": text}
            policy = "refused"
        elif field.type is Raw and not field.required:
            schema = {"anyOf": [schema, {"type": "null"}]}
        described = {"description": descriptions.get(field.name, ""), POLICY: policy}
        properties[field.encode_name] = described | schema
    return {
        "type": "object",
        "description": _summary(kind),
        "properties": properties,
        "required": [
            *([config.tag_field] if config.tag is not None else []),
            *(field.name for field in msgspec.structs.fields(kind) if field.required),
        ],
    }


def _schema(kind: Any, pending: list[Any]) -> dict[str, Any]:
    """Return the schema of a field's type. Structs are referred to by name, and appended to ``pending``."""
    info = msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind
    match info:
        case msgspec.inspect.StructType(tag=tag) if tag == OTHER:
            return {"type": "object"}
        case msgspec.inspect.StructType():
            pending.append(info.cls)
            return {"$ref": REF + info.cls.__name__}
        case msgspec.inspect.UnionType():
            return {"anyOf": [_schema(one, pending) for one in info.types]}
        case msgspec.inspect.ListType():
            return {"type": "array", "items": _schema(info.item_type, pending)}
        case msgspec.inspect.DictType():
            return {"type": "object", "additionalProperties": _schema(info.value_type, pending)}
        case msgspec.inspect.Metadata():
            return _schema(info.type, pending) | (info.extra_json_schema or {})
        case msgspec.inspect.LiteralType():
            return {"enum": list(info.values)}
    names = {
        "BoolType": "boolean",
        "IntType": "integer",
        "FloatType": "number",
        "StrType": "string",
        "NoneType": "null",
    }
    name = names.get(type(info).__name__)
    return {"type": name} if name else {}


def _endpoints(routes: Sequence[Route]) -> Iterator[tuple[Route, Endpoint]]:
    for route in routes:
        app: Any = route.app
        for endpoint in app.endpoints if isinstance(app, Methods) else (app,):
            yield route, endpoint


def _json(name: str, kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": {"$ref": REF + name}}}


def _summary(described: Any) -> str:
    """Return the first paragraph of the docstring of ``described``, in one line."""
    return " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split())


def _descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of a class's attributes, by name, from its own docstring."""
    section = inspect.cleandoc(kind.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
