"""Makes the page at /docs, which shows people the OpenAPI document: contents, a call of each path, all fields."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from html import escape
from typing import Any

import msgspec

from pillion.gateway.http_api.asked_address import USUAL_HOST
from pillion.gateway.http_api.openapi import POLICY, REF

# In the page that is sent, the address that its reader asked stands in place of this one.
ADDRESS = f"http://{USUAL_HOST}"
# Wide tables and lines scroll by themselves, so that the page fits into a phone; colours follow the system's scheme.
_STYLE = (
    ":root{color-scheme:light dark;background:light-dark(#fff,#111418);color:light-dark(#1a1d21,#e9ebee)}"
    "a{color:light-dark(#2450b8,#8fb4ff)}"
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;overflow-wrap:anywhere}"
    "nav ul{columns:20rem;padding-left:1.2rem}li{break-inside:avoid}"
    "h2{margin-top:2.5rem}h3{margin:2rem 0 .3rem}p{margin:.3rem 0}"
    "pre,.wide{overflow-x:auto}pre{background:#8882;border-radius:.4rem;padding:.6rem .8rem}"
    "table{border-collapse:collapse;width:100%;min-width:32rem}"
    "td,th{border-bottom:1px solid #8884;padding:.3rem .6rem;text-align:left;vertical-align:top}"
    "td:first-child{white-space:nowrap}code{font-family:ui-monospace,monospace;font-size:.9em}"
)


def page(document: dict[str, Any]) -> bytes:
    """Makes the page of an OpenAPI document. The page loads nothing and runs no script."""
    operations = [
        (path, method.upper(), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    title = f"{document['info']['title']} {document['info']['version']}"
    calls = [
        (operation["operationId"], f"<code>{method} {escape(path)}</code>") for path, method, operation in operations
    ]
    parts = [
        f"<header><h1>{title}</h1><p>{document['info']['description']} Programs read all this as "
        "<a href='openapi.json'>openapi.json</a>. Where the gateway asks for keys, add "
        "<code>-H &quot;Authorization: Bearer $PILLION_API_KEY&quot;</code> to a call.</p></header>",
        _contents("Calls", calls),
        _contents("Types", [(name, name) for name in schemas]),
        "<main><h2>Calls</h2>",
        *(_call(path, method, operation) for path, method, operation in operations),
        "<h2>Types</h2>",
        *(_type(name, schema) for name, schema in schemas.items()),
        "</main>",
    ]
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>".encode()


def _contents(title: str, entries: list[tuple[str, str]]) -> str:
    listed = "".join(f"<li><a href='#{name}'>{text}</a></li>" for name, text in entries)
    return f"<nav aria-label='{title}'><h2>{title}</h2><ul>{listed}</ul></nav>"


def _call(path: str, method: str, operation: dict[str, Any]) -> str:
    """Describes one operation of the API as HTML: what it does, what its body is, and a command for a shell where one
    works as it stands."""
    text = f"<h3 id='{operation['operationId']}'><code>{method} {escape(path)}</code></h3>"
    text += f"<p>{escape(operation['summary'])}</p>"
    example: dict[str, Any] | None = None
    kind = ""
    if "requestBody" in operation:
        ((kind, content),) = operation["requestBody"]["content"].items()
        text += f"<p>Body: {_kind(content['schema'])}, as {kind}</p>"
        example = content.get("example")
    if example is not None or (method == "GET" and "{" not in path):
        text += f"<pre tabindex='0'><code>{escape(' '.join(_command(path, kind, example)))}</code></pre>"
    return text


def _command(path: str, kind: str, example: dict[str, Any] | None) -> Iterator[str]:
    """Yields the words of a call with curl."""
    yield f"curl {ADDRESS}{path}"
    if kind == "application/json":
        yield f"-H 'Content-Type: application/json' \\\n  -d {shlex.quote(json.dumps(example))}"
    elif example is not None:
        yield from (f"-F {shlex.quote(f'{name}={value}')}" for name, value in example.items())


def _type(name: str, schema: dict[str, Any]) -> str:
    """Makes a table of the fields of an object, which scrolls sideways where it is too wide for the page."""
    rows = (
        f"<tr><td><code>{escape(field)}</code>{' (needed)' if field in schema.get('required', ()) else ''}</td>"
        f"<td>{_kind(kind)}</td><td>{kind.get(POLICY, '')}</td><td>{escape(kind.get('description', ''))}</td></tr>"
        for field, kind in schema["properties"].items()
    )
    heads = "<tr><th>field</th><th>type</th><th>policy</th><th>meaning</th></tr>"
    wide = f"<div class='wide' role='region' aria-label='Fields of {name}' tabindex='0'>"
    about = f"<h3 id='{name}'>{name}</h3><p>{escape(schema.get('description', ''))}</p>"
    return f"{about}{wide}<table>{heads}{''.join(rows)}</table></div>"


def _kind(schema: dict[str, Any]) -> str:
    """Describes a schema in words, as HTML."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REF)
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(msgspec.json.encode(one).decode())}</code>" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if schema.get("type") == "object" and schema.get("additionalProperties"):
        return f"object of {_kind(schema['additionalProperties'])}"
    named = schema.get("type", "any value")
    return " or ".join(named) if isinstance(named, list) else str(named)
