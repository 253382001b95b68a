"""Decides for one batch which line runs next, which runs again, and when and how it ends. Sans-IO (I9).

    validating --errors--> failed                 cancelling --nothing runs--> cancelled
        '--> in_progress --all lines done--> finalizing --> completed
                |--its time is over, nothing runs--> expired
                '--its tenant is gone, nothing runs--> failed

A line has one result, and never two: a line that has a result does not run again. Times are Unix times, in seconds;
those of ``next_line`` and ``is_final`` are monotonic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from pillion.gateway.batches.batch_records import BatchError, BatchRecord

# With these statuses a call asks to be sent again, as often as the batch's time allows; Anthropic has 529 for 503.
BUSY_STATUSES = frozenset({408, 429, 503, 529})
# These failures may not be the line's own fault; it runs this often in all.
FAULT_STATUSES = frozenset({500, 502, 504})
FAULT_ATTEMPTS = 3
# A batch waits this long after a line that is to be sent again; the wait doubles with each further such line in a row.
BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0


class BatchMachine:
    """Decides for a batch whose input is good.

    Args:
        record: the batch as it was kept last.
        numbers: the numbers of its lines in the input, rising.
        done: the numbers of lines that have a result, and whether the result is an error.
    """

    def __init__(self, record: BatchRecord, numbers: Sequence[int], done: Iterable[tuple[int, bool]] = ()) -> None:
        results = dict(done)
        # These lines have no result and do not run, in the order in which they will.
        self._left = deque(number for number in numbers if number not in results)
        self._faults: dict[int, int] = {}
        self._refusals = 0
        self._paused_until_s = 0.0
        # At most this many lines may run at once, as far as refusals have shown: the number grows by one when as many
        # lines have had results.
        self._most = float(len(numbers))
        self._ending: tuple[str, tuple[BatchError, ...]] = ("", ())
        self.running: set[int] = set()
        failed = sum(results.values())
        self.record = msgspec.structs.replace(
            record, total=len(numbers), completed=len(results) - failed, failed=failed
        )

    def begin(self, now_s: float) -> None:
        """Notes that the batch's input was found good."""
        if self.record.status == "validating":
            self.record = self.record.moved("in_progress", now_s)

    def next_line(self, now_s: float) -> int | None:
        """Returns the number of a line that is to run now, and counts the line as running; None where no line is."""
        if self.ending or now_s < self._paused_until_s or len(self.running) >= int(self._most) or not self._left:
            return None
        number = self._left.popleft()
        self.running.add(number)
        return number

    def is_final(self, number: int, status: int, retry_after_s: float, now_s: float) -> bool:
        """Says whether the status that a running line got is its result. Otherwise the line is to be given back, and
        the batch pauses."""
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
        """Notes that the result of a running line is in the journal."""
        self.running.discard(number)
        self._faults.pop(number, None)
        self._refusals = 0
        self._most += 1 / self._most
        completed, errors = self.record.completed + (not failed), self.record.failed + failed
        self.record = msgspec.structs.replace(self.record, completed=completed, failed=errors)

    def requeue(self, number: int) -> None:
        """Notes that a running line stopped without a result, so that it runs again."""
        self.running.discard(number)
        self._left.appendleft(number)

    def tick(self, now_s: float, *, cancel: bool, tenant_known: bool) -> None:
        """Ends the batch early where there is a reason to: it was cancelled, its time is over or its tenant is gone."""
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
        """Gives the status in which the batch ends early; "" as long as it goes on. No line runs for it any more."""
        return self._ending[0]

    @property
    def complete(self) -> bool:
        """Says whether all lines have their results."""
        return not self._left and not self.running

    @property
    def may_finish(self) -> bool:
        """Says whether no result can come any more, so that the outputs can be written."""
        return not self.running and (not self._left or bool(self.ending))

    @property
    def queued(self) -> int:
        """Gives the number of lines without a result that do not run."""
        return len(self._left)

    def unserved(self) -> list[int]:
        """Returns the numbers of the lines that an expired batch leaves without an answer; its file of errors names
        them."""
        return sorted(self._left) if self.ending == "expired" else []

    def finalize(self, now_s: float) -> None:
        """Notes that the batch's outputs are being written. A batch that ends early keeps its status until they are
        written."""
        if not self.ending:
            self.record = self.record.moved("finalizing", now_s)

    def end(self, output_file_id: str | None, error_file_id: str | None, now_s: float) -> None:
        """Notes that the batch's outputs, where there are any, are written."""
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
