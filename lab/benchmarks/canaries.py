"""What `pillion canary` tells of the next version, and what it costs the streams that it mirrors.

    python -m lab.benchmarks.canaries told [--requests 200] [--next same int8 int4 template mask log2e]
    python -m lab.benchmarks.canaries cost [--pairs 20] [--window-s 15]

``told``: one cluster records requests of several kinds, and canaries replay them at other clusters: the same version,
quantized copies, one whose chat template begins with other words, and copies of this tree with one wrong line in a
kernel of the CPU. A first canary stops at the first
difference, so its replays say within how many requests that was; a second one goes on for the share and the distance of
log probabilities.

``cost``: one load runs all the time, and a canary mirrors a share of it to another cluster, but stands still in one
window of each pair. The result is the p99 between tokens of all windows with the canary by that of all others, with a
confidence interval over pairs, and the ratio within each pair. It takes two minutes and 2 * pairs * window-s. What is
recorded while the canary stands still is mirrored in the next window, so the canary does up to twice its share then.
The other cluster stands for another machine: it has the second half of the cores to itself, where it computes only what
the clients leave.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import pathlib
import random
import shutil
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

from lab.benchmarks.closed_loop import ClosedLoad
from lab.benchmarks.report import save, show_table, spread
from lab.testbed.cluster import ServedCluster, served
from lab.testbed.conditions import until
from lab.testbed.plain_model import plain_folder
from lab.testbed.recorded_requests import bundles_of
from pillion import AsyncClient
from pillion.loadgen.drive import LoadDriver
from pillion.loadgen.figures import Record, percentile
from pillion.loadgen.load import WORDS
from pillion.loadgen.target import PillionTarget
from pillion.records.canary import OutcomeName

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "plain"
RECORD = ("--record-content", "full", "--record-share", "1")
ANSWER_TOKENS, AT_ONCE = 24, 4
# The next versions, by their flags; FOLDER stands for the one of the benchmark's files.
FOLDER, TEMPLATE = "FOLDER", "changed.jinja"
FLAGS = {
    "same": (),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
    "template": ("--chat-template", f"{FOLDER}/{TEMPLATE}"),
}
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
# A load has filled its streams after WARM_S. What a canary has left at the workers has ended SETTLED_AFTER_S after it
# was stopped: a window begins to count then.
WARM_S, SETTLED_AFTER_S = 20.0, 4.0
# More prompts than a load can need.
MOST_REQUESTS = 5000
RESAMPLES, CONFIDENCE_PERCENT = 400, 95


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
    for title in ("next version", "verdict", "after", "equal", "differ", "prompt", "error", "distance"):
        table.add_column(title, justify="left" if title in ("next version", "verdict") else "right")
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        records = pathlib.Path(name, "records")
        template = pathlib.Path(model, "chat_template.jinja").read_text()
        pathlib.Path(name, TEMPLATE).write_text(f"Be brief.\n{template}")
        with cluster(name, "now", model, "--record-path", str(records), *RECORD) as now:
            asyncio.run(ask_all(now.target, args.requests))
            asyncio.run(bundles_of(records, args.requests))
        for version in args.next:
            flags = [word.replace(FOLDER, name) for word in FLAGS.get(version, ())]
            with tree_of(version) as environ, cluster(name, version, model, *flags, environ=environ) as following:
                first = judged(records, following.target, "differs=0,distance=0", args.requests)
                every = judged(records, following.target, "differs=1", args.compared)
            rows[version] = {"first": first, "second": every}
            counts = (first["outcomes"].total(), *(every["outcomes"][one] for one in get_args(OutcomeName)))
            table.add_row(version, first["verdict"], *map(str, counts), f"{every['distance']:.3g}")
    return rows, table


def cost(args: argparse.Namespace) -> tuple[dict[str, Any], Table]:
    """Runs a load with and without a canary in turns; returns the times between tokens of both kinds of windows."""
    load = ClosedLoad(args.input_len, args.output_len, args.streams, MOST_REQUESTS)
    cores = sorted(os.sched_getaffinity(0))
    here, there = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    if not here:
        raise SystemExit("the other cluster needs a core of its own")
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        records = pathlib.Path(name, "records")
        os.sched_setaffinity(0, here)
        with cluster(name, "now", args.model, "--record-path", str(records), *RECORD) as now:
            os.sched_setaffinity(0, there)
            with (
                cluster(name, "next", args.model) as following,
                canary(records, following.target, "differs=1", 100_000, "--share", str(args.share)) as run,
            ):
                mirror = psutil.Process(run.process.pid)
                give_way([*following.processes(), mirror])
                gaps = asyncio.run(alternate(load, now.target, mirror, 2 * args.pairs, args.window_s))
                replays = run.outcomes().total()
    pairs = [dict(gaps[at : at + 2]) for at in range(0, len(gaps), 2)]
    ratios = [percentile(pair[True], 99) / percentile(pair[False], 99) for pair in pairs]
    draw = random.Random(0)
    drawn = [pooled_p99(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]
    edges = [percentile([new / old for old, new in drawn], (100 + sign * CONFIDENCE_PERCENT) / 2) for sign in (-1, 1)]
    old, new = pooled_p99(pairs)
    result = {
        "p99_ms": {"without": old, "with": new},
        "ratio": {"of_all": new / old, "low": edges[0], "high": edges[1], "of_pairs": spread(ratios)},
        "replays": replays,
    }
    table = Table(title=f"{load.name}, {args.share:.0%} of it mirrored, {args.pairs} pairs of {args.window_s:g} s")
    interval = f"{CONFIDENCE_PERCENT} % interval"
    for title in ("p99 without, ms", "with, ms", "ratio", interval, "of a pair: least, median, most"):
        table.add_column(title, justify="right")
    of_pairs = ", ".join(f"{value:.3f}" for value in spread(ratios).values())
    table.add_row(f"{old:.2f}", f"{new:.2f}", f"{new / old:.4f}", f"{edges[0]:.4f} to {edges[1]:.4f}", of_pairs)
    table.caption = f"{replays} replays"
    return result, table


async def alternate(
    load: ClosedLoad, target: str, mirror: psutil.Process, windows: int, window_s: float
) -> list[tuple[bool, list[float]]]:
    """Runs a load through all windows, of which each pair has one in which the mirror goes on; returns for each whether
    it did, and the milliseconds between tokens. Raises RuntimeError for a request that fails."""
    records: list[Record] = []
    server = PillionTarget("", True, 0.0, target=target)
    driver = LoadDriver(server, load.sessions(0), concurrency=load.concurrency, on_done=records.append)
    begun_s, running = time.perf_counter(), asyncio.create_task(driver.run())
    spans = []
    try:
        await asyncio.sleep(WARM_S)
        for number in range(windows):
            # One kind of window comes first in every other pair.
            goes_on = number % 4 in (0, 3)
            (mirror.resume if goes_on else mirror.suspend)()
            await asyncio.sleep(SETTLED_AFTER_S)
            since_s = time.perf_counter() - begun_s
            await asyncio.sleep(window_s - SETTLED_AFTER_S)
            spans.append((goes_on, since_s, time.perf_counter() - begun_s))
        # A request is known when it has ended: those of the last window are waited for.
        asked = len(records) + load.concurrency
        await until("the last requests to end", lambda: sum(one.session < asked for one in records) >= asked)
    finally:
        mirror.resume()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.aclose()
    if failed := [one.error for one in records if not one.ok]:
        raise RuntimeError(failed[0])
    gaps = [pair for one in records for pair in itertools.pairwise(at_s for at_s, _ in one.messages)]
    return [
        (goes_on, [(then - at) * 1000 for at, then in gaps if since_s <= at and then <= until_s])
        for goes_on, since_s, until_s in spans
    ]


def pooled_p99(pairs: Sequence[dict[bool, list[float]]]) -> tuple[float, float]:
    """Returns the p99 of all windows of these pairs without the canary, and of all with it."""
    without, beside = (percentile([ms for pair in pairs for ms in pair[on]], 99) for on in (False, True))
    return without, beside


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
    costs.add_argument("--pairs", type=int, default=20)
    costs.add_argument("--window-s", type=float, default=15.0)
    costs.add_argument("--share", type=float, default=0.1)
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
