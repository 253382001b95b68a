"""Decides how much the gateway takes on at once, and which request is next (I7).

enter: bounds by requests --> weigh: bounds by prompt tokens --> turn: a slot at the workers --> leave
   |                             |                                 | waits, fairly between tenants
   '-- over a bound: Overloaded -'                                 '-- no time left for the wait: Overloaded

Bounds are the gateway's and each tenant's own. Requests that wait are counted by them, so they bound the queues too.

Requests in the background (batches) leave room for all others: they fill at most BACKGROUND_SHARE of any bound and of a
model's slots, and have their turn only while nobody else waits, or once they have waited as long as their queue order
says.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from pillion.errors import DeadlineExceeded, FieldViolation, InvalidRequest, Overloaded, QuotaViolation
from pillion.gateway.admission.tenants import OPEN, Tenant, share_of
from pillion.gateway.admission.turns import BACKGROUND_SHARE, AdmissionPermit, ModelTurns
from pillion.priority import queue_order

# A refused client may try again after this time; on a gateway so full that it refuses, streams end every few hundred
# milliseconds.
RETRY_AFTER_MS = 1000


class Admission:
    """Holds the bounds of all models together, and a queue for each model, as its workers cannot help another model.

    Every ``enter`` that returns is followed by one ``leave``, however the request ends.

    Args:
        max_requests, max_tokens: requests and prompt tokens that may be in the gateway at once.
        slots: returns how many answers a model's workers are given at once; 0 means any number.
    """

    def __init__(self, max_requests: int, max_tokens: int, slots: Callable[[str], int] = lambda model: 0) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._slots = slots
        self.requests_of: Counter[str] = Counter()
        self.tokens_of: Counter[str] = Counter()
        self._queues: dict[str, _ModelQueue] = {}
        self.requests = 0
        self.tokens = 0

    @property
    def running(self) -> int:
        """Gives the number of answers that have their slots at workers."""
        return sum(queue.turns.running for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        """Gives the number of requests that wait for their turn."""
        return sum(len(queue.turns.permits) for queue in self._queues.values())

    def enter(self, tenant: Tenant = OPEN, answers: int = 1, field: str = "sampling.n") -> AdmissionPermit:
        """Admits one more request.

        Raises:
            Overloaded: a bound is met.
            InvalidRequest: this many answers could never be admitted; the error names the ``field`` that asks for them.
        """
        name, own = tenant.name, tenant.max_inflight_requests
        alone = _bound(tenant, own, self._max_requests, 0)
        if answers > 1 and answers > alone:
            text = f"{answers} answers; the gateway takes {alone} requests at once, each answer counts"
            raise InvalidRequest.of(FieldViolation(field, text))
        room = _room(tenant, self._max_requests)
        if self.requests + answers > room:
            raise _full("", "max_inflight_requests", room, "requests")
        most = _bound(tenant, own, self._max_requests, self.requests - self.requests_of[name])
        if self.requests_of[name] + answers > most:
            raise _full(name, "max_inflight_requests", most, "requests")
        self.requests += answers
        self.requests_of[name] += answers
        return AdmissionPermit(tenant, answers)

    def most_at_once(self, tenant: Tenant, tokens: int) -> int:
        """Returns how many requests of so many tokens a tenant may have in the gateway at once, where it has no others
        and nobody else has any; at least 1."""
        requests = _bound(tenant, tenant.max_inflight_requests, self._max_requests, 0)
        return max(1, min(requests, _bound(tenant, tenant.max_inflight_tokens, self._max_tokens, 0) // max(tokens, 1)))

    def weigh(self, permit: AdmissionPermit, tokens: int, scores: int = 0) -> None:
        """Admits the prompt of a request, and ``scores`` log probabilities of it, which count like tokens. One prompt
        is always admitted, however long. Raises Overloaded."""
        weight = tokens + scores
        name, own = permit.tenant.name, permit.tenant.max_inflight_tokens
        most = _bound(permit.tenant, own, self._max_tokens, self.tokens - self.tokens_of[name])
        room = _room(permit.tenant, self._max_tokens)
        if self.tokens and self.tokens + weight > room:
            raise _full("", "max_inflight_tokens", room, "prompt tokens")
        if self.tokens_of[name] and self.tokens_of[name] + weight > most:
            raise _full(name, "max_inflight_tokens", most, "prompt tokens")
        permit.tokens, permit.weight = tokens, weight
        self.tokens += weight
        self.tokens_of[name] += weight

    async def turn(
        self,
        permit: AdmissionPermit,
        model: str,
        priority: int,
        arrived_s: float,
        deadline_s: float | None,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns when the request may go to the model's workers. Both times are monotonic. ``waits`` is called where
        that is not at once.

        Raises:
            Overloaded: at once, where the wait would take longer than the deadline leaves.
            DeadlineExceeded: the wait was expected to be shorter, and took longer.
        """
        if model not in self._queues:
            self._queues[model] = _ModelQueue(partial(self._slots, model))
        await self._queues[model].turn(permit, queue_order(priority, arrived_s), deadline_s, waits)

    def leave(self, permit: AdmissionPermit, generated_tokens: int = 0) -> None:
        """Takes a request out of the gateway that has ended, by an answer or otherwise, before or after it had slots at
        workers."""
        name = permit.tenant.name
        self.requests -= permit.answers
        self.tokens -= permit.weight
        self.requests_of[name] -= permit.answers
        self.tokens_of[name] -= permit.weight
        for counts in (self.requests_of, self.tokens_of):
            if not counts[name]:
                del counts[name]
        if permit.queue is not None:
            permit.queue.leave(permit, generated_tokens)

    def keep(self, names: Collection[str]) -> None:
        """Forgets the counters of tenants that are not among ``names`` and have no request waiting."""
        for queue in self._queues.values():
            queue.turns.waiting.keep(names)
            queue.turns.background.keep(names)


