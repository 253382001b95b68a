"""How long prompts and answers are: `256`, `uniform:16,512` or `lognormal:200,0.8,4096`. Sans-IO."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over whole numbers in [low, high].

    ``sigma`` None: uniform. Else log-normal with that median and that standard deviation of the logarithm; draws beyond
    the bounds are moved to them.
    """

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    def draw(self, random_: random.Random) -> int:
        """The next length, in tokens."""
        if self.sigma is None:
            return random_.randint(self.low, self.high)
        drawn = random_.lognormvariate(math.log(self.median), self.sigma)
        return min(self.high, max(self.low, round(min(drawn, self.high))))


def parse_lengths(text: str) -> Lengths:
    """Reads ``N``, ``uniform:LOW,HIGH`` or ``lognormal:MEDIAN,SIGMA[,MAX]``. Raises ValueError for others."""
    kind, colon, rest = text.strip().partition(":")
    try:
        numbers = [float(number) for number in (rest if colon else kind).split(",")]
    except ValueError:
        numbers = []
    match ("fixed" if not colon else kind, numbers):
        case ("fixed", [length]):
            return _checked(text, Lengths(_whole(text, length), _whole(text, length)))
        case ("uniform", [low, high]):
            return _checked(text, Lengths(_whole(text, low), _whole(text, high)))
        case ("lognormal", [median, sigma, *most]) if len(most) <= 1 and median >= 1 and 0 <= sigma <= 10:
            return _checked(text, Lengths(1, _whole(text, most[0]) if most else MAX_TOKENS, median, sigma))
    raise ValueError(f"length {text!r} is not N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]")


def _whole(text: str, number: float) -> int:
    if not number.is_integer():
        raise ValueError(f"length {text!r}: {number:g} is not a whole number of tokens")
    return int(number)


def _checked(text: str, lengths: Lengths) -> Lengths:
    if not 1 <= lengths.low <= lengths.high <= MAX_TOKENS:
        raise ValueError(f"length {text!r} is not within 1 and {MAX_TOKENS}, the smaller first")
    return lengths
