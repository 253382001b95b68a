"""Two ranks of a worker on one GPU: what a sum over them costs, and a step, beside one process.

Sums go through host memory there, and no CUDA graph can hold them. So this shows what the way costs and not what ranks
with a GPU each gain. Each process has a pool of its own here, which does not change its steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.model import RandomModel
from lab.benchmarks.gpu.shapes import shape_of
from lab.benchmarks.gpu.step import decode_steps
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.model_shard import ModelShard

RANKS = 2
# Rows of sums; streams and their context in steps; then how often each is measured.
SUM_ROWS, STREAMS, CONTEXT, SUMS, STEPS, WARM = (1, 32, 512), 32, 1024, 200, 40, 5
SMOKE = (2,), 2, 20, 2, 2, 0


def run(bench: Bench) -> None:
    """Measures one process, then two ranks: this process is rank 0."""
    alone_s = _step_s(bench, None)
    _report(bench, "one process, eager", alone_s)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    rendezvous = os.memfd_create("bench-ranks")
    command = [sys.executable, "-m", "lab.benchmarks.gpu.ranks", str(rendezvous), *(["--smoke"] if bench.smoke else [])]
    other = subprocess.Popen(command, pass_fds=[rendezvous], cwd=Path(__file__).resolve().parents[3])
    try:
        for rows, sum_s in _measured(bench, 0, rendezvous):
            if rows:
                width = shape_of(bench.smoke).hidden
                bench.report(Row(f"sum over {RANKS} ranks, {rows} x {width}", sum_s * 1e6, "us"))
            else:
                _report(bench, f"{RANKS} ranks", sum_s, alone_s)
    finally:
        other.kill()
        other.wait()
        os.close(rendezvous)


def _measured(bench: Bench, rank: int, rendezvous: int) -> list[tuple[int, float]]:
    """Returns what both ranks do at the same time: seconds of sums by their rows, then those of a step, for 0 rows."""
    shape = shape_of(bench.smoke)
    shard = ModelShard.of(parse_config(shape.config()), rank, RANKS)
    group = GpuRankGroup.join(shard, rendezvous, bench.device, own_device=False)
    all_rows, _, _, count, _, _ = SMOKE if bench.smoke else (SUM_ROWS, STREAMS, CONTEXT, SUMS, STEPS, WARM)
    found = []
    for rows in all_rows:
        values = torch.zeros(rows, shape.hidden, dtype=torch.bfloat16, device=bench.device)
        times = []
        for _ in range(count):
            began_s = time.perf_counter()
            group.sum(values)
            bench.wait()
            times.append(time.perf_counter() - began_s)
        found.append((rows, statistics.median(times)))
    return [*found, (0, _step_s(bench, group))]


def _step_s(bench: Bench, ranks: GpuRankGroup | None) -> float:
    """Median seconds of a decode step that is launched kernel by kernel."""
    _, streams, context, _, steps, warm = SMOKE if bench.smoke else (SUM_ROWS, STREAMS, CONTEXT, SUMS, STEPS, WARM)
    room = context + warm + steps
    tokens = max(streams, 16)
    model = RandomModel(bench, max_tokens=tokens, max_seqs=streams, max_model_len=room + 64, ranks=ranks)
    running = model.backend(streams * (room + 32), eager=True)
    batches = decode_steps(running.tables, streams, context, warm + steps)
    if ranks is None or ranks.shard.leads:
        times = running.pace(batches).after(warm).landed
    else:
        times = [0.0]
        for batch in batches:
            running.backend.launch(batch, (), None).wait()
    running.close()
    return statistics.median(times)


def _report(bench: Bench, name: str, step_s: float, alone_s: float = 0.0) -> None:
    _, streams, context, *_ = SMOKE if bench.smoke else (SUM_ROWS, STREAMS, CONTEXT)
    share = step_s / alone_s if alone_s else None
    bench.report(Row(f"decode step, {streams} x {context}, {name}", step_s * 1e3, "ms", share, "one process"))


def main() -> None:
    """Runs rank 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rendezvous", type=int)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        _measured(Bench(smoke=args.smoke, rows=Path(folder) / "rows"), 1, args.rendezvous)


if __name__ == "__main__":
    main()
