"""Simulates a fleet: the production gateways' decisions and schedulers, over steps that cost what a model says.

    requests --> gateways --plan over last heartbeats--> [prefill range on a prefill worker] --> stream on a decode
    worker
                                                            '--- blocks at KV nodes, found by later prompts ---'

A fleet's size may change while it runs: :meth:`FleetWorld.start_worker`, :meth:`FleetWorld.drain_worker`. A worker
computes on cores of its own, or on one host whose workers lend each other cores. Nothing fails, and no stream is
preempted: a request waits for the memory of its prompt and its whole answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from lab.fleets.clock import Clock
from lab.fleets.host_cores import OwnCores, SharedCores
from lab.fleets.prefix_store import NodeStore, PrefixIndex
from lab.fleets.sim_gateway import MODEL, PATIENCE_S, GatewaySettings, SimGateway
from lab.fleets.sim_worker import SimWorker, WorkerSettings
from lab.fleets.site import FleetSite
from lab.fleets.state_store import StateIndex, StateStore
from lab.fleets.traffic import ClientRecord, Request
from pillion.config import AUTO, ServeFlags, parse_split_policy
from pillion.engine.backends.devices import cpu_budgets
from pillion.engine.scheduling.step_cost import AUTO_TARGET_STEPS, suitable_tokens
from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import ConfigError
from pillion.gateway.links.cluster import VIEW_POLL_S
from pillion.gateway.planning.plan_cost import DEFAULT_BYTES_PER_S
from pillion.kvstore.memory.memory import CUDA
from pillion.kvstore.transfer.hand_over import HandOver, HandOverLook, OtherNode, rooms_of
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS
from pillion.wire.registry import ComponentRecord

# A call between two components takes this long, there and back; a step's time has the relative standard deviation
# below.
CALL_S = 0.002
NOISE = 0.03
# Where workers have to learn the cost of their steps, every worker answers prompts of these lengths before the load
# begins.
WARM_UP_TOKENS = (64, 700, 64, 1500, 32, 600)
WARM_UP_ANSWER_TOKENS = 16
WARM_UP_S = 60.0
PREFILL, DECODE = "prefill", "decode"
MAX_PREFILLS = 256
# A simulation that waits for an unknown end simulates this many seconds at a time.
WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Describes a fleet at its start, and what its machines are like.

    Attributes:
        flags: of all components; of the numbers of workers and gateways, those at the start. Only SIMULATED_FLAGS
            matter.
        state_bytes: what the layers of the model carry from token to token, in a model with states.
        prefill_cost_s, decode_cost_s: seconds of a step, token, sequence, KV token read and query-key pair, of a worker
            of either kind.
        node_blocks: KV blocks of a node's pool; 0: as many as come.
        block_bytes, bytes_per_s: what a block takes from one node to another.
        one_node: all workers share one KV node; else each decode worker has one, over which the prefill workers are
            spread.
        shared_cores: how many cores each worker owns of one host, where they lend each other cores; 0: they do not.
        sharing: whether several gateways tell each other what they have under way.
        scale_down: at which seconds of the load how many nodes are drained, with their workers; the newest go first.
        residuals_s: what measured steps took beside their cost; see WorkerSettings.
        known_costs: workers know the cost of their steps and need not learn it; macro_steps: see SimWorker.
    """

    flags: ServeFlags
    prefill_cost_s: tuple[float, ...]
    decode_cost_s: tuple[float, ...]
    node_blocks: int = 0
    block_bytes: int = 0
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    one_node: bool = False
    shared_cores: int = 0
    sharing: bool = True
    known_costs: bool = False
    macro_steps: bool = False
    noise: float = NOISE
    call_s: float = CALL_S
    scale_down: tuple[tuple[float, int], ...] = ()
    state_bytes: int = 0
    residuals_s: tuple[float, ...] = ()

    @property
    def prefills(self) -> int:
        """Returns the number of prefill workers at the start."""
        return max(0, self.flags.prefill_workers)

    @property
    def state_pages(self) -> int:
        """Returns how many KV blocks a state takes, 0 in a model without states."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    def settled(self) -> FleetConfig:
        """Returns the fleet with a number for each budget that no flag sets: those of a CPU, or, with --device cuda,
        those that suit what steps cost."""
        budgets = cpu_budgets(self.flags)
        for name in budgets if self.flags.device == CUDA else ():
            prefill = name == "max_num_batched_prefill_tokens"
            cost, target = (self.prefill_cost_s, AUTO) if prefill else (self.decode_cost_s, self.flags.target_itl_ms)
            budgets[name] = max(budgets[name], suitable_tokens(StepModel._make(cost), target))
        return replace(self, flags=replace(self.flags, **budgets))

    def check(self) -> None:
        """Raises ConfigError for what cannot be simulated."""
        if TRACE_BLOCK_TOKENS % self.flags.block_size:
            raise ConfigError(f"--block-size {self.flags.block_size} does not divide a trace's {TRACE_BLOCK_TOKENS}")
        if self.macro_steps and (self.shared_cores or not self.known_costs):
            raise ConfigError("runs of steps as one event need known costs, and workers with cores of their own")
        gone = sum(nodes for _, nodes in self.scale_down)
        if gone and (self.one_node or gone >= self.flags.decode_workers):
            raise ConfigError(
                f"{gone} of {self.flags.decode_workers} decode workers' nodes cannot leave: one has to stay"
            )
        if self.state_bytes and not (self.block_bytes and self.node_blocks):
            raise ConfigError("--state-bytes needs the size of a block, --block-bytes, and --flag kv-pool-bytes=SIZE")
        if self.state_bytes and gone:
            raise ConfigError("--state-bytes: what a leaving node hands over of states is not simulated")
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
    shared_cores: int = 0,
    sharing: bool = False,
) -> FleetConfig:
    """Returns a few workers at one KV node, which learn the cost of their steps: what the benchmarks of planning
    compare."""
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
        shared_cores=shared_cores,
        sharing=sharing,
    )


# This function makes one of several gateways: from the site, the flags, its number and how many gateways there are.
MakeGateway = Callable[[FleetSite, GatewaySettings, int, int], SimGateway]
# This function makes a node's pool: from its name, the index, its KV blocks and the tokens of each.
MakeStore = Callable[[str, PrefixIndex, int, int], NodeStore]


class FleetWorld:
    """Runs a fleet. Attributes are for reading: ``clock``, ``site``, ``gateways``, ``config``, and ``handed_over``, the
    trace blocks that nodes which left gave to others.

    One thread makes all calls; everything follows from the config and the requests. ``make`` makes other gateways than
    usual, and ``make_store`` other pools.
    """

    def __init__(
        self, config: FleetConfig, make: MakeGateway = SimGateway, make_store: MakeStore | None = None
    ) -> None:
        config.check()
        pages = config.state_pages
        # A node's pool has states where the model's layers carry one.
        with_states = partial(StateStore, pages=pages, flags=config.flags)
        self._make_store = make_store or (with_states if pages else NodeStore)
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
            index=StateIndex() if pages else PrefixIndex(),
            state_pages=pages,
        )
        settings = GatewaySettings(**{field.name: getattr(flags, field.name) for field in fields(GatewaySettings)})
        self.gateways = [make(self.site, settings, number, count) for number in range(count)]
        total = config.prefills + flags.decode_workers
        self._cores: OwnCores | SharedCores = OwnCores(self.clock)
        if config.shared_cores:
            self._cores = SharedCores(self.clock, total, config.shared_cores)
        self._numbers = itertools.count()
        self._spread_over = max(1, total)
        self.handed_over = 0
        self._leaving: set[str] = set()
        # These are the records of the workers that the registry lists.
        self._listed: dict[str, ComponentRecord] = {}
        self._next_node = itertools.count()
        kinds = [*[PREFILL] * config.prefills, *[DECODE] * flags.decode_workers]
        # Decode workers come first, so that their nodes exist; workers of each kind are numbered in order.
        made = {number: self._make(role, number) for number, role in enumerate(kinds) if role == DECODE}
        made |= {number: self._make(role, number) for number, role in enumerate(kinds) if role == PREFILL}
        self._numbers = itertools.count(len(kinds))
        for number in sorted(made):
            self._announce(made[number], list_now=False)
        self._list()

    def start_worker(self, role: str, after_s: float = 0.0) -> str:
        """Starts one more worker of a role, PREFILL or DECODE; it serves ``after_s`` seconds from now. Returns its
        name. A prefill worker goes to the node with the fewest of them."""
        number = next(self._numbers)
        name = f"{role}-{number}"

        def ready() -> None:
            self._announce(self._make(role, number))

        self.clock.after(after_s, ready)
        return name

    def drain_worker(self, name: str, within_s: float | None = None) -> None:
        """Stops a worker: the registry lists it no more, it takes nothing new, and its running work may finish
        ``within_s`` seconds, by default --drain-timeout-s; then gateways take the rest elsewhere. Unknown names, and
        workers that are not ready yet, raise KeyError."""
        worker = self.site.workers[name]
        del self._listed[name]
        self._list()
        worker.drain()
        until_s = self.clock.now + (self.config.flags.drain_timeout_s if within_s is None else within_s)

        def look() -> None:
            if not worker.jobs or self.clock.now >= until_s:
                self._stop(worker)
            else:
                self.clock.after(min(WAIT_S, until_s - self.clock.now), look)

        look()

    def drain_nodes(self, count: int) -> None:
        """Drains the workers of the newest nodes. A node hands over what is warm when its last worker has ended, within
        --hand-over-timeout-s."""
        listed = dict.fromkeys(record.node_id for record in self._listed.values() if record.role == DECODE)
        # Nodes that leave together know it of each other.
        self._leaving |= set(list(listed)[-count:])
        for node_id in list(listed)[-count:]:
            for name in [name for name, record in self._listed.items() if record.node_id == node_id]:
                self.drain_worker(name)

    def workers(self, role: str) -> list[SimWorker]:
        """Returns the workers of a role that the registry lists, in the order of their starts."""
        return [self.site.workers[name] for name, record in self._listed.items() if record.role == role]

    def send(self, requests: Sequence[Request], begin_s: float = 0.0) -> None:
        """Lets requests arrive, ``begin_s`` seconds after their times; gateways get them in turn. Raises ConfigError
        for one that does not fit into a pool beside its states."""
        self._judge(requests)
        arrivals = iter(requests)

        def send_next(request: Request) -> None:
            self.gateways[request.number % len(self.gateways)].arrive(request)
            expect()

        def expect() -> None:
            for request in itertools.islice(arrivals, 1):
                at_s = max(self.clock.now, begin_s + request.at_s)
                self.clock.at(at_s, lambda request=request: send_next(request))  # type: ignore[misc]

        expect()

    def _judge(self, requests: Sequence[Request]) -> None:
        config, pages = self.config, self.site.working_pages * (2 if self.config.prefills else 1)
        if not pages or not requests:
            return
        longest = max(one.prompt_tokens + one.answer_tokens for one in requests)
        need = longest // config.flags.block_size + 1 + pages
        if need > config.node_blocks:
            raise ConfigError(
                f"--flag kv-pool-bytes: a text of {longest} tokens needs {need} blocks with its states, and a pool has "
                f"{config.node_blocks}"
            )

    def warm_up(self) -> float:
        """Lets every worker learn the cost of its steps, where it does not know it; returns when the load may begin."""
        if self.config.known_costs:
            return 0.0
        prompts = WARM_UP_TOKENS * len(self._listed)
        gap_s = WARM_UP_S / 2 / len(prompts)
        self.send([Request(-n - 1, n * gap_s, tokens, WARM_UP_ANSWER_TOKENS) for n, tokens in enumerate(prompts)])
        self.clock.run(WARM_UP_S)
        return WARM_UP_S

    def open_requests(self) -> int:
        """Returns how many requests gateways have taken on that have not ended."""
        return sum(self.site.running.values())

    def records(self) -> list[ClientRecord]:
        """Returns what clients have seen, in the order of the requests' numbers; the warm-up is left out."""
        found = [record for gateway in self.gateways for record in gateway.records]
        found += [flow.record(PATIENCE_S) for gateway in self.gateways for flow in gateway.open]
        kept = (record for record in found if record.request.number >= 0)
        return sorted(kept, key=lambda record: record.request.number)

    def check_integrity(self) -> None:
        """Raises AssertionError where a worker's or a node's accounts do not add up."""
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
            core_lending_table="table" if config.shared_cores else "",
            core_share=1 / self._spread_over if config.shared_cores else 0.0,
            state_pages=self.site.state_pages,
            working_pages=self.site.working_pages,
        )
        settings = WorkerSettings(
            cost_s=config.prefill_cost_s if prefill else config.decode_cost_s,
            block_size=flags.block_size,
            max_num_seqs=min(MAX_PREFILLS, record.max_step_tokens) if prefill else flags.max_num_seqs,
            noise=config.noise,
            heartbeat_s=flags.heartbeat_ms / 1000,
            call_s=config.call_s,
            residuals_s=config.residuals_s,
            known_cost=config.known_costs,
            macro_steps=config.macro_steps,
            state_pages=self.site.state_pages,
        )
        phase_s = settings.heartbeat_s * (number % self._spread_over) / self._spread_over
        worker = SimWorker(self.clock, self._cores, record, settings, number, phase_s)
        self.site.workers[name] = worker
        return worker

    def _node_of(self, role: str) -> str:
        """Returns the KV node of a new worker of a role."""
        stores = self.site.stores
        if self.config.one_node and stores:
            return next(iter(stores))
        if role == PREFILL and stores:
            beside = {node_id: 0 for node_id in stores if node_id not in self._leaving}
            for worker in self.site.workers.values():
                beside[worker.record.node_id] += worker.record.role == PREFILL
            return min(beside, key=lambda name: beside[name])
        name = f"kv-{next(self._next_node)}"
        stores[name] = self._make_store(name, self.site.index, self.config.node_blocks, self.config.flags.block_size)
        self.site.nodes[name] = ComponentRecord(
            component_id=name, role="kvnode", address="x", node_id=name, total_blocks=self.config.node_blocks
        )
        return name

    def _announce(self, worker: SimWorker, *, list_now: bool = True) -> None:
        self._listed[worker.record.component_id] = worker.record
        if list_now:
            self._list()

    def _list(self) -> None:
        self.site.list_workers(list(self._listed.values()), 2 * VIEW_POLL_S)

    def _stop(self, worker: SimWorker) -> None:
        """Ends the worker's process, and its node's with the last worker there."""
        name, node_id = worker.record.component_id, worker.record.node_id
        worker.stop()
        del self.site.workers[name]
        if not any(other.record.node_id == node_id for other in self.site.workers.values()):
            self._leave(node_id)

    def _leave(self, node_id: str) -> None:
        """Ends a node, after it has handed over what is warm."""
        stores, clock, flags = self.site.stores, self.clock, self.config.flags
        store, others = stores[node_id], {name: one for name, one in stores.items() if name not in self._leaving}
        self._leaving.add(node_id)
        others.pop(node_id, None)
        each = TRACE_BLOCK_TOKENS // flags.block_size
        plan = HandOver(
            store.warm_chains(),
            rooms_of(store.cached, [OtherNode(name, one.free, one.cached) for name, one in others.items()]),
            block_bytes=max(1, self.config.block_bytes) * each,
            bytes_per_s=flags.hand_over_bytes_per_s,
            begun_s=clock.now,
            until_s=clock.now + flags.hand_over_timeout_s,
        )

        def go_on() -> None:
            step = plan.next(clock.now)
            if isinstance(step, float):
                clock.at(step, go_on)
            elif isinstance(step, HandOverLook):
                # The time of a look-up is not simulated.
                plan.looked(step, {name: one.prefix(step.chain) for name, one in others.items()})
                go_on()
            elif step is not None:
                here, came = others[step.node_id].take(step.chain, step.most_blocks)
                plan.answered(step, here, came)
                clock.after(self.site.call_s + came * each * self.site.block_s, go_on)
            else:
                for name, chain in reversed(plan.whole):
                    others[name].touch(chain)
                stores.pop(node_id).leave()
                self._leaving.remove(node_id)
                del self.site.nodes[node_id]
                self.handed_over += plan.blocks

        go_on()


