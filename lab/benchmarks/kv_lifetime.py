"""How many of the prefix hits of an oracle a pool has that keeps KV as long as next turns are expected, and what other
tenants pay for it.

    python -m lab.benchmarks.kv_lifetime

A simulated fleet serves made traces of agents, beside tenants who chat, from one pool that is too small for all of
them, in turn with three orders of eviction:

    lru         the default
    retained    the room retentions: production's TurnGaps at the gateway, RetentionEviction at the node
    oracle      the block whose next use in the trace comes last leaves first (Belady, An. 1966), the ends of chains
                before their heads

The oracle knows the arrivals and not what depends on them, so it is a bound up to the times at which requests really
get their memory. Nobody tells the room anything but what a gateway sees: tenants, blocks, the tools that an answer
called, and when requests come and answers end.

Traces: `toolagent` has the lengths, shared prompts, rate and turns of Mooncake's (`lab.benchmarks.mooncake`); `agents`
the same with AGENT_TURNS turns a session. A session's answers but the last one call one of its tenant's tools, each
with log-normal gaps of its own. Of the calls ABANDONED never get a result, and of the last answers RESUMED are gone on
with. Beside them CHATS of the requests are of `conversation`, whose people come back or do not.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from lab.benchmarks.autoscaling import BLOCK_BYTES, BYTES_PER_S, DECODE_COST_S, PREFILL_COST_S
from lab.benchmarks.mooncake import WORKLOADS, TextKind, _systems
from lab.benchmarks.report import save, show_table
from lab.benchmarks.traces import TraceText
from lab.fleets.clock import Clock
from lab.fleets.fleet_request import FleetRequest
from lab.fleets.prefix_store import PrefixIndex, SimTicket
from lab.fleets.sim_gateway import SimGateway
from lab.fleets.traffic import ClientRecord, Request
from lab.fleets.tree_store import TreeStore, name_of
from lab.fleets.world import FleetConfig, simulate
from pillion.config import ServeFlags
from pillion.gateway.retentions.turn_gaps import KeepUntil, LetGo, TurnGaps
from pillion.kvstore.ledger.eviction import EvictionPolicy, LruEviction
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.retention_eviction import (
    MAX_RETAINED_PERCENT,
    MAX_TENANT_RETAINED_PERCENT,
    RetentionEviction,
)
from pillion.loadgen.figures import percentile
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS

# Seconds in the median, and tenants of either kind. Each agents' tenant has three of these tools.
TOOLS = {"read_file": 1.5, "search": 6.0, "fetch_page": 15.0, "run_tests": 60.0, "deploy": 200.0, "ask_a_person": 400.0}
SIGMA = 0.8
AGENTS, CHATTERS = 6, 6
AGENT_TURNS = 6.0
ABANDONED, RESUMED, CHATS = 0.04, 0.03, 0.2
BLOCK_TOKENS = 16
LEAD_S = 1800.0
# What a token of a prompt and of an answer takes where no fleet is simulated.
PROMPT_TOKEN_S, ANSWER_TOKEN_S, DRAIN_S = 1 / 20_000, 0.03, 600.0
CONVERSATION_TURNS = 1.6


@dataclass(frozen=True, slots=True)
class Label:
    """Holds what a gateway sees of a request beside its blocks."""

    tenant: str
    tools: tuple[str, ...]


def make_trace(turns: float, count: int, seed: int) -> tuple[list[Request], list[Label]]:
    """Returns numbered requests in order of their times, with their labels."""
    rng, ids = random.Random(seed), itertools.count(1)
    workload, chat = WORKLOADS["toolagent"], WORKLOADS["conversation"].kinds[0]
    rate = workload.requests / workload.seconds
    until_s = count / rate
    made: list[tuple[float, TraceText, int, Label]] = []
    kinds = [(f"agent-{number}", replace(workload.kinds[0], turns=turns)) for number in range(AGENTS)]
    kinds += [(f"chat-{number}", replace(chat, turns=CONVERSATION_TURNS)) for number in range(CHATTERS)]
    for number, (tenant, kind) in enumerate(kinds):
        systems = _systems(replace(kind, system_prompts=max(1, kind.system_prompts // AGENTS)), rng, ids)
        tools = [list(TOOLS)[(number + step) % len(TOOLS)] for step in (0, 1, 3)] if number < AGENTS else []
        share = (1 - CHATS) / AGENTS if number < AGENTS else CHATS / CHATTERS
        begin_s = -LEAD_S
        while begin_s < until_s:
            begin_s += rng.expovariate(rate * share / kind.turns)
            for at_s, text, answered, called in _session(kind, rng, ids, systems, begin_s, tools):
                if 0 <= at_s < until_s:
                    made.append((at_s, text, answered, Label(tenant, called)))
    made.sort(key=lambda row: row[0])
    requests = [
        Request(number, at_s, text.tokens, answered, tuple(text.blocks[: text.tokens // TRACE_BLOCK_TOKENS]))
        for number, (at_s, text, answered, _) in enumerate(made)
    ]
    return requests, [label for *_, label in made]


def _session(
    kind: TextKind,
    rng: random.Random,
    ids: Iterator[int],
    systems: Sequence[tuple[tuple[int, ...], int]],
    at_s: float,
    tools: Sequence[str],
) -> Iterator[tuple[float, TraceText, int, tuple[str, ...]]]:
    [shared] = rng.choices(systems, [1 / rank**kind.zipf for rank in range(1, len(systems) + 1)])
    text = TraceText(ids, shared[0], shared[1] + kind.first.tokens(rng))
    while True:
        answered = kind.answer.tokens(rng)
        goes_on = rng.random() >= 1 / kind.turns
        # So many of the answers without a call are gone on with all the same.
        calls = bool(tools) and goes_on and rng.random() >= RESUMED / (kind.turns - 1)
        tool = rng.choice(tools) if calls else ""
        yield at_s, text, answered, (tool,) if calls else ()
        if not goes_on or (calls and rng.random() < ABANDONED):
            return
        grown = TraceText(ids, tuple(text.blocks), text.tokens % TRACE_BLOCK_TOKENS)
        grown.grow(answered + kind.more.tokens(rng))
        text = grown
        # The answer takes some time itself.
        at_s += answered * 0.03
        at_s += TOOLS[tool] * math.exp(rng.gauss(0.0, SIGMA)) if calls else kind.gap_s.draw(rng)


class OracleEviction:
    """Evicts the block whose next use in the trace comes last."""

    def __init__(self, requests: Sequence[Request]) -> None:
        # By block, the arrivals that want it and have no ticket yet, in order.
        self._uses: dict[bytes, list[tuple[float, int]]] = {}
        for request in requests:
            for block in request.blocks:
                self._uses.setdefault(name_of(block), []).append((request.at_s, request.number))
        self._by_blocks = {id(request.blocks): request for request in requests}
        self._known: dict[Block, int] = {}
        self._heap: list[tuple[float, int, int, Block]] = []
        self._numbers = itertools.count()

    def granted(self, blocks: tuple[int, ...]) -> None:
        """Notes that the request with these very blocks got its ticket."""
        request = self._by_blocks[id(blocks)]
        for block in blocks:
            uses, own = self._uses[name_of(block)], (request.at_s, request.number)
            at = bisect_left(uses, own)
            # A request that is planned again opens a second ticket.
            if uses[at : at + 1] == [own]:
                del uses[at]

    def add(self, block: Block) -> None:
        uses = self._uses.get(block.hash)
        next_s = uses[0][0] if uses else math.inf
        number = self._known[block] = next(self._numbers)
        heapq.heappush(self._heap, (-next_s, -block.depth, number, block))

    def remove(self, block: Block) -> None:
        del self._known[block]

    def pop(self) -> Block:
        while True:
            *_, number, block = heapq.heappop(self._heap)
            if self._known.get(block) == number:
                del self._known[block]
                return block

    drop = remove

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Block]:
        return (row[3] for row in sorted(self._heap) if self._known.get(row[3]) == row[2])


class Learner:
    """Learns what a gateway learns, and tells the node's policy what production's gateway tells it."""

    def __init__(self, labels: Sequence[Label], policy: EvictionPolicy) -> None:
        self.gaps = TurnGaps()
        self._labels, self._policy = labels, policy

    def ended(self, request: Request, arrived_s: float, now: float, found_blocks: int) -> None:
        """Notes that an answer has ended."""
        chain = [name_of(block) for block in request.blocks]
        if not chain or request.number < 0 or not isinstance(self._policy, RetentionEviction):
            return
        label = self._labels[request.number]
        shared = self.gaps.turn(label.tenant, chain, arrived_s, found_blocks)
        wish = self.gaps.ended(label.tenant, chain, label.tools, now, shared)
        if isinstance(wish, KeepUntil):
            steps = [(now + age_s, worth) for age_s, worth in wish.worth]
            self._policy.retain(label.tenant, chain, steps, now + wish.until_s)
        elif isinstance(wish, LetGo):
            self._policy.let_go(label.tenant, chain, wish.shared_blocks)


class LabelledGateway(SimGateway):
    """Represents a simulated gateway that learns."""

    learner: Learner

    def ended(self, flow: FleetRequest) -> None:
        super().ended(flow)
        now = self.clock.now
        found = flow.machine.timings(now).cached_tokens // TRACE_BLOCK_TOKENS
        self.learner.ended(flow.request, flow.arrived_s, now, found)


class WatchedStore(TreeStore):
    """Represents a pool that tells an oracle of tickets."""

    def _pin_all(self, ticket, count: int) -> None:  # type: ignore[no-untyped-def]
        if isinstance(self.tree.policy, OracleEviction):
            self.tree.policy.granted(ticket.blocks)
        super()._pin_all(ticket, count)


def make_policy(order: str, requests: Sequence[Request], clock: Clock) -> EvictionPolicy:
    """Returns the policy of an order of eviction."""
    if order == "oracle":
        return OracleEviction(requests)
    if order == "lru":
        return LruEviction()
    percents = MAX_RETAINED_PERCENT, MAX_TENANT_RETAINED_PERCENT
    return RetentionEviction(LruEviction(), *percents, lambda: clock.now)


def make_store(index: PrefixIndex, capacity: int, block_size: int, policy: EvictionPolicy) -> TreeStore:
    """Returns a pool with a policy."""
    store = WatchedStore("kv-0", index, capacity, block_size, policy)
    if isinstance(policy, RetentionEviction):
        policy.bind(store.tree, capacity * block_size // TRACE_BLOCK_TOKENS)
    return store


def replayed(requests: Sequence[Request], labels: Sequence[Label], order: str, pool_tokens: int) -> float:
    """Returns the share of prompt tokens that are found where requests take as long as their lengths say; no fleet."""
    clock = Clock()
    policy = make_policy(order, requests, clock)
    store = make_store(PrefixIndex(), pool_tokens // BLOCK_TOKENS, BLOCK_TOKENS, policy)
    learner = Learner(labels, policy)
    hits = 0

    def arrive(request: Request) -> None:
        arrived_s = clock.now

        def granted(ticket: SimTicket) -> None:
            nonlocal hits
            found = min(ticket.pinned, (request.prompt_tokens - 1) // TRACE_BLOCK_TOKENS)
            hits += found * TRACE_BLOCK_TOKENS
            clock.after(request.prompt_tokens * PROMPT_TOKEN_S, lambda: store.commit(ticket, len(request.blocks)))
            seconds = request.prompt_tokens * PROMPT_TOKEN_S + request.answer_tokens * ANSWER_TOKEN_S

            def ended() -> None:
                store.close(ticket)
                learner.ended(request, arrived_s, clock.now, found)

            clock.after(seconds, ended)

        total = (request.prompt_tokens + request.answer_tokens) // BLOCK_TOKENS + 1
        store.open(SimTicket(request.blocks, total, granted))

    for request in requests:
        clock.at(request.at_s, lambda request=request: arrive(request))  # type: ignore[misc]
    clock.run(requests[-1].at_s + DRAIN_S)
    store.check_integrity()
    return hits / sum(request.prompt_tokens for request in requests)


def serve(
    requests: Sequence[Request], labels: Sequence[Label], order: str, pool_tokens: int, workers: int
) -> tuple[list[ClientRecord], EvictionPolicy]:
    """Simulates a trace with one order of eviction."""
    made: list[EvictionPolicy] = []

    def make(*args) -> LabelledGateway:  # type: ignore[no-untyped-def]
        gateway = LabelledGateway(*args)
        made.append(make_policy(order, requests, gateway.clock))
        gateway.learner = Learner(labels, made[0])
        return gateway

    def store_of(node_id: str, index: PrefixIndex, capacity: int, block_size: int) -> TreeStore:
        return make_store(index, capacity, block_size, made[0])

    flags = ServeFlags(
        prefill_workers=0,
        decode_workers=workers,
        gateway_workers=1,
        split_policy="colocated",
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_inflight_requests=100_000,
        max_inflight_tokens=10**12,
    )
    config = FleetConfig(
        flags=flags,
        prefill_cost_s=PREFILL_COST_S,
        decode_cost_s=DECODE_COST_S,
        node_blocks=pool_tokens // flags.block_size,
        block_bytes=BLOCK_BYTES,
        bytes_per_s=BYTES_PER_S,
        one_node=True,
        known_costs=True,
        macro_steps=True,
    )
    records, world = simulate(config, requests, make, store_of)
    world.check_integrity()
    return records, made[0]


def figures(records: Sequence[ClientRecord], labels: Sequence[Label]) -> dict[str, float]:
    """Returns the share of hits, and the waits for first tokens of agents and of the other tenants."""
    prompts = sum(record.request.prompt_tokens for record in records)
    others = [one.ttft_s for one in records if labels[one.request.number].tenant.startswith("chat")]
    agents = [one.ttft_s for one in records if labels[one.request.number].tenant.startswith("agent")]
    return {
        "hit_share": sum(record.cached_tokens for record in records) / prompts,
        "agents_ttft_p50_s": percentile(agents, 50),
        "agents_ttft_p99_s": percentile(agents, 99),
        "others_ttft_p50_s": percentile(others, 50),
        "others_ttft_p99_s": percentile(others, 99),
        "failed": sum(record.failed for record in records),
    }


def main() -> None:
    """Simulate, print, write results/kv_lifetime.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--hits", action="store_true", help="hits alone, without a fleet: a hundred times as fast")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--traces", nargs="+", default=["toolagent", "agents"])
    parser.add_argument("--name", default="kv_lifetime")
    args = parser.parse_args()
    turns = {"toolagent": WORKLOADS["toolagent"].kinds[0].turns, "agents": AGENT_TURNS}
    table = Table("trace", "pool, tokens", "seed", "order", "hits", "of oracle", "others' TTFT p99 s", "agents'")
    rows: list[dict[str, object]] = []
    for name, pool, seed in itertools.product(args.traces, args.pool_tokens, args.seeds):
        requests, labels = make_trace(turns[name], args.requests, seed)
        found: dict[str, dict[str, float]] = {}
        for order in ("oracle", "lru", "retained"):
            if args.hits:
                hits = replayed(requests, labels, order, pool)
                found[order] = {"hit_share": hits}
                rows.append({"trace": name, "pool_tokens": pool, "seed": seed, "order": order, "hit_share": hits})
                table.add_row(
                    name, f"{pool:,}", str(seed), order, f"{hits:.3f}", f"{hits / found['oracle']['hit_share']:.3f}"
                )
                continue
            records, policy = serve(requests, labels, order, pool, args.workers)
            one = found[order] = figures(records, labels)
            share = one["hit_share"] / found["oracle"]["hit_share"]
            shown = f"{one['hit_share']:.3f}", f"{share:.3f}", f"{one['others_ttft_p99_s']:.2f}"
            table.add_row(
                name, f"{pool:,}", str(seed), order, *shown,
                f"{one['agents_ttft_p50_s']:.2f}, {one['agents_ttft_p99_s']:.2f}",
            )  # fmt: skip
            row = {"trace": name, "pool_tokens": pool, "seed": seed, "order": order, "of_oracle": share, **one}
            if isinstance(policy, RetentionEviction):
                row |= {"used": policy.used_ever, "revoked": policy.revoked_ever, "expired": policy.expired_ever}
            rows.append(row)
    show_table(table)
    print(save(args.name, {"rows": rows}))


if __name__ == "__main__":
    main()
