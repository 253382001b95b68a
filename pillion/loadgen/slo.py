"""Service level objectives, and goodput: the requests that met all of them.

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
        """What this request is given."""
        slopes = self.per_prompt_token_s * record.prompt_tokens + self.per_answer_token_s * record.output_tokens
        return self.fixed_s + slopes

    def met(self, record: Record) -> bool:
        """Whether it was kept to. A request that failed meets nothing, an answer of one token every gap."""
        return record.ok and measured_s(self.measure, record) <= self.bound_s(record)


def measured_s(measure: str, record: Record) -> float:
    """A request's own latency. ``itl`` alone is the mean of its gaps."""
    if measure in ("ttft", "tpot", "e2e"):
        return float(getattr(record, f"{measure}_s"))
    gaps = record.itl_s
    if not gaps:
        return 0.0
    if measure == "itl":
        return sum(gaps) / len(gaps)
    return max(gaps) if measure == "itl_max" else percentile(gaps, float(measure.removeprefix("itl_p")))


def parse_slo(said: str) -> tuple[Objective, ...]:
    """Objectives separated by commas; none for an empty text. Raises ValueError with what would be right."""
    found: dict[str, Objective] = {}
    for part in filter(None, (part.strip() for part in said.split(","))):
        measure, equals, bound = (message.strip() for message in part.partition("="))
        if measure not in MEASURES or not equals:
            raise ValueError(f"objective {part!r} is not MEASURE=SECONDS, with one of {', '.join(MEASURES)}")
        if measure in found:
            raise ValueError(f"objective {measure!r} is said twice")
        found[measure] = Objective(measure, *_bound(part, bound))
    return tuple(found.values())


def _bound(part: str, bound: str) -> tuple[float, float, float]:
    sums = {"": 0.0, "n": 0.0, "m": 0.0}
    # An exponent's sign is no sum.
    for term in re.split(r"(?<![eE])\+", bound.replace(" ", "")):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"objective {part!r}: {term!r} is not SECONDS, SECONDS*n or SECONDS*m")
        sums[match[2] or ""] += float(match[1])
    return sums[""], sums["n"], sums["m"]


def good(objectives: Sequence[Objective], records: Sequence[Record]) -> list[bool]:
    """For each request, whether it was answered and met all objectives."""
    return [record.ok and all(objective.met(record) for objective in objectives) for record in records]
