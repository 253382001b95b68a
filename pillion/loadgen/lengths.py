"""How long prompts and answers are: `256`, `uniform:16,512` or `lognormal:200,0.8,4096`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over whole numbers in [low, high].

    ``sigma`` None: uniform. Else log-normal, with ``median`` and ``sigma`` those of the logarithm's exponential, and
    what is beyond the bounds moved to them.
    """

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    def draw(self, random_: random.Random) -> int:
        """The next one, in tokens."""
        if self.sigma is None:
            return random_.randint(self.low, self.high)
        drawn = random_.lognormvariate(math.log(self.median), self.sigma)
        return min(self.high, max(self.low, round(min(drawn, self.high))))


def parse_lengths(said: str) -> Lengths:
    """``N``, ``uniform:LOW,HIGH`` or ``lognormal:MEDIAN,SIGMA[,MAX]``. Raises ValueError with what would be right."""
    kind, colon, rest = said.strip().partition(":")
    try:
        numbers = [float(part) for part in (rest if colon else kind).split(",")]
    except ValueError:
        numbers = []
    match ("fixed" if not colon else kind, numbers):
        case ("fixed", [length]):
            return _checked(said, Lengths(_whole(said, length), _whole(said, length)))
        case ("uniform", [low, high]):
            return _checked(said, Lengths(_whole(said, low), _whole(said, high)))
        case ("lognormal", [median, sigma, *most]) if len(most) <= 1 and median >= 1 and 0 <= sigma <= 10:
            return _checked(said, Lengths(1, _whole(said, most[0]) if most else MAX_TOKENS, median, sigma))
    raise ValueError(f"length {said!r} is not N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]")


def _whole(said: str, number: float) -> int:
    if not number.is_integer():
        raise ValueError(f"length {said!r}: {number:g} is not a whole number of tokens")
    return int(number)


def _checked(said: str, lengths: Lengths) -> Lengths:
    if not 1 <= lengths.low <= lengths.high <= MAX_TOKENS:
        raise ValueError(f"length {said!r} is not within 1 and {MAX_TOKENS}, the smaller first")
    return lengths
