"""A cluster in simulated time: the real planner and schedulers, over workers whose steps cost as much as a model says.

    arrival --plan over last heartbeats--> [span on a prefill worker, chunk by chunk] --> decode worker --> tokens

A worker computes on cores of its own, or on one host whose workers lend each other cores. Prompts share no
prefix, memory is never short, and a call between components takes a constant time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import msgspec
import numpy as np

from benchmarks.closed_loop import ClosedLoad
from benchmarks.split_load import ClientRecord, Request
from pillion.core_board import LINGER_NS
from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.block_chain import ChunkDone, Holding
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence, SequenceSpec
from pillion.engine.scheduling.step_cost import SCALES, features
from pillion.engine.scheduling.step_plan import (
    CommitOrder,
    Outcome,
    SchedulerLoad,
    StepPlan,
    Update,
)
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, parse_policy
from pillion.gateway.planning.plan_auto import StickyChoices
from pillion.gateway.planning.plan_cost import Demand
from pillion.gateway.planning.planner import RequestPlan, make_plan
from pillion.types import SamplingParams
from pillion.wire.registry import ComponentRecord

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
PREFILL_STEP_TOKENS = 512
DECODE_STEP_TOKENS = 256
MAX_NUM_SEQS = 64
MAX_SPANS = 256
MAX_MODEL_LEN = 8192
HEARTBEAT_S = 1.0
# The time of a call between two components, and the relative standard deviation of a step's time.
CALL_S = 0.002
NOISE = 0.03
# What another core adds to the speed of one, where a step has several.
NEXT_CORE_SPEED = 0.9
# Every worker answers these prompts before the load, and so learns the cost of its steps.
WARM_UP_TOKENS = (64, 700, 64, 1500, 32, 600)
WARM_UP_S = 60.0
# A request without a first token this long after the last arrival counts as never answered.
PATIENCE_S = 120.0
ROOT = b"\7" * 32
NODE = ComponentRecord(component_id="kv-0", role="kvnode", address="x", node_id="kv-0")
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0)


class Clock:
    """Simulated seconds, and the queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Call ``event`` that much later; events of the same time run in the order of these calls."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self, until_s: float) -> None:
        """Run all events up to ``until_s``."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()


# Called at a step's end with the seconds that it would have taken longer on its worker's own cores.
StepEnd = Callable[[float], None]


class OwnCores:
    """Workers that lend each other nothing: a step takes what it costs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, number: int, seconds: float, done: StepEnd) -> None:
        """Run a step of worker ``number`` that takes ``seconds`` on its own cores."""
        self._clock.after(seconds, lambda: done(0.0))


@dataclass(slots=True)
class SharedStep:
    """A step under way: the work that is left, in seconds on one core, and the borrowed time of cores."""

    left_s: float
    done: StepEnd
    borrowed_s: float = 0.0


