"""gRPC settings of every component: limits, keepalive, health, reflection, and the conversion of errors to statuses.

Idle streams survive: clients ping every KEEPALIVE_TIME_MS, with or without calls and data, and servers allow a ping
every MIN_PING_INTERVAL_MS, so a load balancer with a longer idle timeout does not cut a stream that waits for its first
token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import grpc

from pillion.errors import InvalidRequest, PillionError, Unavailable
from pillion.net import tls
from pillion.net.addresses import IN_PROCESS, OFF_NETWORK
from pillion.net.descriptors import connections_per_port
from pillion.net.in_process import InProcessChannel, InProcessServer
from pillion.net.silent_connections import Client, close_silent
from pillion.tasks import end_tasks
from pillion.wire.errors import as_pillion_error
from pillion.wire.errors import from_rpc_error as from_rpc_error
from pillion.wire.errors import said_by_server as said_by_server
from pillion.wire.errors import to_status as to_status

# A 128K-token prompt is 0.5 MB of varints; a megabyte of text tokenizes to less than that.
MAX_MESSAGE_BYTES = 16 * 2**20
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# Servers end connections with faster pings (GOAWAY too_many_pings); must allow the rate of Pillion's clients.
MIN_PING_INTERVAL_MS = 10_000
HANDSHAKE_TIMEOUT_MS = 5_000
# Grace of a closed server that will be stopped later. gRPC 1.78 accesses a server again when a grace is over, even if
# another stop has freed it, so this grace must exceed that of any later stop.
STOP_FOLLOWS_S = 30 * 86_400.0

Options = list[tuple[str, Any]]
Counting = Callable[[Any], contextlib.AbstractContextManager[None]]


def _options(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # By default pings stop after two without data, i.e. while a stream waits long for its first token.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Return the options of every channel."""
    return [
        *_options(max_message_bytes),
        # Components restart and streams wait for them, so channels reconnect ten times a second instead of with gRPC's
        # backoff of up to two minutes. A component that stays away is removed with its registry record.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the timeout of one attempt; a loaded machine needs more than the 100 ms of the backoff.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 100),
    ]


def component_options() -> Options:
    """Return the options of a channel to another component, which bypasses the environment's proxy."""
    return [*client_options(), ("grpc.enable_http_proxy", 0)]


def server_options(max_message_bytes: int, max_connections: int, *, share_port: bool = False) -> Options:
    """Return the options of every server."""
    return [
        *_options(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # "No compression" only. gRPC decompresses before it checks a message's size, and half a megabyte of gzip may
        # become half a gigabyte.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # Two servers on one port share its connections at random. Without ``share_port``, a port in use is an error.
        ("grpc.so_reuseport", int(share_port)),
    ]


_identity: tls.Identity | None = None


def use_identity(identity: tls.Identity | None) -> None:
    """Use mutual TLS for channels to other components and servers for them; None: plain text."""
    global _identity
    _identity = identity


def internal_credentials(listen: str) -> grpc.ServerCredentials | None:
    """Return the credentials of an internal service at this address; None is plain text, as on every Unix socket."""
    return None if _identity is None or listen.startswith(OFF_NETWORK) else tls.server_credentials(_identity)


def open_channel(target: str) -> grpc.aio.Channel:
    """Open a channel to another component at ``host:port``, ``unix:path`` or ``in-process:NAME``. The caller closes
    it."""
    if target.startswith(IN_PROCESS):
        return cast(grpc.aio.Channel, InProcessChannel(target))
    if _identity is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=component_options())
    return cast(grpc.aio.Channel, tls.ComponentChannel(target, _identity, component_options()))


def closed_under(cancelled: asyncio.CancelledError) -> BaseException:
    """Return the error to raise for a call that ended in ``cancelled``. Closing a channel cancels its calls, which
    grpc.aio does not distinguish from a cancelled caller: the caller's task would end without an error."""
    return cancelled if _is_cancelled() else Unavailable("the connection was closed")


def _is_cancelled() -> bool:
    """Return whether the current task itself was cancelled, rather than something that it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class BusyPeers:
    """Clients, as (host, port), with calls in progress."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}

    @contextlib.contextmanager
    def call(self, context: Any) -> Iterator[None]:
        """Count a call with this gRPC context while the context manager is open."""
        peer = context.peer()
        self._calls[peer] = self._calls.get(peer, 0) + 1
        try:
            yield
        finally:
            left = self._calls.pop(peer) - 1
            if left:
                self._calls[peer] = left

    def peers(self) -> set[Client]:
        """Return the clients with calls. Thread-safe."""
        return {_address_of(peer) for peer in list(self._calls)}


def _address_of(peer: str) -> Client:
    """Return the host and port of a gRPC peer such as ``ipv4:127.0.0.1:80`` or ``ipv6:%5B::1%5D:80``."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Converts exceptions of handlers to statuses, so that servicers can just raise.

    A handler that ends because something it awaited was cancelled fails as well: gRPC takes that for a cancelled call
    and sends no status, so the caller would wait forever.

    ``busy`` counts the calls of ``services``; those of health and reflection may stay open forever.
    """

    def __init__(self, services: Collection[str] = ()) -> None:
        self.busy = BusyPeers()
        self._services = services

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        method = details.method
        try:
            handler = await continuation(details)
        except PillionError as error:
            # As a stream of requests, so that no message of a refused call is read.
            return grpc.stream_unary_rpc_method_handler(_refusal(error, method))
        if handler is None:
            return None
        many, streams = handler.request_streaming, handler.response_streaming
        kind = f"{'stream' if many else 'unary'}_{'stream' if streams else 'unary'}"
        counted = self.busy.call if method.split("/")[1] in self._services else contextlib.nullcontext
        guarded = (_stream_guard if streams else _unary_guard)(getattr(handler, kind), method, counted)
        read = handler.request_deserializer if many else _safe_parser(handler.request_deserializer)
        return getattr(grpc, f"{kind}_rpc_method_handler")(guarded, read, handler.response_serializer)


