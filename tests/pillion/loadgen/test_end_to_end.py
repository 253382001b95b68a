"""The command with the real components and a small model, wrong arguments, and the load test."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
import pytest_asyncio

from lab.benchmarks.load_test import complaints, idle_complaints, load_test
from lab.testbed.cluster import READY_TIMEOUT_S, served
from lab.testbed.ports import free_port
from lab.testbed.tiny_model import save_model
from pillion._version import VERSION
from pillion.cli.app import main
from tests.support.components import running_components

ROOT = pathlib.Path(__file__).resolve().parents[3]
# The tiny model's vocabulary ends at 258.
TOKENS = ("--token-range", "2,250")


def bench(*argv, **environ):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PILLION_")}
    return subprocess.run(
        [sys.executable, "-m", "pillion", "bench", *argv],
        env=clean | {"COLUMNS": "200"} | environ,
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_S,
        check=False,
        cwd=ROOT,
    )


async def asked_to_bench(*argv):
    """Run ``bench`` next to components on this event loop."""
    return await asyncio.to_thread(bench, *argv)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(tmp_path_factory):
    """The real components, in this process."""
    saved = save_model(tmp_path_factory.mktemp("bench") / "tiny")
    model = {"model": str(saved), "dtype": "float32", "max_model_len": 4096}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        async with running_components(pathlib.Path(name), model=model, node={"kv_pool_bytes": 16 * 2**20}) as running:
            yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_both_backends_measure_the_same_load(components, tmp_path):
    load = ("--rate", "20", "--requests", "12", "--input-len", "uniform:20,90", "--output-len", "5", *TOKENS)
    seen, edge = {}, components.gateway
    for backend, target in (("pillion", edge.grpc_address), ("openai", f"http://{edge.http_address}")):
        path = tmp_path / f"{backend}.json"
        argv = ("--backend", backend, "--target", target, *load, "--slo", "ttft=60,itl_p99=60", "--warm-up", "1")
        done = await asked_to_bench(*argv, "--json", str(path), "--records", "--plot", "x.png")
        assert done.returncode == 0, done.stderr
        assert "12 of 12 answered" in done.stdout
        assert "Warning: --plot has no effect" in done.stderr
        seen[backend] = json.loads(path.read_text())
    for result in seen.values():
        assert (result["schema"], result["kind"]) == (1, "run")
        assert result["goodput"]["attainment"] == 1.0
        assert result["summary"]["output_tokens"] == 60
        assert result["client"]["cpu_us_per_token"] > 0
        assert len(result["records"]) == 12
        assert result["environment"]["pillion"] == VERSION
        assert len(result["server"]["models"]) == 1
    ours, theirs = (seen[name]["summary"] for name in ("pillion", "openai"))
    assert ours["input_tokens"] == theirs["input_tokens"]
    # The second of the two meets the first one's blocks: the same seed makes the same prompts.
    assert theirs["cached_tokens"] > ours["cached_tokens"]
    # gRPC's deltas say how many tokens they bring.
    assert sum(tokens for record in seen["pillion"]["records"] for _, tokens in record["messages"]) == 60
    due = [[record["due_s"] for record in seen[name]["records"]] for name in seen]
    assert due[0] == due[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sweep_is_bounded_and_ends_with_a_rate(components, tmp_path):
    load = ("--rate", "10", "--requests", "5", "--run-s", "0.5", "--input-len", "20", "--output-len", "3", *TOKENS)
    path = tmp_path / "sweep.json"
    argv = ("sweep", "--target", components.gateway.grpc_address, *load, "--slo", "ttft=60", "--max-runs", "2")
    done = await asked_to_bench(*argv, "--json", str(path), "--no-progress")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [run["rate"] for run in found["runs"]] == [10.0, 20.0]
    assert found["best_rate"] == 20.0
    seeds = {run["config"]["load"]["seed"] for run in found["runs"]}
    assert len(seeds) == 2
    hopeless = await asked_to_bench(*argv[:-4], "--slo", "ttft=0", "--max-runs", "1", "--no-progress")
    assert hopeless.returncode == 1
    assert "no rate met" in hopeless.stdout


@pytest.mark.asyncio(loop_scope="module")
async def test_a_run_in_which_a_request_failed_fails(components):
    """It requests a token that the model does not have."""
    load = ("--rate", "50", "--requests", "2", "--token-range", "9000,9001")
    done = await asked_to_bench("--target", components.gateway.grpc_address, *load)
    assert done.returncode == 1
    assert "InvalidRequest: 2" in done.stdout


@pytest.mark.cluster
@pytest.mark.long
def test_the_load_test_passes(tmp_path):
    model, port = str(save_model(tmp_path / "tiny")), free_port()
    flags = (f"--http-port={port}", "--dtype=float32", "--max-model-len=4096", "--kv-pool-bytes=16MiB")
    args = argparse.Namespace(seconds=0.6, rate=10.0, token_range=[2, 250], quiet=True)
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as name,
        served(pathlib.Path(name), model, *flags, faults=True) as running,
    ):
        rows, wrong = load_test(running, f"http://127.0.0.1:{port}", args)
        assert wrong == []
        assert len(rows) == 6
        assert rows[2]["summary"]["hit_rate"] > 0
        assert idle_complaints(running) == []


def test_the_load_test_reports_errors_and_short_answers():
    broken = {"summary": {"errors": {"HTTP 500": {"count": 2, "first": "x"}}, "short_answers": 1, "unsent_turns": 0}}
    assert complaints("s", broken) == ["s: HTTP 500, 2 times (x)", "s: 1 short answers"]


@pytest.mark.parametrize(
    ("argv", "status", "complaint"),
    [
        ([], 2, "give --rate"),
        (["run", "--rate", "0"], 2, "not above 0"),
        (["--rate", "1", "--slo", "speed=1"], 2, "--slo: objective"),
        (["--rate", "1", "--input-len", "many"], 2, "length 'many'"),
        (["--rate", "1", "--max-concurrency", "0"], 2, "at least 1"),
        (["--rate", "1", "--token-range", "5"], 2, "LOW,HIGH"),
        (["--rate", "1", "--target", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["--rate", "1", "--backend", "openai", "--target", "http://127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["sweep", "--rate", "1", "--target", "127.0.0.1:1"], 2, "--slo"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_user_errors_are_one_line(argv, status, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv, "--no-progress"] if argv else ["bench", "run"])
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert said.strip().splitlines()[-1].startswith("pillion: ")
    assert complaint in said.strip().splitlines()[-1]
    assert "Traceback" not in said


def test_the_bench_imports_only_the_sdk():
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        servers = ("pillion.gateway", "pillion.engine", "pillion.kvstore", "pillion.kernels")
        if name.startswith(servers) or name.split(".")[0] in ("torch", "numpy", "redis", "psutil"):
            raise ImportError("the bench imports " + name)
sys.meta_path.insert(0, Refuse())
from pillion.loadgen import load, openai_target, run, report
from pillion.cli.app import main
main(["bench", "--rate", "1", "--target", "127.0.0.1:1"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert "127.0.0.1:1" in done.stderr
    assert "imports" not in done.stderr
