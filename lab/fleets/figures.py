"""Figures of a simulated load as its clients saw it: percentiles, goodput, and the same requests in two fleets.
Sans-IO.

A request is good if its first token came within ``ttft_s`` and the 99th percentile of its own gaps between tokens is
within ``itl_s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.fleets.traffic import ClientRecord

# Relative change of the time to the first token from which a request counts as faster or slower.
NOTICED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class GoodBounds:
    """Bounds in seconds (0: none), and ``attainment``, the required share of good requests."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    attainment: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """The figures of one load, times in ms.

    Attributes:
        failed: requests refused or not answered in time.
        good_share: share of requests that met the objectives; ``good_per_s``: their rate.
        hit_share: share of prompt tokens found in a cache; ``prefilled_share``: computed by prefill workers.
        faster_share, slower_share: share of requests whose first token came sooner, or later, than in the first fleet
            of a comparison.
    """

    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    good_share: float
    good_per_s: float
    hit_share: float
    prefilled_share: float
    faster_share: float = 0.0
    slower_share: float = 0.0


def figures_of(
    records: Sequence[ClientRecord], objectives: GoodBounds, first: Sequence[ClientRecord] = ()
) -> FleetFigures:
    """Return the figures of one load. ``first``: the same requests in the first fleet of a comparison."""
    ttft_s = np.array([record.ttft_s for record in records])
    gaps_s = all_gaps_s(records)
    tokens = max(1, sum(record.request.prompt_tokens for record in records))
    seconds = max(1e-9, records[-1].request.at_s - records[0].request.at_s) if records else 1.0
    met = [is_good(record, objectives) for record in records]
    before_s = np.array([record.ttft_s for record in first]) if first else ttft_s
    return FleetFigures(
        requests=len(records),
        failed=sum(record.failed for record in records),
        ttft_p50_ms=_percentile_ms(ttft_s, 50),
        ttft_p99_ms=_percentile_ms(ttft_s, 99),
        itl_p50_ms=_percentile_ms(gaps_s, 50),
        itl_p99_ms=_percentile_ms(gaps_s, 99),
        good_share=sum(met) / max(1, len(met)),
        good_per_s=sum(met) / seconds,
        hit_share=sum(record.cached_tokens for record in records) / tokens,
        prefilled_share=sum(record.prefilled_tokens for record in records) / tokens,
        faster_share=float(np.mean(ttft_s < before_s * (1 - NOTICED_SHARE))) if len(records) else 0.0,
        slower_share=float(np.mean(ttft_s > before_s * (1 + NOTICED_SHARE))) if len(records) else 0.0,
    )


def is_good(record: ClientRecord, objectives: GoodBounds) -> bool:
    """Return whether a request met the objectives."""
    if record.failed or (objectives.ttft_s and record.ttft_s > objectives.ttft_s):
        return False
    if not objectives.itl_s or not len(record.gaps_s):
        return True
    return float(np.percentile(np.asarray(record.gaps_s), 99)) <= objectives.itl_s


def all_gaps_s(records: Sequence[ClientRecord]) -> npt.NDArray[np.float64]:
    """Return the seconds between tokens of all requests, float64 [gaps]."""
    found = [np.asarray(record.gaps_s, dtype=np.float64) for record in records]
    return np.concatenate(found) if found else np.zeros(0)


def _percentile_ms(seconds: npt.NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1000 if len(seconds) else 0.0
