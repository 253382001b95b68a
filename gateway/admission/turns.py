"""Scheduling of a model's waiting requests, and of jobs on threads. Sans-IO (I9).

:meth:`ModelTurns.wait` enqueues a request, :meth:`ModelTurns.grant` grants slots to the next requests, and
:meth:`ModelTurns.free` frees their slots. Background requests are scheduled only while no other requests wait, or once
they have waited for the time in their queue order.

Scheduling is fair between tenants by tokens, and by queue order within a tenant. Each tenant has a counter: tokens
served over its weight. The next request is that of the waiting tenant with the smallest counter; an answer's tokens
count OUTPUT_COST times those of a prompt. The counter of a tenant that was idle is lifted to that of the tenant that
was served last, so that idle time earns no credit. This is the Virtual Token Counter (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024, arXiv 2401.00588), its lift rule as in start-time fair queuing (Goyal et al.,
1996).

Between two tenants that always wait, tokens over weight differ at most by what one of them has in progress.

A tenant without requests at the workers needs no slot: its first request exceeds the slots, and the workers, which
apply the same shares (:mod:`pillion.engine.scheduling.queues`), decide which request it displaces.

:mod:`pillion.gateway.admission.admission` passes ``now_s`` and carries out the decisions.

Jobs for threads have separate queues:

    small jobs --fair between tenants, by bytes--.
                                                 |--> threads, of which large jobs never have the last one
    large jobs --fair between tenants, by bytes--'

All tenants share a few threads. The next job is that of the tenant that was served the fewest bytes, and a small job
never waits for a large one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pillion.errors import Overloaded, QuotaViolation
from pillion.gateway.admission.answer_times import MAX_ANSWERS, AnswerTimes, ServedRequest
from pillion.gateway.admission.tenants import BACKGROUND_SHARE, Tenant, share_of
from pillion.rules.priority import OUTPUT_COST
from pillion.wire.registry import ComponentRecord

# Half-life of the departure rate, and min number of departures to estimate it.
RATE_HALF_LIFE_S = 10.0
MIN_DEPARTURES = 3.0
# Factor on the predicted answer time of a request with a deadline when it is enqueued: half of the answers take longer
# than predicted.
ANSWER_RESERVE = 1.25

# Min length of a recorded silence between two tokens.
MIN_SILENCE_S = 0.5


@dataclass(frozen=True, slots=True, order=True)
class WaitingRequest:
    """A request or job in a queue, sorted by queue order (:func:`pillion.rules.priority.queue_order`), then by
    ``number``, i.e. arrival."""

    queue_order: float
    number: int
    tokens: int = field(compare=False)
    answers: int = field(compare=False)


@dataclass(slots=True)
class _Account:
    """A tenant's weight, its counter of tokens over weight, and its waiting requests, sorted."""

    weight: float = 1.0
    counter: float = 0.0
    waiting: list[WaitingRequest] = field(default_factory=list)


