"""What `pillion canary` tells of the next version, and what it costs the streams that it mirrors.

    python -m lab.benchmarks.canaries told [--requests 200] [--next same int8 int4 mask log2e]
    python -m lab.benchmarks.canaries cost [--rounds 8]

``told``: one cluster records requests of several kinds, and canaries replay them at other clusters: the same version,
quantized copies, and copies of this tree with one wrong line in a kernel of the CPU. A first canary stops at the first
difference, so its replays say within how many requests that was; a second one goes on for the share and the distance of
log probabilities.

``cost``: a load runs again and again, with a canary beside every other run that mirrors a share of it to another
cluster. The result is the ratio of each pair's p99 to the first token and between tokens. The other cluster stands for
another machine: it has the second half of the cores to itself, where it computes only what the clients leave.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import psutil
from rich.table import Table

from lab.benchmarks.closed_loop import ClosedLoad, figures, measure
from lab.benchmarks.report import save, show_table, spread
from lab.testbed.cluster import ServedCluster, served
from lab.testbed.plain_model import plain_folder
from lab.testbed.recorded_requests import bundles_of
from pillion import AsyncClient
from pillion.loadgen.load import WORDS
from pillion.loadgen.target import PillionTarget
from pillion.records.canary import OutcomeName

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "plain"
RECORD = ("--record-content", "full", "--record-share", "1")
ANSWER_TOKENS, AT_ONCE = 24, 4
# The next versions, by their flags.
FLAGS = {"same": (), "int8": ("--quantization", "int8"), "int4": ("--quantization", "int4")}
# Wrong kernels, by file, right line and wrong line: attention that sees one token too many, and a constant with
# five digits.
MUTANTS = {
    "mask": (
        "kernels/cpu/attention/attention_rows.py",
        "k.below(first, visibility.behind)",
        "k.below(first, visibility.behind + 1)",
    ),
    "log2e": ("kernels/cpu/language/emit.py", "LOG2E = 1.4426950408889634", "LOG2E = 1.4427"),
}
# A canary has begun to follow the folder, and what one has left at the workers has ended, after so long.
SETTLED_AFTER_S = 5.0
P99, SPREAD = ("ttft_p99_ms", "itl_p99_ms"), ("median", "min", "max")


async def ask_all(target: str, requests: int) -> None:
    """Asks for answers of texts and chats, greedy and drawn, all with log probabilities."""
    turns = iter(range(requests))

    async def work(client: AsyncClient) -> None:
        for turn in turns:
            words = " and ".join(WORDS[(turn * step + step) % len(WORDS)] for step in (1, 7, 11))
            asked: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "logprobs": 0, "temperature": float(turn // 2 % 2)}
            if turn % 2:
                stream = client.chat([{"role": "user", "content": f"Tell me of {words}."}], **asked)
            else:
                stream = client.generate(f"Here is a story of {words}. Once upon a time", **asked)
            async for _ in stream:
                pass

    async with AsyncClient(target) as client:
        await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))


@contextmanager
def tree_of(version: str) -> Iterator[dict[str, str]]:
    """Copies this tree with the wrong line of a mutant; yields the environment in which a cluster of the version
    runs."""
    if version not in MUTANTS:
        yield {}
        return
    path, right, wrong = MUTANTS[version]
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        for link in (ROOT / "pillion").iterdir():
            if link.is_symlink():
                shutil.copytree(link, pathlib.Path(folder, link.name))
        shutil.copytree(ROOT / "pillion", pathlib.Path(folder, "pillion"), symlinks=True)
        source = pathlib.Path(folder, path).read_text()
        assert source.count(right) == 1, f"{path} has {right!r} {source.count(right)} times"
        pathlib.Path(folder, path).write_text(source.replace(right, wrong))
        # With a safe path the folder in which a program starts is not looked at first.
        yield {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True, slots=True)
class RunningCanary:
    """Holds a canary's process, and the file of its figures."""

    process: subprocess.Popen[bytes]
    page: pathlib.Path

    def outcomes(self) -> Counter[str]:
        """Returns how many replays had each outcome."""
        return Counter({name: int(sum(self._values(f'outcome="{name}"'))) for name in get_args(OutcomeName)})

    def distance(self) -> float:
        """Returns the mean difference of log probabilities, of the kind of request with the largest one."""
        return max(self._values("pillion_canary_logprob_distance{"), default=0.0)

    def _values(self, sign: str) -> list[float]:
        lines = self.page.read_text().splitlines() if self.page.exists() else []
        return [float(line.rpartition(" ")[2]) for line in lines if sign in line]


@contextmanager
def canary(records: pathlib.Path, target: str, rule: str, requests: int, *more: str) -> Iterator[RunningCanary]:
    """Starts `pillion canary` for the block; it ends with it at the latest."""
    page = records.parent / "canary.prom"
    page.unlink(missing_ok=True)
    words = ["--record-path", str(records), "--target", target, "--metrics-file", str(page), *more]
    words += ["--rule", rule, "--requests", str(requests)]
    process = subprocess.Popen([sys.executable, "-m", "pillion", "canary", *words], stdout=subprocess.DEVNULL)
    try:
        yield RunningCanary(process, page)
    finally:
        process.terminate()
        process.wait()


def judged(records: pathlib.Path, target: str, rule: str, requests: int) -> dict[str, Any]:
    """Has a canary replay what is recorded, until its rule decides; returns its verdict and figures."""
    fast = ("--existing", "--tokens-per-second", "1000000", "--concurrency", str(AT_ONCE))
    with canary(records, target, rule, requests, *fast) as run:
        verdict = {0: "promote", 1: "stop"}[run.process.wait()]
        return {"verdict": verdict, "outcomes": run.outcomes(), "distance": run.distance()}


