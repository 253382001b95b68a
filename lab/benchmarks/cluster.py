"""`make bench`: the real cluster beside transformers' `generate` on the same model, machine and lengths, in one run.

Rounds alternate between the two, so that a drift of the machine's speed meets both. Every prompt is new, so nothing
comes from the prefix cache. transformers gets its best case: all prompts of a round in one batch that starts at once.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE, one_turn
from lab.benchmarks.closed_loop import measure as measure_load
from lab.benchmarks.report import save, show_table, spread
from pillion.loadgen.figures import percentile
from pillion.loadgen.target import PillionTarget

MODEL = "demo"


@dataclass(frozen=True, slots=True)
class Round:
    """One round's figures. Latencies are in ms, and empty for transformers, whose `generate` shows none."""

    output_tokens_per_s: float
    ttft_ms: tuple[float, ...] = ()
    itl_ms: tuple[float, ...] = ()


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    """Returns ``count`` prompts of random token ids, the same for both sides of a round."""
    draw = random.Random(seed)
    return [[draw.randrange(*TOKEN_RANGE) for _ in range(length)] for _ in range(count)]


async def run_pillion(target: str, batch: list[list[int]], max_tokens: int) -> Round:
    """Sends all prompts of a round at once, each on its own stream."""
    sessions = [one_turn(ids, max_tokens) for ids in batch]
    run = await measure_load(PillionTarget("", True, 0.0, target=target), sessions, len(batch))
    return Round(
        sum(record.output_tokens for record in run.records) / run.duration_s,
        tuple(record.ttft_s * 1000 for record in run.records),
        tuple(gap * 1000 for record in run.records for gap in record.itl_s),
    )


def run_transformers(model: Any, batch: list[list[int]], max_tokens: int) -> Round:
    """Runs one batched greedy `generate`."""
    import torch

    ids = torch.tensor(batch)
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
        )
    seconds = time.perf_counter() - begin
    return Round(out[:, ids.shape[1] :].numel() / seconds)


def measure(target: str, model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all concurrencies in rounds that alternate between the two."""
    rows = []
    for concurrency in args.concurrency:
        ours: list[Round] = []
        theirs: list[Round] = []
        for index in range(args.rounds + 1):
            batch = prompts(1000 * concurrency + index, concurrency, args.input_len)
            pair = (
                asyncio.run(run_pillion(target, batch, args.output_len)),
                run_transformers(model, batch, args.output_len),
            )
            if index:  # the first round warms both up
                ours.append(pair[0])
                theirs.append(pair[1])
        ttft = [value for r in ours for value in r.ttft_ms]
        itl = [value for r in ours for value in r.itl_ms]
        ratios = [a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            {
                "concurrency": concurrency,
                "pillion_output_tokens_per_s": spread([r.output_tokens_per_s for r in ours]),
                "transformers_output_tokens_per_s": spread([r.output_tokens_per_s for r in theirs]),
                "ratio": spread(ratios),
                "ttft_ms": {"p50": statistics.median(ttft), "p99": percentile(ttft, 99)},
                "itl_ms": {"p50": statistics.median(itl), "p99": percentile(itl, 99)},
            }
        )
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for heading in ("streams", "pillion tok/s", "transformers tok/s", "ratio", "TTFT p50/p99 ms", "ITL p50/p99 ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [
            "{median:.0f} ({min:.0f}-{max:.0f})".format(**row[f"{name}_output_tokens_per_s"])
            for name in ("pillion", "transformers")
        ]
        table.add_row(
            str(row["concurrency"]),
            *cells,
            "{median:.2f} ({min:.2f}-{max:.2f})".format(**row["ratio"]),
            "{p50:.0f} / {p99:.0f}".format(**row["ttft_ms"]),
            "{p50:.1f} / {p99:.1f}".format(**row["itl_ms"]),
        )
    show_table(table)


def main() -> None:
    """Starts the cluster, measures, and writes results/cluster.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from lab.testbed.cluster import served
    from lab.testbed.plain_model import plain_folder
    from pillion.config import ModelFlags
    from pillion.engine.checkpoints.prepare import prepare

    logging.set_verbosity_error()
    prepared = prepare(ModelFlags(model=MODEL))
    model = AutoModelForCausalLM.from_pretrained(plain_folder(MODEL), dtype=getattr(torch, prepared.dtype)).eval()
    with tempfile.TemporaryDirectory(prefix="pil-") as folder, served(pathlib.Path(folder), MODEL) as cluster:
        rows = measure(cluster.target, model, args)
    lengths = {"input_tokens": args.input_len, "output_tokens": args.output_len, "rounds": args.rounds}
    path = save("cluster", {"model": prepared.name, "dtype": prepared.dtype, **lengths, "rows": rows})
    show(rows, f"{prepared.name}, {prepared.dtype}, {args.input_len} tokens in, {args.output_len} out")
    Console().print(
        f"written to {path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path}"
    )


if __name__ == "__main__":
    main()
