"""Short prompts beside long ones, on simulated workers with cores of their own: steps keep to their target, and `auto`
serves as many as the better pure policy."""

from __future__ import annotations

import argparse

import pytest

from lab.benchmarks.split_load import add_load_flags, arrivals, good
from lab.fleets.traffic import ClientRecord
from lab.fleets.world import lab_fleet, simulate

# Seconds that the demo model takes on one core for a step, a token, a sequence, a KV token read, a query-key pair.
COST = (9.4e-3, 1.06e-3, 4.1e-4, 7.5e-7, 2.9e-7)
TARGET_MS = 100.0


def load(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_load_flags(parser)
    return parser.parse_args(flags)


def served(policy: str, rate: float, seed: int) -> list[ClientRecord]:
    """The requests of one seed on four workers, half of which prefill where the policy has a use for them."""
    prefills = 0 if policy == "colocated" else 2
    fleet = lab_fleet(prefills, 4 - prefills, COST, COST, TARGET_MS, split_policy=policy)
    records, _ = simulate(fleet, arrivals(load(), rate, seed))
    return list(records)


@pytest.mark.parametrize("policy", ["auto", "colocated"])
def test_steps_with_short_and_long_prompts_keep_to_the_target(policy: str) -> None:
    """A step whose first prompt is short has tokens left for a long one, which cost more late in that one."""
    # Workers learn what a chunk costs late in a long prompt from the first ones.
    gaps_ms = [1000 * gap for record in served(policy, 4.0, 1) if record.request.at_s > 15 for gap in record.gaps_s]
    assert max(gaps_ms) < 1.15 * TARGET_MS


def test_auto_serves_as_many_as_decode_workers_alone() -> None:
    """Prefill workers are to have no more of the long prompts than they can compute in time."""
    count = {"auto": 0, "colocated": 0}
    for policy in count:
        for seed in (1, 2, 3):
            count[policy] += sum(good(load(), record) for record in served(policy, 3.6, seed))
    assert count["auto"] >= 0.98 * count["colocated"]
