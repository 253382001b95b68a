"""What holds for all tests: where kernels run, how long they may take, and which tests go first.

Triton's own functions are compiled or interpreted as the environment says when Triton is first imported, and
transformers imports it: so where kernels run is decided before any test module is read.

Files whose tests start whole clusters, compile or interpret take minutes. They go first, so that no process of several
is left alone with one of them in the end. Clusters and computations take turns: two clusters at once wait a lot, for
each other too, and so leave cores idle.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.support.gpu  # noqa: F401
from tests.support.examples import LONG, examples

pytest_plugins = ["tests.support.limits", "tests.support.own_cache"]

# Tests fork only to start programs. gRPC's handlers of forks stop its threads for each, which no child needs, and can
# crash the process; components run without them, too. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Several tests run side by side, and the threads of one wait for each other by polling.
torch.set_num_threads(1)

# On a loaded machine an example takes as long as it takes, and so does making it.
settings.register_profile(
    "loaded",
    max_examples=examples(100),
    deadline=None,
    derandomize=not LONG,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("loaded")

CLUSTERS = (
    "tests/cluster/",
    "tests/gpu/test_cluster.py",
    "tests/benchmarks/test_gpu.py",
    "tests/deploy/test_compose.py",
)
# The longest one first.
COMPUTATIONS = (
    "tests/engine/models/test_families.py",
    "tests/gpu/test_backend.py",
    "tests/kernels/cpu/test_attention.py",
    "tests/engine/models/test_demo_model.py",
    "tests/engine/checkpoints/test_quantized.py",
    "tests/engine/backends/",
    "tests/gpu/test_q",
    "tests/gpu/test_b",
    "tests/kernels/cpu/",
    "tests/gpu/",
    "tests/gateway/tokens/test_demo_tokenizer.py",
)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    """What the reading of all test modules makes stays until the end, so no search for garbage looks through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stable: within a file, and among files of equal place, the order stays."""
    files = dict.fromkeys(item.nodeid.partition("::")[0] for item in items)
    clusters = [file for file in files if file.startswith(CLUSTERS)]
    places = {
        file: next((place for place, name in enumerate(COMPUTATIONS) if file.startswith(name)), len(COMPUTATIONS))
        for file in files
    }
    others = sorted((file for file in files if file not in clusters), key=places.__getitem__)
    turns = itertools.chain.from_iterable(itertools.zip_longest(clusters, others))
    order = {file: number for number, file in enumerate(turns) if file}
    items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])
