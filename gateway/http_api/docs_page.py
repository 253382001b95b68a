"""The page at /docs, which renders the OpenAPI document: contents, a curl command per path, all fields."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pillion.gateway.http_api.openapi import POLICY, REF
from pillion.gateway.http_api.public_url import DEFAULT_ADDRESS

# Placeholder for the URL by which the reader reached the port.
ADDRESS = f"http://{DEFAULT_ADDRESS}"


def page(document: dict[str, Any]) -> bytes:
    """Render an OpenAPI document. The page loads nothing and runs no script."""
    import jinja2

    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(source)
    operations = [
        (path, method.upper(), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    return template.render(
        info=document["info"], operations=operations, schemas=schemas, command=_command, policy=POLICY, ref=REF
    ).encode()


def _command(path: str, method: str, operation: dict[str, Any]) -> str:
    """Return a curl command for an operation, "" if it needs values that only the reader has."""
    contents: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    kind = next(iter(contents), "")
    parts, example = [f"curl {ADDRESS}{path}"], contents[kind].get("example") if kind else None
    if example is None:
        return parts[0] if method == "GET" and "{" not in path else ""
    if kind == "application/json":
        parts.append(f"-H 'Content-Type: application/json' \\\n  -d {shlex.quote(json.dumps(example))}")
    else:
        parts += [f"-F {shlex.quote(f'{name}={value}')}" for name, value in example.items()]
    return " ".join(parts)
