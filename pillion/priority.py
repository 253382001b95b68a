"""The one order in which requests wait, wherever they wait: by priority, aged so that nobody starves."""

from __future__ import annotations

# Waiting so long makes up for one level of priority. It bounds every wait: who arrived PRIORITY_AGING_S later for each
# level of difference is never served first.
PRIORITY_AGING_S = 10.0
# Requests may say no more than this, either way; 0 is the usual, smaller is more urgent.
MAX_PRIORITY = 100


def rank(priority: int, arrived_s: float) -> float:
    """Smaller goes first. A rank never changes while a request waits, so a line that is sorted stays sorted: of two
    requests the one that is one level less urgent counts as having arrived PRIORITY_AGING_S later."""
    return arrived_s + priority * PRIORITY_AGING_S


def bounded(priority: int) -> int:
    """What an internal caller said, within what a request may say: the edge has judged it, a broken peer has not."""
    return max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
