"""Service level objectives, and goodput: the requests that met all of them. Sans-IO.

    ttft=1.0+0.002*n,itl_p99=0.1,e2e=30+0.1*m

Seconds; ``n`` is the request's prompt tokens, ``m`` the tokens of its answer. A request meets an objective if its own
latency is at most the bound, so ``itl_p99`` is the 99th percentile of the gaps within one request (DistServe's and
`vllm bench serve`'s goodput, with bounds that grow with the prompt).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.loadgen.figures import Record, percentile

MEASURES = ("ttft", "tpot", "e2e", "itl", "itl_p50", "itl_p90", "itl_p95", "itl_p99", "itl_max")
_NUMBER = r"\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
_TERM = re.compile(rf"({_NUMBER})(?:\*([nm]))?")


@dataclass(frozen=True, slots=True)
class Objective:
    """``measure`` <= fixed_s + per_prompt_token_s * n + per_answer_token_s * m, in seconds."""

    measure: str
    fixed_s: float
    per_prompt_token_s: float = 0.0
    per_answer_token_s: float = 0.0

    def bound_s(self, record: Record) -> float:
        """The bound for this request."""
        slopes = self.per_prompt_token_s * record.prompt_tokens + self.per_answer_token_s * record.output_tokens
        return self.fixed_s + slopes

    def met(self, record: Record) -> bool:
        """Whether the request met the bound. A failed one meets none; an answer of one token meets any on gaps."""
        return record.ok and measured_s(self.measure, record) <= self.bound_s(record)


def measured_s(measure: str, record: Record) -> float:
    """A request's own latency in seconds. ``itl`` alone is the mean of its gaps."""
    if measure in ("ttft", "tpot", "e2e"):
        return float(getattr(record, f"{measure}_s"))
    gaps = record.itl_s
    if not gaps:
        return 0.0
    if measure == "itl":
        return sum(gaps) / len(gaps)
    return max(gaps) if measure == "itl_max" else percentile(gaps, float(measure.removeprefix("itl_p")))


def parse_slo(text: str) -> tuple[Objective, ...]:
    """Reads objectives separated by commas; an empty text has none. Raises ValueError that names the right form."""
    found: dict[str, Objective] = {}
    for term in filter(None, (term.strip() for term in text.split(","))):
        measure, equals, bound = (side.strip() for side in term.partition("="))
        if measure not in MEASURES or not equals:
            raise ValueError(f"objective {term!r} is not MEASURE=SECONDS, with one of {', '.join(MEASURES)}")
        if measure in found:
            raise ValueError(f"objective {measure!r} is given twice")
        found[measure] = Objective(measure, *_bound(term, bound))
    return tuple(found.values())


def _bound(objective: str, bound: str) -> tuple[float, float, float]:
    sums = {"": 0.0, "n": 0.0, "m": 0.0}
    # The sign of an exponent does not separate terms.
    for term in re.split(r"(?<![eE])\+", bound.replace(" ", "")):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"objective {objective!r}: {term!r} is not SECONDS, SECONDS*n or SECONDS*m")
        sums[match[2] or ""] += float(match[1])
    return sums[""], sums["n"], sums["m"]


def good(objectives: Sequence[Objective], records: Sequence[Record]) -> list[bool]:
    """For each request, whether it was answered and met all objectives."""
    return [record.ok and all(objective.met(record) for objective in objectives) for record in records]
