"""gRPC between simulated processes: the parts of grpc.aio that Pillion uses, over a seeded network.

    client process --connection--> server process        made by the first call of a channel, used by all of its calls
        messages of one direction arrive in order, each after a delay; those of two connections in any order

    a connection may be                                        what its two sides see
        broken by the death of its client or server            calls end with UNAVAILABLE after a moment
        reset                                                  the same, and messages in flight are lost
        cut, in one direction or both, for a while             nothing arrives; everything does when the cut heals
        cut for longer than the keepalive                      both sides close it, as for a reset
        to a paused server                                     nothing arrives; deadlines pass

As in TCP, messages sent during a cut are retransmitted, so nothing is lost, reordered or repeated within a connection.
A call whose answer is lost was served nevertheless, so effects may be repeated. Messages are passed without a copy;
neither side may change one that it has sent or received.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import grpc
import grpc.aio

from lab.simulator.virtual_loop import PROCESS, Process, SimHandle, VirtualLoop
from pillion.net.in_process import Inbox, rpc_error
from pillion.net.rpc import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS
from pillion.wire.errors import as_pillion_error

# After a cut of this length both sides close the connection.
KEEPALIVE_S = (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000
# Timeout of an attempt to connect.
CONNECT_TIMEOUT_S = 20.0
# Unread messages of a stream at its receiver from which on a writer waits.
STREAM_WINDOW = 64
# Latency of the news of a process's death or of a reset.
MAX_NEWS_S = 0.01

Metadata = Sequence[tuple[str, str | bytes]]


class Network:
    """All connections. A message usually takes ``usual_s``; one in twenty up to ``slow_s``."""

    def __init__(self, loop: VirtualLoop, random: Random, usual_s: float = 0.0005, slow_s: float = 0.05) -> None:
        self.loop = loop
        self.servers: dict[str, SimServer] = {}
        self.connections: list[SimConnection] = []
        self.sent = 0
        self.random = random
        self._usual_s = usual_s
        self._slow_s = slow_s
        # Cut directions, as (from, to) process names.
        self._cuts: set[tuple[str, str]] = set()

    def delay_s(self) -> float:
        """Return the latency of the next message."""
        draw = self.random.random()
        return draw * self._slow_s if draw > 0.95 else draw * self._usual_s

    def is_cut(self, sender: Process, receiver: Process) -> bool:
        """Return whether the direction between two processes is cut."""
        return bool(self._cuts) and (sender.name, receiver.name) in self._cuts

    def cut(self, directions: Sequence[tuple[str, str]]) -> None:
        """Cut these directions."""
        self._cuts.update(directions)
        for connection in self.connections:
            if connection.alive and connection.cut():
                self.loop.call_later(KEEPALIVE_S, connection.keep_alive, context=self.loop.outside.context)

    def heal(self, directions: Sequence[tuple[str, str]]) -> None:
        """Heal these directions and deliver the delayed messages."""
        self._cuts.difference_update(directions)
        for connection in self.connections:
            connection.flush()

    def reset(self, one: str, other: str) -> bool:
        """Reset the connections between two processes, by name; return whether there were any."""
        found = [c for c in self.connections if c.alive and {c.client.name, c.server.name} == {one, other}]
        for connection in found:
            connection.reset()
        return bool(found)

    def died(self, process: Process) -> None:
        """Notify the peers of a dead process."""
        for address in [address for address, server in self.servers.items() if server.process is process]:
            del self.servers[address]
        for connection in self.connections:
            if connection.alive and process in (connection.client, connection.server):
                connection.end_of(process)
        self.connections = [connection for connection in self.connections if connection.of_use]

    def connect(self, client: Process, target: str) -> SimConnection | None:
        """Return a connection to the server of ``target``, or None."""
        server = self.servers.get(target)
        if server is None:
            return None
        made = SimConnection(self, client, server)
        self.connections.append(made)
        if len(self.connections) % 64 == 0:
            self.connections = [connection for connection in self.connections if connection.of_use]
        if made.cut():
            self.loop.call_later(CONNECT_TIMEOUT_S, made.keep_alive, context=self.loop.outside.context)
        return made


class SimConnection:
    """One connection, seen from both sides. ``calls``: running at the client, ``served``: at the server; neither side
    sees at once that the other has ended a call."""

    def __init__(self, network: Network, client: Process, server: SimServer) -> None:
        self.network = network
        self.client = client
        self.server = server.process
        self.serving = server
        self.alive = True
        self.calls: dict[SimCall, None] = {}
        self.served: dict[ServedCall, None] = {}
        self._lost = False
        self._last_s = {client: 0.0, self.server: 0.0}
        self._held: dict[Process, deque[tuple[Callable[..., object], tuple[Any, ...]]]] = {
            client: deque(),
            self.server: deque(),
        }

    def send(self, sender: Process, call: Callable[..., object], *args: Any) -> None:
        """Make the other side call ``call(*args)`` when the message arrives."""
        receiver = self.server if sender is self.client else self.client
        network = self.network
        if self._held[receiver] or network.is_cut(sender, receiver):
            self._held[receiver].append((call, args))
            return
        network.sent += 1
        when = max(self._last_s[receiver], network.loop.time() + network.delay_s())
        self._last_s[receiver] = when
        network.loop.call_at(when, self._deliver, call, args, context=receiver.context)

    @property
    def of_use(self) -> bool:
        """True if a message may still arrive: it is alive or has delayed messages."""
        return self.alive or any(self._held.values())

    def cut(self) -> bool:
        """Return whether at least one direction is cut."""
        return self.network.is_cut(self.client, self.server) or self.network.is_cut(self.server, self.client)

    def flush(self) -> None:
        """Send the delayed messages, as far as the connection lets them through."""
        for receiver, held in self._held.items():
            sender = self.client if receiver is self.server else self.server
            if held and not self.network.is_cut(sender, receiver):
                waiting, self._held[receiver] = held, deque()
                for call, args in waiting:
                    self.send(sender, call, *args)

    def reset(self) -> None:
        """Reset the connection; messages in flight are lost."""
        self._lost = True
        self._end("Connection reset by peer")

    def end_of(self, process: Process) -> None:
        """End the connection after the death of one side's process. Its messages in flight still arrive."""
        other = self.server if process is self.client else self.client
        self.alive = False
        self.send(process, self._over, other, "Socket closed")

    def keep_alive(self) -> None:
        """Check a cut connection after the keepalive's time."""
        if not self._lost and self.cut():
            self._lost = True
            self._end("keepalive watchdog timeout")

    def _end(self, reason: str) -> None:
        self.alive = False
        loop = self.network.loop
        for side in (self.client, self.server):
            delay_s = self.network.delay_s() % MAX_NEWS_S
            loop.call_later(delay_s, self._over, side, reason, context=side.context)

    def _deliver(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self._lost:
            call(*args)

    def _over(self, side: Process, reason: str) -> None:
        """Notify one side that the connection is closed."""
        self.alive = False
        if side is self.client:
            for call in list(self.calls):
                call.break_off(reason)
        else:
            for served in list(self.served):
                served.cancel()


class SimChannel:
    def __init__(self, target: str) -> None:
        self._target = target
        self._process = PROCESS.get()
        self._network = current_network()
        self._connection: SimConnection | None = None
        self._calls: dict[SimCall, None] = {}
        self._closed = False

    def unary_unary(self, method: str, *_: Any, **options: Any) -> Any:
        def call(request: Any, timeout: float | None = None, metadata: Metadata = (), **more: Any) -> SimCall:
            return self._begin(method, request, timeout, metadata)

        return call

    unary_stream = unary_unary

    def stream_unary(self, method: str, *_: Any, **options: Any) -> Any:
        def call(timeout: float | None = None, metadata: Metadata = (), **more: Any) -> SimCall:
            return self._begin(method, None, timeout, metadata)

        return call

    stream_stream = stream_unary

    async def close(self, grace: float | None = None) -> None:
        """Cancel the channel's calls and refuse further ones."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()

    def get_state(self) -> grpc.ChannelConnectivity:
        """Return the connection's state as the process sees it."""
        if self._connection is not None and self._connection.alive:
            return grpc.ChannelConnectivity.READY
        return grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def __aenter__(self) -> SimChannel:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def _begin(self, method: str, request: Any, timeout_s: float | None, metadata: Metadata) -> SimCall:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = SimCall(self._process, self._calls, method, timeout_s)
        if self._connection is None or not self._connection.alive:
            self._connection = self._network.connect(self._process, self._target)
        if self._connection is None:
            self._network.loop.call_soon(call.break_off, f"failed to connect to {self._target}")
        else:
            call.begin(self._connection, request, tuple(metadata or ()))
        return call


class SimCall:
    """A call as its caller sees it, with what Pillion's clients use of grpc.aio's four call types."""

    def __init__(self, process: Process, calls: dict[SimCall, None], method: str, timeout_s: float | None) -> None:
        self._process = process
        self._loop = current_network().loop
        self._calls = calls
        self._method = method
        self._connection: SimConnection | None = None
        self._served: ServedCall | None = None
        self._replies = WindowedInbox()
        self._connected = asyncio.Event()
        self._done = False
        self._error: BaseException | None = None
        calls[self] = None
        self._timer: SimHandle | None = None
        if timeout_s is not None:
            self._timer = self._loop.call_later(max(0.0, timeout_s), self._expire, context=process.context)

    def begin(self, connection: SimConnection, request: Any, metadata: Metadata) -> None:
        """Send the call's headers and request, unless it has ended."""
        if self._done:
            return
        self._connection = connection
        connection.calls[self] = None
        until_s = None if self._timer is None else self._timer.when()
        self._served = ServedCall(self, connection, self._method, metadata, until_s)
        connection.send(self._process, self._served.begin, request)

    # Called by the caller:

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> Any:
        try:
            reply = await self._replies.receive()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if reply is grpc.aio.EOF:
            raise rpc_error(as_pillion_error(RuntimeError("no reply"), self._method))
        return reply

    async def wait_for_connection(self) -> None:
        """Wait until the server has accepted the call. Raises AioRpcError."""
        await self._connected.wait()
        if self._error is not None:
            raise self._error

    async def write(self, request: Any) -> None:
        """Send a request of the stream. Raises InvalidStateError if the call has ended."""
        if self._done or self._connection is None or self._served is None:
            if isinstance(self._error, grpc.aio.AioRpcError):
                raise self._error
            raise asyncio.InvalidStateError("the call has ended")
        await self._served.requests.room()
        if self._done:
            raise asyncio.InvalidStateError("the call has ended")
        self._served.requests.sent()
        self._connection.send(self._process, self._served.requests.add, request)

    async def done_writing(self) -> None:
        """End the stream of requests."""
        if not self._done and self._connection is not None and self._served is not None:
            self._connection.send(self._process, self._served.requests.close)

    async def read(self) -> Any:
        """Return the next reply, or EOF. Raises AioRpcError, and CancelledError after :meth:`cancel`."""
        return await self._replies.receive()

    def __aiter__(self) -> Inbox:
        return self._replies

    async def initial_metadata(self) -> Metadata:
        return ()

    def done(self) -> bool:
        return self._done

    def cancel(self) -> bool:
        """End the call; return whether it was running."""
        if self._done:
            return False
        self._tell_server()
        self._finish(asyncio.CancelledError())
        return True

    # Called by the simulated connection:

    async def room(self) -> None:
        """Wait, on the server's side, until the client has room for another reply."""
        await self._replies.room()

    def connected(self) -> None:
        """Record that the server has accepted the call."""
        self._connected.set()

    def sent(self) -> None:
        """Count a reply in flight."""
        self._replies.sent()

    def reply(self, message: Any) -> None:
        """Deliver a reply."""
        if not self._done:
            self._connected.set()
            self._replies.add(message)

    def end(self, error: BaseException | None) -> None:
        """End the call with the server's result."""
        if not self._done:
            self._finish(error)

    def break_off(self, reason: str) -> None:
        """Fail the call because its connection is closed or was never made."""
        self.end(connection_error(reason))

    def _expire(self) -> None:
        if not self._done:
            self._tell_server()
            self._finish(deadline_error())

    def _tell_server(self) -> None:
        if self._connection is not None and self._served is not None and self._connection.alive:
            self._connection.send(self._process, self._served.cancel)

    def _finish(self, error: BaseException | None) -> None:
        self._done, self._error = True, error
        self._calls.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.calls.pop(self, None)
        self._connected.set()
        if self._served is not None:
            self._served.requests.wake_sender()
        self._replies.close(error, drop=isinstance(error, asyncio.CancelledError))


class WindowedInbox(Inbox):
    """Received messages at one end of a connection. Those in flight count as well, and the sender waits for room."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way = 0

    async def room(self) -> None:
        """Wait until another message may be sent."""
        while not self._closed and self._under_way + len(self._messages) >= STREAM_WINDOW:
            await self._message_read()

    def sent(self) -> None:
        """Count a message in flight."""
        self._under_way += 1

    def add(self, message: Any) -> None:
        """Add an arrived message."""
        self._under_way = max(0, self._under_way - 1)
        super().add(message)


class ServedCall:
    """A call at its server: the task of its handler."""

    def __init__(
        self, call: SimCall, connection: SimConnection, method: str, metadata: Metadata, until_s: float | None
    ) -> None:
        self.requests = WindowedInbox()
        self._call = call
        self._connection = connection
        self._method = method
        self._metadata = metadata
        self._until_s = until_s
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        connection.served[self] = None

    def begin(self, request: Any) -> None:
        """Run the handler of an arrived call, unless it was cancelled before."""
        server, connection = self._connection.serving, self._connection
        if self._cancelled:
            return
        handler = server.handlers.get(self._method)
        if handler is None or server.stopped:
            self._send(self._call.end, connection_error("the server takes no calls"))
            return
        self._send(self._call.connected)
        context = SimContext(self, self._metadata, self._until_s, connection.network.loop)
        self._task = server.spawn(self._serve(handler, request, context))

    def cancel(self) -> None:
        """Cancel the handler after the caller or the connection has gone."""
        self._cancelled = True
        self._connection.served.pop(self, None)
        self.requests.close(drop=False)
        if self._task is not None:
            self._task.cancel()

    def _send(self, call: Callable[..., object], *args: Any) -> None:
        if self._connection.alive:
            self._connection.send(self._connection.server, call, *args)

    def write(self, message: Any) -> None:
        if self._connection.alive:
            self._call.sent()
            self._send(self._call.reply, message)

    async def _serve(self, handler: Any, request: Any, context: SimContext) -> None:
        error: BaseException | None = None
        try:
            serve = _function_of(handler)
            asked = self.requests if handler.request_streaming else request
            async with asyncio.timeout_at(self._until_s):
                replies = serve(asked, context)
                awaitable = hasattr(replies, "__await__")
                if handler.response_streaming and not awaitable:
                    async with contextlib.aclosing(replies):
                        async for reply in replies:
                            await self._call.room()
                            self.write(reply)
                else:
                    reply = await replies if awaitable else replies
                    if not handler.response_streaming:
                        self.write(reply)
        except asyncio.CancelledError:
            error = connection_error("the server has ended the call")
            raise
        except TimeoutError:
            error = deadline_error()
        except Exception as failure:  # noqa: BLE001
            error = rpc_error(as_pillion_error(failure, self._method))
        finally:
            context.finish()
            self._connection.served.pop(self, None)
            self._send(self._call.end, error)


class SimContext:
    """The handler's side of a call, with what servicers use of gRPC's ServicerContext."""

    def __init__(self, served: ServedCall, metadata: Metadata, until_s: float | None, loop: VirtualLoop) -> None:
        self._served = served
        self._metadata = metadata
        self._until_s = until_s
        self._loop = loop
        self._callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else self._until_s - self._loop.time()

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Do nothing: no caller reads it."""

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Do nothing: no caller reads it."""

    async def write(self, message: Any) -> None:
        self._served.write(message)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def finish(self) -> None:
        """Run the callbacks at the end of the call."""
        for callback in self._callbacks:
            callback(self)


class SimServer:
    """A server at ``address`` for the process that makes it, with the health of its services."""

    def __init__(self, address: str) -> None:
        from grpc_health.v1 import health, health_pb2_grpc

        self.address = address
        self.process = PROCESS.get()
        self.handlers: dict[str, Any] = {}
        self.stopped = False
        self._network = current_network()
        self._services: list[str] = []
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Do nothing: generated code registers each method as well."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}
        self._services.append(service)

    def start(self) -> None:
        """Begin to listen. Raises OSError if the address is in use."""
        from grpc_health.v1.health_pb2 import HealthCheckResponse

        if self._network.servers.setdefault(self.address, self) is not self:
            raise OSError(f"{self.address} is in use")
        for service in ("", *self._services):
            self._network.loop.create_task(self._health.set(service, HealthCheckResponse.SERVING))

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait ``grace_s`` seconds for running ones, then cancel them. Idempotent."""
        self.stopped = True
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]
        await self._health.enter_graceful_shutdown()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Run a handler until it ends or the server stops."""
        task = asyncio.get_running_loop().create_task(work, context=self.process.context.copy())
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            task.exception()


def _function_of(handler: Any) -> Any:
    many, streams = handler.request_streaming, handler.response_streaming
    return getattr(handler, f"{'stream' if many else 'unary'}_{'stream' if streams else 'unary'}")


def connection_error(reason: str) -> grpc.aio.AioRpcError:
    """Return gRPC's error for a lost or failed connection."""
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), reason)


def deadline_error() -> grpc.aio.AioRpcError:
    """Return gRPC's error for a passed deadline."""
    return grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "Deadline Exceeded"
    )


_network: Network | None = None


def use_network(network: Network | None) -> None:
    """Set the network of channels and servers made from now on."""
    global _network
    _network = network


def current_network() -> Network:
    """Return the network of the running world."""
    assert _network is not None, "no world runs"
    return _network
