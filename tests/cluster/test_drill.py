"""`pillion drill` on a real cluster: it strikes every kind, loses no stream, and leaves the cluster whole."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from lab.testbed.cluster import ServedCluster, served
from lab.testbed.conditions import wait_for
from lab.testbed.tiny_model import save_model

pytestmark = [pytest.mark.cluster, pytest.mark.long]

WITHIN_S = 240.0
FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--kv-pool-bytes", "32MiB")
PAIRS = ("--decode-workers", "2", "--gateway-workers", "2")
LOAD = ("--streams", "3", "--input-len", "64", "--output-len", "300", "--within-s", "200")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    model = str(save_model(tmp_path_factory.mktemp("model") / "tiny"))
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *FLAGS, *PAIRS, forked=True) as running,
    ):
        yield running


def drill(cluster: ServedCluster, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pillion", "drill", "--target", cluster.target, *LOAD, *args]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=5 * WITHIN_S, check=False
    )


def pids(cluster: ServedCluster) -> dict[str, set[int]]:
    roles = ("gateway", "decode", "prefill", "kvnode", "redis-server", "keeper")
    return {role: {process.pid for process in cluster.components(role)} for role in roles}


def test_a_drill_kills_each_kind_once_and_loses_no_stream(cluster: ServedCluster, tmp_path: pathlib.Path) -> None:
    before, found, metrics = pids(cluster), tmp_path / "found.json", tmp_path / "drill.prom"
    (tmp_path / "contract.toml").write_text("lost_streams = 0\nfull_strength_s = 200\n")
    files = ("--contract", str(tmp_path / "contract.toml"), "--json", str(found), "--metrics-file", str(metrics))
    done = drill(cluster, "--yes", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    strikes = json.loads(found.read_text())["strikes"]
    assert [one["kind"] for one in strikes] == ["gateway", "decode", "prefill", "kvnode", "redis"]
    assert all(one["streams"] and not one["cost"]["lost_streams"] for one in strikes)
    assert 'pillion_drill_contract_kept{kind="redis"} 1' in metrics.read_text()
    after = pids(cluster)
    struck = {role: len(before[role] - after[role]) for role in before}
    assert struck == {"gateway": 1, "decode": 1, "prefill": 1, "kvnode": 1, "redis-server": 1, "keeper": 0}
    wait_for("the cluster to be idle", cluster.idle, WITHIN_S)


def test_an_impossible_contract_is_broken(cluster: ServedCluster, tmp_path: pathlib.Path) -> None:
    (tmp_path / "contract.json").write_text('{"decode": {"longest_pause_ms": 0}}')
    args = ("--kind", "decode", "--pause-s", "1", "--contract", str(tmp_path / "contract.json"))
    done = drill(cluster, "--yes", *args)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "longest_pause_ms is" in done.stderr


def test_a_drill_without_consent_kills_nothing(cluster: ServedCluster) -> None:
    before = pids(cluster)
    done = drill(cluster)
    assert done.returncode == 2
    assert "without consent" in done.stderr
    assert pids(cluster) == before
