"""Short pauses of components at random, as where cores are few: messages merge and overtake each other.

What such a pause changes is an order alone, so nobody may be lost, fenced or given up for it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

ROLES = ("prefill", "decode", "gateway", "kvnode")
LASTS_S = (0.01, 0.03, 0.1, 0.3)
MAX_APART_S = 0.1
# After that the cluster goes on undisturbed, so that a run comes to its end.
WITHIN_S = 8.0


@contextlib.contextmanager
def short_pauses(pids: Callable[[str], list[int]], seed: int) -> Iterator[None]:
    """Stops one process after the other for a moment while the block runs, for WITHIN_S at most. ``pids`` gives the
    processes of a role."""
    over, chance = threading.Event(), random.Random(seed)
    pausing = threading.Thread(target=_pause, args=(pids, chance, over))
    pausing.start()
    try:
        yield
    finally:
        over.set()
        pausing.join()


def _pause(pids: Callable[[str], list[int]], chance: random.Random, over: threading.Event) -> None:
    until_s = time.monotonic() + WITHIN_S
    while time.monotonic() < until_s and not over.wait(chance.uniform(0.0, MAX_APART_S)):
        alive = [pid for role in ROLES for pid in pids(role)]
        for pid in chance.sample(alive, min(1, len(alive))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                over.wait(chance.choice(LASTS_S))
                os.kill(pid, signal.SIGCONT)
