"""Where a decode step's time goes: schedule, build, forward, sample, commit, as on a worker's step thread.

The model is the demo model on plain torch with one thread, and all streams decode. Overhead is everything outside
of the forward pass. Steps alternate between the sampling settings, so that a drift of the machine's speed meets all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.report import save, show_table
from pillion.config import DecodeFlags
from pillion.engine.backends.batching import build_batch, build_sampling
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.sampling.sampler import sample
from pillion.engine.scheduling.block_chain import Holding
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence, SequenceSpec
from pillion.types import SamplingParams

MODEL = "demo"
MAX_TOKENS = 4096
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "penalties, logprobs": {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 5},
}
PHASES = ("schedule", "build", "forward", "sample", "commit")


class DecodeLoop:
    """Decode steps of a scheduler, whose streams all have their slots, over one backend."""

    def __init__(
        self,
        backend: Any,
        block_size: int,
        batch: int,
        context: int,
        sampling: SamplingParams,
        *,
        prompt: npt.NDArray[np.int32] | None = None,
        make_grammar: Callable[[int], Any] = lambda number: None,
    ) -> None:
        """``prompt``: int32 [context], of every stream; default: random tokens. ``make_grammar``: what the stream of
        that number follows."""
        self.backend, self.block_size = backend, block_size
        self.scheduler = Scheduler(block_size=block_size, max_num_batched_tokens=4096, max_num_seqs=batch)
        draw = np.random.default_rng(batch)
        blocks = (context + MAX_TOKENS // batch) // block_size + 2
        for number in range(batch):
            mine = tuple(range(number * blocks, (number + 1) * blocks))
            spec = SequenceSpec(
                seq_id=number + 1,
                token_ids=draw.integers(1000, 40_000, context).astype(np.int32) if prompt is None else prompt,
                parent_hash=bytes(32),
                prompt_tokens=context,
                sampling=sampling,
                max_tokens=MAX_TOKENS // batch,
                max_model_len=1_000_000,
            )
            holding, grammar = Holding(number + 1, (), mine), make_grammar(number)
            self.scheduler.add(Sequence(spec, holding, block_size, 0.0, grammar=grammar), 0.0)

    def step(self) -> dict[str, float]:
        """Run one step; return its seconds by phase. Commits are answered at once, outside of the phases."""
        times = [time.perf_counter()]
        plan = self.scheduler.schedule(times[0])
        self.scheduler.flush(times[0])
        times.append(time.perf_counter())
        batch, rows = build_batch(plan, self.block_size), build_sampling(plan)
        times.append(time.perf_counter())
        logits = self.backend.forward(batch)
        times.append(time.perf_counter())
        sampled = sample(logits, rows)
        times.append(time.perf_counter())
        outcome = self.scheduler.commit(plan, sampled, times[-1])
        times.append(time.perf_counter())
        for order in outcome.commits:
            self.scheduler.committed(order.seq_id, order.slots, "", times[-1])
        return dict(zip(PHASES, np.diff(times).tolist(), strict=True))


def measure(backend: Any, block_size: int, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all sampling settings; return one row for each."""
    defaults: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "seed": 1}
    loops = {
        name: DecodeLoop(backend, block_size, batch, args.context, SamplingParams(**{**defaults, **setting}))
        for name, setting in SETTINGS.items()
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.step()
    for _ in range(args.steps):
        for name, loop in loops.items():
            found[name].append(loop.step())
    rows = []
    for name, steps in found.items():
        ms = {phase: statistics.median(step[phase] for step in steps) * 1000 for phase in PHASES}
        shares = [1 - step["forward"] / sum(step.values()) for step in steps]
        rows.append({"batch": batch, "sampling": name, **ms, "overhead_share": statistics.median(shares)})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="one decode step, median ms")
    for heading in ("streams", "sampling", *PHASES, "outside the model"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [f"{row[phase]:.2f}" for phase in PHASES]
        table.add_row(str(row["batch"]), row["sampling"], *cells, f"{row['overhead_share']:.1%}")
    show_table(table)


def main() -> None:
    """Measure, print, write results/step.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    args = parser.parse_args()
    flags = DecodeFlags(model=MODEL)
    backend = TorchBackend(prepare(flags), flags.block_size, 1)
    slots = (args.context + MAX_TOKENS) // flags.block_size * 2 + 3 * max(args.batch) * (1 + args.context // 16)
    backend.bind_pool(memoryview(bytearray(slots * backend.layout.block_bytes)), slots)
    rows = [row for batch in args.batch for row in measure(backend, flags.block_size, batch, args)]
    show(rows)
    save("step", {"model": MODEL, "context_tokens": args.context, "steps": args.steps, "threads": 1, "rows": rows})


if __name__ == "__main__":
    main()
