"""What holds for all tests: where kernels run, how long they may take, and which tests go first.

Triton's own functions are compiled or interpreted as the environment says when Triton is first imported, and
transformers imports it: so where kernels run is decided before any test module is read.

Files whose tests start whole clusters, compile or interpret take minutes. They go first, so that no process of several
is left alone with one of them in the end. Clusters and computations take turns: two clusters at once wait a lot, for
each other too, and so leave cores idle. Other files whose tests wait go with the clusters. The long suite has an order
of its own for them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.database import InMemoryExampleDatabase

import tests.support.gpu  # noqa: F401
from tests.support.examples import LONG, NEW, examples

pytest_plugins = [
    "tests.support.crashes",
    "tests.support.forked_ranks",
    "tests.support.limits",
    "tests.support.own_cache",
]

# Tests fork only to start programs. gRPC's fork handlers stop its threads for each, which no child needs, and can crash
# the process. gRPC reads this on import.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Otherwise gRPC's core logs closed connections to stderr, amid the output of runs and of programs whose output is
# compared. The pillion command sets it for itself.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Buffer programs' output to a pipe in every environment, so that an unflushed fork or kill fails everywhere or nowhere.
os.environ.pop("PYTHONUNBUFFERED", None)

# Tests run side by side, and torch's threads wait for each other by polling.
torch.set_num_threads(1)

# On a loaded machine an example may take any time.
settings.register_profile(
    "loaded",
    max_examples=examples(100),
    deadline=None,
    # With derandomize the command line's seed has no effect.
    derandomize=not LONG,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# Do not reuse another run's failures, except in a search.
settings.register_profile("seeded", settings.get_profile("loaded"), database=InMemoryExampleDatabase())
settings.load_profile("seeded" if LONG and not NEW else "loaded")

CLUSTERS = (
    "tests/cluster/",
    "tests/core/",
    "tests/gpu/test_cluster.py",
    "tests/gpu/test_states_cluster.py",
    "tests/lab/benchmarks/test_gpu.py",
    "tests/deploy/test_compose.py",
    "tests/deploy/test_rollout.py",
    "tests/pillion/offline/",
    "tests/pillion/loadgen/",
    "tests/test_limits.py",
    "tests/pillion/supervisor/",
    "tests/kvstore/exchange/",
)
# Files of the longest long tests, longest first; all others are short.
LONGEST = (
    "tests/lab/benchmarks/test_gpu.py",
    "tests/lab/simulator/test_campaign.py",
    "tests/cluster/test_pages.py",
    "tests/cluster/test_parity.py",
    "tests/cluster/test_long_context.py",
    "tests/gpu/test_build.py",
    "tests/cluster/test_fencing.py",
    "tests/cluster/test_families.py",
    "tests/kernels/torch/test_torch_attention.py",
    "tests/cluster/test_two_nodes.py",
    "tests/engine/models/test_families.py",
    "tests/cluster/test_structured.py",
    "tests/engine/models/test_demo_model.py",
    "tests/cluster/test_ranks.py",
    "tests/kernels/cpu/test_thread_pool_model.py",
    "tests/gpu/test_ranks.py",
    "tests/cluster/test_processes.py",
    "tests/gpu/test_cluster.py",
    "tests/gpu/test_divided_pools.py",
    "tests/faults/test_fault_runs.py",
)
# lab is not shipped: its studies and benchmarks run in `make test-long` alone.
LABORATORY = ("tests/lab/benchmarks/", "tests/lab/fleets/")
# Files with parametrized variants of one test. `make test` runs the first of each eight and `make test-long` the
# others.
MATRICES = (
    "tests/engine/adapters/",
    "tests/engine/backends/",
    "tests/engine/checkpoints/test_saved_forms.py",
    "tests/engine/drafts/",
    "tests/engine/encoders/",
    "tests/engine/models/test_families.py",
    "tests/engine/partial_blocks/test_next_turns.py",
    "tests/engine/quantized/",
    "tests/engine/ranks/test_ranks.py",
    "tests/engine/states/",
    "tests/gateway/formats/test_answer_reader.py",
    "tests/gateway/grammars/test_tool_pieces.py",
    "tests/gateway/http_api/test_request_bodies.py",
    "tests/gateway/http_api/test_vllm_fields.py",
    "tests/gateway/tokens/",
    "tests/gpu/",
    "tests/kernels/",
    "tests/kvstore/exchange/",
    "tests/pillion/cli/test_serve_flags.py",
    "tests/pillion/offline/test_offline_adapters.py",
)
CASES_PER_SHORT_ONE = 8
# Longest first.
COMPUTATIONS = (
    "tests/engine/models/test_families.py",
    "tests/gpu/test_backend.py",
    "tests/kernels/cpu/test_attention.py",
    "tests/engine/models/test_demo_model.py",
    "tests/engine/quantized/test_quantized.py",
    "tests/engine/backends/",
    "tests/gpu/test_q",
    "tests/gpu/test_b",
    "tests/kernels/cpu/",
    "tests/gpu/",
    "tests/gateway/tokens/test_demo_tokenizer.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws from torch without a generator, and which of our lines it finds in the log, do not depend on
    the tests before it in its process: commands that they ran in it have set the level."""
    torch.manual_seed(0)
    logging.getLogger("pillion").setLevel(logging.NOTSET)


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
    """Marks what is long of matrices, and sorts files. Stable: within a file, and among files of equal place, the order
    stays."""
    cases = Counter[str]()
    for item in items:
        test, case, _ = item.nodeid.partition("[")
        if item.get_closest_marker("long") is not None:
            continue
        if test.startswith(LABORATORY):
            item.add_marker(pytest.mark.long)
        elif case and test.startswith(MATRICES):
            if cases[test] % CASES_PER_SHORT_ONE:
                item.add_marker(pytest.mark.long)
            cases[test] += 1
    files = dict.fromkeys(item.nodeid.partition("::")[0] for item in items)
    clusters = [file for file in files if file.startswith(CLUSTERS)]
    places = {
        file: next((place for place, name in enumerate(COMPUTATIONS) if file.startswith(name)), len(COMPUTATIONS))
        for file in files
    }
    others = sorted((file for file in files if file not in clusters), key=places.__getitem__)
    turns = itertools.chain(LONGEST if LONG else (), *itertools.zip_longest(clusters, others))
    order = {file: number for number, file in enumerate(dict.fromkeys(turns))}
    items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])
