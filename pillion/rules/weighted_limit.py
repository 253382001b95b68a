"""Limits the total weight of work in progress, first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class WeightedLimit:
    """Starts work in order of arrival while the total weight of work in progress is at most ``limit``. All callers run
    on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_progress = 0
        self._queue = asyncio.Lock()
        self._ended = asyncio.Event()

    async def take(self, weight: int) -> None:
        """Wait until work of this weight may start; a weight above the limit waits until no other work runs."""
        async with self._queue:
            while self._in_progress and self._in_progress + weight > self._limit:
                self._ended.clear()
                await self._ended.wait()
            self._in_progress += weight

    @contextlib.asynccontextmanager
    async def taken(self, weight: int) -> AsyncIterator[None]:
        """Take this weight while the context manager is open."""
        await self.take(weight)
        try:
            yield
        finally:
            self.release(weight)

    def release(self, weight: int) -> None:
        """Release the weight of work that has ended."""
        self._in_progress -= weight
        self._ended.set()
