"""`make bench BENCH=upgrade`: how long streams wait when each part of the cluster is replaced by another version.

Two KV nodes with a keeper and a worker of each kind at each, two gateways, all of them the last release at first. Under
a load of streams one component after the other is replaced by this tree, and then by the last release again, as a
rolling upgrade does: told to stop, and started when it has ended. Redis, which is of no version, is killed in each
direction, and comes back empty. Workers and gateways are given DRAIN_S to end their streams, which is less than most
answers take, so these have to go on at the other one.

Of each stream that was under way the pause is the longest time without a token that began until all parts served again.
Streams without a token have no pause.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

from lab.benchmarks.pauses import spread
from lab.benchmarks.report import save, show_table
from lab.testbed.conditions import wait_for
from lab.testbed.hosts import Hosts, hosts
from lab.testbed.release import install, last_release
from lab.testbed.tiny_model import save_model
from pillion.drill.streams import StreamLoad, StreamTimes

NODES = ("kv-a", "kv-b")
GATEWAYS = ("gateway-a", "gateway-b")
REDIS = "redis"
KINDS = {
    "keeper": "keeper",
    "kv": "KV node",
    "prefill": "prefill worker",
    "decode": "decode worker",
    "gateway": "gateway",
    REDIS: "Redis",
}
# The load runs for this long before each replacement.
SETTLE_S = 3.0
DRAIN_S = 0.5
STREAM_TIMEOUT_S = 120.0


def pauses_in(streams: Sequence[StreamTimes], begun_s: float, over_s: float) -> list[float]:
    """Seconds of the longest gap between two tokens, of each stream that had one before ``begun_s`` and went on; gaps
    that began after ``over_s`` are not the replacement's."""
    found = []
    for stream in streams:
        gaps = [end - begin for begin, end in pairwise(stream.token_s) if end > begun_s and begin < over_s]
        if gaps and stream.token_s[0] < begun_s:
            found.append(max(gaps))
    return found


def started(running: Hosts, released: pathlib.Path) -> tuple[list[str], list[str]]:
    """Starts a cluster of the last release; returns the gateways' addresses, and its components in the order in which
    they are replaced."""
    names = [name for node in NODES for name in (f"keeper-{node}", node, f"prefill-{node}", f"decode-{node}")]
    names += GATEWAYS
    drain = ("--drain-timeout-s", f"{DRAIN_S:g}")
    running.packages.update(dict.fromkeys(names, released))
    for node in NODES:
        running.node(node, "--kv-pool-bytes", "64MiB", "--keeper-socket", running.keeper(f"keeper-{node}"))
        for role in ("prefill", "decode"):
            running.worker(role, node, *drain)
    targets = [running.gateway("--chunk-size", "64", *drain, name=name) for name in GATEWAYS]
    return targets, names


def whole(running: Hosts, targets: Sequence[str]) -> None:
    """Returns when each gateway serves with all workers."""
    for target, name in zip(targets, GATEWAYS, strict=True):
        running.sees(target, *(f"{role}-{node}" for node in NODES for role in ("prefill", "decode")), gateway=name)


def replace(running: Hosts, name: str, packages: pathlib.Path | None) -> None:
    """Replaces a component by that of another version, or Redis by an empty one."""
    if name == REDIS:
        running.redis.kill()
        running.redis.start()
    else:
        running.replace(name, packages)


def one_replacement(
    running: Hosts, targets: Sequence[str], load: StreamLoad, name: str, packages: pathlib.Path | None
) -> tuple[list[float], int]:
    """Replaces a component under the load; returns the pauses, and how many of these streams were replayed."""
    time.sleep(SETTLE_S)
    begun_s = time.monotonic()
    replace(running, name, packages)
    whole(running, targets)
    over_s = time.monotonic()
    begun = [one for one in load.streams if one.token_s and one.token_s[0] < begun_s]
    # A stream that waits still has a gap that has no end yet; how often it was replayed is known at its end.
    wait_for("the streams under way to end", lambda: all(one.over for one in begun), STREAM_TIMEOUT_S)
    replayed = sum(one.replays > 0 for one in begun if one.token_s[-1] > begun_s)
    return pauses_in(begun, begun_s, over_s), replayed


def measure(args: argparse.Namespace, folder: pathlib.Path, released: pathlib.Path) -> dict[str, Any]:
    """Replaces every component ``args.rounds`` times in both directions; returns the pauses by kind and direction."""
    model = str(save_model(folder / "tiny"))
    pauses: dict[str, list[float]] = {}
    replayed: dict[str, int] = {}
    flags = ("--model", model, "--dtype", "float32", "--max-model-len", "2048")
    with hosts(folder, *flags, forked=False) as running:
        targets, names = started(running, released)
        whole(running, targets)
        load = StreamLoad(targets, args.prompt_tokens, args.answer_tokens)
        try:
            for packages in (None, released) * args.rounds:
                for name in args.only or (*names, REDIS):
                    row = f"{KINDS[name.split('-')[0]]}, {'to the last' if packages else 'to the next'}"
                    found, moved = one_replacement(running, targets, load, name, packages)
                    pauses.setdefault(row, []).extend(found)
                    replayed[row] = replayed.get(row, 0) + moved
        finally:
            load.close()
        lost = [stream.error for stream in load.streams if stream.error]
    cases: dict[str, Any] = {row: {**spread(found), "replayed": replayed[row]} for row, found in pauses.items()}
    every = {**spread(one for found in pauses.values() for one in found), "replayed": sum(replayed.values())}
    return {"cases": cases, "all": every, "streams": len(load.streams), "lost": lost}


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.upgrade", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="upgrades to this version and back")
    parser.add_argument("--only", nargs="+", help="such as decode-kv-a and redis; without it all, one by one")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=1200, help="on the average, drawn within half of it")
    parser.add_argument("--save", default="upgrade", help="name among the results; empty: nothing is kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as place, tempfile.TemporaryDirectory() as released:
        if missing := install(last_release(), pathlib.Path(released)):
            raise SystemExit(missing)
        results = measure(args, pathlib.Path(place), pathlib.Path(released))
    table = Table("replaced", "streams", "replayed", "p50 s", "p99 s", "worst s")
    for row, found in {**results["cases"], "all": results["all"]}.items():
        figures = [f"{found[key]:.2f}" if key in found else "-" for key in ("p50_s", "p99_s", "max_s")]
        table.add_row(row, str(found["streams"]), str(found["replayed"]), *figures)
    show_table(table)
    print(f"{results['streams']} streams, {len(results['lost'])} lost {results['lost'][:3]}")
    if args.save:
        asked = {name: getattr(args, name) for name in ("rounds", "prompt_tokens", "answer_tokens")}
        save(args.save, {"asked": asked, "results": results})


if __name__ == "__main__":
    main()
