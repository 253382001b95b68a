"""What pipeline parallelism costs on one host: the bubbles of two stages with whole prompts of mixed length, and with
equal chunks of the same prompts.

    whole     each prompt is one step
    chunks    steps of --chunk tokens: the last chunk of a prompt shares its step with the first of the next one

Both go through the same stages, one thread each, with as many steps under way as stages; an idle share is that of the
time with steps under way in which a stage computed nothing. Beside them the chunks on one process with two threads.
Everything is measured in turn, so that what else runs on the machine slows all.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from lab.benchmarks.report import save, show_table, spread
from lab.testbed.plain_model import plain_folder
from pillion.config import DTYPE_CHOICES, KVNodeFlags, PrefillFlags
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.load_model import load_model
from pillion.engine.stages.staged_backend import StageProcesses
from pillion.kernels.step import SamplingRows, StepBatch
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import attach

STAGES = 2
BLOCK_SIZE = 16
LONGEST_TOKENS, SHORTEST_TOKENS = 1024, 32
NO_ROWS = SamplingRows.of((), (), ())
# A piece of a step: the number of a prompt, and its first and last token.
Piece = tuple[int, int, int]


def lengths_of(prompts: int) -> list[int]:
    """Lengths of prompts, as many short ones as long ones."""
    drawn = np.random.default_rng(34).uniform(np.log(SHORTEST_TOKENS), np.log(LONGEST_TOKENS), prompts)
    return [int(length) for length in np.exp(drawn)]


def whole(lengths: Sequence[int]) -> Iterator[list[Piece]]:
    """Steps of one prompt each."""
    for number, length in enumerate(lengths):
        yield [(number, 0, length)]


def chunks(lengths: Sequence[int], tokens: int) -> Iterator[list[Piece]]:
    """Steps of so many tokens each; the last one may have fewer."""
    step: list[Piece] = []
    left = tokens
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            count = min(left, length - start)
            step.append((number, start, start + count))
            start, left = start + count, left - count
            if not left:
                yield step
                step, left = [], tokens
    if step:
        yield step


def batch_of(step: Sequence[Piece]) -> StepBatch:
    """Makes the batch of a step; two prompts beside each other have blocks of their own."""
    per_prompt = -(-LONGEST_TOKENS // BLOCK_SIZE)
    firsts = [number % 8 * per_prompt for number, _, _ in step]
    tables = np.array([np.arange(first, first + per_prompt) for first in firsts], np.int32)
    counts = [end - start for _, start, end in step]
    positions = np.concatenate([np.arange(start, end) for _, start, end in step]).astype(np.int32)
    return StepBatch(
        token_ids=np.full(sum(counts), 5, np.int32),
        positions=positions,
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array([end for _, _, end in step], np.int32),
        block_tables=tables,
        sample_rows=np.zeros(0, np.int32),
    )


class MeasuredWorker:
    """A worker's model, whose steps the benchmark runs by itself."""

    def __init__(self, flags: PrefillFlags, name: str) -> None:
        self.model: LoadedModel = load_model(flags, STAGES)
        self.backend = self.model.backend
        block_bytes = self.backend.layout.block_bytes
        self.attachment = attach(
            flags.attach_socket, component_id=name, role="prefill", block_bytes=block_bytes, timeout_s=60.0
        )
        self.model.bind_pool(self.attachment)
        self.backend.warm_up(LONGEST_TOKENS)

    def run(self, steps: Sequence[StepBatch]) -> dict[str, Any]:
        """Runs steps one after the other; returns their seconds, and the idle share of each stage."""
        processes, under_way = self.model.ranks, []
        clock = processes.clock if isinstance(processes, StageProcesses) else None
        before = ([*clock.work_s], [*clock.wait_s]) if clock else None
        began_s = time.perf_counter()
        for batch in steps:
            under_way.append(self.backend.launch(batch, (), NO_ROWS))
            if len(under_way) == self.backend.max_steps_under_way:
                under_way.pop(0).wait()
        for step in under_way:
            step.wait()
        found: dict[str, Any] = {"seconds": time.perf_counter() - began_s}
        if clock and before:
            work, wait = (
                np.subtract(now, then) for now, then in zip((clock.work_s, clock.wait_s), before, strict=True)
            )
            found["idle"] = (wait / (work + wait)).tolist()
        return found

    def close(self) -> None:
        self.backend.close()
        self.attachment.close()


def measure(flags: PrefillFlags, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and idle shares of all rounds."""
    lengths = lengths_of(args.prompts)
    every = [*map(batch_of, whole(lengths))], [*map(batch_of, chunks(lengths, args.chunk))]
    staged, alone = (
        MeasuredWorker(PrefillFlags(**{**vars(flags), "pipeline_parallel_size": stages}), f"{stages} stages")
        for stages in (STAGES, 1)
    )
    rounds: dict[str, list[dict[str, Any]]] = {"whole": [], "chunks": [], "one process": []}
    for _ in range(args.rounds):
        rounds["whole"].append(staged.run(every[0]))
        rounds["chunks"].append(staged.run(every[1]))
        rounds["one process"].append(alone.run(every[1]))
    staged.close()
    alone.close()
    found: dict[str, Any] = {"tokens": sum(lengths), "steps": {"whole": len(every[0]), "chunks": len(every[1])}}
    for name, runs in rounds.items():
        found[name] = {"seconds": spread([run["seconds"] for run in runs])}
        if "idle" in runs[0]:
            found[name]["idle"] = [spread(shares) for shares in zip(*(run["idle"] for run in runs), strict=True)]
    return found


async def main() -> None:
    """Measure, print, write results/stages.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_CHOICES)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        common: dict[str, Any] = {"attach_socket": f"{folder}/a.sock"}
        node = await start_kvnode(KVNodeFlags(**common, node_listen=f"unix:{folder}/k.sock"))
        shape: dict[str, Any] = {"model": str(plain_folder(args.model)), "dtype": args.dtype, "block_size": BLOCK_SIZE}
        flags = PrefillFlags(**common, **shape, max_num_batched_prefill_tokens=LONGEST_TOKENS)
        found = await asyncio.to_thread(measure, flags, args)
        await node.stop()
    show(found)
    if not args.no_save:
        print(save("stages", {"model": args.model, "dtype": args.dtype, "chunk": args.chunk, **found}))


def show(found: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table(title=f"{found['tokens']} tokens of prompts: median (least to most)")
    for heading in ("steps", "seconds", "idle: stage 0", "idle: stage 1"):
        table.add_column(heading, justify="right")
    for name in ("whole", "chunks", "one process"):
        cells = [found[name]["seconds"], *found[name].get("idle", ())]
        table.add_row(name, *(f"{one['median']:.3f} ({one['min']:.3f} to {one['max']:.3f})" for one in cells))
    show_table(table)


if __name__ == "__main__":
    asyncio.run(main())
