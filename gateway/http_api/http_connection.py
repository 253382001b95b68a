"""Represents one connection of the HTTP port: uvicorn's h11 protocol, with bounds for clients that are idle, slow or
malicious."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

# A connection may take this long from its begin (TLS done), or from the first byte of a further request, until the
# headers of its request are whole.
HEAD_TIMEOUT_S = 20.0
# A client counts as gone when it reads nothing for this long while more data waits for it than the transport holds.
STALL_TIMEOUT_S = 120.0
# A half-closed connection is looked at this long after its client's end, then after LOOK_GROWTH times as long.
FIRST_LOOK_S, LOOK_GROWTH, MAX_LOOK_S = 0.01, 4, 10.0
# Linux's number for the state of a connection whose peer has ended its side; another one means that the peer is gone.
TCP_CLOSE_WAIT = 8
# This many connections beyond those that are served are accepted and answered with 503.
SPARE_CONNECTIONS = 64
# A body may come in SMALL_CHUNKS chunks of any size. Further chunks must have MIN_CHUNK_BYTES bytes on the average,
# because each chunk costs as much time as a kilobyte: the tiny chunks that the system hands over at once could keep the
# event loop busy for a second.
SMALL_CHUNKS, MIN_CHUNK_BYTES = 512, 128


class StrictParser(h11.Connection):
    """Parses HTTP as h11 does, and refuses more. ``refusal`` says what this class itself has refused.

    The head of a response is kept until something of its body is written, so that both are one write and one segment.
    """

    refusal = ""
    _chunks = _chunk_bytes = 0
    _kept_head = b""

    def send(self, event: Any) -> Any:
        """Returns the bytes that are to be written for an event; those of a response's head come with the next
        event."""
        written = super().send(event)
        if isinstance(event, h11.Response):
            self._kept_head = written or b""
            return b""
        if written is not None:
            written, self._kept_head = self._kept_head + written, b""
        return written

    def next_event(self) -> Any:
        """Returns the next event of the connection. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
            names = {name for name, _ in event.headers}
            if b"content-length" in names and b"transfer-encoding" in names:
                # A request may have both a length and chunks. A proxy may follow the one header and we the other, so
                # that one request hides in another's body: RFC 9112, 6.3, has such a connection closed.
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
    """Holds connections that wait for their clients, by the clients' addresses, the longest waiting first (I9)."""

    def __init__(self) -> None:
        self._by_peer: dict[str, dict[Any, None]] = {}

    def add(self, connection: Any, peer: str) -> None:
        """Adds a connection that begins to wait for its client; one that waits already keeps its place."""
        self._by_peer.setdefault(peer, {}).setdefault(connection)

    def remove(self, connection: Any, peer: str) -> None:
        """Takes a connection out of those that wait for their clients, if it waits."""
        waiting = self._by_peer.get(peer, {})
        waiting.pop(connection, None)
        if not waiting:
            self._by_peer.pop(peer, None)

    def longest(self) -> Any:
        """Returns the connection that has waited longest among those of the address that has most of them; None where
        there is none."""
        waiting = max(self._by_peer.values(), key=len, default=None)
        return None if waiting is None else next(iter(waiting))


class Handshakes:
    """TLS handshakes under way, by the descriptors of their connections."""

    def __init__(self) -> None:
        self._connections: dict[int, tuple[socket.socket, str]] = {}
        self._waiting = WaitingClients()

    def begin(self, connection: socket.socket, peer: str, limit: int) -> None:
        """Adds a connection. Above the limit, the longest handshake of the address with most of them is cut."""
        number = connection.fileno()
        # A connection whose handshake has failed left its number behind.
        self.end(number)
        self._connections[number] = (connection, peer)
        self._waiting.add(number, peer)
        while len(self._connections) > limit:
            longest = self._waiting.longest()
            with contextlib.suppress(OSError):
                self._connections[longest][0].shutdown(socket.SHUT_RDWR)
            self.end(longest)

    def end(self, number: int) -> None:
        """Removes a connection, if it is there."""
        found = self._connections.pop(number, None)
        if found is not None:
            self._waiting.remove(number, found[1])


class TlsListener(socket.socket):
    """Listens for TLS, with a limit of handshakes: asyncio waits 60 s for each one, and shows the connection to its
    protocol only then."""

    def __init__(self, listening: socket.socket, handshakes: Handshakes, max_handshakes: int) -> None:
        super().__init__(fileno=listening.detach())
        self._handshakes = handshakes
        self._max_handshakes = max_handshakes

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection, whose handshake begins."""
        connection, address = super().accept()
        self._handshakes.begin(connection, address[0], self._max_handshakes)
        return connection, address


class PortState(ServerState):
    """Holds what all connections of a port share.

    Attributes:
        idle: the connections without a request, or with headers that are not whole.
        sending: the connections with a request whose body is not whole.
        handshakes: the connections that are not made yet, with TLS.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle = WaitingClients()
        self.sending = WaitingClients()
        self.handshakes = Handshakes()


