"""Decides whether a medium that was late is asked again. Sans-IO (I9).

    answers --a read was late--> paused --the pause is over: a probe--> in time: answers again
                                   ^                                      |
                                   +--the next pause is twice as long-----+ late

A read in time makes pauses short again. So only the callers of one moment wait for a medium that hangs, and a medium
that is always too slow is waited for ever more seldom.
"""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0


class TierBreaker:
    """Holds the state of one medium. Times are in seconds of one clock.

    Attributes:
        paused: whether nothing except probes may be sent to the medium.
        since_s: when the medium was paused.
        probe_at_s: when the next probe is due.
    """

    def __init__(self) -> None:
        self.paused = False
        self.since_s = self.probe_at_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def late(self, now: float) -> None:
        """Begins a pause, because a read was late, or a further pause, because the probe was. Reads that were begun
        before a pause and are late in it say nothing new."""
        if not self.paused:
            self.paused, self.since_s = True, now
        self.probe_at_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    def answered(self) -> None:
        """Records that a probe was answered in time; the next late read begins a longer pause nevertheless."""
        self.paused = False

    def in_time(self) -> None:
        """Records that a read came in time."""
        if not self.paused:
            self._pause_s = FIRST_PAUSE_S
