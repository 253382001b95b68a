"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

import msgspec

from pillion.gateway.http_api.http_errors import MAX_MESSAGE_CHARS, ApiError, ErrorForm

# Status -> Anthropic's error type, where it is not that of the status class.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Error details for a request of a stored thread: Anthropic's tool runner then continues without one.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
# Anthropic's status for an overloaded service.
_STATUSES = {503: 529}


def _write(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Encode ``{"type": "error", "error": {"type", "message", "details"}, "request_id"}``; details are optional."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    content: dict[str, Any] = {"type": kind, "message": (error.brief or error.message)[:MAX_MESSAGE_CHARS]}
    if error.param == "thread":
        content["details"] = _NO_THREADS
    status = _STATUSES.get(error.status, error.status)
    return status, msgspec.json.encode({"type": "error", "error": content, "request_id": request_id})


ANTHROPIC_ERRORS = ErrorForm(
    _write,
    "AnthropicError",
    {
        "type": "object",
        "description": "Body of an error response of Anthropic's API.",
        "properties": {
            "type": {"enum": ["error"], "description": "Type of the object."},
            "error": {
                "type": "object",
                "description": "The error, with Anthropic's type.",
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string"},
                    "details": {"type": "object", "description": "Machine-readable details, of a few errors."},
                },
            },
            "request_id": {"type": "string", "description": "The request's id."},
        },
    },
    _STATUSES,
    (b"x-request-id", b"request-id"),
    b"event: error\ndata: %b\n\n".__mod__,
    b'event: ping\ndata: {"type":"ping"}\n\n',
)
