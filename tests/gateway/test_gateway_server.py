"""The gateway as a component: imports, and refusals to start."""

from __future__ import annotations

import asyncio
import pathlib
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from lab.testbed.conditions import WITHIN_S, until, within
from lab.testbed.redis import running_redis
from pillion.cli.checks import check_flags
from pillion.config import GatewayFlags
from pillion.errors import ConfigError
from pillion.gateway.assemble import start_gateway
from pillion.supervisor import local_cluster
from pillion.supervisor.local_cluster import until_prefill_is_known
from pillion.supervisor.probes import answers, is_serving
from pillion.wire.registry import ComponentRecord
from tests.support.fake_components import record, running_fake_cluster, short_folder, toy_model
from tests.support.redis_nodes import patient


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("pillion.kvstore.node.kv_node", "torch transformers triton llvmlite tokenizers starlette uvicorn"),
        ("pillion.decode_service.assemble", "torch transformers triton llvmlite starlette uvicorn"),
        ("pillion.engine.load_model", "torch transformers triton llvmlite tokenizers grpc redis"),
        ("pillion", "torch transformers numpy tokenizers starlette redis"),
    ],
)
def test_heavy_modules_are_not_imported_at_start(module: str, unwanted: str) -> None:
    """Modules imported before a model is loaded: heavy ones are imported lazily."""
    code = f"import sys, {module}; print(*sorted(set({unwanted.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_serving_gateway_has_no_torch(tmp_path: pathlib.Path) -> None:
    """Not even after loading its model, tokenizing and answering."""
    code = """
import asyncio, pathlib, sys
from tests.support.fake_components import running_fake_cluster

async def main():
    async with running_fake_cluster() as line:
        text = [d.text async for d in line.client.chat([{"role": "user", "content": "x"}])]
        assert "".join(text) == "The answer.", text

asyncio.run(main())
print(*({"torch", "transformers", "triton"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"split_policy": "sometimes"}, "split-policy 'sometimes'"),
        ({"chunk_size": 24, "block_size": 16}, "--chunk-size 24 is not a multiple of --block-size 16"),
        ({"chunk_size": 0}, "--chunk-size 0"),
    ],
)
def test_invalid_flags_are_a_one_line_error(flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_flags(GatewayFlags(**flags))


async def test_a_gateway_needs_a_registry() -> None:
    with pytest.raises(ConfigError, match="needs --redis-url"):
        await start_gateway(GatewayFlags())


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
async def test_an_occupied_port_is_a_one_line_error(tmp_path: pathlib.Path, port: str) -> None:
    with running_redis() as redis, socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"grpc_port": 0, "http_port": 0, port: taken.getsockname()[1]}
        flags = GatewayFlags(redis_url=redis.url, **ports)
        with pytest.raises(ConfigError, match="cannot listen"):
            await start_gateway(flags, prepared=toy_model(tmp_path))


async def test_a_gateway_starts_without_redis_and_registers_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pillion.kvstore.index import redis_url
    from pillion.kvstore.index import registry as registry_module
    from pillion.kvstore.index.registry import Registry

    # Deregistration is a Redis call as well.
    monkeypatch.setattr(registry_module, "REGISTRY_DEADLINE_MS", 30_000)
    monkeypatch.setattr(redis_url, "CONNECT_TIMEOUT_MS", 30_000)
    with running_redis() as redis:
        redis.kill()
        flags = GatewayFlags(redis_url=redis.url, grpc_port=0, http_port=0, heartbeat_ms=50)
        component = await start_gateway(flags, prepared=toy_model(tmp_path))
        try:
            redis.start()
            registry = patient(Registry(redis.url, 5000))
            found = await until("the gateway's record", registry.components)
            assert [(p.component_id, p.role, p.address) for p in found] == [
                (component.component_id, "gateway", component.grpc_address)
            ]
        finally:
            await component.stop()
        assert await registry.components() == []
        await registry.aclose()


async def test_the_grammar_checker_is_warmed_up_at_start() -> None:
    """Otherwise the first structured request waits for a process start and the tokenizer."""
    async with running_fake_cluster("abc") as fakes:
        (checker,) = (entry.grammars.checker for entry in fakes.gateway.gateway._models.values())
        await until("a grammar that is known", lambda: checker._cache)
        assert not any(checker._cache.values()), "it is good"
        assert checker._box._process is not None


async def test_the_probe_port_answers_until_the_last_stream_ends(
    tmp_path: pathlib.Path,
) -> None:
    with short_folder() as folder:
        probe = f"unix:{folder}/probe.sock"
        async with running_fake_cluster("abc", roles="kvnode", probe_listen=probe):
            assert await answers(probe)
            assert not await is_serving(probe), "no worker lives"
        assert not await answers(probe)
        async with running_fake_cluster("abc", probe_listen=probe) as fakes:
            await until("the probe to say that requests are served", lambda: is_serving(probe))
            fakes.decode.gate.clear()
            asked = asyncio.create_task(anext(fakes.client.generate("x")))
            await until("a submit", lambda: fakes.decode.submits)
            stopping = asyncio.create_task(fakes.gateway.stop(30))

            async def drains() -> bool:
                return not await is_serving(probe)

            await until("the gateway to say that it drains", drains)
            # A failing liveness probe would get it killed, and its streams lost.
            assert await answers(probe)
            fakes.decode.gate.set()
            assert (await asked).text
            await stopping
            assert not await answers(probe)


async def test_a_start_waits_until_all_prefill_workers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # A wait that times out differs from one that found its worker.
    monkeypatch.setattr(local_cluster, "PREFILL_KNOWN_S", 10 * WITHIN_S)
    with short_folder() as folder:
        probe = f"unix:{folder}/probe.sock"
        async with running_fake_cluster("abc", probe_listen=probe) as fakes:
            await until("the probe to say that requests are served", lambda: is_serving(probe))
            fakes.gateway.cluster.view.grace_s = 0.0
            await fakes.registry.leave("prefill-0")
            await until("a view without a prefill worker", lambda: not fakes.gateway.cluster.answering("prefill"))

            async def told() -> bool:
                return not await is_serving(probe, service="prefill-0")

            await until("the probe to say that there is none", told)
            waiting = asyncio.create_task(until_prefill_is_known([probe], ["prefill-0", "prefill-1"]))
            assert await is_serving(probe)
            for worker in ("prefill-1", "prefill-0"):
                assert not waiting.done()
                await fakes.registry.heartbeat(record(worker, "prefill", fakes.servers["prefill"].address))
                await until(
                    "the gateway to know it", lambda name=worker: name in fakes.gateway.cluster.answering("prefill")
                )
            assert await within("the wait to end", waiting) == []
            monkeypatch.setattr(local_cluster, "PREFILL_KNOWN_S", 0.0)
            assert await until_prefill_is_known([probe], ["prefill-0", "prefill-7"]) == ["prefill-0", "prefill-7"]


async def test_status_sums_over_all_gateways() -> None:
    async with running_fake_cluster("abc") as fakes:
        [delta async for delta in fakes.client.generate("x" * 9)]
        other = ComponentRecord(
            component_id="gateway-9", role="gateway", address="x", running_requests=2, prompt_tokens=100,
            cached_tokens=40,
            completion_tokens=7,
        )  # fmt: skip
        await fakes.registry.heartbeat(other)
        await until("the other gateway to be known", lambda: fakes.gateway.cluster.other_gateways())
        status = await fakes.client.status()
        assert (status.prompt_tokens, status.cached_tokens, status.completion_tokens) == (109, 40, 7 + 4)
        assert status.active_requests == 2


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
async def test_only_a_shared_port_is_reused(tmp_path: pathlib.Path, port: str) -> None:
    with running_redis() as redis:
        flags = GatewayFlags(redis_url=redis.url, grpc_port=0, http_port=0, share_ports=True)
        first = await start_gateway(flags, prepared=toy_model(tmp_path / "a"))
        try:
            taken = int((first.grpc_address if port == "grpc_port" else first.http_address).rpartition(":")[2])
            second = await start_gateway(replace(flags, **{port: taken}), prepared=toy_model(tmp_path / "b"))
            await second.stop(0)
            alone = replace(flags, share_ports=False, **{port: taken})
            with pytest.raises(ConfigError, match="cannot listen"):
                await start_gateway(alone, prepared=toy_model(tmp_path / "c"))
        finally:
            await first.stop(0)
