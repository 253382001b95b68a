"""Starts and ends asyncio tasks that run next to their owner's work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnTasks(set[asyncio.Task[Any]]):
    """Holds tasks until they end. The event loop itself keeps only weak references to tasks."""

    def begin(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task."""
        task = asyncio.create_task(work, name=name)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and return when they have ended, with or without an error. None stands for a task that was not
    started."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


async def at_most(wait_s: float, awaited: Awaitable[T]) -> T | None:
    """Await something for at most ``wait_s`` seconds, then cancel it. Returns its result; None after the timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            return await awaited
    return None
