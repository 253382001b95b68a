"""How the CPU engine starts, idles and shares cores: cold and warm code, an idle thread pool, two pools at once."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.cpu_steps import kernels_bench
from benchmarks.report import save
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.kernels.cpu.runtime.compiler import compile_kernels

IDLE_S = 3.0
TURN_S = 5.0
BATCH = 8


def measure_start(prepared: PreparedModel, threads: int) -> dict[str, float]:
    """Measure the seconds to get a model's kernels: compiled, and from the cache."""
    model = kernels_bench(prepared, threads).backend.model
    specs = [operation.spec for operation in model.plan.operations]
    with tempfile.TemporaryDirectory() as folder:
        cold = compile_kernels(specs, model.isa, cache_folder=pathlib.Path(folder)).seconds
        warm = compile_kernels(specs, model.isa, cache_folder=pathlib.Path(folder)).seconds
    return {"cold_s": cold, "warm_s": warm}


def measure_idle(prepared: PreparedModel, threads: int) -> float:
    """Measure the share of one core that a backend takes between two steps."""
    bench = kernels_bench(prepared, threads)
    bench.seconds(bench.decode(BATCH, 264), 5)
    begin = time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - begin) / IDLE_S


def turn(model: str, threads: int) -> None:
    """Run decode steps for TURN_S seconds once a line comes in, and print steps per second: a process's main."""
    bench = kernels_bench(prepare(ModelFlags(model=model)), threads)
    batch = bench.decode(BATCH, 264)
    bench.seconds(batch, 2)
    print("ready", flush=True)
    sys.stdin.readline()
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < TURN_S:
        bench.backend.forward(batch)
        steps += 1
    print(json.dumps(steps / (time.perf_counter() - begin)), flush=True)


def steps_per_second(model: str, threads: int, workers: int) -> list[float]:
    """Measure the steps per second of each of ``workers`` processes that run at once."""
    command = [sys.executable, "-m", "benchmarks.cpu_life", "--turn", "--model", model, "--threads", str(threads)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(workers)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [float(json.loads(process.communicate()[0])) for process in started]


def main() -> None:
    """Measure, print, write results/cpu_life.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        turn(args.model, args.threads)
        return
    prepared = prepare(ModelFlags(model=args.model), print)
    result: dict[str, Any] = {
        "model": args.model,
        "threads": args.threads,
        "kernels": measure_start(prepared, args.threads),
        "idle_share_of_a_core": measure_idle(prepared, args.threads),
        "steps_per_s_alone": steps_per_second(args.model, args.threads, 1),
        "steps_per_s_two_workers": steps_per_second(args.model, args.threads, 2),
        "steps_per_s_two_workers_of_one_thread": steps_per_second(args.model, 1, 2),
    }
    print(json.dumps(result, indent=2))
    save("cpu_life", result)


if __name__ == "__main__":
    main()
