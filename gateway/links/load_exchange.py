"""Exchange of load between gateways, by Redis: each publishes its load, and reads the others' load before it plans.

    OwnLoad --on_change--> publish: an increase at once, a decrease within REPORT_S, the whole load every WHOLE_S
                             |
                             v
    SharedLoads, a hash per gateway --with_others, before a plan--> own load + the others' on the candidates

A single gateway exchanges nothing. If Redis does not answer, a gateway plans with its own load and the workers'
heartbeats.

An AssignedLoad is one answer's part of its gateway's load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pillion.errors import Unavailable
from pillion.gateway.links.defects import Defects
from pillion.gateway.planning.planner import RequestPlan
from pillion.kvstore.index.shared_loads import MAX_CHANGES_PER_CALL, SharedLoads, UnderWay
from pillion.tasks import end_tasks

log = logging.getLogger("pillion.gateway")

# Delay of publishing a decrease, so that one call publishes many.
REPORT_S = 0.1
# Interval of publishing the whole load, well below LOAD_TTL_MS; also restores it in a Redis that lost its data.
WHOLE_S = 2.0
RETRY_S = 0.5


class OwnLoad:
    """Running work that this gateway has sent to each worker, by component id.

    ``by_component`` counts streams of decode workers and tokens of prefill workers; ``tokens`` counts prompt tokens
    that are not computed yet, for both. ``on_change`` is called with the component id, and whether its load grew.
    """

    def __init__(self) -> None:
        self.by_component: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.on_change: Callable[[str, bool], None] = lambda component_id, grew: None

    def add(self, component_id: str, amount: int, tokens: int = 0) -> None:
        """Add to a component's load; subtract with negative numbers. A component without load has no entry."""
        for counter, change in ((self.by_component, amount), (self.tokens, tokens)):
            counter[component_id] += change
            if counter[component_id] <= 0:
                del counter[component_id]
        self.on_change(component_id, amount > 0 or tokens > 0)

    def of(self, component_id: str) -> UnderWay:
        return UnderWay(self.by_component[component_id], self.tokens[component_id])

    def busy(self) -> set[str]:
        """Return the ids of the components with load of this gateway."""
        return {*self.by_component, *self.tokens}


