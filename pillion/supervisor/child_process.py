"""One child process: its command line and environment, its output line by line, its end within a bounded time.

new -> running -> exited          stop(): SIGTERM, and SIGKILL to its whole process group after the grace
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pillion.cli.flags import env_name, to_argv, without_flags
from pillion.supervisor.lifeline import PARENT_PID_VARIABLE

MAX_LINE_BYTES = 16 * 1024
# After the exit, output that a stray grandchild still holds open is not waited for longer than this.
DRAIN_TIMEOUT_S = 1.0
KILL_TIMEOUT_S = 5.0
BURY_INTERVAL_MS = 20


def component_argv(role: str, flags: Any) -> tuple[str, ...]:
    """The command line of one component, with every flag in it."""
    # The Redis URL may hold a password, and everybody can read a command line: it goes by environment.
    arguments = to_argv(flags, leave_out=("redis_url",))
    # The name comes first: people search `ps` for it.
    arguments.sort(key=lambda word: not word.startswith(("--component-id=", "--node-id=")))
    return (sys.executable, "-m", "pillion", role, *arguments)


def child_environ(environ: Mapping[str, str], redis_url: str) -> dict[str, str]:
    """The environment of this supervisor's components: no flags but the Redis URL, nothing that phones home."""
    return without_flags(environ) | {
        env_name("redis_url"): redis_url,
        PARENT_PID_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Components start programs, but never use gRPC in a forked child; gRPC's fork handlers only log that they were
        # skipped.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }


class WatchedProcess(Protocol):
    """What is used of asyncio's ``Process``; a forked one has the same (:mod:`pillion.supervisor.fork_server`)."""

    pid: int
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""

    async def wait(self) -> int:
        """The exit status, as soon as it has ended."""

    def terminate(self) -> None:
        """Sends SIGTERM. Raises ProcessLookupError where it has ended."""


class ChildProcess:
    """A running or ended child process. :meth:`start` makes it."""

    def __init__(self, process: WatchedProcess, forward: Callable[[str], None]) -> None:
        self._process = process
        self._output = asyncio.create_task(_forward_lines(process.stdout, forward))
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        forward: Callable[[str], None],
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> ChildProcess:
        """``forward`` gets each line of standard output and error; ``stdin`` is the descriptor of the child's
        standard input, which has nothing to read without it. Raises OSError where the program does not start."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=environ,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C in the terminal is for the supervisor alone, which stops its components in order.
            start_new_session=True,
        )
        return cls(process, forward)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process, its group aside, has not ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit status (negative: the signal), once the output is forwarded. Several tasks may await it.

        What the process started and left behind is killed: it would only hold the output open."""
        code = await self._process.wait()
        self.kill()
        await asyncio.wait({self._output}, timeout=DRAIN_TIMEOUT_S)
        self._output.cancel()
        if self._burial is None:
            self._burial = asyncio.create_task(self._bury_all(), name=f"what {self.pid} left behind")
        return code

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after ``grace_s``; returns when the process and its group are gone."""
        if self._process.returncode is None:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                self._process.terminate()
                await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        await asyncio.wait_for(self.wait(), KILL_TIMEOUT_S)

    def kill(self) -> None:
        """Sends SIGKILL to the whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def gone(self) -> bool:
        """Whether no process of the group lives."""
        self._bury_adopted()
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    def _bury_adopted(self) -> bool:
        """Waits for dead processes of the group which this process has become the parent of, as it does where it
        adopts orphans. They would be zombies as long as it lives. Returns whether none is left."""
        try:
            while not self.running and os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        return False

    async def _bury_all(self) -> None:
        """Waits for those that are dying still: a process that is killed needs a moment for that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while not self._bury_adopted():  # noqa: ASYNC110  (nobody sends an event)
                    await asyncio.sleep(BURY_INTERVAL_MS / 1000)


class Launch(Protocol):
    """How a supervisor starts a process."""

    async def __call__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        forward: Callable[[str], None],
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> ChildProcess:
        """As :meth:`ChildProcess.start`."""


async def _forward_lines(stream: asyncio.StreamReader | None, forward: Callable[[str], None]) -> None:
    assert stream is not None
    kept = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, kept = (kept + data).split(b"\n")
        for line in lines:
            forward(_text(line))
        if len(kept) >= MAX_LINE_BYTES:
            forward(_text(kept))
            kept = b""
    if kept:
        forward(_text(kept))


def _text(line: bytes) -> str:
    # A carriage return would let a component's progress bar overwrite other components' lines.
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
