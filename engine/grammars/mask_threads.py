"""Computes masks on threads of their own, while the device runs the step that will sample with them.

    place_masks --> MaskJob --put--> queue --> thread: computed --> over
                                                  |                  '--> somebody found it missing: the loop is woken
                                                  '--> is still at it when the next job comes, or the queue is
                                                       long: another thread starts

A job that takes long keeps its thread to itself, so that the jobs after it are late once at most. MAX_MASK_THREADS
bounds the threads. A library's limits end every job in the end; a job that is overdue all the same fails its request.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread, Timer

import numpy as np

from pillion.engine.grammars.compiled_grammar import CompiledGrammar, TokenMatcher
from pillion.kernels.step import UInt32

# A step waits this long for the masks of its rows; a row whose mask is late is not sampled in that step.
MASK_WAIT_MS = 5
# A mask that takes longer than this fails its request.
MASK_LIMIT_MS = 5000
MAX_MASK_THREADS = 8
# Where more masks than this wait for each thread, another thread starts, as long as the machine has a core for it.
MAX_QUEUED_MASKS = 16


class MaskJob:
    """Computes masks of some places of one answer.

    ``grammar`` is the answer's. ``bits`` come with ``known`` masks of forced tokens; of the others the first is that of
    the matcher's place, and one is after each of ``draft_tokens``. ``error`` is set by the computation.

    Attributes:
        bits: uint32 [N, ceil(vocabulary / 32)], valid when ``wait`` has returned True: token t may be chosen at place n
            where bit t % 32 of bits[n, t // 32] is set.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        matcher: TokenMatcher,
        bits: UInt32,
        known: int,
        draft_tokens: Sequence[int],
        passing_ends: Sequence[int],
    ) -> None:
        self.bits = bits
        self.error = ""
        self.grammar = grammar
        self._matcher = matcher
        self._open = bits[known:]
        self._draft_tokens = draft_tokens
        self._passing_ends = passing_ends
        self._began_s = 0.0
        # The gate is held until the masks are there. A lock is made much quicker than an Event, and a step of many
        # streams makes as many of them.
        self._gate = Lock()
        self._gate.acquire()
        self._lock = Lock()
        # A step that needed the masks and did not find them sets this function, which is called when they are there.
        self._wake: Callable[[], None] | None = None
        self._wake_s = 0.0

    def run(self) -> None:
        """Computes the masks of this job, on one of the mask threads."""
        self.grammar.lock()
        self._began_s = time.monotonic()
        try:
            self._matcher.fill(self._open, self._draft_tokens)
            self.error = self._matcher.error()
            self._pass_by_ends()
        except Exception as error:  # noqa: BLE001  (fails this request and no thread)
            self.error = repr(error)
        self.grammar.slow = time.monotonic() - self._began_s > MASK_WAIT_MS / 1000
        self.grammar.unlock()
        self.finish()

    def finish(self) -> None:
        """Notes that all masks of this job are computed."""
        with self._lock:
            self._gate.release()
            wake = self._wake
        if wake is not None:
            wake()

    def wait(self, seconds: float) -> bool:
        """Waits for the masks, at most ``seconds``; returns whether they are there."""
        # A matcher that has met an error allows only the answer's end, whatever its grammar is, so its masks are not
        # used.
        if not self._gate.acquire(timeout=seconds):
            return False
        self._gate.release()
        return not self.error

    def is_over(self, threads: MaskThreads) -> bool:
        """Says whether the masks are there; if not, the step loop is woken when they are, and when they are overdue."""
        if not self._gate.locked():
            return True
        with self._lock:
            self._wake = threads.wake
            if not self._gate.locked():
                return True
        threads.relieve()
        now = time.monotonic()
        if now >= self._wake_s:
            self._wake_s = now + MASK_LIMIT_MS / 1000
            threads.wake_later()
        return False

    def is_slow(self, limit_ms: float = MASK_WAIT_MS) -> bool:
        """Returns whether a thread has worked at the masks for longer than ``limit_ms``."""
        return self._began_s > 0 and time.monotonic() - self._began_s > limit_ms / 1000

    def _pass_by_ends(self) -> None:
        """Removes end tokens that do not end this stream from the masks, except where nothing else can be chosen."""
        for end in self._passing_ends:
            bit = np.uint32(1 << end % 32)
            for row in self._open:
                if row[end // 32] & bit:
                    row[end // 32] ^= bit
                    if not row.any():
                        row[end // 32] = bit


class MaskThreads:
    """Runs the threads of one worker. ``wake``, which may be replaced, wakes its step loop, from any thread."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.wake = wake
        self._queue: SimpleQueue[MaskJob | None] = SimpleQueue()
        self._lock = Lock()
        # The number of cores is read once, because that is a system call.
        self._cores = os.cpu_count() or 1
        self._threads = 0
        # These are the jobs that threads work at, at most one for each grammar, and those that wait for the job of
        # their grammar.
        self._running: dict[CompiledGrammar, MaskJob] = {}
        self._behind: dict[CompiledGrammar, deque[MaskJob]] = {}

    def put(self, job: MaskJob) -> None:
        """Queues a mask job for the threads to compute."""
        self._queue.put(job)
        self.relieve()

    def relieve(self) -> None:
        """Starts one more thread where all of them have been at their jobs for long, or where many jobs wait."""
        with self._lock:
            busy = len(self._running) >= self._threads and all(job.is_slow() for job in self._running.values())
            crowded = self._threads < self._cores and self._queue.qsize() > MAX_QUEUED_MASKS * self._threads
            grow = (busy or crowded) and self._threads < MAX_MASK_THREADS
            self._threads += grow
        if grow:
            Thread(target=self._compute, name="pillion-mask", daemon=True).start()

    def wake_later(self) -> None:
        """Wakes the step loop when a job that was late just now is overdue."""
        timer = Timer(MASK_LIMIT_MS / 1000, self.wake)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Ends the threads, each when its job is over. Idempotent."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _compute(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if job.grammar in self._running:
                    self._behind.setdefault(job.grammar, deque()).append(job)
                    continue
                self._running[job.grammar] = job
            job.run()
            with self._lock:
                del self._running[job.grammar]
                behind = self._behind.get(job.grammar)
                if behind:
                    self._queue.put(behind.popleft())
                else:
                    self._behind.pop(job.grammar, None)