class FairQueue:
    """Waiting requests in the order of the Virtual Token Counter. Admission limits their number."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._floor = 0.0

    def push(self, tenant: Tenant, request: WaitingRequest) -> None:
        """Add a waiting request of a tenant."""
        account = self._accounts.setdefault(tenant.name, _Account())
        account.weight = tenant.weight
        if not account.waiting:
            account.counter = max(account.counter, self._floor)
        bisect.insort(account.waiting, request)

    def first(self, but: Container[str] = ()) -> WaitingRequest | None:
        """Return the next request, ignoring the tenants ``but``; None if there is none."""
        name = self._next(but)
        return None if name is None else self._accounts[name].waiting[0]

    def pop(self, but: Container[str] = ()) -> WaitingRequest:
        """Remove and return the next request, ignoring the tenants ``but``, and charge its prompt to its tenant. There
        must be one."""
        name = self._next(but)
        assert name is not None
        account = self._accounts[name]
        self._floor = max(self._floor, account.counter)
        request = account.waiting.pop(0)
        account.counter += request.tokens / account.weight
        return request

    def remove(self, tenant: Tenant, request: WaitingRequest) -> None:
        """Remove a request without charging it."""
        self._accounts[tenant.name].waiting.remove(request)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Charge generated tokens to a tenant."""
        account = self._accounts.get(tenant.name)
        if account is not None:
            account.counter += OUTPUT_COST * tokens / tenant.weight

    def ahead(self, tenant: Tenant, request: WaitingRequest) -> int:
        """Count the answers of waiting requests that would start before this request if no further ones arrived."""
        own = self._accounts.get(tenant.name, _Account())
        before = [other for other in own.waiting if other < request]
        start = own.counter if own.waiting else max(own.counter, self._floor)
        start += sum(other.tokens for other in before) / tenant.weight
        count = sum(other.answers for other in before)
        for name, account in self._accounts.items():
            at = account.counter
            for other in account.waiting if name != tenant.name else ():
                if at > start:
                    break
                count += other.answers
                at += other.tokens / account.weight
        return count

    def __iter__(self) -> Iterator[WaitingRequest]:
        for account in self._accounts.values():
            yield from account.waiting

    def counts(self) -> dict[str, int]:
        """Return the number of waiting requests per tenant."""
        return {name: len(account.waiting) for name, account in self._accounts.items() if account.waiting}

    def retain(self, names: Collection[str]) -> None:
        """Drop the counters of tenants that are not in ``names``, except those with waiting requests."""
        self._accounts = {name: one for name, one in self._accounts.items() if name in names or one.waiting}

    def _next(self, but: Container[str]) -> str | None:
        names = [name for name, account in self._accounts.items() if account.waiting and name not in but]
        return min(
            names, key=lambda name: (self._accounts[name].counter, self._accounts[name].waiting[0]), default=None
        )


class DepartureRate:
    """Rate at which answers end while requests wait, with exponential decay. The longest interval between two ends is
    left out, since it may have been a pause."""

    def __init__(self) -> None:
        self._departures = self._seconds = 0.0
        self._longest = 0.0, 0.0
        self._since_s: float | None = None

    def left(self, answers: int, waiting: bool, now_s: float) -> None:
        """Record the end of ``answers`` answers. The time until the next end counts only if requests are
        ``waiting``."""
        if self._since_s is not None:
            passed_s = now_s - self._since_s
            decay = math.pow(0.5, passed_s / RATE_HALF_LIFE_S)
            self._departures = self._departures * decay + answers
            self._seconds = self._seconds * decay + passed_s
            longest_s, ended = self._longest
            self._longest = max((longest_s * decay, ended * decay), (passed_s, float(answers)))
        self._since_s = now_s if waiting else None

    def began(self, now_s: float) -> None:
        """Record that a request waits, which starts the clock."""
        if self._since_s is None:
            self._since_s = now_s

    def wait_s(self, ahead: float) -> float:
        """Return the seconds until a slot is free for a request with ``ahead`` answers before it; 0 if unknown."""
        longest_s, ended = self._longest
        others = self._departures - ended
        # Several answers of one request may have ended together after the longest interval.
        if self._departures < MIN_DEPARTURES or others < 1:
            return 0.0
        return (ahead + 1) * (self._seconds - longest_s) / others


# Requests sent to workers beyond their slots, so that no slot stays empty: a share of the slots, and a minimum.
SPARE_SLOTS_SHARE = 0.25
MIN_SPARE_SLOTS = 16


def shared_slots(workers: Sequence[ComponentRecord], others_running: Sequence[int]) -> int:
    """Return a gateway's limit on requests at the decode workers: an even share of their slots and spare ones, plus the
    unused part of the other gateways' shares. ``others_running`` has each other gateway's requests. 0 until all workers
    report their slots."""
    if not workers or not all(worker.max_step_tokens for worker in workers):
        return 0
    sequences = sum(worker.running_requests + worker.free_seqs for worker in workers)
    slots = sequences + max(MIN_SPARE_SLOTS, int(sequences * SPARE_SLOTS_SHARE))
    even = slots // (len(others_running) + 1)
    return slots - sum(min(even, running) for running in others_running)


