"""Exchange of load between gateways: each publishes its own by Redis, and reads the others' before it plans.

    OwnLoad --note--> published: what is sent at once, what is done within REPORT_S, everything again every WHOLE_S
                        |
                        v
    SharedLoads, a hash per gateway --with_others, before a plan--> own load + theirs on the candidates

A single gateway exchanges nothing. If Redis does not answer, a gateway plans with its own count and the workers'
heartbeats.

An AssignedLoad is one answer's part of its gateway's own load.
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

# Delay in which the ends of work are batched into one call.
REPORT_S = 0.1
# Interval of publishing the whole load: a Redis that lost its data has it again well within LOAD_TTL_MS.
WHOLE_S = 2.0
RETRY_S = 0.5


class OwnLoad:
    """Work that this gateway has sent to each worker and that has not ended.

    ``by_component`` counts streams of decode workers and tokens of prefill workers; ``tokens`` counts prompt tokens yet
    to be computed, for both.
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
        """Return the components with load of this gateway."""
        return {*self.by_component, *self.tokens}


class LoadExchange:
    """The exchange of one gateway's load. ``start`` begins to publish it, ``aclose`` retracts it.

    Args:
        own: this gateway's load.
        shared: the connection to the others; None for a gateway that is always alone.
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
        self._whole_at_s = 0.0
        self._published = False
        self._teller: asyncio.Task[None] | None = None
        self._answers = True
        self._defects = Defects("the telling of this gateway's load")

    def start(self) -> None:
        """Begin to publish the load. Call once, on the event loop."""
        if self._shared is not None:
            self._own.on_change = self._note
            self._teller = asyncio.create_task(self._tell(self._shared), name="load for other gateways")

    async def aclose(self) -> None:
        """Retract the published load, if Redis answers, and close the connections."""
        self._own.on_change = lambda component_id, grew: None
        if self._report is not None:
            self._report.cancel()
        await end_tasks(self._teller)
        if self._shared is not None:
            if self._published:
                with contextlib.suppress(Unavailable):
                    await self._shared.tell(self._gateway_id, {}, whole=True)
            await self._shared.aclose()

    async def with_others(self, component_ids: Sequence[str]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the load of all gateways on some components, by component id: amounts and tokens as in OwnLoad. Never
        raises; if the others' load is unknown, only this gateway's own is returned."""
        others = self._others() if self._shared is not None else ()
        if self._shared is None or not others:
            return self._own.by_component, self._own.tokens
        return await self._added(self._shared, others, component_ids)

    async def _added(
        self, shared: SharedLoads, others: Sequence[str], component_ids: Sequence[str]
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        try:
            theirs = await shared.read(others, component_ids)
        except Unavailable as error:
            self._note_answer(error)
            return self._own.by_component, self._own.tokens
        self._note_answer(None)
        # Read after the answer, because what was sent meanwhile counts.
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

    async def _tell(self, shared: SharedLoads) -> None:
        """Publish changes until cancelled, one call at a time, so that no call overtakes another."""
        now_s = asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._whole_at_s - now_s())):
                    await self._due.wait()
            self._due.clear()
            whole = now_s() >= self._whole_at_s
            if whole:
                self._whole_at_s = now_s() + WHOLE_S
            names = sorted(self._own.busy() if whole else self._changed)
            self._changed.clear()
            if not self._others():
                # A gateway that has just joined needs the whole load.
                self._whole_at_s = min(self._whole_at_s, now_s() + RETRY_S)
                continue
            try:
                await self._tell_of(shared, names, whole)
            except Unavailable as error:
                self._note_answer(error)
            except Exception as error:  # noqa: BLE001  (without this task no gateway knows of this one's work)
                self._defects.note(error)
            else:
                continue
            await asyncio.sleep(RETRY_S)
            self._whole_at_s = now_s()

    async def _tell_of(self, shared: SharedLoads, names: Sequence[str], whole: bool) -> None:
        if not names and not (whole and self._published):
            return
        self._published = True
        for first in range(0, max(1, len(names)), MAX_CHANGES_PER_CALL):
            some = {name: self._own.of(name) for name in names[first : first + MAX_CHANGES_PER_CALL]}
            await shared.tell(self._gateway_id, some, whole=whole and not first)
        self._published = bool(names) or not whole
        self._note_answer(None)

    def _note_answer(self, error: Unavailable | None) -> None:
        """Log the outcome of a call to Redis if it differs from the last one's."""
        answers = error is None
        if answers != self._answers:
            log.warning(
                "the other gateways' work is known again"
                if error is None
                else f"planning without what the other gateways have under way: {error.message}"
            )
        self._answers = answers


@dataclass(slots=True, eq=False)
class AssignedLoad:
    """One answer's share of its gateway's ``load``, which the planner reads."""

    _load: OwnLoad
    # Per component: (streams or tokens of the answer, prompt tokens not yet computed there).
    _assigned: dict[str, tuple[int, int]] = field(default_factory=dict)
    _over: bool = False

    def end(self) -> None:
        """End the answer's share for good: a late report, such as a chunk's acknowledgement after the stream's end,
        assigns nothing any more."""
        self.assign({})
        self._over = True

    def assign(self, amounts: dict[str, tuple[int, int]]) -> None:
        """Replace this answer's share of each component (OwnLoad.add), unless it has ended."""
        if self._over:
            return
        for component_id in {**self._assigned, **amounts}:
            before, now = (owner.get(component_id, (0, 0)) for owner in (self._assigned, amounts))
            if before != now:
                self._load.add(component_id, now[0] - before[0], now[1] - before[1])
        self._assigned = amounts

    def assign_plan(self, plan: RequestPlan, done_tokens: int = 0) -> None:
        """Replace this answer's share by a plan's; its prefill range has been acknowledged up to ``done_tokens``."""
        tail = plan.prompt_tokens - plan.split_tokens
        amounts = {plan.decode.component_id: (tail if plan.on_prefill_worker else 1, tail)}
        if plan.prefill is not None and plan.chunks:
            left = max(0, plan.split_tokens - max(done_tokens, plan.cached_tokens))
            amounts[plan.prefill.component_id] = left, left
        self.assign(amounts)
