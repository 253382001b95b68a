"""Runs batches: claims those that no gateway runs, and serves their lines through this gateway.

    poll --lock--> check the input, read the journal --> lines, in parallel --> outputs
                     | invalid: failed                    | busy: retried        | disk full: released, claimed again

The next line is chosen by fairness between tenants and by each batch's machine. Lines in flight when the gateway ends
have no result, so they run again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pillion.errors import PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.batches.batch_claim import BatchClaim, claim
from pillion.gateway.batches.batch_folder import BatchFolder
from pillion.gateway.batches.batch_lines import (
    InputCheck,
    JournalEntry,
    output_line,
    request_id,
    unserved_line,
)
from pillion.gateway.batches.batch_machine import BatchMachine
from pillion.gateway.batches.batch_records import BatchError, BatchRecord
from pillion.gateway.request.validation import MAX_REQUEST_BYTES
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters, Reading
from pillion.tasks import OwnTasks, at_most, end_tasks

log = logging.getLogger("pillion.gateway.batches")

# Interval at which batches are looked for, checked for a reason to end them, and their records stored.
POLL_MS = 500
# Interval at which expired files are removed and the folder's bytes are counted.
SWEEP_MS = 30_000
# Max concurrent batches per gateway, and per tenant of it.
MAX_BATCHES_AT_ONCE = 64
TENANT_BATCHES_AT_ONCE = 4
# Retry delay of a batch released after an error.
RETRY_DELAY_MS = 10_000
# Threads for the folder, separate so that a slow disk delays nothing but batches.
DISK_THREADS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LineReply:
    """The response to a line: HTTP status, JSON, and Retry-After (0 without one)."""

    status: int
    body: bytes
    retry_after_s: float


# Serves a line like a client's call: url, body, tenant, request id.
ServeLine = Callable[[str, bytes, Tenant, str], Awaitable[LineReply]]


@dataclass(eq=False, slots=True)
class RunningBatch:
    """A claimed batch whose lines run."""

    claim: BatchClaim
    machine: BatchMachine
    lines: set[asyncio.Task[bool]] = field(default_factory=set)
    # Results not yet in the journal, at most one per running line.
    results: list[JournalEntry] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Error for which the batch must be released.
    failure: Exception | None = None

    @property
    def tenant(self) -> str:
        return self.machine.record.tenant


@dataclass(eq=False)
class BatchRunner:
    """Runs batches until ``stop``.

    Args:
        serve: serves a line.
        find_tenant: returns a tenant by name, None if it was removed from the keys.
        max_lines: limit on lines that run or wait in the gateway.
    """

    folder: BatchFolder
    _serve: ServeLine
    _find_tenant: Callable[[str], Tenant | None]
    _meters: Meters
    _max_lines: int

    def __post_init__(self) -> None:
        self._disk = ThreadPoolExecutor(DISK_THREADS, "batches")
        self._running: list[RunningBatch] = []
        self._claimed: dict[str, BatchClaim] = {}
        # Ids of finished batches, whose records need not be read again.
        self._finished: set[str] = set()
        self._wake = asyncio.Event()
        self._full = False
        self._swept_s = -math.inf
        self._tasks = OwnTasks()
        self._meters.watch(self._readings)

    def start(self) -> None:
        """Start claiming and running batches."""
        self._tasks.begin(_repeat(self._claim_batches, POLL_MS / 1000), "batches")
        self._tasks.begin(_repeat(self._start_lines, 0.0), "batch lines")

    async def stop(self) -> None:
        """Release all batches; other gateways continue them. Files stay readable until ``close``."""
        await end_tasks(*self._tasks)

    def close(self) -> None:
        """Stop the folder's threads. Idempotent."""
        self._disk.shutdown(wait=False)

    async def on_disk(self, job: Callable[..., T], *arguments: Any) -> T:
        """Run a job of the folder on a thread. Raises the job's exception. Returns only once the job has ended, even if
        the caller is cancelled: the job may use files that the caller closes next."""
        work = asyncio.get_running_loop().run_in_executor(self._disk, job, *arguments)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            # Retrieve the exception; asyncio would log it.
            work.exception()
            raise

    async def _claim_batches(self) -> None:
        """Claim batches that no gateway runs, and remove expired files."""
        if time.monotonic() - self._swept_s >= SWEEP_MS / 1000:
            self._swept_s = time.monotonic()
            await self.on_disk(self.folder.sweep, time.time())
            full = await self.on_disk(self.folder.full)
            if full and not self._full:
                log.warning(
                    "batches are paused: the folder of --batch-path has reached its limit of %d bytes",
                    self.folder.max_bytes,
                )
            self._full = full
        for record in await self.on_disk(self._unclaimed):
            of_tenant = sum(one.record.tenant == record.tenant for one in self._claimed.values())
            if len(self._claimed) >= MAX_BATCHES_AT_ONCE or of_tenant >= TENANT_BATCHES_AT_ONCE:
                continue
            batch = await self.on_disk(claim, self.folder, record.id)
            if batch is not None:
                self._claimed[record.id] = batch
                self._tasks.begin(self._run(batch), record.id)

    def _unclaimed(self) -> list[BatchRecord]:
        """Return the records of unfinished batches that this gateway has not claimed, oldest first."""
        ids, records = set(self.folder.batch_ids()), []
        self._finished &= ids
        for name in ids - self._finished - self._claimed.keys():
            record = self.folder.find_batch(name)
            if record is not None and not record.over:
                records.append(record)
            elif record is not None:
                self._finished.add(name)
        return sorted(records, key=lambda one: (one.created_at, one.id))

    async def _run(self, batch: BatchClaim) -> None:
        """Run a claimed batch to its end. After an error, release it, to be claimed again after a pause."""
        pause_s = 0.0
        try:
            machine = await self._prepare(batch)
            if machine is not None:
                await self._run_lines(batch, machine)
                await self._write_outputs(batch, machine)
        except (OSError, PillionError) as error:
            log.warning("batch %s failed and will be retried: %s", batch.record.id, error)
            pause_s = RETRY_DELAY_MS / 1000
        except Exception:
            log.exception("batch %s failed and will be retried", batch.record.id)
            pause_s = RETRY_DELAY_MS / 1000
        finally:
            batch.close()
            try:
                await asyncio.sleep(pause_s)
            finally:
                del self._claimed[batch.record.id]

    async def _prepare(self, batch: BatchClaim) -> BatchMachine | None:
        """Check a batch's input and read its journal; return its machine. If the input is invalid, fail the batch and
        return None."""
        check = InputCheck(batch.record.endpoint, MAX_REQUEST_BYTES)
        try:
            while await self.on_disk(batch.check_input, check, MAX_REQUEST_BYTES):
                pass
            errors = check.end()
        except FileNotFoundError:
            errors = (BatchError(code="file_not_found", message=f"{batch.record.input_file_id} is gone"),)
        if errors:
            await self.on_disk(batch.finish, batch.record.with_status("failed", time.time(), errors=errors))
            return None
        machine = BatchMachine(batch.record, list(check.spans), await self.on_disk(batch.replay))
        machine.begin(time.time())
        return machine

    async def _run_lines(self, batch: BatchClaim, machine: BatchMachine) -> None:
        """Run lines until the batch may end. Raises PillionError and OSError if the batch must be released."""
        running, poll_s = RunningBatch(batch, machine), -math.inf
        self._running.append(running)
        try:
            while not machine.may_finish:
                running.changed.clear()
                if time.monotonic() >= poll_s:
                    poll_s = time.monotonic() + POLL_MS / 1000
                    cancel = await self.on_disk(batch.cancel_requested)
                    known = self._find_tenant(running.tenant) is not None
                    machine.tick(time.time(), cancel=cancel, tenant_known=known)
                    await self.on_disk(batch.save, machine.record)
                if machine.ending:
                    await end_tasks(*running.lines)
                results, running.results = running.results, []
                if results:
                    await self.on_disk(batch.append, results)
                for result in results:
                    machine.finished(result.number, result.failed)
                    self._meters.counter(names.BATCH_LINES, "failed" if result.failed else "completed").add()
                if running.failure is not None:
                    raise running.failure
                self._wake.set()
                if not machine.may_finish:
                    await at_most(POLL_MS / 1000, running.changed.wait())
        finally:
            self._running.remove(running)
            await end_tasks(*running.lines)

    async def _write_outputs(self, batch: BatchClaim, machine: BatchMachine) -> None:
        machine.finalize(time.time())
        await self.on_disk(batch.save, machine.record)
        text = "This request could not be executed before the completion window expired."
        unserved = (
            unserved_line(batch.record.id, number, batch.line(number).custom_id, "batch_expired", text)
            for number in machine.unserved()
        )
        machine.end(*await self.on_disk(batch.write_outputs, unserved), time.time())
        await self.on_disk(batch.finish, machine.record)

    async def _start_lines(self) -> None:
        """Start lines while the gateway has room, then wait for a change."""
        self._wake.clear()
        while self._lines_running() < self._max_lines and not self._full and (line := self._next()) is not None:
            self.start_line(*line)
        await self._wake.wait()

    def start_line(self, running: RunningBatch, number: int, tenant: Tenant) -> None:
        """Start a line. However it ends, it has a result or is requeued."""

        def on_end(line: asyncio.Task[bool]) -> None:
            running.lines.discard(line)
            # A cancelled task may never have started its line.
            if line.cancelled() or not line.result():
                running.machine.requeue(number)
            running.changed.set()

        line = asyncio.create_task(self._run_line(running, number, tenant), name="batch line")
        running.lines.add(line)
        line.add_done_callback(on_end)

    def _next(self) -> tuple[RunningBatch, int, Tenant] | None:
        """Return (batch, line, tenant) to run next: of the tenant with the fewest running lines per weight, and of its
        batch with the fewest running lines; None if no batch has a line to run."""
        of_tenant: Counter[str] = Counter()
        tenants = {one.tenant: self._find_tenant(one.tenant) for one in self._running}
        for one in self._running:
            of_tenant[one.tenant] += len(one.machine.running)

        def load(one: RunningBatch) -> tuple[float, int, int]:
            tenant = tenants[one.tenant]
            weight = 1.0 if tenant is None else tenant.weight
            return of_tenant[one.tenant] / weight, len(one.machine.running), one.machine.record.created_at

        for running in sorted(self._running, key=load):
            tenant = tenants[running.tenant]
            number = None if tenant is None or running.failure else running.machine.next_line(time.monotonic())
            if number is not None and tenant is not None:
                return running, number, tenant
        return None

    async def _run_line(self, running: RunningBatch, number: int, tenant: Tenant) -> bool:
        """Serve a line; return whether it has a result, which is added to ``running.results``."""
        batch, machine = running.claim, running.machine
        name = request_id(batch.record.id, number)
        try:
            line = await self.on_disk(batch.line, number)
            reply = await self._serve(line.url, bytes(line.body), tenant.in_background(), name)
            if machine.is_final(number, reply.status, reply.retry_after_s, time.monotonic()):
                answer = output_line(batch.record.id, number, line.custom_id, reply.status, name, reply.body)
                running.results.append(JournalEntry(number, reply.status != 200, answer))
                return True
            self._meters.counter(names.BATCH_LINES, "retried").add()
        except OSError as error:
            # The whole batch is released for it, which is logged.
            running.failure = error
        except Exception as error:
            log.exception("line %d of batch %s could not be served", number, batch.record.id)
            running.failure = error
        return False

    def _lines_running(self) -> int:
        return sum(len(one.machine.running) for one in self._running)

    def _readings(self) -> Iterable[Reading]:
        yield names.BATCH_LINES_NOW, ("running",), self._lines_running()
        yield names.BATCH_LINES_NOW, ("queued",), sum(one.machine.queued for one in self._running)


async def _repeat(step: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Run a step repeatedly; log and ignore its errors, which must not end all batches. An OSError is logged once,
    until the step works again."""
    failure = ""
    while True:
        try:
            await step()
            failure = ""
        except OSError as error:
            if str(error) != failure:
                failure = str(error)
                log.warning("cannot start batches, nor remove expired files from --batch-path: %s", failure)
            await asyncio.sleep(POLL_MS / 1000)
        except Exception:
            log.exception("a step of running batches failed")
            await asyncio.sleep(POLL_MS / 1000)
        await asyncio.sleep(pause_s)
