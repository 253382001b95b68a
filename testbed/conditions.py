"""Waiting for a condition with a bound, in place of a sleep of a guessed length.

``wait_for`` blocks the thread, ``until`` gives way to the event loop, and ``loop_turns`` lets whatever is ready on the
loop run a known number of times. A test that shows that something does *not* happen counts turns or drives a clock.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.02
# Most time that a condition is given. It is long for the sake of loaded machines; a test waits it out only where
# something is broken.
WITHIN_S = 60.0


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = WITHIN_S) -> Any:
    """Return the first true answer of ``condition``. Raises AssertionError with ``what`` when none comes in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        time.sleep(POLL_S)


async def until(what: str, condition: Callable[[], Any | Awaitable[Any]], timeout_s: float = WITHIN_S) -> Any:
    """Return the first true answer of ``condition``, which may be a coroutine function.

    Raises AssertionError with ``what`` when none comes in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        await asyncio.sleep(POLL_S)


async def loop_turns(count: int = 50) -> None:
    """Let the event loop run everything that is ready, ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)
