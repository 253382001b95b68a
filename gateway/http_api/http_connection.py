"""One connection of the HTTP port: uvicorn's h11 protocol, with bounds for clients that are idle, slow or malicious."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

# Seconds from a connection's begin (TLS done), or the first byte of a further request, until its headers are whole.
HEAD_TIMEOUT_S = 20.0
# A client that reads nothing for so long, while more waits for it than the transport holds, has gone.
STALL_TIMEOUT_S = 120.0
# Connections beyond those that are served; they get 503.
SPARE_CONNECTIONS = 64
# A body may come in so many chunks of any size. What comes in more has chunks of at least so many bytes on the average,
# because each costs as much as a kilobyte: what the system hands over at once would keep the event loop for a second.
SMALL_CHUNKS, MIN_CHUNK_BYTES = 512, 128


class StrictParser(h11.Connection):
    """h11's parser, which refuses more. ``refusal`` says what, where it has refused something itself."""

    refusal = ""
    _chunks = _chunk_bytes = 0

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
            names = {name for name, _ in event.headers}
            if b"content-length" in names and b"transfer-encoding" in names:
                # A proxy may believe the one and we the other, so that one request hides in another's body: RFC 9112,
                # 6.3, has such a connection closed.
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
    """Connections that wait for their clients, by the clients' addresses, the longest waiting first (I9)."""

    def __init__(self) -> None:
        self._by_peer: dict[str, dict[Any, None]] = {}

    def add(self, connection: Any, peer: str) -> None:
        """Adds a connection that begins to wait; one that waits already stays where it is."""
        self._by_peer.setdefault(peer, {}).setdefault(connection)

    def remove(self, connection: Any, peer: str) -> None:
        """Takes a connection out, if it is in."""
        waiting = self._by_peer.get(peer, {})
        waiting.pop(connection, None)
        if not waiting:
            self._by_peer.pop(peer, None)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(map(len, self._by_peer.values()))

    def longest(self) -> Any:
        """The connection that has waited longest among those of the address that has most of them; None where there is
        none."""
        waiting = max(self._by_peer.values(), key=len, default=None)
        return None if waiting is None else next(iter(waiting))


class PortState(ServerState):
    """What all connections of a port know of each other.

    Attributes:
        idle: those without a request, or with headers that are not whole.
        sending: those with a request whose body is not whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle = WaitingClients()
        self.sending = WaitingClients()


class HttpConnection(H11Protocol):
    """An HTTP connection.

    made --headers within HEAD_TIMEOUT_S--> request and answer --kept alive, the next one's first byte--> headers ...
      | no place is free: of those that wait | client takes nothing for STALL_TIMEOUT_S
      | for their clients, one is cut        '--> cut
      '--none waits--> 503, or cut

    Uvicorn itself waits for ever for the first request, for the rest of a request's headers, and for a client that does
    not read. A few thousand such connections, which cost an attacker nothing, would keep all other clients out. So the
    one that has waited for the longest time gives its place to a new connection: first one without a request, then one
    whose body is not whole, and in both cases one of the address that has most of them.
    """

    server_state: PortState
    conn: StrictParser
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _peer = ""

    def __init__(self, config: Any, server_state: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, server_state, *arguments, **options)
        self.conn = StrictParser(h11.SERVER, config.h11_max_incomplete_event_size)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        """Cuts the connection at once: its place is another's."""
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

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            super().send_400_response(self.conn.refusal or msg)
        else:
            # The answer has begun.
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._sort()

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
        """Notes whether it waits for its client, and for what."""
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
        _stop(self._head)
        _stop(self._stall)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
