"""gRPC calls within one process: the generated stubs and servicers, without sockets, HTTP/2 and serialization.

    stub --unary call---> the servicer's handler, in the caller's own task; it reads a stream of requests directly
    stub --stream call--> a task that runs the handler, and a pipe of one message each way, so that senders wait for
                          receivers, as with a connection's flow control

An address is ``in-process:NAME``; :func:`pillion.net.rpc.start_server` and :func:`pillion.net.rpc.open_channel` accept
it like any other. Server and channels of one name run on one event loop. Messages are passed by reference: neither side
may modify a message after sending or receiving it. A handler's error reaches the caller as over a connection, as an
AioRpcError.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import grpc
import grpc.aio

from pillion.errors import DeadlineExceeded, PillionError, Unavailable
from pillion.tasks import OwnTasks, end_tasks
from pillion.wire.errors import as_pillion_error, to_status

Metadata = Sequence[tuple[str, str | bytes]]
# Running servers by address.
_servers: dict[str, InProcessServer] = {}


class InProcessServer:
    """Serves the channels to ``address`` from :meth:`start` to :meth:`stop`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.handlers: dict[str, Any] = {}
        self.streams = OwnTasks()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Do nothing: generated code also registers each method."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add a service; called by generated code."""
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def start(self) -> None:
        """Start serving. Raises OSError if the address is in use."""
        if _servers.setdefault(self.address, self) is not self:
            raise OSError(f"{self.address} is in use")

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let streams finish for ``grace_s`` seconds, then cancel them. Idempotent."""
        _servers.pop(self.address, None)
        if self.streams:
            await asyncio.wait(self.streams, timeout=grace_s)
            await end_tasks(*self.streams)


class InProcessChannel:
    """Channel to the server of an in-process address, with the part of grpc.aio.Channel that stubs use.

    Like any channel, it may be opened before the server starts.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._streams: set[_Stream] = set()
        self._closed = False

    def unary_unary(self, method: str, *_: Any, **options: Any) -> Any:
        def call(request: Any, timeout: float | None = None, metadata: Metadata = (), **more: Any) -> Any:
            self._check_open()
            return self._unary(method, request, timeout, metadata)

        return call

    stream_unary = unary_unary

    def unary_stream(self, method: str, *_: Any, **options: Any) -> Any:
        def call(request: Any = None, timeout: float | None = None, metadata: Metadata = (), **more: Any) -> _Stream:
            return self._stream(method, request, timeout, metadata)

        return call

    stream_stream = unary_stream

    async def close(self) -> None:
        """Cancel the channel's streams; no call can be made afterwards."""
        self._closed = True
        for stream in tuple(self._streams):
            stream.cancel()

    async def __aenter__(self) -> InProcessChannel:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")

    def _server(self) -> InProcessServer:
        if self._target not in _servers:
            raise rpc_error(Unavailable(f"nothing serves {self._target}"))
        return _servers[self._target]

    async def _unary(self, method: str, request: Any, timeout_s: float | None, metadata: Metadata) -> Any:
        handler, context = self._server().handlers[method], InProcessContext(metadata)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                serve = handler.stream_unary if handler.request_streaming else handler.unary_unary
                reply = serve(request, context)
                return await reply if inspect.isawaitable(reply) else reply
        except Exception as error:
            raise _error_of(error, method, limit) from error
        finally:
            context.finish()

    def _stream(self, method: str, request: Any, timeout_s: float | None, metadata: Metadata) -> _Stream:
        self._check_open()
        stream = _Stream()
        try:
            server = self._server()
        except grpc.aio.AioRpcError as error:
            stream.end(error)
            return stream
        work = stream.run(server.handlers[method], method, request, timeout_s, InProcessContext(metadata))
        stream.task = server.streams.begin(work, method)
        self._streams.add(stream)
        stream.task.add_done_callback(lambda _: self._streams.discard(stream))
        return stream


class InProcessContext:
    """The handler's side of a call, with the part of gRPC's ServicerContext that servicers use."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = tuple(metadata)
        self._callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> Metadata:
        """Return the caller's metadata."""
        return self._metadata

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Do nothing: no caller reads it."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` when the call has ended or failed."""
        self._callbacks.append(callback)

    def finish(self) -> None:
        """Run the callbacks after the call's end."""
        for callback in self._callbacks:
            callback(self)


