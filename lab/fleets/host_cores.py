"""Shares out the cores that simulated workers compute on: their own, or those of one host, which they lend each other
(I9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab.fleets.clock import Clock
from pillion.host.core_lending_table import LINGER_NS

# Each core beyond the first one of a step adds this much to its speed, where one core alone has the speed 1.
NEXT_CORE_SPEED = 0.9

# A function of this type is called at a step's end, with the seconds that the step would have taken longer on its
# worker's own cores.
StepEnd = Callable[[float], None]


class OwnCores:
    """Gives each worker cores of its own: none are lent, and a step takes what it costs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, number: int, seconds: float, done: StepEnd) -> None:
        """Runs a step of worker ``number`` that takes ``seconds`` on its own cores."""
        self._clock.after(seconds, lambda: done(0.0))


@dataclass(slots=True)
class SharedStep:
    """Represents a step under way: the work that is left, in seconds on one core, and the borrowed time of cores."""

    left_s: float
    done: StepEnd
    borrowed_s: float = 0.0


class SharedCores:
    """Represents a host whose ``workers`` own ``cores_each`` cores each, and compute on those of workers that have
    nothing to do.

    As on the real lending table, an owner keeps its cores for a moment after a step.
    """

    def __init__(self, clock: Clock, workers: int, cores_each: int) -> None:
        self._clock = clock
        self._workers = workers
        self._each = cores_each
        self._running: dict[int, SharedStep] = {}
        self._kept: dict[int, float] = {}
        self._at_s = 0.0
        self._version = 0

    def run(self, number: int, seconds: float, done: StepEnd) -> None:
        """Runs a step of worker ``number`` that takes ``seconds`` on its own cores."""
        self._advance()
        self._kept.pop(number, None)
        self._running[number] = SharedStep(seconds * _speed(self._each), done)
        self._expect()

    def _lent(self) -> float:
        """Returns how many cores each running step has borrowed."""
        busy = len(self._running.keys() | self._kept.keys())
        return (self._workers - busy) * self._each / max(1, len(self._running))

    def _advance(self) -> None:
        passed_s, lent = self._clock.now - self._at_s, self._lent()
        for step in self._running.values():
            step.left_s -= passed_s * _speed(self._each + lent)
            step.borrowed_s += passed_s * lent / self._each
        self._at_s = self._clock.now

    def _expect(self) -> None:
        """Schedules the next change: a step ends, or an owner that has nothing to do begins to lend its cores."""
        self._version += 1
        version, speed = self._version, _speed(self._each + self._lent())
        ends = [step.left_s / speed for step in self._running.values()]
        ends += [until - self._clock.now for until in self._kept.values()]
        if ends:
            self._clock.after(max(0.0, min(ends)), lambda: self._change(version))

    def _change(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._kept = {number: until for number, until in self._kept.items() if until > self._clock.now + 1e-9}
        ended = {number: step for number, step in self._running.items() if step.left_s < 1e-9}
        for number in ended:
            del self._running[number]
            self._kept[number] = self._clock.now + LINGER_NS / 1e9
        self._expect()
        for step in ended.values():
            step.done(step.borrowed_s)


def _speed(cores: float) -> float:
    return 1 + NEXT_CORE_SPEED * (cores - 1)
