"""Recorded requests of every kind replay equal on a fresh cluster with another number of workers, under load."""

from __future__ import annotations

import pathlib
import tempfile

import pytest

from lab.benchmarks.replays import run_replays

REQUESTS = 60


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(600)
def test_recorded_requests_replay_identically() -> None:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        found = run_replays(REQUESTS, pathlib.Path(name))
    assert (found["requests"], found["unequal"]) == (REQUESTS, [])
    equal = found["equal"]
    assert equal["all"] == REQUESTS
    for kind in ("split", "with a cached prefix", "with an adapter", "with a grammar", "of several answers"):
        assert equal[kind], kind
