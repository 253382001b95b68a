"""Pauses of streams when a component dies or is stopped, and their phases: `make bench BENCH=pauses`.

A real cluster serves streams of random lengths all the time. Repeatedly, at a point of its code drawn from a seed
(`lab.testbed.faults`), a component is killed with SIGKILL, or a decode worker is stopped for a while (SIGSTOP). The
pause of a stream that moved is its longest gap from the signal on, or from a token then in flight. A stream without a
token has no pause: its time from the signal to the first token is listed apart, since most of it is the prompt, as
measured before the first fault. Phases are from the components' logs:

    signal --> noticed by the gateway --> process: begun --> attached to its KV node --> serving --> next token

With another worker beside the dead one, only the first and the last phase count.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from lab.benchmarks.report import save, show_table
from lab.testbed.cluster import ServedCluster, served
from lab.testbed.defaults import CLUSTER, Defaults
from lab.testbed.faults.board import FaultBoard, hook_environment
from lab.testbed.faults.points import AT_START, POINTS
from pillion.drill.streams import StreamLoad, pauses_of
from pillion.loadgen.figures import percentile

# Role and signal of each row.
CASES = (
    ("decode", signal.SIGKILL),
    ("prefill", signal.SIGKILL),
    ("kvnode", signal.SIGKILL),
    ("decode", signal.SIGSTOP),
)
STOP_S = 12.0
READY_WITHIN_S = 240.0
# Duration of the measurement of first tokens before the first fault.
UNDISTURBED_S = 20.0
FIRES_WITHIN_S = 20.0
# Seeds tried per fault, since some points are not passed under this load.
SEEDS_PER_FAULT = 4
LOOK_EVERY_S = 1.0
# A supervisor gives up on a component that dies six times in a minute.
MIN_BETWEEN_KILLS_S = 13.0
PHASES = ("noticed", "begun", "attached", "serving", "next token")


def milestones(log: str, role: str, at_s: float) -> dict[str, float]:
    """Return the seconds from a fault, at wall time ``at_s``, to the first log line of each phase."""
    worker = "decode" if role == "kvnode" else role
    signs = {
        "noticed": ("lost with", "is fenced by", "session at KV node"),
        "begun": ("restarting it",),
        "attached": (f"({worker}) attached",),
        "serving": (f"{worker}-0 serves at",),
    }
    return first_lines(log, at_s, lambda phase, entry: any(sign in entry["message"] for sign in signs[phase]), signs)


def first_lines(
    log: str, at_s: float, matches: Callable[[str, dict[str, Any]], bool], phases: Iterable[str]
) -> dict[str, float]:
    """Return the seconds from ``at_s`` (wall time) to the first log line that matches each phase."""
    entries = [entry for line in log.splitlines() if (entry := parsed(line)) and entry["at_s"] >= at_s]
    found = {phase: next((one for one in entries if matches(phase, one)), None) for phase in phases}
    return {phase: entry["at_s"] - at_s for phase, entry in found.items() if entry is not None}


def parsed(line: str) -> dict[str, Any] | None:
    """Parse a log line, with its time in seconds; None if it is not JSON."""
    try:
        entry: dict[str, Any] = json.loads(line)
        seconds, _, milliseconds = entry["time"].rstrip("Z").partition(".")
        entry["at_s"] = calendar.timegm(time.strptime(seconds, "%Y-%m-%dT%H:%M:%S")) + int(milliseconds) / 1000
    except (ValueError, KeyError, TypeError):
        return None
    return entry


def one_fault(
    cluster: ServedCluster,
    board: FaultBoard,
    load: StreamLoad,
    role: str,
    number: signal.Signals,
    seed: int,
    standby: bool,
) -> dict[str, Any] | None:
    """Cause one fault; return its pauses and milestones, or None if its point was not passed."""
    chance = random.Random(f"{role} {number} {seed}")
    point = chance.choice([point for point in POINTS if point.role == role and point.passed != AT_START])
    board.clear()
    board.arm(0, point, chance.randint(1, 3), number)
    began_s = time.monotonic()
    while (fired := board.fired(0)) is None:
        if time.monotonic() > began_s + FIRES_WITHIN_S:
            board.disarm()
            return None
        time.sleep(0.01)
    wall_s = time.time() - (time.monotonic() - fired.at_s)
    under_way = [one for one in load.streams if one.asked_s < fired.at_s]
    if number is signal.SIGSTOP:
        time.sleep(STOP_S)
        cluster_signal(fired.pid, signal.SIGCONT)
    until("the cluster was not whole", lambda: whole(cluster, standby))
    # Only its last message shows whether a stream was replayed.
    until("a stream did not end", lambda: all(one.over for one in under_way))
    time.sleep(max(0.0, began_s + MIN_BETWEEN_KILLS_S - time.monotonic()))
    reached = milestones(cluster.log.read_text(), role, wall_s)
    if role != "kvnode" and len(cluster.components(role)) > 1:
        reached = {phase: at_s for phase, at_s in reached.items() if phase == "noticed"}
    pauses, first_tokens = pauses_of([one for one in under_way if one.replays], fired.at_s)
    return {"point": point.name, "pauses_s": pauses, "first_tokens_s": first_tokens, "milestones_s": reached}


def first_tokens_of(load: StreamLoad) -> list[float]:
    """Return the times to the first token so far, without the streams that began with the load."""
    return [one.token_s[0] - one.asked_s for one in load.streams[load.count :] if one.token_s]


def faults_of(
    cluster: ServedCluster, board: FaultBoard, load: StreamLoad, role: str, number: signal.Signals, args: Any
) -> list[dict[str, Any]]:
    """Cause ``args.faults`` faults of a case, by one seed after the other."""
    found: list[dict[str, Any]] = []
    for seed in range(SEEDS_PER_FAULT * args.faults):
        fault = one_fault(cluster, board, load, role, number, seed, args.standby)
        if fault is not None:
            found.append(fault)
        if len(found) == args.faults:
            break
    return found


def cluster_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def until(failure: str, reached: Callable[[], bool]) -> None:
    """Wait for ``reached``, polling rarely, since a look takes a core."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not reached():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{failure} within {READY_WITHIN_S:g} s")
        time.sleep(LOOK_EVERY_S)


