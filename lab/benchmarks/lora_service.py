"""What adapters cost a whole service: `pillion serve` with LoRA beside one without, and streams beside loads.

A round measures the same closed loop against both clusters, one at a time: the model alone without and with
--enable-lora, and all streams over the adapters. Then it measures streams over the adapters beside a client that gives
a name another adapter and asks for a token with it, again and again, and beside the same client when it asks for a
token of the model alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import ClosedLoad, measure
from lab.benchmarks.report import show_table, spread
from lab.testbed.cluster import served
from lab.testbed.random_adapter import random_adapter_folder
from pillion import AsyncClient
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.loadgen.figures import percentile
from pillion.loadgen.target import PillionTarget

STREAMS_EACH = 2
LOAD = ClosedLoad(input_tokens=64, output_tokens=128, concurrency=STREAMS_EACH, requests=STREAMS_EACH)
# The adapters that one name has in turn. They are more than fit beside the others, so each load reads and packs again.
VERSIONS = 4
PAUSE_S = 0.5
LIVE = "live"


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """Of one run: tokens per second, the 99th percentile of the gaps between tokens, and loads beside it."""

    tokens_per_s: float
    itl_p99_ms: float
    loads: int = 0


async def streams(target: str, models: Sequence[str], seed: int) -> ServiceFigures:
    """Runs the load once for each model, all at the same time."""
    runs = await asyncio.gather(
        *(
            measure(PillionTarget(model, True, 0.0, target=target), LOAD.sessions(1000 * seed + number), STREAMS_EACH)
            for number, model in enumerate(models)
        )
    )
    gaps = [gap for run in runs for record in run.records for gap in record.itl_s]
    tokens = sum(record.output_tokens for run in runs for record in run.records)
    return ServiceFigures(tokens / max(run.duration_s for run in runs), percentile(gaps, 99) * 1000)


async def beside(target: str, models: Sequence[str], seed: int, versions: Sequence[pathlib.Path]) -> ServiceFigures:
    """Runs the load beside a client that asks for one token again and again: with an adapter that it loads each time,
    or of the model alone where there are no ``versions``."""
    asked = 0
    async with AsyncClient(target) as client:

        async def ask() -> None:
            nonlocal asked
            while True:
                if versions:
                    path = str(versions[asked % len(versions)])
                    await client.load_adapter(LIVE, path, in_place=True)
                name = LIVE if versions else ""
                async for _ in client.generate([7, 8, 9, asked % 1000 + 10], model=name, max_tokens=1):
                    pass
                asked += 1
                await asyncio.sleep(PAUSE_S)

        asking = asyncio.create_task(ask())
        try:
            found = await streams(target, models, seed)
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
    return replace(found, loads=asked)


def service(
    model: str, dtype: str, rank: int, adapters: int, rounds: int, folder: pathlib.Path
) -> list[dict[str, Any]]:
    """Starts both clusters, measures all rounds, and returns a row for each comparison."""
    config = load_config(prepare(ModelFlags(model=model, dtype=dtype)).folder)
    root = folder / "adapters"
    names = [f"a{number}" for number in range(adapters)]
    for number, name in enumerate(names):
        random_adapter_folder(config, root / name, number, rank)
    versions = [random_adapter_folder(config, root / f"v{one}", adapters + one, rank) for one in range(VERSIONS)]
    lora = ["--enable-lora", "--max-loras", str(adapters + 1), "--max-lora-rank", str(rank)]
    lora += ["--allow-runtime-lora-updating", "--lora-path", str(root)]
    lora += [word for name in names for word in ("--lora-modules", f"{name}={root / name}")]
    for name in ("bare", "lora"):
        (folder / name).mkdir()
    common = ("--dtype", dtype)
    with (
        served(folder / "bare", model, *common, split_policy="") as bare,
        served(folder / "lora", model, *common, *lora, split_policy="") as cluster,
    ):
        base = [""] * adapters
        runs: dict[str, Callable[[int], Coroutine[Any, Any, ServiceFigures]]] = {
            "bare": lambda seed: streams(bare.target, base, seed),
            "enabled": lambda seed: streams(cluster.target, base, seed),
            "adapters": lambda seed: streams(cluster.target, names, seed),
            "asked": lambda seed: beside(cluster.target, names, seed, ()),
            "loads": lambda seed: beside(cluster.target, names, seed, versions),
        }
        found: dict[str, list[ServiceFigures]] = {name: [] for name in runs}
        for seed in range(rounds + 1):
            for turn in range(len(runs)):
                name = list(runs)[(turn + seed) % len(runs)]
                figures = asyncio.run(runs[name](seed * len(runs) + turn))
                rate = f"{figures.tokens_per_s:.0f} tokens/s"
                print(f"round {seed} of {rounds}, {name}: {rate}, p99 {figures.itl_p99_ms:.0f} ms", flush=True)
                if seed:
                    # Round 0 warms up.
                    found[name].append(figures)
    return [
        _rates("LoRA enabled, the model alone", found["bare"], found["enabled"]),
        _rates(f"over {adapters} adapters", found["enabled"], found["adapters"]),
        _waits("p99 between tokens beside loads", found["asked"], found["loads"]),
    ]


def _rates(name: str, base: Sequence[ServiceFigures], other: Sequence[ServiceFigures]) -> dict[str, Any]:
    shares = [two.tokens_per_s / one.tokens_per_s for one, two in zip(base, other, strict=True)]
    middle = [statistics.median(each.tokens_per_s for each in figures) for figures in (base, other)]
    return {"name": name, "unit": "tokens/s", "without": middle[0], "with": middle[1], "ratio": spread(shares)}


def _waits(name: str, base: Sequence[ServiceFigures], other: Sequence[ServiceFigures]) -> dict[str, Any]:
    shares = [two.itl_p99_ms / one.itl_p99_ms for one, two in zip(base, other, strict=True)]
    middle = [statistics.median(each.itl_p99_ms for each in figures) for figures in (base, other)]
    row = {"name": name, "unit": "ms", "without": middle[0], "with": middle[1], "ratio": spread(shares)}
    return row | {"loads": sum(each.loads for each in other)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows."""
    table = Table("the whole service", "", "without", "with", "ratio, median (least-greatest)")
    for row in rows:
        ratio = "{median:.3f} ({min:.3f}-{max:.3f})".format(**row["ratio"])
        table.add_row(row["name"], row["unit"], f"{row['without']:.1f}", f"{row['with']:.1f}", ratio)
    show_table(table)
