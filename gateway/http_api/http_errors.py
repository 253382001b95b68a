"""Writes errors as clients know them: a status and a JSON object, in OpenAI's form or in that of another API."""

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

# A client may try again after this time where the error names none: a lost component is back within seconds.
RETRY_AFTER_MS = 1000
# An error message repeats no more of a client's own text than this.
MAX_MESSAGE_CHARS = 4096

_INVALID = "invalid_request_error"
# For each kind of error this has the HTTP status, OpenAI's type and OpenAI's code.
_MAPPED: dict[type[PillionError], tuple[int, str, str | None]] = {
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
    """Describes an error response.

    Attributes:
        retry_after_ms: 0 where trying again does not help.
        final: whether trying again does harm; clients of OpenAI and Anthropic, which try every 500 again, are told so.
        brief: the message as Anthropic's clients know it, where it differs.
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
        """Returns the error's headers: Retry-After in whole seconds, as the standard has it, and in milliseconds, as
        OpenAI's clients read it; where an API key is needed, also which kind of key."""
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
    """Says how errors and ids of requests look to the clients of an API.

    Attributes:
        write: returns the status and the body of an error; its second argument is the request's id.
        name: the name of ``schema`` in the API's description.
        schema: the JSON schema of the body.
        statuses: the statuses that stand for OpenAI's, where they differ.
        id_headers: headers of responses that carry the request's id.
        event: makes the event of an error's body, for a stream that has begun.
        waiting: what a stream brings while its client waits for the first token.
    """

    write: Callable[[ApiError, str], tuple[int, bytes]]
    name: str
    schema: Mapping[str, Any]
    statuses: Mapping[int, int] = field(default_factory=dict)
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    event: Callable[[bytes], bytes] = b"data: %b\n\n".__mod__
    # A line that begins with a colon is a comment, which clients pass over.
    waiting: bytes = b": waiting\n\n"


def _openai(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Writes an error as ``{"error": {"message", "type", "param", "code"}}``, OpenAI's form."""
    text = error.message[:MAX_MESSAGE_CHARS]
    said = {"message": text, "type": error.kind, "param": error.param, "code": error.code}
    return error.status, msgspec.json.encode({"error": said})


OPENAI_ERRORS = ErrorForm(
    _openai,
    "Error",
    {
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
)


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Makes the error of a wrong field, with the status 400."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def from_pillion(error: PillionError, spelled: Mapping[str, str]) -> ApiError:
    """Makes the HTTP error that stands for ``error``. ``spelled`` has the client's names of fields, by the gateway's,
    where these differ."""
    status, kind, code = _MAPPED.get(type(error), (500, "server_error", "internal_error"))
    message, param, retry_after_ms, brief = error.message, None, 0, ""
    if isinstance(error, InvalidRequest) and isinstance(long := next(iter(error.violations), None), LengthViolation):
        message, brief, code = long.description, long.brief, "context_length_exceeded"
        param = spelled_field(long.field, spelled)
    elif isinstance(error, InvalidRequest) and error.violations:
        named = [(spelled_field(violation.field, spelled), violation.description) for violation in error.violations]
        message, param = "; ".join(f"{name}: {description}" for name, description in named), named[0][0]
    elif isinstance(error, Overloaded | Unavailable):
        retry_after_ms = error.retry_after_ms or RETRY_AFTER_MS
        if isinstance(error, Overloaded):
            # An error within a stream has no headers, so Codex reads the time from the text.
            message += f". Please try again in {retry_after_ms / 1000:g}s."
    elif isinstance(error, Unauthenticated):
        # Claude Code tells its user what to mend where it reads this header's name.
        brief = f"invalid x-api-key: {message}"
    final = isinstance(error, LethalRequest)
    return ApiError(
        status, message, kind=kind, param=param, code=code, retry_after_ms=retry_after_ms, final=final, brief=brief
    )


def spelled_field(field: str, spelled: Mapping[str, str]) -> str:
    """Returns the client's name of a field: ``sampling.stop[2]`` is ``stop[2]``. An item may have a name of its own.

    A name with ``[]`` stands for the field of any item.
    """
    if field in spelled:
        return spelled[field]
    whole = next((known for known in spelled if field.startswith(f"{known}.")), None)
    if whole is not None and not whole.endswith("]"):
        return spelled[whole] + field.removeprefix(whole)
    item, bracket, rest = field.partition("]")
    if item + bracket in spelled:
        return spelled[item + bracket] + rest
    name, bracket, rest = field.partition("[")
    number, _, inner = rest.partition("]")
    if inner and f"{name}[]" in spelled:
        return spelled[f"{name}[]"].replace("[]", f"[{number}]") + inner
    return spelled.get(name, name.removeprefix("sampling.").removeprefix("chat.")) + bracket + rest
