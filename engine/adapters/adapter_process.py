"""Client of the subprocess that reads adapters (:mod:`pillion.engine.adapters.adapter_process_main`).

Reading and packing are thousands of small operations, which on a thread would contend for the GIL with steps and event
loops. This process's thread only receives bytes, without the GIL.
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


class AdapterProcess:
    """Subprocess that reads adapters, one job at a time; the next job restarts it if it has exited.

    Args:
        worker: a dataclass for :func:`pillion.engine.adapters.adapter_forms.described`. Its methods are the jobs: they
            take JSON values and return a list of JSON values, and bytes.
        memory_bytes: memory limit of the process; 0 for none.
    """

    def __init__(self, worker: Any, memory_bytes: int = 0) -> None:
        self._lines = (memory_bytes, described(worker))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._job_lock = threading.Lock()
        # Guards _process and _closed, because any thread may call close.
        self._state_lock = threading.Lock()

    def start(self) -> None:
        """Start the process before the first job. Raises Unavailable if it cannot be started."""
        with self._job_lock:
            self._start_if_needed()

    def run(self, limit_s: float, method: str, *arguments: Any) -> tuple[list[Any], Bytes]:
        """Run a job. Waits up to ``limit_s`` for earlier jobs, then up to ``limit_s`` for this one: the process only
        uses idle cores. The returned bytes are aligned to a cache line.

        Raises the job's PillionError, Unavailable on timeout or if the process exits, and Internal for other exceptions
        of the job.
        """
        if not self._job_lock.acquire(timeout=limit_s):
            raise Unavailable(f"the process that reads adapters was busy for more than {limit_s:g} s")
        try:
            answer, data = self._run_job(limit_s, [method, *arguments])
        finally:
            self._job_lock.release()
        if "error" in answer:
            raise _error(*answer["error"])
        if "failed" in answer:
            raise Internal(f"the process that reads adapters failed: {answer['failed']}")
        return answer["about"], data

    def _run_job(self, limit_s: float, job: list[Any]) -> tuple[dict[str, Any], Bytes]:
        process = self._start_if_needed()
        timed_out = threading.Event()

        def kill() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            answer = _exchange(process, job)
        except (OSError, ValueError) as error:
            self._end(process)
            reason = f"it took more than {limit_s:g} s" if timed_out.is_set() else str(error)
            raise Unavailable(f"the process that reads adapters has ended: {reason}") from None
        finally:
            timer.cancel()
        if timed_out.is_set():
            # Killed after it had answered.
            self._end(process)
        return answer

    def digest(self, folder: Path) -> str:
        """Return the digest of the adapter in a folder. Raises like :meth:`run`, and ConfigError if there is none."""
        (digest,), _ = self.run(READ_TIMEOUT_S, "digest", str(folder))
        return str(digest)

    def close(self, *, for_good: bool = True) -> None:
        """Kill the process and its job; unless ``for_good``, the next job starts another process. Thread-safe and
        idempotent."""
        with self._state_lock:
            self._closed, process = self._closed or for_good, self._process
        if process is not None:
            self._end(process)

    def _start_if_needed(self) -> subprocess.Popen[bytes]:
        """Return the running process; start one if there is none. Raises Unavailable after :meth:`close`."""
        with self._state_lock:
            if self._closed:
                raise Unavailable("the process that reads adapters is stopping")
            if self._process is not None and self._process.poll() is None:
                return self._process
            command, pipe = [sys.executable, "-m", "pillion.engine.adapters.adapter_process_main"], subprocess.PIPE
            # Keep libraries in the process from starting threads.
            env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            try:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=env)  # noqa: S603
            except OSError as error:
                raise Unavailable(f"the process that reads adapters cannot be started: {error}") from None
            self._process = process
        assert process.stdout is not None
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):
                # Linux's max pipe size without privileges; a larger pipe wakes this process less often.
                fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 2**20)
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
    """Return the next ``size_bytes`` of the answer, in memory aligned to a cache line. Raises OSError at EOF."""
    assert process.stdout is not None
    data = line_bytes(size_bytes)
    rest = data.data
    while rest:
        count = process.stdout.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError("its answer is incomplete")
        rest = rest[count:]
    return data
