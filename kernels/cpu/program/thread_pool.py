"""A team of threads that runs programs of kernels. Linux only.

The caller of :meth:`Team.run` is the leader, thread 0. The others are native threads: made by pthread_create, started
in machine code of ours (:mod:`pillion.kernels.cpu.program.thread_pool_code`), so no Python runs in them and they
never wait for the
interpreter's lock; the leader lets go of it during a run. Signals are left to Python's threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pillion.errors import ConfigError, Internal
from pillion.kernels.cpu.language.module import FAULT_CELL, SCRATCH_BYTES
from pillion.kernels.cpu.language.records import STEP, Words
from pillion.kernels.cpu.program import thread_pool_code as team_code
from pillion.kernels.cpu.program.thread_pool_code import COUNTER_STRIDE, ENTRY_WORDS, LINE_BYTES

__all__ = ["ENTRY_WORDS", "MAX_TEAM_THREADS", "Machine", "Team"]

MAX_TEAM_THREADS = 512
# Behind each thread's scratch. Checked mode looks whether it still holds the pattern. It also keeps the scratch of
# threads at different places of the caches' sets.
CANARY_BYTES = 4096
_CANARY_BYTE = 0xC5
_HUGE_PAGE_BYTES = 2**21
_INT64 = ctypes.c_int64
# These tell of a fault in the very thread that they are sent to; blocking them would only lose the message.
_SYNCHRONOUS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


class Machine(Protocol):
    """Compiled kernels: :class:`pillion.kernels.cpu.language.compiler.CompiledKernels`."""

    @property
    def names(self) -> Sequence[str]:
        """Of the kernels; the number that a checked kernel notes is its place here, plus one."""

    @property
    def checked(self) -> bool:
        """Whether accesses are checked."""

    def address(self, name: str) -> int:
        """Of a kernel, a function of the team, or the fault cell."""


class Team:
    """``threads`` threads with scratch memory of their own. One thread calls :meth:`run` at a time.

    Args:
        kernels: kept alive as long as the team.
        threads: 1 to ``MAX_TEAM_THREADS``, the leader counted in.
        affinity: () or one processor's number for each thread. Whichever thread leads is bound when it first
            does; threads that it starts later (torch's, say) begin on its processor.

    Raises:
        ConfigError: not Linux, a bad number of threads, a processor that this process may not use, no more threads.
    """

    def __init__(self, kernels: Machine, threads: int, affinity: Sequence[int] = ()) -> None:
        if not 1 <= threads <= MAX_TEAM_THREADS:
            raise ConfigError(f"a team has 1 to {MAX_TEAM_THREADS} threads, not {threads}")
        if sys.platform != "linux":
            raise ConfigError("the CPU kernels' team of threads runs on Linux alone")
        if affinity and (len(affinity) != threads or not set(affinity) <= os.sched_getaffinity(0)):
            allowed = sorted(os.sched_getaffinity(0))
            raise ConfigError(f"affinity {list(affinity)}: {threads} processors out of {allowed} are needed")
        self.threads = threads
        self._kernels = kernels
        self._leader_cpu, self._leader = {affinity[0]} if affinity else None, 0
        self._native = _Native(kernels, threads, affinity[1:])
        self._run = ctypes.CFUNCTYPE(_INT64, *[_INT64] * 4)(kernels.address(team_code.RUN))
        # Runs at the interpreter's exit too, while the code and the memory of the helpers are still there.
        self._finalizer = weakref.finalize(self, self._native.close)

    def run(self, program: Words, step: Words) -> None:
        """Runs every entry of ``program`` [n, ENTRY_WORDS] whose condition holds, and returns when all have ended.

        An entry: address of the kernel, address of its record, word of ``step`` that must be above 0 for it to run or
        -1, and one word that is not looked at. All that the entries point to must live until this returns.

        Raises:
            Internal: checked mode saw an access outside of its memory; the team is closed or was made before a fork;
                a table of another shape.
        """
        if program.dtype != np.int64 or program.ndim != 2 or program.shape[1] != ENTRY_WORDS:
            raise Internal(f"a program is int64 [n, {ENTRY_WORDS}], not {program.dtype} {program.shape}")
        if step.dtype != np.int64 or step.size < STEP.num_words:
            raise Internal(f"a step is int64 [{STEP.num_words}], not {step.dtype} {step.shape}")
        if not (program.flags.c_contiguous and step.flags.c_contiguous):
            raise Internal("a program and a step have no gaps")
        native = self._native
        with native.lock:
            native.use(len(program))
            if self._leader_cpu and self._leader != threading.get_native_id():
                os.sched_setaffinity(0, self._leader_cpu)
                self._leader = threading.get_native_id()
            self._run(native.team, program.ctypes.data, len(program), step.ctypes.data)
            if self._kernels.checked:
                native.check(self._kernels.names)

    def close(self) -> None:
        """Ends and joins the helpers; harmless when repeated."""
        self._finalizer()


class _Native:
    """The team's memory and helpers."""

    def __init__(self, kernels: Machine, threads: int, affinity: Sequence[int]) -> None:
        self.lock = threading.Lock()
        self._kernels, self._threads = kernels, threads
        self._pid: int | None = os.getpid()
        self._stop = ctypes.CFUNCTYPE(_INT64, *[_INT64] * 4)(kernels.address(team_code.RUN))
        self._memory, self.team = _aligned(team_code.FIRST_THREAD_LINE + threads * LINE_BYTES, LINE_BYTES)
        self._words = self._memory.view(np.int64)
        self._scratch, scratch = _aligned(threads * (SCRATCH_BYTES + CANARY_BYTES), _HUGE_PAGE_BYTES)
        self._canaries = self._scratch.reshape(threads, -1)[:, SCRATCH_BYTES:]
        if kernels.checked:
            self._canaries.fill(_CANARY_BYTE)
            self._fault = np.ctypeslib.as_array(
                ctypes.cast(kernels.address(FAULT_CELL), ctypes.POINTER(_INT64)), shape=(2,)
            )
        self._counters = np.zeros(0, np.uint8)
        self._set(team_code.THREADS, threads)
        self._handles: list[int] = []
        for thread in range(threads):
            line = team_code.FIRST_THREAD_LINE + thread * LINE_BYTES
            self._set(line + team_code.TEAM, self.team)
            self._set(line + team_code.SCRATCH, scratch + thread * (SCRATCH_BYTES + CANARY_BYTES))
        self._start(affinity)

    def use(self, num_entries: int) -> None:
        """Room for the counters of so many entries. Raises Internal where there is no team."""
        if self._pid != os.getpid():
            raise Internal("this team is closed" if self._pid is None else "a team does not live on in a fork")
        if num_entries * COUNTER_STRIDE > self._counters.nbytes:
            self._counters, address = _aligned(2 * num_entries * COUNTER_STRIDE, LINE_BYTES)
            self._set(team_code.COUNTERS, address)

    def check(self, names: Sequence[str]) -> None:
        """After a run of checked kernels. Raises Internal and forgets what it found."""
        number, offset = (int(word) for word in self._fault)
        if number:
            self._fault[:] = 0
            raise Internal(f"kernel {names[number - 1]} strayed to byte {offset} of the memory that it was given")
        broken = np.flatnonzero((self._canaries != _CANARY_BYTE).any(1))
        if broken.size:
            self._canaries.fill(_CANARY_BYTE)
            raise Internal(f"a kernel wrote behind the scratch of thread {broken[0]}")

    def close(self) -> None:
        """Ends and joins the helpers, after a run that is under way."""
        with self.lock:
            ours, self._pid = self._pid == os.getpid(), None
            if not ours:
                return  # Closed before, or the helpers stayed in the process that this one was forked from.
            self._stop(self.team, 0, -1, 0)
            for handle in self._handles:
                _libc().pthread_join(handle, None)

    def _start(self, affinity: Sequence[int]) -> None:
        libc = _libc()
        kept = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _SYNCHRONOUS)
        try:
            for thread in range(1, self._threads):
                handle = ctypes.c_ulong()
                line = self.team + team_code.FIRST_THREAD_LINE + thread * LINE_BYTES
                code = libc.pthread_create(ctypes.byref(handle), None, self._kernels.address(team_code.MAIN), line)
                if code:
                    self.close()
                    raise ConfigError(f"cannot start thread {thread + 1} of {self._threads}: {os.strerror(code)}")
                self._handles.append(handle.value)
                libc.pthread_setname_np(handle, f"pillion-{thread}".encode())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, kept)
        for one, cpu in zip(self._handles, affinity, strict=bool(affinity)):
            mask = np.zeros(max(1024, cpu + 1 + -(cpu + 1) % 64) // 8, np.uint8)
            mask[cpu // 8] = 1 << cpu % 8
            code = libc.pthread_setaffinity_np(one, mask.nbytes, mask.ctypes.data)
            if code:
                self.close()
                raise ConfigError(f"cannot bind a thread to processor {cpu}: {os.strerror(code)}")

    def _set(self, place: int, value: int) -> None:
        self._words[place // 8] = value


def _aligned(size: int, alignment: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Zeroed private memory and its address. It is touched first, and so placed, by the thread that uses it."""
    mapped = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A system without huge pages.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapped, np.uint8)
    skipped = -raw.ctypes.data % alignment
    return raw[skipped : skipped + size], raw.ctypes.data + skipped


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.pthread_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    libc.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
    libc.pthread_setname_np.argtypes = [ctypes.c_ulong, ctypes.c_char_p]
    libc.pthread_setaffinity_np.argtypes = [ctypes.c_ulong, ctypes.c_size_t, ctypes.c_void_p]
    return libc
