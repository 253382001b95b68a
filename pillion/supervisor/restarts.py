"""Decides when a dead component is restarted.

Sans-IO (I9): deaths and times go in, decisions come out.

died ---- calm_s or more after its last death --------> Restart at once: a client may be waiting
     ---- sooner: it may never succeed ---------------> Restart after a delay that doubles with each such death in a row
     ---- the max_deaths-th within the window --------> Restart, flapping: after a longer delay, which doubles too,
     ---- exit status 2: its flags are invalid -------> the same, with another message
                                until it has lived for the window's time

Whether a cluster continues while a component flaps is its supervisor's decision.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

# Exit status of a component whose flags, or the files in them, are unusable; restarting it at once cannot help.
EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class Restart:
    """Decision to restart a component after ``delay_s`` seconds. ``flapping``: message if it flaps, else ""."""

    delay_s: float
    flapping: str = ""


@dataclass(slots=True)
class _DeathHistory:
    """A component's death times within the window. ``flaps``: deaths since it began to flap. ``restart_s``: time of
    the restart after its last death. Times are in monotonic seconds."""

    deaths: deque[float]
    flaps: int = 0
    restart_s: float = float("-inf")


@dataclass
class RestartPolicy:
    """Delays restarts of a component whose deaths are close together, by exponential backoff.

    Args:
        max_deaths: number of deaths of one component within ``window_s`` seconds from which it flaps, until it has
            lived for ``window_s``.
        first_delay_ms: wait after a death less than ``calm_s`` after the previous one; it doubles with each further
            such death, up to ``max_delay_ms``.
        flap_delay_s: wait after the first death from which the component flaps; it doubles with each further death, up
            to ``max_flap_delay_s``.
    """

    max_deaths: int = 6
    window_s: float = 60.0
    first_delay_ms: int = 200
    max_delay_ms: int = 5000
    calm_s: float = 5.0
    flap_delay_s: float = 10.0
    max_flap_delay_s: float = 120.0
    _histories: dict[str, _DeathHistory] = field(default_factory=dict)

    def died(self, component_id: str, exit_code: int, now: float) -> Restart:
        """Decide what to do after a death at ``now``, in monotonic seconds."""
        history = self._histories.setdefault(component_id, _DeathHistory(deque(maxlen=self.max_deaths)))
        deaths = history.deaths
        if now - history.restart_s >= self.window_s:
            history.flaps = 0
        while deaths and now - deaths[0] > self.window_s:
            deaths.popleft()
        deaths.append(now)
        if exit_code == EXIT_CONFIG:
            restart = self._flap(history, f"{component_id} cannot work as configured")
        elif history.flaps:
            restart = self._flap(history, f"{component_id} keeps dying")
        elif len(deaths) >= self.max_deaths:
            restart = self._flap(history, f"{component_id} died {len(deaths)} times within {self.window_s:g} s")
        else:
            restart = Restart(self._delay_s(deaths))
        history.restart_s = now + restart.delay_s
        return restart

    def _flap(self, history: _DeathHistory, why: str) -> Restart:
        history.flaps += 1
        return Restart(min(self.flap_delay_s * 2 ** min(history.flaps - 1, 32), self.max_flap_delay_s), why)

    def _delay_s(self, deaths: deque[float]) -> float:
        """Return the delay after the last of these deaths: 0 unless it followed the previous one within ``calm_s``."""
        in_a_row = 0
        for earlier, later in zip(deaths, islice(deaths, 1, None), strict=False):
            in_a_row = in_a_row + 1 if later - earlier < self.calm_s else 0
        return min(self.first_delay_ms * 2 ** (in_a_row - 1), self.max_delay_ms) / 1000 if in_a_row else 0.0
