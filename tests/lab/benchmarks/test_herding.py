"""Several simulated gateways over the same workers: how well they choose follows from what they know of each other."""

from __future__ import annotations

import argparse
import statistics

from lab.benchmarks.herding import makers
from lab.benchmarks.split_load import arrivals, figures
from lab.fleets.world import lab_fleet, simulate

# Seconds that the demo model takes on one core for a step, a token, a sequence, a KV token read, a query-key pair.
COST = (9.4e-3, 1.06e-3, 4.1e-4, 7.5e-7, 2.9e-7)

# Eight workers are busy with so many requests a second, so that it matters whom a gateway chooses.
RATE_PER_S = 6.0
# A seed has some 90 requests, of which two make 0.02.
SEEDS = range(301, 306)


def good_share(knowledge: str) -> float:
    """The mean share of good requests over the seeds, with one gateway or with four, over 4 + 4 workers."""
    load = argparse.Namespace(
        seconds=15.0,
        long_share=0.2,
        long_tokens=2000,
        short_tokens=[30, 200],
        answer_tokens=[32, 96],
        ttft_ms=1000.0,
        ttft_token_ms=2.0,
        itl_ms=120.0,
    )
    known = makers()[knowledge]
    fleet = lab_fleet(
        4, 4, COST, COST, 100.0,
        gateways=known.gateways or 4, heartbeat_s=known.heartbeat_s, sharing=known.sharing,
    )  # fmt: skip
    shares = []
    for seed in SEEDS:
        records, _ = simulate(fleet, arrivals(load, RATE_PER_S, seed), known.make)
        shares.append(figures(load, records)["good_share"])
    return statistics.mean(shares)


def test_four_gateways_that_know_of_each_other_choose_as_one_does() -> None:
    one = good_share("one")
    assert good_share("sketch") >= one - 0.02
    assert good_share("heartbeats") < one - 0.05
