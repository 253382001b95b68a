"""Second turns of chats whose histories have left the pool for the disk: times to the first token.

    python -m lab.benchmarks.read_ahead

    fetched       the turn comes, and its history is read from disk when it is planned
    waited        as many turns come at once as there are chats, and the workers take one at a time
                  (--max-running-requests 1): with --max-read-ahead 0, and with the default; what counts is the time
                  from a turn's admission to its first token, so that the wait for other answers is not in it
    warmed        `warm_prefix` with the history, as a page may call it when its user begins to type; then the turn
    pool          the history is in the pool

Real processes and the demo model; the disk's files are in the page cache. The machine is the only load.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.table import Table

from lab.benchmarks.report import save, show_table, spread
from lab.testbed.cluster import ServedCluster, served
from lab.testbed.conditions import wait_for
from lab.testbed.plain_model import plain_folder
from pillion import Client

NEW_TOKENS = 20


def tokens_of(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def first_token_s(target: str, prompt: Sequence[int]) -> tuple[float, int]:
    """Returns seconds from the request's admission to its first token, and how many tokens came from the disk. An
    admission is the grant of a ticket, which comes before the fetch."""
    with Client(target) as client:
        timings = list(client.generate(prompt, temperature=0.0, max_tokens=1, ignore_eos=True))[-1].timings
    assert timings is not None
    return (timings.time_to_first_token_ms - timings.admission_ms) / 1000, timings.restored_tokens


class Chats:
    """Chats on one cluster, whose pool holds few of their histories."""

    def __init__(self, cluster: ServedCluster, args: argparse.Namespace) -> None:
        self._cluster, self._args = cluster, args
        self._fillers = self._turns = 0

    def histories(self) -> list[list[int]]:
        """Computes new histories and pushes them out of the pool."""
        self._turns += 1
        made = [tokens_of(f"chat {self._turns} {n}", self._args.tokens) for n in range(self._args.chats)]
        for history in made:
            self._fill(history)
        for _ in range(self._args.chats + 1):
            self._fillers += 1
            self._fill(tokens_of(f"filler {self._fillers}", self._args.tokens))
        return made

    def _fill(self, prompt: list[int]) -> None:
        first_token_s(self._cluster.target, prompt)

        def settled() -> bool:
            status = self._cluster.node_status()
            return status.free_blocks * 2 >= status.total_blocks

        wait_for("free slots", settled)

    def one_by_one(self, *, warmed: bool = False, again: bool = False) -> list[tuple[float, int]]:
        """Second turns, each alone: after ``warm_prefix``, or once the history is in the pool."""
        found = []
        for number, history in enumerate(self.histories()):
            with Client(self._cluster.target) as client:
                if warmed:
                    client.warm_prefix(history)
            if again:
                first_token_s(self._cluster.target, [*history, 5])
            found.append(first_token_s(self._cluster.target, [*history, *tokens_of(f"new {number}", NEW_TOKENS)]))
        return found

    def at_once(self) -> list[tuple[float, int]]:
        """Second turns that come at the same time; those but the first wait for their turn."""
        turns = [[*one, *tokens_of("new", NEW_TOKENS)] for one in self.histories()]
        with ThreadPoolExecutor(len(turns)) as pool:
            return list(pool.map(lambda turn: first_token_s(self._cluster.target, turn), turns))


def measure(args: argparse.Namespace, read_ahead: int, kinds: Sequence[str]) -> dict[str, list[tuple[float, int]]]:
    """Measures some kinds of second turns on a cluster of its own."""
    pool_bytes = 2 * args.chats * args.tokens * 30 * 2 * 3 * 64 * 2 * 2
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        flags: tuple[str, ...] = ("--dtype", "bfloat16", "--prefill-workers", "0", "--cpu-threads", "2")
        flags += ("--max-running-requests", "1")
        flags += ("--kv-pool-bytes", str(pool_bytes), "--disk-path", str(folder / "disk"), "--max-read-ahead")
        flags += (str(read_ahead), "--low-watermark-percent", "60", "--high-watermark-percent", "70")
        with served(folder, str(plain_folder()), *flags, split_policy="colocated") as cluster:
            chats = Chats(cluster, args)
            first_token_s(cluster.target, tokens_of("warming", 300))
            time.sleep(1.0)
            for _ in range(args.rounds):
                for kind in kinds:
                    if kind.startswith("waited"):
                        found[kind] += chats.at_once()
                    else:
                        found[kind] += chats.one_by_one(warmed=kind == "warmed", again=kind == "pool")
    return found


def main() -> None:
    """Measure, print, write results/read_ahead.json."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.read_ahead", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a history")
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = measure(args, 0, ("pool", "fetched", "warmed", "waited, none read ahead"))
    found |= measure(args, 2, ("waited, two read ahead",))
    table = Table("second turn", "first token, median ms", "least to most", "of them read from disk then")
    result: dict[str, Any] = {"tokens": args.tokens, "chats": args.chats}
    for kind, turns in found.items():
        seconds = [one for one, _ in turns]
        late = sum(restored > 0 for _, restored in turns)
        between = f"{min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f}"
        table.add_row(kind, f"{statistics.median(seconds) * 1000:.0f}", between, f"{late} of {len(turns)}")
        result[kind] = {"first_token_s": spread(seconds), "turns": len(turns), "restored_then": late}
    show_table(table)
    print(save("read_ahead", result))


if __name__ == "__main__":
    main()
