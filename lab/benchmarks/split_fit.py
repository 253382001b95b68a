"""The cost of a step of the real model on one core, fitted to real steps, for the simulation.

Steps of many shapes run in this process, each several times; the quickest run counts, which leaves out other load of
the machine. The fit minimizes the squares of relative errors with non-negative weights, like a worker's own fit
(:mod:`pillion.engine.scheduling.step_cost`), over shapes that distinguish all five weights.
"""

from __future__ import annotations

import argparse
from operator import truediv
from typing import Any

from rich.console import Console

from lab.benchmarks.cpu_steps import CpuStepBench, kernels_bench
from lab.benchmarks.report import save
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.scheduling.step_cost import SCALES, Features, StepCost

# Streams and their context; tokens of a chunk and the tokens before it.
DECODES = ((1, 64), (1, 1024), (4, 256), (8, 1024), (16, 256), (16, 1024), (32, 512))
CHUNKS = ((16, 0), (64, 0), (64, 1024), (256, 0), (256, 768), (256, 1536), (512, 0), (512, 1024))
# The fit's decay of older steps per step; this close to 1 all steps count until the end.
FADING = 0.9999


def shapes() -> list[tuple[str, tuple[int, int], Features]]:
    """Returns each shape's kind, its two numbers, and the scaled features that its cost depends on."""
    found = []
    for batch, context in DECODES:
        raw = [1.0, batch, batch, batch * context, batch * context]
        found.append(("decode", (batch, context), tuple(map(truediv, raw, SCALES))))
    for tokens, prefix in CHUNKS:
        raw = [1.0, tokens, 1.0, tokens + prefix, tokens * (prefix + (tokens + 1) / 2)]
        found.append(("chunk", (tokens, prefix), tuple(map(truediv, raw, SCALES))))
    return found


def fit(bench: CpuStepBench, repeats: int) -> tuple[StepCost, list[dict[str, Any]]]:
    """Fits the model; returns it, and a row for each shape."""
    cost, rows = StepCost(FADING), []
    measured = []
    for kind, numbers, scaled in shapes():
        batch = bench.decode(*numbers) if kind == "decode" else bench.chunk(*numbers)
        seconds = min(bench.seconds(batch, repeats))
        measured.append((kind, numbers, scaled, seconds))
    for _ in range(20):
        for _, _, scaled, seconds in measured:
            cost.observe(scaled, seconds)
    for kind, numbers, scaled, seconds in measured:
        rows.append({"step": f"{kind} {numbers}", "ms": seconds * 1000, "fitted_ms": cost.predict(scaled) * 1000})
    return cost, rows


def main() -> None:
    """Measure, print, write results/split_fit.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    bench = kernels_bench(prepare(ModelFlags(model=args.model)), args.threads)
    cost, rows = fit(bench, args.repeats)
    for row in rows:
        Console().print(f"{row['step']}: {row['ms']:.1f} ms, fitted {row['fitted_ms']:.1f}")
    weights_s = cost.weights_s()
    Console().print("seconds of a step, token, sequence, KV token read, pair:", " ".join(f"{w:.3g}" for w in weights_s))
    save("split_fit", {"model": args.model, "threads": args.threads, "rows": rows, "step_cost_s": weights_s})


if __name__ == "__main__":
    main()
