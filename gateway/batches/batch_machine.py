"""Which line of a batch runs or is retried next, and when and how the batch ends. Sans-IO (I9).

    validating --errors--> failed                 cancelling --nothing runs--> cancelled
        '--> in_progress --all lines done--> finalizing --> completed
                |--its time is over, nothing runs--> expired
                '--its tenant is gone, nothing runs--> failed

A line gets exactly one result. Times are Unix seconds; those of ``next_line`` and ``is_final`` are monotonic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from pillion.gateway.batches.batch_records import BatchError, BatchRecord

# Retried for as long as the batch lasts; 529 is Anthropic's 503.
BUSY_STATUSES = frozenset({408, 429, 503, 529})
# Possibly not the line's fault; FAULT_ATTEMPTS attempts in total.
FAULT_STATUSES = frozenset({500, 502, 504})
FAULT_ATTEMPTS = 3
# Pause after a refused line; doubles with each consecutive one.
BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0


class BatchMachine:
    """The schedule of a batch with a good input.

    Args:
        record: the batch as last stored.
        numbers: line numbers of its requests, ascending.
        done: line numbers that have a result, and whether it is an error.
    """

    def __init__(self, record: BatchRecord, numbers: Sequence[int], done: Iterable[tuple[int, bool]] = ()) -> None:
        results = dict(done)
        # Lines waiting to run, in order.
        self._left = deque(number for number in numbers if number not in results)
        self._faults: dict[int, int] = {}
        self._refusals = 0
        self._paused_until_s = 0.0
        # Limit on running lines: reduced by refusals, raised by one after as many results.
        self._most = float(len(numbers))
        self._ending: tuple[str, tuple[BatchError, ...]] = ("", ())
        self.running: set[int] = set()
        failed = sum(results.values())
        self.record = msgspec.structs.replace(
            record, total=len(numbers), completed=len(results) - failed, failed=failed
        )

    def begin(self, now_s: float) -> None:
        """Start the batch after its input was found good."""
        if self.record.status == "validating":
            self.record = self.record.moved("in_progress", now_s)

    def next_line(self, now_s: float) -> int | None:
        """Return the next line to run and count it as running, or None."""
        if self.ending or now_s < self._paused_until_s or len(self.running) >= int(self._most) or not self._left:
            return None
        number = self._left.popleft()
        self.running.add(number)
        return number

    def is_final(self, number: int, status: int, retry_after_s: float, now_s: float) -> bool:
        """Return whether a running line's status is its result. If not, the caller requeues the line, and the batch
        pauses."""
        if status in FAULT_STATUSES:
            self._faults[number] = self._faults.get(number, 0) + 1
        elif status not in BUSY_STATUSES:
            return True
        if self._faults.get(number, 0) >= FAULT_ATTEMPTS:
            return True
        self._most = max(1.0, min(self._most, len(self.running) - 1))
        if now_s >= self._paused_until_s:
            # Lines sent together and refused together count once.
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
        self._most += 1 / self._most
        completed, errors = self.record.completed + (not failed), self.record.failed + failed
        self.record = msgspec.structs.replace(self.record, completed=completed, failed=errors)

    def requeue(self, number: int) -> None:
        """Return a running line without a result to the queue."""
        self.running.discard(number)
        self._left.appendleft(number)

    def tick(self, now_s: float, *, cancel: bool, tenant_known: bool) -> None:
        """End the batch early if it was cancelled, its time is over, or its tenant is gone."""
        if self.ending or self.complete:
            return
        if cancel:
            self._ending = ("cancelled", ())
            self.record = self.record.moved("cancelling", now_s)
        elif not tenant_known:
            text = "the tenant that asked for the batch is not in the file of API keys any more"
            self._ending = ("failed", (BatchError(code="unknown_tenant", message=text),))
        elif now_s >= self.record.expires_at:
            self._ending = ("expired", ())

    @property
    def ending(self) -> str:
        """Final status of a batch that ends early, else "". No further line starts."""
        return self._ending[0]

    @property
    def complete(self) -> bool:
        """True if all lines have results."""
        return not self._left and not self.running

    @property
    def may_finish(self) -> bool:
        """True if no result can arrive any more, so that outputs can be written."""
        return not self.running and (not self._left or bool(self.ending))

    @property
    def queued(self) -> int:
        """Number of waiting lines."""
        return len(self._left)

    def unserved(self) -> list[int]:
        """Return the unanswered lines of an expired batch, for its file of errors."""
        return sorted(self._left) if self.ending == "expired" else []

    def finalize(self, now_s: float) -> None:
        """Enter ``finalizing``. A batch that ends early keeps its status until its outputs are written."""
        if not self.ending:
            self.record = self.record.moved("finalizing", now_s)

    def end(self, output_file_id: str | None, error_file_id: str | None, now_s: float) -> None:
        """Enter the final status, with the outputs' ids."""
        status, errors = self._ending
        failed = self.record.failed + len(self.unserved())
        self.record = self.record.moved(
            status or "completed",
            now_s,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
            errors=errors,
            failed=failed,
        )
