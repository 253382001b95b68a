"""A simulated gateway: production admission, planning and load counts over its view of the fleet.

    arrive -> bounds -> turn -> [look-up -> candidates -> load of other gateways -> plan -> calls] -> end

Its view is the registry at its last look, and the reports of other gateways (FleetSite.sharing). A fleet has no
adapters and no blocks in buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lab.fleets.fleet_request import FleetRequest
from lab.fleets.site import FleetSite
from lab.fleets.traffic import ClientRecord, Request
from pillion.errors import Overloaded, PillionError, Unavailable
from pillion.gateway.admission.admission import Admission
from pillion.gateway.admission.answer_times import AnswerTimes, DecodeFleet
from pillion.gateway.admission.turns import AdmissionPermit, ModelTurns, shared_slots
from pillion.gateway.gateway_limits import GatewayLimits
from pillion.gateway.links.cluster import VIEW_POLL_S
from pillion.gateway.links.load_exchange import REPORT_S, AssignedLoad, OwnLoad
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, parse_policy
from pillion.gateway.planning.cluster_view import choose_by_hits, choose_workers
from pillion.gateway.planning.plan_cost import median_model
from pillion.gateway.planning.planner import RequestPlan
from pillion.gateway.planning.route_planner import RoutePlanner
from pillion.gateway.request import events as ev
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS
from pillion.rules.priority import queue_order
from pillion.wire.registry import ComponentRecord

MODEL = "m"
# Assumed time to the first token of a request without one.
PATIENCE_S = 120.0
Loads = tuple[Mapping[str, int], Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The flags of a gateway, with their names in :mod:`pillion.config`."""

    split_policy: str
    chunk_size: int
    max_inflight_requests: int
    max_inflight_tokens: int
    enable_prefix_caching: bool