def _safe_parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Wrap a message's parser so that an unparsable message becomes the client's error; gRPC would report a bug of the
    server."""
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except Exception as error:  # noqa: BLE001
            return InvalidRequest(f"the message cannot be read: {str(error)[:200]}")

    return read


def _readable(request: Any) -> Any:
    if isinstance(request, InvalidRequest):
        raise request
    return request


def _unary_guard(inner: Callable[..., Any], method: str, counted: Counting) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            with counted(context):
                result = inner(_readable(request), context)
                return await result if isinstance(result, Awaitable) else result
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            await _abort(context, error, method)

    return call


def _stream_guard(inner: Callable[..., Any], method: str, counted: Counting) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            with counted(context):
                result = inner(_readable(request), context)
                if isinstance(result, Awaitable):
                    await result
                    return
                async for message in result:
                    yield message
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            await _abort(context, error, method)

    return call


def _refusal(error: PillionError, method: str) -> Callable[..., Any]:
    async def call(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await _abort(context, error, method)

    return call


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception | asyncio.CancelledError, method: str
) -> None:
    # If a message could not be sent, the client is gone and cannot get the error.
    no_client = isinstance(error, grpc.aio.AbortError | grpc.aio.InternalError)
    if no_client or (isinstance(error, asyncio.CancelledError) and _is_cancelled()):
        raise error
    status = to_status(as_pillion_error(error, method))
    trailers = (*(context.trailing_metadata() or ()), *(status.trailing_metadata or ()))
    await context.abort(status.code, status.details, trailers)


@dataclass(slots=True)
class RunningServer:
    """A started server. ``address`` has the actual port."""

    server: grpc.aio.Server
    address: str
    services: tuple[str, ...] = ()
    health: Any = None
    closing: asyncio.Task[None] | None = None
    silent: asyncio.Task[None] | None = None

    async def set_serving(self, serving: bool, names: Sequence[str] = ()) -> None:
        """Set the health status of every service, or of ``names``."""
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse
        for name in names or ("", *self.services):
            await self.health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def not_serving(self) -> None:
        """Set the health status of every service to NOT_SERVING for good, while still serving calls."""
        if self.health is not None:
            await self.health.enter_graceful_shutdown()

    def close(self) -> None:
        """Refuse new connections, and end open ones after their calls (HTTP/2's GOAWAY), so that clients reconnect for
        their next calls. Call :meth:`stop` later."""
        self.closing = asyncio.create_task(self.server.stop(STOP_FOLLOWS_S))

    async def stop(self, grace_s: float = 2.0) -> None:
        """Set the health to NOT_SERVING, let calls finish for ``grace_s`` seconds, then end them. Calls that watch the
        health end only then."""
        await self.not_serving()
        await end_tasks(self.silent)
        await self.server.stop(grace_s)
        if self.closing is not None:
            await self.closing


async def start_server(
    listen: str,
    services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]],
    *,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int | None = None,
    max_calls: int | None = None,
    share_port: bool = False,
    serving: bool = True,
) -> RunningServer:
    """Start a server with reflection, and with the health of each service and of all ("") together.

    Args:
        listen: ``host:port`` (port 0: any), ``unix:path`` or ``in-process:NAME``; the last only uses ``services``.
        services: (full service name, function that adds the servicer to a server) of each service.
        credentials: TLS; None for plain text.
        interceptors: run inside the error interceptor, so that their exceptions become statuses as well.
        max_message_bytes: limit of sent and received messages.
        max_connections: limit of connections; None: by the process's descriptors, as for its only port.
        max_calls: limit of concurrent calls, of which a connection may have a quarter; further calls are refused. None:
            no limit.
        share_port: let other servers of this user listen on the same port; the system spreads connections.
        serving: initial health status.

    Raises:
        OSError: the address cannot be bound.
    """
    if listen.startswith(IN_PROCESS):
        return _start_in_process(listen, services)
    from grpc_health.v1 import health, health_pb2_grpc

    from pillion.net.reflection_servicer import add_reflection

    names = tuple(name for name, _ in services)
    errors = ErrorInterceptor(names)
    max_connections = max_connections or connections_per_port()
    options = server_options(max_message_bytes, max_connections, share_port=share_port)
    if max_calls is not None:
        options.append(("grpc.max_concurrent_streams", max_calls // 4))
    server = grpc.aio.server(interceptors=[errors, *interceptors], options=options, maximum_concurrent_rpcs=max_calls)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    for _, add in services:
        add(server)
    add_reflection(server, names)
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from None
    await server.start()
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    running = RunningServer(server, address, names, checker)
    if not listen.startswith("unix:"):
        running.silent = asyncio.create_task(
            close_silent(port, max_connections, errors.busy.peers), name="silent clients"
        )
    await running.set_serving(serving)
    return running


def _start_in_process(listen: str, services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]]) -> RunningServer:
    in_process = InProcessServer(listen)
    server = cast(grpc.aio.Server, in_process)
    for _, add in services:
        add(server)
    in_process.start()
    return RunningServer(server, listen)