class SharedCores:
    """A host whose ``workers`` own ``cores_each`` cores each, and compute on those of workers that have nothing to do.

    As on the real board, an owner keeps its cores for a moment behind a step.
    """

    def __init__(self, clock: Clock, workers: int, cores_each: int) -> None:
        self._clock = clock
        self._workers = workers
        self._each = cores_each
        self._running: dict[int, SharedStep] = {}
        self._kept: dict[int, float] = {}
        self._at_s = 0.0
        self._version = 0

    def run(self, number: int, seconds: float, done: StepEnd) -> None:
        """Run a step of worker ``number`` that takes ``seconds`` on its own cores."""
        self._advance()
        self._kept.pop(number, None)
        self._running[number] = SharedStep(seconds * _speed(self._each), done)
        self._expect()

    def _lent(self) -> float:
        """Cores that each running step has borrowed."""
        busy = len(self._running.keys() | self._kept.keys())
        return (self._workers - busy) * self._each / max(1, len(self._running))

    def _advance(self) -> None:
        passed_s, lent = self._clock.now - self._at_s, self._lent()
        for step in self._running.values():
            step.left_s -= passed_s * _speed(self._each + lent)
            step.borrowed_s += passed_s * lent / self._each
        self._at_s = self._clock.now

    def _expect(self) -> None:
        """Await the next change: the end of a step, or of an owner's hold on its cores."""
        self._version += 1
        version, speed = self._version, _speed(self._each + self._lent())
        ends = [step.left_s / speed for step in self._running.values()]
        ends += [until - self._clock.now for until in self._kept.values()]
        if ends:
            self._clock.after(max(0.0, min(ends)), lambda: self._change(version))

    def _change(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._kept = {number: until for number, until in self._kept.items() if until > self._clock.now + 1e-9}
        ended = {number: step for number, step in self._running.items() if step.left_s < 1e-9}
        for number in ended:
            del self._running[number]
            self._kept[number] = self._clock.now + LINGER_NS / 1e9
        self._expect()
        for step in ended.values():
            step.done(step.borrowed_s)


def _speed(cores: float) -> float:
    return 1 + NEXT_CORE_SPEED * (cores - 1)


@dataclass(slots=True)
class Flow:
    """A running request, as the gateway and its client see it."""

    request: Request
    plan: RequestPlan
    arrived_s: float
    gateway: SimGateway
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


class SimWorker:
    """A worker around a real scheduler. The gateway sets ``on_chunk`` and ``on_update``."""

    def __init__(
        self,
        clock: Clock,
        cores: OwnCores | SharedCores,
        record: ComponentRecord,
        cost_s: tuple[float, ...],
        number: int,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.record = record
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._cores = cores
        self._number = number
        self._weights = np.array(cost_s) * SCALES
        self._noise = random.Random(number)
        prefill = record.role == "prefill"
        self._max_num_seqs = MAX_SPANS if prefill else MAX_NUM_SEQS
        self._scheduler = Scheduler(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=record.max_step_tokens,
            max_num_seqs=self._max_num_seqs,
            target_itl_s=record.target_itl_ms / 1000,
            target_itl_steps=record.target_itl_steps,
        )
        self._slots = itertools.count()
        self._ids = itertools.count(1)
        self._flows: dict[int, Flow] = {}
        self._busy = False
        self._load = SchedulerLoad()
        self.on_chunk: Callable[[Flow, ChunkDone], None] = lambda flow, chunk: None
        self.on_update: Callable[[Flow, Update], None] = lambda flow, update: None

    def beat(self) -> None:
        """Publish the worker's record, and again after each heartbeat's period."""
        self.record = self.fresh_record()
        self._clock.after(self._heartbeat_s, self.beat)

    def fresh_record(self) -> ComponentRecord:
        """Return the record as a heartbeat would send it now."""
        load = self._load
        return msgspec.structs.replace(
            self.record,
            **asdict(load),
            free_seqs=max(0, self._max_num_seqs - load.running_requests - load.waiting_requests),
            # The time of the heartbeat for now; readers replace it by its age.
            heartbeat_age_ms=int(self._clock.now * 1000),
        )

    def add(self, flow: Flow) -> None:
        """Add a request: a span on a prefill worker, a stream on a decode worker."""
        plan, seq_id = flow.plan, next(self._ids)
        span = self.record.role == "prefill"
        count = plan.split_tokens if span else plan.prompt_tokens
        chain = plan.cached_blocks if span else plan.split_blocks
        leased = (plan.split_blocks if span else plan.total_blocks) - chain
        spec = SequenceSpec(
            seq_id=seq_id,
            token_ids=np.full(count, abs(flow.request.number), dtype=np.int32),
            parent_hash=ROOT,
            prompt_tokens=count,
            sampling=None if span else GREEDY,
            max_tokens=0 if span else flow.request.answer_tokens,
            max_model_len=0 if span else MAX_MODEL_LEN,
            chunk_ends=tuple(itertools.accumulate(plan.chunks, initial=plan.cached_tokens))[1:] if span else (),
        )
        holding = Holding(seq_id, self._take(chain), self._take(leased))
        self._flows[seq_id] = flow
        self._scheduler.add(Sequence(spec, holding, BLOCK_SIZE, self._clock.now), self._clock.now)
        self._step()

    def _take(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._slots, count))

    def _step(self) -> None:
        if self._busy:
            return
        plan = self._scheduler.schedule(self._clock.now)
        self._hear(self._scheduler.flush(self._clock.now))
        if plan.pieces:
            self._busy = True
            seconds = float(self._weights @ features(plan.pieces)) * max(0.5, self._noise.gauss(1.0, NOISE))
            self._cores.run(self._number, seconds, lambda borrowed_s: self._done(plan, borrowed_s))

    def _done(self, plan: StepPlan, borrowed_s: float) -> None:
        self._busy = False
        sampled = Sampled((1,) * sum(piece.samples for piece in plan.pieces), borrowed_s=borrowed_s)
        self._hear(self._scheduler.commit(plan, sampled, self._clock.now))
        self._step()

    def _hear(self, outcome: Outcome) -> None:
        if outcome.empty:
            return
        self._load = outcome.load
        for update in outcome.updates:
            self.on_update(self._flows[update.seq_id], update)
        for chunk in outcome.chunks:
            self.on_chunk(self._flows[chunk.seq_id], chunk)
        for order in outcome.commits:
            self._clock.after(CALL_S, lambda order=order: self._committed(order))  # type: ignore[misc]
        if outcome.lease_blocks:
            slots = self._take(outcome.lease_blocks)
            self._clock.after(CALL_S, lambda: self._granted(slots))

    def _committed(self, order: CommitOrder) -> None:
        self._scheduler.committed(order.seq_id, order.slots, "", self._clock.now)
        for chunk in order.chunks:
            self.on_chunk(self._flows[order.seq_id], chunk)
        self._step()

    def _granted(self, slots: tuple[int, ...]) -> None:
        self._scheduler.granted(slots, self._clock.now)
        self._step()


class SimGateway:
    """Plans and follows requests, and counts what it has sent, as the gateway's OwnLoad does."""

    def __init__(self, clock: Clock, policy: str, workers: list[SimWorker], number: int, gateways: int) -> None:
        self._clock = clock
        self._policy = parse_policy(policy)
        self._workers = {worker.record.component_id: worker for worker in workers}
        self._streams: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._leanings = StickyChoices()
        self._demand = Demand()
        self._gateways = gateways
        self._first_spread = number
        self.on_end: Callable[[Flow], None] = lambda flow: None
        self.flows: list[Flow] = []
        self.plan_s: list[float] = []
        for worker in workers:
            worker.on_chunk = lambda flow, chunk: flow.gateway._acked(flow, chunk)
            if worker.record.role == "decode":
                worker.on_update = lambda flow, update: flow.gateway._told(flow, update)

    def arrive(self, request: Request) -> None:
        """Plan a request and send it to its first worker."""
        self._plan(request, self._clock.now)

    def components(self) -> list[ComponentRecord]:
        """Return the workers that a request is planned with, as of their last heartbeats."""
        return [self._aged(worker.record) for worker in self._workers.values()]

    def loads(self) -> tuple[Counter[str], Counter[str]]:
        """Return what is known to be under way, by component: streams or tokens, and prompt tokens to be computed."""
        return self._streams | Counter({p: n for p, n in self._tokens.items() if p.startswith("prefill")}), self._tokens

    def _plan(self, request: Request, arrived_s: float) -> None:
        every, shared = self._demand.per_s(self._clock.now)
        own_load, own_tokens = self.loads()
        snapshot = ClusterSnapshot(
            model="m",
            prompt_tokens=request.prompt_tokens,
            hits={},
            components=(NODE, *self.components()),
            policy=self._policy,
            block_size=BLOCK_SIZE,
            chunk_tokens=CHUNK_TOKENS,
            own_load=own_load,
            own_tokens=own_tokens,
            sticky_choice=self._leanings.of("m", request.prompt_tokens),
            spread=self._first_spread + len(self.flows),
            demand_per_s=(self._gateways * every, self._gateways * shared),
            demand_tokens=self._demand.mean_tokens,
        )
        begun = time.perf_counter()
        decided = make_plan(snapshot)
        self.plan_s.append(time.perf_counter() - begun)
        self._leanings.note("m", request.prompt_tokens, bool(decided.chunks))
        self._demand.note(self._clock.now, bool(decided.chunks), request.prompt_tokens)
        flow = Flow(request, decided, arrived_s, self)
        self.flows.append(flow)
        self._send(flow)

    def _send(self, flow: Flow) -> None:
        decided = flow.plan
        self._count(decided.decode, 1, decided.prompt_tokens - decided.split_tokens)
        if decided.prefill is not None and decided.chunks:
            self._count(decided.prefill, 0, sum(decided.chunks))
            prefill = self._workers[decided.prefill.component_id]
            self._clock.after(2 * CALL_S, lambda: self._offer(prefill, flow))
        else:
            self._submit(flow)

    def _count(self, worker: ComponentRecord, streams: int, tokens: int) -> None:
        """Count what is sent to a worker, or with negative numbers what it has done."""
        self._streams[worker.component_id] += streams
        self._tokens[worker.component_id] += tokens

    def _aged(self, record: ComponentRecord) -> ComponentRecord:
        return msgspec.structs.replace(record, heartbeat_age_ms=int(self._clock.now * 1000) - record.heartbeat_age_ms)

    def _submit(self, flow: Flow) -> None:
        decode = self._workers[flow.plan.decode.component_id]
        self._clock.after(2 * CALL_S, lambda: self._offer(decode, flow))

    def _offer(self, worker: SimWorker, flow: Flow) -> None:
        """The request has come to a worker."""
        worker.add(flow)

    def _acked(self, flow: Flow, chunk: ChunkDone) -> None:
        assert flow.plan.prefill is not None
        self._count(flow.plan.prefill, 0, -flow.plan.chunks[chunk.index])
        if chunk.end_tokens == flow.plan.split_tokens:
            self._submit(flow)

    def _told(self, flow: Flow, update: Update) -> None:
        decode, now = flow.plan.decode, self._clock.now
        for _ in update.token_ids:
            if flow.first_s:
                flow.gaps_s.append(now - flow.last_s)
            else:
                flow.first_s = now
                self._count(decode, 0, flow.plan.split_tokens - flow.plan.prompt_tokens)
            flow.last_s = now
        if update.ending is not None:
            self._count(decode, -1, 0)
            self.on_end(flow)


@dataclass(frozen=True, slots=True)
class SimCluster:
    """The number of prefill and decode workers, and their step costs.

    ``shared_cores``: how many cores each of them owns of one host, where they lend each other cores; 0: they do not.
    ``target_itl_steps`` is the target where ``target_itl_ms`` is 0. Workers beat every ``heartbeat_s`` seconds.
    """

    prefills: int
    decodes: int
    prefill_cost_s: tuple[float, ...]
    decode_cost_s: tuple[float, ...]
    target_itl_ms: float
    target_itl_steps: float = 0.0
    shared_cores: int = 0
    heartbeat_s: float = HEARTBEAT_S

    def workers(self, clock: Clock) -> list[SimWorker]:
        """Make the workers, with heartbeats that are spread over the period."""
        kinds = [("prefill", self.prefill_cost_s, PREFILL_STEP_TOKENS, 0.0, 0.0)] * self.prefills
        decode = ("decode", self.decode_cost_s, DECODE_STEP_TOKENS, self.target_itl_ms, self.target_itl_steps)
        kinds += [decode] * self.decodes
        cores = SharedCores(clock, len(kinds), self.shared_cores) if self.shared_cores else OwnCores(clock)
        found = []
        for number, (role, cost_s, tokens, target_ms, target_steps) in enumerate(kinds):
            record = ComponentRecord(
                component_id=f"{role}-{number}",
                role=role,
                address="x",
                node_id="kv-0",
                max_step_tokens=tokens,
                target_itl_ms=target_ms,
                target_itl_steps=target_steps,
                core_board="board" if self.shared_cores else "",
                core_share=1 / len(kinds) if self.shared_cores else 0.0,
            )
            worker = SimWorker(clock, cores, record, cost_s, number, self.heartbeat_s)
            clock.after(self.heartbeat_s * number / len(kinds), worker.beat)
            found.append(worker)
        return found


# Makes one of several gateways: from the clock, the policy, the workers, its number and how many there are.
MakeGateway = Callable[[Clock, str, list[SimWorker], int, int], SimGateway]


def simulate(
    cluster: SimCluster, policy: str, requests: list[Request], gateways: int = 1, make: MakeGateway = SimGateway
) -> tuple[list[ClientRecord], list[float]]:
    """Simulate a load; return the clients' records, and the real seconds of each plan.

    Gateways get requests in turn, and know each other's load by heartbeats, unless ``make`` makes others.
    """
    clock = Clock()
    workers = cluster.workers(clock)
    edge = [make(clock, policy, workers, number, gateways) for number in range(gateways)]
    for request in (*_warm_up(len(workers)), *requests):
        arrive = edge[request.number % gateways].arrive
        clock.after(WARM_UP_S + request.at_s, lambda arrive=arrive, request=request: arrive(request))  # type: ignore[misc]
    clock.run(WARM_UP_S + (requests[-1].at_s if requests else 0.0) + PATIENCE_S)
    return _records(edge), [seconds for gateway in edge for seconds in gateway.plan_s]


def simulate_closed(cluster: SimCluster, policy: str, load: ClosedLoad) -> tuple[list[ClientRecord], float]:
    """Simulate a closed loop; return the clients' records, and the seconds until the last answer's end.

    Raises RuntimeError where no answer ends for PATIENCE_S: a request was lost.
    """
    clock = Clock()
    workers = cluster.workers(clock)
    gateway = SimGateway(clock, policy, workers, 0, 1)
    for request in _warm_up(len(workers)):
        clock.after(WARM_UP_S + request.at_s, lambda request=request: gateway.arrive(request))  # type: ignore[misc]
    clock.run(WARM_UP_S)
    numbers = iter(range(load.requests))
    ended_s: list[float] = []
    until_s = WARM_UP_S

    def ask() -> None:
        for number in itertools.islice(numbers, 1):
            gateway.arrive(Request(number, 0.0, clock.now, load.input_tokens, load.output_tokens))

    def end(flow: Flow) -> None:
        if flow.request.number >= 0:
            ended_s.append(clock.now)
            ask()

    gateway.on_end = end
    for _ in range(load.concurrency):
        ask()
    while len(ended_s) < load.requests:
        until_s += HEARTBEAT_S
        clock.run(until_s)
        if until_s - max(ended_s, default=WARM_UP_S) > PATIENCE_S:
            raise RuntimeError(f"{len(ended_s)} of {load.requests} requests ended, and no other one in {PATIENCE_S} s")
    return _records([gateway]), ended_s[-1] - WARM_UP_S


def _records(edge: list[SimGateway]) -> list[ClientRecord]:
    return [
        ClientRecord(
            flow.request,
            flow.first_s - flow.arrived_s if flow.first_s else PATIENCE_S,
            tuple(flow.gaps_s),
            flow.plan.reason,
            flow.plan.split_tokens - flow.plan.cached_tokens,
        )
        for gateway in edge
        for flow in gateway.flows
        if flow.request.number >= 0
    ]


def _warm_up(workers: int) -> list[Request]:
    """Return the warm-up's requests, at times before 0 and with numbers below 0."""
    prompts = WARM_UP_TOKENS * workers
    gap_s = WARM_UP_S / 2 / len(prompts)
    return [Request(-n - 1, 0.0, n * gap_s - WARM_UP_S, tokens, 16) for n, tokens in enumerate(prompts)]
