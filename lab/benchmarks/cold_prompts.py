"""Single cold prompts on a CPU: time to the first token, for Pillion beside vLLM's CPU build and llama.cpp, in one run.

    PILLION_VLLM=/path/to/vllm PILLION_LLAMA_PYTHON=/path/to/python python -m lab.benchmarks.cold_prompts

One uncached prompt at a time and one token out. Weights are the demo model's: in bfloat16 (vLLM, and llama.cpp on its
own conversion) and as in the GGUF file (llama.cpp; vLLM's CPU build cannot read it). As in `cpu_service`, systems run
one at a time in rotating order with their defaults; llama.cpp without a server is the peer's best case. A round's
figure is the median of its prompts; ratios are of the same round.

``--lengths``, ``--systems`` and ``--rounds`` split a run into parts: with ``--add``, rounds are added to the result's
file, which must be of the same kind of machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import ClosedLoad
from lab.benchmarks.cpu_service import all_rounds, cell
from lab.benchmarks.peers import CONTEXT_TOKENS, System, bf16_gguf, llama_system, pillion_system, vllm_system
from lab.benchmarks.report import WRITTEN, machine, save, show_table, spread

MODEL = "demo"
# The longest leaves room for one output token.
LENGTHS = (128, 256, 512, 1024, 2048, 4096, CONTEXT_TOKENS - 1)
# Prompt tokens per system, length and round, and max prompts.
ROUND_TOKENS, MAX_PROMPTS = 4096, 5
WARM_UP = (ClosedLoad(2048, 1, 1, 1), ClosedLoad(256, 1, 1, 2))
PILLION, VLLM, LLAMA = "pillion", "vllm", "llama.cpp"
BF16, GGUF = "bf16", "gguf"
# Pillion's systems, and the peers with the same weights.
PEERS = {f"{PILLION}-{BF16}": (f"{VLLM}-{BF16}", f"{LLAMA}-{BF16}"), f"{PILLION}-{GGUF}": (f"{LLAMA}-{GGUF}",)}
SYSTEMS = (*PEERS, *(peer for peers in PEERS.values() for peer in peers))
# Must be equal in rounds that are shown together.
MACHINE_CLASS = ("cpu", "kernels", "cores")

# Milliseconds to the first token by system.
Round = dict[str, float]


def load_of(tokens: int) -> ClosedLoad:
    """Return a round's prompts of one length, one at a time."""
    return ClosedLoad(tokens, 1, 1, min(MAX_PROMPTS, max(1, ROUND_TOKENS // tokens)))


def systems(args: argparse.Namespace, folder: pathlib.Path, gguf: pathlib.Path, copies: pathlib.Path) -> list[System]:
    """Return the installed and selected systems; print which are left out. ``copies``: folder for the GGUF file's
    bfloat16 conversion."""
    vllm, llama = (shutil.which(path) if path else None for path in (args.vllm, args.llama_python))
    absent = {
        VLLM: "" if vllm else "--vllm (PILLION_VLLM) names no `vllm` program",
        LLAMA: "" if llama else "--llama-python (PILLION_LLAMA_PYTHON) names no Python",
    }
    found = []
    for name in args.systems:
        system, weights = name.rsplit("-", 1)
        if absent.get(system):
            print(f"{name} is left out: {absent[system]}")
        elif system == PILLION:
            found.append(
                pillion_system(name, str(folder) if weights == BF16 else MODEL, shlex.split(args.pillion_flags))
            )
        elif vllm and system == VLLM:
            found.append(vllm_system(name, vllm, folder, "bfloat16", (), lambda _: True))
        elif llama and system == LLAMA:
            found.append(llama_system(name, llama, gguf if weights == GGUF else bf16_gguf(llama, gguf, copies)))
    return found


def rounds_of(
    found: dict[tuple[str, str], list[dict[str, float]]], lengths: Sequence[int], rounds: int
) -> dict[str, list[Round]]:
    """Return the rounds of each length from the figures by (load, system)."""
    figures = {(load, system): [each["ttft_p50_ms"] for each in rows] for (load, system), rows in found.items()}
    return {
        str(tokens): [
            {system: times[index] for (load, system), times in figures.items() if load == load_of(tokens).name}
            for index in range(rounds)
        ]
        for tokens in lengths
    }


def earlier(path: pathlib.Path) -> dict[str, Any]:
    """Return the result to which rounds are added, if any. Raises SystemExit if it is of another kind of machine."""
    if not path.exists():
        return {"rounds": {}, "systems": {}}
    result: dict[str, Any] = json.loads(path.read_text())
    here = machine()
    if any(result["machine"][key] != here[key] for key in MACHINE_CLASS):
        raise SystemExit(f"{path} is of another machine: {result['machine']}")
    return result


def rows_of(rounds: dict[str, list[Round]]) -> list[dict[str, Any]]:
    """Return a row per length and system: milliseconds and, for Pillion's systems, the ratio to the peer."""
    rows = []
    for tokens, each in sorted(rounds.items(), key=lambda item: int(item[0])):
        for system in SYSTEMS:
            times = [found[system] for found in each if system in found]
            if not times:
                continue
            row: dict[str, Any] = {"tokens": int(tokens), "system": system, "ms": spread(times), "rounds": len(times)}
            for peer in PEERS.get(system, ()):
                ratios = [found[system] / found[peer] for found in each if system in found and peer in found]
                if ratios:
                    row[f"of {peer}"] = spread(ratios)
            rows.append(row)
    return rows


def added(before: dict[str, Any], rounds: dict[str, list[Round]], about: dict[str, Any]) -> dict[str, Any]:
    """Return a result with further rounds and system descriptions."""
    all_of_it = {
        tokens: [*before["rounds"].get(tokens, ()), *rounds.get(tokens, ())]
        for tokens in {**before["rounds"], **rounds}
    }
    return {"model": MODEL, "systems": {**before["systems"], **about}, "rounds": all_of_it, "rows": rows_of(all_of_it)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("tokens", "system", "first token, ms", "rounds", "times the peer's time", title="Cold prompts")
    for row in rows:
        ratios = ", ".join(f"{cell(row[key], 2)} {key}" for key in row if key.startswith("of "))
        table.add_row(f"{row['tokens']:,}", row["system"], cell(row["ms"]), str(row["rounds"]), ratios)
    show_table(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    environ = os.environ.get
    parser.add_argument("--vllm", default=environ("PILLION_VLLM"), metavar="PATH", help="a CPU build's `vllm` program")
    parser.add_argument(
        "--llama-python",
        default=environ("PILLION_LLAMA_PYTHON"),
        metavar="PATH",
        help="a Python that has llama-cpp-python",
    )
    parser.add_argument("--pillion-flags", default="", metavar="FLAGS", help="more flags of `pillion serve`")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS", help="default: all")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS, metavar="SYSTEM", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="keep the rounds that the result's file has")
    parser.add_argument("--name", default="cold_prompts", help="name of the result's file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write results/cold_prompts.json, or by another --name."""
    args = arguments()
    # Otherwise paused processes outlive a driver that is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    from lab.testbed.plain_model import plain_folder
    from pillion.engine.checkpoints.model_files import locate

    before = earlier(WRITTEN / f"{args.name}.json") if args.add else {"rounds": {}, "systems": {}}
    gguf = locate(MODEL, "", lambda _: None).path
    with tempfile.TemporaryDirectory() as copies:
        wanted = systems(args, plain_folder(MODEL), gguf, pathlib.Path(copies))
        if not wanted:
            raise SystemExit("nothing to measure")
        found, about = all_rounds(wanted, [load_of(tokens) for tokens in args.lengths], args.rounds, WARM_UP)
    result = added(before, rounds_of(found, args.lengths, args.rounds), about)
    show(result["rows"])
    print(f"written to {save(args.name, result)}")


if __name__ == "__main__":
    main()
