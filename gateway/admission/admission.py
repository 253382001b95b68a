"""How much the gateway takes on at once, and who is next (I7, I9).

enter: bounds by requests --> weigh: bounds by prompt tokens --> turn: a place at the workers --> leave
   |                             |                                 | waits, fairly between tenants
   '-- over a bound: Overloaded -'                                 '-- no time left for the wait: Overloaded

Bounds are the gateway's and each tenant's own; what waits has been counted, so the line is bounded by them too.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pillion.errors import DeadlineExceeded, FieldViolation, InvalidRequest, Overloaded, QuotaViolation
from pillion.gateway.admission.fairness import DepartureRate, FairQueue, WaitingRequest
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.priority import rank

# What a refused client is told to wait; streams end every few hundred milliseconds on a gateway this full.
RETRY_AFTER_MS = 1000
# Of what the other tenants leave of the gateway's bounds, a tenant without bounds of its own may fill so much. Each of
# n that flood gets 1/(n+1) of it, and as much stays free for the next one: the dynamic threshold of Choudhury and Hahne
# ("Dynamic queue length thresholds for shared-memory packet switches", 1998).
TENANT_SHARE = 0.5


@dataclass(slots=True)
class AdmissionPermit:
    """One request in the gateway. ``answers`` count as requests; ``running``: it has its place at the workers."""

    tenant: Tenant
    answers: int
    tokens: int = 0
    running: bool = False


class Admission:
    """Every ``enter`` that returns is followed by one ``leave``, however the request ends.

    Args:
        max_requests, max_tokens: in the gateway at once.
        places: answers that the workers are given at once, asked each time; 0: as many as come.
    """

    def __init__(self, max_requests: int, max_tokens: int, places: Callable[[], int] = lambda: 0) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._places = places
        self._requests_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()
        self._line = FairQueue()
        self._pace = DepartureRate()
        self._numbers = itertools.count()
        self._turns: dict[int, tuple[asyncio.Future[None], AdmissionPermit]] = {}
        self.requests = 0
        self.tokens = 0
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._turns)

    def enter(self, tenant: Tenant = OPEN, answers: int = 1, field: str = "sampling.n") -> AdmissionPermit:
        """One more request; each of its answers counts as one. Raises Overloaded, and InvalidRequest, naming the
        ``field`` that said how many, where they could never be let in."""
        name, own = tenant.name, tenant.max_inflight_requests
        alone = _bound(tenant, own, self._max_requests, 0)
        if answers > 1 and answers > alone:
            said = f"{answers} answers; the gateway takes {alone} requests at once, each answer counts"
            raise InvalidRequest.of(FieldViolation(field, said))
        if self.requests + answers > self._max_requests:
            raise _full("", "max_inflight_requests", self._max_requests, "requests")
        most = _bound(tenant, own, self._max_requests, self.requests - self._requests_of[name])
        if self._requests_of[name] + answers > most:
            raise _full(name, "max_inflight_requests", most, "requests")
        self.requests += answers
        self._requests_of[name] += answers
        return AdmissionPermit(tenant, answers)

    def weigh(self, permit: AdmissionPermit, tokens: int) -> None:
        """Its prompt. One prompt is always let in, however long. Raises Overloaded."""
        name, own = permit.tenant.name, permit.tenant.max_inflight_tokens
        most = _bound(permit.tenant, own, self._max_tokens, self.tokens - self._tokens_of[name])
        if self.tokens and self.tokens + tokens > self._max_tokens:
            raise _full("", "max_inflight_tokens", self._max_tokens, "prompt tokens")
        if self._tokens_of[name] and self._tokens_of[name] + tokens > most:
            raise _full(name, "max_inflight_tokens", most, "prompt tokens")
        permit.tokens = tokens
        self.tokens += tokens
        self._tokens_of[name] += tokens

    async def turn(self, permit: AdmissionPermit, priority: int, arrived_s: float, deadline_s: float | None) -> None:
        """Returns when the request may go to the workers. Both times are monotonic.

        Raises:
            Overloaded: at once, where the wait would take longer than the deadline leaves.
            DeadlineExceeded: it took longer all the same.
        """
        request = WaitingRequest(rank(priority, arrived_s), next(self._numbers), permit.tokens, permit.answers)
        now_s = time.monotonic()
        if self._turns or not self._fits(permit.answers):
            wait_s = self._pace.wait_s(self._line.ahead(permit.tenant, request))
            if deadline_s is not None and now_s + wait_s >= deadline_s:
                said = f"the wait would take about {wait_s:.1f} s, longer than the request's deadline leaves"
                raise Overloaded(said, math.ceil(wait_s * 1000), (QuotaViolation("deadline", said),))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.push(permit.tenant, request)
        self._turns[request.number] = (future, permit)
        try:
            self._grant()
            if not future.done():
                self._pace.began(now_s)
            async with asyncio.timeout(None if deadline_s is None else max(0.0, deadline_s - now_s)):
                await future
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while it waited for its turn") from None
        finally:
            if self._turns.pop(request.number, None) is not None:
                self._line.remove(permit.tenant, request)

    def leave(self, permit: AdmissionPermit, generated_tokens: int = 0) -> None:
        """The request has ended, in whatever way."""
        name = permit.tenant.name
        self.requests -= permit.answers
        self.tokens -= permit.tokens
        self._requests_of[name] -= permit.answers
        self._tokens_of[name] -= permit.tokens
        for counts in (self._requests_of, self._tokens_of):
            if not counts[name]:
                del counts[name]
        if permit.running:
            permit.running = False
            self.running -= permit.answers
            self._line.charge(permit.tenant, generated_tokens)
            self._grant()
            self._pace.left(permit.answers, bool(self._turns), time.monotonic())

    def keep(self, names: Collection[str]) -> None:
        """Tenants that are not among ``names`` are gone."""
        self._line.keep(names)

    def _grant(self) -> None:
        while (request := self._line.first()) is not None:
            future, permit = self._turns[request.number]
            if not future.done() and not self._fits(permit.answers):
                return
            self._line.pop()
            del self._turns[request.number]
            # Cancelled a moment ago, and not yet gone.
            if not future.done():
                permit.running = True
                self.running += permit.answers
                future.set_result(None)

    def _fits(self, answers: int) -> bool:
        places = self._places()
        return not places or not self.running or self.running + answers <= places


class TenantSlots:
    """Places in a line that all tenants share, ``each`` for a tenant: nobody waits there behind another one's flood."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._places: dict[str, asyncio.Semaphore] = {}

    def of(self, tenant: Tenant) -> asyncio.Semaphore:
        """The tenant's own, to be held while one job of it is in the line."""
        return self._places.setdefault(tenant.name, asyncio.Semaphore(self._each))

    def keep(self, names: Collection[str]) -> None:
        """Tenants that are not among ``names`` are gone."""
        self._places = {name: places for name, places in self._places.items() if name in names}


