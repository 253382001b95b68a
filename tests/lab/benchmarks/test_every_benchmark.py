"""Every benchmark runs at its smallest size, exits with 0 and prints figures."""

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
# Arguments with which each benchmark computes for some seconds. FOLDER: a new folder.
SMALLEST = {
    "capacity_sim": "--loads turns --machines amx --seeds 1 --seconds 1 --start 16 --peer-tokens 2048",
    "cpu_products": "--rows 1 --layers 1 --repeats 1 --threads 1",
    "drafts": "--methods ngram --texts greedy --streams 1 --rounds 1 --tokens 8 --threads 1",
    "mooncake": "FOLDER/trace.jsonl --requests 50",
    "traces": "FOLDER/trace.jsonl --requests 50",
}
# Not run, with the reason.
CLUSTERS = "it starts clusters, which take half a minute of computing and more"
KERNELS = "it compiles or runs large kernels for half a minute"
LEFT_OUT = {
    "capacity": "it looks for the rate of each system in runs of half a minute",
    "cold_prompts": "it needs a peer, vLLM or llama.cpp",
    "cpu_attention": KERNELS,
    "cpu_service": "it needs a peer, vLLM or llama.cpp",
    "kernel_share": CLUSTERS,
    "llama_stream": "it needs a peer, llama.cpp",
    "load_test": "tests/pillion/loadgen/test_end_to_end.py runs it",
    "pauses": CLUSTERS,
    "quantization": KERNELS,
    "replays": "tests/lab/benchmarks/test_replays.py runs it",
    "soak": "it watches a cluster for minutes",
    "tiers": CLUSTERS,
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
        # Forked, since importing torch takes each process seconds of a core.
        running = component_forks().program(f"lab.benchmarks.{name}", words, environ, *files, starts_clusters=True)
        try:
            status = running.wait(TIMEOUT_S)
        finally:
            running.kill()
        for file in (printed, errors):
            file.seek(0)
        said = printed.read()
        assert status == 0, said[-2000:] + errors.read()[-4000:]
    # Generators of traces write a file and print nothing.
    assert re.search(r"\d", said) or any(tmp_path.iterdir())
