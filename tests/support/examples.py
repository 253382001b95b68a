"""How many examples hypothesis draws for a property.

``make test`` draws a quarter of a property's number, the same ones in each run, so that its result depends on the code
alone. ``make test-long`` draws ``TEST_EXAMPLES`` times half of the number, others, from a seed that the Makefile names,
so the same ones in each run as well. ``make search`` sets ``TEST_NEW_EXAMPLES`` and draws new ones, ``TEST_EXAMPLES``
times the property's number; hypothesis prints how to draw a failed example again.
"""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("TEST_EXAMPLES", "0"))
LONG = FACTOR > 0
NEW = bool(os.environ.get("TEST_NEW_EXAMPLES"))


def examples(count: int) -> int:
    """The number of examples in this run of a property whose number is ``count``."""
    if NEW:
        return count * FACTOR
    return max(count // 2, 1) * FACTOR if LONG else max(count // 4, 1)
