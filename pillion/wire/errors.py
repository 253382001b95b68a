"""Converts errors to rich gRPC statuses (google.rpc) and back: BadRequest, RetryInfo and QuotaFailure.

    raised by a servicer --to_status--> status + details in the trailers --from_rpc_error--> raised by the client

Trailers also carry ``grpc-retry-pushback-ms`` (gRFC A6) with UNAVAILABLE: a gateway that has already retried sends -1,
so that clients' automatic retries do not multiply its own.

gRPC's clients reject trailers above 8 KiB, randomly up to 16, and then report another error. So texts that repeat what
a client sent are truncated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pillion.errors import (
    BY_CODE,
    FieldViolation,
    Internal,
    InvalidRequest,
    Overloaded,
    PillionError,
    QuotaViolation,
    Unavailable,
)

log = logging.getLogger("pillion.wire.errors")

# Max bytes of a message, which the trailers contain twice, once in gRPC's encoding; and of the violations.
MAX_MESSAGE_BYTES = 2048
MAX_VIOLATIONS_BYTES = 3072


def to_status(error: PillionError) -> Any:
    """Return the rich status of ``error``: BadRequest for violations, RetryInfo for a wait, QuotaFailure for limits."""
    details = []
    if isinstance(error, InvalidRequest) and error.violations:
        details.append(_packed(error_details_pb2.BadRequest(field_violations=_first_violations(error))))
    if isinstance(error, Overloaded | Unavailable) and error.retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if isinstance(error, Overloaded) and error.quotas:
        details.append(_packed(error_details_pb2.QuotaFailure(violations=map(asdict, error.quotas))))
    status = rpc_status.to_status(status_pb2.Status(code=error.code, message=_cut(error.message), details=details))
    if isinstance(error, Unavailable):
        pushback = ("grpc-retry-pushback-ms", str(error.retry_after_ms or -1))
        status = status._replace(trailing_metadata=(*status.trailing_metadata, pushback))
    return status


def said_by_server(error: grpc.RpcError) -> bool:
    """Return whether a Pillion server ended the call with this error, and not gRPC itself because a connection was lost
    or a server was shut down."""
    return _status_of(error) is not None


def from_rpc_error(error: grpc.RpcError) -> PillionError:
    """Return the exception of a failed call, details included. ``error`` is a call's, so it has a code."""
    code, message = error.code(), error.details() or ""
    cls = BY_CODE.get(code.value[0], Internal)
    status = _status_of(error)
    retry_after_ms = int(_detail(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds())
    if cls is InvalidRequest:
        fields = _detail(status, error_details_pb2.BadRequest).field_violations
        return InvalidRequest(message, tuple(FieldViolation(v.field, v.description) for v in fields))
    if cls is Overloaded:
        quotas = _detail(status, error_details_pb2.QuotaFailure).violations
        return Overloaded(message, retry_after_ms, tuple(QuotaViolation(v.subject, v.description) for v in quotas))
    if cls is Unavailable:
        return Unavailable(message, retry_after_ms)
    return cls(message)


def as_pillion_error(error: BaseException, method: str) -> PillionError:
    """Return the error that the caller of ``method`` gets for an exception of its handler. Unexpected exceptions
    are logged, and become Internal without details."""
    if isinstance(error, PillionError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)
    log.exception("%s failed", method, exc_info=error)
    return Internal("internal error; see the server's log")


def _cut(text: str) -> str:
    """Truncate a text to MAX_MESSAGE_BYTES in gRPC's encoding, which has %XX for each byte of a non-ASCII
    character."""
    left_bytes = MAX_MESSAGE_BYTES
    for index, character in enumerate(text):
        left_bytes -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if left_bytes < 0:
            return text[:index] + "..."
    return text


def _first_violations(error: InvalidRequest) -> Iterator[dict[str, str]]:
    """Yield the first violations, at least one, that fit in MAX_VIOLATIONS_BYTES."""
    left_bytes = MAX_VIOLATIONS_BYTES
    for number, violation in enumerate(error.violations):
        fields = {"field": _cut(violation.field), "description": _cut(violation.description)}
        left_bytes -= sum(len(text.encode()) for text in fields.values())
        if number and left_bytes < 0:
            return
        yield fields


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _status_of(error: grpc.RpcError) -> Any:
    """Return the google.rpc.Status in the trailers; None if there is none or it is broken."""
    try:
        if isinstance(error, grpc.aio.AioRpcError):
            for key, value in error.trailing_metadata() or ():
                if key == "grpc-status-details-bin":
                    return status_pb2.Status.FromString(value)
            return None
        return rpc_status.from_call(error)
    except (ValueError, TypeError):
        return None


def _detail(status: Any, kind: Any) -> Any:
    """Return a status's detail of this kind; an empty message if it has none."""
    message = kind()
    for detail in status.details if status is not None else ():
        if detail.Is(kind.DESCRIPTOR) and detail.Unpack(message):
            break
    return message
