"""A service's share of its kernels: the rate of a closed loop beside the limit of the kernels alone, and the rest by
process.

    python -m lab.benchmarks.kernel_share --rounds 3

The limit of a load with B streams is the rate of two cores that only run kernels: a request of P tokens in and A out
takes a chunk of P tokens, and 1/B of A steps of B streams at half their contexts. Both are measured in this process
before and after the service, which is restarted in each round, since kernels differ by a tenth from process to process.
Beside the share: processor time per process of the service, in cores, that of the driver, idle time, and time of other
processes, without which a share means little; and a plain step of 8 streams, alone and in the service (the median time
between tokens of streams whose prompts are done).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from rich.table import Table

from lab.benchmarks.closed_loop import ClosedLoad, figures, plain_step_s
from lab.benchmarks.cpu_service import cell
from lab.benchmarks.cpu_steps import CpuStepBench, kernels_bench
from lab.benchmarks.peers import RunningSystem, pillion_system
from lab.benchmarks.report import save, show_table, spread
from lab.testbed.plain_model import plain_folder
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.host.cores import usable_cores

MODEL = "demo"
LOADS = (
    ClosedLoad(256, 128, 8, 48),
    ClosedLoad(256, 128, 16, 64),
    ClosedLoad(256, 128, 32, 96),
    ClosedLoad(1024, 64, 8, 32),
)
PLAIN = ClosedLoad(64, 384, 8, 8)
WARM_UP = (ClosedLoad(512, 16, 1, 1), ClosedLoad(64, 16, 8, 16))
STEP_REPEATS, CHUNK_REPEATS = 40, 6
# Components by their command; all others are "other": the supervisor, the fork server and Redis.
ROLES = {"gateway": "gateway", "kvnode": "KV node", "prefill": "prefill worker", "decode": "decode worker"}
OTHER, DRIVER, IDLE, ELSEWHERE = "other", "driver", "idle", "elsewhere"


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The kernels alone, on all cores of this process: chunks of prompts, and steps of streams."""

    bench: CpuStepBench

    def limit(self, load: ClosedLoad) -> float:
        """Return the output tokens per second of a load if a service only ran its kernels."""
        chunk_s = statistics.median(self.bench.seconds(self.bench.chunk(load.input_tokens, 0), CHUNK_REPEATS))
        return load.output_tokens / (chunk_s + load.output_tokens * self.step_s(load) / load.concurrency)

    def step_s(self, load: ClosedLoad) -> float:
        """Return the seconds of a step of the load's streams at half their contexts."""
        context = load.input_tokens + load.output_tokens // 2
        return statistics.median(self.bench.seconds(self.bench.decode(load.concurrency, context), STEP_REPEATS))


def role_of(process: psutil.Process) -> str:
    """Return the role of a process of the service."""
    words = process.cmdline()
    return next((name for command, name in ROLES.items() if command in words), OTHER)


def processor_s() -> dict[str, float]:
    """Return the processor time so far of the service by role, of this process, and idle."""
    found = dict.fromkeys((*ROLES.values(), OTHER), 0.0)
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        found[role_of(process)] += times.user + times.system
    own = psutil.Process().cpu_times()
    return {**found, DRIVER: own.user + own.system, IDLE: psutil.cpu_times().idle}


def measure_load(running: RunningSystem, load: ClosedLoad, seed: int) -> dict[str, float]:
    """Run a load; return its rate, the median time between tokens, and the cores used per process."""
    before = processor_s()
    run = running.measure(load, seed)
    after = processor_s()
    cores = {role: (after[role] - before[role]) / run.duration_s for role in after}
    cores[ELSEWHERE] = usable_cores() - sum(cores.values())
    return {"tokens_per_s": figures(load, run)["output_tokens_per_s"], **cores}


def one_round(
    args: argparse.Namespace, kernels: KernelTimes, loads: Sequence[ClosedLoad], round_: int
) -> dict[str, Any]:
    """Measure the kernels, then a fresh service, then the kernels again."""
    folder = str(plain_folder(MODEL))
    limits = {load.name: [kernels.limit(load)] for load in loads}
    alone = [kernels.step_s(PLAIN)]
    with pillion_system("pillion", folder, ("--dtype", args.dtype, *args.flags)).running() as running:
        for number, load in enumerate(WARM_UP):
            running.measure(load, 1000 + number)
        found = {load.name: measure_load(running, load, round_) for load in loads}
        plain_ms = plain_step_s(PLAIN, running.measure(PLAIN, round_)) * 1000
    for load in loads:
        limits[load.name].append(kernels.limit(load))
    alone.append(kernels.step_s(PLAIN))
    for name, row in found.items():
        row["limit_tokens_per_s"] = statistics.mean(limits[name])
        row["share"] = row["tokens_per_s"] / row["limit_tokens_per_s"]
    return {"loads": found, "plain_step_ms": plain_ms, "plain_step_alone_ms": statistics.mean(alone) * 1000}


def show(rows: dict[str, dict[str, dict[str, float]]], plain: dict[str, dict[str, float]]) -> None:
    """Print each load's medians with min and max over the rounds."""
    roles = (*ROLES.values(), OTHER, DRIVER, IDLE, ELSEWHERE)
    table = Table("load", "tokens/s", "the kernels alone", "share", *roles, title="Cores that each process takes")
    for name, row in rows.items():
        numbers = [cell(row[key], 0) for key in ("tokens_per_s", "limit_tokens_per_s")]
        table.add_row(name, *numbers, cell(row["share"], 2), *(cell(row[role], 3) for role in roles))
    show_table(table)
    print(f"a plain step of 8 streams: {cell(plain['plain_step_ms'], 1)} ms, alone {cell(plain['alone'], 1)}")


def main() -> None:
    """Measure all rounds, print a table, and write results/kernel_share.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--loads", nargs="+", metavar="LOAD", help='such as "1024/64 x 8"; default: all')
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of `pillion serve`")
    parser.add_argument("--name", default="kernel_share", help="name of the result's file")
    args = parser.parse_args()
    prepared = prepare(ModelFlags(model=str(plain_folder(MODEL)), dtype=args.dtype), print)
    kernels = KernelTimes(kernels_bench(prepared, usable_cores()))
    loads = [load for load in LOADS if not args.loads or load.name in args.loads]
    rounds = [one_round(args, kernels, loads, number) for number in range(1, args.rounds + 1)]
    rows = {
        load.name: {
            key: spread([each["loads"][load.name][key] for each in rounds]) for key in rounds[0]["loads"][load.name]
        }
        for load in loads
    }
    plain = {
        "plain_step_ms": spread([each["plain_step_ms"] for each in rounds]),
        "alone": spread([each["plain_step_alone_ms"] for each in rounds]),
    }
    show(rows, plain)
    save(args.name, {"rounds": rounds, "loads": rows, **plain})


if __name__ == "__main__":
    main()
