"""Circuit breaker of a medium whose reads may be late. Sans-IO (I9).

    available --a read was late--> paused --the pause is over: a probe--> in time: available again
                                     ^                                      |
                                     +--the next pause is twice as long-----+ late

A read in time resets the pause. So at most the callers at one moment wait for a medium that hangs, and a medium that
stays slow is retried ever more rarely.
"""

from __future__ import annotations

# Duration of the first pause; each further one is twice as long, up to the max.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class TierBreaker:
    """State of one medium. Times are seconds on one clock.

    Attributes:
        paused: True while only probes may be sent to the medium.
        since_s: start of the pause.
        probe_at_s: when the next probe is due.
    """

    def __init__(self) -> None:
        self.paused = False
        self.since_s = self.probe_at_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def late(self, now: float) -> None:
        """Start a pause after a late read, or extend it after a late probe. Late reads that were started before the
        pause change nothing."""
        if not self.paused:
            self.paused, self.since_s = True, now
        self.probe_at_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def answered(self) -> None:
        """End the pause after a timely probe; the next late read still starts a longer one."""
        self.paused = False

    def in_time(self) -> None:
        """Record a read in time: the next pause lasts FIRST_PAUSE_S again, unless the medium is paused."""
        if not self.paused:
            self._pause_s = FIRST_PAUSE_S
