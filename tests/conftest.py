"""What holds for all tests: where kernels run, how long they may take, and which tests go first.

Triton's own functions are compiled or interpreted as the environment says when Triton is first imported, and
transformers imports it: so where kernels run is decided before any test module is read.

Files whose tests start whole clusters, compile or interpret take minutes. They go first, so that no process of several
is left alone with one of them in the end.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

import tests.support.gpu  # noqa: F401

pytest_plugins = ["tests.support.limits", "tests.support.own_cache"]

# Tests fork only to start programs. gRPC's handlers of forks stop its threads for each, which no child needs, and can
# crash the process; components run without them, too. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# On a loaded machine an example takes as long as it takes, and so does making it.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")

LONG = (
    "tests/cluster/",
    "tests/gpu/test_b",
    "tests/gpu/test_cluster.py",
    "tests/benchmarks/test_gpu.py",
    "tests/engine/models/test_demo_model.py",
    "tests/deploy/test_compose.py",
    "tests/gateway/tokens/test_demo_tokenizer.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stable: within both parts the order stays."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
