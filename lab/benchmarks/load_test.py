"""`make load-test`: a bounded load on the real local cluster; fails if a request fails or integrity breaks.

    start -> stages, one by one: gRPC, HTTP, chats, a shared trace, bursts, a closed loop -> idle -> check for leaks

It fails on a refused, lost or truncated request; a restarted component; a KV node with inconsistent slots and pins
(I4); and on requests, tickets or slots left at the end. Latencies are only shown, since it runs on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console

from lab.benchmarks.report import save
from lab.benchmarks.traces import Mix, generate, write_trace
from pillion import Client
from pillion.errors import Conflict
from pillion.loadgen.load import LoadConfig
from pillion.loadgen.report import tables
from pillion.loadgen.run import BenchPlan, Server, opened, run_plan

if TYPE_CHECKING:
    from lab.testbed.cluster import ServedCluster

ROLES = ("redis-server", "kvnode", "prefill", "decode", "gateway")
IDLE_TIMEOUT_S = 20.0
STATUS_TIMEOUT_S = 30.0
MAX_MODEL_LEN_TOKENS = 2048
# Short prompts with shared prefixes: real lengths would take hours on a small machine.
TRACE_MIX = Mix(
    sessions_per_s=1.0, system_prompts=2, system_tokens=700, turn_tokens=60, answer_tokens=12, document_tokens=500
)


def stages(
    grpc: str, http: str, trace: pathlib.Path, seconds: float, rate: float, token_range: tuple[int, int]
) -> Iterator[tuple[str, BenchPlan]]:
    """Yield the name and plan of each stage, with arrivals for ``seconds`` at ``rate`` requests per second."""
    count = max(3, round(seconds * rate))
    one = Server(backend="pillion", target=grpc, timeout_s=120.0)
    other = Server(backend="openai", target=http, timeout_s=120.0)
    common: dict[str, Any] = {"rate": rate, "requests": count, "token_range": token_range}
    mixed = LoadConfig(input_len="lognormal:150,1.0,1200", output_len="uniform:4,40", seed=1, **common)
    chats = dataclasses.replace(mixed, workload="chats", input_len="20", output_len="12", system_len="60", think_s=0.2)
    replay = dataclasses.replace(mixed, workload="trace", trace=str(trace), max_model_len=MAX_MODEL_LEN_TOKENS - 64)
    bursts = dataclasses.replace(mixed, arrivals="gamma", burstiness=0.1, seed=2)
    closed = dataclasses.replace(mixed, rate=None, concurrency=8, seed=3)
    yield "gRPC, mixed lengths", BenchPlan(server=one, load=mixed)
    yield "HTTP, token ids", BenchPlan(server=other, load=dataclasses.replace(mixed, seed=4))
    yield "HTTP, chats", BenchPlan(server=dataclasses.replace(other, endpoint="chat"), load=chats)
    yield "gRPC, trace", BenchPlan(server=one, load=replay, max_concurrency=16)
    yield "gRPC, bursts", BenchPlan(server=one, load=bursts)
    yield "gRPC, closed loop", BenchPlan(server=one, load=closed)


async def run_stage(plan: BenchPlan) -> dict[str, Any]:
    async with opened(plan.server) as (target, _):
        return (await run_plan(target, plan))[1]


def complaints(name: str, result: dict[str, Any]) -> list[str]:
    """Return the failures of one stage."""
    summary = result["summary"]
    found = [f"{name}: {kind}, {one['count']} times ({one['first']})" for kind, one in summary["errors"].items()]
    for field in ("short_answers", "unsent_turns"):
        found += [f"{name}: {summary[field]} {field.replace('_', ' ')}"] * bool(summary[field])
    return found


def process_of(cluster: ServedCluster, role: str) -> psutil.Process | None:
    """Return the living process of ``role``. Redis sets its own title in place of its command line."""
    if role == "redis-server":
        return next((process for process in cluster.processes() if process.name() == role), None)
    return cluster.component(role)


def pids(cluster: ServedCluster) -> dict[str, int | None]:
    return {role: component.pid if (component := process_of(cluster, role)) else None for role in ROLES}


def idle_complaints(cluster: ServedCluster) -> list[str]:
    """Wait until everything is released, then check the node's integrity; return the failures."""
    deadline, found = time.monotonic() + IDLE_TIMEOUT_S, ["never looked"]
    with Client(cluster.target) as client:
        while found and time.monotonic() < deadline:
            time.sleep(0.1)
            try:
                node, status = cluster.node_status(), client.status()
            except AssertionError as error:
                found = [str(error)]
                continue
            except Conflict as error:
                return [f"the KV node does not prove its integrity: {error.message}"]
            held = {
                "active requests": status.active_requests,
                "tickets": node.tickets,
                "waiting tickets": node.waiting_tickets,
                "pinned blocks": node.pinned_blocks,
                "reserved blocks": node.reserved_blocks,
                "quarantined blocks": node.quarantined_blocks,
                "corrupt blocks": node.corrupt_blocks,
            }
            found = [f"when all was over: {count} {what}" for what, count in held.items() if count]
    return found


