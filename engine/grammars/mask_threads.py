"""Threads that compute masks while the device runs the step that will sample with them.

    place_masks --> MaskJob --put--> queue --> thread: computed --> finished
                                                  |                  '--> a step missed it: the step loop is woken
                                                  '--> all threads busy for long, or the queue is long:
                                                       another thread starts

A long job occupies a thread of its own, so later jobs are late at most once. There are at most MAX_MASK_THREADS
threads. llguidance's limits end every job eventually; one that takes longer than MASK_LIMIT_MS fails its request.
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

# Max wait of a step for its masks; a row whose mask is late is not sampled in that step.
MASK_WAIT_MS = 5
# Max duration of a mask job, after which its request fails.
MASK_LIMIT_MS = 5000
MAX_MASK_THREADS = 8
# Max waiting masks per thread before another thread starts, up to one per core.
MAX_QUEUED_MASKS = 16


class MaskJob:
    """Computation of masks at consecutive positions of one answer.

    Args:
        known: number of masks at the beginning of ``bits`` that are already written, those of forced tokens. The next
            mask is that of the matcher's position, followed by one after each of ``draft_tokens``.
        passing_ends: EOS tokens that do not end this stream; allowed only if no other token is.

    Attributes:
        bits: uint32 [N, ceil(vocabulary / 32)], valid once ``wait`` has returned True: bit t % 32 of bits[n, t // 32]
            allows token t at position n.
        error: why the computation failed, or "".
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
        # Locked until the masks are computed. Not an Event, which takes much longer to create, once per step and
        # stream.
        self._gate = Lock()
        self._gate.acquire()
        self._lock = Lock()
        # Called when the masks are computed; set by a step that missed them.
        self._wake: Callable[[], None] | None = None
        self._wake_s = 0.0

    def run(self) -> None:
        """Compute the masks, on a mask thread."""
        self.grammar.lock()
        self._began_s = time.monotonic()
        try:
            self._matcher.fill(self._open, self._draft_tokens)
            self.error = self._matcher.error()
            self._clear_passing_ends()
        except Exception as error:  # noqa: BLE001  (fails this request and no thread)
            self.error = repr(error)
        self.grammar.slow = time.monotonic() - self._began_s > MASK_WAIT_MS / 1000
        self.grammar.unlock()
        self.finish()

    def finish(self) -> None:
        with self._lock:
            self._gate.release()
            wake = self._wake
        if wake is not None:
            wake()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the masks, and return whether they are valid."""
        # The masks of a failed job are invalid: a failed matcher allows only the answer's end.
        if not self._gate.acquire(timeout=seconds):
            return False
        self._gate.release()
        return not self.error

    def is_over(self, threads: MaskThreads) -> bool:
        """Return whether the job is finished. If not, the step loop is woken when it is, and after MASK_LIMIT_MS."""
        if not self._gate.locked():
            return True
        with self._lock:
            self._wake = threads.wake
            if not self._gate.locked():
                return True
        threads.add_thread_if_busy()
        now = time.monotonic()
        if now >= self._wake_s:
            self._wake_s = now + MASK_LIMIT_MS / 1000
            threads.wake_later()
        return False

    def is_slow(self, limit_ms: float = MASK_WAIT_MS) -> bool:
        """Return whether the job started more than ``limit_ms`` ago."""
        return self._began_s > 0 and time.monotonic() - self._began_s > limit_ms / 1000

    def _clear_passing_ends(self) -> None:
        """Clear end tokens that do not end this stream in the masks, unless nothing else is allowed."""
        for end in self._passing_ends:
            bit = np.uint32(1 << end % 32)
            for row in self._open:
                if row[end // 32] & bit:
                    row[end // 32] ^= bit
                    if not row.any():
                        row[end // 32] = bit


class MaskThreads:
    """Mask threads of one worker. ``wake``, replaceable, wakes its step loop from any thread."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.wake = wake
        self._queue: SimpleQueue[MaskJob | None] = SimpleQueue()
        self._lock = Lock()
        self._cores = os.cpu_count() or 1
        self._threads = 0
        # By grammar: the running job, and jobs that wait for its end.
        self._running: dict[CompiledGrammar, MaskJob] = {}
        self._waiting: dict[CompiledGrammar, deque[MaskJob]] = {}

    def put(self, job: MaskJob) -> None:
        self._queue.put(job)
        self.add_thread_if_busy()

    def add_thread_if_busy(self) -> None:
        """Start another thread if all have been busy for long, or if many jobs wait."""
        with self._lock:
            busy = len(self._running) >= self._threads and all(job.is_slow() for job in self._running.values())
            crowded = self._threads < self._cores and self._queue.qsize() > MAX_QUEUED_MASKS * self._threads
            grow = (busy or crowded) and self._threads < MAX_MASK_THREADS
            self._threads += grow
        if grow:
            Thread(target=self._compute, name="pillion-mask", daemon=True).start()

    def wake_later(self) -> None:
        """Wake the step loop after MASK_LIMIT_MS, when an unfinished job has to fail its request."""
        timer = Timer(MASK_LIMIT_MS / 1000, self.wake)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Stop the threads, each after its job. Idempotent."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _compute(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if job.grammar in self._running:
                    self._waiting.setdefault(job.grammar, deque()).append(job)
                    continue
                self._running[job.grammar] = job
            job.run()
            with self._lock:
                del self._running[job.grammar]
                waiting = self._waiting.get(job.grammar)
                if waiting:
                    self._queue.put(waiting.popleft())
                else:
                    self._waiting.pop(job.grammar, None)
