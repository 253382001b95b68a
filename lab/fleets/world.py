"""A simulated fleet: production gateways' decisions and schedulers, over steps whose cost a model predicts.

    requests --> gateways --plan over last heartbeats--> [prefill range on a prefill worker] --> stream on a decode
    worker
                                                            '--- blocks at KV nodes, found by later prompts ---'

Workers have their own cores. Nothing fails, and no stream is preempted: a request waits for the memory of its prompt
and its whole answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from lab.fleets.clock import Clock
from lab.fleets.prefix_store import NodeStore
from lab.fleets.sim_gateway import MODEL, PATIENCE_S, GatewaySettings, SimGateway
from lab.fleets.sim_worker import SimWorker, WorkerSettings
from lab.fleets.site import FleetSite
from lab.fleets.traffic import ClientRecord, Request
from pillion.config import AUTO, ServeFlags, parse_split_policy
from pillion.engine.backends.devices import cpu_budgets
from pillion.engine.scheduling.step_cost import AUTO_TARGET_STEPS, suitable_tokens
from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import ConfigError
from pillion.gateway.links.cluster import VIEW_POLL_S
from pillion.gateway.planning.plan_cost import DEFAULT_BYTES_PER_S
from pillion.kvstore.memory.memory import CUDA
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS
from pillion.wire.registry import ComponentRecord

# Round trip between two components, and the relative standard deviation of a step's time.
CALL_S = 0.002
NOISE = 0.03
# Prompts for every worker before the load, from which it learns the cost of its steps.
WARM_UP_TOKENS = (64, 700, 64, 1500, 32, 600)
WARM_UP_ANSWER_TOKENS = 16
WARM_UP_S = 60.0
PREFILL, DECODE = "prefill", "decode"
MAX_PREFILLS = 256
# Simulated seconds between two checks for an end.
WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """A fleet and its machines.

    Attributes:
        flags: of all components, including the numbers of workers and gateways. Only SIMULATED_FLAGS have an effect.
        prefill_cost_s, decode_cost_s: seconds per step, token, sequence, KV token read and query-key pair of a worker.
        node_blocks: KV blocks of a node's pool; 0: unlimited.
        block_bytes, bytes_per_s: size of a block and rate of transfers between nodes.
        one_node: all workers share one KV node; else each decode worker has one, and prefill workers are spread over
            them.
        sharing: gateways report their load to each other.
        known_costs: workers start with the cost of their steps; macro_steps: see SimWorker.
    """

    flags: ServeFlags
    prefill_cost_s: tuple[float, ...]
    decode_cost_s: tuple[float, ...]
    node_blocks: int = 0
    block_bytes: int = 0
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    one_node: bool = False
    sharing: bool = True
    known_costs: bool = False
    macro_steps: bool = False
    noise: float = NOISE
    call_s: float = CALL_S

    @property
    def prefills(self) -> int:
        return max(0, self.flags.prefill_workers)

    def settled(self) -> FleetConfig:
        """Return the fleet with each unset token budget filled in: those of a CPU or, with --device cuda, by the cost
        of steps."""
        budgets = cpu_budgets(self.flags)
        for name in budgets if self.flags.device == CUDA else ():
            prefill = name == "max_num_batched_prefill_tokens"
            cost, target = (self.prefill_cost_s, AUTO) if prefill else (self.decode_cost_s, self.flags.target_itl_ms)
            budgets[name] = max(budgets[name], suitable_tokens(StepModel._make(cost), target))
        return replace(self, flags=replace(self.flags, **budgets))

    def check(self) -> None:
        """Raise ConfigError for what cannot be simulated."""
        if TRACE_BLOCK_TOKENS % self.flags.block_size:
            raise ConfigError(f"--block-size {self.flags.block_size} does not divide a trace's {TRACE_BLOCK_TOKENS}")
        if self.macro_steps and not self.known_costs:
            raise ConfigError("runs of steps as one event need known costs")
        parse_split_policy(self.flags.split_policy)


def lab_fleet(
    prefills: int,
    decodes: int,
    prefill_cost_s: tuple[float, ...],
    decode_cost_s: tuple[float, ...],
    target_itl_ms: float | str = AUTO,
    *,
    split_policy: str = AUTO,
    gateways: int = 1,
    heartbeat_s: float = 1.0,
    sharing: bool = False,
) -> FleetConfig:
    """Return a small fleet at one KV node whose workers learn the cost of their steps."""
    flags = ServeFlags(
        prefill_workers=prefills,
        decode_workers=decodes,
        gateway_workers=gateways,
        target_itl_ms=target_itl_ms,
        split_policy=split_policy,
        heartbeat_ms=round(heartbeat_s * 1000),
    )
    return FleetConfig(
        flags=flags,
        prefill_cost_s=prefill_cost_s,
        decode_cost_s=decode_cost_s,
        one_node=True,
        sharing=sharing,
    )


class FleetWorld:
    """A running fleet. Read-only attributes: ``clock``, ``site``, ``gateways``, ``config``.

    Single-threaded; deterministic by config and requests.
    """

    def __init__(self, config: FleetConfig) -> None:
        config.check()
        self.config = config = config.settled()
        flags = config.flags
        self.clock = Clock()
        count = flags.gateway_workers
        self.site = FleetSite(
            clock=self.clock,
            block_size=flags.block_size,
            call_s=config.call_s,
            block_s=config.block_bytes / config.bytes_per_s,
            sharing=config.sharing and count > 1,
        )
        settings = GatewaySettings(**{field.name: getattr(flags, field.name) for field in fields(GatewaySettings)})
        self.gateways = [SimGateway(self.site, settings, number, count) for number in range(count)]
        self._spread_over = max(1, config.prefills + flags.decode_workers)
        self._next_node = itertools.count()
        kinds = [*[PREFILL] * config.prefills, *[DECODE] * flags.decode_workers]
        # Decode workers first, so that their nodes exist; numbers follow the order of ``kinds``.
        made = {number: self._make(role, number) for number, role in enumerate(kinds) if role == DECODE}
        made |= {number: self._make(role, number) for number, role in enumerate(kinds) if role == PREFILL}
        records = [made[number].record for number in sorted(made)]
        self._listed = {record.component_id: record for record in records}
        self._list()

    def workers(self, role: str) -> list[SimWorker]:
        """Return the workers of a role in the registry, in the order of their starts."""
        return [self.site.workers[name] for name, record in self._listed.items() if record.role == role]

    def send(self, requests: Sequence[Request], begin_s: float = 0.0) -> None:
        """Schedule requests, ``begin_s`` after their times, at the gateways in turn."""
        arrivals = iter(requests)

        def send_next(request: Request) -> None:
            self.gateways[request.number % len(self.gateways)].arrive(request)
            expect()

        def expect() -> None:
            for request in itertools.islice(arrivals, 1):
                at_s = max(self.clock.now, begin_s + request.at_s)
                self.clock.at(at_s, lambda request=request: send_next(request))  # type: ignore[misc]

        expect()

    def warm_up(self) -> float:
        """Make every worker learn the cost of its steps unless known; return the start time of the load."""
        if self.config.known_costs:
            return 0.0
        prompts = WARM_UP_TOKENS * len(self._listed)
        gap_s = WARM_UP_S / 2 / len(prompts)
        self.send([Request(-n - 1, n * gap_s, tokens, WARM_UP_ANSWER_TOKENS) for n, tokens in enumerate(prompts)])
        self.clock.run(WARM_UP_S)
        return WARM_UP_S

    def open_requests(self) -> int:
        """Return the number of unfinished requests."""
        return sum(self.site.running.values())

    def records(self) -> list[ClientRecord]:
        """Return the clients' records in the order of the requests' numbers, without the warm-up."""
        found = [record for gateway in self.gateways for record in gateway.records]
        found += [flow.record(PATIENCE_S) for gateway in self.gateways for flow in gateway.open]
        kept = (record for record in found if record.request.number >= 0)
        return sorted(kept, key=lambda record: record.request.number)

    def check_integrity(self) -> None:
        """Raise AssertionError on inconsistencies of a worker or node."""
        for worker in self.site.workers.values():
            worker.check_integrity()
        for store in self.site.stores.values():
            store.check_integrity()

    def _make(self, role: str, number: int) -> SimWorker:
        flags, config = self.config.flags, self.config
        prefill, auto = role == PREFILL, flags.target_itl_ms == AUTO
        target_ms = 0.0 if auto or prefill else float(flags.target_itl_ms)
        name = f"{role}-{number}"
        record = ComponentRecord(
            component_id=name,
            role=role,
            address="x",
            model=MODEL,
            node_id=self._node_of(role),
            block_size_tokens=flags.block_size,
            block_bytes=config.block_bytes,
            max_step_tokens=flags.max_num_batched_prefill_tokens if prefill else flags.max_num_batched_tokens,
            target_itl_ms=target_ms,
            target_itl_steps=AUTO_TARGET_STEPS if auto and not prefill else 0.0,
        )
        settings = WorkerSettings(
            cost_s=config.prefill_cost_s if prefill else config.decode_cost_s,
            block_size=flags.block_size,
            max_num_seqs=min(MAX_PREFILLS, record.max_step_tokens) if prefill else flags.max_num_seqs,
            noise=config.noise,
            heartbeat_s=flags.heartbeat_ms / 1000,
            call_s=config.call_s,
            known_cost=config.known_costs,
            macro_steps=config.macro_steps,
        )
        phase_s = settings.heartbeat_s * (number % self._spread_over) / self._spread_over
        worker = SimWorker(self.clock, record, settings, number, phase_s)
        self.site.workers[name] = worker
        return worker

    def _node_of(self, role: str) -> str:
        """Return the KV node of a new worker, starting one if needed."""
        stores = self.site.stores
        if self.config.one_node and stores:
            return next(iter(stores))
        if role == PREFILL and stores:
            beside = dict.fromkeys(stores, 0)
            for worker in self.site.workers.values():
                beside[worker.record.node_id] += worker.record.role == PREFILL
            return min(beside, key=lambda name: beside[name])
        name = f"kv-{next(self._next_node)}"
        stores[name] = NodeStore(name, self.site.index, self.config.node_blocks, self.config.flags.block_size)
        self.site.nodes[name] = ComponentRecord(
            component_id=name, role="kvnode", address="x", node_id=name, total_blocks=self.config.node_blocks
        )
        return name

    def _list(self) -> None:
        self.site.list_workers(list(self._listed.values()), 2 * VIEW_POLL_S)


def simulate(config: FleetConfig, requests: Sequence[Request]) -> tuple[list[ClientRecord], FleetWorld]:
    """Simulate a load; return the clients' records and the world at the end: when all requests have ended, or
    PATIENCE_S after the last arrival.
    """
    world = FleetWorld(config)
    begin_s = world.warm_up()
    world.send(requests, begin_s)
    last_s = begin_s + (requests[-1].at_s if requests else 0.0)
    world.clock.run(last_s)
    while world.open_requests() and world.clock.now < last_s + PATIENCE_S:
        world.clock.run(world.clock.now + WAIT_S)
    return world.records(), world