def _bound(tenant: Tenant, own: int, whole: int, others: int) -> int:
    """What a tenant may have of ``whole``, of which the others have some. The open gateway's only tenant has it all."""
    if own or not tenant.name:
        return min(own or whole, whole)
    return max(1, int((whole - others) * TENANT_SHARE))


def _full(tenant: str, name: str, most: int, what: str) -> Overloaded:
    said = f"{name} ({most}) {what} {f'of tenant {tenant!r} ' if tenant else ''}are under way"
    return Overloaded(said, RETRY_AFTER_MS, (QuotaViolation(f"{tenant}/{name}" if tenant else name, said),))


def check_pool(
    prompt_tokens: int, field: str, max_tokens: int | None, model_tokens: int, pool_tokens: int | None
) -> int:
    """What no KV pool can hold is refused, not queued: it could only ever be preempted and begun again.

    Args:
        prompt_tokens: tokens of the prompt, which leaves the model's length room for one more.
        field: the request's field that holds the prompt.
        max_tokens: as the client said, None where it left that to us.
        model_tokens: longest prompt and answer of the model.
        pool_tokens: longest prompt and answer that some node can hold; None where that is not known.

    Returns:
        The longest prompt and answer, in tokens, that model and pool allow.

    Raises:
        InvalidRequest: the prompt leaves no room for one token, or an explicit ``max_tokens`` does not fit behind it.
    """
    if pool_tokens is None or pool_tokens >= model_tokens:
        return model_tokens
    if prompt_tokens >= pool_tokens:
        said = f"{prompt_tokens} tokens; the KV pool holds {pool_tokens}, and one of the answer must fit as well"
        raise InvalidRequest.of(FieldViolation(field, said))
    if max_tokens is not None and prompt_tokens + min(max_tokens, model_tokens - prompt_tokens) > pool_tokens:
        said = f"{max_tokens} behind a prompt of {prompt_tokens} tokens; the KV pool holds {pool_tokens} for both"
        raise InvalidRequest.of(FieldViolation("sampling.max_tokens", said))
    return pool_tokens
