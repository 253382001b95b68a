"""Schedule of a batch's lines: which one runs or is retried next, when and how the batch ends. Sans-IO (I9).

    validating --errors--> failed                 cancelling --nothing runs--> cancelled
        '--> in_progress --all lines done--> finalizing --> completed
                |--expires_at has passed, nothing runs--> expired
                '--its tenant is gone, nothing runs--> failed

A line gets exactly one result. Times are Unix seconds; those of ``next_line`` and ``is_final`` are monotonic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from pillion.gateway.batches.batch_records import BatchError, BatchRecord

# Retried until the batch ends; 529 is Anthropic's 503.
BUSY_STATUSES = frozenset({408, 429, 503, 529})
# Possibly not the line's fault: FAULT_ATTEMPTS attempts in total.
FAULT_STATUSES = frozenset({500, 502, 504})
FAULT_ATTEMPTS = 3
# Pause after a refused line; doubles with each consecutive one.
BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0


class BatchMachine:
    """State machine of a batch with a valid input.

    Args:
        record: the batch as last stored.
        numbers: line numbers of its requests, ascending.
        done: line numbers that have a result, and whether it is an error.
    """

    def __init__(self, record: BatchRecord, numbers: Sequence[int], done: Iterable[tuple[int, bool]] = ()) -> None:
        results = dict(done)
        self._queue = deque(number for number in numbers if number not in results)
        self._faults: dict[int, int] = {}
        self._refusals = 0
        self._paused_until_s = 0.0
        # Limit on running lines. A refusal cuts it to the number of other running lines, at least 1; each result
        # adds 1 / limit.
        self._max_running = float(len(numbers))
        # Final status and errors of a batch that ends early.
        self._ending: tuple[str, tuple[BatchError, ...]] = ("", ())
        self.running: set[int] = set()
        failed = sum(results.values())
        self.record = msgspec.structs.replace(
            record, total=len(numbers), completed=len(results) - failed, failed=failed
        )

    def begin(self, now_s: float) -> None:
        """Start the batch once its input was validated."""
        if self.record.status == "validating":
            self.record = self.record.with_status("in_progress", now_s)

    def next_line(self, now_s: float) -> int | None:
        """Return the next line to run and count it as running, or None."""
        if (
            self.ending
            or now_s < self._paused_until_s
            or len(self.running) >= int(self._max_running)
            or not self._queue
        ):
            return None
        number = self._queue.popleft()
        self.running.add(number)
        return number

    def is_final(self, number: int, status: int, retry_after_s: float, now_s: float) -> bool:
        """Return whether a reply with this HTTP status is the line's result. If not, the caller requeues the line, and
        the batch pauses."""
        if status in FAULT_STATUSES:
            self._faults[number] = self._faults.get(number, 0) + 1
        elif status not in BUSY_STATUSES:
            return True
        if self._faults.get(number, 0) >= FAULT_ATTEMPTS:
            return True
        self._max_running = max(1.0, min(self._max_running, len(self.running) - 1))
        if now_s >= self._paused_until_s:
            # Refusals during a pause belong to lines sent before it, and do not lengthen it.
            backoff_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(self._refusals, 16))
            self._paused_until_s = now_s + backoff_s
            self._refusals += 1
        self._paused_until_s = max(self._paused_until_s, now_s + retry_after_s)
        return False

    def finished(self, number: int, failed: bool) -> None:
        """Record that a line's result is in the journal."""
        self.running.discard(number)
        self._faults.pop(number, None)
        self._refusals = 0
        self._max_running += 1 / self._max_running
        completed, errors = self.record.completed + (not failed), self.record.failed + failed
        self.record = msgspec.structs.replace(self.record, completed=completed, failed=errors)

    def requeue(self, number: int) -> None:
        """Return a running line without a result to the queue."""
        self.running.discard(number)
        self._queue.appendleft(number)

    def tick(self, now_s: float, *, cancel: bool, tenant_known: bool) -> None:
        """End the batch early if it was cancelled, has expired, or its tenant was removed."""
        if self.ending or self.complete:
            return
        if cancel:
            self._ending = ("cancelled", ())
            self.record = self.record.with_status("cancelling", now_s)
        elif not tenant_known:
            text = "the tenant of the batch is no longer in the file of API keys"
            self._ending = ("failed", (BatchError(code="unknown_tenant", message=text),))
        elif now_s >= self.record.expires_at:
            self._ending = ("expired", ())

    @property
    def ending(self) -> str:
        """Final status of a batch that ends early, else "". While it is set, no line starts."""
        return self._ending[0]

    @property
    def complete(self) -> bool:
        """True if all lines have results."""
        return not self._queue and not self.running

    @property
    def may_finish(self) -> bool:
        """True if no further result can arrive, so that outputs can be written."""
        return not self.running and (not self._queue or bool(self.ending))

    @property
    def queued(self) -> int:
        """Number of waiting lines."""
        return len(self._queue)

    def unserved(self) -> list[int]:
        """Return the numbers of the unanswered lines of an expired batch, for its file of errors."""
        return sorted(self._queue) if self.ending == "expired" else []

    def finalize(self, now_s: float) -> None:
        """Enter ``finalizing``. A batch that ends early keeps its status until its outputs are written."""
        if not self.ending:
            self.record = self.record.with_status("finalizing", now_s)

    def end(self, output_file_id: str | None, error_file_id: str | None, now_s: float) -> None:
        """Enter the final status, with the outputs' ids."""
        status, errors = self._ending
        failed = self.record.failed + len(self.unserved())
        self.record = self.record.with_status(
            status or "completed",
            now_s,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
            errors=errors,
            failed=failed,
        )
