"""The processes of a local cluster: resolved flags, order, cores, environment."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.testbed.tiny_model import save_model
from pillion.cli.flags import env_name
from pillion.config import DecodeFlags, OfflineFlags, PrefillFlags, PrepareFlags, ServeFlags
from pillion.engine.backends.devices import resolved, with_budgets
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import make_ready
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import BY_NAME
from pillion.supervisor import local_cluster as cluster
from pillion.supervisor.child_process import ChildProcess, child_environ
from pillion.supervisor.local_cluster import prepare_in_child, process_specs, threads_per_worker
from tests.support.cpu_model import needs_kernels
from tests.support.own_cache import model_cache


def test_defaults_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one process does prefill and decode, and the pool is the rest of the GPU's memory."""
    monkeypatch.setattr("pillion.engine.backends.gpu.gpu_devices.device_count", lambda: 1)
    flags = resolved(ServeFlags(model="m"))
    assert (flags.device, flags.prefill_workers, flags.kv_pool_bytes) == ("cuda", 0, 0)
    assert "--kv-device=cuda" in process_specs(flags, pathlib.Path("/run/x"), None)[0].argv
    assert (flags.max_num_batched_tokens, flags.max_num_batched_prefill_tokens) == (0, 0)
    flags = resolved(ServeFlags(model="m", prefill_workers=2, kv_pool_bytes=2**20))
    assert (flags.prefill_workers, flags.kv_pool_bytes) == (2, 2**20)
    flags = resolved(ServeFlags(model="m", device="cpu"))
    assert (flags.device, flags.prefill_workers, flags.kv_pool_bytes) == ("cpu", 1, 2**30)
    assert flags.max_num_batched_prefill_tokens == 512
    assert any("--kv-device=cpu" in spec.argv for spec in process_specs(flags, pathlib.Path("/run/x"), None))


@pytest.mark.parametrize(("kernels", "tokens"), [("amx", 512), ("avx512_bf16", 256)])
def test_matrix_tile_kernels_get_larger_step_budgets(
    monkeypatch: pytest.MonkeyPatch, kernels: str, tokens: int
) -> None:
    features = frozenset(BY_NAME[kernels].needs)
    monkeypatch.setattr("pillion.engine.backends.devices.host_features", lambda: features)
    assert resolved(ServeFlags(model="m", device="cpu")).max_num_batched_tokens == tokens
    assert with_budgets(DecodeFlags(device="cpu")).max_num_batched_tokens == tokens
    for without in (DecodeFlags(device="cpu", cpu_kernels="torch"), DecodeFlags(device="cpu", dtype="float32")):
        assert with_budgets(without).max_num_batched_tokens == 256


def test_cpu_step_budgets_cover_a_minimal_step() -> None:
    """A step has a token for each stream, and a prefill step a block."""
    assert with_budgets(DecodeFlags(device="cpu", max_num_seqs=600)).max_num_batched_tokens == 600
    assert with_budgets(PrefillFlags(device="cpu", block_size=1024)).max_num_batched_prefill_tokens == 1024
    assert resolved(OfflineFlags(model="m", device="cpu")).max_num_batched_tokens == 512
    given = resolved(ServeFlags(model="m", device="cpu", max_num_batched_tokens=64, max_num_batched_prefill_tokens=32))
    assert (given.max_num_batched_tokens, given.max_num_batched_prefill_tokens) == (64, 32)