class HttpConnection(H11Protocol):
    """Represents an HTTP connection.

    made --headers within HEAD_TIMEOUT_S--> request and answer --kept alive, the next one's first byte--> headers ...
      | no place is free: of those that wait | client takes nothing for STALL_TIMEOUT_S
      | for their clients, one is cut        '--> cut
      '--none waits--> 503, or cut

    Uvicorn itself waits for ever for the first request, for the rest of a request's headers, and for a client that does
    not read. A few thousand such connections, which cost an attacker nothing, would keep all other clients out. So the
    connection that has waited longest gives its place to a new one: first a connection without a request, then one
    whose body is not whole, and in both cases one of the address that has most of them.

    A client may end its side after its last request and wait for the answers (`nc -N`), which TCP does not tell from
    one that is gone until something is sent, which the system of a client that is gone refuses. So the end of a client
    is followed by "100 Continue", which clients of HTTP/1.1 pass over, and a look at what became of it, ever more
    rarely. Over TLS and HTTP/1.0, and once an answer has begun, the end of a client is taken for its going away.
    """

    server_state: PortState
    conn: StrictParser
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    # The next look at a connection whose client has ended its side.
    _look: asyncio.TimerHandle | None = None
    _peer = ""

    def __init__(self, config: Any, server_state: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, server_state, *arguments, **options)
        self.conn = StrictParser(h11.SERVER, config.h11_max_incomplete_event_size)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without this, a segment that follows another one waits for the client's acknowledgement, which is 40 ms late.
        # asyncio sets it only where the listening socket was made for TCP by its number. A client may be gone already.
        connection = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server_state.handshakes.end(connection.fileno())
        self._peer = self.client[0] if self.client else ""
        state, places = self.server_state, self.limit_concurrency or 0
        if len(self.connections) >= places:
            longest = state.idle.longest() or state.sending.longest()
            if longest is not None:
                longest.give_up()
        if len(self.connections) > places + SPARE_CONNECTIONS:
            transport.abort()
            return
        state.idle.add(self, self._peer)
        self._head = self.loop.call_later(HEAD_TIMEOUT_S, transport.abort)

    def give_up(self) -> None:
        """Cuts the connection at once, because another one gets its place."""
        self._leave()
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            _stop(self._head)
            self._head = None
        elif self._head is None and before is not None and before.response_complete:
            self._head = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)
        self._sort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Says whether the connection stays open for answers, now that the client has ended its side."""
        cycle = self.cycle
        # Nothing could be sent within an answer that has begun and halts, to find out.
        waits = cycle is not None and not cycle.response_started and not cycle.more_body
        if (
            not waits
            or self.scheme != "http"
            or self.conn.their_http_version != b"1.1"
            or not hasattr(socket, "TCP_INFO")
        ):
            return False
        self._look_at_client(FIRST_LOOK_S)
        return True

    def _look_at_client(self, again_s: float) -> None:
        """Cuts the connection if its client is gone; else sends it something, and looks again after ``again_s``."""
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if info[0] != TCP_CLOSE_WAIT:
            self.transport.abort()
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
        self._look = self.loop.call_later(again_s, self._look_at_client, min(LOOK_GROWTH * again_s, MAX_LOOK_S))

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a client that offers another protocol is answered over this one."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            super().send_400_response(self.conn.refusal or msg)
        else:
            # An answer has begun, so nothing but a cut connection can tell the client that it is over.
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._sort()
        if self._look is not None and (self.cycle is None or self.cycle.response_complete):
            # No further request can come.
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _sort(self) -> None:
        """Notes whether the connection waits for its client: for a request, or for the rest of a body."""
        cycle, state = self.cycle, self.server_state
        idle = cycle is None or cycle.response_complete
        for waiting, belongs in ((state.idle, idle), (state.sending, not idle and cycle.more_body)):
            if belongs and self in self.connections:
                waiting.add(self, self._peer)
            else:
                waiting.remove(self, self._peer)

    def _leave(self) -> None:
        for waiting in (self.server_state.idle, self.server_state.sending):
            waiting.remove(self, self._peer)
        for timer in (self._head, self._stall, self._look):
            _stop(timer)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
