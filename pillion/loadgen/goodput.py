"""Computes goodput, the rate of requests that met all of their objectives (:mod:`pillion.slo`). Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence

from pillion.loadgen.figures import Record, percentile
from pillion.slo import Objective


def measured_s(measure: str, record: Record) -> float:
    """Returns a request's latency by a measure, in seconds. The measure ``itl`` is the mean of its gaps."""
    if measure in ("ttft", "tpot", "e2e"):
        return float(getattr(record, f"{measure}_s"))
    gaps = record.itl_s
    if not gaps:
        return 0.0
    if measure == "itl":
        return sum(gaps) / len(gaps)
    return max(gaps) if measure == "itl_max" else percentile(gaps, float(measure.removeprefix("itl_p")))


def meets(objective: Objective, record: Record) -> bool:
    """Returns whether the request met the bound. A failed request meets no bound; an answer of one token meets any
    bound on gaps."""
    bound_s = objective.bound_s(record.prompt_tokens, record.output_tokens)
    return record.ok and measured_s(objective.measure, record) <= bound_s


def good(objectives: Sequence[Objective], records: Sequence[Record]) -> list[bool]:
    """Returns for each request whether it was answered and met all objectives."""
    return [record.ok and all(meets(objective, record) for objective in objectives) for record in records]
