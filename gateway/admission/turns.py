"""Turns decide which waiting request of a model gets a slot at its workers, and which job gets a free thread (I9).

A request that waits is known by a number: :meth:`ModelTurns.wait` puts a request in line, :meth:`ModelTurns.grant`
names those whose turn has come, :meth:`ModelTurns.leave` frees slots. Requests in the background have their turn only
while nobody else waits, or once they have waited as long as their queue order says.

The order is fair between tenants by tokens, and the queue order within a tenant. Each tenant has a counter: tokens it
was served, over its weight. The next request is of the waiting tenant with the least counter; an answer's tokens count
OUTPUT_COST times those of a prompt. A tenant that was away begins at the counter of the tenant that was served last, so
nobody saves up. This is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024, arXiv 2401.00588), its lift rule as in start-time fair queuing (Goyal et al., 1996).

Between two tenants that wait all the time, tokens over weight differ by no more than what one of them has under way.

A tenant that has nothing at the workers waits for no slot: its first request goes there beyond the slots that others
have, and the workers, which keep the same shares (:mod:`pillion.engine.scheduling.queues`), decide whose place it gets.

Nothing here reads a clock or waits (I9): :mod:`pillion.gateway.admission.admission` passes ``now_s`` and does what is
decided.

Jobs for threads have lines of their own:

    small jobs --fair between tenants, by bytes--.
                                                 |--> threads, of which large jobs never have the last one
    large jobs --fair between tenants, by bytes--'

The threads are few and all tenants share them. So a tenant that waits goes before the further jobs of a tenant that has
had more, and a small job never waits for megabytes: a large job has to wait until the large jobs before it have ended.
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

# The rate at which answers end is a decaying mean: half of its weight is younger than this.
RATE_HALF_LIFE_S = 10.0
# No waiting time is predicted before this many answers have ended.
MIN_DEPARTURES = 3.0
# A request with a deadline is put in line only if there would be time for an answer that takes so many times as long as
# is expected: predictions of waits and answers are means, and half of those that just fit would come too late.
ANSWER_RESERVE = 1.25

# Streams whose last tokens show that workers go on; each has one per step.
WATCHED_STREAMS = 8
# Times when tokens came: the ones kept, and the shortest silence between two of them that is noticed.
MAX_SIGNS = 256
MIN_SILENCE_S = 0.5


@dataclass(frozen=True, slots=True, order=True)
class WaitingRequest:
    """Holds one waiting request. Requests are sorted by queue order (:func:`pillion.rules.priority.queue_order`), then
    by arrival."""

    queue_order: float
    number: int
    tokens: int = field(compare=False)
    answers: int = field(compare=False)


@dataclass(slots=True)
class _Account:
    weight: float = 1.0
    counter: float = 0.0
    waiting: list[WaitingRequest] = field(default_factory=list)


class FairQueue:
    """Holds all waiting requests of a model in their order. Admission bounds their number."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._floor = 0.0

    def push(self, tenant: Tenant, request: WaitingRequest) -> None:
        """Adds a waiting request of a tenant."""
        account = self._accounts.setdefault(tenant.name, _Account())
        account.weight = tenant.weight
        if not account.waiting:
            account.counter = max(account.counter, self._floor)
        bisect.insort(account.waiting, request)

    def first(self, but: Container[str] = ()) -> WaitingRequest | None:
        """Returns the waiting request whose turn it is, without those of the tenants ``but``, or None."""
        name = self._next(but)
        return None if name is None else self._accounts[name].waiting[0]

    def pop(self, but: Container[str] = ()) -> WaitingRequest:
        """Takes the first request out and charges its prompt to its tenant. Call it only where :meth:`first` named a
        request."""
        name = self._next(but)
        assert name is not None
        account = self._accounts[name]
        self._floor = max(self._floor, account.counter)
        request = account.waiting.pop(0)
        account.counter += request.tokens / account.weight
        return request

    def remove(self, tenant: Tenant, request: WaitingRequest) -> None:
        """Takes out a request that is given up without being served."""
        self._accounts[tenant.name].waiting.remove(request)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Charges tokens that were generated for the tenant."""
        account = self._accounts.get(tenant.name)
        if account is not None:
            account.counter += OUTPUT_COST * tokens / tenant.weight

    def ahead(self, tenant: Tenant, request: WaitingRequest) -> int:
        """Counts answers of waiting requests that would begin before this request if no other came."""
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
        """Returns how many requests of each tenant wait."""
        return {name: len(account.waiting) for name, account in self._accounts.items() if account.waiting}

    def keep(self, names: Collection[str]) -> None:
        """Forgets the counters of tenants that are not among ``names`` and do not wait."""
        self._accounts = {name: one for name, one in self._accounts.items() if name in names or one.waiting}

    def _next(self, but: Container[str]) -> str | None:
        names = [name for name, account in self._accounts.items() if account.waiting and name not in but]
        return min(
            names, key=lambda name: (self._accounts[name].counter, self._accounts[name].waiting[0]), default=None
        )


class DepartureRate:
    """Measures how fast answers end while others wait for their slots, as a decaying mean. The longest gap between two
    ends is left out, since it may have been a pause."""

    def __init__(self) -> None:
        self._departures = self._seconds = 0.0
        # Seconds and departures of the longest gap.
        self._longest = 0.0, 0.0
        self._since_s: float | None = None

    def left(self, answers: int, waiting: bool, now_s: float) -> None:
        """Notes that ``answers`` ended. The time until the next end of an answer counts only while other requests are
        ``waiting``."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            kept = math.pow(0.5, passed_s / RATE_HALF_LIFE_S)
            self._departures = self._departures * kept + answers
            self._seconds = self._seconds * kept + passed_s
            longest_s, ended = self._longest
            self._longest = max((longest_s * kept, ended * kept), (passed_s, float(answers)))
        self._since_s = now_s if waiting else None

    def began(self, now_s: float) -> None:
        """Notes that a request begins to wait, from when on the time until an answer ends counts."""
        if self._since_s is None:
            self._since_s = now_s

    def wait_s(self, ahead: float) -> float:
        """Returns the seconds until a slot is free for a request with ``ahead`` answers before it; 0 if unknown."""
        longest_s, ended = self._longest
        others = self._departures - ended
        # The first gap may have ended with several answers of one request.
        if self._departures < MIN_DEPARTURES or others < 1:
            return 0.0
        return (ahead + 1) * (self._seconds - longest_s) / others


