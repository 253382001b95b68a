"""Describes a request from its admission to its end, for everything that decides about it. Sans-IO (I9).

entered --weighed--> in line (place) --its turn--> at the workers (queue) --> left
             '------------'--> given_up: refused, as a bound is met or no time is left
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pillion.errors import Overloaded
from pillion.gateway.admission.tenants import Tenant


@dataclass(frozen=True, slots=True, order=True)
class WaitingRequest:
    """Holds one waiting request. Requests are sorted by queue order (:func:`pillion.priority.queue_order`), then by
    arrival."""

    queue_order: float
    number: int
    tokens: int = field(compare=False)
    answers: int = field(compare=False)


class SlotOwner(Protocol):
    """Represents the queue that gave a request its slots, to which they are given back."""

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Frees the slots of a request that had its turn in this queue."""


@dataclass(slots=True, eq=False)
class AdmissionPermit:
    """Describes one request that the gateway has admitted.

    Attributes:
        answers: number of answers that it generates; each counts as a request.
        order: its place in any queue (:func:`pillion.priority.queue_order`); infinite where it waits in none.
        number: it differs from request to request, and grows.
        tokens: number of its prompt's tokens, once it is weighed.
        weight: the prompt's tokens and the log probabilities that it asks of them, which the gateway holds at the most.
        deadline_s: the monotonic time by which its answer is to be whole; None where it may take any time.
        allowed_tokens: the most tokens that each answer may have; 0 where it generates nothing.
        place: its place in its model's line, while it waits there.
        queue: its model's queue, once it has its turn.
        begun_s, beside: when it had its turn, and how many answers had slots then, its own included.
        prompt_s: how long its prompt was to take then, if the workers had computed nothing but prompts.
        first_token_s: returns when its first token came; 0.0: none did.
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
    prompt_s: float = 0.0
    first_token_s: Callable[[], float] = lambda: 0.0
    generated_tokens: int = 0
    ended_itself: bool = False
    inside: bool = True
    given_up: Overloaded | None = None

    def check(self) -> None:
        """Raises the error of a request that will not have its turn."""
        if self.given_up is not None:
            raise self.given_up
