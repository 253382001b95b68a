"""docker-compose.yml: its schema, the promises of every service, and its components as processes that answer."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest
import yaml

from lab.testbed.ports import free_port
from lab.testbed.tiny_model import save_model
from pillion import AsyncClient
from pillion.observability.metrics import Meters
from pillion.observability.metrics_export import Exports
from tests.deploy.check import check_schema, metrics_pages, serve_and_ask
from tests.deploy.on_engine import serve_on_engine
from tests.support.compose import (
    COMPOSE_FILE,
    ROOT,
    ComposeService,
    Health,
    Image,
    needed_for,
    read_image,
    read_services,
    seconds,
)
from tests.support.compose_run import ComposeRun, UnhealthyError
from tests.support.docker_engine import NoDockerError, some_engine

GPU_COMPONENTS = {"kvnode-gpu", "prefill-gpu", "decode-gpu"}
COMPONENTS = {"kvnode", "prefill", "decode", "gateway", *GPU_COMPONENTS}
# Services of this repository's image that are not part of the cluster.
HELPERS = {"prepare", "keeper"}
SCALE = {"prefill": 2, "decode": 2}
UP_TIMEOUT_S = 300.0
# Metrics that deploy/helm/pillion/templates/autoscaling.yaml queries.
SCALED_BY = {
    "prefill-1": "pillion_queued_tokens",
    "decode-1": "pillion_sequences{",
    "kvnode-1": "pillion_kv_usage_ratio",
    "gateway-1": "vllm:num_requests_waiting",
}


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    # pytest's tmp_path is too long for a Unix socket's path (some hundred bytes).
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        yield pathlib.Path(name)


def test_the_compose_file_matches_its_schema() -> None:
    check_schema()


def test_the_compose_schema_check_finds_a_wrong_field(tmp_path: pathlib.Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE_FILE.read_text().replace("stop_grace_period", "stop_grace"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(wrong)]
    assert "stop_grace" in subprocess.run(command, capture_output=True, text=True).stdout


# Fields of a health check in docker-compose 1.29's schema.
OLD_HEALTH = {"test", "interval", "timeout", "retries", "start_period", "disable"}


def test_health_checks_are_valid_for_docker_compose_1() -> None:
    for name, service in yaml.safe_load(COMPOSE_FILE.read_text())["services"].items():
        assert service.get("healthcheck", {}).keys() <= OLD_HEALTH, name


async def test_a_health_check_needs_only_a_shell() -> None:
    port = free_port()
    checks = {
        service.health.test for name, service in read_services({}).items() if name in COMPONENTS and service.health
    }
    assert len(checks) == 1
    program, option, text = next(iter(checks))
    assert (program, option) == ("bash", "-c")
    # An empty PATH, so that no other program is found.
    command = [shutil.which(program), option, text.replace("9464", str(port))]
    trouble = ""

    async def well() -> bool:
        child = await asyncio.create_subprocess_exec(*command, env={"PATH": ""}, stderr=asyncio.subprocess.DEVNULL)
        return await child.wait() == 0

    assert not await well(), "nobody listens"
    page = {"host": "127.0.0.1", "port": port, "not_ready": lambda: trouble}
    exports = Exports(Meters(), "decode-7", "decode", **page)
    try:
        assert await well()
        trouble = "no decode worker lives"
        assert not await well()
    finally:
        await asyncio.to_thread(exports.close)


def test_services_and_their_dependencies_are_complete() -> None:
    services = read_services({})
    assert services.keys() == COMPONENTS | HELPERS | {"redis", "otel-collector", "jaeger", "prometheus", "grafana"}
    assert {name for name, service in services.items() if service.own} == COMPONENTS | HELPERS
    assert {name for name, service in services.items() if service.profiles} == GPU_COMPONENTS
    for name, service in services.items():
        for needed, condition in service.depends_on.items():
            assert condition != "service_healthy" or services[needed].health, f"{name} waits for {needed} in vain"
        if name in COMPONENTS:
            assert service.health is not None
            # Without a name or address, so that the service can have replicas.
            assert not service.environment.keys() & {
                "PILLION_COMPONENT_ID",
                "PILLION_ADVERTISE",
                "PILLION_NODE_ADVERTISE",
            }
    assert read_services({"CPU_WORKERS": "0", "MODEL": "/models/x"})["decode"].replicas == 0
    edge = services["gateway"]
    assert edge.stop_grace_s > float(edge.environment["PILLION_DRAIN_TIMEOUT_S"])


@pytest.mark.parametrize("name", ["QUANTIZATION", "QUANTIZATION_GROUP_SIZE", "KV_CACHE_DTYPE"])
def test_services_share_their_quantization_settings(name: str) -> None:
    services = read_services({name: "x"})
    for component in COMPONENTS | {"prepare"}:
        assert services[component].environment[f"PILLION_{name}"] == "x", component


def test_prefill_and_decode_workers_may_differ_in_ranks() -> None:
    for given, sizes in (({}, ["1", "1"]), ({"PREFILL_TENSOR_PARALLEL_SIZE": "4"}, ["4", "1"])):
        services = read_services(given)
        found = [services[name].environment["PILLION_TENSOR_PARALLEL_SIZE"] for name in ("prefill", "decode")]
        assert found == sizes


def test_prefill_workers_alone_have_stages() -> None:
    services = read_services({"PREFILL_PIPELINE_PARALLEL_SIZE": "2"})
    found = {name: one.environment.get("PILLION_PIPELINE_PARALLEL_SIZE") for name, one in services.items()}
    assert {name: size for name, size in found.items() if size} == {
        name: "2" for name in services if name.startswith("prefill")
    }


def test_adapters_reach_the_services_that_need_them() -> None:
    told = {"ENABLE_LORA": "true", "MAX_LORAS": "4", "LORA_MODULES": "sql=/adapters/sql", "ADAPTERS": "/srv/adapters"}
    services = read_services(told)
    for name in COMPONENTS:
        environment = services[name].environment
        assert (environment["PILLION_ENABLE_LORA"], environment["PILLION_MAX_LORAS"]) == ("true", "4"), name
    edge = services["gateway"]
    assert edge.environment["PILLION_LORA_MODULES"] == "sql=/adapters/sql"
    assert edge.mounts.items() >= {"/adapters": "/srv/adapters", **services["decode"].mounts}.items()


def test_gpu_workers_map_a_pool_on_the_gpu() -> None:
    services = read_services({})
    node = services["kvnode-gpu"].environment
    assert (node["PILLION_KV_DEVICE"], node["PILLION_KV_POOL_BYTES"]) == ("cuda", "0")
    for name in ("PILLION_NODE_ID", "PILLION_ATTACH_SOCKET"):
        assert node[name] != services["kvnode"].environment[name]
    for name in ("prefill", "decode"):
        worker, other = services[f"{name}-gpu"], services[name]
        assert worker.environment["PILLION_ATTACH_SOCKET"] == node["PILLION_ATTACH_SOCKET"]
        assert worker.depends_on["kvnode-gpu"] == "service_started"
        assert worker.environment["PILLION_LISTEN"] == other.environment["PILLION_LISTEN"]
    reserved = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    assert all("nvidia" in str(reserved[name]["deploy"]) for name in GPU_COMPONENTS)


def test_every_container_is_hardened() -> None:
    for name, service in yaml.safe_load(COMPOSE_FILE.read_text())["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == ("no" if name == "prepare" else "unless-stopped"), name
        pinned = service["image"].rpartition(":")[2].removeprefix("v").split("-")[0]
        assert "PILLION_TAG" in service["image"] or pinned.count(".") == 2, name
        assert "build" in service or service["user"].split(":")[0] not in ("", "0", "root"), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_the_image_runs_as_an_unprivileged_user() -> None:
    image = read_image()
    assert (image.entrypoint, image.user) == (("pillion",), "10001:10001")
    written = set(read_services({})["gateway"].mounts) - {"/models", "/adapters"}
    assert written == {"/run/pillion", "/cache", "/tmp"}
    for name in ("HOME", "HF_HOME", "PILLION_CACHE", "PILLION_ATTACH_SOCKET"):
        assert any(image.environment[name].startswith(folder) for folder in written), name


def test_the_image_runs_as_any_user_of_group_0() -> None:
    words = " ".join((ROOT / "Dockerfile").read_text().replace("\\\n", " ").split())
    for folder in ("/run/pillion", "/cache"):
        assert re.search(rf"chown pillion:0 [^&]*{folder}\b", words)
        assert re.search(rf"chmod 0770 [^&]*{folder}\b", words)
    # Libraries look up the user's name, which the image may lack.
    assert read_image().environment["USER"] == "pillion"


def test_mounted_files_exist() -> None:
    for name, service in read_services({}).items():
        for target, source in service.mounts.items():
            if source.startswith("./deploy"):
                assert (ROOT / source).exists(), f"{name} mounts {source} at {target}"


@pytest.mark.parametrize(("text", "expected_s"), [("5s", 5.0), ("1m30s", 90.0), ("250ms", 0.25)])
def test_durations_of_the_compose_file_are_parsed(text: str, expected_s: float) -> None:
    assert seconds(text) == expected_s


def sleeper(name: str, program: str, needs: dict[str, str], test: tuple[str, ...] = ()) -> ComposeService:
    """Return a service with a command of `pillion`, which stands for any program here."""
    health = Health(test, 0.05, 5.0, 2, 0.0) if test else None
    return ComposeService(name, "pillion:x", (program,), {}, needs, health, {}, (), 1, 5.0)


async def test_services_start_in_dependency_order_and_failures_are_reported(tmp_path: pathlib.Path) -> None:
    services = {
        "last": sleeper("last", "version", {"middle": "service_completed_successfully"}),
        "middle": sleeper("middle", "version", {"first": "service_completed_successfully"}),
        "first": sleeper("first", "version", {}),
    }
    async with ComposeRun(services, Image({}, ("pillion",), "1"), tmp_path) as run:
        await run.up(60)
        assert run.started == ["first", "middle", "last"]
    services["first"] = sleeper("first", "nonsense", {})
    async with ComposeRun(services, Image({}, ("pillion",), "1"), tmp_path) as run:
        with pytest.raises(ExceptionGroup) as failed:
            await run.up(60)
        assert run.started == ["first"]
    assert failed.group_contains(UnhealthyError, match="first-1 ended with 2\n.*nonsense")


async def drain_under_a_stream(run: ComposeRun) -> None:
    """Decode workers that get SIGTERM finish their streams, and then end."""
    async with AsyncClient(f"{run.of('gateway')[0].address}:50051") as client:
        stream = client.generate("Once", max_tokens=1000, temperature=0, ignore_eos=True)
        deltas = [await anext(stream)]
        # All of them stop, so that no other worker can take the stream over.
        for container in run.of("decode"):
            assert container.child is not None
            os.kill(container.child.pid, signal.SIGTERM)
        deltas += [delta async for delta in stream]
    assert deltas[-1].usage is not None
    assert deltas[-1].timings is not None
    assert (deltas[-1].usage.completion_tokens, deltas[-1].timings.replays) == (1000, 0)
    for container in run.of("decode"):
        assert container.child is not None
        container.exit_code = await container.child.wait()
        assert container.exit_code == 0


async def outlive_the_node(run: ComposeRun) -> None:
    """The node is killed and started again: its pool is recovered from the keeper, and no worker ends."""
    prompt = "An old story " * 20
    async with AsyncClient(f"{run.of('gateway')[0].address}:50051") as client:

        async def cached() -> int:
            deltas = [delta async for delta in client.generate(prompt, max_tokens=1)]
            assert deltas[-1].usage is not None
            return deltas[-1].usage.cached_tokens

        await cached()
        found = await cached()
        assert found > 0
        await run.kill(run.of("kvnode")[0])
        assert await cached() == found
    for container in (*run.of("prefill"), *run.of("decode")):
        assert container.child is not None
        assert psutil.pid_exists(container.child.pid)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8 to be loopback")
async def test_compose_serves_scaled(folder: pathlib.Path) -> None:
    models = await asyncio.to_thread(save_model, folder / "models" / "tiny")
    environ = {
        "MODEL": "/models/tiny",
        "MODELS": str(models.parent),
        "CPU_KERNELS": "torch",
        "CPU_THREADS": "1",
        "KV_POOL_BYTES": "16MiB",
        "SPLIT_POLICY": "disaggregated",
        "WORKER_DRAIN_TIMEOUT_S": "60",
        "OTEL_SDK_DISABLED": "true",
    }
    services = needed_for(read_services(environ), ["gateway"])
    assert services.keys() == {"redis", "keeper", "prepare", "kvnode", "prefill", "decode", "gateway"}
    async with ComposeRun(services, read_image(), folder, SCALE) as run:
        await run.up(UP_TIMEOUT_S)
        assert run.started.index("kvnode") < run.started.index("prefill") < run.started.index("gateway")
        status, answers, models_page = await serve_and_ask(run, [f"{n} " + "story " * 20 for n in range(4)])
        roles = sorted(component.role for component in status.components)
        assert roles == ["decode", "decode", "gateway", "kvnode", "prefill", "prefill"]
        assert len({component.component_id for component in status.components}) == 6
        assert all(answers)
        assert b'"tiny"' in models_page
        pages = await asyncio.to_thread(metrics_pages, run)
        assert pages.keys() == {"kvnode-1", "prefill-1", "prefill-2", "decode-1", "decode-2", "gateway-1"}
        for name, metric in SCALED_BY.items():
            assert f"\n{metric}" in pages[name], f"{name} has no {metric}, which the chart's autoscaling asks for"
        assert "\npillion_inter_token_latency_seconds_bucket{" in pages["gateway-1"]
        await outlive_the_node(run)
        await drain_under_a_stream(run)
        codes = await run.down()
    assert codes.pop("keeper-1") == -signal.SIGTERM, "it has nothing to finish"
    assert {name: code for name, code in codes.items() if code} == {}
    assert len(codes) == 5, "prepare and the decode workers had ended before"


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(3600)
def test_compose_serves_on_an_engine() -> None:
    """On the engine that runs or, where root has dockerd, on one of its own, whose image takes minutes."""
    try:
        with some_engine() as engine:
            serve_on_engine(engine, print)
    except NoDockerError as missing:
        pytest.skip(str(missing))
