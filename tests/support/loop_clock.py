"""Manual control of the running event loop's clock, so that tests of timers need not wait."""

from __future__ import annotations

import asyncio

from lab.testbed.conditions import loop_turns


async def turn_clock(seconds: float) -> None:
    """Advance the loop's clock and run everything due by then. The clock stays ahead until the loop ends."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
    await loop_turns()