class SimGateway:
    """Gateway ``number`` of ``gateways``. Read-only attributes: ``open``: admitted requests, ``records``: finished
    ones, ``plan_s``: real seconds of each plan. ``on_end`` is called at each end."""

    def __init__(self, site: FleetSite, settings: GatewaySettings, number: int, gateways: int) -> None:
        self.site = site
        self.routes = RoutePlanner()
        self.load = OwnLoad()
        self.open: dict[FleetRequest, AdmissionPermit] = {}
        self.records: list[ClientRecord] = []
        self.plan_s: list[float] = []
        self.on_end: Callable[[Request], None] = lambda request: None
        self.number = number
        self.clock = site.clock
        self._settings = settings
        self._policy = parse_policy(settings.split_policy)
        self.site_gateways = gateways
        self._arrivals = number
        self._admission = Admission(
            settings.max_inflight_requests, settings.max_inflight_tokens, clock=lambda: site.clock.now
        )
        self._turns = ModelTurns(self._slots, AnswerTimes(self._fleet))
        self._slots_of: tuple[float, int] = (-1.0, 0)
        self._waiting: dict[int, FleetRequest] = {}
        self._changed: set[str] = set()
        self._report_due = False
        if site.sharing:
            self.load.on_change = self._note

    def arrive(self, request: Request) -> None:
        """Admit or refuse a request."""
        now = self.clock.now
        try:
            permit = self._admission.enter(request.tenant, order=queue_order(0, now))
        except Overloaded as error:
            self._refuse(request, error)
            return
        try:
            self._admission.weigh(permit, request.prompt_tokens)
        except Overloaded as error:
            self._admission.leave(permit)
            self._refuse(request, error)
            return
        permit.allowed_tokens = request.answer_tokens
        flow = FleetRequest(self, request, now, GatewayLimits.max_attempts, AssignedLoad(self.load))
        try:
            self._turns.wait(permit, now)
        except Overloaded as error:
            self._admission.leave(permit)
            self._refuse(request, error)
            return
        permit.first_token_s, permit.last_token_s = lambda: flow.first_s, lambda: flow.last_s
        self.open[flow] = permit
        self._waiting[permit.number] = flow
        self._grant()
        if permit.number in self._waiting:
            self._turns.began(permit, now)

    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        """Free the slots of a request that had its turn."""
        self._turns.free(permit, generated_tokens)
        self._grant()
        self._turns.left(permit, self.clock.now)

    def ended(self, flow: FleetRequest) -> None:
        """Record a finished request."""
        permit = self.open.pop(flow)
        self._waiting.pop(permit.number, None)
        self._turns.give_up(permit)
        self._admission.leave(permit, len(flow.machine.emitted))
        self.records.append(flow.record(PATIENCE_S))
        self.site.running[self.number] = self._admission.requests
        self.on_end(flow.request)

    def _grant(self) -> None:
        self.site.running[self.number] = self._admission.requests
        for permit in self._turns.grant(self, self.clock.now, lambda number: False):
            flow = self._waiting.pop(permit.number)
            if permit.given_up is None:
                flow.start()
            else:
                del self.open[flow]
                self._admission.leave(permit)
                self._refuse(flow.request, permit.given_up)

    def _refuse(self, request: Request, error: Overloaded) -> None:
        self.records.append(ClientRecord(request, PATIENCE_S, (), error.message, failed=True))
        self.on_end(request)

    def _slots(self) -> int:
        seen_s = self.seen_s
        if self._slots_of[0] != seen_s:
            workers = [self.site.workers[one.component_id] for one in self.site.roster(seen_s).of_role["decode"]
                       if one.component_id in self.site.workers]  # fmt: skip
            others = [count for number, count in self.site.running.items() if number != self.number]
            self._slots_of = seen_s, shared_slots([worker.record for worker in workers], others)
        return self._slots_of[1]

    def _fleet(self) -> DecodeFleet | None:
        workers = self.site.roster(self.seen_s).of_role["decode"]
        lives = [self.site.workers[one.component_id] for one in workers if one.component_id in self.site.workers]
        records = [worker.seen(self.seen_s) for worker in lives]
        others = sum(count for number, count in self.site.running.items() if number != self.number)
        measured = median_model(records)
        return measured and DecodeFleet(measured, len(records), others)

    @property
    def seen_s(self) -> float:
        """Time of this gateway's last look at the registry."""
        phase_s = VIEW_POLL_S * self.number / self.site_gateways
        return max(0.0, (self.clock.now - phase_s) // VIEW_POLL_S * VIEW_POLL_S + phase_s)

    def components(self, prompt_tokens: int, hits: Mapping[str, int], spread: int) -> list[ComponentRecord]:
        """Return the nodes and workers to plan a request with, as of this gateway's last look."""
        site, seen_s = self.site, self.seen_s
        roster = site.roster(seen_s)

        def choose(role: str, nodes: Sequence[str]) -> list[ComponentRecord]:
            def beside() -> Iterator[ComponentRecord]:
                return (one for node_id in nodes for one in roster.on_node.get(node_id, ()) if one.role == role)

            return choose_workers(roster.of_role[role], beside, spread, lambda one: one.component_id in site.workers)

        decodes, prefills, names = choose_by_hits(choose, hits, spread)
        nodes = [site.nodes[name] for name in names if name in site.nodes]
        return [*nodes, *(site.workers[one.component_id].seen(seen_s) for one in (*decodes, *prefills))]

    def loads(self, components: Sequence[ComponentRecord]) -> Loads:
        """Return the known load of components: streams or tokens, and prompt tokens to compute."""
        amounts, tokens = self.load.by_component, self.load.tokens
        if not self.site.sharing:
            return amounts, tokens
        names = [one.component_id for one in components if one.role != "kvnode"]
        others = {name: self.site.reported.others(self.number, name) for name in names}
        return (
            {name: amounts.get(name, 0) + other.amount for name, other in others.items()},
            {name: tokens.get(name, 0) + other.tokens for name, other in others.items()},
        )

    def _note(self, component_id: str, grew: bool) -> None:
        """Record load as LoadExchange does: report growth at once, the rest within REPORT_S."""
        self._changed.add(component_id)
        if grew:
            self.clock.after(self.site.call_s / 2, self._send_reports)
        elif not self._report_due:
            self._report_due = True
            self.clock.after(REPORT_S, self._report)

    def _report(self) -> None:
        self._report_due = False
        self._send_reports()

    def _send_reports(self) -> None:
        for name in self._changed:
            self.site.reported.record(self.number, name, self.load)
        self._changed.clear()

    def plan(self, flow: FleetRequest, action: ev.LookUp, then: Callable[[RequestPlan | PillionError], None]) -> None:
        """Plan an attempt: query the index, then read the other gateways' load."""
        self._arrivals += 1
        spread = self._arrivals
        self.clock.after(self.site.call_s / 2, lambda: self._look(flow, action, spread, then))

    def _look(
        self, flow: FleetRequest, action: ev.LookUp, spread: int, then: Callable[[RequestPlan | PillionError], None]
    ) -> None:
        site = self.site
        known = flow.blocks if self._settings.enable_prefix_caching or action.attempt > 1 else ()
        each = TRACE_BLOCK_TOKENS // site.block_size
        hits = {name: count * each for name, count in site.index.longest_prefix(known).items()}
        components = self.components(len(flow.machine.tokens()), hits, spread)
        loads = self.loads(components)

        def decide() -> None:
            begun = time.perf_counter()
            try:
                decided = self._decide(flow, action, spread, hits, components, loads)
            except Unavailable as error:
                then(error)
                return
            self.plan_s.append(time.perf_counter() - begun)
            then(decided)

        if site.sharing:
            self.clock.after(site.call_s / 2, decide)
        else:
            decide()

    def _decide(
        self,
        flow: FleetRequest,
        action: ev.LookUp,
        spread: int,
        hits: Mapping[str, int],
        components: Sequence[ComponentRecord],
        loads: Loads,
    ) -> RequestPlan:
        tokens = len(flow.machine.tokens())
        seen = ClusterSnapshot(
            model=MODEL,
            prompt_tokens=tokens,
            hits=hits,
            components=components,
            policy=self._policy,
            block_size=self.site.block_size,
            chunk_tokens=self._settings.chunk_size,
            answered_tokens=tokens - flow.request.prompt_tokens,
            sent_load=loads[0],
            sent_tokens=loads[1],
            avoid=action.avoid,
            spread=spread,
        )
        return self.routes.plan(seen, self.clock.now)