# Workers are given this share of requests beyond their slots, and never fewer than the number below, so that no slot
# stays empty.
SPARE_SLOTS_SHARE = 0.25
MIN_SPARE_SLOTS = 16


def shared_slots(workers: Sequence[ComponentRecord], others_running: Sequence[int]) -> int:
    """Returns how many requests one of several gateways should give to decode workers at once, of which the other
    gateways run ``others_running``: an even share of their slots and some more, with what the others do not use of
    theirs. It is 0 as long as a worker does not report how many slots it has."""
    if not workers or not all(worker.max_step_tokens for worker in workers):
        return 0
    sequences = sum(worker.running_requests + worker.free_seqs for worker in workers)
    slots = sequences + max(MIN_SPARE_SLOTS, int(sequences * SPARE_SLOTS_SHARE))
    even = slots // (len(others_running) + 1)
    return slots - sum(min(even, running) for running in others_running)


class SlotOwner(Protocol):
    """Represents the queue that gave a request its slots, to which they are given back."""

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Frees the slots of a request that had its turn in this queue."""


@dataclass(slots=True, eq=False)
class AdmissionPermit:
    """Describes one request that the gateway has admitted.

    Attributes:
        answers: number of answers that it generates; each counts as a request.
        order: its place in any queue (:func:`pillion.rules.priority.queue_order`); infinite where it waits in none.
        number: it differs from request to request, and grows.
        tokens: number of its prompt's tokens, once it is weighed.
        weight: the prompt's tokens and the log probabilities that it asks of them, which the gateway holds at the most.
        deadline_s: the monotonic time by which its answer is to be whole; None where it may take any time.
        allowed_tokens: the most tokens that each answer may have; 0 where it generates nothing.
        place: its place in its model's line, while it waits there.
        queue: its model's queue, once it has its turn.
        begun_s, beside: when it had its turn, and how many answers had slots then, its own included.
        tokens_before: how many tokens of other prompts were at the workers then whose answers had no token yet.
        first_token_s, last_token_s: return when its first and its last token came; 0.0: none did.
        generated_tokens: those of all of its answers, once it has ended.
        ended_itself: whether its answers came to their own end, not to that of its tokens or its time.
        inside: whether it counts in the gateway's bounds.
        given_up: why it will not have its turn; None where it will, or has had it.
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
    """Holds the requests that have not had their turn and may give way to others, in order: those of each tenant, and
    those that it has in the background apart."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, bool], list[AdmissionPermit]] = {}

    def add(self, permit: AdmissionPermit) -> None:
        """Adds a request that has entered. One without an order never gives way."""
        if permit.order < math.inf:
            line = self._lines.setdefault((permit.tenant.name, permit.tenant.background), [])
            bisect.insort(line, permit, key=_place)

    def remove(self, permit: AdmissionPermit) -> None:
        """Takes out a request whose turn has come, or that has left; one that is not here is ignored."""
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
        """Returns the requests of each tenant, the last one first, by its name and whether they are in the
        background."""
        return {key: reversed(line) for key, line in self._lines.items()}


class ModelTurns:
    """Orders the waiting requests of one model. ``slots`` returns how many answers its workers are given at once; 0
    means any number. ``times`` predicts how long a request takes once it has its turn. Times are the caller's,
    monotonic, in seconds."""

    def __init__(self, slots: Callable[[], int], times: AnswerTimes) -> None:
        self._slots = slots
        self._times = times
        self._departures = DepartureRate()
        self.waiting = FairQueue()
        self.background = FairQueue()
        # These are the requests in line, by number.
        self.permits: dict[int, AdmissionPermit] = {}
        # These requests have had their turn, and had neither ended nor a token when they were last looked at.
        self._prompts: dict[int, AdmissionPermit] = {}
        # Requests that were seen to have tokens and have not ended.
        self._streams: dict[int, AdmissionPermit] = {}
        self._signs_s: deque[float] = deque(maxlen=MAX_SIGNS)
        # These requests have ended since the last prediction, each with what ran then and the time: most requests have
        # no deadline, and nobody asks for one.
        self._ended: deque[tuple[AdmissionPermit, int, float]] = deque(maxlen=MAX_ANSWERS)
        self.running = 0
        # So many of them are of each tenant that has some, without those in the background.
        self._running_of: Counter[str] = Counter()

    def wait(self, permit: AdmissionPermit, now_s: float) -> None:
        """Puts a request in its model's line. Raises Overloaded where the wait and the answer would take longer than
        the deadline leaves."""
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
        """Notes that a request which got no slots at once begins to wait."""
        if not permit.tenant.background:
            self._departures.began(now_s)

    def give_up(self, permit: AdmissionPermit) -> None:
        """Takes a request that still waits out of its line; a request that does not wait is ignored."""
        if self.permits.pop(permit.number, None) is not None and permit.place is not None:
            self._line(permit).remove(permit.tenant, permit.place)
            permit.place = None

    def grant(self, owner: SlotOwner, now_s: float, gone: Callable[[int], bool]) -> list[AdmissionPermit]:
        """Takes out the requests whose turn has come, and returns them; ``owner`` has their slots. A request that is
        ``gone`` gets no slot, and one that can no longer be served in time is given up, so that it takes no place from
        one that can."""
        granted = []
        while (found := self._next(now_s)) is not None:
            line, share, place, but = found
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
        """Frees the slots of a request that had its turn; :meth:`grant`, then :meth:`left` follow."""
        permit.queue, permit.generated_tokens = None, generated_tokens
        self._count(permit, -permit.answers)
        self._note_tokens()
        self._note_sign(permit.last_token_s())
        self._prompts.pop(permit.number, None)
        self._streams.pop(permit.number, None)
        self._line(permit).charge(permit.tenant, generated_tokens)

    def left(self, permit: AdmissionPermit, now_s: float) -> None:
        """Notes that an answer has ended, after others were given its slots."""
        self._departures.left(permit.answers, self._crowded, now_s)
        if permit.allowed_tokens:
            self._ended.append((permit, self.running, now_s))

    def check_integrity(self) -> None:
        """Raises AssertionError where the requests in line are not those of the two queues, each of them once."""
        places = sorted(one.number for line in (self.waiting, self.background) for one in line)
        assert places == sorted(self.permits), f"{places} are in line, of {sorted(self.permits)}"
        assert all(one.place is not None and one.queue is None for one in self.permits.values())
        assert self.running >= self._running_of.total(), f"{self.running} answers run, {self._running_of} of tenants"

    def _late(
        self, permit: AdmissionPermit, deadline_s: float, now_s: float, wait_s: float, reserve: float
    ) -> Overloaded | None:
        """Returns the error of a request that cannot be served in time after a wait of ``wait_s``, if its answer takes
        ``reserve`` times as long as is expected; None where it can."""
        if permit.tenant.background:
            return None
        left_s, answer_s = deadline_s - now_s, self._answer_s(permit, now_s)
        if wait_s + answer_s * reserve < left_s:
            return None
        text = f"the wait would take about {wait_s:.1f} s"
        if answer_s:
            text = f"{text} and the answer {answer_s:.1f} s"
        text = f"{text}, longer than the request's deadline leaves"
        # What the line loses until then is what this request lacks, or all of the line.
        retry_s = max(wait_s, wait_s + answer_s * reserve - left_s)
        return Overloaded(text, max(1, math.ceil(retry_s * 1000)), (QuotaViolation("deadline", text),))

    def _count(self, permit: AdmissionPermit, answers: int) -> None:
        """Counts answers of a request at the workers."""
        self.running += answers
        if not permit.tenant.background:
            self._running_of[permit.tenant.name] += answers
            self._running_of = +self._running_of

    def _answer_s(self, permit: AdmissionPermit, now_s: float) -> float:
        """Returns how long a request will take that has its turn now; 0.0 where nothing is known, where it generates
        nothing, and where it would be alone: then it takes no place from another one, and shows how long an answer
        takes now."""
        while self._ended:
            self._times.ended(_served(*self._ended.popleft()))
        if not permit.allowed_tokens or not self.running:
            return 0.0
        beside = self.running + permit.answers
        before = self._tokens_before()
        return self._times.seconds(permit.tokens, before, beside, permit.allowed_tokens, now_s, self._signs_s)

    def _tokens_before(self) -> int:
        """Returns how many tokens the prompts have that are at the workers and whose answers have no token yet."""
        self._note_tokens()
        return sum(one.tokens for one in self._prompts.values())

    def _note_tokens(self) -> None:
        """Notes the first tokens since the last look, and the last tokens of a few streams."""
        for number, one in list(self._prompts.items()):
            if one.first_token_s():
                self._streams[number] = self._prompts.pop(number)
        for one in itertools.islice(self._streams.values(), WATCHED_STREAMS):
            self._note_sign(one.last_token_s())

    def _note_sign(self, at_s: float) -> None:
        """Notes that a token came then; earlier times than those noted are ignored."""
        signs_s = self._signs_s
        if signs_s and at_s <= signs_s[-1]:
            return
        if len(signs_s) > 1 and at_s - signs_s[-2] < MIN_SILENCE_S:
            signs_s[-1] = at_s
        else:
            signs_s.append(at_s)

    def _line(self, permit: AdmissionPermit) -> FairQueue:
        return self.background if permit.tenant.background else self.waiting

    @property
    def _crowded(self) -> bool:
        """Says whether any request waits that is not in the background."""
        return self.waiting.first() is not None

    def _next(self, now_s: float) -> tuple[FairQueue, float, WaitingRequest, Container[str]] | None:
        """Returns the request whose turn is next, the queue it waits in, the share of the slots that may be in use once
        it has its own, and the tenants whose requests were passed over."""
        hidden, first = self.background.first(), self.waiting.first()
        if hidden is not None and hidden.queue_order <= now_s:
            # This background request has waited as long as its queue order asks, and must not starve.
            found = self.background, 1.0, hidden
        elif first is not None:
            found = self.waiting, 1.0, first
        else:
            return None if hidden is None else (self.background, BACKGROUND_SHARE, hidden, ())
        if not self._fits(self.permits[found[2].number]):
            lone = self.waiting.first(self._running_of)
            if lone is not None:
                return self.waiting, 1.0, lone, self._running_of
        return *found, ()

    def _fits(self, permit: AdmissionPermit, share: float = 1.0) -> bool:
        slots = self._slots()
        if not slots or not self.running or self.running + permit.answers <= int(slots * share):
            return True
        return self._is_first_of_tenant(permit)

    def _is_first_of_tenant(self, permit: AdmissionPermit) -> bool:
        """Says whether the request waits for no slot, because its tenant has nothing at the workers."""
        tenant = permit.tenant
        return bool(tenant.name) and not tenant.background and tenant.name not in self._running_of


def _served(permit: AdmissionPermit, running: int, now_s: float) -> ServedRequest:
    """Describes a request that ended ``now_s``, while ``running`` answers had slots."""
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


# A job of more text than this is large, and may hold its thread for long: so much text takes some 20 ms to tokenize.
SMALL_JOB_BYTES = 64 * 2**10
# In the fair order of jobs, each job costs as much as this many bytes, besides its own.
JOB_BYTES = 1024
RETRY_AFTER_MS = 1000


@dataclass(eq=False, slots=True)
class ThreadJob:
    """Represents a job for a thread. ``abandoned`` says that nobody waits for it any more."""

    tenant: Tenant
    place: WaitingRequest
    large: bool
    abandoned: bool = False


class ThreadTurns:
    """Gives jobs the ``threads``, which are at least two. At most ``most_jobs`` may wait or run, and of these a tenant
    has its share."""

    def __init__(self, threads: int, most_jobs: int) -> None:
        self._threads = threads
        self._most_jobs = most_jobs
        self._numbers = itertools.count()
        self._lines = {large: FairQueue() for large in (False, True)}
        self._waiting: dict[int, ThreadJob] = {}
        # This counts the running jobs, the small and the large ones apart.
        self._running: Counter[bool] = Counter()
        self._jobs_of: Counter[str] = Counter()

    @property
    def jobs(self) -> int:
        """Gives the number of jobs that wait or run."""
        return self._jobs_of.total()

    def wait(self, tenant: Tenant, size_bytes: int) -> ThreadJob:
        """Puts a job in line for a thread. Raises Overloaded."""
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
        """Takes those jobs out of their lines that may run on a thread from now on."""
        granted = []
        while (large := self._next()) is not None:
            job = self._waiting.pop(self._lines[large].pop().number)
            self._running[large] += 1
            granted.append(job)
        return granted

    def end(self, job: ThreadJob) -> None:
        """Frees the thread of a job that has ended, or takes out a job that waits; :meth:`grant` follows."""
        if self._waiting.pop(job.place.number, None) is not None:
            self._lines[job.large].remove(job.tenant, job.place)
        else:
            self._running[job.large] -= 1
        self._jobs_of[job.tenant.name] -= 1
        self._jobs_of = +self._jobs_of

    def keep(self, names: Collection[str]) -> None:
        """Forgets the shares of tenants that are not among ``names`` and do not wait."""
        for line in self._lines.values():
            line.keep(names)

    def _next(self) -> bool | None:
        """Returns whether the next job is a large one; None where no thread is free for any job."""
        if self._running.total() >= self._threads:
            return None
        small, large = (self._lines[size].first() is not None for size in (False, True))
        large = large and self._running[True] < self._threads - 1
        if large and (not small or not self._running[True]):
            return True
        return False if small else None
