"""Defines the seam at which rooms join a gateway with pages of their own and a life from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.gateway.gateway import Gateway
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.rooms import Seam


class GatewayPart:
    """Represents a room's part of a running gateway. This class does nothing; a room overrides what it needs.

    routes, before the ports listen -> start -> stop, when the gateway begins to drain -> aclose
    """

    def routes(self, calls: ModelCalls, others: Sequence[Route]) -> list[Route]:
        """Returns the room's pages. ``others`` are the pages that stand before them in the table of the HTTP port."""
        return []

    def start(self, heartbeat_s: float) -> None:
        """Begins the room's work. The gateway is complete, and sends a heartbeat every ``heartbeat_s`` seconds."""

    async def stop(self) -> None:
        """Ends the room's work in the background; calls of clients are still answered."""

    async def aclose(self) -> None:
        """Frees what the room holds; no call of a client comes any more."""


# A room adds a function here, which makes its part of a gateway. It raises ConfigError where the flags cannot work.
PARTS = Seam[Callable[[Gateway, GatewayFlags], GatewayPart]]("gateway.parts")
