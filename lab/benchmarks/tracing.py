"""`python -m lab.benchmarks.tracing`: the throughput of a cluster that traces every request, beside one without.

Two real clusters run side by side, and one exports every span to a receiver in this process. The same load goes to one,
then to the other, round after round, so that a noisy machine disturbs both. The result is the ratio of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.table import Table

from lab.benchmarks.cluster import prompts
from lab.benchmarks.kv_handoff import exporting
from lab.benchmarks.report import save, show_table
from lab.testbed.cluster import served
from pillion import AsyncClient

MODEL = "demo"


async def tokens_per_s(target: str, seed: int, streams: int, input_len: int, output_len: int) -> float:
    """Measures the generated tokens a second of ``streams`` streams that begin together."""
    async with AsyncClient(target) as client:

        async def one(ids: list[int]) -> None:
            async for _ in client.generate(ids, temperature=0.0, max_tokens=output_len, ignore_eos=True):
                pass

        began = time.perf_counter()
        await asyncio.gather(*(one(ids) for ids in prompts(seed, streams, input_len)))
        return streams * output_len / (time.perf_counter() - began)


@contextmanager
def clusters() -> Iterator[tuple[str, str, list[int]]]:
    """Yields the addresses of a cluster without and of one with traces, and a list that gets the count of spans."""
    # Only the cluster that starts after the receiver exports; it pushes metrics as well.
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as plain,
        tempfile.TemporaryDirectory(prefix="pil-") as traced,
        served(pathlib.Path(plain), MODEL) as quiet,
        exporting(0) as receiver,
        served(pathlib.Path(traced), MODEL) as loud,
    ):
        spans: list[int] = []
        yield quiet.target, loud.target, spans
        spans.append(len(receiver.spans))


def main() -> None:
    """Measures rounds that alternate, and writes results/tracing.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    shape = (args.streams, args.input_len, args.output_len)
    rounds: list[dict[str, float]] = []
    with clusters() as (plain, traced, spans):
        for target in (plain, traced):
            asyncio.run(tokens_per_s(target, 1, *shape))
        for number in range(args.rounds):
            # Each cluster goes first in every other round.
            order = [("plain", plain), ("traced", traced)][:: 1 if number % 2 else -1]
            found = {name: asyncio.run(tokens_per_s(target, 100 + number, *shape)) for name, target in order}
            rounds.append(found | {"ratio": found["traced"] / found["plain"]})
    ratios = [each["ratio"] for each in rounds]
    table = Table(title="Generated tokens/s with every request traced")
    for name in ("", "median", "least", "most"):
        table.add_column(name, justify="right" if name else "left")
    for name in ("plain", "traced", "ratio"):
        values = [each[name] for each in rounds]
        table.add_row(name, *(f"{value:.3g}" for value in (statistics.median(values), min(values), max(values))))
    show_table(table)
    result = {"rounds": rounds, "ratio_median": statistics.median(ratios), "spans": spans[0], "load": vars(args)}
    print(f"{spans[0]} spans; written to {save('tracing', result)}")


if __name__ == "__main__":
    main()
