"""`python -m benchmarks.memory`: peak memory of a real backend over the length of a prompt that runs in chunks.

Each point is a process of its own (Linux: peaks come from /proc) that runs one prompt and a few decode steps on a
small random model. The whole pool is touched before, so the rest of the peak is weights, code and the steps' buffers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.plot import Chart, line_charts
from benchmarks.report import save

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "memory.svg"
MIB = 2**20
BLOCK_SIZE = 16
DECODE_STEPS = 8
POINT_TIMEOUT_S = 3600
MODEL = {"intermediate_size": 1024, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """The settings of one process. ``window`` is the number of tokens that a query sees (0: all)."""

    folder: str
    dtype: str
    window: int
    tokens: int
    chunk: int
    threads: int


def main() -> None:
    """Measure all points, write results/memory.json and the charts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument(
        "--window", type=int, default=1024, help="attention window of the windowed variant, in the first dtype"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="memory", help="name of the result; only 'memory' draws the charts")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(run_point(MemoryPoint(**json.loads(args.point)))))
        return
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        rows = measure(pathlib.Path(folder), args)
    shape = {name: getattr(args, name) for name in ("chunk", "threads", "window", "layers", "hidden", "heads")}
    path = save(args.name, {**shape, "head_dim": args.hidden // args.heads, **MODEL, "rows": rows})
    print(table(rows))
    if args.name == "memory":
        draw(PICTURE, rows)
    print(f"written to {path.relative_to(ROOT)}")


def measure(folder: pathlib.Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all points, one process after the other."""
    from testbed.tiny_model import save_model

    shape = {
        **MODEL,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "head_dim": args.hidden // args.heads,
        "num_hidden_layers": args.layers,
        "max_position_embeddings": 2 * max(args.tokens),
    }
    full = save_model(folder / "full", **shape)
    windowed = save_model(folder / "windowed", model_type="mistral", sliding_window=args.window, **shape)
    variants = [(str(full), dtype, 0) for dtype in args.dtype]
    if args.window:
        variants.append((str(windowed), args.dtype[0], args.window))
    environment = {**os.environ, "PILLION_CACHE": str(folder / "cache")}
    rows = []
    for model, dtype, window in variants:
        for tokens in args.tokens:
            point = MemoryPoint(model, dtype, window, tokens, args.chunk, args.threads)
            command = [sys.executable, "-m", "benchmarks.memory", "--point", json.dumps(dataclasses.asdict(point))]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=POINT_TIMEOUT_S
            )
            if done.returncode:
                raise RuntimeError(f"{point} failed: {done.stderr[-2000:]}")
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{variant(rows[-1])}, {tokens} tokens: {rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    return rows


def run_point(point: MemoryPoint) -> dict[str, Any]:
    """Run a prompt in chunks, then decode steps behind it, in the process of a point; return its row."""
    from pillion.config import ModelFlags
    from pillion.engine.backends.torch_backend import TorchBackend
    from pillion.engine.checkpoints.prepare import prepare

    length = point.tokens + DECODE_STEPS
    backend = TorchBackend(prepare(ModelFlags(model=point.folder, dtype=point.dtype)), BLOCK_SIZE, point.threads)
    slots = -(-length // BLOCK_SIZE)
    pool_bytes = slots * backend.layout.block_bytes
    pool = mmap.mmap(-1, pool_bytes)
    np.frombuffer(pool, np.uint8)[:] = 0
    backend.bind_pool(memoryview(pool), slots)
    backend.warm_up(point.chunk)
    before = resident_bytes("VmRSS")
    # Peaks count from here on, without those of loading.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    draw = np.random.default_rng(0)
    table = draw.permutation(slots).astype(np.int32)
    begin = time.perf_counter()
    starts = [*range(0, point.tokens, point.chunk), *range(point.tokens, length)]
    for first, end in zip(starts, [*starts[1:], length], strict=True):
        backend.forward(batch(draw, table, first, end))
    return {
        "dtype": point.dtype,
        "window": point.window,
        "tokens": point.tokens,
        "seconds": time.perf_counter() - begin,
        "pool_bytes": pool_bytes,
        "before_steps_bytes": before,
        "peak_bytes": resident_bytes("VmHWM"),
    }


def batch(draw: np.random.Generator, table: np.ndarray[Any, np.dtype[np.int32]], first: int, end: int) -> Any:
    """Return a step of tokens first .. end - 1 of the one sequence, with the last token's logits."""
    from pillion.engine.backends.batch import StepBatch

    count = end - first
    return StepBatch(
        token_ids=draw.integers(0, 256, count).astype(np.int32),
        positions=np.arange(first, end, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=table[None, : -(-end // BLOCK_SIZE)],
        sample_rows=np.array([count - 1], np.int32),
    )


def resident_bytes(name: str) -> int:
    """Read this process' VmRSS or VmHWM (its peak). getrusage would show the parent's peak if that was higher."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def variant(row: dict[str, Any]) -> str:
    """Name a row's curve in the chart."""
    return f"{row['dtype']}, window {row['window']}" if row["window"] else row["dtype"]


def beside_pool(row: dict[str, Any], name: str) -> float:
    """Return a figure without the pool, in MiB."""
    return float(row[name] - row["pool_bytes"]) / MIB


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table in MiB."""
    lines = [
        "| variant | prompt tokens | pool | peak RSS | peak beside pool | before the first step | taken by steps |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        peak, before = beside_pool(row, "peak_bytes"), beside_pool(row, "before_steps_bytes")
        whole, pool = row["peak_bytes"] / MIB, row["pool_bytes"] / MIB
        lines.append(
            f"| {variant(row)} | {row['tokens']} | {pool:.0f} | {whole:.0f} | {peak:.0f} | {before:.0f} "
            f"| {peak - before:.1f} |"
        )
    return "\n".join(lines)


def draw(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw two charts: the pool, which grows, beside the whole, and the rest, which must not grow."""
    beside: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        beside.setdefault(variant(row), []).append((row["tokens"], beside_pool(row, "peak_bytes")))
    first = [row for row in rows if variant(row) == variant(rows[0])]
    whole = {
        "peak RSS": [(row["tokens"], row["peak_bytes"] / MIB) for row in first],
        "pool": [(row["tokens"], row["pool_bytes"] / MIB) for row in first],
    }
    line_charts(
        path,
        [
            Chart("Peak RSS without the pool", "prompt tokens", "MiB", beside, log_x=True),
            Chart(f"Peak RSS and its pool ({variant(rows[0])})", "prompt tokens", "MiB", whole, log_x=True),
        ],
    )


if __name__ == "__main__":
    main()
