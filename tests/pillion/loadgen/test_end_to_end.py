"""The command and the load test on one real cluster with a small model, and the command's mistakes."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from benchmarks.load_test import complaints, idle_complaints, load_test
from pillion._version import VERSION
from testbed.cluster import READY_TIMEOUT_S, served
from testbed.ports import free_port
from testbed.tiny_model import save_model

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    model, port = str(save_model(folder / "tiny")), free_port()
    flags = (f"--http-port={port}", "--dtype=float32", "--max-model-len=4096", "--kv-pool-bytes=16MiB")
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as name,
        served(pathlib.Path(name), model, *flags, faults=True) as running,
    ):
        yield running, f"http://127.0.0.1:{port}"


@pytest.mark.cluster
def test_both_backends_measure_the_same_load(cluster, tmp_path):
    running, http = cluster
    load = ("--rate", "20", "--requests", "12", "--input-len", "uniform:20,90", "--output-len", "5", *TOKENS)
    seen = {}
    for backend, target in (("pillion", running.target), ("openai", http)):
        path, picture = tmp_path / f"{backend}.json", tmp_path / f"{backend}.png"
        argv = ("--backend", backend, "--target", target, *load, "--slo", "ttft=60,itl_p99=60", "--warm-up", "1")
        done = bench(*argv, "--json", str(path), "--records", "--plot", str(picture))
        assert done.returncode == 0, done.stderr
        assert "12 of 12 answered" in done.stdout
        assert picture.read_bytes().startswith(b"\x89PNG")
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


@pytest.mark.cluster
def test_a_sweep_is_bounded_and_ends_with_a_rate(cluster, tmp_path):
    running, _ = cluster
    load = ("--rate", "10", "--requests", "5", "--run-s", "0.5", "--input-len", "20", "--output-len", "3", *TOKENS)
    path, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    argv = ("sweep", "--target", running.target, *load, "--slo", "ttft=60", "--max-runs", "2")
    done = bench(*argv, "--json", str(path), "--plot", str(picture), "--no-progress")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [run["rate"] for run in found["runs"]] == [10.0, 20.0]
    assert found["best_rate"] == 20.0
    seeds = {run["config"]["load"]["seed"] for run in found["runs"]}
    assert len(seeds) == 2
    assert "goodput" in picture.read_text()
    hopeless = bench(*argv[:-4], "--slo", "ttft=0", "--max-runs", "1", "--no-progress")
    assert hopeless.returncode == 1
    assert "no rate met" in hopeless.stdout


@pytest.mark.cluster
def test_the_load_test_passes_and_notices_what_is_wrong(cluster):
    running, http = cluster
    args = argparse.Namespace(seconds=0.6, rate=10.0, token_range=[2, 250], quiet=True)
    rows, wrong = load_test(running, http, args)
    assert wrong == []
    assert len(rows) == 6
    assert rows[2]["summary"]["hit_rate"] > 0
    assert idle_complaints(running) == []
    # A token that the model does not have.
    done = bench("--target", running.target, "--rate", "50", "--requests", "2", "--token-range", "9000,9001")
    assert done.returncode == 1
    assert "InvalidRequest: 2" in done.stdout
    broken = {"summary": {"errors": {"HTTP 500": {"count": 2, "first": "x"}}, "short_answers": 1, "unsent_turns": 0}}
    assert complaints("s", broken) == ["s: HTTP 500, 2 times (x)", "s: 1 short answers"]


@pytest.mark.parametrize(
    ("argv", "status", "complaint"),
    [
        ([], 2, "give --rate"),
        (["run", "--rate", "0"], 2, "not above 0"),
        (["--rate", "1", "--slo", "speed=1"], 2, "--slo: objective"),
        (["--rate", "1", "--input-len", "many"], 2, "length 'many'"),
        (["--rate", "1", "--plot", "x.bmp"], 2, ".png"),
        (["--rate", "1", "--max-concurrency", "0"], 2, "at least 1"),
        (["--rate", "1", "--token-range", "5"], 2, "LOW,HIGH"),
        (["--rate", "1", "--target", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["--rate", "1", "--backend", "openai", "--target", "http://127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["sweep", "--rate", "1", "--target", "127.0.0.1:1"], 2, "--slo"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(argv, status, complaint):
    done = bench(*argv, "--no-progress") if argv else bench("run")
    assert done.returncode == status
    assert done.stderr.strip().splitlines()[-1].startswith("pillion: ")
    assert complaint in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_bench_needs_the_sdk_alone():
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        servers = ("pillion.gateway", "pillion.engine", "pillion.kvstore", "pillion.kernels")
        if name.startswith(servers) or name.split(".")[0] in ("torch", "numpy", "redis", "psutil", "matplotlib"):
            raise ImportError("the bench imports " + name)
sys.meta_path.insert(0, Refuse())
from pillion.loadgen import load, openai_target, run, report, plots
from pillion.cli.app import main
main(["bench", "--rate", "1", "--target", "127.0.0.1:1"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert "127.0.0.1:1" in done.stderr
    assert "imports" not in done.stderr
