"""One connection of the HTTP port: uvicorn's h11 protocol, with limits for clients that are idle, slow or malicious."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

# Timeout of a request's headers, from the start of the connection (after TLS), or from the first byte of a later
# request.
HEAD_TIMEOUT_S = 20.0
# Timeout of a client that reads nothing while the transport's buffer is full.
STALL_TIMEOUT_S = 120.0
# Delays of the probes of a half-closed connection: the first one; each later one is PROBE_GROWTH times longer, up to
# MAX_PROBE_S.
FIRST_PROBE_S, PROBE_GROWTH, MAX_PROBE_S = 0.01, 4, 10.0
# Linux's TCP state of a connection whose peer has closed its side; any other one means that the peer is gone.
TCP_CLOSE_WAIT = 8
# Max connections above the limit, which are answered with 503; further ones are aborted.
SPARE_CONNECTIONS = 64
# A body of more than SMALL_CHUNKS chunks must average MIN_CHUNK_BYTES per chunk: a chunk costs as much time as a
# kilobyte, and many tiny ones received at once could block the event loop for a second.
SMALL_CHUNKS, MIN_CHUNK_BYTES = 512, 128


class StrictParser(h11.Connection):
    """h11 parser that refuses contradicting lengths and floods of tiny chunks; ``refusal`` is the reason, or "".

    The head of a response is buffered until the first bytes of its body, so that both are one write and one segment.
    """

    refusal = ""
    _chunks = _chunk_bytes = 0
    _buffered_head = b""

    def send(self, event: Any) -> Any:
        """Return the bytes to write for an event; a response's head is returned with the next event."""
        written = super().send(event)
        if isinstance(event, h11.Response):
            self._buffered_head = written or b""
            return b""
        if written is not None:
            written, self._buffered_head = self._buffered_head + written, b""
        return written

    def next_event(self) -> Any:
        """Return the next event of the connection. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
            names = {name for name, _ in event.headers}
            if b"content-length" in names and b"transfer-encoding" in names:
                # Request smuggling: a proxy may follow one header and this server the other. RFC 9112, 6.3, requires
                # closing the connection.
                self._refuse("Content-Length and Transfer-Encoding contradict each other.")
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            self._chunk_bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS and self._chunk_bytes < self._chunks * MIN_CHUNK_BYTES:
                self._refuse(f"More than {SMALL_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes.")
        return event

    def _refuse(self, text: str) -> None:
        self.refusal = text
        raise h11.RemoteProtocolError(text)


class WaitingClients:
    """Connections that wait for their clients, by client address, longest wait first. Sans-IO (I9)."""

    def __init__(self) -> None:
        self._by_peer: dict[str, dict[Any, None]] = {}

    def add(self, connection: Any, peer: str) -> None:
        """Add a connection; if it waits already, it keeps its position."""
        self._by_peer.setdefault(peer, {}).setdefault(connection)

    def remove(self, connection: Any, peer: str) -> None:
        """Remove a connection, if it is waiting."""
        waiting = self._by_peer.get(peer, {})
        waiting.pop(connection, None)
        if not waiting:
            self._by_peer.pop(peer, None)

    def longest(self) -> Any:
        """Return the connection that has waited longest, of the address with most waiting connections; None if none
        waits."""
        waiting = max(self._by_peer.values(), key=len, default=None)
        return None if waiting is None else next(iter(waiting))


class Handshakes:
    """Connections in a TLS handshake, by file descriptor."""

    def __init__(self) -> None:
        # fd -> connection, client address.
        self._connections: dict[int, tuple[socket.socket, str]] = {}
        self._waiting = WaitingClients()

    def begin(self, connection: socket.socket, peer: str, limit: int) -> None:
        """Add a connection. Above the limit, abort the oldest handshake of the address with most of them."""
        fd = connection.fileno()
        # The fd may be reused: a failed handshake leaves its entry behind.
        self.end(fd)
        self._connections[fd] = (connection, peer)
        self._waiting.add(fd, peer)
        while len(self._connections) > limit:
            longest = self._waiting.longest()
            with contextlib.suppress(OSError):
                self._connections[longest][0].shutdown(socket.SHUT_RDWR)
            self.end(longest)

    def end(self, fd: int) -> None:
        """Remove a connection, if present."""
        entry = self._connections.pop(fd, None)
        if entry is not None:
            self._waiting.remove(fd, entry[1])


class TlsListener(socket.socket):
    """TLS listener with a limit of concurrent handshakes: asyncio waits 60 s for each, and passes the connection to its
    protocol only afterwards."""

    def __init__(self, listening: socket.socket, handshakes: Handshakes, max_handshakes: int) -> None:
        super().__init__(fileno=listening.detach())
        self._handshakes = handshakes
        self._max_handshakes = max_handshakes

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._handshakes.begin(connection, address[0], self._max_handshakes)
        return connection, address


class PortState(ServerState):
    """State shared by all connections of a port.

    Attributes:
        idle: connections without a request, or with incomplete headers.
        sending: connections with an incomplete body.
        handshakes: connections in a TLS handshake.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle = WaitingClients()
        self.sending = WaitingClients()
        self.handshakes = Handshakes()


