"""Which of the jobs that wait for a thread is next (I9).

    small jobs --fair between tenants, by bytes--.
                                                 |--> threads, of which large jobs never have the last one
    large jobs --fair between tenants, by bytes--'

The threads are few and all tenants share them. So whoever waits goes before the further jobs of a tenant that has had
more, and a small job never waits behind megabytes: a large one has to wait until the large ones before it are through.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from pillion.errors import Overloaded
from pillion.gateway.admission.fairness import FairQueue, WaitingRequest
from pillion.gateway.admission.tenants import Tenant, share_of

# A larger job may hold its thread for long: it takes some 20 ms to tokenize so much.
SMALL_JOB_BYTES = 64 * 2**10
# Each job costs as much as so many bytes, besides its own.
JOB_BYTES = 1024
RETRY_AFTER_MS = 1000


@dataclass(eq=False, slots=True)
class ThreadJob:
    """A job. ``abandoned``: nobody waits for it any more."""

    tenant: Tenant
    place: WaitingRequest
    large: bool
    abandoned: bool = False


class ThreadTurns:
    """Gives out so many ``threads``, of which there are at least two. ``most_jobs`` may wait or run, and of these a
    tenant has its share."""

    def __init__(self, threads: int, most_jobs: int) -> None:
        self._threads = threads
        self._most_jobs = most_jobs
        self._numbers = itertools.count()
        self._lines = {large: FairQueue() for large in (False, True)}
        self._waiting: dict[int, ThreadJob] = {}
        # It counts the running jobs, the small and the large ones apart.
        self._running: Counter[bool] = Counter()
        self._jobs_of: Counter[str] = Counter()

    @property
    def jobs(self) -> int:
        """Jobs that wait or run."""
        return self._jobs_of.total()

    def wait(self, tenant: Tenant, size_bytes: int) -> ThreadJob:
        """Puts a job in line. Raises Overloaded."""
        most = share_of(tenant, self._most_jobs, self.jobs - self._jobs_of[tenant.name])
        if self.jobs >= self._most_jobs or self._jobs_of[tenant.name] >= most:
            raise Overloaded(f"{self._jobs_of[tenant.name]} prompts wait to be tokenized", RETRY_AFTER_MS)
        place = WaitingRequest(0.0, next(self._numbers), JOB_BYTES + size_bytes, 1)
        job = ThreadJob(tenant, place, size_bytes > SMALL_JOB_BYTES)
        self._lines[job.large].push(tenant, place)
        self._waiting[place.number] = job
        self._jobs_of[tenant.name] += 1
        return job

    def grant(self) -> list[ThreadJob]:
        """Takes those out of their lines that have a thread from now on."""
        granted = []
        while (large := self._next()) is not None:
            job = self._waiting.pop(self._lines[large].pop().number)
            self._running[large] += 1
            granted.append(job)
        return granted

    def end(self, job: ThreadJob) -> None:
        """Frees the thread of a job that is through, or takes out one that waits; :meth:`grant` follows."""
        if self._waiting.pop(job.place.number, None) is not None:
            self._lines[job.large].remove(job.tenant, job.place)
        else:
            self._running[job.large] -= 1
        self._jobs_of[job.tenant.name] -= 1
        self._jobs_of = +self._jobs_of

    def keep(self, names: Collection[str]) -> None:
        """Forgets what tenants had that are not among ``names`` and do not wait."""
        for line in self._lines.values():
            line.keep(names)

    def _next(self) -> bool | None:
        """Whether the next job is a large one; None where no thread is free for any."""
        if self._running.total() >= self._threads:
            return None
        small, large = (self._lines[size].first() is not None for size in (False, True))
        large = large and self._running[True] < self._threads - 1
        if large and (not small or not self._running[True]):
            return True
        return False if small else None
