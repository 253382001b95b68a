"""A worker's process that reads and packs adapters (:mod:`pillion.engine.adapters.packing_main`).

Reading and packing are thousands of small operations. On a thread of the worker they would hold the interpreter's lock
again and again while a step waits for it. Here a thread of the worker only receives bytes, and waits for them without
the lock.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pillion.engine.adapters.adapter_forms import Bytes, described, line_bytes
from pillion.engine.adapters.adapter_reader import AdapterReader
from pillion.engine.adapters.packing_main import ANSWER_HEAD
from pillion.engine.backends.backend import Backend, PackedAdapter
from pillion.errors import ConfigError, Internal, Unavailable

_PROGRAM = "pillion.engine.adapters.packing_main"
# Longest wait for the end of a process that was killed.
END_TIMEOUT_S = 2.0


class PackingProcess:
    """Packs one adapter at a time; a process that has ended is started again by the next one."""

    def __init__(self, reader: AdapterReader, backend: Backend) -> None:
        self._reader = reader
        self._backend = backend
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        # Any thread may call close; start and load belong to one thread.
        self._changing = threading.Lock()

    def start(self) -> None:
        """Starts the process, so that the first adapter need not wait for it. Raises Unavailable."""
        self._running()

    def load(self, folder: Path, digest: str) -> PackedAdapter:
        """Reads and packs the adapter in a folder. Takes as long as steps leave it cores for; one call at a time.

        Raises ConfigError for an adapter that does not fit and for files of another content than that of ``digest``,
        Unavailable where the process has ended meanwhile, Internal for a defect and for files that cannot be read.
        """
        process = self._running()
        try:
            about, data = _exchange(process, [str(folder), digest])
        except (OSError, ValueError) as error:
            self._end(process)
            raise Unavailable(f"the process that reads adapters has ended: {error}") from None
        if "refused" in about:
            raise ConfigError(about["refused"])
        if "failed" in about:
            raise Internal(f"the process that reads adapters failed: {about['failed']}")
        return self._backend.take_adapter(digest, about["about"], data)

    def close(self, *, for_good: bool = True) -> None:
        """Ends the process, and a load that waits for it; unless it is ``for_good``, the next load starts another one.
        Any thread may call it. Idempotent."""
        with self._changing:
            self._closed = self._closed or for_good
            process = self._process
        if process is not None:
            self._end(process)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._changing:
            if self._closed:
                raise Unavailable("the worker is stopping")
            if self._process is not None and self._process.poll() is None:
                return self._process
            command = [sys.executable, "-m", _PROGRAM]
            pipe = subprocess.PIPE
            try:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)  # noqa: S603  (our own program)
            except OSError as error:
                raise Unavailable(f"the process that reads adapters cannot be started: {error}") from None
            self._process = process
        assert process.stdin is not None
        try:
            _write(process, described(self._reader))
        except OSError as error:
            self._end(process)
            raise Unavailable(f"the process that reads adapters has ended: {error}") from None
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # Its pipes are closed when nobody refers to them: another thread may be reading.
        process.kill()
        # One that waits for a disk ends later; whoever starts the next one asks for its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)


def _write(process: subprocess.Popen[bytes], line: Any) -> None:
    assert process.stdin is not None
    rest = memoryview(json.dumps(line).encode() + b"\n")
    while rest:
        rest = rest[process.stdin.write(rest) or 0 :]


def _exchange(process: subprocess.Popen[bytes], job: list[str]) -> tuple[dict[str, Any], Bytes]:
    """Sends a job. Returns the answer's JSON and its bytes."""
    _write(process, job)
    about_bytes, data_bytes = ANSWER_HEAD.unpack(_read(process, ANSWER_HEAD.size).data)
    return json.loads(_read(process, about_bytes).tobytes()), _read(process, data_bytes)


def _read(process: subprocess.Popen[bytes], size_bytes: int) -> Bytes:
    """The next bytes, in memory that begins at a cache line. Raises OSError where the process ends before."""
    assert process.stdout is not None
    found = line_bytes(size_bytes)
    rest = found.data
    while rest:
        count = process.stdout.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError("its answer is not whole")
        rest = rest[count:]
    return found
