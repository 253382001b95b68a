"""Service level objectives as in ``--slo``, and which requests met them; the rate of these is goodput. Sans-IO.

    ttft=1.0+0.002*n,itl_p99=0.1,e2e=30+0.1*m

Times are in seconds; ``n`` is the request's number of prompt tokens, ``m`` of answer tokens. A request meets an
objective if its own latency is at most the limit, so ``itl_p99`` is the 99th percentile of the gaps within one request
(goodput of DistServe and `vllm bench serve`, with limits that grow with the prompt).
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
    """``measure`` <= fixed_s + per_prompt_token_s * n + per_answer_token_s * m, in seconds, for each request."""

    measure: str
    fixed_s: float
    per_prompt_token_s: float = 0.0
    per_answer_token_s: float = 0.0

    def bound_s(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Return the limit in seconds for a request with these token counts."""
        return self.fixed_s + self.per_prompt_token_s * prompt_tokens + self.per_answer_token_s * answer_tokens


def parse_slo(text: str) -> tuple[Objective, ...]:
    """Parse objectives separated by commas; an empty text has none. Raises ValueError, which names the syntax."""
    objectives: dict[str, Objective] = {}
    for term in filter(None, (term.strip() for term in text.split(","))):
        measure, equals, bound = (side.strip() for side in term.partition("="))
        if measure not in MEASURES or not equals:
            raise ValueError(f"objective {term!r} is not MEASURE=SECONDS, with one of {', '.join(MEASURES)}")
        if measure in objectives:
            raise ValueError(f"objective {measure!r} is given twice")
        objectives[measure] = Objective(measure, *_bound(term, bound))
    return tuple(objectives.values())


def _bound(objective: str, bound: str) -> tuple[float, float, float]:
    sums = {"": 0.0, "n": 0.0, "m": 0.0}
    for term in re.split(r"(?<![eE])\+", bound.replace(" ", "")):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"objective {objective!r}: {term!r} is not SECONDS, SECONDS*n or SECONDS*m")
        sums[match[2] or ""] += float(match[1])
    return sums[""], sums["n"], sums["m"]


def measured_s(measure: str, record: Record) -> float:
    """Return a request's latency by a measure, in seconds. ``itl`` is the mean of its gaps."""
    if measure in ("ttft", "tpot", "e2e"):
        return float(getattr(record, f"{measure}_s"))
    gaps = record.itl_s
    if not gaps:
        return 0.0
    if measure == "itl":
        return sum(gaps) / len(gaps)
    return max(gaps) if measure == "itl_max" else percentile(gaps, float(measure.removeprefix("itl_p")))


def meets(objective: Objective, record: Record) -> bool:
    """Return whether the request met the limit. A failed request meets none; an answer of one token meets any limit on
    gaps."""
    bound_s = objective.bound_s(record.prompt_tokens, record.output_tokens)
    return record.ok and measured_s(objective.measure, record) <= bound_s


def good(objectives: Sequence[Objective], records: Sequence[Record]) -> list[bool]:
    """Return for each request whether it was answered and met all objectives."""
    return [record.ok and all(meets(objective, record) for objective in objectives) for record in records]