@pytest.mark.parametrize(
    ("gpus", "decode", "prefill", "pool"),
    [
        (2, 2, 1, "cuda:0,cuda:1"),
        (4, 2, 4, "cuda:0,cuda:1,cuda:2,cuda:3"),
        (4, 1, 1, "cuda"),
        (1, 2, 2, "cuda"),
    ],
)
def test_a_pool_is_on_the_gpu_of_each_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, decode: int, prefill: int, pool: str
) -> None:
    """As many as the largest workers have ranks; ranks that share one GPU share its pool."""
    monkeypatch.setattr("pillion.engine.backends.gpu.gpu_devices.device_count", lambda: gpus)
    sizes = {"tensor_parallel_size": decode, "prefill_tensor_parallel_size": prefill}
    flags = resolved(ServeFlags(model="m", prefill_workers=1, **sizes))  # type: ignore[arg-type]
    assert f"--kv-device={pool}" in process_specs(flags, pathlib.Path("/run/x"), None)[0].argv


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"device": "cuda"}, "--device cuda: no NVIDIA GPU can be used here"),
        ({"load_format": "dummy"}, "--load-format dummy needs a GPU"),
    ],
)
def test_gpu_flags_are_rejected_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("pillion.engine.backends.gpu.gpu_devices.device_count", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=words):
        resolved(ServeFlags(**flags))


def test_a_kv_type_unsupported_on_gpus_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.engine.backends.gpu.gpu_devices.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is for the CPU kernels"):
        resolved(ServeFlags(kv_cache_dtype="int8"))


def on_cpu(**flags: Any) -> ServeFlags:
    """The resolved flags of a cluster on a machine without a GPU."""
    return resolved(ServeFlags(device="cpu", **flags))


def test_the_components_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "usable_cores", lambda: 8)
    monkeypatch.setenv("PILLION_BLOCK_SIZE", "99")
    flags = on_cpu(model="m", prefill_workers=2, decode_workers=1, grpc_port=1234, max_num_seqs=7)
    folder = pathlib.Path("/run/x")
    specs = process_specs(flags, folder, pathlib.Path("/bin/redis-server"))
    assert [(s.component_id, s.level) for s in specs] == [
        ("redis", 0),
        ("keeper", 0),
        ("kvnode-0", 1),
        ("prefill-0", 2),
        ("prefill-1", 2),
        ("decode-0", 2),
        ("gateway-0", 3),
    ]
    node, decode, gateway = specs[2], specs[5], specs[6]
    assert specs[1].argv[1:] == ("-m", "pillion", "keeper", "/run/x/keeper.sock")
    assert "--keeper-socket=/run/x/keeper.sock" in node.argv
    assert decode.argv[1:5] == ("-m", "pillion", "decode", "--component-id=decode-0")
    assert {"--max-num-seqs=7", "--listen=unix:/run/x/decode-0.sock", "--cpu-threads=2"} <= set(decode.argv)
    assert decode.environ["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in gateway.environ or "OMP_NUM_THREADS" in os.environ
    assert gateway.argv[1:4] == ("-m", "pillion", "gateway")
    assert {"--grpc-port=1234", "--probe-listen=unix:/run/x/gateway-0.sock", "--no-share-ports"} <= set(gateway.argv)
    for spec in specs:
        assert spec.environ[env_name("redis_url")] == "unix:///run/x/redis.sock"
        assert env_name("block_size") not in spec.environ


@pytest.mark.parametrize(
    ("flags", "prefill", "decode"),
    [
        ({"cpu_threads": 2, "cpu_affinity": "0-3"}, "0,1", "2,3"),
        ({"cpu_affinity": "0-3"}, "0,1", "2,3"),
        ({"cpu_affinity": "0-3", "split_policy": "colocated"}, "0,1,2,3", "0,1,2,3"),
        ({}, "", ""),
    ],
)
def test_workers_get_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], prefill: str, decode: str
) -> None:
    monkeypatch.setattr("pillion.host.cores.allowed_cores", lambda: frozenset(range(8)))
    specs = process_specs(on_cpu(model="m", **flags), pathlib.Path("/run/x"), None)
    by_name = {spec.component_id: spec.argv for spec in specs}
    assert f"--cpu-affinity={prefill}" in by_name["prefill-0"]
    assert f"--cpu-affinity={decode}" in by_name["decode-0"]