class HttpConnection(H11Protocol):
    """An HTTP connection.

    made --headers within HEAD_TIMEOUT_S--> request and answer --kept alive, the next one's first byte--> headers ...
      | at the limit: a waiting connection   | client reads nothing for STALL_TIMEOUT_S
      | is aborted                           '--> aborted
      '--none waits--> 503, or aborted

    Uvicorn waits forever for the first request, for the rest of the headers, and for a client that does not read. A few
    thousand such connections, which cost an attacker nothing, would block all other clients. So a new connection
    replaces the one that has waited longest: first one without a request, then one with an incomplete body, in both
    cases of the address that has most of them.

    A client may close its side after its last request and wait for the answers (`nc -N`). TCP cannot distinguish this
    from a client that is gone until something is sent and reset. So a half-closed connection is sent "100 Continue",
    which HTTP/1.1 clients ignore, and its state is checked, with growing delays. Over TLS and HTTP/1.0, and once an
    answer has started, a half-close counts as a disconnect.
    """

    server_state: PortState
    conn: StrictParser
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None
    _peer = ""

    def __init__(self, config: Any, server_state: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, server_state, *arguments, **options)
        self.conn = StrictParser(h11.SERVER, config.h11_max_incomplete_event_size)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without TCP_NODELAY, a second segment waits for the client's acknowledgement, which is delayed by 40 ms.
        # asyncio sets it only if the listening socket was created with IPPROTO_TCP. The client may be gone already.
        connection = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server_state.handshakes.end(connection.fileno())
        self._peer = self.client[0] if self.client else ""
        state, limit = self.server_state, self.limit_concurrency or 0
        if len(self.connections) >= limit:
            longest = state.idle.longest() or state.sending.longest()
            if longest is not None:
                longest.make_room()
        if len(self.connections) > limit + SPARE_CONNECTIONS:
            transport.abort()
            return
        state.idle.add(self, self._peer)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, transport.abort)

    def make_room(self) -> None:
        """Abort the connection in favor of a new one."""
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            _stop(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None and cycle is not None and cycle.response_complete:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)
        self._update_waiting()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open for answers after the client has closed its side."""
        cycle = self.cycle
        # An answer that has started leaves no way to probe the client.
        awaits_answer = cycle is not None and not cycle.response_started and not cycle.more_body
        if (
            not awaits_answer
            or self.scheme != "http"
            or self.conn.their_http_version != b"1.1"
            or not hasattr(socket, "TCP_INFO")
        ):
            return False
        self._probe_client(FIRST_PROBE_S)
        return True

    def _probe_client(self, delay_s: float) -> None:
        """Abort the connection if its client is gone; else probe it, and check again after ``delay_s``."""
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if info[0] != TCP_CLOSE_WAIT:
            self.transport.abort()
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
        self._probe_timer = self.loop.call_later(delay_s, self._probe_client, min(PROBE_GROWTH * delay_s, MAX_PROBE_S))

    def _unsupported_upgrade_warning(self) -> None:
        """Do not log a client's offer to upgrade the protocol, which is ignored."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            super().send_400_response(self.conn.refusal or msg)
        else:
            # An answer has started; only an abort can signal the error.
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_waiting()
        if self._probe_timer is not None and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _update_waiting(self) -> None:
        """Record whether the connection waits for its client: for a request, or for the rest of a body."""
        cycle, state = self.cycle, self.server_state
        idle = cycle is None or cycle.response_complete
        for waiting, applies in ((state.idle, idle), (state.sending, not idle and cycle.more_body)):
            if applies and self in self.connections:
                waiting.add(self, self._peer)
            else:
                waiting.remove(self, self._peer)

    def _stop_waiting(self) -> None:
        for waiting in (self.server_state.idle, self.server_state.sending):
            waiting.remove(self, self._peer)
        for timer in (self._head_timer, self._stall_timer, self._probe_timer):
            _stop(timer)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