class Inbox:
    """Queue of a stream's messages in one direction, with an end. It has one receiver, and one sender, which may wait
    until the receiver has read a message."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._closed = False
        self._error: BaseException | None = None
        self._sender: asyncio.Future[None] | None = None
        self._receiver: asyncio.Future[None] | None = None

    def add(self, message: Any) -> None:
        """Add a message. Messages after the end of the stream are dropped."""
        if not self._closed:
            self._messages.append(message)
            _wake(self._receiver)

    async def receive(self) -> Any:
        """Return the next message; after the last one return EOF, or raise the error that the stream was closed
        with."""
        while not self._messages:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return grpc.aio.EOF
            self._receiver = asyncio.get_running_loop().create_future()
            await self._receiver
        message = self._messages.popleft()
        self.wake_sender()
        return message

    def close(self, error: BaseException | None = None, *, drop: bool) -> None:
        """End the stream for both sides; further calls have no effect. ``drop`` discards unread messages."""
        if not self._closed:
            self._closed, self._error = True, error
            if drop:
                self._messages.clear()
            self.wake_sender()
            _wake(self._receiver)

    def wake_sender(self) -> None:
        """Wake the sender, which then checks whether its message was read."""
        _wake(self._sender)

    async def _message_read(self) -> None:
        """Wait until the receiver has read a message, or the stream has ended."""
        self._sender = asyncio.get_running_loop().create_future()
        await self._sender

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self.receive()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


class _Pipe(Inbox):
    """An inbox whose sender waits until each message was received."""

    async def send(self, message: Any) -> None:
        """Send a message. Raises InvalidStateError if the pipe is closed, or closes before the message is received."""
        if not self._closed:
            self.add(message)
            while self._messages:
                await self._message_read()
            return
        raise asyncio.InvalidStateError("the call has ended")


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class _Stream:
    """The caller's side of a streaming call, with the part of gRPC's StreamStreamCall and UnaryStreamCall that clients
    use.

    ``task`` runs the handler; None if nothing serves the address.
    """

    def __init__(self) -> None:
        self._requests, self._replies = _Pipe(), _Pipe()
        self.task: asyncio.Task[None] | None = None

    async def wait_for_connection(self) -> None:
        """Let the call's handler start. Raises AioRpcError if nothing serves the address."""
        await asyncio.sleep(0)
        if self.task is None:
            await self.read()

    async def write(self, request: Any) -> None:
        """Send a request. Raises InvalidStateError if the call has ended."""
        await self._requests.send(request)

    async def read(self) -> Any:
        """Return the next reply, or EOF. Raises AioRpcError, and CancelledError after :meth:`cancel`."""
        return await self._replies.receive()

    def cancel(self) -> bool:
        """End the call; return False if it had ended already."""
        if self.task is None or self.task.done():
            return False
        self.end(asyncio.CancelledError())
        return self.task.cancel()

    def __aiter__(self) -> _Pipe:
        return self._replies

    def end(self, error: BaseException | None) -> None:
        """End both directions of the call; the caller gets ``error`` after the last reply."""
        self._replies.close(error, drop=True)
        self._requests.close(drop=True)

    async def run(
        self, handler: Any, method: str, request: Any, timeout_s: float | None, context: InProcessContext
    ) -> None:
        """Serve the call."""
        error: BaseException | None = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if handler.request_streaming:
                    replies = handler.stream_stream(self._requests, context)
                else:
                    replies = handler.unary_stream(request, context)
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        await self._replies.send(reply)
        except asyncio.CancelledError:
            error = rpc_error(Unavailable("the server has ended the call"))
            raise
        except Exception as failure:  # noqa: BLE001
            error = _error_of(failure, method, limit)
        finally:
            context.finish()
            self.end(error)


def _error_of(failure: Exception, method: str, limit: asyncio.Timeout) -> grpc.aio.AioRpcError:
    """Convert an exception of a handler to the caller's error."""
    expired = limit.expired()
    return rpc_error(DeadlineExceeded("Deadline Exceeded") if expired else as_pillion_error(failure, method))


def rpc_error(error: PillionError) -> grpc.aio.AioRpcError:
    """Return the AioRpcError that a caller over a connection would get for ``error``, with details in the trailers."""
    status = to_status(error)
    trailers = grpc.aio.Metadata(*(status.trailing_metadata or ()))
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, status.details)
