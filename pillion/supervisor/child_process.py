"""Runs one child process: sets its command line and environment, reads its output line by line, and ends it within a
limited time.

new -> running -> exited          stop(): SIGTERM, and SIGKILL to its whole process group after the grace
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pillion.cli.flags import env_name, to_argv, without_flags
from pillion.supervisor.lifeline import PARENT_PID_VARIABLE

MAX_LINE_BYTES = 16 * 1024
DRAIN_TIMEOUT_S = 1.0
KILL_TIMEOUT_S = 5.0
# Exit status of a child that something else has reaped; asyncio uses the same.
UNKNOWN_STATUS = 255


def component_argv(role: str, flags: Any) -> tuple[str, ...]:
    """Return the command line of a component, with every flag."""
    # The Redis URL may contain a password, and anyone can read a command line; so the URL is in the environment.
    arguments = to_argv(flags, exclude=("redis_url",))
    arguments.sort(key=lambda word: not word.startswith(("--component-id=", "--node-id=")))
    return (sys.executable, "-m", "pillion", role, *arguments)


def child_environ(environ: Mapping[str, str], redis_url: str) -> dict[str, str]:
    """Return the environment of this supervisor's components: no flags except the Redis URL, and telemetry of libraries
    disabled."""
    return without_flags(environ) | {
        env_name("redis_url"): redis_url,
        PARENT_PID_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Components start programs but never use gRPC in a forked child; its fork handlers would only log that they
        # were skipped.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }


class ForkedProcess:
    """A child of this process that another process has forked. It has the part of asyncio's ``Process`` that
    :class:`ChildProcess` uses, and must be created in the event loop that is to reap it."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._exit_status = self._loop.create_future()
        # The child may already be a zombie; its process id is not reused before it is reaped.
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Return the exit status, negative for a signal. Several tasks may await it."""
        status: int = await asyncio.shield(self._exit_status)
        return status

    def terminate(self) -> None:
        """Send SIGTERM. Raises ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def _reap(self) -> None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            pid, code = self.pid, UNKNOWN_STATUS
        if not pid:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = code
        self._exit_status.set_result(self.returncode)


class ChildProcess:
    """A running or ended child process, created by :meth:`start`."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess, forward: Callable[[str], None]) -> None:
        self._process = process
        self._output = asyncio.create_task(_forward_lines(process.stdout, forward))
        self._reaping: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        forward: Callable[[str], None],
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> ChildProcess:
        """Start a process. ``forward`` gets each line of its standard output and error; ``stdin`` is the descriptor of
        its standard input, by default /dev/null. Raises OSError if the program does not start."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=environ,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C in the terminal must reach the supervisor alone, which stops its components in order.
            start_new_session=True,
        )
        return cls(process, forward)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process itself is running, regardless of its group."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Return the exit status (negative for a signal) after forwarding the output. Several tasks may await it.

        Kills the rest of the child's process group, which could otherwise keep the output open.
        """
        code = await self._process.wait()
        self.kill()
        await asyncio.wait({self._output}, timeout=DRAIN_TIMEOUT_S)
        self._output.cancel()
        if self._reaping is None:
            self._reaping = asyncio.create_task(self._reap_group(), name=f"reap group {self.pid}")
        return code

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace_s``; return when the process and its group have ended."""
        if self._process.returncode is None:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                self._process.terminate()
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        self.kill()
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the whole process group of the child."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def has_exited(self) -> bool:
        """Return True if no process of the child's group is alive."""
        self._reap_adopted()
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    def _reap_adopted(self) -> bool:
        """Reap dead processes of the group that this process has adopted; they would stay zombies as long as it lives.
        Returns True if none is left."""
        try:
            while not self.running and os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        return False

    async def _reap_group(self) -> None:
        """Reap the killed processes of the group, which may take a moment to exit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while not self._reap_adopted():  # noqa: ASYNC110  (there is no event to wait for)
                    await asyncio.sleep(0.02)


async def reader_of(descriptor: int) -> asyncio.StreamReader:
    """Return a reader of the pipe ``descriptor``, which is closed at EOF."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, io.FileIO(descriptor))
    return reader


# A function with the arguments of :meth:`ChildProcess.start`.
Launch = Callable[..., Awaitable[ChildProcess]]


async def _forward_lines(stream: asyncio.StreamReader | None, forward: Callable[[str], None]) -> None:
    """Call ``forward`` with each line of the stream until its end. Lines above MAX_LINE_BYTES are split."""
    assert stream is not None
    partial = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            forward(_text(line))
        if len(partial) >= MAX_LINE_BYTES:
            forward(_text(partial))
            partial = b""
    if partial:
        forward(_text(partial))


def _text(line: bytes) -> str:
    # Keep the text after the last carriage return: a component's progress bar would overwrite other components' lines.
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
