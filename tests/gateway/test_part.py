"""The gateway as a part: what it imports, and how it refuses to start."""

from __future__ import annotations

import pathlib
import socket
import subprocess
import sys

import pytest

from gateway.part import start_gateway
from pillion.config import GatewayFlags
from pillion.errors import ConfigError
from tests.support.fake_parts import toy_model
from tests.support.redis import running_redis


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("gateway.part", "torch transformers triton"),
        ("pillion", "torch transformers numpy tokenizers starlette redis"),
    ],
)
def test_what_an_import_brings(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({unwanted.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_serving_gateway_has_no_torch(tmp_path: pathlib.Path) -> None:
    """Not even once it has prepared its model, tokenized and answered."""
    code = """
import asyncio, pathlib, sys
from tests.support.fake_parts import running_line

async def main():
    async with running_line() as line:
        text = [d.text async for d in line.client.chat([{"role": "user", "content": "x"}])]
        assert "".join(text) == "The answer.", text

asyncio.run(main())
print(*({"torch", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"split_policy": "sometimes"}, "split policy 'sometimes'"),
        ({"chunk_size": 24, "block_size": 16}, "--chunk-size 24 is no multiple of --block-size 16"),
        ({"chunk_size": 0}, "--chunk-size 0"),
        ({"redis_url": ""}, "needs --redis-url"),
    ],
)
async def test_flags_that_cannot_work_are_one_line(tmp_path: pathlib.Path, flags: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await start_gateway(GatewayFlags(**({"redis_url": "unix:///nowhere"} | flags)), prepared=toy_model(tmp_path))


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
async def test_a_taken_port_is_one_line_and_leaves_nothing(tmp_path: pathlib.Path, port: str) -> None:
    with running_redis() as redis, socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"grpc_port": 0, "http_port": 0, port: taken.getsockname()[1]}
        flags = GatewayFlags(redis_url=redis.url, **ports)
        with pytest.raises(ConfigError, match="cannot listen"):
            await start_gateway(flags, prepared=toy_model(tmp_path))


async def test_it_starts_without_redis_and_registers_later(tmp_path: pathlib.Path) -> None:
    from kvstore.index import Registry

    with running_redis() as redis:
        redis.kill()
        flags = GatewayFlags(redis_url=redis.url, grpc_port=0, http_port=0, heartbeat_ms=50)
        part = await start_gateway(flags, prepared=toy_model(tmp_path))
        try:
            redis.start()
            registry = Registry(redis.url, 5000)
            while not (found := await registry.parts()):
                pass
            assert [(p.part_id, p.role, p.address) for p in found] == [(part.part_id, "gateway", part.grpc_address)]
        finally:
            await part.stop()
        assert await registry.parts() == []
        await registry.aclose()
