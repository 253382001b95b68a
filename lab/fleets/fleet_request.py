"""One request in simulated time: the production request machine, and the calls that its actions make (I9).

    arrive -> machine --actions--> look-up, ticket, fetch, prefill range, stream --events--> machine ... -> Finish or
    Fail

Each call ends with the event of the gateway's own call (:mod:`pillion.gateway.request.component_calls`). Calls of a
finished attempt are dropped. The own calls need an event loop, channels and messages: with them
(:mod:`lab.simulator.world`) a core simulates 25 requests/s, here 240 to 270 (2026-11-23, on a loaded machine).
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lab.fleets.prefix_store import NodeStore, SimTicket
from lab.fleets.sim_worker import TOKEN, SimWorker, WorkerJob
from lab.fleets.site import FleetSite
from lab.fleets.traffic import ClientRecord, Request
from lab.testbed.admitted import admitted_request
from pillion.engine.scheduling.block_chain import ChunkDone
from pillion.engine.scheduling.sequence import Ending
from pillion.errors import NotFound, PillionError, Unavailable
from pillion.gateway.admission.tenants import flow_of
from pillion.gateway.links.load_exchange import AssignedLoad
from pillion.gateway.planning.plan_cost import FETCH_CALL_S
from pillion.gateway.planning.planner import FetchPlan, RequestPlan
from pillion.gateway.planning.route_planner import RoutePlanner
from pillion.gateway.request import events as ev
from pillion.gateway.request.request_machine import RequestMachine
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS

GONE = "the worker has stopped"


class RequestHost(Protocol):
    """The methods of its gateway that a request calls."""

    site: FleetSite
    routes: RoutePlanner

    def plan(self, flow: FleetRequest, action: ev.LookUp, then: Callable[[RequestPlan | PillionError], None]) -> None:
        """Plan an attempt; ``then`` is called later with the plan or the error."""

    def ended(self, flow: FleetRequest) -> None:
        """Record the end of a request."""


class FleetRequest:
    """One request. Read-only attributes: ``request``, ``machine``, ``first_s``, ``gaps_s``, ``error``, and ``blocks``,
    the cacheable ones of its prompt."""

    def __init__(self, host: RequestHost, request: Request, arrived_s: float, max_attempts: int, load: AssignedLoad):
        self.request = request
        self.blocks = request.blocks[: request.prompt_tokens // TRACE_BLOCK_TOKENS]
        self.arrived_s = arrived_s
        prompt = (TOKEN,) * request.prompt_tokens
        self.machine = RequestMachine(
            admitted_request(prompt, request.answer_tokens, max_attempts=max_attempts, arrived=arrived_s)
        )
        self.first_s = self.last_s = 0.0
        self.gaps_s: array[float] = array("d")
        self.error: PillionError | None = None
        self._host = host
        self._site = host.site
        self._load = load
        # Incremented when the calls of an attempt become stale, which makes their later events no-ops.
        self._work = 0
        self._ticket: SimTicket | None = None
        self._store: NodeStore | None = None
        # Closes the ticket of a prefill range on another node.
        self._close_remote: Callable[[], None] = lambda: None
        self._prefill_range: tuple[SimWorker, WorkerJob] | None = None
        # True while a prefill range runs on a prefill worker.
        self._prefill_open = False
        self._stream: tuple[SimWorker, WorkerJob] | None = None
        # A stream begins when its submit has arrived and its awaited blocks are there.
        self._submitted: ev.SubmitDecode | None = None
        self._blocks_here = 0
        self._begun = False

    def start(self) -> None:
        """Start the request after its admission."""
        self._perform(self.machine.start())

    def record(self, patience_s: float) -> ClientRecord:
        """Return the client's view; without a first token, ``patience_s`` counts as its time."""
        timings, plan = self.machine.timings(self._site.clock.now), self.machine.plan
        ttft_s = self.first_s - self.arrived_s if self.first_s else patience_s
        reason = self.error.message if self.error is not None else plan.reason if plan is not None else ""
        whole = len(self.gaps_s) + bool(self.first_s) == self.request.answer_tokens
        tokens = timings.prefilled_tokens, timings.cached_tokens
        return ClientRecord(self.request, ttft_s, self.gaps_s, reason, *tokens, not whole, timings.replays)

    @property
    def begun(self) -> bool:
        """True if a worker has begun the prompt in this attempt."""
        return self._prefill_range is not None or self._blocks_here > 0

    def _post(self, event: ev.Event) -> None:
        self._perform(self.machine.handle(event, self._site.clock.now))

    def _perform(self, actions: Sequence[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.Emit():
                    pass
                case ev.LookUp():
                    self._look_up(action)
                case ev.OpenTicket():
                    self._load.assign_plan(action.plan)
                    self._open(action)
                case ev.Fetch():
                    self._fetch(action)
                case ev.RunPrefill():
                    self._begun = False
                    self._load.assign_plan(action.plan)
                    self._run_prefill(action)
                case ev.SubmitDecode():
                    self._submit(action)
                case ev.StopWork():
                    self._stop_work()
                case ev.CancelDecode():
                    self._cancel_stream()
                case ev.ReleaseTicket():
                    if self._stream is None and self._submitted is None:
                        self._close_ticket()
                case ev.Finish():
                    self._over(None)
                case ev.Fail(error):
                    self._over(error)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``seconds``, unless the current attempt's calls are stale by then."""
        number = self._work

        def due() -> None:
            if number == self._work:
                call()

        self._site.clock.after(seconds, due)

    def _look_up(self, action: ev.LookUp) -> None:
        self._load.assign({})

        def planned(plan: RequestPlan | PillionError) -> None:
            if isinstance(plan, PillionError):
                self._post(ev.PlanFailed(action.attempt, plan, retryable=False))
            else:
                self._post(ev.PlanMade(action.attempt, plan))

        number = self._work
        self._later(
            action.after_ms / 1000,
            lambda: self._host.plan(self, action, lambda plan: planned(plan) if number == self._work else None),
        )

    def _open(self, action: ev.OpenTicket) -> None:
        plan, site = action.plan, self._site

        def granted(pinned: int) -> None:
            hold = ev.TicketHold(plan.node_id, 0, 0)
            self._later(site.call_s / 2, lambda: self._post(ev.TicketGranted(action.attempt, hold, pinned)))

        def arrived() -> None:
            if not self._open_at(plan, granted):
                self._post(ev.TicketLost(action.attempt, Unavailable("the KV node has stopped"), retryable=True))

        self._later(site.call_s / 2, arrived)

    def _open_at(self, plan: RequestPlan, granted: Callable[[int], None]) -> bool:
        """Open the request's ticket at its plan's node; ``granted`` is called with the number of pinned blocks. Return
        False if the node is gone."""
        site, store = self._site, self._site.stores.get(plan.node_id)
        if store is None:
            return False
        total = (self.request.prompt_tokens + self.request.answer_tokens) // site.block_size + 1
        opened = SimTicket(
            self.blocks,
            total,
            lambda ticket: granted(ticket.pinned * TRACE_BLOCK_TOKENS // site.block_size),
        )
        self._store, self._ticket = store, opened
        store.open(opened)
        return True

    def _fetch(self, action: ev.Fetch) -> None:
        """Fetch the blocks that the sources still have."""
        here, took_s, blocks = action.plan.cached_blocks, *self._brought(action.wanted)
        count = max(0, min(action.wanted.blocks, blocks) - here)
        seconds = took_s + count * self._site.block_s

        def brought() -> None:
            # Without sources only this node had the blocks, and has evicted them since the plan.
            if sources := action.wanted.source_node_ids:
                now = self._site.clock.now
                self._host.routes.fetch_paces.observe(sources[0], action.plan.node_id, count, seconds, now)
            self._commit((here + count) * self._site.block_size)
            self._post(ev.BlocksFetched(action.attempt, here + count))

        self._later(seconds, brought)

    def _brought(self, wanted: FetchPlan) -> tuple[float, int]:
        """Return the seconds of a fetch call, and how many of the wanted blocks the best source has."""
        chain = self.blocks[: -(-wanted.blocks * self._site.block_size // TRACE_BLOCK_TOKENS)]
        stores = (self._site.stores.get(name) for name in wanted.source_node_ids)
        most = max((store.prefix(chain) for store in stores if store is not None), default=0)
        return FETCH_CALL_S, most * TRACE_BLOCK_TOKENS // self._site.block_size

    def _run_prefill(self, action: ev.RunPrefill) -> None:
        plan, worker = action.plan, self._worker(action.plan.prefill.component_id if action.plan.prefill else "")
        self._blocks_here, self._prefill_open = plan.cached_blocks, True
        if worker is None:
            self._prefill_lost(action.attempt)
        elif plan.remote:
            self._open_remote(action, worker)
        else:
            self._later(self._site.call_s, lambda: self._offer_prefill(worker, action, self._acked))

    def _offer_prefill(
        self,
        worker: SimWorker,
        action: ev.RunPrefill,
        acked: Callable[[ev.RunPrefill, ChunkDone], None],
    ) -> None:
        """Submit the prefill range to its worker, under a ticket at its node."""
        plan = action.plan
        ends = itertools.accumulate(plan.chunks, initial=plan.cached_tokens)
        job = WorkerJob(
            tokens=plan.split_tokens,
            computed_blocks=plan.cached_blocks,
            chunk_ends=tuple(end for end in ends if end > plan.cached_tokens),
            on_chunk=lambda chunk: acked(action, chunk),
            flow=flow_of(self.request.tenant, ""),
        )
        self._prefill_range = worker, job
        worker.add(job)

    def _acked(self, action: ev.RunPrefill, chunk: ChunkDone) -> None:
        """Handle the arrival of a chunk's KV at the decode worker's node."""
        plan, last = action.plan, chunk.end_tokens == action.plan.split_tokens
        self._commit(chunk.end_tokens)
        self._blocks_here = chunk.end_tokens // plan.block_size
        if last:
            self._prefill_range, self._prefill_open = None, False
        if not self._begun:
            self._load.assign_plan(plan, chunk.end_tokens)
        ack: Any = chunk
        self._post(ev.ChunkAcked(action.attempt, ack))
        if last:
            self._post(ev.PrefillEnded(action.attempt, chunk.end_tokens))
        self._begin_stream()

    def _prefill_lost(self, attempt: int) -> None:
        self._prefill_range, self._prefill_open = None, False
        self._close_remote()
        self._post(ev.PrefillLost(attempt, Unavailable(GONE), retryable=True))

    def _open_remote(self, action: ev.RunPrefill, worker: SimWorker) -> None:
        """Open a prefill range on another node: a ticket there, the cached prefix, and each chunk, transferred as it is
        computed."""
        plan, site, store = action.plan, self._site, self._site.stores.get(worker.record.node_id)
        if store is None:
            self._prefill_lost(action.attempt)
            return
        carried: deque[ChunkDone] = deque()
        # True once the ticket at the other node is closed, which makes calls in flight stale.
        closed = False

        def close() -> None:
            nonlocal closed
            closed = True
            store.close(ticket)

        def carry() -> None:
            """Transfer the oldest chunk to the decode worker's node, then the next one."""
            end = carried[0].end_tokens
            blocks = end // site.block_size - self._blocks_here

            def here() -> None:
                if closed:
                    return
                chunk = carried.popleft()
                if chunk.end_tokens == plan.split_tokens:
                    self._close_remote()
                self._acked(action, chunk)
                if carried:
                    carry()

            self._later(FETCH_CALL_S + blocks * site.block_s, here)

        def computed(_: ev.RunPrefill, chunk: ChunkDone) -> None:
            store.commit(ticket, chunk.end_tokens // TRACE_BLOCK_TOKENS)
            carried.append(chunk)
            if len(carried) == 1:
                carry()

        def granted(ticket: SimTicket) -> None:
            there = min(ticket.pinned * TRACE_BLOCK_TOKENS, plan.cached_tokens)
            lacking = (plan.cached_tokens - there) // site.block_size
            brought_s = FETCH_CALL_S + lacking * site.block_s if lacking else 0.0
            store.commit(ticket, plan.cached_tokens // TRACE_BLOCK_TOKENS)
            self._later(brought_s + site.call_s, lambda: self._offer_prefill(worker, action, computed))

        whole = self.blocks[: plan.split_tokens // TRACE_BLOCK_TOKENS]
        ticket = SimTicket(whole, plan.split_blocks + 1, granted)
        self._close_remote = close

        def gave_up() -> None:
            if ticket.waiting and not closed:
                close()
                self._prefill_open = False
                self._post(ev.PrefillEnded(action.attempt, plan.cached_tokens))

        def arrived() -> None:
            store.open(ticket)
            self._later(ev.MAX_REMOTE_ADMISSION_WAIT_S, gave_up)

        self._later(site.call_s, arrived)

    def _stop_work(self) -> None:
        self._work += 1
        self._prefill_open = False
        if self._prefill_range is not None:
            worker, job = self._prefill_range
            self._prefill_range = None
            worker.cancel(job)
        self._close_remote()
        if self._stream is None:
            self._submitted = None
            self._close_ticket()

    def _submit(self, action: ev.SubmitDecode) -> None:
        self._begun = False
        self._load.assign_plan(action.plan, 0 if action.awaited_blocks else action.plan.split_tokens)
        if not action.awaited_blocks:
            self._blocks_here = action.plan.split_blocks

        def arrived() -> None:
            self._submitted = action
            if action.hold is not None:
                self._begin_stream()
            elif not self._open_at(action.plan, opened):
                self._stream_lost(action.attempt)

        def opened(pinned: int) -> None:
            if pinned < action.plan.cached_blocks:
                self._stream_lost(action.attempt, NotFound("less of the prompt is here: plan again"))
                return
            self._blocks_here = min(pinned, action.plan.limit_blocks)
            self._begin_stream()

        self._later(self._site.call_s, arrived)

    def _begin_stream(self) -> None:
        action = self._submitted
        if action is None or self._stream is not None or self._blocks_here < action.awaited_blocks:
            return
        worker, attempt = self._worker(action.plan.decode.component_id), action.attempt
        if worker is None:
            self._stream_lost(attempt)
            return
        job = WorkerJob(
            tokens=len(self.machine.prompt) + len(self.machine.emitted),
            computed_blocks=self._blocks_here,
            answer_tokens=self.request.answer_tokens - len(self.machine.emitted),
            on_committed=lambda tokens: self._commit(min(tokens, self.request.prompt_tokens)),
            on_tokens=lambda times, gaps: self._sampled(attempt, times, gaps),
            on_end=lambda ending: self._stream_ended(attempt, ending),
            flow=flow_of(self.request.tenant, ""),
        )
        self._stream, self._submitted = (worker, job), None
        self._post(ev.TicketAdopted(attempt, self._blocks_here))
        worker.add(job)

    def _sampled(self, attempt: int, times: Sequence[float], gaps: array[float]) -> None:
        if self.last_s:
            self.gaps_s.append(times[0] - self.last_s)
        else:
            self.first_s = times[0]
        self.gaps_s.extend(gaps)
        self.last_s = times[-1]
        if not self._begun and self._stream is not None:
            self._begun = True
            self._load.assign({self._stream[0].record.component_id: (1, 0)})
            self._commit(self.request.prompt_tokens)
        self._post(ev.TokensSampled(attempt, (TOKEN,) * len(times)))

    def _stream_ended(self, attempt: int, ending: Ending) -> None:
        self._stream = None
        self._close_ticket()
        if ending.reason is not None:
            self._post(ev.DecodeFinished(attempt, ending.reason, None))
        else:
            self._post(ev.DecodeLost(attempt, ending.error or Unavailable(GONE), retryable=True))

    def _stream_lost(self, attempt: int, error: PillionError | None = None) -> None:
        self._stream = self._submitted = None
        if not self._prefill_open:
            # With an open prefill range the ticket stays for the next stream.
            self._work += 1
            self._close_ticket()
            self._load.assign({})
        self._post(ev.DecodeLost(attempt, error or Unavailable(GONE), retryable=True))

    def _cancel_stream(self) -> None:
        self._load.assign({})
        self._submitted = None
        self._work += 1
        if self._stream is not None:
            worker, job = self._stream
            self._stream = None
            worker.cancel(job)
        self._close_ticket()

    def _worker(self, component_id: str) -> SimWorker | None:
        return self._site.workers.get(component_id)

    def _commit(self, tokens: int) -> None:
        """Commit the prompt's KV before ``tokens`` at the ticket's node."""
        if self._ticket is not None and self._store is not None and self._ticket.open:
            self._store.commit(self._ticket, tokens // TRACE_BLOCK_TOKENS)

    def _close_ticket(self) -> None:
        if self._ticket is not None and self._store is not None:
            self._store.close(self._ticket)
        self._ticket = None

    def _over(self, error: PillionError | None) -> None:
        self.error = error
        self._load.assign({})
        self._work += 1
        self._close_remote()
        self._close_ticket()
        self._host.ended(self)
