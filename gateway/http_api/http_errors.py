"""Errors as clients know them: a status and a JSON object, in OpenAI's form or, at Anthropic's door, in Anthropic's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec

from pillion.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    LethalRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PillionError,
    Unauthenticated,
    Unavailable,
)

# Time after which a client may try again where the error has none: a lost component comes back within seconds.
RETRY_AFTER_MS = 1000
# No message repeats more of a client's own text than this.
MAX_MESSAGE_CHARS = 4096

_INVALID = "invalid_request_error"
# HTTP status, OpenAI's type, OpenAI's code.
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
# Anthropic's types of errors, by the status that OpenAI's clients get.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response. ``retry_after_ms`` is 0 where trying again does not help; ``final``: where it does harm, which
    clients of OpenAI and Anthropic, who try every 500 again, are told."""

    status: int
    message: str
    _: KW_ONLY
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None
    retry_after_ms: int = 0
    final: bool = False

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After in whole seconds, as the standard has it, and in milliseconds, as OpenAI's clients read it; where
        a key is needed, what kind."""
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
    """How errors and ids of requests look to the clients of an API.

    Attributes:
        write: the status and the body of an error; its second argument is the request's id.
        id_headers: headers of responses that carry the request's id.
    """

    write: Callable[[ApiError, str], tuple[int, bytes]]
    id_headers: tuple[bytes, ...] = (b"x-request-id",)


def _openai(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    text = error.message[:MAX_MESSAGE_CHARS]
    said = {"message": text, "type": error.kind, "param": error.param, "code": error.code}
    return error.status, msgspec.json.encode({"error": said})


def _anthropic(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """``{"type": "error", "error": {"type", "message"}, "request_id"}``; 503 is Anthropic's 529."""
    kind = _ANTHROPIC_TYPES.get(error.status, _INVALID if error.status < 500 else "api_error")
    said = {"type": kind, "message": error.message[:MAX_MESSAGE_CHARS]}
    status = 529 if error.status == 503 else error.status
    return status, msgspec.json.encode({"type": "error", "error": said, "request_id": request_id})


OPENAI_ERRORS = ErrorForm(_openai)
ANTHROPIC_ERRORS = ErrorForm(_anthropic, (b"x-request-id", b"request-id"))


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """The error of a wrong field: 400."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def from_pillion(error: PillionError, spelled: Mapping[str, str]) -> ApiError:
    """The answer that stands for ``error``. ``spelled``: the client's names of fields, by the gateway's, where these
    differ."""
    status, kind, code = _MAPPED.get(type(error), (500, "server_error", "internal_error"))
    message, param, retry_after_ms = error.message, None, 0
    if isinstance(error, InvalidRequest) and error.violations:
        named = [(_spell(violation.field, spelled), violation.description) for violation in error.violations]
        message, param = "; ".join(f"{name}: {description}" for name, description in named), named[0][0]
    elif isinstance(error, Overloaded | Unavailable):
        retry_after_ms = error.retry_after_ms or RETRY_AFTER_MS
    final = isinstance(error, LethalRequest)
    return ApiError(status, message, kind=kind, param=param, code=code, retry_after_ms=retry_after_ms, final=final)


def _spell(field: str, spelled: Mapping[str, str]) -> str:
    """The client's name of a field: ``sampling.stop[2]`` is ``stop[2]``. An item may have a name of its own.

    A name with ``[]`` is that of what is in any item.
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
