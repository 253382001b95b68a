"""Number of examples that hypothesis draws per property.

``make test`` draws a quarter of a property's number, the same in each run, so that its result depends on the code
alone. ``make test-long`` draws ``TEST_EXAMPLES`` times half of the number, different ones, from the Makefile's seed, so
the same in each run as well. ``make search`` sets ``TEST_NEW_EXAMPLES`` and draws new ones, ``TEST_EXAMPLES`` times the
property's number; hypothesis prints how to reproduce a failure.
"""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("TEST_EXAMPLES", "0"))
LONG = FACTOR > 0
NEW = bool(os.environ.get("TEST_NEW_EXAMPLES"))


def examples(count: int) -> int:
    """Return this run's number of examples for a property whose number is ``count``."""
    if NEW:
        return count * FACTOR
    return max(count // 2, 1) * FACTOR if LONG else max(count // 4, 1)