@pytest.mark.parametrize(
    ("flags", "prefill", "decode"),
    [
        ({}, 1, 1),
        ({"tensor_parallel_size": 2}, 2, 2),
        ({"tensor_parallel_size": 2, "prefill_tensor_parallel_size": 4}, 4, 2),
        ({"prefill_tensor_parallel_size": 2}, 2, 1),
    ],
)
def test_prefill_and_decode_workers_may_differ_in_ranks(flags: dict[str, Any], prefill: int, decode: int) -> None:
    settled = on_cpu(model="m", **flags)
    by_name = {spec.component_id: spec.argv for spec in process_specs(settled, pathlib.Path("/run/x"), None)}
    assert f"--tensor-parallel-size={prefill}" in by_name["prefill-0"]
    assert f"--tensor-parallel-size={decode}" in by_name["decode-0"]
    assert cluster.ranks_of(settled) == {"prefill": prefill, "decode": decode}
    alone = on_cpu(model="m", prefill_workers=0, split_policy="colocated", **flags)
    assert cluster.ranks_of(alone) == {"decode": decode}


def test_prefill_workers_alone_have_stages() -> None:
    flags = on_cpu(model="m", prefill_workers=1, pipeline_parallel_size=2)
    specs = {spec.component_id: spec for spec in process_specs(flags, pathlib.Path("/run/x"), None)}
    assert "--pipeline-parallel-size=2" in specs["prefill-0"].argv
    assert "--pipeline-parallel-size=1" in specs["decode-0"].argv
    assert cluster.processes_of(replace(flags, tensor_parallel_size=3)) == {"prefill": 6, "decode": 3}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prefill_workers": 0}, "2 needs --prefill-workers"),
        ({"cpu_kernels": "torch"}, "2 needs the CPU kernels: --cpu-kernels torch"),
        ({"pipeline_parallel_size": 3}, "3 is too large for 2 layers"),
    ],
)
@needs_kernels
@pytest.mark.usefixtures("own_cache")
def test_invalid_stages_are_rejected_before_the_start(
    tmp_path: pathlib.Path, flags: dict[str, Any], words: str
) -> None:
    shape = {"model": str(save_model(tmp_path / "m")), "dtype": "float32", "pipeline_parallel_size": 2}
    asked = on_cpu(**{"prefill_workers": 1, **shape, **flags})
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size {words}"):
        cluster.check_stages(asked, prepare(asked))
    cluster.check_stages(replace(asked, pipeline_parallel_size=1), None)


def test_too_few_cores_in_the_cpu_affinity_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.host.cores.allowed_cores", lambda: frozenset(range(8)))
    with pytest.raises(ConfigError, match="names 3 cores, the workers' threads need 4"):
        process_specs(on_cpu(model="m", cpu_threads=2, cpu_affinity="0-2"), pathlib.Path("/run/x"), None)


@pytest.mark.parametrize(
    ("cores", "flags", "owners"),
    [
        (2, {}, [0, 1]),
        (5, {}, [0, 0, 2, 2, 4]),
        (6, {"prefill_workers": 2, "cpu_threads": 1}, [0, 1, 2]),
        (8, {"split_policy": "colocated", "cpu_threads": 2}, None),
        (4, {"split_policy": "colocated", "decode_workers": 2}, [0, 0, 2, 2]),
        (2, {"split_policy": "colocated"}, None),
        (1, {}, None),
        (2, {"cpu_threads": 2}, None),
    ],
)
def test_workers_lend_each_other_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, flags: dict[str, Any], owners: list[int] | None
) -> None:
    """A lending table has a line per core; there is none if a worker owns all cores, or there are too few."""
    monkeypatch.setattr(cluster, "usable_cores", lambda: cores)
    settled = on_cpu(model="m", **flags)
    lending_table = cluster.core_lending_table(settled)
    assert (lending_table and [lending_table.owner(core) for core in range(lending_table.cores)]) == owners
    specs = process_specs(settled, pathlib.Path("/run/x"), None, lending_table)
    workers = [spec.argv for spec in specs if spec.level == 2]
    path = lending_table.path if lending_table else ""
    assert all(f"--core-lending-table={path}" in argv for argv in workers)
    if lending_table is not None:
        firsts = [int(arg.partition("=")[2]) for argv in workers for arg in argv if arg.startswith("--first-core=")]
        assert all(len(lending_table.owned(first)) == cluster.threads_of(settled) for first in firsts)
        lending_table.check_integrity()
        lending_table.close()


