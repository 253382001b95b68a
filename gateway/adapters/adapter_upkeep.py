"""Runs the tasks beside requests that share adapters' names and spread their files."""

from __future__ import annotations

import asyncio

from pillion.gateway.adapters.adapter_names import AdapterNames
from pillion.gateway.named_adapters import Adapters


class AdapterUpkeep:
    """Keeps the names and files of adapters up to date, where adapters are served.

    start -> stop, when the gateway begins to drain
    """

    def __init__(self, adapters: Adapters) -> None:
        self._names = adapters if isinstance(adapters, AdapterNames) else None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, heartbeat_s: float) -> None:
        """Begins to share the names of adapters and to spread their files, once in each heartbeat."""
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
