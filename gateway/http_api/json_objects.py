"""JSON of a body that is passed on as text, such as a tool's schema: no objects are made of what is in it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.http_errors import refused

# The types of such fields. A bare Raw field is one that is not supported, or that is read later.
AnyJson = Annotated[Raw, msgspec.Meta(extra_json_schema={})]
JsonObject = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


def json_object(raw: Raw, field: str) -> str:
    """A JSON object as text. Raises ApiError where it is none."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError:
        raise refused(field, "not valid UTF-8", "invalid_json") from None
    if not text.startswith("{"):
        raise refused(field, "a JSON object is needed", "invalid_type")
    return text
