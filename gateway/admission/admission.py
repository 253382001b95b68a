"""Decides how much the gateway takes on at once, and which request is next (I7).

enter: bounds by requests --> weigh: bounds by prompt tokens --> turn: a slot at the workers --> leave
   |                             |                                 | waits, fairly between tenants
   '-- over a bound: Overloaded, --'                               '-- no time left for wait and answer: Overloaded
       for whoever gives way

Bounds are the gateway's and each tenant's own. Requests that wait are counted by them, so they bound the queues too.
Where one is met, a request that has not had its turn may give way to the newcomer
(:mod:`pillion.gateway.admission.giving_way`).

Requests in the background (batches) leave room for all others: they fill at most BACKGROUND_SHARE of any bound and of a
model's slots, and have their turn only while nobody else waits, or once they have waited as long as their queue order
says.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from pillion.errors import DeadlineExceeded, FieldViolation, InvalidRequest
from pillion.gateway.admission.answer_times import AnswerTimes, DecodeFleet
from pillion.gateway.admission.giving_way import choose, held_by
from pillion.gateway.admission.tenants import OPEN, BoundMet, ConcurrencyLimit, Tenant
from pillion.gateway.admission.turns import AdmissionPermit, DepartureRate, ModelTurns, YieldingRequests

# A refused client may try again after this time where nothing is known of how fast answers end.
RETRY_AFTER_MS = 1000


class Admission:
    """Holds the bounds of all models together, and a queue for each model, as its workers cannot help another model.

    Every ``enter`` that returns is followed by one ``leave``, however the request ends.

    Args:
        max_requests, max_tokens: requests and prompt tokens that may be in the gateway at once.
        slots: returns how many answers a model's workers are given at once; 0 means any number.
        fleet: returns a model's decode workers, or None until one has measured its steps.
        clock: returns the monotonic time, in seconds.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        slots: Callable[[str], int] = lambda model: 0,
        fleet: Callable[[str], DecodeFleet | None] = lambda model: None,
        clock: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self._requests = ConcurrencyLimit("max_inflight_requests", "requests", max_requests, of_prompts=False)
        self._tokens = ConcurrencyLimit("max_inflight_tokens", "prompt tokens", max_tokens, of_prompts=True)
        self._slots = slots
        self._fleet = fleet
        self._clock = clock
        self._numbers = itertools.count()
        self._yielding = YieldingRequests()
        # This measures how fast requests leave the gateway that had their turn, whichever model's they are.
        self._departures = DepartureRate()
        self._queues: dict[str, _ModelQueue] = {}

    @property
    def requests(self) -> int:
        """Gives the number of requests in the gateway; each answer counts."""
        return self._requests.total

    @property
    def tokens(self) -> int:
        """Gives the number of prompt tokens that the gateway holds."""
        return self._tokens.total

    @property
    def running(self) -> int:
        """Gives the number of answers that have their slots at workers."""
        return sum(queue.turns.running for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        """Gives the number of requests that wait for their turn."""
        return sum(len(queue.turns.permits) for queue in self._queues.values())

    def enter(
        self, tenant: Tenant = OPEN, answers: int = 1, field: str = "sampling.n", order: float = math.inf
    ) -> AdmissionPermit:
        """Admits one more request.

        Args:
            tenant: the sender.
            answers: how many answers it generates.
            field: the request's field that asks for them.
            order: its place in any queue (:func:`pillion.rules.priority.queue_order`); without one it never gives way,
                and no other request of its tenant gives way to it.

        Raises:
            Overloaded: a bound is met, and nobody gives way.
            InvalidRequest: this many answers could never be admitted; the error names the ``field``.
        """
        alone = self._requests.most(tenant)
        if answers > 1 and answers > alone:
            text = f"{answers} answers; the gateway takes {alone} requests at once, each answer counts"
            raise InvalidRequest.of(FieldViolation(field, text))
        permit = AdmissionPermit(tenant, answers, order=order, number=next(self._numbers))
        self._make_room(self._requests, permit, answers)
        self._requests.take(tenant.name, answers)
        self._departures.began(self._clock())
        self._yielding.add(permit)
        return permit

    def most_at_once(self, tenant: Tenant, tokens: int) -> int:
        """Returns how many requests of so many tokens a tenant may have in the gateway at once, where it has no others
        and nobody else has any; at least 1."""
        return max(1, min(self._requests.most(tenant), self._tokens.most(tenant) // max(tokens, 1)))

    def weigh(self, permit: AdmissionPermit, tokens: int, scores: int = 0) -> None:
        """Admits the prompt of a request, and ``scores`` log probabilities of it, which count like tokens. One prompt
        is always admitted, however long. Raises Overloaded, also where the request has given way meanwhile."""
        if permit.given_up is not None:
            raise permit.given_up
        weight = tokens + scores
        self._make_room(self._tokens, permit, weight)
        permit.tokens, permit.weight = tokens, weight
        if weight:
            self._tokens.take(permit.tenant.name, weight)

    async def turn(
        self,
        permit: AdmissionPermit,
        model: str,
        deadline_s: float | None = None,
        allowed_tokens: int = 0,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns when the request may go to the model's workers.

        Args:
            permit: the request.
            model: the model's name.
            deadline_s: when its answers are to be whole, on the clock; None: at any time.
            allowed_tokens: the most tokens that each of its answers may have.
            waits: called where the request has to wait for its turn.

        Raises:
            Overloaded: at once, where the wait and the answer would take longer than the deadline leaves; when its turn
                comes and the time that is left is too short by then; or the request has given way.
            DeadlineExceeded: the wait was expected to be shorter, and took longer.
        """
        if permit.given_up is not None:
            raise permit.given_up
        if model not in self._queues:
            turns = ModelTurns(partial(self._slots, model), AnswerTimes(partial(self._fleet, model)))
            self._queues[model] = _ModelQueue(turns, self._clock, self._yielding.remove)
        permit.deadline_s, permit.allowed_tokens = deadline_s, allowed_tokens
        await self._queues[model].turn(permit, waits)

    def counts(self, model: str) -> tuple[int, int]:
        """Returns how many answers of a model are at the workers, and how many of its requests wait for their turn."""
        queue = self._queues.get(model)
        return (0, 0) if queue is None else (queue.turns.running, len(queue.turns.permits))

    def line(self, model: str) -> tuple[int, dict[str, int]]:
        """Returns how many answers of a model are at the workers, and how many of its requests wait for their turn, by
        tenant, without those in the background."""
        turns = self._queues[model].turns
        return turns.running, turns.waiting.counts()

    def leave(self, permit: AdmissionPermit, generated_tokens: int = 0) -> None:
        """Takes a request out of the gateway that has ended, by an answer or otherwise, before or after it had slots at
        workers."""
        self._release(permit)
        if permit.queue is not None:
            self._departures.left(permit.answers, self.requests > 0, self._clock())
            permit.queue.leave(permit, generated_tokens)

    def keep(self, names: Collection[str]) -> None:
        """Forgets the counters of tenants that are not among ``names`` and have no request waiting."""
        for queue in self._queues.values():
            queue.turns.waiting.keep(names)
            queue.turns.background.keep(names)

    def check_integrity(self) -> None:
        """Raises AssertionError where the counts do not add up, or a request may give way that no longer waits."""
        for bound in (self._requests, self._tokens):
            bound.check_integrity()
        held, weights = Counter[str](), Counter[str]()
        for permit in self._yielding:
            assert permit.inside, "a request may give way that has left"
            assert permit.queue is None, "a request may give way that has had its turn"
            held[permit.tenant.name] += permit.answers
            weights[permit.tenant.name] += permit.weight
        assert held <= self._requests.of, f"{dict(held)} may give way of {dict(self._requests.of)} requests"
        assert weights <= self._tokens.of, f"{dict(weights)} may give way of {dict(self._tokens.of)} tokens"
        for queue in self._queues.values():
            queue.turns.check_integrity()

    def _make_room(self, bound: ConcurrencyLimit, permit: AdmissionPermit, amount: int) -> None:
        """Has other requests give way where a bound is met. Raises Overloaded where they do not."""
        if bound.met(permit.tenant, amount) is not None:
            self._have_give_way(bound, permit, amount)

    def _have_give_way(self, bound: ConcurrencyLimit, permit: AdmissionPermit, amount: int) -> None:
        chosen = choose(self._yielding, bound, permit, amount)
        if isinstance(chosen, BoundMet):
            raise bound.refusal(chosen, chosen.text, self._retry_after_ms(bound, chosen))
        for one in chosen:
            name = one.tenant.name
            met = BoundMet(name if name == permit.tenant.name else "", False, held_by(one, bound), "")
            text = f"{bound.name} is met, and a request that goes before this one took its place"
            one.given_up = bound.refusal(met, text, self._retry_after_ms(bound, met))
            self._release(one)
            for queue in self._queues.values():
                queue.give_up(one)

    def _release(self, permit: AdmissionPermit) -> None:
        """Gives back what a request holds of the bounds; a request that holds nothing any more is ignored."""
        if permit.inside:
            permit.inside = False
            self._yielding.remove(permit)
            self._requests.release(permit.tenant.name, permit.answers)
            if permit.weight:
                self._tokens.release(permit.tenant.name, permit.weight)

    def _retry_after_ms(self, bound: ConcurrencyLimit, met: BoundMet) -> int:
        """Returns about how long it takes until so much of a bound is free as is lacking: requests leave as fast as of
        late, and a tenant's are the share of them that it has in the gateway."""
        answers = met.lacking * self.requests / max(1, bound.total)
        if met.tenant:
            answers *= bound.total / max(1, bound.of[met.tenant])
        return math.ceil(self._departures.wait_s(max(0.0, answers - 1)) * 1000) or RETRY_AFTER_MS


class _ModelQueue:
    """Gives waiting requests of one model their slots at workers; a task awaits each of them. ``began`` is called with
    each request whose wait is over."""

    def __init__(self, turns: ModelTurns, clock: Callable[[], float], began: Callable[[AdmissionPermit], None]) -> None:
        self.turns = turns
        self._clock = clock
        self._began = began
        self._futures: dict[int, asyncio.Future[None]] = {}

    async def turn(self, permit: AdmissionPermit, waits: Callable[[], None]) -> None:
        """Waits for this model's next free slot; :meth:`Admission.turn` has the errors."""
        now_s, deadline_s = self._clock(), permit.deadline_s
        self.turns.wait(permit, now_s)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[permit.number] = future
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
            del self._futures[permit.number]
            self.turns.give_up(permit)
        if permit.given_up is not None:
            raise permit.given_up

    def give_up(self, permit: AdmissionPermit) -> None:
        """Ends the wait of a request that has given way; a request that does not wait here is ignored."""
        self.turns.give_up(permit)
        future = self._futures.get(permit.number)
        if future is not None and not future.done():
            future.set_result(None)

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Frees the slots of a request that had its turn."""
        self.turns.free(permit, generated_tokens)
        self._grant()
        self.turns.left(permit, self._clock())

    def _grant(self) -> None:
        # A request whose future is done was cancelled a moment ago, and its task has not run since.
        for permit in self.turns.grant(self, self._clock(), lambda number: self._futures[number].done()):
            self._began(permit)
            self._futures[permit.number].set_result(None)


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
