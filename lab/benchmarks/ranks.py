"""What tensor parallelism costs on one host: the sum over two ranks beside gloo's, and two ranks beside two threads.

    sums     a sum of [rows, width] float32 over two processes, as a layer makes it: gloo's all_reduce and the addition
             to the residual stream, beside the operation of the CPU kernels, which does both
    steps    steps of two ranks with one thread each beside the same steps of one process with two threads; a rank's
             share is the least time of the one over the least time of the other, and also the median of the rounds'

Everything is measured in turn, so that what else runs on the machine slows both.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table

from lab.benchmarks.cpu_steps import BLOCK_SIZE, SLOTS, CpuStepBench, kernels_bench
from lab.benchmarks.report import save, show_table, spread
from lab.testbed.plain_model import plain_folder
from pillion.config import DTYPE_CHOICES, ModelFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import CpuModel, load_cpu_model
from pillion.engine.backends.cpu.cpu_operations import OperationBuilder
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.ranks.cpu_rank import CpuRankBackend
from pillion.engine.ranks.rank_collective import RankCollective
from pillion.engine.ranks.rank_memory import RankMember, RankMemory
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.step import StepBatch

RANKS = 2
CONTEXT_TOKENS = 264
STEPS_EACH = 8
SUMS_EACH = 50
ROWS = (1, 16, 256)
MAX_TOKENS = 512


class SharedPool(CpuStepBench):
    """A bench whose pool all ranks map."""

    backend: CpuBackend

    def __init__(self, backend: CpuBackend, descriptor: int) -> None:
        self.backend = backend
        backend.bind_pool(memoryview(mmap.mmap(descriptor, SLOTS * backend.layout.block_bytes)), SLOTS)
        self._order = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)


class RankBench:
    """One rank: its share of the model and its end of gloo. Every process runs the same calls in the same order."""

    def __init__(self, prepared: PreparedModel, member: RankMember, pool: int, collective: str) -> None:
        torch.set_num_threads(1)
        isa = choose_isa("auto", host_features())
        assert isa is not None
        dist.init_process_group(
            "gloo", init_method=f"file://{collective}", rank=member.shard.rank, world_size=member.shard.size
        )
        model = load_cpu_model(prepared, BLOCK_SIZE, isa, shard=member.shard)
        self.steps = SharedPool(CpuRankBackend(model, 1, member=member), pool)
        self._width = model.config.hidden_size

    def cases(self) -> dict[str, StepBatch]:
        """Returns the steps, by name."""
        found = {f"decode {batch}": self.steps.decode(batch, CONTEXT_TOKENS) for batch in (1, 16)}
        return found | {f"chunk {tokens}": self.steps.chunk(tokens, 0) for tokens in (64, 256)}

    def own_sums(self, rows: int) -> Callable[[], None]:
        """SUMS_EACH sums in one program, over the record of a step of ``rows`` rows."""
        backend, model = self.steps.backend, self.steps.backend.model
        backend.forward(self.steps.decode(rows, BLOCK_SIZE))
        builder = rank_builder(model)
        collective = RankCollective(model.shard, builder.config, builder.layout.num_kv_heads)
        summed = builder.hidden, builder.rows_of, builder.when
        return backend.again([collective.sum(*summed, add=True)[1] for _ in range(SUMS_EACH)])

    def gloo_sums(self, rows: int) -> Callable[[], None]:
        """SUMS_EACH sums by gloo, each with its addition."""
        partial, hidden = torch.zeros(rows, self._width), torch.zeros(rows, self._width)

        def run() -> None:
            for _ in range(SUMS_EACH):
                dist.all_reduce(partial)
                hidden.add_(partial)

        return run


def rank_builder(model: CpuModel) -> OperationBuilder:
    """A builder of single operations of a rank."""
    plan, shard = model.plan, model.shard
    config = shard.local(model.config)
    return OperationBuilder(config, model.weights, model.layout, model.dtype, plan.ropes, shard, model.config.num_heads)


def least_us(call: Callable[[], None], rounds: int) -> float:
    """Returns the least microseconds of one sum."""
    return min(timed(call) for _ in range(rounds)) / SUMS_EACH * 1e6


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_sums(bench: RankBench, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a sum, by the number of rows."""
    found = {}
    for rows in ROWS:
        own, gloo = bench.own_sums(rows), bench.gloo_sums(rows)
        pairs = [(least_us(own, 5), least_us(gloo, 5)) for _ in range(rounds)]
        best = [min(values) for values in zip(*pairs, strict=True)]
        found[str(rows)] = {"own_us": best[0], "gloo_us": best[1], "ratio": best[1] / best[0]}
    return found


