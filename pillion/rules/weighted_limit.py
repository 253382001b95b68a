"""Bounds the total weight of work that is under way, first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class WeightedLimit:
    """Lets work begin, in the order in which it comes, while the total weight of what is under way is at most
    ``limit``. All callers run on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way = 0
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    async def take(self, weight: int) -> None:
        """Wait until work of this weight may begin. Work that weighs more than the limit runs alone."""
        async with self._turn:
            while self._under_way and self._under_way + weight > self._limit:
                self._ended.clear()
                await self._ended.wait()
            self._under_way += weight

    @contextlib.asynccontextmanager
    async def taken(self, weight: int) -> AsyncIterator[None]:
        """Take this weight before a block of code runs, and give it back when the block ends, however it ends."""
        await self.take(weight)
        try:
            yield
        finally:
            self.release(weight)

    def release(self, weight: int) -> None:
        """Note that work of this weight has ended."""
        self._under_way -= weight
        self._ended.set()
