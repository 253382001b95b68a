"""Reads the objectives for which workers are counted: latencies, the share of requests that shall meet them, the time
of a start.

Sans-IO (I9).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from pillion.errors import ConfigError
from pillion.slo import parse_slo

# The first token may be late on a prefill worker or on a decode worker, and later tokens on the latter: these three
# ways share the number of requests that may be late (Bonferroni's bound).
WAYS_TO_BE_LATE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Says which latencies the number of workers is chosen for, and how many requests may miss them.

    Attributes:
        ttft_s, ttft_token_s: bound of the time to the first token, and the time that each token of the prompt adds to
            it.
        itl_s: bound of the time between two tokens.
        attainment: the share of requests that shall meet both bounds, between 0 and 1.
        start_s: seconds from the wish for a worker until it serves; 0.0: as long as workers say that they took.
    """

    ttft_s: float = 2.5
    ttft_token_s: float = 0.002
    itl_s: float = 0.1
    attainment: float = 0.95
    start_s: float = 0.0

    @property
    def late_share(self) -> float:
        """Gives the share of requests that may be late in each way."""
        return (1 - self.attainment) / WAYS_TO_BE_LATE

    @property
    def deviations(self) -> float:
        """Gives the number of standard deviations above its mean that a load exceeds no more often than
        ``late_share``."""
        return NormalDist().inv_cdf(1 - self.late_share)

    def ttft_of(self, prompt_tokens: int) -> float:
        """Returns the bound of a request's time to the first token, in seconds."""
        return self.ttft_s + self.ttft_token_s * prompt_tokens


def parse_objectives(slo: str, attainment: float, start_s: float) -> Objectives:
    """Reads ``--slo`` (:mod:`pillion.slo`): one bound for ``ttft`` and one for ``itl`` or ``itl_pNN``.

    Raises ConfigError for another form, and for a measure that says nothing of the number of workers.
    """
    try:
        objectives = parse_slo(slo)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from None
    ttft = [one for one in objectives if one.measure == "ttft"]
    itl = [one for one in objectives if one.measure.startswith("itl")]
    if len(ttft) != 1 or len(itl) != 1 or len(objectives) != 2:
        raise ConfigError(f"--slo {slo!r}: write ttft=SECONDS and one of itl, itl_p50 to itl_p99, or itl_max")
    if itl[0].per_prompt_token_s or itl[0].per_answer_token_s or ttft[0].per_answer_token_s:
        raise ConfigError(f"--slo {slo!r}: only ttft may grow, with the tokens n of the prompt")
    if not (ttft[0].fixed_s > 0 and itl[0].fixed_s > 0):
        raise ConfigError(f"--slo {slo!r}: bounds are more than 0 seconds")
    return Objectives(
        ttft_s=ttft[0].fixed_s,
        ttft_token_s=ttft[0].per_prompt_token_s,
        itl_s=itl[0].fixed_s,
        attainment=attainment,
        start_s=start_s,
    )
