"""Runs untrusted jobs one at a time in a separate process that can be killed.

no process --first job--> busy --answer--> idle --next job--> busy
                            |
                            +-- out of time or memory, or died --> killed: no process

All clients share the process. A client's disconnect does not kill the process at once: the job may run on for about the
time in which a new process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pillion.errors import Overloaded
from pillion.gateway.tokens.tokenizer import LOOP_BYTES
from pillion.tasks import end_tasks

T = TypeVar("T")

# Grace period of a job whose caller is gone: about the time in which a new process answers.
ABANDONED_S = 1.0
_WORKER = Path(__file__).with_name("boxed_worker.py")


class BoxFailure(Exception):  # noqa: N818
    """A job failed. ``its_own`` is True if the job itself is at fault, so that it would fail again."""

    def __init__(self, reason: str, its_own: bool) -> None:
        super().__init__(reason)
        self.its_own = its_own


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Limits of a job: CPU time, wall-clock time including the process's start, and memory of the process.

    At most ``max_waiting`` jobs run or wait; ``what`` completes "MAX_WAITING ..." in the error above it.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    max_waiting: int
    what: str


class BoxedProcess:
    """A separate process that runs jobs one at a time, started on demand.

    Args:
        handler: a Python file with a function ``opened(setup)``, which returns a function from a job to its answer.
        setup: the argument of ``opened``.
    """

    def __init__(self, handler: Path, setup: Mapping[str, Any], limits: BoxLimits) -> None:
        self._setup = {
            "handler": str(handler),
            "own": setup,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
        }
        self._limits = limits
        self._process: Process | None = None
        self._fresh = True
        self._running: asyncio.Task[dict[str, Any]] | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def run(self, job: Any, size_bytes: int) -> dict[str, Any]:
        """Run a job of about ``size_bytes``; return its answer. Raises BoxFailure, and Overloaded if too many jobs
        wait."""
        limits = self._limits
        if self._waiting >= limits.max_waiting:
            raise Overloaded(f"{limits.max_waiting} {limits.what}", retry_after_ms=1000)
        self._waiting += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self._waiting -= 1
            raise
        # A separate task, so that it survives the caller's cancellation, and releases the turn when it ends.
        running = self._running = asyncio.create_task(self._run(job, size_bytes), name="boxed job")
        running.add_done_callback(self._ended)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not self._fresh:
                asyncio.get_running_loop().call_later(ABANDONED_S, running.cancel)
            raise

    def _ended(self, running: asyncio.Task[dict[str, Any]]) -> None:
        self._waiting -= 1
        self._turn.release()
        if not running.cancelled():
            # Retrieve the exception, in case the caller was cancelled.
            running.exception()

    async def _run(self, job: Any, size_bytes: int) -> dict[str, Any]:
        """Run one job, and kill the process if it fails."""
        answered = False
        try:
            async with asyncio.timeout(self._limits.wall_s):
                if self._process is None:
                    self._process = await self._start()
                answer = await _exchange(self._process, job, size_bytes)
            answered, self._fresh = True, False
        except TimeoutError:
            raise BoxFailure(f"it took more than {self._limits.wall_s:g} s", its_own=False) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            assert self._process is not None
            ended = await self._process.wait()
            # SIGKILL comes from outside, e.g. the OOM killer, so the job may not be at fault.
            reason = f"it took more than {self._limits.cpu_s:g} s of computing or too much memory"
            raise BoxFailure(reason, its_own=ended != -signal.SIGKILL) from None
        finally:
            if not answered:
                await self._kill()
        return answer

    async def _start(self) -> Process:
        # -I keeps the current folder off sys.path. The process inherits no descriptors, and of the environment, which
        # may contain keys, only what some Python builds need to start, and the time zone.
        inherited = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")
        env = {name: os.environ[name] for name in inherited if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(_WORKER), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, close_fds=True
        )
        _send(process, msgspec.json.encode(self._setup))
        self._fresh = True
        return process

    async def aclose(self) -> None:
        """End the process and its job; a further job starts a new process."""
        await end_tasks(self._running)
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def _send(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(data).to_bytes(4, "big") + data)


async def _exchange(process: Process, job: Any, size_bytes: int) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    _send(process, await _off_loop(size_bytes, msgspec.json.encode, job))
    await process.stdin.drain()
    head = await process.stdout.readexactly(4)
    answer = await process.stdout.readexactly(int.from_bytes(head, "big"))
    return dict(await _off_loop(len(answer), msgspec.json.decode, answer))


async def _off_loop(size_bytes: int, job: Callable[[Any], T], argument: Any) -> T:
    return job(argument) if size_bytes <= LOOP_BYTES else await asyncio.to_thread(job, argument)
