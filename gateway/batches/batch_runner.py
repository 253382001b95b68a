"""Runs batches: claims those that no gateway runs, and sends their lines through the gateway.

    look for a batch --lock--> check its input, read its journal --> lines, in parallel --> outputs --> next look
                                 | bad: failed                        | busy: retried          | disk full: released,
                                                                                                 claimed again
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

# Interval of looking for batches and for reasons to end one; max age of a stored record.
LOOK_MS = 500
# Interval of removing old files and counting the folder's bytes.
SWEEP_MS = 30_000
# Concurrent batches per gateway, and of one tenant.
MAX_BATCHES_AT_ONCE = 64
TENANT_BATCHES_AT_ONCE = 4
# Retry delay of a batch released after an error.
RETRY_DELAY_MS = 10_000
# Threads for the folder, so that a slow disk delays only batches.
DISK_THREADS = 4

EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LineReply:
    """The response to a line: JSON, and when to retry (0: not said)."""

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
    # Why the batch must be released.
    failure: Exception | None = None

    @property
    def tenant(self) -> str:
        return self.machine.record.tenant


@dataclass(eq=False)
class BatchRunner:
    """Runs batches until ``stop``.

    Args:
        serve: serves a line.
        tenant_named: returns a tenant by name, None if it was removed from the keys.
        max_lines: limit on lines that run or wait in the gateway.
    """

    folder: BatchFolder
    _serve: ServeLine
    _tenant_named: Callable[[str], Tenant | None]
    _meters: Meters
    _max_lines: int

    def __post_init__(self) -> None:
        self._disk = ThreadPoolExecutor(DISK_THREADS, "batches")
        self._running: list[RunningBatch] = []
        self._claimed: dict[str, BatchClaim] = {}
        # Ids of finished batches, which are not read again.
        self._over: set[str] = set()
        self._wake = asyncio.Event()
        self._full = False
        self._swept_s = -math.inf
        self._tasks = OwnTasks()
        self._meters.watch(self._readings)

    def start(self) -> None:
        """Start looking for batches and running them."""
        self._tasks.begin(_for_ever(self._look, LOOK_MS / 1000), "batches")
        self._tasks.begin(_for_ever(self._feed, 0.0), "batch lines")

    async def stop(self) -> None:
        """Release all batches; other gateways continue them. Files stay readable until ``close``."""
        await end_tasks(*self._tasks)

    def close(self) -> None:
        """Stop the folder's threads. Idempotent."""
        self._disk.shutdown(wait=False)

    async def on_disk(self, job: Callable[..., T], *arguments: Any) -> T:
        """Run a job of the folder on a thread; raises its exception. The job has ended on return, even if the caller
        was cancelled, because it may use what the caller closes next."""
        work = asyncio.get_running_loop().run_in_executor(self._disk, job, *arguments)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            # Retrieve the exception; asyncio would log it.
            work.exception()
            raise

    async def _look(self) -> None:
        """Claim free batches and remove old files."""
        if time.monotonic() - self._swept_s >= SWEEP_MS / 1000:
            self._swept_s = time.monotonic()
            await self.on_disk(self.folder.sweep, time.time())
            full = await self.on_disk(self.folder.full)
            if full and not self._full:
                log.warning("batches are paused: the folder of --batch-path holds %d bytes", self.folder.max_bytes)
            self._full = full
        for record in await self.on_disk(self._unclaimed):
            mine = sum(one.record.tenant == record.tenant for one in self._claimed.values())
            if len(self._claimed) >= MAX_BATCHES_AT_ONCE or mine >= TENANT_BATCHES_AT_ONCE:
                continue
            held = await self.on_disk(claim, self.folder, record.id)
            if held is not None:
                self._claimed[record.id] = held
                self._tasks.begin(self._run(held), record.id)

    def _unclaimed(self) -> list[BatchRecord]:
        """Return batches that might be claimable, oldest first."""
        ids, found = set(self.folder.batch_ids()), []
        self._over &= ids
        for name in ids - self._over - self._claimed.keys():
            record = self.folder.known_batch(name)
            if record is not None and not record.over:
                found.append(record)
            elif record is not None:
                self._over.add(name)
        return sorted(found, key=lambda one: (one.created_at, one.id))

    async def _run(self, held: BatchClaim) -> None:
        """Run a claimed batch to its end, or release it for a while."""
        pause_s = 0.0
        try:
            machine = await self._judged(held)
            if machine is not None:
                await self._run_lines(held, machine)
                await self._write_outputs(held, machine)
        except (OSError, PillionError) as error:
            log.warning("batch %s is given up for a while: %s", held.record.id, error)
            pause_s = RETRY_DELAY_MS / 1000
        except Exception:
            log.exception("batch %s is given up for a while", held.record.id)
            pause_s = RETRY_DELAY_MS / 1000
        finally:
            held.close()
            try:
                await asyncio.sleep(pause_s)
            finally:
                del self._claimed[held.record.id]

    async def _judged(self, held: BatchClaim) -> BatchMachine | None:
        """Return a machine for a batch with a good input; otherwise fail the batch and return None."""
        check = InputCheck(held.record.endpoint, MAX_REQUEST_BYTES)
        try:
            while await self.on_disk(held.judge, check, MAX_REQUEST_BYTES):
                pass
            errors = check.end()
        except FileNotFoundError:
            errors = (BatchError(code="file_not_found", message=f"{held.record.input_file_id} is gone"),)
        if errors:
            await self.on_disk(held.finish, held.record.moved("failed", time.time(), errors=errors))
            return None
        machine = BatchMachine(held.record, list(check.places), await self.on_disk(held.replay))
        machine.begin(time.time())
        return machine

    async def _run_lines(self, held: BatchClaim, machine: BatchMachine) -> None:
        """Run lines until the batch may end. Raises PillionError and OSError if the batch must be released."""
        running, look_s = RunningBatch(held, machine), -math.inf
        self._running.append(running)
        try:
            while not machine.may_finish:
                running.changed.clear()
                if time.monotonic() >= look_s:
                    look_s = time.monotonic() + LOOK_MS / 1000
                    cancel = await self.on_disk(held.cancel_asked)
                    known = self._tenant_named(running.tenant) is not None
                    machine.tick(time.time(), cancel=cancel, tenant_known=known)
                    await self.on_disk(held.save, machine.record)
                if machine.ending:
                    await end_tasks(*running.lines)
                results, running.results = running.results, []
                if results:
                    await self.on_disk(held.append, results)
                for result in results:
                    machine.finished(result.number, result.failed)
                    self._meters.counter(names.BATCH_LINES, "failed" if result.failed else "completed").add()
                if running.failure is not None:
                    raise running.failure
                self._wake.set()
                if not machine.may_finish:
                    await at_most(LOOK_MS / 1000, running.changed.wait())
        finally:
            self._running.remove(running)
            await end_tasks(*running.lines)

    async def _write_outputs(self, held: BatchClaim, machine: BatchMachine) -> None:
        machine.finalize(time.time())
        await self.on_disk(held.save, machine.record)
        left = (
            unserved_line(held.record.id, number, held.line(number).custom_id, *EXPIRED)
            for number in machine.unserved()
        )
        machine.end(*await self.on_disk(held.write_outputs, left), time.time())
        await self.on_disk(held.finish, machine.record)

    async def _feed(self) -> None:
        """Start lines while the gateway has room, then wait for a change."""
        self._wake.clear()
        while self._lines_running() < self._max_lines and not self._full and (found := self._next()) is not None:
            self.start_line(*found)
        await self._wake.wait()

    def start_line(self, running: RunningBatch, number: int, tenant: Tenant) -> None:
        """Start a line. Whenever it ends, it has a result or was requeued."""

        def ended(line: asyncio.Task[bool]) -> None:
            running.lines.discard(line)
            # A cancelled task may never have started its line.
            if line.cancelled() or not line.result():
                running.machine.requeue(number)
            running.changed.set()

        line = asyncio.create_task(self._run_line(running, number, tenant), name="batch line")
        running.lines.add(line)
        line.add_done_callback(ended)

    def _next(self) -> tuple[RunningBatch, int, Tenant] | None:
        """Return the next line: of the tenant with the fewest running lines per weight, and its batch with the
        fewest."""
        of_tenant: Counter[str] = Counter()
        tenants = {one.tenant: self._tenant_named(one.tenant) for one in self._running}
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
        """Serve a line; return whether it got a result, which then waits for the journal."""
        held, machine = running.claim, running.machine
        name = request_id(held.record.id, number)
        try:
            line = await self.on_disk(held.line, number)
            reply = await self._serve(line.url, bytes(line.body), tenant.in_background(), name)
            if machine.is_final(number, reply.status, reply.retry_after_s, time.monotonic()):
                answer = output_line(held.record.id, number, line.custom_id, reply.status, name, reply.body)
                running.results.append(JournalEntry(number, reply.status != 200, answer))
                return True
            self._meters.counter(names.BATCH_LINES, "retried").add()
        except OSError as error:
            # Releases the whole batch, which logs it.
            running.failure = error
        except Exception as error:
            log.exception("line %d of batch %s could not be served", number, held.record.id)
            running.failure = error
        return False

    def _lines_running(self) -> int:
        return sum(len(one.machine.running) for one in self._running)

    def _readings(self) -> Iterable[Reading]:
        yield names.BATCH_LINES_NOW, ("running",), self._lines_running()
        yield names.BATCH_LINES_NOW, ("queued",), sum(one.machine.queued for one in self._running)


async def _for_ever(step: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Repeat a step. Neither a defect in it nor a missing folder may end all batches; an OSError is logged once until
    the step works again."""
    failure = ""
    while True:
        try:
            await step()
            failure = ""
        except OSError as error:
            if str(error) != failure:
                failure = str(error)
                log.warning("no batch is begun, and nothing old is removed from --batch-path: %s", failure)
            await asyncio.sleep(LOOK_MS / 1000)
        except Exception:
            log.exception("batches are disturbed")
            await asyncio.sleep(LOOK_MS / 1000)
        await asyncio.sleep(pause_s)
