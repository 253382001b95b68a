"""A pool of threads that runs programs of kernels. Linux only.

    ThreadPool(kernels, threads) --run--> run --run--> ... --close, or the interpreter's exit--> helpers joined

The caller of :meth:`ThreadPool.run` is the leader, thread 0. The other threads, the helpers, are native: pthread_create
starts them in the pool's machine code (:mod:`pillion.kernels.cpu.runtime.thread_pool_code`). No Python runs in a
helper, so it never waits for the GIL; the leader releases it during a run. Helpers block signals.
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

import numpy as np
import numpy.typing as npt

from pillion.errors import ConfigError, Internal
from pillion.host.core_lending_table import LINE_BYTES, CoreShare
from pillion.host.cores import MAX_CPU_THREADS
from pillion.kernels.cpu.language.module import FAULT_CELL, SCRATCH_BYTES
from pillion.kernels.cpu.language.records import STEP, Words
from pillion.kernels.cpu.runtime import thread_pool_code
from pillion.kernels.cpu.runtime.compiler import CompiledKernels
from pillion.kernels.cpu.runtime.thread_pool_code import COUNTER_STRIDE, ENTRY_WORDS

# Bytes after each thread's scratch, which also spread the scratch of threads over the cache sets. In checked mode each
# run verifies that they still contain the canary byte.
CANARY_BYTES = 4096
_CANARY_BYTE = 0xC5
_HUGE_PAGE_BYTES = 2**21
_INT64 = ctypes.c_int64


class ThreadPool:
    """Threads, each with scratch memory, that run programs. A lock admits one leader at a time to :meth:`run`.

    Attributes:
        threads: number of all threads, including those on borrowed cores; also the work items of each kernel.
        borrowed_s: time that the last run saved by borrowed cores: their work, divided by this worker's own cores.

    Args:
        kernels: machine code, kept alive as long as the pool.
        threads: 1 to ``MAX_CPU_THREADS``, including the leader, without those on borrowed cores.
        affinity: () or one processor's number for each thread. A leader is bound in its first run; threads that it
            starts later (torch's, for instance) inherit its processor.
        share: this worker's cores in a lending table. If it borrows, the pool also has a thread for every other core of
            the lending table, which takes part while the core's owner is idle.

    Raises:
        ConfigError: this system is not Linux, ``threads`` is out of range or not the number of this worker's cores on
            the lending table, ``affinity`` names a processor that this process may not use, or the system starts no
            more threads.
    """

    def __init__(
        self, kernels: CompiledKernels, threads: int, affinity: Sequence[int] = (), share: CoreShare | None = None
    ) -> None:
        if not 1 <= threads <= MAX_CPU_THREADS:
            raise ConfigError(f"a thread pool has 1 to {MAX_CPU_THREADS} threads, not {threads}")
        if sys.platform != "linux":
            raise ConfigError("the CPU kernels' thread pool needs Linux")
        if affinity and (len(affinity) != threads or not set(affinity) <= os.sched_getaffinity(0)):
            allowed = sorted(os.sched_getaffinity(0))
            raise ConfigError(f"affinity {list(affinity)}: not {threads} processors of {allowed}")
        lent: list[int] = []
        if share is not None:
            owned = share.lending_table.owned(share.first_core)
            if share.borrows and len(owned) != threads:
                raise ConfigError(f"--cpu-threads {threads}: the core lending table has {len(owned)} for this worker")
            lent = [core for core in range(share.lending_table.cores) if core not in owned and share.borrows]
            if share.lending_table.cores > MAX_CPU_THREADS:
                raise ConfigError(
                    f"the lending table has {share.lending_table.cores} cores; the limit is {MAX_CPU_THREADS}"
                )
        self.threads = threads + len(lent)
        self.borrowed_s = 0.0
        self._kernels = kernels
        self._leader_cpu, self._leader = {affinity[0]} if affinity else None, 0
        self._native = _Native(kernels, threads, affinity[1:], share, lent)
        # The finalizer also runs at interpreter exit, while the helpers' code and memory still exist.
        self._finalizer = weakref.finalize(self, self._native.close)

    def run(self, program: Words, step: Words) -> None:
        """Run every entry of ``program`` [n, ENTRY_WORDS] whose condition holds; return when all have ended.

        An entry is the address of a kernel, the address of its record, the word of ``step`` that must be above 0 for
        the kernel to run or -1, and one unused word. Everything that entries point to must live until the run returns.

        Raises:
            Internal: a checked kernel left its memory, the pool is closed or was created before a fork, or an array has
                another shape or type.
        """
        if program.dtype != np.int64 or program.ndim != 2 or program.shape[1] != ENTRY_WORDS:
            raise Internal(f"a program is int64 [n, {ENTRY_WORDS}], not {program.dtype} {program.shape}")
        if step.dtype != np.int64 or step.size < STEP.num_words:
            raise Internal(f"a step is int64 [{STEP.num_words}], not {step.dtype} {step.shape}")
        if not (program.flags.c_contiguous and step.flags.c_contiguous):
            raise Internal("a program and a step must be contiguous")
        native = self._native
        with native.lock:
            native.reserve_counters(len(program))
            if self._leader_cpu and self._leader != threading.get_native_id():
                os.sched_setaffinity(0, self._leader_cpu)
                self._leader = threading.get_native_id()
            before_ns = native.borrowed_ns()
            native.run(native.address, program.ctypes.data, len(program), step.ctypes.data)
            self.borrowed_s = (native.borrowed_ns() - before_ns) / native.own / 1e9
            if self._kernels.checked:
                native.check()

    def close(self) -> None:
        """Stop and join the helper threads. Idempotent."""
        self._finalizer()


class _Native:
    """Memory and helpers of a pool, separate from the pool so that an unreferenced pool can be finalized."""

    def __init__(
        self,
        kernels: CompiledKernels,
        own: int,
        affinity: Sequence[int],
        share: CoreShare | None,
        lent: Sequence[int],
    ) -> None:
        self.lock = threading.Lock()
        threads = own + len(lent)
        self._kernels, self.own = kernels, own
        # A separate reference: threads use the lending table even if another owner closes it.
        self._lending_table = None if share is None else share.lending_table.hold()
        self._pid: int | None = os.getpid()
        self.run = ctypes.CFUNCTYPE(_INT64, *[_INT64] * 4)(kernels.address(thread_pool_code.RUN))
        # Gates follow the threads' lines: one per owner of borrowed cores, where its borrowers sleep.
        lines = threads + len(lent)
        self._memory, self.address = _aligned(thread_pool_code.FIRST_THREAD_LINE + lines * LINE_BYTES, LINE_BYTES)
        self._words = self._memory.view(np.int64)
        self._scratch, scratch = _aligned(threads * (SCRATCH_BYTES + CANARY_BYTES), _HUGE_PAGE_BYTES)
        self._canaries = self._scratch.reshape(threads, -1)[:, SCRATCH_BYTES:]
        if kernels.checked:
            self._canaries.fill(_CANARY_BYTE)
            self._fault = np.ctypeslib.as_array(
                ctypes.cast(kernels.address(FAULT_CELL), ctypes.POINTER(_INT64)), shape=(2,)
            )
        self._counters = np.zeros(0, np.uint8)
        self._set(thread_pool_code.THREADS, threads)
        self._handles: list[int] = []
        # BORROWED_NS of each thread on a borrowed core.
        first = thread_pool_code.FIRST_THREAD_LINE + own * LINE_BYTES + thread_pool_code.BORROWED_NS
        self._borrowed = self._words[first // 8 :: LINE_BYTES // 8] if lent else self._words[:0]
        for thread in range(threads):
            line = thread_pool_code.FIRST_THREAD_LINE + thread * LINE_BYTES
            self._set(line + thread_pool_code.POOL, self.address)
            self._set(line + thread_pool_code.SCRATCH, scratch + thread * (SCRATCH_BYTES + CANARY_BYTES))
        processors = list(affinity) or [-1] * (own - 1)
        if share is not None:
            lending_table = share.lending_table
            self._set(thread_pool_code.LENDING_TABLE, lending_table.line(share.first_core))
            gates: dict[int, int] = {}
            for thread, core in enumerate(lent, own):
                line, owner = thread_pool_code.FIRST_THREAD_LINE + thread * LINE_BYTES, lending_table.owner(core)
                self._set(line + thread_pool_code.OWNER_LINE, lending_table.line(owner))
                self._set(line + thread_pool_code.CORE_LINE, lending_table.line(core))
                if owner in gates:
                    self._set(line + thread_pool_code.SLEEPS_AT, gates[owner])
                else:
                    first_gate = self.address + thread_pool_code.FIRST_THREAD_LINE + threads * LINE_BYTES
                    gates[owner] = first_gate + len(gates) * LINE_BYTES
                    self._set(line + thread_pool_code.SLEEPS_AT, self.address + thread_pool_code.GATE)
                    self._set(line + thread_pool_code.CALLS, gates[owner])
                processors.append(lending_table.processor(core))
        self._start(processors)

    def reserve_counters(self, num_entries: int) -> None:
        """Allocate the counters of a program of ``num_entries`` entries. Raises Internal in a closed or forked pool."""
        if self._pid != os.getpid():
            raise Internal("this thread pool is closed" if self._pid is None else "thread pools do not survive a fork")
        if num_entries * COUNTER_STRIDE > self._counters.nbytes:
            self._counters, address = _aligned(2 * num_entries * COUNTER_STRIDE, LINE_BYTES)
            self._set(thread_pool_code.COUNTERS, address)

    def borrowed_ns(self) -> int:
        """Return the total kernel time of threads on borrowed cores since the pool was created."""
        return int(self._borrowed.sum())

    def check(self) -> None:
        """Raise Internal if kernels of the last run, in checked mode, left their memory; reset fault cell and
        canaries."""
        address, offset = (int(word) for word in self._fault)
        if address:
            self._fault[:] = 0
            name = self._kernels.name_at(address)
            raise Internal(f"kernel {name} accessed byte {offset} of its memory, out of bounds")
        broken = np.flatnonzero((self._canaries != _CANARY_BYTE).any(1))
        if broken.size:
            self._canaries.fill(_CANARY_BYTE)
            raise Internal(f"a kernel wrote after the scratch of thread {broken[0]}")

    def close(self) -> None:
        """Wait for a run in progress, then stop and join the helpers."""
        with self.lock:
            owned, self._pid = self._pid == os.getpid(), None
            if not owned:
                return  # closed before, or the helpers stayed in the parent process
            self.run(self.address, 0, -1, 0)
            for handle in self._handles:
                _libc().pthread_join(handle, None)
            self._lending_table = None

    def _start(self, processors: Sequence[int]) -> None:
        """Start a helper for each of ``processors``, bound to it unless it is -1."""
        libc, threads = _libc(), 1 + len(processors)
        # Synchronous signals: delivered to the faulting thread, so they must not be blocked.
        previous = signal.pthread_sigmask(
            signal.SIG_BLOCK,
            signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT},
        )
        try:
            for thread in range(1, threads):
                handle = ctypes.c_ulong()
                line = self.address + thread_pool_code.FIRST_THREAD_LINE + thread * LINE_BYTES
                main = thread_pool_code.MAIN if thread < self.own else thread_pool_code.BORROW
                code = libc.pthread_create(ctypes.byref(handle), None, self._kernels.address(main), line)
                if code:
                    self.close()
                    raise ConfigError(f"cannot start thread {thread + 1} of {threads}: {os.strerror(code)}")
                self._handles.append(handle.value)
                libc.pthread_setname_np(handle, f"pillion-{thread}".encode())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        for handle_value, cpu in zip(self._handles, processors, strict=True):
            if cpu < 0:
                continue
            mask = np.zeros(max(1024, cpu + 1 + -(cpu + 1) % 64) // 8, np.uint8)
            mask[cpu // 8] = 1 << cpu % 8
            code = libc.pthread_setaffinity_np(handle_value, mask.nbytes, mask.ctypes.data)
            if code:
                self.close()
                raise ConfigError(f"cannot bind a thread to processor {cpu}: {os.strerror(code)}")

    def _set(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value


def _aligned(size: int, alignment: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Return zeroed private memory, and its address. Pages are untouched, so that NUMA places each near the thread that
    uses it."""
    mapped = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapped, np.uint8)
    first = -raw.ctypes.data % alignment
    return raw[first : first + size], raw.ctypes.data + first


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.pthread_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    libc.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
    libc.pthread_setname_np.argtypes = [ctypes.c_ulong, ctypes.c_char_p]
    libc.pthread_setaffinity_np.argtypes = [ctypes.c_ulong, ctypes.c_size_t, ctypes.c_void_p]
    return libc
