"""An HTTP connection: uvicorn's protocol with three more bounds.

made --headers within HEAD_TIMEOUT_S--> request and answer --kept alive, the next one's first byte--> headers ...
  | too many connections                   | client takes nothing for STALL_TIMEOUT_S
  '--> cut                                 '--> cut

Uvicorn itself waits for ever for the first request, for the rest of a request's headers, and for a client that does not
read. A few thousand such connections, which cost an attacker nothing, would keep all other clients out.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds from a connection's begin (TLS done), or the first byte of a further request, until its headers are whole.
HEAD_TIMEOUT_S = 20.0
# A client that reads nothing for so long, while more waits for it than the transport holds, has gone.
STALL_TIMEOUT_S = 120.0
# Connections beyond those that are served; they get 503.
SPARE_CONNECTIONS = 64


class HttpConnection(H11Protocol):
    """uvicorn's h11 protocol with bounds for idle, slow and stalled clients."""

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > (self.limit_concurrency or 0) + SPARE_CONNECTIONS:
            transport.abort()
            return
        self._head = self.loop.call_later(HEAD_TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            _stop(self._head)
            self._head = None
        elif self._head is None and before is not None and before.response_complete:
            self._head = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._head)
        _stop(self._stall)
        super().connection_lost(exc)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