def tell(args: argparse.Namespace) -> tuple[dict[str, Any], Table]:
    """Records requests; returns what two canaries tell of each next version."""
    model, rows = str(plain_folder()), {}
    table = Table(title=f"{args.requests} recorded requests at the next version")
    for title in ("next version", "verdict", "after", "equal", "differ", "error", "distance"):
        table.add_column(title, justify="left" if title in ("next version", "verdict") else "right")
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        records = pathlib.Path(name, "records")
        with cluster(name, "now", model, "--record-path", str(records), *RECORD) as now:
            asyncio.run(ask_all(now.target, args.requests))
            asyncio.run(bundles_of(records, args.requests))
        for version in args.next:
            flags = FLAGS.get(version, ())
            with tree_of(version) as environ, cluster(name, version, model, *flags, environ=environ) as following:
                first = judged(records, following.target, "differs=0,distance=0", args.requests)
                every = judged(records, following.target, "differs=1", args.compared)
            rows[version] = {"first": first, "second": every}
            counts = (first["outcomes"].total(), *(every["outcomes"][one] for one in ("equal", "differs", "error")))
            table.add_row(version, first["verdict"], *map(str, counts), f"{every['distance']:.3g}")
    return rows, table


def cost(args: argparse.Namespace) -> tuple[dict[str, Any], Table]:
    """Runs a load with and without a canary in turns; returns the figures of all runs."""
    load = ClosedLoad(args.input_len, args.output_len, args.streams, args.requests)
    cores = sorted(os.sched_getaffinity(0))
    here, there = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    if not here:
        raise SystemExit("the other cluster needs a core of its own")
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        records = pathlib.Path(name, "records")
        os.sched_setaffinity(0, here)
        with cluster(name, "now", args.model, "--record-path", str(records), *RECORD) as now:
            os.sched_setaffinity(0, there)
            with cluster(name, "next", args.model) as following:
                give_way(following.processes())
                # The first round warms up.
                for number in range(args.rounds + 1):
                    # Each kind of run goes first in every other round.
                    pair: dict[str, Any] = {}
                    for kind in ("without", "with")[:: -1 if number % 2 else 1]:
                        with contextlib.ExitStack() as stack:
                            if kind == "with":
                                share = ("--share", str(args.share))
                                mirror = canary(records, following.target, "differs=1", 100_000, *share)
                                run = stack.enter_context(mirror)
                                give_way([psutil.Process(run.process.pid)])
                            pair[kind] = measured(load, now.target, 2 * number + (kind == "with"))
                            if kind == "with":
                                pair["replays"] = run.outcomes().total()
                    rounds.append(pair)
    table = Table(title=f"{load.name}, {args.share:.0%} of it mirrored, {args.rounds} pairs of runs")
    for title in ("", "without, ms", "with, ms", "ratio: median", "least", "most"):
        table.add_column(title, justify="right" if title else "left")
    ratios = {}
    for figure in P99:
        without, beside = ([pair[one][figure] for pair in rounds[1:]] for one in ("without", "with"))
        ratios[figure] = spread([new / old for new, old in zip(beside, without, strict=True)])
        shown = (statistics.median(without), statistics.median(beside), *(ratios[figure][one] for one in SPREAD))
        table.add_row(figure, *(f"{value:.4g}" for value in shown))
    table.caption = f"{sum(pair['replays'] for pair in rounds[1:])} replays"
    return {"rounds": rounds[1:], "ratios": ratios}, table


def measured(load: ClosedLoad, target: str, seed: int) -> dict[str, float]:
    """Runs the load once; returns its figures."""
    time.sleep(SETTLED_AFTER_S)
    server = PillionTarget("", True, 0.0, target=target)
    return figures(load, asyncio.run(measure(server, load.sessions(seed), load.concurrency)))


def give_way(processes: Sequence[psutil.Process]) -> None:
    """Has all threads of processes compute only where nobody else wants their core."""
    for process in processes:
        for thread in process.threads():
            os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))


def cluster(
    folder: str, name: str, model: str, *flags: str, environ: dict[str, str] | None = None
) -> AbstractContextManager[ServedCluster]:
    """Starts a cluster with its files in a folder of its own."""
    own = pathlib.Path(folder, name)
    own.mkdir()
    always = ("--served-model-name", MODEL, "--max-model-len", "1024")
    return served(own, model, *always, *flags, split_policy="", environ=environ)


def main() -> None:
    """Runs one of the two, and writes results/canaries_told.json or results/canaries_cost.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    told = parts.add_parser("told")
    told.add_argument("--requests", type=int, default=200)
    told.add_argument("--compared", type=int, default=50, help="replays of the second canary")
    told.add_argument("--next", nargs="+", default=[*FLAGS, *MUTANTS], choices=[*FLAGS, *MUTANTS])
    told.set_defaults(run=tell, name="canaries_told")
    costs = parts.add_parser("cost")
    costs.add_argument("--model", default="demo")
    costs.add_argument("--rounds", type=int, default=8)
    costs.add_argument("--share", type=float, default=0.1)
    costs.add_argument("--requests", type=int, default=100)
    costs.add_argument("--streams", type=int, default=4)
    costs.add_argument("--input-len", type=int, default=256)
    costs.add_argument("--output-len", type=int, default=64)
    costs.set_defaults(run=cost, name="canaries_cost")
    args = parser.parse_args()
    result, table = args.run(args)
    show_table(table)
    print(f"written to {save(args.name, result)}")


if __name__ == "__main__":
    main()
