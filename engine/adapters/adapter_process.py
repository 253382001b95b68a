"""Subprocess that reads adapters for its owner (:mod:`pillion.engine.adapters.adapter_process_main`).

Reading and packing are thousands of small operations, which on a thread would contend for the GIL with steps and event
loops. The owner's thread only receives bytes, without the GIL.
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

END_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 120.0
# Linux's max pipe size without privileges; larger pipes wake the owner less often.
_PIPE_BYTES = 2**20


class AdapterProcess:
    """Subprocess that reads adapters, one job at a time; the next job restarts it if it has exited.

    Args:
        worker: a dataclass for :func:`pillion.engine.adapters.adapter_forms.described`. Its methods are the jobs: they
            take JSON values and return a list for JSON, and bytes.
        memory_bytes: memory limit of the process; 0 for none.
    """

    def __init__(self, worker: Any, memory_bytes: int = 0) -> None:
        self._lines = (memory_bytes, described(worker))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._turn = threading.Lock()
        # Guards the process against close, which any thread may call.
        self._changing = threading.Lock()

    def start(self) -> None:
        """Start the process ahead of the first job. Raises Unavailable."""
        with self._turn:
            self._running()

    def run(self, limit_s: float, method: str, *arguments: Any) -> tuple[list[Any], Bytes]:
        """Run a job. Waits up to ``limit_s`` for earlier jobs, then up to ``limit_s`` for this one: the process only
        uses idle cores. The returned bytes are aligned to a cache line.

        Raises what the job raises, Unavailable on timeout or if the process exits, Internal for a bug.
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
            # Killed, e.g. by ``close``, after it had answered.
            self._end(process)
        return answer

    def digest(self, folder: Path) -> str:
        """Return the digest of the adapter in a folder. Raises like :meth:`run`, and ConfigError if there is none."""
        (digest,), _ = self.run(READ_TIMEOUT_S, "digest", str(folder))
        return str(digest)

    def close(self, *, for_good: bool = True) -> None:
        """Kill the process and its job; unless ``for_good``, the next job starts another process. Thread-safe and
        idempotent."""
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
            command, pipe = [sys.executable, "-m", "pillion.engine.adapters.adapter_process_main"], subprocess.PIPE
            # The process is single-threaded; keep libraries from starting threads.
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
        # Do not close the pipes: another thread may be reading. They are closed when unreferenced.
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)


def _error(name: str, message: str) -> PillionError:
    """Return the exception for an error reported by the process."""
    kind: type[PillionError] = getattr(errors, name)
    return kind(message)


def _write(process: subprocess.Popen[bytes], line: Any) -> None:
    assert process.stdin is not None
    rest = memoryview(json.dumps(line).encode() + b"\n")
    while rest:
        rest = rest[process.stdin.write(rest) or 0 :]


def _exchange(process: subprocess.Popen[bytes], job: list[Any]) -> tuple[dict[str, Any], Bytes]:
    """Send a job to the process and return the JSON and bytes of its answer."""
    _write(process, job)
    about_bytes, data_bytes = ANSWER_HEAD.unpack(_read(process, ANSWER_HEAD.size).data)
    return json.loads(_read(process, about_bytes).tobytes()), _read(process, data_bytes)


def _read(process: subprocess.Popen[bytes], size_bytes: int) -> Bytes:
    """Read from the process's answer into memory aligned to a cache line. Raises OSError at a premature end."""
    assert process.stdout is not None
    found = line_bytes(size_bytes)
    rest = found.data
    while rest:
        count = process.stdout.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError("its answer is incomplete")
        rest = rest[count:]
    return found