def test_borrowed_cores_are_those_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.host.cores.allowed_cores", lambda: frozenset(range(8)))
    lending_table = cluster.core_lending_table(on_cpu(model="m", cpu_affinity="4-6"))
    assert lending_table is not None
    assert [lending_table.processor(core) for core in range(lending_table.cores)] == [4, 5, 6]
    lending_table.close()


def test_a_redis_password_is_not_on_a_command_line() -> None:
    flags = on_cpu(redis_url="rediss://:secret@host:6379/0")
    specs = process_specs(flags, pathlib.Path("/run/x"), None)
    assert "redis" not in [spec.component_id for spec in specs]
    for spec in specs:
        assert "secret" not in " ".join(spec.argv)
        assert "secret" in spec.environ[env_name("redis_url")]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (8, 4), (64, 32)])
def test_workers_share_the_cores(cores: int, threads: int) -> None:
    assert threads_per_worker(on_cpu(), cores) == threads


def test_the_environment_keeps_libraries_quiet() -> None:
    environ = child_environ({"PATH": "p", "PILLION_DTYPE": "x"}, "redis://")
    assert environ["TOKENIZERS_PARALLELISM"] == "false"
    assert environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert "PILLION_DTYPE" not in environ


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("print('reading'); os.kill(os.getpid(), 9)", "preparing the model ended with status -9, after 'reading'"),
        ("os.kill(os.getpid(), 9)", "preparing the model ended with status -9"),
        ("print('reading'); print('pillion: no such model'); sys.exit(2)", "no such model"),
    ],
)
def test_a_failed_preparation_reports_the_reason(
    program: str, told: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ChildProcess.start

    async def replaced(argv: Sequence[str], *options: Any) -> ChildProcess:
        return await start([sys.executable, "-S", "-u", "-c", f"import os, sys; {program}"], *options)

    monkeypatch.setenv("PILLION_CACHE", model_cache(tmp_path / "cache"))
    monkeypatch.setattr(ChildProcess, "start", replaced)
    flags = PrepareFlags(model=str(save_model(tmp_path / "tiny")), device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        asyncio.run(prepare_in_child(flags, lambda line: None))


def test_a_model_that_is_ready_needs_no_process_and_no_torch(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILLION_CACHE", model_cache(tmp_path / "cache"))
    model, started = str(save_model(tmp_path / "tiny")), []
    flags = PrepareFlags(model=model, device="cpu", dtype="float32")

    async def start(argv: Sequence[str], *_: object) -> ChildProcess:
        started.append(argv)
        raise OSError("no program starts here")

    monkeypatch.setattr(ChildProcess, "start", start)
    with pytest.raises(OSError, match="no program"):
        asyncio.run(prepare_in_child(flags, print))
    assert started[0][1:4] == ["-m", "pillion", "prepare"]
    make_ready(flags, print)
    asyncio.run(prepare_in_child(flags, print))
    assert len(started) == 1
    program = f"""
import asyncio, sys
from pillion.cli.console import Notices
from pillion.config import ServeFlags
from pillion.supervisor.local_cluster import LocalCluster

async def prepare():
    flags = ServeFlags(model={model!r}, device="cpu", dtype="float32", http_port=0, grpc_port=0, kv_pool_bytes=2**24)
    cluster = LocalCluster(flags, Notices())
    try:
        await cluster.prepare()
    finally:
        await cluster.stop()

asyncio.run(prepare())
print({{"torch", "transformers", "triton", "huggingface_hub"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
