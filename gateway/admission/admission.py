"""How much the gateway takes on at once, and which request is next (I7).

enter: bounds by requests --> weigh: bounds by prompt tokens --> turn: a slot at the workers --> leave
   |                             |                                 | waits, fairly between tenants
   '-- over a bound: Overloaded -'                                 '-- no time left for the wait: Overloaded

Bounds are the gateway's and each tenant's own. Requests that wait are counted by them, so they bound the queues too.

Requests in the background (batches) leave room for all others: they fill at most BACKGROUND_SHARE of any bound and of a
model's slots, and have their turn only while nobody else waits, or once they have waited as long as their rank says.
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
from pillion.priority import rank

# Time after which a refused client may try again; streams end every few hundred milliseconds on a gateway this full.
RETRY_AFTER_MS = 1000


class Admission:
    """The bounds of all models together, and a queue for each model, whose workers cannot help another model.

    Every ``enter`` that returns is followed by one ``leave``, however the request ends.

    Args:
        max_requests, max_tokens: requests and prompt tokens that may be in the gateway at once.
        slots: answers that a model's workers are given at once, asked each time; 0: as many as come.
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
        """Answers that have their slots at workers."""
        return sum(queue.turns.running for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(len(queue.turns.permits) for queue in self._queues.values())

    def enter(self, tenant: Tenant = OPEN, answers: int = 1, field: str = "sampling.n") -> AdmissionPermit:
        """Admits one more request.

        Raises:
            Overloaded: a bound is met.
            InvalidRequest: so many answers could never be admitted; it names the ``field`` that asks for them.
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

    def weigh(self, permit: AdmissionPermit, tokens: int, scores: int = 0) -> None:
        """Admits the prompt of a request, and so many log probabilities of it, which count like tokens. One prompt is
        always admitted, however long. Raises Overloaded."""
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
        self, permit: AdmissionPermit, model: str, priority: int, arrived_s: float, deadline_s: float | None
    ) -> None:
        """Returns when the request may go to the model's workers. Both times are monotonic.

        Raises:
            Overloaded: at once, where the wait would take longer than the deadline leaves.
            DeadlineExceeded: it took longer all the same.
        """
        if model not in self._queues:
            self._queues[model] = _ModelQueue(partial(self._slots, model))
        await self._queues[model].turn(permit, rank(priority, arrived_s), deadline_s)

    def leave(self, permit: AdmissionPermit, generated_tokens: int = 0) -> None:
        """Takes out a request that has ended, in whatever way, before or after its turn."""
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
        """Forgets tenants that are not among ``names`` and do not wait."""
        for queue in self._queues.values():
            queue.turns.waiting.keep(names)
            queue.turns.background.keep(names)


class _ModelQueue:
    """One model's turns, each awaited by a task."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self.turns = ModelTurns(slots)
        self._futures: dict[int, asyncio.Future[None]] = {}

    async def turn(self, permit: AdmissionPermit, request_rank: float, deadline_s: float | None) -> None:
        """Wait for this model's next free place; :meth:`Admission.turn` has the errors."""
        now_s = time.monotonic()
        request = self.turns.wait(permit, request_rank, now_s, deadline_s)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[request.number] = future
        try:
            self._grant()
            if not future.done():
                self.turns.began(permit, now_s)
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
        # A future that is done was cancelled a moment ago, and its task has not run since.
        for number in self.turns.grant(self, time.monotonic(), lambda number: self._futures[number].done()):
            self._futures[number].set_result(None)


class TenantSlots:
    """Slots in a queue that all tenants share, ``each`` for a tenant: nobody waits there behind another one's flood."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._slots: dict[str, asyncio.Semaphore] = {}

    def of(self, tenant: Tenant) -> asyncio.Semaphore:
        """The tenant's own slots; one is held while a job of the tenant is in the queue."""
        return self._slots.setdefault(tenant.name, asyncio.Semaphore(self._each))

    def keep(self, names: Collection[str]) -> None:
        """Forgets tenants that are not among ``names``."""
        self._slots = {name: slots for name, slots in self._slots.items() if name in names}


def _bound(tenant: Tenant, own: int, whole: int, others: int) -> int:
    """What a tenant may have of ``whole``, of which other tenants have ``others``. The open gateway's only tenant may
    have it all."""
    if own or not tenant.name:
        return _room(tenant, min(own or whole, whole))
    return _room(tenant, share_of(tenant, whole, others))


def _room(tenant: Tenant, bound: int) -> int:
    """What of a bound may be in use once a request of the tenant is in."""
    return max(1, int(bound * BACKGROUND_SHARE)) if tenant.background else bound


def _full(tenant: str, name: str, most: int, what: str) -> Overloaded:
    text = f"{name} ({most}) {what} {f'of tenant {tenant!r} ' if tenant else ''}are under way"
    return Overloaded(text, RETRY_AFTER_MS, (QuotaViolation(f"{tenant}/{name}" if tenant else name, text),))
