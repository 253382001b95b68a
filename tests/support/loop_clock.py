"""The running event loop's clock, turned forward by hand: a test of a timer need not wait for it."""

from __future__ import annotations

import asyncio

from lab.testbed.conditions import loop_turns


async def turn_clock(seconds: float) -> None:
    """Turns the loop's clock forward and runs what is due by then. The clock stays ahead until the loop ends."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
    await loop_turns()