class LoadExchange:
    """The exchange of one gateway's load. ``start`` begins to publish it, ``aclose`` retracts it.

    Args:
        own: this gateway's load.
        shared: loads in Redis; None for a gateway that is always the only one.
        others: returns the component ids of the other live gateways.
    """

    def __init__(
        self, gateway_id: str, own: OwnLoad, shared: SharedLoads | None, others: Callable[[], Sequence[str]]
    ) -> None:
        self._gateway_id = gateway_id
        self._own = own
        self._shared = shared
        self._others = others
        self._changed: set[str] = set()
        self._due = asyncio.Event()
        self._report: asyncio.TimerHandle | None = None
        self._whole_due_s = 0.0
        self._published = False
        self._publisher: asyncio.Task[None] | None = None
        self._answers = True
        self._defects = Defects("the publication of this gateway's load")

    def start(self) -> None:
        """Begin to publish the load. Call once, on the event loop."""
        if self._shared is not None:
            self._own.on_change = self._note
            self._publisher = asyncio.create_task(self._publish(self._shared), name="load for other gateways")

    async def aclose(self) -> None:
        """Retract the published load, if Redis answers, and close the connections."""
        self._own.on_change = lambda component_id, grew: None
        if self._report is not None:
            self._report.cancel()
        await end_tasks(self._publisher)
        if self._shared is not None:
            if self._published:
                with contextlib.suppress(Unavailable):
                    await self._shared.tell(self._gateway_id, {}, whole=True)
            await self._shared.aclose()

    async def with_others(self, component_ids: Sequence[str]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the load of all gateways on some components, by component id: OwnLoad's ``by_component`` and
        ``tokens``. Never raises; if the others' load cannot be read, only this gateway's own is returned."""
        others = self._others() if self._shared is not None else ()
        if self._shared is None or not others:
            return self._own.by_component, self._own.tokens
        return await self._sum_with(self._shared, others, component_ids)

    async def _sum_with(
        self, shared: SharedLoads, others: Sequence[str], component_ids: Sequence[str]
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        try:
            theirs = await shared.read(others, component_ids)
        except Unavailable as error:
            self._note_answer(error)
            return self._own.by_component, self._own.tokens
        self._note_answer(None)
        # Read only now, to include what was sent while Redis answered.
        amounts, tokens = self._own.by_component.get, self._own.tokens.get
        pairs = list(zip(component_ids, theirs, strict=True))
        return (
            {component_id: amounts(component_id, 0) + other.amount for component_id, other in pairs},
            {component_id: tokens(component_id, 0) + other.tokens for component_id, other in pairs},
        )

    def _note(self, component_id: str, grew: bool) -> None:
        self._changed.add(component_id)
        if grew:
            self._due.set()
        elif self._report is None:
            self._report = asyncio.get_running_loop().call_later(REPORT_S, self._report_now)

    def _report_now(self) -> None:
        self._report = None
        self._due.set()

    async def _publish(self, shared: SharedLoads) -> None:
        """Publish changes until cancelled, one call at a time, so that calls stay in order."""
        now_s = asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._whole_due_s - now_s())):
                    await self._due.wait()
            self._due.clear()
            whole = now_s() >= self._whole_due_s
            if whole:
                self._whole_due_s = now_s() + WHOLE_S
            names = sorted(self._own.busy() if whole else self._changed)
            self._changed.clear()
            if not self._others():
                # A gateway that joins needs the whole load soon.
                self._whole_due_s = min(self._whole_due_s, now_s() + RETRY_S)
                continue
            try:
                await self._publish_of(shared, names, whole)
            except Unavailable as error:
                self._note_answer(error)
            except Exception as error:  # noqa: BLE001  (if this task ended, no other gateway would see this one's load)
                self._defects.note(error)
            else:
                continue
            await asyncio.sleep(RETRY_S)
            self._whole_due_s = now_s()

    async def _publish_of(self, shared: SharedLoads, names: Sequence[str], whole: bool) -> None:
        """Publish the load on these components; ``whole`` if there is no load on others."""
        if not names and not (whole and self._published):
            return
        self._published = True
        for first in range(0, max(1, len(names)), MAX_CHANGES_PER_CALL):
            batch = {name: self._own.of(name) for name in names[first : first + MAX_CHANGES_PER_CALL]}
            await shared.tell(self._gateway_id, batch, whole=whole and not first)
        self._published = bool(names) or not whole
        self._note_answer(None)

    def _note_answer(self, error: Unavailable | None) -> None:
        """Log the outcome of a call to Redis if it differs from the last one's."""
        answers = error is None
        if answers != self._answers:
            log.warning(
                "the other gateways' load can be read again"
                if error is None
                else f"planning without the other gateways' load: {error.message}"
            )
        self._answers = answers


@dataclass(slots=True, eq=False)
class AssignedLoad:
    """One answer's part of its gateway's load."""

    _load: OwnLoad
    # By component id: the answer's load (streams or tokens), and its prompt tokens that are not computed yet.
    _assigned: dict[str, tuple[int, int]] = field(default_factory=dict)
    _over: bool = False

    def end(self) -> None:
        """Remove the answer's load for good: later calls, e.g. for a chunk's acknowledgement after the stream's end, do
        nothing."""
        self.assign({})
        self._over = True

    def assign(self, amounts: dict[str, tuple[int, int]]) -> None:
        """Replace this answer's load, unless it has ended. ``amounts`` are OwnLoad.add's arguments by component id."""
        if self._over:
            return
        for component_id in {**self._assigned, **amounts}:
            before, now = (owner.get(component_id, (0, 0)) for owner in (self._assigned, amounts))
            if before != now:
                self._load.add(component_id, now[0] - before[0], now[1] - before[1])
        self._assigned = amounts

    def assign_plan(self, plan: RequestPlan, done_tokens: int = 0) -> None:
        """Replace this answer's load by that of a plan whose prefill range is acknowledged up to ``done_tokens``."""
        tail = plan.prompt_tokens - plan.split_tokens
        amounts = {plan.decode.component_id: (tail if plan.on_prefill_worker else 1, tail)}
        if plan.prefill is not None and plan.chunks:
            left = max(0, plan.split_tokens - max(done_tokens, plan.cached_tokens))
            amounts[plan.prefill.component_id] = left, left
        self.assign(amounts)
