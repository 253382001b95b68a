"""When requests arrive: a renewal process with gamma distributed gaps, as in `vllm bench serve`.

burstiness    inf   every gap is the same (constant)
              1     exponential gaps (Poisson)
              < 1   bursts and silences: the gaps' coefficient of variation is 1 / sqrt(burstiness)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

PROCESSES = ("poisson", "constant", "gamma")
MIN_BURSTINESS = 1e-3


def burstiness_of(process: str, burstiness: float) -> float:
    """The shape of the gaps. Raises ValueError for a process or a factor that does not exist."""
    if process not in PROCESSES:
        raise ValueError(f"arrivals {process!r} are none of {', '.join(PROCESSES)}")
    if process == "gamma" and not MIN_BURSTINESS <= burstiness < math.inf:
        raise ValueError(f"burstiness {burstiness:g} is not at least {MIN_BURSTINESS:g}")
    return {"constant": math.inf, "poisson": 1.0}.get(process, burstiness)


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the begin, without end, ``rate`` a second in the mean. Raises ValueError for a rate that is none."""
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate:g} requests a second is not above 0")
    draw = random.Random(f"arrivals {seed}")
    if burstiness == math.inf:
        # Not a running sum: its rounding would grow.
        return (number / rate for number in itertools.count(1))
    return itertools.accumulate(draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in itertools.count())
