"""gRPC habits of every part: limits, keepalive, health, reflection, and the one place where errors become statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
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
    Unavailable,
)

log = logging.getLogger("pillion.rpc")

# A 128K-token prompt is 0.5 MB of varints; a megabyte of text tokenizes to less than that.
MAX_MESSAGE_BYTES = 16 * 2**20
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# Servers answer faster pings with GOAWAY too_many_pings; ours allow what our clients send.
MIN_PING_INTERVAL_MS = 10_000

_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
]
_CLIENT_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_permit_without_calls", 1),
    # Parts restart: find them again within a second rather than after gRPC's two minutes of backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that one attempt to connect may take; a loaded machine needs more than the backoff.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would share its connections at random; a taken port is an error at start.
    ("grpc.so_reuseport", 0),
]


def open_channel(target: str) -> grpc.aio.Channel:
    """A channel to ``host:port`` or ``unix:path``. The caller closes it."""
    return grpc.aio.insecure_channel(target, options=_CLIENT_OPTIONS)


def sync_channel(target: str) -> grpc.Channel:
    """The blocking twin of :func:`open_channel`."""
    return grpc.insecure_channel(target, options=_CLIENT_OPTIONS)


def to_status(error: PillionError) -> Any:
    """The rich status of ``error``: BadRequest for violations, RetryInfo for a wait."""
    details = []
    if isinstance(error, InvalidRequest) and error.violations:
        bad = error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                for v in error.violations
            ]
        )
        details.append(_packed(bad))
    if isinstance(error, Overloaded) and error.retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return rpc_status.to_status(status_pb2.Status(code=error.code, message=error.message, details=details))


def from_rpc_error(error: grpc.RpcError) -> PillionError:
    """The exception that a failed call stands for, details included. ``error`` is a call's, so it has a code."""
    code, message = error.code(), error.details() or ""
    cls = BY_CODE.get(code.value[0], Internal)
    status = _status_of(error)
    if cls is InvalidRequest:
        return InvalidRequest(message, _violations(status))
    if cls is Overloaded:
        return Overloaded(message, _retry_after_ms(status))
    return cls(message)


def closed_under(cancelled: asyncio.CancelledError) -> BaseException:
    """What a call that ended in ``cancelled`` is to raise. Closing a channel cancels its calls, and grpc.aio reports
    that as it reports a cancelled caller; without this the caller's task would end in silence, and nobody be told."""
    task = asyncio.current_task()
    return cancelled if task is None or task.cancelling() else Unavailable("the connection was closed")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status, so that servicers only raise."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method
        if handler.response_streaming:
            many = handler.request_streaming
            make = grpc.stream_stream_rpc_method_handler if many else grpc.unary_stream_rpc_method_handler
            wrapped: Any = _stream_guard(handler.stream_stream if many else handler.unary_stream, method)
        else:
            many = handler.request_streaming
            make = grpc.stream_unary_rpc_method_handler if many else grpc.unary_unary_rpc_method_handler
            wrapped = _unary_guard(handler.stream_unary if many else handler.unary_unary, method)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


def _unary_guard(inner: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            result = inner(request, context)
            return await result if isinstance(result, Awaitable) else result
        except Exception as error:  # noqa: BLE001
            await _abort(context, error, method)

    return call


def _stream_guard(inner: Callable[..., Any], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in inner(request, context):
                yield message
        except Exception as error:  # noqa: BLE001
            await _abort(context, error, method)

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.AioRpcError):
        error = from_rpc_error(error)
    if not isinstance(error, PillionError):
        log.exception("%s failed", method, exc_info=error)
        error = Internal("internal error; the server's log says more")
    await context.abort_with_status(to_status(error))


@dataclass(slots=True)
class RunningServer:
    """A started server. ``address`` is where it really listens (port 0 resolved)."""

    server: grpc.aio.Server
    address: str
    health: Any
    services: tuple[str, ...]

    async def stop(self, grace_s: float = 2.0) -> None:
        """Says NOT_SERVING, lets calls finish for ``grace_s`` seconds, then ends them."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


async def start_server(listen: str, services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]]) -> RunningServer:
    """Start a server with health and reflection.

    Args:
        listen: ``host:port`` (port 0: any) or ``unix:path``.
        services: pairs of full service name and a function that adds the servicer to a server.

    Raises:
        OSError: the address cannot be bound.
    """
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_SERVER_OPTIONS)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    names = tuple(name for name, _ in services)
    for _, add in services:
        add(server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from None
    await server.start()
    for name in ("", *names):
        await checker.set(name, health_pb2.HealthCheckResponse.SERVING)
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    return RunningServer(server, address, checker, names)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _status_of(error: grpc.RpcError) -> Any:
    """The google.rpc.Status in the trailers; None where there is none or it is broken."""
    try:
        if isinstance(error, grpc.aio.AioRpcError):
            for key, value in error.trailing_metadata() or ():
                if key == "grpc-status-details-bin":
                    return status_pb2.Status.FromString(value)
            return None
        return rpc_status.from_call(error)
    except (ValueError, TypeError):
        return None


def _unpack(status: Any, kind: Any) -> Any:
    for detail in status.details if status is not None else ():
        message = kind()
        if detail.Is(kind.DESCRIPTOR) and detail.Unpack(message):
            return message
    return None


def _violations(status: Any) -> tuple[FieldViolation, ...]:
    bad = _unpack(status, error_details_pb2.BadRequest)
    return tuple(FieldViolation(v.field, v.description) for v in bad.field_violations) if bad else ()


def _retry_after_ms(status: Any) -> int:
    info = _unpack(status, error_details_pb2.RetryInfo)
    return int(info.retry_delay.ToMilliseconds()) if info else 0
