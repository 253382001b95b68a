"""Runs a process that reads adapters for its owner (:mod:`pillion.engine.adapters.adapter_process_main`).

Reading and packing are thousands of small operations. On a thread of the owner they would hold the interpreter's lock
again and again while a step or an event loop waits for it. Here a thread of the owner only receives bytes, and holds no
lock while it waits for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pillion import errors
from pillion.engine.adapters.adapter_forms import Bytes, described, line_bytes
from pillion.engine.adapters.adapter_process_main import ANSWER_HEAD
from pillion.errors import Internal, PillionError, Unavailable

_PROGRAM = "pillion.engine.adapters.adapter_process_main"
# A process that was killed has this long to end.
END_TIMEOUT_S = 2.0
# An adapter may take this long to be read and packed, while others leave few cores for that.
READ_TIMEOUT_S = 120.0
# The pipe has this size, because a larger pipe wakes the owner's thread less often. Linux allows this size without
# privileges.
_PIPE_BYTES = 2**20


class AdapterProcess:
    """Runs the process that reads adapters, one job at a time; where it has ended, the next job starts it again.

    Args:
        worker: a dataclass that :func:`pillion.engine.adapters.adapter_forms.described` can describe. Its methods are
            the jobs: their arguments are what JSON can say, and they return a list for JSON, and bytes.
        memory_bytes: the most memory that the process may use; 0 sets no limit.
    """

    def __init__(self, worker: Any, memory_bytes: int = 0) -> None:
        self._lines = (memory_bytes, described(worker))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        # Only one job runs at a time.
        self._turn = threading.Lock()
        # This lock guards the process against calls of close, which any thread may make.
        self._changing = threading.Lock()

    def start(self) -> None:
        """Starts the process, so that the first job need not wait for it. Raises Unavailable."""
        with self._turn:
            self._running()

    def run(self, limit_s: float, method: str, *arguments: Any) -> tuple[list[Any], Bytes]:
        """Does a job when those before it have ended. Waits for them for up to ``limit_s``, and then for the job for up
        to ``limit_s``: the process computes only on cores that others leave idle. The bytes begin at a cache line.

        Raises what the job raises, Unavailable where a time is over or the process has ended meanwhile, Internal for a
        defect.
        """
        if not self._turn.acquire(timeout=limit_s):
            raise Unavailable(f"the process that reads adapters was busy for more than {limit_s:g} s")
        try:
            about, data = self._job(limit_s, [method, *arguments])
        finally:
            self._turn.release()
        if "error" in about:
            raise _error(*about["error"])
        if "failed" in about:
            raise Internal(f"the process that reads adapters failed: {about['failed']}")
        return about["about"], data

    def _job(self, limit_s: float, job: list[Any]) -> tuple[dict[str, Any], Bytes]:
        process = self._running()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            answer = _exchange(process, job)
        except (OSError, ValueError) as error:
            self._end(process)
            reason = f"it took more than {limit_s:g} s" if late.is_set() else str(error)
            raise Unavailable(f"the process that reads adapters has ended: {reason}") from None
        finally:
            timer.cancel()
        if late.is_set():
            # The process was killed, as by its owner's ``close``, after it had answered.
            self._end(process)
        return answer

    def digest(self, folder: Path) -> str:
        """Returns the digest of the adapter in a folder. Raises what :meth:`run` raises, and ConfigError where there is
        no adapter."""
        (digest,), _ = self.run(READ_TIMEOUT_S, "digest", str(folder))
        return str(digest)

    def close(self, *, for_good: bool = True) -> None:
        """Ends the process that reads adapters, and the job that it runs; unless it is ``for_good``, the next job
        starts another process. Any thread may call it. Idempotent."""
        with self._changing:
            self._closed, process = self._closed or for_good, self._process
        if process is not None:
            self._end(process)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._changing:
            if self._closed:
                raise Unavailable("the process that reads adapters is stopping")
            if self._process is not None and self._process.poll() is None:
                return self._process
            command, pipe = [sys.executable, "-m", _PROGRAM], subprocess.PIPE
            # The process computes on one thread only, so libraries must not start more.
            env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            try:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=env)  # noqa: S603
            except OSError as error:
                raise Unavailable(f"the process that reads adapters cannot be started: {error}") from None
            self._process = process
        assert process.stdout is not None
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):
                fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            for line in self._lines:
                _write(process, line)
        except OSError as error:
            self._end(process)
            raise Unavailable(f"the process that reads adapters has ended: {error}") from None
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # The killed process's pipes are closed when nobody refers to them, because another thread may be reading.
        process.kill()
        # A process that waits for a disk ends later; the next start collects its exit status.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)


def _error(name: str, message: str) -> PillionError:
    """Turns an error that the process reports into an exception of this process."""
    kind: type[PillionError] = getattr(errors, name)
    return kind(message)


def _write(process: subprocess.Popen[bytes], line: Any) -> None:
    assert process.stdin is not None
    rest = memoryview(json.dumps(line).encode() + b"\n")
    while rest:
        rest = rest[process.stdin.write(rest) or 0 :]


def _exchange(process: subprocess.Popen[bytes], job: list[Any]) -> tuple[dict[str, Any], Bytes]:
    """Sends a job to the process. Returns the answer's JSON and its bytes."""
    _write(process, job)
    about_bytes, data_bytes = ANSWER_HEAD.unpack(_read(process, ANSWER_HEAD.size).data)
    return json.loads(_read(process, about_bytes).tobytes()), _read(process, data_bytes)


def _read(process: subprocess.Popen[bytes], size_bytes: int) -> Bytes:
    """Returns the next bytes of the process's answer, in memory that begins at a cache line. Raises OSError where the
    process ends before it has sent them."""
    assert process.stdout is not None
    found = line_bytes(size_bytes)
    rest = found.data
    while rest:
        count = process.stdout.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError("its answer is not whole")
        rest = rest[count:]
    return found
