"""The watch of the event loop: what blocked it is measured, stays visible for a while, and is forgotten."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lab.testbed.conditions import until
from pillion.observability import metric_catalog as names
from pillion.observability.loop_watch import LONG_S, WINDOW_S, LoopWatch, RecentMax
from pillion.observability.metrics import Meters
from tests.support.loop_clock import turn_clock


def test_the_maximum_is_kept_for_one_to_two_windows() -> None:
    longest = RecentMax(0.0)
    assert longest.longest(1.0) == 0.0
    longest.note(0.5, 10.0)
    longest.note(0.2, 11.0)
    assert longest.longest(11.0) == 0.5
    assert longest.longest(10.0 + WINDOW_S) == 0.5
    longest.note(0.3, 11.0 + WINDOW_S)
    assert longest.longest(12.0 + WINDOW_S) == 0.5
    assert longest.longest(12.0 + 2 * WINDOW_S) == 0.3
    assert longest.longest(20.0 + 4 * WINDOW_S) == 0.0
    longest.note(0.1, 20.0 + 4 * WINDOW_S)
    assert longest.longest(30.0 + 7 * WINDOW_S) == 0.0


async def test_event_loop_blockers_are_measured_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    meters = Meters()
    watch = LoopWatch(meters)

    def longest_s() -> float:
        (value,) = meters.collect()[names.LOOP_LONGEST].values()
        return value

    try:
        with caplog.at_level(logging.WARNING):
            # As if a callback had taken so long: the clock went on, and no tick came.
            await turn_clock(2 * LONG_S)
            await until("a late tick", lambda: longest_s() > LONG_S)
        assert "a callback blocked the event loop for" in caplog.text
        await turn_clock(3 * WINDOW_S)
        # That was the longest one; it is forgotten as well.
        await until("a tick that is later still", lambda: longest_s() > 2 * WINDOW_S)
    finally:
        watch.stop()
    assert not [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
