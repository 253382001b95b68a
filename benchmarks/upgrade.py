"""`make bench BENCH=upgrade`: how long streams wait when each part of the cluster is replaced by another version.

Two KV nodes with a keeper and a worker of each kind at each, two gateways, all of them the last release at first. Under
a load of streams one component after the other is replaced by this tree, and then by the last release again, as a
rolling upgrade does: it is told to stop, and started when it has ended. Of each stream that was under way the pause is
the longest time without a token that began until all parts served again. Streams without a token have no pause.
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

from benchmarks.pauses import StreamLoad, StreamTimes, spread
from benchmarks.report import save, show_table
from testbed.hosts import Hosts, hosts
from testbed.release import install, last_release
from testbed.tiny_model import save_model

NODES = ("kv-a", "kv-b")
GATEWAYS = ("gateway-a", "gateway-b")
KINDS = {"keeper": "keeper", "kv": "KV node", "prefill": "prefill worker", "decode": "decode worker"}
# The load runs for this long before the first replacement, and between two of them.
SETTLE_S = 5.0


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
    running.packages.update(dict.fromkeys(names, released))
    for node in NODES:
        running.node(node, "--kv-pool-bytes", "64MiB", "--keeper-socket", running.keeper(f"keeper-{node}"))
        for role in ("prefill", "decode"):
            running.worker(role, node)
    targets = [running.gateway("--chunk-size", "64", name=name) for name in GATEWAYS]
    return targets, names


def whole(running: Hosts, targets: Sequence[str]) -> None:
    """Returns when each gateway serves with all workers."""
    for target, name in zip(targets, GATEWAYS, strict=True):
        running.sees(target, *(f"{role}-{node}" for node in NODES for role in ("prefill", "decode")), gateway=name)


def measure(args: argparse.Namespace, folder: pathlib.Path, released: pathlib.Path) -> dict[str, Any]:
    """Replaces every component ``args.rounds`` times in both directions; returns the pauses by kind and direction."""
    model = str(save_model(folder / "tiny"))
    pauses: dict[str, list[float]] = {}
    with hosts(folder, "--model", model, "--dtype", "float32", "--max-model-len", "2048") as running:
        targets, names = started(running, released)
        whole(running, targets)
        load = StreamLoad(targets, args.prompt_tokens, args.answer_tokens)
        try:
            for packages in (None, released) * args.rounds:
                for name in args.only or names:
                    time.sleep(SETTLE_S)
                    begun_s = time.monotonic()
                    running.replace(name, packages)
                    whole(running, targets)
                    over_s = time.monotonic()
                    under_way = [one for one in load.streams if one.token_s and one.token_s[0] < begun_s]
                    # A stream that waits still has a gap that has no end yet.
                    time.sleep(SETTLE_S)
                    row = f"{KINDS.get(name.split('-')[0], 'gateway')}, {'to the last' if packages else 'to the next'}"
                    pauses.setdefault(row, []).extend(pauses_in(under_way, begun_s, over_s))
        finally:
            load.close()
        lost = [stream.error for stream in load.streams if stream.error]
    cases: dict[str, Any] = {row: spread(found) for row, found in pauses.items()}
    every = spread(one for found in pauses.values() for one in found)
    return {"cases": cases, "all": every, "streams": len(load.streams), "lost": lost}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upgrade", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="upgrades to this version and back")
    parser.add_argument("--only", nargs="+", help="components, such as decode-kv-a; without it all, one by one")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=600, help="on the average, drawn within half of it")
    parser.add_argument("--save", default="upgrade", help="name among the results; empty: nothing is kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as place, tempfile.TemporaryDirectory() as released:
        if missing := install(last_release(), pathlib.Path(released)):
            raise SystemExit(missing)
        results = measure(args, pathlib.Path(place), pathlib.Path(released))
    table = Table("replaced", "streams", "p50 s", "p99 s", "worst s")
    for row, found in {**results["cases"], "all": results["all"]}.items():
        figures = [f"{found[key]:.2f}" if key in found else "-" for key in ("p50_s", "p99_s", "max_s")]
        table.add_row(row, str(found["streams"]), *figures)
    show_table(table)
    print(f"{results['streams']} streams, {len(results['lost'])} lost {results['lost'][:3]}")
    if args.save:
        asked = {name: getattr(args, name) for name in ("rounds", "prompt_tokens", "answer_tokens")}
        save(args.save, {"asked": asked, "results": results})


if __name__ == "__main__":
    main()