def simulate(
    config: FleetConfig,
    requests: Sequence[Request],
    make: MakeGateway = SimGateway,
    make_store: MakeStore | None = None,
) -> tuple[list[ClientRecord], FleetWorld]:
    """Simulates a load; returns the clients' records, and the world as it was left.

    The simulation ends when every request has, or PATIENCE_S after the last arrival.
    """
    world = FleetWorld(config, make, make_store)
    begin_s = world.warm_up()
    world.send(requests, begin_s)
    for at_s, nodes in config.scale_down:
        world.clock.at(begin_s + at_s, partial(world.drain_nodes, nodes))
    last_s = begin_s + (requests[-1].at_s if requests else 0.0)
    world.clock.run(last_s)
    while world.open_requests() and world.clock.now < last_s + PATIENCE_S:
        world.clock.run(world.clock.now + WAIT_S)
    return world.records(), world


def simulate_closed(
    config: FleetConfig, requests: Sequence[Request], concurrency: int
) -> tuple[list[ClientRecord], float]:
    """Simulates a closed loop, ``concurrency`` requests at any time, whatever their arrivals; returns the clients'
    records, and the seconds until the last answer's end.

    Raises RuntimeError where no answer ends for PATIENCE_S: a request was lost.
    """
    world = FleetWorld(config)
    begin_s = world.warm_up()
    left: Iterator[Request] = iter(requests)
    ended_s: list[float] = []

    def ask(gateway: SimGateway) -> None:
        for request in itertools.islice(left, 1):
            gateway.arrive(request)

    def end(request: Request) -> None:
        if request.number >= 0:
            ended_s.append(world.clock.now)
            ask(world.gateways[request.number % len(world.gateways)])

    for gateway in world.gateways:
        gateway.on_end = end
    for number in range(concurrency):
        ask(world.gateways[number % len(world.gateways)])
    while len(ended_s) < len(requests):
        world.clock.run(world.clock.now + WAIT_S)
        if world.clock.now - max(ended_s, default=begin_s) > PATIENCE_S:
            raise RuntimeError(f"{len(ended_s)} of {len(requests)} requests ended, and no other one in {PATIENCE_S} s")
    return world.records(), ended_s[-1] - begin_s
