"""Every benchmark runs at its smallest size, ends well and prints figures, whatever these are."""

from __future__ import annotations

import os
import pathlib
import re
import tempfile

import pytest

from lab.testbed.forks import component_forks
from lab.testbed.nested_forks import FORKED_VARIABLE

ROOT = pathlib.Path(__file__).resolve().parents[3]
TIMEOUT_S = 300
FOLDER = "FOLDER"
# The smallest arguments of each benchmark, with which it computes for some seconds. FOLDER stands for a new folder.
SMALLEST = {
    "autoscaling": "--start-s 10 --day-s 60 --first 1 1 --most 4 --jobs 1 --bursts 0.5 --burst-s 10",
    "capacity_sim": "--loads turns --machines amx --seeds 1 --seconds 1 --start 16 --peer-tokens 2048",
    "chunks": "--requests 20 --targets 50",
    "cpu_products": "--rows 1 --layers 1 --repeats 1 --threads 1",
    "cpu_states": "--rounds 1 --threads 1",
    "deadlines": "--seconds 2",
    "drafts": "--methods ngram --texts greedy --streams 1 --rounds 1 --tokens 8 --threads 1",
    "edge": "--streams 2 --tokens 50 --seconds 0.5 --only sse --no-save",
    "herding": "--workers 2 --gateways 2 --rates 2 --seeds 1 --seconds 5 --knowledge",
    "kv_fetch": "--rounds 1",
    "kv_handoff": "--requests 4",
    "kv_index": "--blocks 20000 --lookups 60 --cluster-blocks 5000",
    "kv_node": "--rounds 1",
    "kv_plane": "--rounds 1 --most-rounds 1 --round-mib 1",
    "mooncake": "FOLDER/trace.jsonl --requests 50",
    "partial_blocks": "--rounds 0",
    "recording": "--pairs 1 --requests 1 --streams 1 --input-len 16 --output-len 4",
    "registry": "--sizes 9+1 --looks 20 --plans 20",
    "split_sim": "--workers 2 --rates-per-worker 0.7 --seeds 1 --seconds 3",
    "state_fleets": "--requests 30 --workers 1 --pool-tokens 500000 --workloads conversation --seeds 1",
    "state_hits": "--requests 50 --pool-tokens 500000 --state-percent 10",
    "traces": "FOLDER/trace.jsonl --requests 50",
    "tracing": "--rounds 1 --streams 1 --input-len 16 --output-len 4",
}
# These are left out, each for its reason; a run by hand is `python -m lab.benchmarks.NAME`.
CLUSTERS = "it starts clusters, which take half a minute of computing and more"
KERNELS = "it compiles or runs large kernels for half a minute"
LEFT_OUT = {
    "budget": CLUSTERS,
    "canaries": CLUSTERS,
    "capacity": "it looks for the rate of each system in runs of half a minute",
    "cluster": CLUSTERS,
    "cold_prompts": "it needs a peer, vLLM or llama.cpp",
    "cpu_attention": KERNELS,
    "cpu_profile": KERNELS,
    "cpu_service": "it needs a peer, vLLM or llama.cpp",
    "eagle_head": "it trains a head for minutes",
    "edge_processes": "edge starts it",
    "fairness": CLUSTERS,
    "gpt_oss": KERNELS,
    "kernel_share": CLUSTERS,
    "kvstore": "it runs kv_node, kv_handoff, kv_index, kv_plane and kv_fetch",
    "links": "it needs root and network namespaces",
    "llama_stream": "it needs a peer, llama.cpp",
    "load_test": "tests/pillion/loadgen/test_end_to_end.py runs it",
    "long_context": CLUSTERS,
    "lora": KERNELS,
    "pauses": CLUSTERS,
    "pooling": "it needs a peer, vLLM",
    "quantization": KERNELS,
    "ranks": KERNELS,
    "read_ahead": CLUSTERS,
    "replays": "tests/lab/benchmarks/test_replays.py runs it",
    "second_turns": "it needs a peer, vLLM",
    "simulation_error": CLUSTERS,
    "soak": "it watches a cluster for minutes",
    "split_fit": KERNELS,
    "stages": KERNELS,
    "structured": CLUSTERS,
    "tiers": CLUSTERS,
    "upgrade": CLUSTERS,
    "warm_restart": CLUSTERS,
}


def programs() -> set[str]:
    paths = (ROOT / "lab/benchmarks").glob("*.py")
    return {path.stem for path in paths if '__name__ == "__main__"' in path.read_text()}


def test_every_benchmark_is_in_one_table() -> None:
    assert sorted([*SMALLEST, *LEFT_OUT]) == sorted(programs())


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    "name",
    [*SMALLEST, *(pytest.param(name, marks=pytest.mark.skip(reason=why)) for name, why in LEFT_OUT.items())],
)
def test_a_benchmark_runs_at_its_smallest_size(name: str, tmp_path: pathlib.Path) -> None:
    words = [word.replace(FOLDER, str(tmp_path)) for word in SMALLEST[name].split()]
    environ = {**os.environ, "LAB_WRITTEN": str(tmp_path), FORKED_VARIABLE: "1"}
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        files = printed.fileno(), errors.fileno()
        # To import torch and its like takes each process seconds of a core.
        running = component_forks().program(f"lab.benchmarks.{name}", words, environ, *files, starts_clusters=True)
        try:
            status = running.wait(TIMEOUT_S)
        finally:
            running.kill()
        for file in (printed, errors):
            file.seek(0)
        said = printed.read()
        assert status == 0, said[-2000:] + errors.read()[-4000:]
    # What makes a trace writes it and prints nothing.
    assert re.search(r"\d", said) or any(tmp_path.iterdir())
