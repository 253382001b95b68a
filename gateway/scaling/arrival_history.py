"""Estimates the rate at which requests come, and what it may be when a worker that is asked for now will serve (I9).

    counts of TICK_S seconds --> a line through the last window --> its height at now + horizon
                                                                    times how far arrivals went beyond such lines before

The line is fitted by least squares (Dynamo's planner predicts its next interval by a constant, ARIMA or Prophet; a line
needs no library and no day of history, and start-up times are short beside a day). Every prediction is kept until its
time has come, and compared with what came. The quantile of these ratios that the attainment asks for is the margin of
the next one, so a load that the line follows well needs no margin, and a bursty load gets as much as it needed before.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

# Requests are counted over this time, and a forecast is made as often.
TICK_S = 5.0
# The line of arrivals is fitted over twice the horizon, and over no less than this, because a few requests show no
# trend.
LEAST_WINDOW_S = 120.0
MAX_HORIZON_S = 600.0
# Arrivals are measured over this many counts together, because a single count is mostly chance.
SETTLED_TICKS = 6
# Ratios of arrivals to predictions are remembered for an hour, and are used once there are LEAST_RATIOS of them.
MAX_RATIOS = 720
LEAST_RATIOS = 24
# Forecasts are raised by at most this factor, however wrong earlier ones were, lest they ask for ever more workers.
MAX_MARGIN = 2.0


class Rates(NamedTuple):
    """Holds rates in requests a second.

    Attributes:
        present: the rate about now.
        ahead: the rate when a worker that is asked for now will serve, with the margin; it is never less than
            ``present``.
        most_ahead: ``ahead`` with the requests that may be missing from the window by chance.
    """

    present: float
    ahead: float
    most_ahead: float


def window_s(horizon_s: float) -> float:
    """Returns for how long back counts are used to fit the line for a horizon."""
    return max(LEAST_WINDOW_S, 2 * min(horizon_s, MAX_HORIZON_S))


class ArrivalHistory:
    """Keeps the counts of one model's arrivals. ``now`` is monotonic, in seconds; ``deviations`` and ``attainment`` are
    those of the objectives. Counts are known from ``since_s`` on; 0.0 means from the first tick on."""

    def __init__(self, deviations: float, attainment: float, since_s: float = 0.0) -> None:
        self._deviations = deviations
        self._attainment = attainment
        self._counts: deque[float] = deque(maxlen=int(2 * MAX_HORIZON_S / TICK_S))
        self._ticked_s = since_s
        self._ticks = 0
        # For each prediction this has the tick by which it can be judged, and the rate that was predicted.
        self._predicted: deque[tuple[int, float]] = deque()
        self._ratios: deque[float] = deque(maxlen=MAX_RATIOS)

    def tick(self, now: float, count: float) -> None:
        """Notes that ``count`` requests came since the last call. A late call divides its count among the ticks that
        are over. Where nothing is known of earlier times, the first call begins the history."""
        if not self._ticked_s:
            self._ticked_s = now
            return
        ticks = int((now - self._ticked_s) / TICK_S + 0.5)
        if ticks < 1:
            # This is the second call within a tick, so the requests are counted in the last tick.
            if self._counts:
                self._counts[-1] += count
            return
        # What is left of the time since the last tick counts for the next one.
        self._ticked_s += ticks * TICK_S
        for _ in range(min(ticks, self._counts.maxlen or ticks)):
            self._counts.append(count / ticks)
            self._ticks += 1
            self._judge()

    def rates(self, horizon_s: float) -> Rates:
        """Returns the rates for workers that take ``horizon_s`` to start. They are noted as a prediction, so make one
        call for each tick."""
        window_back_s = window_s(horizon_s)
        counts = list(self._counts)[-int(window_back_s / TICK_S) :]
        if not counts:
            return Rates(0.0, 0.0, 0.0)
        seen_s, total = len(counts) * TICK_S, sum(counts)
        mean, slope = total / seen_s, _slope(counts)
        present = max(mean + slope * seen_s / 2, self._certain(counts), 0.0)
        # A line through a short history is not extended far beyond it.
        ahead = max(present, mean + slope * (seen_s / 2 + min(horizon_s, seen_s)))
        due = self._ticks + round(min(horizon_s, MAX_HORIZON_S) / TICK_S)
        self._predicted.append((due, ahead))
        ahead *= self._margin()
        chance = 1 + self._deviations / math.sqrt(total) if total else 1.0
        return Rates(present, ahead, ahead * chance)

    def _certain(self, counts: list[float]) -> float:
        """Returns the rate that the last few counts alone show with certainty: a prediction that this rate exceeds has
        missed a burst. Chance is left out here, because the arithmetic of waits allows for it already."""
        last = counts[-SETTLED_TICKS:]
        came = sum(last)
        return max(0.0, came - self._deviations * math.sqrt(came)) / (len(last) * TICK_S)

    def _judge(self) -> None:
        """Compares predictions whose time has come with the requests that came."""
        certain_per_s = self._certain(list(self._counts))
        # A ratio to a rate near zero is always large, so one request more than the last and the predicted number counts
        # as no surprise.
        one_per_s = 1 / (SETTLED_TICKS * TICK_S)
        while self._predicted and self._predicted[0][0] <= self._ticks:
            due, predicted = self._predicted.popleft()
            if due == self._ticks and len(self._counts) >= SETTLED_TICKS:
                self._ratios.append((certain_per_s + one_per_s) / (predicted + one_per_s))

    def _margin(self) -> float:
        if len(self._ratios) < LEAST_RATIOS:
            return 1.0
        ranked = sorted(self._ratios)
        return min(MAX_MARGIN, max(1.0, ranked[min(len(ranked) - 1, int(self._attainment * len(ranked)))]))


def _slope(counts: list[float]) -> float:
    """Returns the slope of the line through counts of TICK_S seconds each, in requests a second each second, less the
    standard deviation that chance alone gives it: for an even load, whose counts vary by their square roots, little is
    left."""
    middle = (len(counts) - 1) / 2
    spread = sum((at - middle) ** 2 for at in range(len(counts)))
    if not spread:
        return 0.0
    slope = sum((at - middle) * count for at, count in enumerate(counts)) / spread
    chance = math.sqrt(sum(counts) / len(counts) / spread)
    return math.copysign(max(0.0, abs(slope) - chance), slope) / TICK_S / TICK_S
