"""Generated traces match the statistics of the published ones."""

from __future__ import annotations

import pathlib

import pytest

from lab.benchmarks.mooncake import WORKLOADS, described, generate_like
from lab.benchmarks.traces import write_trace
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS, read_trace


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_generated_trace_matches_the_published_statistics(name: str, tmp_path: pathlib.Path) -> None:
    """Table 2 of the paper. It counts a prompt's last, partial block as well, so its hit share is a little higher."""
    wanted = WORKLOADS[name]
    made = generate_like(wanted, 1)
    found = described(made)
    assert found["requests"] == pytest.approx(wanted.requests, rel=0.03)
    assert found["seconds"] == pytest.approx(wanted.seconds, rel=0.06)
    assert found["mean_input"] == pytest.approx(wanted.mean_input, rel=0.1)
    assert found["mean_output"] == pytest.approx(wanted.mean_output, rel=0.1)
    assert wanted.hit_share - 0.06 < found["hit_share"] < wanted.hit_share + 0.05
    assert all(len(row.hash_ids) == -(-row.input_length // TRACE_BLOCK_TOKENS) for row in made)
    write_trace(tmp_path / "trace.jsonl", made[:100])
    assert read_trace(tmp_path / "trace.jsonl") == made[:100]


def test_a_seed_determines_the_trace() -> None:
    workload = WORKLOADS["toolagent"]
    few = generate_like(workload, 3, 200)
    assert few == generate_like(workload, 3, 200)
    assert few != generate_like(workload, 4, 200)
