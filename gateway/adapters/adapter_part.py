"""Adds adapters to a gateway: their pages, and the tasks beside requests that share names and spread files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.gateway.adapters.adapter_names import AdapterNames
from pillion.gateway.adapters.adapters_api import adapter_routes
from pillion.gateway.gateway import Gateway
from pillion.gateway.gateway_part import GatewayPart
from pillion.gateway.http_api.model_calls import ModelCalls


class AdapterPart(GatewayPart):
    """Serves the calls about adapters; where adapters are served, it keeps their names and files up to date."""

    def __init__(self, gateway: Gateway, flags: GatewayFlags) -> None:
        self._names = gateway.adapters if isinstance(gateway.adapters, AdapterNames) else None
        self._tasks: list[asyncio.Task[None]] = []

    def routes(self, calls: ModelCalls, others: Sequence[Route]) -> list[Route]:
        """Returns the pages that load and unload adapters."""
        return adapter_routes(calls)

    def start(self, heartbeat_s: float) -> None:
        """Begins to share the names of adapters and to spread their files."""
        if self._names is not None:
            self._tasks = [
                asyncio.create_task(self._names.run(heartbeat_s), name="adapters"),
                asyncio.create_task(self._names.run_spread(heartbeat_s), name="files of adapters"),
            ]

    async def stop(self) -> None:
        """Ends the sharing of adapters' names and the spreading of their files."""
        for task in self._tasks:
            task.cancel()
        if self._names is not None:
            # The calls that receive an adapter's files may wait for the process that reads them.
            await self._names.end_reading()
        await asyncio.gather(*self._tasks, return_exceptions=True)
