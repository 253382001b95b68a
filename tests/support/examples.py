"""How many examples hypothesis draws for a property.

``make test`` draws a few, the same ones in each run, so that its result depends on the code alone. ``make test-long``
draws ``TEST_EXAMPLES`` times as many, new ones in each run; hypothesis prints how to draw a failed example again.
"""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("TEST_EXAMPLES", "1"))
LONG = FACTOR > 1


def examples(count: int) -> int:
    """The number of examples in this run of a property that is tried with ``count`` of them in ``make test``."""
    return count * FACTOR
