"""Figures between two readings: changes, checked by numpy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.ui.cluster_figures import ClusterReading, flow, quantile
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Distribution, Meters
from pillion.types import ClusterStatus

STATUS = ClusterStatus(
    version="1", components=(), active_requests=4, prompt_tokens=0, cached_tokens=0, completion_tokens=0,
    index_available=True,
)  # fmt: skip


def reading(at_s: float, meters: Meters) -> ClusterReading:
    return ClusterReading(at_s, STATUS, meters.collect())


def counted(times: int) -> Meters:
    """Return the metrics of a gateway that did the same work ``times`` times."""
    meters = Meters()
    meters.counter(names.GENERATED_TOKENS, "demo").add(100 * times)
    for source, tokens in (("pool", 60), ("fetched", 10), ("prefill", 20), ("tail", 10)):
        meters.counter(names.PROMPT_TOKENS, "demo", source).add(tokens * times)
    for outcome, count in (("stop", 1), ("length", 1), ("cancelled", 1), ("Unavailable", 3)):
        meters.counter(names.REQUESTS, "demo", outcome).add(count * times)
    meters.counter(names.REJECTED, "Overloaded: requests").add(5 * times)
    for operation in ("chat", "text_completion"):
        meters.distribution(names.TTFT, operation, "demo").observe(0.2, times)
    meters.distribution(names.ITL, "demo").observe(0.018, 99 * times)
    meters.distribution(names.ITL, "demo").observe(60.0, 5 * times)
    return meters


@given(st.lists(st.floats(0, 9), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(observed: list[float], share: float) -> None:
    cell = Distribution(names.ITL_BOUNDS, [0] * (len(names.ITL_BOUNDS) + 1))
    for value in observed:
        cell.observe(value)
    found = quantile(cell, share)
    true = float(np.quantile(observed, share, method="inverted_cdf"))
    above = min((bound for bound in cell.bounds if bound >= true), default=math.inf)
    below = max((bound for bound in cell.bounds if bound < true), default=0.0)
    assert below <= found <= above
    assert math.isinf(found) == math.isinf(above)


def test_counter_changes_are_computed_over_the_window() -> None:
    one = flow(reading(0, counted(7)), reading(2, counted(9)))
    assert (one["generated"], one["prompt"], one["cached"]) == (100, 100, 70)
    assert one["sources"] == {"pool": 60, "fetched": 10, "restored": 0, "bucket": 0, "prefill": 20, "tail": 10}
    assert one["requests"] == {"answered": 2, "cancelled": 1, "failed": 3}
    assert one["refused"] == {"Overloaded: requests": 5}
    assert 0.1 < one["first_token"]["p50_s"] <= 0.25
    assert 0.015 < one["between_tokens"]["p50_s"] <= 0.02
    assert one["between_tokens"]["p99_s"] is None


@pytest.mark.parametrize("tenths", range(1, 100))
def test_a_missing_value_is_zero(tenths: int) -> None:
    def computed(times: int) -> Meters:
        meters = Meters()
        for source, tokens in (("pool", 0), ("prefill", 100), ("tail", 10)):
            meters.counter(names.PROMPT_TOKENS, "demo", source).add(tokens * times)
        return meters

    assert flow(reading(0, computed(0)), reading(tenths / 10, computed(1)))["cached"] == 0
