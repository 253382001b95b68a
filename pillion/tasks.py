"""Starting and ending of background asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnTasks(set[asyncio.Task[Any]]):
    """Set of running tasks, each until it ends. Needed because the event loop only has weak references to tasks."""

    def begin(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task and add it."""
        task = asyncio.create_task(work, name=name)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and return when they have ended, with or without an error. Ignores None, for a task that was
    not started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


async def at_most(wait_s: float, work: Awaitable[T]) -> T | None:
    """Await ``work`` for at most ``wait_s`` seconds, then cancel it. Return its result, None after the timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            return await work
    return None
