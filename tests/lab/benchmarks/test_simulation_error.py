"""The comparison of cluster and simulation, with a simulated cluster in the place of the real one: no error is left."""

from __future__ import annotations

import pathlib

import pytest

from lab.benchmarks.simulation_error import (
    CONFIGURATIONS,
    MeasuredCluster,
    calibrate,
    compared,
    metrics,
    scaled_trace,
    show,
)
from lab.fleets.traffic import Request, requests_of
from lab.fleets.world import simulate, simulate_closed
from pillion.loadgen.traces import read_trace

# Seconds that the demo model takes on one core for a step, a token, a sequence, a KV token read, a query-key pair.
COST = (9.4e-3, 1.06e-3, 4.1e-4, 7.5e-7, 2.9e-7)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_simulated_cluster_is_found_again(name: str, tmp_path: pathlib.Path) -> None:
    cost_s = {"prefill": COST, "decode": COST}
    true = MeasuredCluster(cost_s, edge_s=0.0, residuals_s=(-1e-3, 1e-3, 2e-3, 4e-3), noise=0.02)
    lone, _ = simulate_closed(true.fleet(name), [Request(n, 0.0, 40 + 9 * n, 12) for n in range(12)], 1)
    found = calibrate(name, [one.bench_record() for one in lone], cost_s)
    assert sum(found.residuals_s) / len(found.residuals_s) == pytest.approx(1.5e-3, rel=0.3)
    assert min(found.residuals_s) < -5e-4 < 3e-3 < max(found.residuals_s)
    assert 0.01 < found.noise < 0.06, "with what a prompt's few steps have of the residuals"
    path = scaled_trace(tmp_path / "trace.jsonl", 2.0, 12.0, 1)
    rows = read_trace(path)
    assert (len(rows) - 1) / (rows[-1].timestamp - rows[0].timestamp) * 1000 == pytest.approx(2.0)
    records, _ = simulate(true.fleet(name), requests_of(rows))
    real = metrics([[one.bench_record() for one in records]], "ttft=0.6+0.002*n,itl_p99=0.06")
    again, _ = simulate(found.fleet(name), requests_of(rows))
    made = metrics([[one.bench_record() for one in again]], "ttft=0.6+0.002*n,itl_p99=0.06")
    errors = show(
        [{"configuration": name, "rate": 2.0, "metrics": compared(real, made), "again": compared(real, real)}]
    )
    assert real["hit_rate"] > 0
    # A prompt's place in line follows from measured times, and whether it finds another one's blocks from its place.
    assert errors["hit_rate"]["max"] < 0.05
    assert errors["itl_p50_ms"]["max"] < 0.1
    assert errors["ttft_p50_ms"]["max"] < 0.2
