"""Bounds what is under way by weight, first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class WeightedLimit:
    """Lets in what weighs at most ``limit`` together, in the order in which it comes. It is used on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way = 0
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    async def take(self, weight: int) -> None:
        """Waits until so much more may be under way. What weighs more than the limit enters alone."""
        async with self._turn:
            while self._under_way and self._under_way + weight > self._limit:
                self._ended.clear()
                await self._ended.wait()
            self._under_way += weight

    @contextlib.asynccontextmanager
    async def taken(self, weight: int) -> AsyncIterator[None]:
        """Holds so much of the limit for the length of a block."""
        await self.take(weight)
        try:
            yield
        finally:
            self.give_back(weight)

    def give_back(self, weight: int) -> None:
        """Notes that what weighs so much has ended."""
        self._under_way -= weight
        self._ended.set()
