"""Eviction policies over a trace: the share of prompt blocks that pools of several sizes find, and a policy's cost.

Every request goes through the real ledger: it is admitted, its missing blocks are leased and committed, and its ticket
is released after ``--in-flight`` more requests, or when their memory is needed. A pool's size is a share of all
different blocks of the trace; the bound is the share that an infinite pool would find.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.report import save, show_table
from benchmarks.traces import generate
from pillion.kvstore.ledger.eviction import make_policy
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import SESSION, Block
from pillion.loadgen.traces import TraceRequest, read_trace
from pillion.v1.kvnode_pb2 import CommitRun

POLICIES = ("lru", "lfu")
COST_BLOCKS, COST_CHAIN = 200_000, 100


def serve(trace: Sequence[TraceRequest], policy: str, num_slots: int, in_flight: int) -> float:
    """Replay a trace; return the share of blocks that were cached when their request came."""
    ids = itertools.count(1)
    ledger = Ledger(ids.__next__, 0, make_policy(policy))
    ledger.shape(num_slots)
    epoch = ledger.attach("all", SESSION)
    running: deque[int] = deque()
    wanted = found = 0
    for nonce, request in enumerate(trace):
        hashes = [number.to_bytes(32, "big") for number in request.whole_blocks]
        wanted += len(hashes)
        if len(hashes) > num_slots:
            continue
        if len(running) == in_flight:
            ledger.release(epoch, [running.popleft()])
        while (ticket := ledger.admit(epoch, nonce, hashes, len(hashes))) is None:
            ledger.release(epoch, [running.popleft()])
        found += ticket.blocks
        left = hashes[ticket.blocks :]
        if left:
            slots = ledger.adopt(epoch, ticket.ticket_id, len(left)).leased_slots
            (result,) = ledger.commit(
                epoch, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))]
            )
            assert not result.refusal
        running.append(ticket.ticket_id)
        ledger.drain_events()
    return found / wanted


def cost(policy_name: str) -> dict[str, float]:
    """Measure ns per block of a first unpin, a pin, a second unpin and an eviction."""
    chains: list[list[Block]] = []
    for _ in range(COST_BLOCKS // COST_CHAIN):
        chain: list[Block] = []
        for depth in range(COST_CHAIN):
            number = len(chains) * COST_CHAIN + depth
            chain.append(Block(number, number.to_bytes(32, "big"), chain[-1] if chain else None, depth, b""))
        chains.append(chain[::-1])
    blocks = [block for chain in chains for block in chain]
    policy = make_policy(policy_name)
    costs_ns: dict[str, float] = {}

    def timed(name: str, work: Any, each: Sequence[Block]) -> None:
        begin = time.perf_counter()
        for block in each:
            work(block)
        costs_ns[name] = (time.perf_counter() - begin) * 1e9 / len(each)

    timed("let_go_first", policy.add, blocks)
    timed("pin", policy.remove, blocks)
    timed("let_go_again", policy.add, blocks)
    timed("evict", lambda _: policy.pop(), blocks)
    return costs_ns


def show(result: dict[str, Any]) -> None:
    """Print a table of hit rates and a table of costs."""
    table = Table(title=f"blocks found, of {result['blocks']} asked for by {result['requests']} requests")
    table.add_column("pool, share of all blocks", justify="right")
    for policy in POLICIES:
        table.add_column(policy, justify="right")
    for row in result["hit_rates"]:
        size = f"{row['share']:.1%} = {row['slots']}"
        table.add_row(size, *(f"{row[policy]:.1%}" for policy in POLICIES))
    table.add_row("without end", *[f"{result['bound']:.1%}"] * len(POLICIES))
    show_table(table)
    costs = Table(title="ns per block")
    for heading in ("policy", "let go first", "let go again", "pinned", "evicted"):
        costs.add_column(heading, justify="right")
    for policy, costs_ns in result["ns_per_block"].items():
        costs.add_row(policy, *(f"{costs_ns[key]:.0f}" for key in ("let_go_first", "let_go_again", "pin", "evict")))
    show_table(costs)


def main() -> None:
    """Replay, print, write results/kv_eviction.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=pathlib.Path, help="a Mooncake trace (JSON lines) instead of a generated one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--in-flight", type=int, default=8)
    args = parser.parse_args()
    trace = read_trace(args.trace) if args.trace else generate(args.seed, args.requests)
    wanted = [number for request in trace for number in request.whole_blocks]
    unique = len(set(wanted))
    rows = []
    for share in args.shares:
        slots = max(1, round(unique * share))
        found = {policy: serve(trace, policy, slots, args.in_flight) for policy in POLICIES}
        rows.append({"share": share, "slots": slots, **found})
    result = {
        "trace": str(args.trace.name) if args.trace else f"generated, seed {args.seed}",
        "requests": len(trace),
        "blocks": len(wanted),
        "different_blocks": unique,
        "seconds": trace[-1].timestamp / 1000,
        "in_flight": args.in_flight,
        "bound": 1 - unique / len(wanted),
        "hit_rates": rows,
        "ns_per_block": {policy: cost(policy) for policy in POLICIES},
    }
    show(result)
    save("kv_eviction", result)


if __name__ == "__main__":
    main()
