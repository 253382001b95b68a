"""When a dead component is started again, and when its cluster gives up.

Sans-IO (I9): deaths and a clock in, decisions out.

died ---- calm_s after its last death, or later ------> Restart at once: a client may be waiting
     ---- sooner: it may never get on ----------------> Restart after a delay that doubles with each such death in a row
     ---- the max_deaths-th within the window --------> GiveUp
     ---- exit status 2: its flags cannot work -------> GiveUp at once
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

# The exit status of a component whose configuration is wrong; starting it again cannot help.
EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the component again after ``delay_s`` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop the cluster; ``reason`` is for people."""

    reason: str


@dataclass
class RestartPolicy:
    """Exponential backoff per component whose deaths come close together, and a bound on deaths within a sliding
    window.

    Args:
        max_deaths: number of deaths of one component within ``window_s`` seconds at which the cluster gives up.
        first_delay_ms: wait after a death that came less than ``calm_s`` after the one before; doubles with each
            further one, up to ``max_delay_ms``.
    """

    max_deaths: int = 6
    window_s: float = 60.0
    first_delay_ms: int = 200
    max_delay_ms: int = 5000
    calm_s: float = 5.0
    _deaths: dict[str, deque[float]] = field(default_factory=dict)

    def died(self, component_id: str, exit_code: int, now: float) -> Restart | GiveUp:
        """What to do about a death at ``now``, in monotonic seconds."""
        if exit_code == EXIT_CONFIG:
            return GiveUp(f"{component_id} cannot work as configured")
        deaths = self._deaths.setdefault(component_id, deque(maxlen=self.max_deaths))
        while deaths and now - deaths[0] > self.window_s:
            deaths.popleft()
        deaths.append(now)
        if len(deaths) >= self.max_deaths:
            return GiveUp(f"{component_id} died {len(deaths)} times within {self.window_s:g} s")
        in_a_row = 0
        for earlier, later in zip(deaths, islice(deaths, 1, None), strict=False):
            in_a_row = in_a_row + 1 if later - earlier < self.calm_s else 0
        if not in_a_row:
            return Restart(0.0)
        delay_ms = min(self.first_delay_ms * 2 ** (in_a_row - 1), self.max_delay_ms)
        return Restart(delay_ms / 1000)