class _ModelQueue:
    """Gives waiting requests of one model their slots at workers; a task awaits each of them."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self.turns = ModelTurns(slots)
        self._futures: dict[int, asyncio.Future[None]] = {}

    async def turn(
        self, permit: AdmissionPermit, request_rank: float, deadline_s: float | None, waits: Callable[[], None]
    ) -> None:
        """Waits for this model's next free slot; :meth:`Admission.turn` has the errors."""
        now_s = time.monotonic()
        request = self.turns.wait(permit, request_rank, now_s, deadline_s)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[request.number] = future
        try:
            self._grant()
            if not future.done():
                self.turns.began(permit, now_s)
                waits()
            async with asyncio.timeout(None if deadline_s is None else max(0.0, deadline_s - now_s)):
                await future
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while it waited for its turn") from None
        finally:
            del self._futures[request.number]
            self.turns.give_up(permit, request)

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Frees the slots of a request that had its turn."""
        self.turns.free(permit, generated_tokens)
        self._grant()
        self.turns.left(permit, time.monotonic())

    def _grant(self) -> None:
        # A request whose future is done was cancelled a moment ago, and its task has not run since.
        for number in self.turns.grant(self, time.monotonic(), lambda number: self._futures[number].done()):
            self._futures[number].set_result(None)


class TenantSlots:
    """Gives each tenant ``each`` slots in a queue that all tenants share, so that no tenant waits there for the many
    jobs of another one."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._slots: dict[str, asyncio.Semaphore] = {}

    def of(self, tenant: Tenant) -> asyncio.Semaphore:
        """Returns the tenant's own slots; one is held while a job of the tenant is in the queue."""
        return self._slots.setdefault(tenant.name, asyncio.Semaphore(self._each))

    def keep(self, names: Collection[str]) -> None:
        """Forgets the slots of tenants that are not among ``names``."""
        self._slots = {name: slots for name, slots in self._slots.items() if name in names}


def _bound(tenant: Tenant, own: int, whole: int, others: int) -> int:
    """Returns how much of a bound ``whole`` a tenant may use, while other tenants use ``others``. The only tenant of a
    gateway without keys may use it all."""
    if own or not tenant.name:
        return _room(tenant, min(own or whole, whole))
    return _room(tenant, share_of(tenant, whole, others))


def _room(tenant: Tenant, bound: int) -> int:
    """Returns how much of a bound may be in use, by all requests, for one more request of the tenant to be admitted."""
    return max(1, int(bound * BACKGROUND_SHARE)) if tenant.background else bound


def _full(tenant: str, name: str, most: int, what: str) -> Overloaded:
    text = f"{name} ({most}) {what} {f'of tenant {tenant!r} ' if tenant else ''}are under way"
    return Overloaded(text, RETRY_AFTER_MS, (QuotaViolation(f"{tenant}/{name}" if tenant else name, text),))
