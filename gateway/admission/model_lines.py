"""Admission where several models are served: bounds for all of them together, a line and places for each.

Workers of one model cannot help another one. In a common line, requests that wait for a crowded model would stand
before those of an idle one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from pillion.gateway.admission.admission import Admission, AdmissionPermit
from pillion.gateway.admission.tenants import OPEN, Tenant


class ModelLines:
    """:class:`pillion.gateway.admission.admission.Admission`, but that a turn is of a model. ``places``: of each
    model's workers.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, places: Callable[[str], int], models: Collection[str]
    ) -> None:
        self._all = Admission(max_requests, max_tokens)
        # With the same bounds, which are met in common first.
        self._lines = {name: Admission(max_requests, max_tokens, partial(places, name)) for name in models}
        # By identity of the visit.
        self._seats: dict[int, tuple[Admission, AdmissionPermit]] = {}

    @property
    def requests(self) -> int:
        """In the gateway."""
        return self._all.requests

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        return self._all.tokens

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(line.waiting for line in self._lines.values())

    def enter(self, tenant: Tenant = OPEN, answers: int = 1, field: str = "sampling.n") -> AdmissionPermit:
        """See :meth:`Admission.enter`."""
        return self._all.enter(tenant, answers, field)

    def weigh(self, permit: AdmissionPermit, tokens: int) -> None:
        """See :meth:`Admission.weigh`."""
        self._all.weigh(permit, tokens)

    async def turn(
        self, permit: AdmissionPermit, model: str, priority: int, arrived_s: float, deadline_s: float | None
    ) -> None:
        """Returns when the request may go to the model's workers. Raises as :meth:`Admission.turn`."""
        line = self._lines[model]
        seat = line.enter(permit.tenant, permit.answers)
        self._seats[id(permit)] = line, seat
        line.weigh(seat, permit.tokens)
        await line.turn(seat, priority, arrived_s, deadline_s)

    def leave(self, permit: AdmissionPermit, generated_tokens: int = 0) -> None:
        """The request has ended, in whatever way, before or behind its turn."""
        self._all.leave(permit)
        line, seat = self._seats.pop(id(permit), (None, None))
        if line is not None and seat is not None:
            line.leave(seat, generated_tokens)

    def keep(self, names: Collection[str]) -> None:
        """Tenants that are not among ``names`` are gone."""
        for line in self._lines.values():
            line.keep(names)
