"""Beyond what a simulated cluster serves, as many answers are whole in time as at the best load."""

from __future__ import annotations

import argparse

import pytest

from lab.benchmarks.deadlines import GOAL, add_flags, simulated, with_shares

# Seconds that the demo model takes on one core for a step, a token, a sequence, a KV token read, a query-key pair.
COST = (9.4e-3, 1.06e-3, 4.1e-4, 7.5e-7, 2.9e-7)


@pytest.mark.parametrize("timeout_s", ["2", "4"])
def test_goodput_within_deadlines_stays_beyond_the_capacity(timeout_s: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    rows = with_shares(simulated(parser.parse_args(["--timeout-s", timeout_s, "--seconds", "15"]), COST))
    assert {row["load"] for row in rows} >= {2.0, 5.0, 10.0}
    for row in rows:
        assert row["share_of_best"] >= GOAL or row["load"] < 2, row
        # Few places are lost to answers that then come too late.
        assert row["late"] <= 0.1 * row["requests"], row
