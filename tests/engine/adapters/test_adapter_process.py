"""The process that packs adapters: answers, limits, and pauses."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest

from lab.testbed.conditions import WITHIN_S, wait_for
from pillion.engine.adapters.adapter_process import AdapterProcess
from pillion.engine.adapters.adapter_process_main import (
    BURST_S,
    CROWDED_BURSTS,
    LONGEST_BURST_S,
    PAUSE_S,
    WorkPace,
)
from pillion.errors import ConfigError, Internal, Overloaded, Unavailable
from pillion.host.cores import BACKGROUND_NICENESS
from tests.support.fake_adapter_jobs import FakeJobs

MEMORY_BYTES = 2**30


def test_jobs_have_limits_and_errors_pass() -> None:
    process = AdapterProcess(FakeJobs("hello"), MEMORY_BYTES)
    try:
        (greeting, pid, niceness), data = process.run(WITHIN_S, "say")
        assert (greeting, niceness) == ("hello", min(19, os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS))
        assert np.array_equal(data.view(np.int64), np.arange(10**6))
        assert process.run(WITHIN_S, "compute", 0.01)[0][0] > 0
        with pytest.raises(Overloaded, match="no room"):
            process.run(WITHIN_S, "refuse")
        with pytest.raises(Internal, match="a defect"):
            process.run(WITHIN_S, "fail")
        with pytest.raises(ConfigError, match="too much memory"):
            process.run(WITHIN_S, "take", 2 * MEMORY_BYTES)
        assert process.run(WITHIN_S, "say")[0][1] == pid
        with pytest.raises(Unavailable, match=r"more than 0\.01 s"):
            process.run(0.01, "hang")
        wait_for("the end of the process", lambda: not psutil.pid_exists(pid))
        (_, other, _), _ = process.run(WITHIN_S, "say")
        process.close(for_good=False)
        wait_for("the end of the other process", lambda: not psutil.pid_exists(other))
        process.start()
    finally:
        process.close()
    with pytest.raises(Unavailable, match="stopping"):
        process.run(WITHIN_S, "say")


def test_packing_pauses_while_others_need_the_cores() -> None:
    """It pauses only while others need the cores, and once before each job to measure that."""
    pace, now, computed, pauses = WorkPace(), 100.0, 50.0, []

    def bursts(count: int, waited_s: float) -> None:
        nonlocal now, computed
        for _ in range(count):
            now, computed = now + BURST_S + waited_s, computed + BURST_S
            pause_s = pace.pause_s(now, computed)
            pauses.append(pause_s > 0)
            now += pause_s

    pace.begin(now, computed)
    bursts(4, 0.0)
    assert pauses == [True, False, False, False]
    pauses.clear()
    bursts(1, 0.005)
    bursts(CROWDED_BURSTS + 3, 0.0)
    assert pauses == [True] * CROWDED_BURSTS + [False] * 4
    # A job that computed less than a burst continues.
    assert pace.pause_s(now + 1, computed + BURST_S / 2) == 0
    assert pace.pause_s(now + 1, computed + BURST_S) == PAUSE_S
    # After a long wait for its turn it may compute longer.
    assert pace.pause_s(now + 2, computed + BURST_S + LONGEST_BURST_S / 2) == 0
    assert pace.pause_s(now + 2, computed + BURST_S + 2 * LONGEST_BURST_S) == PAUSE_S
