"""Time until a killed component is ready, by phase: `make bench BENCH=warm_restart`.

In a cluster without standbys and load, the decode worker, prefill worker and KV node are killed with SIGKILL in turn.
The time ends with the component's log line that it is ready, i.e. in the
registry:

    signal --> noticed by the supervisor --> loaded (workers: model and kernels) --> attached to the node --> ready

CPU seconds are those of the new process until then, and of all processes of the cluster until it serves.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
from rich.table import Table

from lab.benchmarks.pauses import first_lines
from lab.benchmarks.report import save, show_table
from lab.testbed.cluster import ServedCluster, served
from lab.testbed.conditions import wait_for

ROLES = ("decode", "prefill", "kvnode")
PHASES = ("noticed", "loaded", "attached", "ready")
READY_WITHIN_S = 240.0
# A supervisor gives up on a component that dies six times in a minute.
BETWEEN_KILLS_S = 4.5


def milestones(log: str, role: str, at_s: float) -> dict[str, float]:
    """Return the seconds from a kill, at wall time ``at_s``, to the first log line of each of the role's phases."""
    name = f"{role}-0"
    signs = {
        "noticed": f"{name} was ended by SIGKILL",
        "loaded": "all operators run on",
        "attached": f"{name} ({role}) attached",
        "ready": f"{name} ready at",
    }

    def matches(phase: str, entry: dict[str, Any]) -> bool:
        return signs[phase] in entry["message"] and (phase != "loaded" or entry["component"] == name)

    return first_lines(log, at_s, matches, signs)


def one_kill(cluster: ServedCluster, role: str) -> dict[str, Any]:
    """Kill a component; return the milestones of its next process, and the CPU seconds until ready."""
    began_s, written = time.monotonic(), len(cluster.log.read_text())
    # Times in log lines are truncated to milliseconds.
    at_s = time.time() - 0.001
    killed = cluster.kill(role)

    def reached() -> dict[str, float]:
        found = milestones(cluster.log.read_text()[written:], role, at_s)
        return found if "ready" in found else {}

    found = wait_for(f"the next {role}", reached, READY_WITHIN_S)
    process = cluster.component(role)
    assert process is not None
    assert process.pid != killed
    kill = {"milestones_s": found, "cpu_s": cpu_seconds(process), "load": os.getloadavg()[0]}
    wait_for("the cluster to serve", cluster.serving, READY_WITHIN_S)
    time.sleep(max(0.0, BETWEEN_KILLS_S - (time.monotonic() - began_s)))
    return kill


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all kills on one cluster."""
    flags = ["--log-format", "json", "--log-level", "info", "--max-model-len", "2048"]
    flags += args.flags
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        began_s = time.monotonic()
        with served(pathlib.Path(name), args.model, *flags) as cluster:
            start = {"wall_s": time.monotonic() - began_s, "cpu_s": sum(map(cpu_seconds, cluster.processes()))}
            time.sleep(BETWEEN_KILLS_S)
            kills: dict[str, list[dict[str, Any]]] = {role: [] for role in ROLES}
            for _ in range(args.kills):
                for role in ROLES:
                    kills[role].append(one_kill(cluster, role))
    return {"start": start, **{role: {**summary(found), "kills": found} for role, found in kills.items()}}


def summary(kills: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of a role's times until ready, and the medians of phases and CPU seconds."""
    ready = [kill["milestones_s"]["ready"] for kill in kills]
    return {
        "ready_s": {"min": min(ready), "median": statistics.median(ready), "max": max(ready)},
        "cpu_s": statistics.median(kill["cpu_s"] for kill in kills),
        "phases_s": dict(phase_seconds(kills)),
    }


def phase_seconds(kills: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the median length of each of a role's phases."""
    for number, phase in enumerate(PHASES):
        lengths = []
        for kill in kills:
            reached = kill["milestones_s"]
            if phase in reached:
                lengths.append(reached[phase] - max((reached.get(one, 0.0) for one in PHASES[:number]), default=0.0))
        if lengths:
            yield phase, round(statistics.median(lengths), 3)


def table_of(results: dict[str, Any]) -> Table:
    """Make a table with a row per role."""
    table = Table("component", "kills", "median s", "least s", "most s", "CPU s", *PHASES, title="Killed until ready")
    for role in ROLES:
        row, ready = results[role], results[role]["ready_s"]
        figures = [f"{ready[one]:.2f}" for one in ("median", "min", "max")]
        phases = [f"{row['phases_s'][one]:.2f}" if one in row["phases_s"] else "" for one in PHASES]
        table.add_row(role, str(len(row["kills"])), *figures, f"{row['cpu_s']:.2f}", *phases)
    start = results["start"]
    table.add_row("cluster's start", "", f"{start['wall_s']:.2f}", "", "", f"{start['cpu_s']:.2f}")
    return table


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.warm_restart", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kills", type=int, default=10, help="of each component")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of pillion serve, last")
    parser.add_argument("--save", default="warm_restart", help="name among the results; empty: nothing is kept")
    args = parser.parse_args()
    load = os.getloadavg()
    results = measure(args)
    show_table(table_of(results))
    print(f"load average before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}")
    if args.save:
        asked = {name: getattr(args, name) for name in ("model", "kills", "flags")}
        save(args.save, {"asked": asked, "load_before": load, "load_behind": os.getloadavg(), "results": results})


if __name__ == "__main__":
    main()
