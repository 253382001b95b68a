"""Workers, nodes and snapshots for tests of the planner."""

from __future__ import annotations

from typing import Any

from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, parse_policy
from pillion.gateway.planning.planner import RequestPlan
from pillion.wire.registry import ComponentRecord

# Costs of a small machine: a step, a token, a sequence, a KV token read, a query-key pair.
COST = (5e-3, 1e-3, 2e-4, 1e-7, 2e-7)
BLOCK = 16


def node(n: int) -> ComponentRecord:
    return ComponentRecord(component_id=f"kv-{n}", role="kvnode", address="x", node_id=f"kv-{n}")


def worker(role: str, n: int, at: int = 0, **fields: Any) -> ComponentRecord:
    fields = {
        "step_cost_s": COST,
        "largest_step_tokens": 512,
        "max_step_tokens": 512 if role == "prefill" else 256,
        "free_seqs": 64,
        "block_bytes": 2**20,
    } | fields
    return ComponentRecord(component_id=f"{role}-{n}", role=role, address="x", node_id=f"kv-{at}", **fields)


def prefill(n: int = 0, at: int = 0, **fields: Any) -> ComponentRecord:
    return worker("prefill", n, at, **fields)


def decode(n: int = 0, at: int = 0, streams: int = 0, **fields: Any) -> ComponentRecord:
    busy = {"running_requests": streams, "decoding_requests": streams, "context_tokens": 500 * streams}
    return worker("decode", n, at, **(busy | {"target_itl_ms": 60.0} | fields))


def snapshot(prompt: int = 2000, components: tuple[ComponentRecord, ...] = (), **more: Any) -> ClusterSnapshot:
    policy = parse_policy("auto")
    fields = {"hits": {}, "block_size": BLOCK, "chunk_tokens": 512, "model": "toy", "policy": policy} | more
    return ClusterSnapshot(prompt_tokens=prompt, components=components or line(), **fields)


def line(**more: ComponentRecord) -> tuple[ComponentRecord, ...]:
    return (node(0), more.get("prefill", prefill()), more.get("decode", decode()))


def is_shared(decided: RequestPlan) -> bool:
    return bool(decided.chunks)
