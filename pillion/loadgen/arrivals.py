"""When requests arrive: a renewal process with gamma distributed gaps, as in `vllm bench serve`. Sans-IO.

burstiness    inf   every gap is the same (constant)
              1     exponential gaps (Poisson)
              < 1   bursts and silences: the gaps' coefficient of variation is 1 / sqrt(burstiness)
"""

from __future__ import annotations

import itertools
import math
import random

PROCESSES = ("poisson", "constant", "gamma")
MIN_BURSTINESS = 1e-3


def burstiness_of(process: str, burstiness: float) -> float:
    """The shape of the gaps. Raises ValueError for a process or a factor that does not exist."""
    if process not in PROCESSES:
        raise ValueError(f"arrivals {process!r} are none of {', '.join(PROCESSES)}")
    if process == "gamma" and not MIN_BURSTINESS <= burstiness < math.inf:
        raise ValueError(f"burstiness {burstiness:g} is not at least {MIN_BURSTINESS:g}")
    return {"constant": math.inf, "poisson": 1.0}.get(process, burstiness)


def arrival_times(rate: float, burstiness: float, seed: int, count: int, until_s: float | None = None) -> list[float]:
    """Seconds from the begin of at most ``count`` arrivals, ``rate`` a second.

    Without ``until_s`` the gaps are scaled so that the last one is at ``count / rate``: few arrivals drawn at random
    would otherwise have another rate than the requested one. Raises ValueError for a rate that is not positive.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate:g} requests a second is not above 0")
    draw = random.Random(f"arrivals {seed}")
    times = [number / rate for number in range(1, count + 1)]
    if burstiness != math.inf:
        gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count))
        times = list(itertools.accumulate(gaps))
    if until_s is not None:
        return [at_s for at_s in times if at_s <= until_s]
    # Gaps of very bursty arrivals may all be too small for a number.
    factor = count / rate / times[-1] if times and times[-1] > 0 else 1.0
    return [at_s * factor for at_s in times]
