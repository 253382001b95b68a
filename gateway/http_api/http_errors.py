"""Errors in the formats of clients: a status and a JSON object, OpenAI's or another API's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec

from pillion.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    LengthViolation,
    LethalRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PillionError,
    Unauthenticated,
    Unavailable,
)

# Retry-After of errors without one: a lost component is back within seconds.
RETRY_AFTER_MS = 1000
MAX_MESSAGE_CHARS = 4096

_INVALID = "invalid_request_error"
_HTTP_ERRORS: dict[type[PillionError], tuple[int, str, str | None]] = {
    InvalidRequest: (400, _INVALID, "invalid_value"),
    NotFound: (404, _INVALID, "not_found"),
    Conflict: (409, _INVALID, "conflict"),
    Overloaded: (429, "rate_limit_error", "rate_limit_exceeded"),
    Unavailable: (503, "server_error", "unavailable"),
    DeadlineExceeded: (504, "timeout_error", "deadline_exceeded"),
    Cancelled: (499, _INVALID, "cancelled"),
    Unauthenticated: (401, _INVALID, "invalid_api_key"),
    PermissionDenied: (403, "permission_error", "permission_denied"),
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response.

    Attributes:
        retry_after_ms: time after which to retry; 0 if a retry is useless.
        final: whether a retry does harm. OpenAI's and Anthropic's clients retry every 500 unless a header forbids it.
        brief: the message for Anthropic's clients, if different.
    """

    status: int
    message: str
    _: KW_ONLY
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None
    retry_after_ms: int = 0
    final: bool = False
    brief: str = ""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the error's headers: Retry-After in seconds, and in milliseconds for OpenAI's clients; with status
        401, WWW-Authenticate."""
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        if self.final:
            return [(b"x-should-retry", b"false")]
        if not self.retry_after_ms:
            return []
        seconds = math.ceil(self.retry_after_ms / 1000)
        return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % self.retry_after_ms)]


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """Format of errors and request ids of an API.

    Attributes:
        write: returns an error's status and body; its second argument is the request's id.
        name: name of ``schema`` in the OpenAPI document.
        schema: JSON schema of the body.
        statuses: OpenAI's statuses -> the API's, where different.
        id_headers: response headers with the request's id.
        event: converts an error's body to an event of a stream that has started.
        waiting: a ping for a stream without a first token.
    """

    write: Callable[[ApiError, str], tuple[int, bytes]]
    name: str
    schema: Mapping[str, Any]
    statuses: Mapping[int, int] = field(default_factory=dict)
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    event: Callable[[bytes], bytes] = b"data: %b\n\n".__mod__
    # A comment, which clients ignore.
    waiting: bytes = b": waiting\n\n"


def _openai_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Encode an error as ``{"error": {"message", "type", "param", "code"}}``, OpenAI's format."""
    text = error.message[:MAX_MESSAGE_CHARS]
    content = {"message": text, "type": error.kind, "param": error.param, "code": error.code}
    return error.status, msgspec.json.encode({"error": content})


OPENAI_ERRORS = ErrorForm(
    _openai_error,
    "Error",
    {
        "type": "object",
        "description": "Body of an error response.",
        "properties": {
            "error": {
                "type": "object",
                "description": "The error, with OpenAI's type and code.",
                "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
            }
        },
    },
)


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error of an invalid field, with status 400."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def from_pillion(error: PillionError, client_names: Mapping[str, str]) -> ApiError:
    """Convert a PillionError to an ApiError.

    ``client_names`` maps the gateway's names of fields to the client's, where different.
    """
    status, kind, code = _HTTP_ERRORS.get(type(error), (500, "server_error", "internal_error"))
    message, param, retry_after_ms, brief = error.message, None, 0, ""
    if isinstance(error, InvalidRequest) and isinstance(long := next(iter(error.violations), None), LengthViolation):
        message, brief, code = long.description, long.brief, "context_length_exceeded"
        param = client_field(long.field, client_names)
    elif isinstance(error, InvalidRequest) and error.violations:
        named = [(client_field(violation.field, client_names), violation.description) for violation in error.violations]
        message, param = "; ".join(f"{name}: {description}" for name, description in named), named[0][0]
    elif isinstance(error, Overloaded | Unavailable):
        retry_after_ms = error.retry_after_ms or RETRY_AFTER_MS
        if isinstance(error, Overloaded):
            # Codex reads the delay from the text, since an error within a stream has no headers.
            message += f". Please try again in {retry_after_ms / 1000:g}s."
    elif isinstance(error, Unauthenticated):
        # Claude Code explains the fix to its user if the text has this header's name.
        brief = f"invalid x-api-key: {message}"
    final = isinstance(error, LethalRequest)
    return ApiError(
        status, message, kind=kind, param=param, code=code, retry_after_ms=retry_after_ms, final=final, brief=brief
    )


def client_field(field: str, client_names: Mapping[str, str]) -> str:
    """Return the client's name of a field: ``sampling.stop[2]`` is ``stop[2]``.

    In ``client_names``, the key ``name[]`` covers all items of a list; ``name[3]`` takes precedence.
    """
    if field in client_names:
        return client_names[field]
    parent = next((name for name in client_names if field.startswith(f"{name}.")), None)
    if parent is not None and not parent.endswith("]"):
        return client_names[parent] + field.removeprefix(parent)
    item, bracket, rest = field.partition("]")
    if item + bracket in client_names:
        return client_names[item + bracket] + rest
    name, bracket, rest = field.partition("[")
    number, _, inner = rest.partition("]")
    if inner and f"{name}[]" in client_names:
        return client_names[f"{name}[]"].replace("[]", f"[{number}]") + inner
    return client_names.get(name, name.removeprefix("sampling.").removeprefix("chat.")) + bracket + rest