def whole(cluster: ServedCluster, standby: bool) -> bool:
    """Return whether all components serve and all standbys are ready."""
    workers = sum(len(cluster.components(role)) for role in ("prefill", "decode", "kvnode"))
    return cluster.serving() and (not standby or cluster.standbys() >= workers)


def summary(faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the pauses of all faults of a case, and the median of each phase."""
    return {
        "faults": len(faults),
        "points": [fault["point"] for fault in faults],
        **spread(one for fault in faults for one in fault["pauses_s"]),
        "phases_s": dict(phase_seconds(faults)),
        "first_tokens": spread(one for fault in faults for one in fault["first_tokens_s"]),
    }


def spread(seconds: Iterable[float]) -> dict[str, Any]:
    """Return the number of streams that waited, and the median, 99th percentile and maximum of their times."""
    every = sorted(seconds)
    if not every:
        return {"streams": 0}
    middle, high = statistics.median(every), percentile(every, 99)
    return {"streams": len(every), "p50_s": round(middle, 3), "p99_s": round(high, 3), "max_s": round(every[-1], 3)}


def phase_seconds(faults: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the median length of each phase, from the previous milestone reached."""
    lengths: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for fault in faults:
        if not fault["pauses_s"]:
            continue
        reached = {**fault["milestones_s"], "next token": max(fault["pauses_s"])}
        before = 0.0
        for phase in PHASES:
            if phase in reached and reached[phase] <= reached["next token"]:
                lengths[phase].append(max(0.0, reached[phase] - before))
                before = max(before, reached[phase])
    for phase, found in lengths.items():
        if found:
            yield phase, round(statistics.median(found), 3)


def measure(args: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Run all cases on a cluster with ``workers`` workers of each kind."""
    flags = ["--prefill-workers", str(workers), "--decode-workers", str(workers), "--log-format", "json"]
    flags += ["--max-model-len", "2048", "--log-level", "info"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        board = FaultBoard(folder / "board")
        standbys: Defaults = {CLUSTER: {"standby": args.standby}}
        environ = hook_environment(folder / "board", redis_is_sound=False)
        with served(folder, args.model, *flags, environ=environ, defaults=standbys) as cluster:
            until("the cluster was not whole", lambda: whole(cluster, args.standby))
            load = StreamLoad(cluster.target, args.prompt_tokens, args.answer_tokens)
            try:
                time.sleep(UNDISTURBED_S)
                undisturbed = spread(first_tokens_of(load))
                for role, number in CASES:
                    if number is signal.SIGSTOP and workers == 1:
                        # No other worker could continue its streams.
                        continue
                    results[f"{role} {number.name}"] = summary(faults_of(cluster, board, load, role, number, args))
            finally:
                load.close()
            lost = [stream.error for stream in load.streams if stream.error]
    results["undisturbed first tokens"] = undisturbed
    results["streams"], results["lost"] = len(load.streams), lost
    return results


def table_of(shape: str, cases: dict[str, Any]) -> Table:
    """Make a row per case for its pauses, and one for first tokens that a fault delayed."""
    table = Table("fault", "faults", "streams", "p50 s", "p99 s", "worst s", *PHASES, title=shape)

    def add(name: str, faults: str, found: dict[str, Any], phases: dict[str, float]) -> None:
        figures = [f"{found[key]:.2f}" if key in found else "-" for key in ("p50_s", "p99_s", "max_s")]
        shown = [f"{phases[one]:.2f}" if one in phases else "" for one in PHASES]
        table.add_row(name, faults, str(found["streams"]), *figures, *shown)

    for case, found in cases.items():
        if isinstance(found, dict) and "faults" in found:
            add(case, str(found["faults"]), found, found["phases_s"])
            add("  first tokens", "", found["first_tokens"], {})
    add("first tokens without a fault", "", cases["undisturbed first tokens"], {})
    return table


def main() -> None:
    """Measure both shapes and print the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.pauses", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--faults", type=int, default=5, help="faults of each case")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=200, help="on the average, drawn within half of it")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="workers of each kind")
    parser.add_argument("--no-standby", dest="standby", action="store_false")
    parser.add_argument("--save", default="pauses", help="name among the results; empty: nothing is kept")
    args = parser.parse_args()
    results = {f"{workers} of each": measure(args, workers) for workers in args.workers}
    for shape, cases in results.items():
        show_table(table_of(shape, cases))
        print(f"{cases['streams']} streams, {len(cases['lost'])} lost {cases['lost'][:3]}")
    if args.save:
        asked = {name: getattr(args, name) for name in ("model", "faults", "prompt_tokens", "answer_tokens", "standby")}
        save(args.save, {"asked": asked, "results": results})


if __name__ == "__main__":
    main()