def measure_steps(bench: RankBench, whole: CpuStepBench | None, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step of two threads and of two ranks. ``whole``: the process with two threads, in rank 0."""
    cases = bench.cases()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, batch in cases.items():
            alone = [timed(partial(whole.backend.forward, batch)) for _ in range(STEPS_EACH)] if whole else [0.0]
            shared = [timed(partial(bench.steps.backend.forward, batch)) for _ in range(STEPS_EACH)]
            times[name].append((min(alone) * 1000, min(shared) * 1000))
    return {name: _compared(pairs) for name, pairs in times.items()}


def _compared(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    alone, shared = zip(*pairs, strict=True)
    return {
        "threads_ms": spread(alone),
        "ranks_ms": spread(shared),
        "ratio_of_least": min(alone) / min(shared),
        "ratio": spread([one / other for one, other in pairs]),
    }


def run(rank: int, args: argparse.Namespace, memory: int, pool: int, collective: str) -> dict[str, Any]:
    """A rank's process. Rank 0 returns what was measured."""
    prepared = prepare(ModelFlags(model=str(plain_folder(args.model)), dtype=args.dtype))
    shard = ModelShard.of(load_config(prepared.folder), rank, RANKS)
    bench = RankBench(prepared, RankMember(shard, RankMemory.open(memory)), pool, collective)
    whole = kernels_bench(prepared, RANKS) if rank == 0 else None
    return {"steps": measure_steps(bench, whole, args.rounds), "sums": measure_sums(bench, args.rounds)}


def main() -> None:
    """Measure, print, write results/ranks.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_CHOICES)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    prepared = prepare(ModelFlags(model=str(plain_folder(args.model)), dtype=args.dtype), print)
    config = load_config(prepared.folder)
    memory, pool = RankMemory.create(config, RANKS, MAX_TOKENS), os.memfd_create("pool")
    os.ftruncate(pool, SLOTS * kv_layout(prepared, BLOCK_SIZE).block_bytes)
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        # The other rank is forked before this process has threads.
        other = multiprocessing.get_context("fork").Process(
            target=run, args=(1, args, memory.fd, pool, f"{folder}/collective"), daemon=True
        )
        other.start()
        found = run(0, args, memory.fd, pool, f"{folder}/collective")
        other.join()
    show(found)
    if not args.no_save:
        print(save("ranks", {"model": args.model, "dtype": args.dtype, "rounds": args.rounds, **found}))


def show(found: dict[str, Any]) -> None:
    """Prints the tables."""
    table = Table(title="a step: ms, least (median)")
    for heading in ("step", "1 process, 2 threads", "2 ranks, 1 thread each", "ratio of the least", "of the rounds"):
        table.add_column(heading, justify="right")
    for name, row in found["steps"].items():
        cells = [f"{row[key]['min']:.3f} ({row[key]['median']:.3f})" for key in ("threads_ms", "ranks_ms")]
        table.add_row(name, *cells, f"{row['ratio_of_least']:.3f}", f"{row['ratio']['median']:.3f}")
    show_table(table)
    table = Table(title="a sum over two ranks: us")
    for heading in ("rows", "own", "gloo", "gloo / own"):
        table.add_column(heading, justify="right")
    for rows, row in found["sums"].items():
        table.add_row(rows, f"{row['own_us']:.1f}", f"{row['gloo_us']:.1f}", f"{row['ratio']:.1f}")
    show_table(table)


if __name__ == "__main__":
    main()
