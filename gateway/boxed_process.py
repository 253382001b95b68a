"""Runs untrusted jobs one at a time in a separate process that can be killed.

no process --job--> idle --request--> busy --answer--> idle
                      ^                 |
                      |                 +-- out of time or memory, or died --> killed, no process
                      +-- the next job starts a fresh one

All clients share the process. A client's disconnect does not kill it at once: the job may go on for the time that a
fresh process takes to start.
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

# Environment variables that the process inherits: some Pythons need them to start, and local time needs the last two.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")
# Grace period of a job whose caller is gone: about the time that a fresh process takes to answer.
ABANDONED_S = 1.0
_WORKER = Path(__file__).with_name("boxed_worker.py")


class BoxFailure(Exception):  # noqa: N818
    """A job without an answer, and why. ``its_own``: the job itself is at fault, and would fail again."""

    def __init__(self, reason: str, its_own: bool) -> None:
        super().__init__(reason)
        self.its_own = its_own


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Limits of a job: CPU time, wall-clock time (with the process's start), and the process's memory.

    At most ``max_waiting`` jobs run or wait; ``what`` names them in messages.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    max_waiting: int
    what: str


class BoxedProcess:
    """A separate process that runs jobs.

    Args:
        handler: a file with a function ``opened(setup)``, which returns the function from a job to its answer.
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
        """Return the answer to a job of about ``size_bytes``. Raises BoxFailure, and Overloaded if too many jobs
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
            # Retrieved here, since there may be no other awaiter.
            running.exception()

    async def _run(self, job: Any, size_bytes: int) -> dict[str, Any]:
        """Run one job in the process, which is killed after a failure."""
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
            # A kill from outside does not show that the job is at fault.
            reason = f"it took more than {self._limits.cpu_s:g} s of computing or too much memory"
            raise BoxFailure(reason, its_own=ended != -signal.SIGKILL) from None
        finally:
            if not answered:
                await self._kill()
        return answer

    async def _start(self) -> Process:
        # -I: installed packages, but not the current folder. Neither descriptors nor keys and addresses in the
        # environment are inherited.
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(_WORKER), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, close_fds=True
        )
        _send(process, msgspec.json.encode(self._setup))
        self._fresh = True
        return process

    async def aclose(self) -> None:
        """End the process and its job; the next job starts another one."""
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
