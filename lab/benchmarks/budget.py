"""What the token budget of a decode step buys and costs: TTFT, ITL and throughput over `--max-num-batched-tokens`.

One decode worker on all cores serves everything (`--split-policy colocated`), so no other worker shapes the curve. A
fixed number of clients sends one prompt after the other; while some of them read their answers, the prompts of the
others are computed in the same steps. More settings stand beside the constant budgets: a budget that is chosen online
(`--target-itl-ms`: `auto`, the default, and numbers), and prompts that run whole (`--no-enable-chunked-prefill`), with
the stalls that chunks avoid. Settings alternate over rounds, so that a drift of the machine's speed meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import shlex
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.benchmarks.cluster import prompts
from lab.benchmarks.report import save, show_table
from pillion import AsyncClient
from pillion.loadgen.figures import percentile

ALWAYS = ("--prefill-workers=0", "--split-policy=colocated", "--max-num-seqs=16", "--max-model-len=2048")


@dataclass
class Figures:
    """The figures of all requests of one setting. Latencies are in ms."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    worst_itl: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def row(self, name: str, budget: int) -> dict[str, Any]:
        return {
            "setting": name,
            "max_num_batched_tokens": budget,
            "ttft_ms": {"p50": statistics.median(self.ttft), "p99": percentile(self.ttft, 99)},
            "itl_ms": {
                "p50": statistics.median(self.itl),
                "p90": percentile(self.itl, 90),
                "p99": percentile(self.itl, 99),
                "worst_of_a_stream_p50": statistics.median(self.worst_itl),
            },
            "output_tokens_per_s": statistics.median(self.tokens_per_s),
        }


async def load(target: str, seed: int, args: argparse.Namespace, figures: Figures) -> None:
    """Runs a closed loop of ``args.clients`` clients with ``args.requests`` requests in all."""
    waiting = prompts(seed, args.requests, args.input_len)
    tokens = 0

    async def client_of(client: AsyncClient, delay_s: float) -> None:
        nonlocal tokens
        await asyncio.sleep(delay_s)
        while waiting:
            begin, last, gaps = time.perf_counter(), 0.0, []
            async for delta in client.generate(
                waiting.pop(), temperature=0.0, max_tokens=args.output_len, ignore_eos=True
            ):
                now = time.perf_counter()
                if delta.token_ids:
                    tokens += len(delta.token_ids)
                    if last:
                        gaps += [(now - last) * 1000 / len(delta.token_ids)] * len(delta.token_ids)
                    else:
                        figures.ttft.append((now - begin) * 1000)
                    last = now
            figures.itl += gaps
            figures.worst_itl.append(max(gaps))

    async with AsyncClient(target) as client:
        begin = time.perf_counter()
        await asyncio.gather(*(client_of(client, 0.2 * number) for number in range(args.clients)))
        figures.tokens_per_s.append(tokens / (time.perf_counter() - begin))


def settings(args: argparse.Namespace) -> list[tuple[str, int, tuple[str, ...]]]:
    """Returns each setting's name, the most tokens that its steps may have, and its flags."""
    found: list[tuple[str, int, tuple[str, ...]]]
    found = [
        (f"budget {budget}", budget, (f"--max-num-batched-tokens={budget}", "--target-itl-ms=0"))
        for budget in args.budgets
    ]
    most = max(args.budgets)
    found += [
        (f"target {target}", most, (f"--max-num-batched-tokens={most}", f"--target-itl-ms={target}"))
        for target in args.targets
    ]
    whole = (f"--max-num-batched-tokens={2048 + 16}", "--no-enable-chunked-prefill")
    return [*found, ("whole prompts", 2048 + 16, whole)]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures each setting in each round on a fresh cluster, whose first requests warm it up."""
    from lab.testbed.cluster import served

    found: dict[str, Figures] = {}
    budgets = {name: budget for name, budget, _ in settings(args)}
    for number in range(args.rounds):
        for name, _, flags in settings(args):
            with tempfile.TemporaryDirectory(prefix="pil-") as folder:
                threads = (f"--cpu-threads={args.threads}",) if args.threads else ()
                with served(
                    pathlib.Path(folder), args.model, *ALWAYS, *threads, *flags, *shlex.split(args.flags)
                ) as cluster:
                    once = argparse.Namespace(**{**vars(args), "requests": 2, "output_len": 8})
                    asyncio.run(load(cluster.target, 10_000 + number, once, Figures()))
                    asyncio.run(load(cluster.target, number, args, found.setdefault(name, Figures())))
            Console().print(f"round {number + 1}: {name}: {found[name].tokens_per_s[-1]:.0f} tok/s")
    return [figures.row(name, budgets[name]) for name, figures in found.items()]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    table = Table(title="one decode worker, prompts beside decodes")
    for heading in ("setting", "TTFT p50/p99 ms", "ITL p50/p90/p99 ms", "worst ITL of a stream", "tok/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["setting"],
            "{p50:.0f} / {p99:.0f}".format(**row["ttft_ms"]),
            "{p50:.0f} / {p90:.0f} / {p99:.0f}".format(**row["itl_ms"]),
            f"{row['itl_ms']['worst_of_a_stream_p50']:.0f}",
            f"{row['output_tokens_per_s']:.0f}",
        )
    show_table(table)


def main() -> None:
    """Measure, print, write results/budget.json, or by another --name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--targets", nargs="+", default=["auto", "100", "200"], help="values of --target-itl-ms")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--requests", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="threads of the worker; 0: all cores")
    parser.add_argument("--flags", default="", help="more flags of `pillion serve`, such as those of a slow machine")
    parser.add_argument("--name", default="budget", help="name of the result's file")
    args = parser.parse_args()
    rows = measure(args)
    show(rows)
    settings_used = {key: value for key, value in vars(args).items() if key not in ("budgets", "targets")}
    save(args.name, {**settings_used, "rows": rows})


if __name__ == "__main__":
    main()