def status_complaints(cluster: ServedCluster) -> list[str]:
    """Return the failures in the output of `pillion status --json`."""
    command = [sys.executable, "-m", "pillion", "status", "--json", "--target", cluster.target]
    status_run = subprocess.run(command, capture_output=True, text=True, timeout=STATUS_TIMEOUT_S, check=False)
    if status_run.returncode:
        return [f"pillion status ends with {status_run.returncode}: {status_run.stderr.strip()}"]
    status = json.loads(status_run.stdout)
    roles = {component["role"] for component in status["components"]}
    missing = [f"pillion status shows no {role}" for role in ("kvnode", "prefill", "decode") if role not in roles]
    return missing + ([] if status["index_available"] else ["pillion status: the index does not answer"])


def load_test(cluster: ServedCluster, http: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Run all stages on a running cluster; return their rows and all failures."""
    trace = cluster.folder / "trace.jsonl"
    write_trace(trace, generate(1, 1000, TRACE_MIX))
    rows, wrong, before = [], [], pids(cluster)
    for name, plan in stages(cluster.target, http, trace, args.seconds, args.rate, tuple(args.token_range)):
        result = asyncio.run(run_stage(plan))
        wrong += complaints(name, result)
        rows.append({"stage": name, **result})
        if not args.quiet:
            Console().print(f"\n{name}")
            Console(width=100).print(tables(result))
    trace.unlink()
    wrong += idle_complaints(cluster) + status_complaints(cluster)
    after = pids(cluster)
    wrong += [
        f"{role} is gone or was started again" for role in ROLES if before[role] is None or after[role] != before[role]
    ]
    return rows, wrong


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both the load test and the soak."""
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rate", type=float, default=1.0, help="sessions a second")
    parser.add_argument("--token-range", type=int, nargs=2, default=[1000, 30_000], help="ids of random prompts")
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of pillion serve")


def main() -> int:
    """Start the cluster, load it, and write results/load_test.json; return 1 on failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the arrivals of each stage")
    parser.add_argument("--quiet", action="store_true", help="no tables")
    add_flags(parser)
    args = parser.parse_args()
    from lab.testbed.cluster import served
    from lab.testbed.ports import free_port

    port = free_port()
    flags = (f"--http-port={port}", f"--max-model-len={MAX_MODEL_LEN_TOKENS}", "--split-policy=auto", *args.flags)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), args.model, *flags) as cluster,
    ):
        rows, wrong = load_test(cluster, f"http://127.0.0.1:{port}", args)
    console = Console()
    console.print(f"{sum(row['summary']['requests'] for row in rows)} requests, {time.monotonic() - began:.0f} s")
    for line in wrong:
        console.print(f"FAILED {line}", style="bold red", markup=False)
    path = save("load_test", {"stages": rows, "failed": wrong})
    console.print("passed" if not wrong else "failed", f"(written to {path.name})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