class SlotOwner(Protocol):
    """A model's queue, which has granted slots to a request."""

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Free the slots of a request."""


@dataclass(slots=True, eq=False)
class AdmissionPermit:
    """An admitted request.

    Attributes:
        answers: number of answers to generate; each counts as a request.
        order: sort key in queues (:func:`pillion.rules.priority.queue_order`); infinite if it never waits.
        number: unique and increasing.
        tokens: prompt tokens, once known.
        weight: prompt tokens plus requested prompt log probabilities, which count against the limits.
        deadline_s: monotonic deadline of the answers, or None.
        allowed_tokens: token limit of each answer; 0 if it generates nothing.
        place: its entry in the model's queue while it waits, else None.
        queue: its model's queue while it has slots, else None.
        begun_s, beside: when it got its slots, and the number of running answers then, its own included.
        tokens_before: tokens of the prompts at the workers then that had no token yet.
        first_token_s, last_token_s: return the times of its first and last token; 0.0 without one.
        generated_tokens: tokens of all of its answers, once ended.
        ended_itself: True if its answers ended by themselves, not at a token or time limit.
        inside: True while it counts against the gateway's limits.
        given_up: the error if it is refused after it was admitted, else None.
    """

    tenant: Tenant
    answers: int
    order: float = math.inf
    number: int = 0
    tokens: int = 0
    weight: int = 0
    deadline_s: float | None = None
    allowed_tokens: int = 0
    place: WaitingRequest | None = None
    queue: SlotOwner | None = None
    begun_s: float = 0.0
    beside: int = 0
    tokens_before: int = 0
    first_token_s: Callable[[], float] = float
    last_token_s: Callable[[], float] = float
    generated_tokens: int = 0
    ended_itself: bool = False
    inside: bool = True
    given_up: Overloaded | None = None


def _place(permit: AdmissionPermit) -> tuple[float, int]:
    return permit.order, permit.number


class YieldingRequests:
    """Requests without slots, which may be preempted: by tenant and background flag, in queue order."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, bool], list[AdmissionPermit]] = {}

    def add(self, permit: AdmissionPermit) -> None:
        """Add a request, unless its order is infinite: then it is never preempted."""
        if permit.order < math.inf:
            line = self._lines.setdefault((permit.tenant.name, permit.tenant.background), [])
            bisect.insort(line, permit, key=_place)

    def remove(self, permit: AdmissionPermit) -> None:
        """Remove a request that got its slots or left. A no-op if it is not here."""
        key = permit.tenant.name, permit.tenant.background
        line = self._lines.get(key, [])
        at = bisect.bisect_left(line, _place(permit), key=_place)
        if at < len(line) and line[at] is permit:
            del line[at]
            if not line:
                del self._lines[key]

    def __iter__(self) -> Iterator[AdmissionPermit]:
        for line in self._lines.values():
            yield from line

    def ends(self) -> dict[tuple[str, bool], Iterator[AdmissionPermit]]:
        """Return iterators over the requests by tenant and background flag, the last request first."""
        return {key: reversed(line) for key, line in self._lines.items()}


