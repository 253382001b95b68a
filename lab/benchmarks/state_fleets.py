"""Which part of an attention model's prefix hits a hybrid model has in a fleet, and what its first tokens wait for.

    python -m lab.benchmarks.state_fleets

The same requests are simulated on the same fleet (:mod:`lab.fleets`) with a model without states and with
two that have some, whose pools are a tenth larger. All that a state costs is in these pools: those that are kept, and
the three of each running sequence. The steps of all models cost the same, so that times differ by hits alone.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from lab.benchmarks.mooncake import WORKLOADS, generate_like
from lab.benchmarks.report import save, show_table
from lab.benchmarks.state_hits import BLOCK_TOKENS, MORE_PERCENT, STATE_TOKENS
from lab.fleets.figures import FleetFigures, GoodBounds, figures_of
from lab.fleets.prefix_store import NodeStore, PrefixIndex
from lab.fleets.state_store import StateStore
from lab.fleets.traffic import Request, requests_of
from lab.fleets.world import FleetConfig, simulate
from pillion.config import ServeFlags

# Seconds of a step, token, sequence, KV token read and query-key pair, as on the page of fleets.
STEP_COST_S = (5e-3, 4e-5, 5e-5, 2e-8, 1e-9)
# Bytes of a token's KV: Qwen3-Next-80B's in bfloat16.
TOKEN_BYTES = 24_576
BYTES_PER_S = 8e9


def simulated(requests: Sequence[Request], workers: int, pool_tokens: int, state_tokens: int) -> FleetFigures:
    """Serves requests by as many workers of each kind, whose nodes have pools for so many tokens; by a hybrid model
    with ``state_tokens`` above 0."""
    flags = ServeFlags(prefill_workers=workers, decode_workers=workers, block_size=BLOCK_TOKENS, device="cuda")
    config = FleetConfig(
        flags=flags,
        prefill_cost_s=STEP_COST_S,
        decode_cost_s=STEP_COST_S,
        node_blocks=pool_tokens // BLOCK_TOKENS,
        block_bytes=BLOCK_TOKENS * TOKEN_BYTES,
        bytes_per_s=BYTES_PER_S,
        known_costs=True,
        macro_steps=True,
        state_bytes=state_tokens * TOKEN_BYTES,
    )

    def attention(node_id: str, index: PrefixIndex, capacity: int, block_size: int) -> NodeStore:
        return StateStore(node_id, index, capacity, block_size, 0, flags)

    records, world = simulate(config, requests, make_store=None if state_tokens else attention)
    world.check_integrity()
    return figures_of(records, GoodBounds())


def main() -> None:
    """Simulate, print, write results/state_fleets.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="requests of each trace")
    parser.add_argument("--workers", type=int, default=4, help="workers of each kind")
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[1_000_000, 2_000_000], help="of a node")
    parser.add_argument("--workloads", nargs="+", default=["conversation", "toolagent"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--name", default="state_fleets", help="name of the result file")
    args = parser.parse_args()
    table = Table("trace", "seed", "pool, tokens", "model", "hits", "share", "TTFT p50 / p99, ms")
    rows = []
    for name, pool_tokens, seed in itertools.product(args.workloads, args.pool_tokens, args.seeds):
        requests = requests_of(generate_like(WORKLOADS[name], seed, args.requests))
        alone = simulated(requests, args.workers, pool_tokens, 0)
        found = {"attention alone": alone}
        for model, state_tokens in STATE_TOKENS.items():
            more = pool_tokens + pool_tokens * MORE_PERCENT // 100
            found[model] = simulated(requests, args.workers, more, state_tokens)
        for model, one in found.items():
            share = one.hit_share / alone.hit_share
            ttft = f"{one.ttft_p50_ms:.0f} / {one.ttft_p99_ms:.0f}"
            table.add_row(name, str(seed), f"{pool_tokens:,}", model, f"{one.hit_share:.1%}", f"{share:.3f}", ttft)
            print(f"{name}, seed {seed}, {pool_tokens:,} tokens, {model}: {one.hit_share:.4f}, {share:.3f}", flush=True)
            of = {"trace": name, "seed": seed, "pool_tokens": pool_tokens, "model": model, "share": share}
            rows.append({**of, **asdict(one)})
    show_table(table)
    fleet = {"workers_of_each_kind": args.workers, "block_tokens": BLOCK_TOKENS, "more_percent": MORE_PERCENT}
    print(save(args.name, {**fleet, "rows": rows}))


if __name__ == "__main__":
    main()
