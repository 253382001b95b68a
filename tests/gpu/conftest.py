"""Fixtures of tests of GPU ranks. On machines with a GPU but without the packages of servers, tests of whole clusters
are left out."""

from __future__ import annotations

import pytest

from lab.benchmarks.gpu.needs import missing_packages
from lab.gpu_builds.compilations import stable_keys
from tests.support.gpu import NATIVE

if NATIVE:
    # So that kernels compiled by `make gpu-cache` are found.
    stable_keys()
else:
    from lab.testbed.triton_interpreter import replace_once

    replace_once()

MISSING = missing_packages()
LEFT_OUT = [
    "test_cluster.py",
    "test_draft_answers.py",
    "test_staged_cluster.py",
    "test_states_cluster.py",
    "test_surviving_pool.py",
]
collect_ignore = LEFT_OUT if MISSING else []


def pytest_report_header() -> str:
    """Report at the start of a run which tests are left out."""
    return f"left out: {', '.join(LEFT_OUT)}, which need {', '.join(MISSING)}" if MISSING else ""


# Imports are inside, because a test file has to import tests.support.gpu before the kernels.
@pytest.fixture(scope="module")
def team(own_cache):
    """A team of two ranks, each a process."""
    from tests.support.gpu_ranks import RankTeam

    made = RankTeam(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prepared(own_cache, tmp_path_factory):
    """A small prepared model in float32."""
    from lab.testbed.tiny_model import save_model
    from pillion.config import ModelFlags
    from pillion.engine.checkpoints.prepare import prepare

    folder = save_model(tmp_path_factory.mktemp("model") / "model")
    return prepare(ModelFlags(model=str(folder), dtype="float32"))
