"""Limits the requests in the gateway, and schedules the waiting ones (I7).

    enter: limit on requests --> weigh: limit on prompt tokens --> turn: a slot at the workers --> leave
       |                             |                                 | waits, fairly between tenants
       '-- limit reached: Overloaded, '                                '-- deadline too short for wait and answer:
           or a waiting request is preempted                               Overloaded

The gateway and each tenant have limits. They include waiting requests, so they bound the queues too. When one is
reached, a waiting request may be preempted by the new one (:mod:`pillion.gateway.admission.giving_way`).

Background requests (batches) use at most BACKGROUND_SHARE of any limit and of a model's slots. They are scheduled only
while no other requests wait, or once they have waited for the time in their queue order.
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
from pillion.gateway.admission.giving_way import choose, quota_units
from pillion.gateway.admission.tenants import OPEN, BoundMet, ConcurrencyLimit, Tenant
from pillion.gateway.admission.turns import AdmissionPermit, DepartureRate, ModelTurns, YieldingRequests

RETRY_AFTER_MS = 1000


class Admission:
    """Limits over all models, and a queue per model, since each worker serves one model.

    The caller follows every ``enter`` that returns by one ``leave``, however the request ends.

    Args:
        max_requests, max_tokens: limits on requests and prompt tokens in the gateway.
        slots: returns the limit on concurrent answers at a model's workers; 0: unlimited.
        fleet: returns a model's decode workers, or None until one has measured its steps.
        clock: returns monotonic seconds.
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
        self._departures = DepartureRate()
        self._queues: dict[str, _ModelQueue] = {}

    @property
    def requests(self) -> int:
        """Requests in the gateway; each answer counts."""
        return self._requests.total

    @property
    def tokens(self) -> int:
        """Prompt tokens in the gateway."""
        return self._tokens.total

    @property
    def running(self) -> int:
        """Answers with slots at workers."""
        return sum(queue.turns.running for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        """Requests waiting for a slot."""
        return sum(len(queue.turns.permits) for queue in self._queues.values())

    def enter(
        self, tenant: Tenant = OPEN, answers: int = 1, field: str = "sampling.n", order: float = math.inf
    ) -> AdmissionPermit:
        """Admit one more request.

        Args:
            tenant: the sender.
            answers: number of answers to generate.
            field: the request's field with that number, for errors.
            order: sort key in queues (:func:`pillion.rules.priority.queue_order`). With the default, the request is
                never preempted, and preempts no request of its own tenant.

        Raises:
            Overloaded: a limit is reached, and no request can be preempted.
            InvalidRequest: more answers than could ever be admitted.
        """
        alone = self._requests.limit(tenant)
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
        """Return the max concurrent requests with ``tokens`` tokens of a tenant in an otherwise empty gateway, at
        least 1."""
        return max(1, min(self._requests.limit(tenant), self._tokens.limit(tenant) // max(tokens, 1)))

    def weigh(self, permit: AdmissionPermit, tokens: int, scores: int = 0) -> None:
        """Admit a request's prompt and the ``scores`` requested log probabilities of it, each of which counts like a
        token. The only prompt in the gateway is always admitted. Raises Overloaded, also if the request was
        preempted."""
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
        """Wait until the request may be sent to the model's workers.

        Args:
            permit: the request.
            model: the model's name.
            deadline_s: deadline of its answers on the clock, or None.
            allowed_tokens: token limit of each of its answers.
            waits: called if the request has to wait.

        Raises:
            Overloaded: the expected wait and answer exceed the deadline, now or at its turn; or the request was
                preempted.
            DeadlineExceeded: the deadline passed during the wait.
        """
        if permit.given_up is not None:
            raise permit.given_up
        if model not in self._queues:
            turns = ModelTurns(partial(self._slots, model), AnswerTimes(partial(self._fleet, model)))
            self._queues[model] = _ModelQueue(turns, self._clock, self._yielding.remove)
        permit.deadline_s, permit.allowed_tokens = deadline_s, allowed_tokens
        await self._queues[model].turn(permit, waits)

    def counts(self, model: str) -> tuple[int, int]:
        """Return the number of a model's answers at the workers, and of its waiting requests."""
        queue = self._queues.get(model)
        return (0, 0) if queue is None else (queue.turns.running, len(queue.turns.permits))

    def line(self, model: str) -> tuple[int, dict[str, int]]:
        """Return the number of a model's answers at the workers, and of its waiting requests by tenant, without
        background requests."""
        turns = self._queues[model].turns
        return turns.running, turns.waiting.counts()

    def leave(self, permit: AdmissionPermit, generated_tokens: int = 0) -> None:
        """Remove a request that has ended, whether it had slots or not."""
        self._release(permit)
        if permit.queue is not None:
            self._departures.left(permit.answers, self.requests > 0, self._clock())
            permit.queue.leave(permit, generated_tokens)

    def retain(self, names: Collection[str]) -> None:
        """Drop the counters of tenants that are not in ``names``, except those with waiting requests."""
        for queue in self._queues.values():
            queue.turns.waiting.retain(names)
            queue.turns.background.retain(names)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts are inconsistent, or a running request could be preempted."""
        for bound in (self._requests, self._tokens):
            bound.check_integrity()
        answers, weights = Counter[str](), Counter[str]()
        for permit in self._yielding:
            assert permit.inside, "a request that has left could be preempted"
            assert permit.queue is None, "a running request could be preempted"
            answers[permit.tenant.name] += permit.answers
            weights[permit.tenant.name] += permit.weight
        assert answers <= self._requests.of, f"{dict(answers)} could be preempted of {dict(self._requests.of)} requests"
        assert weights <= self._tokens.of, f"{dict(weights)} could be preempted of {dict(self._tokens.of)} tokens"
        for queue in self._queues.values():
            queue.turns.check_integrity()

    def _make_room(self, bound: ConcurrencyLimit, permit: AdmissionPermit, amount: int) -> None:
        """Preempt other requests if a limit is reached. Raises Overloaded if that does not suffice."""
        if bound.met(permit.tenant, amount) is not None:
            self._preempt(bound, permit, amount)

    def _preempt(self, bound: ConcurrencyLimit, permit: AdmissionPermit, amount: int) -> None:
        chosen = choose(self._yielding, bound, permit, amount)
        if isinstance(chosen, BoundMet):
            raise bound.refusal(chosen, chosen.text, self._retry_after_ms(bound, chosen))
        for one in chosen:
            name = one.tenant.name
            met = BoundMet(name if name == permit.tenant.name else "", False, quota_units(one, bound), "")
            text = f"{bound.name} is reached, and a request with precedence took its place"
            one.given_up = bound.refusal(met, text, self._retry_after_ms(bound, met))
            self._release(one)
            for queue in self._queues.values():
                queue.give_up(one)

    def _release(self, permit: AdmissionPermit) -> None:
        """Release what a request uses of the limits. Idempotent."""
        if permit.inside:
            permit.inside = False
            self._yielding.remove(permit)
            self._requests.release(permit.tenant.name, permit.answers)
            if permit.weight:
                self._tokens.release(permit.tenant.name, permit.weight)

    def _retry_after_ms(self, bound: ConcurrencyLimit, met: BoundMet) -> int:
        """Estimate the time until enough of a limit is free, if requests leave at the recent rate, and a tenant's
        requests in proportion to its usage."""
        answers = met.lacking * self.requests / max(1, bound.total)
        if met.tenant:
            answers *= bound.total / max(1, bound.of[met.tenant])
        return math.ceil(self._departures.wait_s(max(0.0, answers - 1)) * 1000) or RETRY_AFTER_MS


class _ModelQueue:
    """The queue of one model's requests, each awaited by its task. ``on_granted`` is called with each request that is
    granted slots."""

    def __init__(
        self, turns: ModelTurns, clock: Callable[[], float], on_granted: Callable[[AdmissionPermit], None]
    ) -> None:
        self.turns = turns
        self._clock = clock
        self._on_granted = on_granted
        self._futures: dict[int, asyncio.Future[None]] = {}

    async def turn(self, permit: AdmissionPermit, waits: Callable[[], None]) -> None:
        """Wait for a free slot; errors: see :meth:`Admission.turn`."""
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
        """End the wait of a preempted request, if it waits here."""
        self.turns.give_up(permit)
        future = self._futures.get(permit.number)
        if future is not None and not future.done():
            future.set_result(None)

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Free the slots of a request, and schedule the next ones."""
        self.turns.free(permit, generated_tokens)
        self._grant()
        self.turns.left(permit, self._clock())

    def _grant(self) -> None:
        # A future that is done was cancelled, and its task has not run since.
        for permit in self.turns.grant(self, self._clock(), lambda number: self._futures[number].done()):
            self._on_granted(permit)
            self._futures[permit.number].set_result(None)


class TenantSlots:
    """``each`` slots per tenant in a queue that tenants share, so that one tenant's jobs cannot fill the queue."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._slots: dict[str, asyncio.Semaphore] = {}

    def of(self, tenant: Tenant) -> asyncio.Semaphore:
        """Return the tenant's semaphore, held while one of its jobs is in the queue."""
        return self._slots.setdefault(tenant.name, asyncio.Semaphore(self._each))

    def retain(self, names: Collection[str]) -> None:
        """Drop the slots of tenants that are not in ``names``."""
        self._slots = {name: slots for name, slots in self._slots.items() if name in names}
