"""Attention of usual shapes: decodes beside a streaming read, prompts beside products that never leave the registers.

Decodes are compared with a read of the same bytes in the same pieces, on one thread. Runs of both alternate, layer by
layer over a pool larger than the caches. A figure is the sum over layers of each layer's least time, since other work
on the machine only adds to it.

"576 of 512 x 16" is DeepSeek V2 Lite's latent shape: 576 values shared by all 16 heads, the first 512 of which are the
value as well. A second table has the cost of attention's options in gpt-oss's shape: sinks, and a window against a
context of its length.

``--prompts`` measures a step's tokens of one prompt on all threads, as a share of :class:`PeakDots` in the same run. An
operation is a multiplication or an addition with a visible token.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lab.benchmarks.cpu_limits import AttentionRead, PeakDots
from lab.benchmarks.cpu_steps import PEAK_ROUNDS
from lab.benchmarks.report import save, show
from pillion.kernels.cpu.attention.attention_rows import AttentionShape
from pillion.kernels.cpu.attention.cpu_attention import Attention, AttentionMerge, row_counts
from pillion.kernels.cpu.attention.cpu_attention_plan import CpuAttentionPlanner
from pillion.kernels.cpu.language.isa import BY_NAME, TABLE, host_features
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from pillion.kernels.cpu.runtime.program import CpuStepRecord, Operation, Program, Workspace, aligned_bytes
from pillion.kernels.cpu.runtime.thread_pool import ThreadPool
from pillion.kernels.step import StepBatch

BLOCK_SIZE = 16
POOL_BYTES = 400 * 2**20
PARTIAL_ROWS = 4096
# Head dimension, query heads per KV head, KV heads; types of queries and of K and V.
SHAPES = {"64 x 3": (64, 3, 3), "128 x 4": (128, 4, 8), "128 x 8": (128, 8, 4)}
LATENTS = {"576 of 512 x 16": (576, 16, 1, 512)}
# gpt-oss's shape, its streams, their context, and a window that does not begin at a partition.
OPTIONS, STREAMS, CONTEXT, WINDOW = (64, 8, 8), 16, 1200, 1000
PAIRS, FLOATS = [(True, ""), (True, "int8"), (True, "fp8_e4m3")], [(False, ""), (True, ""), (False, "int8")]
KINDS = {isa.name: PAIRS if isa.bf16_dot else FLOATS for isa in TABLE}
# Streams and context tokens.
LOADS = ((16, 264), (16, 1024), (1, 8192))
# Head dimensions and group sizes of prompts with their KV heads; tokens of a step, and those before it.
PROMPT_SHAPES = {f"{head} x {group}": (head, group, 4) for head in (64, 128) for group in (1, 3, 4, 8)}
PROMPT_LOADS = ((768, 256), (3840, 256))
PROMPT_LAYERS = 3


class AttentionBench:
    """The kernels of one shape over a filled pool of many layers. ``window``: of all layers, 0 for none; ``sinks``:
    with attention sinks."""

    def __init__(
        self,
        isa: str,
        shape: AttentionShape,
        kv_heads: int,
        *,
        window: int = 0,
        sinks: bool = False,
        threads: int = 1,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self._isa, self._shape, self._heads, self._threads = BY_NAME[isa], shape, kv_heads, threads
        self._window, self._sinks = window, torch.zeros(kv_heads * shape.group) if sinks else None
        self._specs = (
            Attention(shape, window=window > 0, sinks=sinks),
            AttentionMerge(shape, window=window > 0, sinks=sinks),
            AttentionRead(shape),
        )
        self._peak = PeakDots("bf16" if shape.bf16 else "fp32")
        self._kernels = compile_kernels([*self._specs, self._peak], self._isa)
        self._pool_of_threads = ThreadPool(self._kernels, threads)
        self._layer_bytes = (1 if shape.latents else 2) * kv_heads * shape.piece_bytes
        self._slots = 1024
        self._layers = max(1, pool_bytes // (self._slots * self._layer_bytes))
        self._pool = aligned_bytes(self._slots * self._layers * self._layer_bytes, 4096)
        self._pool.view(np.uint16)[:] = 0x3C00
        self._order = np.random.default_rng(0).permutation(self._slots).astype(np.int32)

    def seconds(self, streams: int, context: int, rounds: int) -> tuple[float, float]:
        """Return the seconds of attention over all layers, and of the read."""
        step, merges, keep = self._step(streams, context)
        attend, read = [], []
        for layer in range(self._layers):
            operations = self._operations(layer, streams)
            attend.append(self._call(operations[: 1 + merges], step))
            read.append(self._call(operations[2:], step))
        best = np.full((2, self._layers), np.inf)
        for _ in range(rounds + 1):
            for number, calls in enumerate((attend, read)):
                for layer, call in enumerate(calls):
                    begin = time.perf_counter()
                    call()
                    best[number, layer] = min(best[number, layer], time.perf_counter() - begin)
        del keep
        return float(best[0].sum()), float(best[1].sum())

    def close(self) -> None:
        self._pool_of_threads.close()

    def prompt_rates(self, before: int, tokens: int, rounds: int) -> tuple[float, float]:
        """Return operations per second of a prompt's attention, and of registers alone."""
        step, merges, keep = self._step(1, before + tokens, tokens)
        layers = [self._operations(layer, tokens)[: 1 + merges] for layer in range(self._layers)]
        calls = [self._call(operations, step) for operations in layers]
        sink = np.ones(16 * self._threads, np.float32)
        peak = self._call([Operation(self._peak, {"sink": sink, "rounds": PEAK_ROUNDS})], step)
        best = np.full(len(calls) + 1, np.inf)
        for _ in range(rounds + 1):
            for number, call in enumerate((*calls, peak)):
                begin = time.perf_counter()
                call()
                best[number] = min(best[number], time.perf_counter() - begin)
        del keep
        seen = tokens * before + tokens * (tokens + 1) // 2
        values = self._shape.head_dim + self._shape.value_dim
        operations = 2 * values * seen * self._heads * self._shape.group
        peak_operations = self._peak.operations(self._isa) * PEAK_ROUNDS * self._threads
        return operations * len(calls) / float(best[:-1].sum()), peak_operations / float(best[-1])

    def _step(self, streams: int, context: int, tokens: int = 1) -> tuple[CpuStepRecord, bool, StepBatch]:
        """Return the step of the last ``tokens`` of each stream, whether it has merges, and the memory it points to."""
        blocks = -(-context // BLOCK_SIZE)
        tables = self._order[np.arange(streams * blocks) % self._slots].reshape(streams, blocks).copy()
        starts = np.arange(streams + 1, dtype=np.int32) * tokens
        lengths = np.full(streams, context, np.int32)
        positions = np.tile(np.arange(context - tokens, context, dtype=np.int32), streams)
        samples = np.arange(streams, dtype=np.int32)
        batch = StepBatch(np.full(streams * tokens, 5, np.int32), positions, starts, lengths, tables, samples)
        counts = row_counts(self._isa, self._shape.group, self._shape.bf16)
        planner = CpuAttentionPlanner(self._shape.group, counts, self._heads, self._threads, PARTIAL_ROWS, self._window)
        plan = planner.plan(batch)
        step = CpuStepRecord()
        for name, array in (("items", plan.items), ("merges", plan.merges), ("block_tables", tables)):
            step.point(name, np.ascontiguousarray(array))
        step.point_pool(self._pool.ctypes.data, self._pool.nbytes)
        step.count("table_stride", blocks)
        step.count("num_items", len(plan.items))
        step.count("num_merges", len(plan.merges))
        return step, len(plan.merges) > 0, batch

    def _operations(self, layer: int, rows: int) -> list[Operation]:
        shape, heads = self._shape, self._heads
        dtype = torch.bfloat16 if shape.bf16 else torch.float32
        row_bytes = shape.group * shape.head_dim * shape.element_bytes
        values: dict[str, Any] = {
            "queries": torch.full((heads, rows, shape.group, shape.head_dim), 0.01, dtype=dtype),
            "out": torch.zeros(rows, heads * shape.group * shape.value_dim, dtype=dtype),
            "partials": torch.zeros(heads, PARTIAL_ROWS, shape.sum_bytes // 4),
            "sink": aligned_bytes(64),
            "sinks": self._sinks,
            "selected": None,
            "selected_stride": 0,
            "head_stride": rows * row_bytes,
            "out_stride": heads * shape.group * shape.value_dim * shape.element_bytes,
            "partial_stride": PARTIAL_ROWS * shape.sum_bytes,
            "layer_offset": layer * self._layer_bytes,
            "slot_bytes": self._layers * self._layer_bytes,
            "piece_bytes": shape.piece_bytes,
            "value_offset": heads * shape.piece_bytes,
            "kv_heads": heads,
            "window": self._window,
            "scale": shape.head_dim**-0.5,
            "softcap": 0.0,
        }
        return [Operation(spec, {name: values[name] for name in spec.layout.place}) for spec in self._specs]

    def _call(self, operations: list[Operation], step: CpuStepRecord) -> Callable[[], None]:
        program = Program(operations, self._kernels, Workspace())
        return lambda: self._pool_of_threads.run(program.entries, step.words)


def cost_of_options(isa: str, rounds: int) -> dict[str, float]:
    """Return the rate of attention with each option as a share of the rate without."""
    head_dim, group, kv_heads = OPTIONS
    shape = AttentionShape(head_dim, group, BLOCK_SIZE, bool(BY_NAME[isa].bf16_dot))

    def seconds(context: int, **options: Any) -> float:
        bench = AttentionBench(isa, shape, kv_heads, **options)
        found = bench.seconds(STREAMS, context, rounds)[0]
        bench.close()
        return found

    return {
        "sinks": seconds(CONTEXT) / seconds(CONTEXT, sinks=True),
        "window": seconds(WINDOW) / seconds(CONTEXT, window=WINDOW),
    }


def measure_prompts(kernels: list[str], threads: int, rounds: int) -> None:
    """Print and save the rates of prompts as a share of the registers' rate."""
    rows: list[dict[str, Any]] = []
    for isa in kernels:
        for name, (head_dim, group, kv_heads) in PROMPT_SHAPES.items():
            for bf16, codes in KINDS[isa]:
                shape = AttentionShape(head_dim, group, BLOCK_SIZE, bf16, codes)
                bytes_of_layer = 1024 * 2 * kv_heads * shape.piece_bytes
                bench = AttentionBench(isa, shape, kv_heads, threads=threads, pool_bytes=PROMPT_LAYERS * bytes_of_layer)
                rates = {
                    f"{now} behind {before}": bench.prompt_rates(before, now, rounds) for before, now in PROMPT_LOADS
                }
                bench.close()
                kind = ("bfloat16" if bf16 else "float32") + f", {codes}" * bool(codes)
                rows.append({"kernels": isa, "heads": name, "kv": kind, "rates": rates})
    shown = [
        {name: row[name] for name in ("kernels", "heads", "kv")}
        | {load: f"{rate / 1e9:.0f}, {rate / peak:.2f}" for load, (rate, peak) in row["rates"].items()}
        for row in rows
    ]
    show(f"attention of prompts, {threads} threads: GFLOP/s and share of the registers' rate", shown)
    save("cpu_attention_prompts", {"rounds": rounds, "threads": threads, "rows": rows})


def main() -> None:
    """Measure, print, write results/cpu_attention.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [isa.name for isa in TABLE if set(isa.needs) <= host_features()]
    parser.add_argument("--kernels", nargs="+", default=here, choices=here, help="rows that this processor can run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", action="store_true", help="prompts instead of decodes")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of prompts")
    args = parser.parse_args()
    if args.prompts:
        measure_prompts(args.kernels, args.threads, args.rounds)
        return
    rows: list[dict[str, Any]] = []
    for isa in args.kernels:
        for name, (head_dim, group, kv_heads, *latents) in (SHAPES | LATENTS).items():
            for bf16, codes in KINDS[isa][:1] if latents else KINDS[isa]:
                shape = AttentionShape(head_dim, group, BLOCK_SIZE, bf16, codes, *latents)
                bench = AttentionBench(isa, shape, kv_heads)
                found = {f"{many} at {context}": bench.seconds(many, context, args.rounds) for many, context in LOADS}
                bench.close()
                shares = {load: read / attend for load, (attend, read) in found.items()}
                kind = codes or ("bfloat16" if bf16 else "float32")
                rows.append({"kernels": isa, "heads": name, "kv": kind, "share_of_read": shares})
                print(isa, name, kind, {load: round(share, 2) for load, share in shares.items()}, flush=True)
    shown = [{name: row[name] for name in ("kernels", "heads", "kv")} | row["share_of_read"] for row in rows]
    show("decode attention: share of the rate of a streaming read", shown)
    options = {isa: cost_of_options(isa, args.rounds) for isa in args.kernels}
    show(
        "share of the rate without sinks, without a window", [{"kernels": isa, **each} for isa, each in options.items()]
    )
    save("cpu_attention", {"rounds": args.rounds, "rows": rows, "options": options})


if __name__ == "__main__":
    main()
