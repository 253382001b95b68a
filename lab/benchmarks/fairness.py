"""First tokens of a tenant that asks one at a time beside another tenant's flood, and the shares of two floods.

    alone:    the lone tenant's requests, one after the other
    flood:    the flood alone: --concurrency streams at any time
    beside:   both together
    weights:  two floods at once, of tenants of weights 1 and 3

The goals: beside the flood a first token takes at most twice as long as alone, and one step; the flood's throughput
stays; tokens come out as 1 to 3, within 5 %. The figures are those of a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import random
import tempfile
import time
from collections import Counter
from statistics import median
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE
from lab.benchmarks.report import save, show_table
from lab.testbed.cluster import served
from pillion import AsyncClient
from pillion.gateway.admission.api_keys import hash_of

KEYS = {name: f"plk-{name}-" + name[0] * 40 for name in ("flood", "heavy", "lone", "operator")}
TENANTS = "[tenant.flood]\n[tenant.heavy]\nweight = 3\n[tenant.lone]\n[tenant.operator]\noperator = true\n"
# Tokens count after SETTLE_S, and from when each stream of a flood has ended an answer, but after MOST_SETTLE_S in any
# case: the first answers came before all had asked.
SETTLE_S, MOST_SETTLE_S = 10.0, 150.0
PAUSE_S = 0.5


class TenantLoad:
    """Asks for answers over and over, until it is told to stop; counts tokens of answers, and times first ones."""

    def __init__(self, target: str, name: str, args: argparse.Namespace) -> None:
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.tokens = self.answers = 0
        self._client = AsyncClient(target, api_key=KEYS[name])
        self._args = args
        self._draw = random.Random(name)

    async def ask(self, output_tokens: int) -> None:
        """Asks once."""
        prompt = [self._draw.randrange(*TOKEN_RANGE) for _ in range(self._args.input_tokens)]
        sent_s = last_s = time.monotonic()
        stream = self._client.generate(prompt, max_tokens=output_tokens, ignore_eos=True)
        async for delta in stream:
            if delta.token_ids:
                now = time.monotonic()
                (self.gaps_s if last_s > sent_s else self.first_s).append(now - last_s)
                last_s = now
                self.tokens += len(delta.token_ids)
        self.answers += 1

    async def flood(self) -> None:
        """Asks for ``--concurrency`` answers at any time."""

        async def one(number: int) -> None:
            while True:
                # No two streams' answers end together for long.
                await self.ask(self._args.output_tokens + number % 16)

        await asyncio.gather(*(one(number) for number in range(self._args.concurrency)))

    async def one_by_one(self) -> None:
        """Asks for short answers one after the other, with pauses."""
        while True:
            await self.ask(self._args.lone_tokens)
            await asyncio.sleep(PAUSE_S * (0.5 + self._draw.random()))

    async def close(self) -> None:
        """Closes its connection."""
        await self._client.close()


async def measured(target: str, args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, TenantLoad]:
    """Runs the loads of some tenants for --seconds, after they have settled."""
    loads = {name: TenantLoad(target, name, args) for name in names}
    tasks = [asyncio.create_task(load.one_by_one() if name == "lone" else load.flood()) for name, load in loads.items()]
    until_s = time.monotonic() + MOST_SETTLE_S
    await asyncio.wait(tasks, timeout=SETTLE_S)
    while time.monotonic() < until_s and any(
        load.answers < args.concurrency for name, load in loads.items() if name != "lone"
    ):
        await asyncio.wait(tasks, timeout=PAUSE_S)
    for load in loads.values():
        load.first_s, load.gaps_s, load.tokens = [], [], 0
    done, _ = await asyncio.wait(tasks, timeout=args.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for load in loads.values():
        await load.close()
    for task in done:
        task.result()
    return loads


async def measure(target: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures all four loads; returns the figures."""
    alone = (await measured(target, args, ("lone",)))["lone"]
    flood = (await measured(target, args, ("flood",)))["flood"]
    both = await measured(target, args, ("flood", "lone"))
    floods = await measured(target, args, ("flood", "heavy"))
    tokens = Counter({name: load.tokens for name, load in floods.items()})
    lone, step_s = both["lone"], sorted(both["flood"].gaps_s)[int(len(both["flood"].gaps_s) * 0.95)]
    return {
        "alone_s": median(alone.first_s),
        "alone_most_s": max(alone.first_s),
        "beside_s": median(lone.first_s),
        "beside_most_s": max(lone.first_s),
        "step_s": step_s,
        "ratio": (max(lone.first_s) - step_s) / max(alone.first_s),
        "flood_tokens_per_s": flood.tokens / args.seconds,
        "both_tokens_per_s": (both["flood"].tokens + lone.tokens) / args.seconds,
        "heavy_to_flood": tokens["heavy"] / tokens["flood"],
    }


def main() -> None:
    """Starts a cluster with three tenants, measures, prints, and writes results/fairness.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--concurrency", type=int, default=64, help="streams of a flood")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--lone-tokens", type=int, default=16, help="of the lone tenant's answers")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each load")
    args = parser.parse_args()
    # Whoever waits for the cluster asks for its status.
    os.environ["PILLION_API_KEY"] = KEYS["operator"]
    rows = []
    for places in args.max_num_seqs:
        with tempfile.TemporaryDirectory(prefix="pil-") as name:
            folder = pathlib.Path(name)
            keys = (f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items())
            (folder / "keys.toml").write_text(TENANTS + "".join(keys))
            flags = (f"--api-keys={folder / 'keys.toml'}", f"--max-num-seqs={places}", "--max-model-len=1024")
            with served(folder, args.model, *flags, split_policy="") as cluster:
                rows.append({"max_num_seqs": places, **asyncio.run(measure(cluster.target, args))})
    table = Table("places", "first token alone", "beside", "ratio", "step", "flood", "both", "1 : 3 is")
    for row in rows:
        alone, beside = (f"{row[name]:.2f} to {row[f'{name[:-2]}_most_s']:.2f} s" for name in ("alone_s", "beside_s"))
        speeds = (f"{row[name]:.0f}/s" for name in ("flood_tokens_per_s", "both_tokens_per_s"))
        table.add_row(
            str(row["max_num_seqs"]), alone, beside, f"{row['ratio']:.2f}", f"{row['step_s']:.3f} s", *speeds,
            f"1 : {row['heavy_to_flood']:.2f}",
        )  # fmt: skip
    show_table(table)
    print("The ratio is of the longest first tokens, less one step; the goal is 2. Medians stand before the longest.")
    save("fairness", {"load": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