class ModelTurns:
    """Scheduler of one model's requests. ``slots`` returns the limit on concurrent answers at its workers, 0 for none;
    ``times`` predicts how long a request runs. Times are monotonic seconds, passed by the caller."""

    def __init__(self, slots: Callable[[], int], times: AnswerTimes) -> None:
        self._slots = slots
        self._times = times
        self._departures = DepartureRate()
        self.waiting = FairQueue()
        self.background = FairQueue()
        self.permits: dict[int, AdmissionPermit] = {}
        # Running requests without a token, and with one, as of the last _note_tokens.
        self._prompts: dict[int, AdmissionPermit] = {}
        self._streams: dict[int, AdmissionPermit] = {}
        self._token_times_s: deque[float] = deque(maxlen=256)
        # Requests that ended since the last prediction, with the number of running answers then and the time. They are
        # evaluated only when a request with a deadline needs a prediction.
        self._ended: deque[tuple[AdmissionPermit, int, float]] = deque(maxlen=MAX_ANSWERS)
        self.running = 0
        self._running_of: Counter[str] = Counter()

    def wait(self, permit: AdmissionPermit, now_s: float) -> None:
        """Enqueue a request. Raises Overloaded if the wait and the answer would exceed its deadline."""
        place = WaitingRequest(permit.order, permit.number, permit.tokens, permit.answers)
        if permit.deadline_s is not None:
            self._check_deadline(permit, permit.deadline_s, place, now_s)
        permit.place = place
        self._line(permit).push(permit.tenant, place)
        self.permits[permit.number] = permit

    def _check_deadline(self, permit: AdmissionPermit, deadline_s: float, place: WaitingRequest, now_s: float) -> None:
        waits = not self._is_first_of_tenant(permit) and (self._crowded or not self._fits(permit))
        wait_s = self._departures.wait_s(self.waiting.ahead(permit.tenant, place)) if waits else 0.0
        late = self._late(permit, deadline_s, now_s, wait_s, ANSWER_RESERVE)
        if late is not None:
            raise late

    def began(self, permit: AdmissionPermit, now_s: float) -> None:
        """Record that a request has to wait."""
        if not permit.tenant.background:
            self._departures.began(now_s)

    def give_up(self, permit: AdmissionPermit) -> None:
        """Remove a request from the queue. A no-op if it does not wait."""
        if self.permits.pop(permit.number, None) is not None:
            assert permit.place is not None
            self._line(permit).remove(permit.tenant, permit.place)
            permit.place = None

    def grant(self, owner: SlotOwner, now_s: float, gone: Callable[[int], bool]) -> list[AdmissionPermit]:
        """Grant slots to waiting requests, in order, while they fit. Return the granted ones, and those removed without
        slots because they would miss their deadline (``given_up`` is set). ``owner`` becomes the ``queue`` of granted
        requests; requests for whose number ``gone`` returns True are dropped."""
        granted = []
        while (candidate := self._next(now_s)) is not None:
            line, share, place, but = candidate
            permit = self.permits[place.number]
            if gone(place.number):
                self.give_up(permit)
                continue
            if not self._fits(permit, share):
                break
            granted.append(permit)
            if permit.deadline_s is not None:
                permit.given_up = self._late(permit, permit.deadline_s, now_s, 0.0, 1.0)
            if permit.given_up is not None:
                self.give_up(permit)
                continue
            line.pop(but)
            del self.permits[place.number]
            self._count(permit, permit.answers)
            permit.place, permit.queue = None, owner
            permit.begun_s, permit.beside, permit.tokens_before = now_s, self.running, self._tokens_before()
            self._prompts[permit.number] = permit
        return granted

    def free(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Free a request's slots. The caller then calls :meth:`grant` and :meth:`left`."""
        permit.queue, permit.generated_tokens = None, generated_tokens
        self._count(permit, -permit.answers)
        self._note_tokens()
        self._record_token_time(permit.last_token_s())
        self._prompts.pop(permit.number, None)
        self._streams.pop(permit.number, None)
        self._line(permit).charge(permit.tenant, generated_tokens)

    def left(self, permit: AdmissionPermit, now_s: float) -> None:
        """Record that an answer has ended, after its slots were granted to others."""
        self._departures.left(permit.answers, self._crowded, now_s)
        if permit.allowed_tokens:
            self._ended.append((permit, self.running, now_s))

    def check_integrity(self) -> None:
        """Raise AssertionError if the waiting requests are not exactly those of the two queues."""
        places = sorted(one.number for line in (self.waiting, self.background) for one in line)
        assert places == sorted(self.permits), f"{places} are in line, of {sorted(self.permits)}"
        assert all(one.place is not None and one.queue is None for one in self.permits.values())
        assert self.running >= self._running_of.total(), f"{self.running} answers run, {self._running_of} of tenants"

    def _late(
        self, permit: AdmissionPermit, deadline_s: float, now_s: float, wait_s: float, reserve: float
    ) -> Overloaded | None:
        """Return the error for a request that would miss its deadline if it waited ``wait_s`` and its answer took
        ``reserve`` times the predicted time; None if it would not."""
        if permit.tenant.background:
            return None
        left_s, answer_s = deadline_s - now_s, self._answer_s(permit, now_s)
        if wait_s + answer_s * reserve < left_s:
            return None
        text = f"the wait would take about {wait_s:.1f} s"
        if answer_s:
            text = f"{text} and the answer {answer_s:.1f} s"
        text = f"{text}, longer than the request's deadline leaves"
        # By then the queue has become shorter by the missing time, or is empty.
        retry_s = max(wait_s, wait_s + answer_s * reserve - left_s)
        return Overloaded(text, max(1, math.ceil(retry_s * 1000)), (QuotaViolation("deadline", text),))

    def _count(self, permit: AdmissionPermit, answers: int) -> None:
        """Add ``answers`` to the number of answers at the workers, in total and of the tenant."""
        self.running += answers
        if not permit.tenant.background:
            self._running_of[permit.tenant.name] += answers
            self._running_of = +self._running_of

    def _answer_s(self, permit: AdmissionPermit, now_s: float) -> float:
        """Predict the seconds of a request that gets its slots now; 0.0 if unknown, if it generates nothing, and if no
        other request runs: then it cannot displace any, and updates the prediction."""
        while self._ended:
            self._times.ended(_served(*self._ended.popleft()))
        if not permit.allowed_tokens or not self.running:
            return 0.0
        beside = self.running + permit.answers
        before = self._tokens_before()
        return self._times.seconds(permit.tokens, before, beside, permit.allowed_tokens, now_s, self._token_times_s)

    def _tokens_before(self) -> int:
        """Return the tokens of the prompts at the workers whose answers have no token yet."""
        self._note_tokens()
        return sum(one.tokens for one in self._prompts.values())

    def _note_tokens(self) -> None:
        """Record the first tokens since the last call, and the last tokens of a few streams."""
        for number, one in list(self._prompts.items()):
            if one.first_token_s():
                self._streams[number] = self._prompts.pop(number)
        for one in itertools.islice(self._streams.values(), 8):
            self._record_token_time(one.last_token_s())

    def _record_token_time(self, at_s: float) -> None:
        """Record the time of a token, unless a later time is recorded."""
        token_times_s = self._token_times_s
        if token_times_s and at_s <= token_times_s[-1]:
            return
        if len(token_times_s) > 1 and at_s - token_times_s[-2] < MIN_SILENCE_S:
            token_times_s[-1] = at_s
        else:
            token_times_s.append(at_s)

    def _line(self, permit: AdmissionPermit) -> FairQueue:
        return self.background if permit.tenant.background else self.waiting

    @property
    def _crowded(self) -> bool:
        """True if a request waits that is not a background request."""
        return self.waiting.first() is not None

    def _next(self, now_s: float) -> tuple[FairQueue, float, WaitingRequest, Container[str]] | None:
        """Return the next request: its queue, the share of the slots that may be used including its own, the request,
        and the tenants that were skipped. None if no request waits."""
        background, first = self.background.first(), self.waiting.first()
        if background is not None and background.queue_order <= now_s:
            # It has waited for the time in its queue order, and must not starve.
            candidate = self.background, 1.0, background
        elif first is not None:
            candidate = self.waiting, 1.0, first
        else:
            return None if background is None else (self.background, BACKGROUND_SHARE, background, ())
        if not self._fits(self.permits[candidate[2].number]):
            # The first request of a tenant without requests at the workers needs no slot.
            unserved = self.waiting.first(self._running_of)
            if unserved is not None:
                return self.waiting, 1.0, unserved, self._running_of
        return *candidate, ()

    def _fits(self, permit: AdmissionPermit, share: float = 1.0) -> bool:
        """Return whether a request can run now, if at most ``share`` of the slots may be used including its own."""
        slots = self._slots()
        if not slots or not self.running or self.running + permit.answers <= int(slots * share):
            return True
        return self._is_first_of_tenant(permit)

    def _is_first_of_tenant(self, permit: AdmissionPermit) -> bool:
        """Return whether a request needs no slot, because its tenant has no request at the workers."""
        tenant = permit.tenant
        return bool(tenant.name) and not tenant.background and tenant.name not in self._running_of


def _served(permit: AdmissionPermit, running: int, now_s: float) -> ServedRequest:
    """Return the record of a request that ended at ``now_s``, with ``running`` other answers at the workers."""
    return ServedRequest(
        permit.tokens,
        permit.tokens_before,
        (permit.beside + running) / 2,
        permit.begun_s,
        permit.first_token_s(),
        permit.last_token_s(),
        now_s,
        -(-permit.generated_tokens // permit.answers),
        permit.ended_itself,
        permit.deadline_s is not None and now_s >= permit.deadline_s,
    )


# Max size of a small job; it takes about 20 ms to tokenize.
SMALL_JOB_BYTES = 64 * 2**10
# Overhead charged per job.
JOB_BYTES = 1024


@dataclass(eq=False, slots=True)
class ThreadJob:
    """A job for a thread. ``abandoned`` is True if its caller was cancelled."""

    tenant: Tenant
    place: WaitingRequest
    large: bool
    abandoned: bool = False


class ThreadTurns:
    """Scheduler of jobs on at least two ``threads``. At most ``max_jobs`` wait or run, and of each tenant its share."""

    def __init__(self, threads: int, max_jobs: int) -> None:
        self._threads = threads
        self._max_jobs = max_jobs
        self._numbers = itertools.count()
        self._lines = {large: FairQueue() for large in (False, True)}
        self._waiting: dict[int, ThreadJob] = {}
        self._running: Counter[bool] = Counter()
        self._jobs_of: Counter[str] = Counter()

    @property
    def jobs(self) -> int:
        """Jobs that wait or run."""
        return self._jobs_of.total()

    def wait(self, tenant: Tenant, size_bytes: int) -> ThreadJob:
        """Enqueue a job. Raises Overloaded."""
        limit = share_of(tenant, self._max_jobs, self.jobs - self._jobs_of[tenant.name])
        if self.jobs >= self._max_jobs or self._jobs_of[tenant.name] >= limit:
            raise Overloaded(f"{self._jobs_of[tenant.name]} prompts wait to be tokenized", retry_after_ms=1000)
        place = WaitingRequest(0.0, next(self._numbers), JOB_BYTES + size_bytes, 1)
        job = ThreadJob(tenant, place, size_bytes > SMALL_JOB_BYTES)
        self._lines[job.large].push(tenant, place)
        self._waiting[place.number] = job
        self._jobs_of[tenant.name] += 1
        return job

    def grant(self) -> list[ThreadJob]:
        """Dequeue the jobs that may run now."""
        granted = []
        while (large := self._next()) is not None:
            job = self._waiting.pop(self._lines[large].pop().number)
            self._running[large] += 1
            granted.append(job)
        return granted

    def end(self, job: ThreadJob) -> None:
        """Free a job's thread, or remove the job if it still waits. The caller then calls :meth:`grant`."""
        if self._waiting.pop(job.place.number, None) is not None:
            self._lines[job.large].remove(job.tenant, job.place)
        else:
            self._running[job.large] -= 1
        self._jobs_of[job.tenant.name] -= 1
        self._jobs_of = +self._jobs_of

    def retain(self, names: Collection[str]) -> None:
        """Drop the counters of tenants that are not in ``names``, except those with waiting requests."""
        for line in self._lines.values():
            line.retain(names)

    def _next(self) -> bool | None:
        """Return whether the next job is a large one; None if no job can run now."""
        if self._running.total() >= self._threads:
            return None
        small, large = (self._lines[size].first() is not None for size in (False, True))
        large = large and self._running[True] < self._threads - 1
        if large and (not small or not self._running[True]):
            return True
        return False if small else None
