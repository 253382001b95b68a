"""Service level on a CPU: Pillion beside vLLM's CPU build and llama.cpp, same model, lengths and machine, in one run.

In every round each system is started (or resumed if its start takes minutes), warmed up, measured at all loads and
stopped (or paused), one at a time in rotating order. All systems get the same closed loop, prompts as token ids and
exact answer lengths; prompts are new in every round, so nothing hits a prefix cache. A peer that is not installed is
left out with a printed line.

Loads are those of this project's targets, with the defaults of `pillion serve`. On a processor with AVX2 only, both
serve float32 (`--dtype float32`), the faster type there; `--pillion "pillion=--cpu-kernels avx2" --peer-isa avx2`
emulates one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import ClosedLoad, figures
from lab.benchmarks.peers import PEER_ISAS, RunningSystem, System, llama_system, pillion_system, vllm_system
from lab.benchmarks.report import save, show_table, spread

MODEL = "demo"
BUDGET_TOKENS = 128
# Three requests per stream. The first prompts arrive together and wait for each other, later ones arrive one by one:
# with two per stream the median first token would lie between both groups and jump.
LOADS = (
    ClosedLoad(256, 128, 1, 3),
    ClosedLoad(256, 128, 8, 24),
    ClosedLoad(256, 128, 16, 48),
    ClosedLoad(256, 128, 32, 96),
    ClosedLoad(1024, 64, 8, 24),
    ClosedLoad(2048, 64, 4, 12),
)
WARM_UP = (ClosedLoad(256, 16, 1, 1), ClosedLoad(2048, 8, 1, 1), ClosedLoad(256, 16, 8, 16))
QUICK_OUTPUT_TOKENS = 16
REFERENCE, LLAMA = "vllm", "llama.cpp"

Figures = dict[str, float]


def quick(load: ClosedLoad) -> ClosedLoad:
    """Return a minimal load, to see whether everything works."""
    return replace(load, output_tokens=QUICK_OUTPUT_TOKENS, requests=load.concurrency)


def systems(args: argparse.Namespace, folder: pathlib.Path, dtype: str, gguf: pathlib.Path) -> list[System]:
    """Return the installed and selected systems; print which are left out."""
    found: list[System] = []
    absent: list[tuple[str, str]] = []
    common, model = ("--dtype", dtype), args.model or str(folder)
    for system in args.pillion or ["pillion"]:
        name, _, flags = system.partition("=")
        found.append(pillion_system(name, model, (*common, *shlex.split(flags))))
    for system in args.pillion_alone:
        name, _, flags = system.partition("=")
        alone = pillion_system(name, model, (*common, *shlex.split(flags)))
        found.append(replace(alone, takes=lambda load: load.concurrency == 1))
    vllm, llama = (shutil.which(path) if path else None for path in (args.vllm, args.llama_python))
    if vllm:
        flags = tuple(shlex.split(args.vllm_flags))
        budget = ("--max-num-batched-tokens", str(BUDGET_TOKENS))
        found.append(vllm_system(REFERENCE, vllm, folder, dtype, flags, lambda _: True, args.peer_isa))
        # Small budgets are for long prompts, which would stall decodes.
        name = f"{REFERENCE}, budget {BUDGET_TOKENS}"
        long = vllm_system(
            name, vllm, folder, dtype, (*flags, *budget), lambda load: load.input_tokens > 256, args.peer_isa
        )
        found.append(long)
    else:
        absent.append((REFERENCE, "--vllm (PILLION_VLLM) names no `vllm` program"))
    if args.peer_isa:
        absent.append((LLAMA, f"--peer-isa {args.peer_isa} cannot limit it"))
    elif llama:
        found.append(llama_system(LLAMA, llama, gguf))
    else:
        absent.append((LLAMA, "--llama-python (PILLION_LLAMA_PYTHON) names no Python"))
    for name, reason in absent:
        if not args.only or name in args.only:
            print(f"{name} is left out: {reason}")
    return [system for system in found if not args.only or system.name in args.only]


def measure(
    system: System, running: RunningSystem, loads: Sequence[ClosedLoad], seed: int, warm_up: Sequence[ClosedLoad]
) -> dict[str, Figures]:
    """Measure one round; return its figures by load."""
    for load in warm_up:
        if system.takes(load):
            running.measure(load, seed - 1)
    found = {}
    for load in loads:
        if system.takes(load):
            begin = time.perf_counter()
            found[load.name] = figures(load, running.measure(load, seed))
            rate, ttft_ms = (found[load.name][figure] for figure in ("output_tokens_per_s", "ttft_p50_ms"))
            seconds = time.perf_counter() - begin
            figure = f"{rate:.0f} tokens/s, first token after {ttft_ms:.0f} ms"
            print(f"  {system.name}: {load.name}: {figure}, {seconds:.0f} s", flush=True)
    return found


def start(system: System, stack: contextlib.ExitStack) -> RunningSystem:
    """Start a system until ``stack`` is closed, pausing it if possible."""
    begin = time.perf_counter()
    running = stack.enter_context(system.running())
    running.pause()
    seconds, about = time.perf_counter() - begin, f": {running.about}" if running.about else ""
    print(f"{system.name} {running.version} is ready after {seconds:.0f} s{about}", flush=True)
    return running


def all_rounds(
    wanted: Sequence[System], loads: Sequence[ClosedLoad], rounds: int, warm_up: Sequence[ClosedLoad] = WARM_UP
) -> tuple[dict[tuple[str, str], list[Figures]], dict[str, Any]]:
    """Return the figures of all rounds by (load, system), and a description of each system."""
    found: dict[tuple[str, str], list[Figures]] = {}
    about: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        staying = {system.name: start(system, stack) for system in wanted if system.stays}
        for index in range(rounds):
            # Two seeds per round, one of them for the warm-up.
            turn, seed = index % len(wanted), 2 * index + 1
            for system in (*wanted[turn:], *wanted[:turn]):
                with contextlib.ExitStack() as this_turn:
                    running = staying.get(system.name) or start(system, this_turn)
                    running.resume()
                    print(f"round {index + 1} of {rounds}, {system.name}", flush=True)
                    for load, measured in measure(system, running, loads, seed, warm_up).items():
                        found.setdefault((load, system.name), []).append(measured)
                    running.pause()
                about[system.name] = {
                    "version": running.version,
                    "about": running.about,
                    "flags": " ".join(system.flags),
                }
    return found, about


def rows_of(
    found: dict[tuple[str, str], list[Figures]], loads: Sequence[ClosedLoad], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row per load and system: each figure's spread over the rounds, and its ratio to the reference."""
    rows = []
    for load in loads:
        reference = found.get((load.name, REFERENCE))
        for name in names:
            rounds = found.get((load.name, name))
            if rounds is None:
                continue
            row: dict[str, Any] = {
                "load": load.name,
                "system": name,
                "requests": load.requests,
                **{figure: spread([each[figure] for each in rounds]) for figure in rounds[0]},
            }
            if reference is not None:
                pairs = list(zip(rounds, reference, strict=True))
                row["ratio"] = spread([a["output_tokens_per_s"] / b["output_tokens_per_s"] for a, b in pairs])
                row["itl_p99_ratio"] = spread([a["itl_p99_ms"] / b["itl_p99_ms"] for a, b in pairs])
            rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print two tables: all loads, and one stream alone."""
    headings = ("load", "system", "tokens/s", f"over {REFERENCE}", "TTFT p50/p99 ms", "ITL p50/p99/max ms", "p99 over")
    table = Table(*headings, title="Tokens in/out x streams: medians of the rounds (least-greatest)")
    alone = Table("system", "prefill tokens/s", "decode tokens/s", "driver", title="One stream, without its prompt")
    for row in rows:
        middle = {name: value["median"] for name, value in row.items() if isinstance(value, dict)}
        table.add_row(
            row["load"],
            row["system"],
            cell(row["output_tokens_per_s"]),
            cell(row["ratio"], 2) if "ratio" in row else "",
            "{ttft_p50_ms:.0f} / {ttft_p99_ms:.0f}".format(**middle),
            "{itl_p50_ms:.1f} / {itl_p99_ms:.0f} / {itl_max_ms:.0f}".format(**middle),
            cell(row["itl_p99_ratio"], 2) if "itl_p99_ratio" in row else "",
        )
        if "prefill_tokens_per_s" in row:
            rates = (cell(row[name]) for name in ("prefill_tokens_per_s", "stream_decode_tokens_per_s"))
            alone.add_row(row["system"], *rates, f"{middle['driver_cpu_share']:.1%}")
    show_table(table)
    show_table(alone)
    shares = [(row["driver_cpu_share"]["max"], row["system"], row["load"]) for row in rows]
    share, name, load = max(shares)
    print(f"the driver took at most {share:.1%} of one core ({name}, {load})")


def cell(found: dict[str, float], digits: int = 0) -> str:
    """Format a spread as "median (min-max)"."""
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pillion", action="append", metavar="NAME=FLAGS", help="repeatable; default: pillion, without flags"
    )
    parser.add_argument(
        "--pillion-alone",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="a Pillion that is measured with one stream alone; repeatable",
    )
    parser.add_argument("--model", default="", help="what Pillion serves; default: vLLM's folder")
    parser.add_argument("--dtype", default="", help="the type that both systems serve; default: the model's")
    parser.add_argument("--name", default="cpu_service", help="name of the result's file")
    environ = os.environ.get
    parser.add_argument("--vllm", default=environ("PILLION_VLLM"), metavar="PATH", help="a CPU build's `vllm` program")
    parser.add_argument("--vllm-flags", default="", metavar="FLAGS", help="more flags of `vllm serve`")
    parser.add_argument(
        "--peer-isa", default="", choices=list(PEER_ISAS), help="instructions that vLLM is limited to; default: none"
    )
    parser.add_argument("--vllm-model", type=pathlib.Path, help="a folder; default: the demo model in plain bfloat16")
    parser.add_argument(
        "--llama-python",
        default=environ("PILLION_LLAMA_PYTHON"),
        metavar="PATH",
        help="a Python that has llama-cpp-python",
    )
    parser.add_argument("--gguf", type=pathlib.Path, help="another file than the demo model's")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", help="names of the systems to measure")
    parser.add_argument("--loads", nargs="+", metavar="LOAD", help='such as "256/128 x 8"; default: all')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short answers, one round, nothing written")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write results/cpu_service.json, or by another --name."""
    args = arguments()
    # Otherwise paused processes outlive a driver that is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    from lab.testbed.plain_model import plain_folder
    from pillion.config import ModelFlags
    from pillion.engine.checkpoints.model_files import locate
    from pillion.engine.checkpoints.prepare import prepare

    prepared = prepare(ModelFlags(model=MODEL))
    gguf = args.gguf or locate(MODEL, "", lambda _: None).path
    dtype = args.dtype or prepared.dtype
    wanted = systems(args, args.vllm_model or plain_folder(MODEL), dtype, gguf)
    loads = [load for load in LOADS if not args.loads or load.name in args.loads]
    if not wanted or not loads:
        raise SystemExit("nothing to measure")
    begin, busy = time.perf_counter(), os.getloadavg()[0]
    if args.quick:
        loads = [quick(load) for load in loads]
    found, about = all_rounds(wanted, loads, 1 if args.quick else args.rounds)
    rows = rows_of(found, loads, [system.name for system in wanted])
    show(rows)
    print(f"{time.perf_counter() - begin:.0f} s in all; load average at the start {busy:.2f}")
    if not args.quick:
        result = {"model": prepared.name, "dtype": dtype, "rounds": args.rounds, "systems": about}
        print(f"written to {save(args.name, {**result, 'load_average_at_start': busy, 'rows': rows})}")


if __name__ == "__main__":
    main()
