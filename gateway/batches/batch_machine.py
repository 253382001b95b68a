"""Decides for one batch which line runs next, which runs again, and when and how it ends. Sans-IO (I9).

    validating --errors--> failed                 cancelling --nothing runs--> cancelled
        '--> in_progress --all lines done--> finalizing --> completed
                |--its time is over, nothing runs--> expired
                '--its tenant is gone, nothing runs--> failed

A line has one result, and never two: what has a result does not run again. Times are Unix times, in seconds; those of
``next_line`` and ``is_final`` are monotonic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from pillion.gateway.batches.batch_records import BatchError, BatchRecord

# Statuses by which a call asks to be sent again, as often as the batch's time allows; Anthropic's has 529 for 503.
BUSY_STATUSES = frozenset({408, 429, 503, 529})
# Failures that may be somebody else's: tried so often in all.
FAULT_STATUSES = frozenset({500, 502, 504})
FAULT_ATTEMPTS = 3
# Wait of a batch after a line that is to be sent again, doubled with each one in a row.
BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0


class BatchMachine:
    """A batch whose input is good.

    Args:
        record: the batch as it was kept last.
        numbers: the numbers of its lines in the input, rising.
        done: the numbers of lines that have a result, and whether that is an error.
    """

    def __init__(self, record: BatchRecord, numbers: Sequence[int], done: Iterable[tuple[int, bool]] = ()) -> None:
        self._numbers = numbers
        self._next = 0
        self._done: set[int] = set()
        self._again: deque[int] = deque()
        self._faults: dict[int, int] = {}
        self._refusals = 0
        self._paused_until_s = 0.0
        # Lines that may run at once, as far as refusals have shown: it grows by one with as many results.
        self._most = float(len(numbers))
        self._ending: tuple[str, tuple[BatchError, ...]] = ("", ())
        self.running: set[int] = set()
        self.record = msgspec.structs.replace(record, total=len(numbers), completed=0, failed=0)
        for number, failed in done:
            self._count(number, failed)

    def begin(self, now_s: float) -> None:
        """The input was found good."""
        if self.record.status == "validating":
            self.record = self.record.moved("in_progress", now_s)

    def next_line(self, now_s: float) -> int | None:
        """The number of a line that is to run now, None where there is none. It is running then."""
        if self.ending or now_s < self._paused_until_s or len(self.running) >= int(self._most):
            return None
        if self._again:
            number = self._again.popleft()
        else:
            while self._next < len(self._numbers) and self._numbers[self._next] in self._done:
                self._next += 1
            if self._next == len(self._numbers):
                return None
            number = self._numbers[self._next]
            self._next += 1
        self.running.add(number)
        return number

    def is_final(self, number: int, status: int, retry_after_s: float, now_s: float) -> bool:
        """Judges the status that a running line got; False: it is to be given back, and the batch pauses."""
        if status in FAULT_STATUSES:
            self._faults[number] = self._faults.get(number, 0) + 1
        elif status not in BUSY_STATUSES:
            return True
        if self._faults.get(number, 0) >= FAULT_ATTEMPTS:
            return True
        self._most = max(1.0, min(self._most, len(self.running) - 1))
        if now_s >= self._paused_until_s:
            # Lines that were sent together and are refused together are one refusal.
            backoff_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(self._refusals, 16))
            self._paused_until_s = now_s + backoff_s
            self._refusals += 1
        self._paused_until_s = max(self._paused_until_s, now_s + retry_after_s)
        return False

    def finished(self, number: int, failed: bool) -> None:
        """The result of a running line is in the journal."""
        self.running.discard(number)
        self._faults.pop(number, None)
        self._refusals = 0
        self._most += 1 / self._most
        self._count(number, failed)

    def give_back(self, number: int) -> None:
        """A running line stopped without a result."""
        self.running.discard(number)
        self._again.append(number)

    def tick(self, now_s: float, *, cancel: bool, tenant_known: bool) -> None:
        """Looks for a reason to end before all lines are done."""
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
        """The status in which it ends early; empty as long as it goes on. No line runs for it any more."""
        return self._ending[0]

    @property
    def complete(self) -> bool:
        """Whether all lines have their results."""
        return len(self._done) == len(self._numbers)

    @property
    def may_finish(self) -> bool:
        """Whether nothing more comes, so that the outputs can be written."""
        return not self.running and (self.complete or bool(self.ending))

    @property
    def queued(self) -> int:
        """Lines without a result that do not run."""
        return len(self._numbers) - len(self._done) - len(self.running)

    def unserved(self) -> list[int]:
        """The lines that an expired batch leaves without an answer, which its errors name."""
        return [number for number in self._numbers if number not in self._done] if self.ending == "expired" else []

    def finalize(self, now_s: float) -> None:
        """The outputs are being written. A batch that ends early keeps its status until they are."""
        if not self.ending:
            self.record = self.record.moved("finalizing", now_s)

    def end(self, output_file_id: str | None, error_file_id: str | None, now_s: float) -> None:
        """The outputs, where there are any, are written."""
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

    def _count(self, number: int, failed: bool) -> None:
        if number in self._done:
            return
        self._done.add(number)
        completed, errors = self.record.completed + (not failed), self.record.failed + failed
        self.record = msgspec.structs.replace(self.record, completed=completed, failed=errors)
