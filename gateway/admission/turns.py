"""The requests of one model that wait for slots at its workers, and the slots that are taken (I9).

Whoever waits is told by number: :meth:`ModelTurns.wait` puts a request in line, :meth:`ModelTurns.grant` names those
whose turn has come, :meth:`ModelTurns.leave` frees slots. Requests in the background have their turn only while nobody
else waits, or once they have waited as long as their rank says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pillion.errors import Overloaded, QuotaViolation
from pillion.gateway.admission.fairness import DepartureRate, FairQueue, WaitingRequest
from pillion.gateway.admission.tenants import Tenant
from pillion.wire.registry import ComponentRecord

# A request in the background is taken only where no more than this share is then in use, by whomever.
BACKGROUND_SHARE = 0.5
# Requests that workers are given beyond their slots, so that none stays empty: a share of them, and never fewer.
SPARE_SLOTS_SHARE = 0.25
MIN_SPARE_SLOTS = 16


def shared_slots(workers: Sequence[ComponentRecord], others_running: Sequence[int]) -> int:
    """Requests that decode workers should be given at once by one of several gateways, of which the others run so many:
    an even share of their slots and some more, with what the others do not use of theirs. 0 as long as a worker does
    not report how many slots it has."""
    if not workers or not all(worker.max_step_tokens for worker in workers):
        return 0
    sequences = sum(worker.running_requests + worker.free_seqs for worker in workers)
    slots = sequences + max(MIN_SPARE_SLOTS, int(sequences * SPARE_SLOTS_SHARE))
    even = slots // (len(others_running) + 1)
    return max(1, slots - sum(min(even, running) for running in others_running))


class SlotOwner(Protocol):
    """The queue in which a request had its turn."""

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Frees the slots of a request that had its turn there."""


@dataclass(slots=True, eq=False)
class AdmissionPermit:
    """One request in the gateway.

    Attributes:
        answers: answers that it generates; each counts as a request.
        tokens: tokens of its prompt, once it is weighed.
        weight: these and the log probabilities that it asks of them, which the gateway holds at the most.
        queue: its model's queue, once it has its turn.
    """

    tenant: Tenant
    answers: int
    tokens: int = 0
    weight: int = 0
    queue: SlotOwner | None = None


class ModelTurns:
    """The lines of one model. ``slots``: answers that its workers are given at once, asked each time; 0: as many as
    come. Times are the caller's, monotonic, in seconds."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self._slots = slots
        self._departures = DepartureRate()
        self._numbers = itertools.count()
        self.waiting = FairQueue()
        self.background = FairQueue()
        # Those in line, by number.
        self.permits: dict[int, AdmissionPermit] = {}
        self.running = 0

    def wait(
        self, permit: AdmissionPermit, request_rank: float, now_s: float, deadline_s: float | None
    ) -> WaitingRequest:
        """Puts a request in line. Raises Overloaded where the wait would take longer than the deadline leaves."""
        request = WaitingRequest(request_rank, next(self._numbers), permit.tokens, permit.answers)
        if not permit.tenant.background and (self._crowded or not self._fits(permit.answers)):
            wait_s = self._departures.wait_s(self.waiting.ahead(permit.tenant, request))
            if deadline_s is not None and now_s + wait_s >= deadline_s:
                text = f"the wait would take about {wait_s:.1f} s, longer than the request's deadline leaves"
                raise Overloaded(text, math.ceil(wait_s * 1000), (QuotaViolation("deadline", text),))
        self._line(permit).push(permit.tenant, request)
        self.permits[request.number] = permit
        return request

    def began(self, permit: AdmissionPermit, now_s: float) -> None:
        """Notes that a request begins to wait, which had no turn at once."""
        if not permit.tenant.background:
            self._departures.began(now_s)

    def give_up(self, permit: AdmissionPermit, request: WaitingRequest) -> None:
        """Takes a request that still waits out of its line; others are ignored."""
        if self.permits.pop(request.number, None) is not None:
            self._line(permit).remove(permit.tenant, request)

    def grant(self, owner: SlotOwner, now_s: float, gone: Callable[[int], bool]) -> list[int]:
        """Takes those out whose turn has come, and returns their numbers; ``owner`` has their slots. Those that are
        ``gone`` already get none."""
        granted = []
        while (found := self._next(now_s)) is not None:
            line, share, request = found
            permit, left = self.permits[request.number], gone(request.number)
            if not left and not self._fits(permit.answers, share):
                break
            line.pop()
            del self.permits[request.number]
            if not left:
                permit.queue = owner
                self.running += permit.answers
                granted.append(request.number)
        return granted

    def free(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Frees the slots of a request that had its turn; :meth:`grant`, then :meth:`left` follow."""
        permit.queue = None
        self.running -= permit.answers
        self._line(permit).charge(permit.tenant, generated_tokens)

    def left(self, permit: AdmissionPermit, now_s: float) -> None:
        """Notes a departure, behind the turns that it gave."""
        self._departures.left(permit.answers, self._crowded, now_s)

    def _line(self, permit: AdmissionPermit) -> FairQueue:
        return self.background if permit.tenant.background else self.waiting

    @property
    def _crowded(self) -> bool:
        """Whether a request waits that is not in the background."""
        return self.waiting.first() is not None

    def _next(self, now_s: float) -> tuple[FairQueue, float, WaitingRequest] | None:
        """The request whose turn is next, its line, and the share of the slots that may be taken with it."""
        hidden, first = self.background.first(), self.waiting.first()
        if hidden is not None and hidden.rank <= now_s:
            # It has waited as long as its priority asks, so that it does not starve.
            return self.background, 1.0, hidden
        if first is not None:
            return self.waiting, 1.0, first
        return None if hidden is None else (self.background, BACKGROUND_SHARE, hidden)

    def _fits(self, answers: int, share: float = 1.0) -> bool:
        slots = self._slots()
        return not slots or not self.running or self.running + answers <= int(slots * share)
