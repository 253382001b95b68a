"""Searches kernels' constants on this GPU and writes them, with their measurements, to kernels/gpu/tuning/sm_XX.json.

    python -m lab.benchmarks.gpu.tune                     all kernels
    python -m lab.benchmarks.gpu.tune gated "attention*"  these kernels
    python -m lab.benchmarks.gpu.tune --out FOLDER        writes to FOLDER, updating an earlier search there

Without --out the file of the clone is written.

Each candidate's results are checked against a reference before it is timed. Its figure is the geometric mean over the
kernel's cases, so that no large case decides alone. The file is written after every kernel.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

# Seconds per candidate and case; short, since differences are large beside a median's noise.
MEASURE_S = 0.15


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="kernel", help="default: all")
    parser.add_argument("--out", type=Path, help="folder for the file; default: the clone's, smoke runs: none")
    parser.add_argument("--rows", type=Path, help="the file that gets each kernel's best figure as a line of JSON")
    parser.add_argument("--time-s", type=float, default=math.inf, help="no candidate begins after this time")
    parser.add_argument("--smoke", action="store_true", help="two candidates each, on the CPU")
    return parser.parse_args()


def main() -> int:
    """Search and write; return 1 if no candidate of a kernel worked, 2 if nothing can be searched."""
    args = arguments()
    if args.smoke:
        # Read by Triton when kernels are defined.
        os.environ["TRITON_INTERPRET"] = "1"
        from lab.testbed.triton_interpreter import replace_once

        replace_once()
    import torch

    if not args.smoke and not torch.cuda.is_available():
        print("tune: torch sees no CUDA device here", file=sys.stderr)
        return 2
    from lab.benchmarks.gpu.tunables import TUNABLES
    from lab.gpu_builds.compilations import stable_keys

    stable_keys()
    patterns = args.kernels or ["*"]
    strange = [pattern for pattern in patterns if not fnmatch.filter(TUNABLES, pattern)]
    if strange:
        print(f"tune: nothing can be tuned in {strange[0]}; there are {', '.join(TUNABLES)}", file=sys.stderr)
        return 2
    return tune(args, [name for name in TUNABLES if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)])


def tune(args: argparse.Namespace, names: list[str]) -> int:
    """Search kernel by kernel, and write the file after each."""
    from lab.benchmarks.gpu.bench import Bench, Row
    from lab.benchmarks.gpu.search import dump, put, search
    from lab.benchmarks.gpu.tunables import TUNABLES
    from pillion.kernels.gpu.launch import arch_of
    from pillion.kernels.gpu.tuned import ARCHITECTURES, FOLDER

    folder = args.out or (None if args.smoke else FOLDER)
    with tempfile.TemporaryDirectory(prefix="pil-") as temporary:
        bench = Bench(smoke=args.smoke, rows=args.rows or Path(temporary) / "rows", measure_s=MEASURE_S)
        arch = arch_of(bench.device)
        if arch not in ARCHITECTURES:
            print(
                f"tune: there is no file for sm_{arch}; pillion.kernels.gpu.tuned knows {ARCHITECTURES}",
                file=sys.stderr,
            )
            return 2
        missed, until_s = 0, time.monotonic() + args.time_s
        file = f"sm_{arch}.json"
        before = args.out / file if args.out and (args.out / file).exists() else FOLDER / file
        result = json.loads(before.read_text("utf-8"))
        for name in names:
            entry = search(bench, name, TUNABLES[name], arch, until_s, lambda line: print(line, flush=True))
            missed += entry is None
            if entry is not None:
                use = ", ".join(f"{key} {value}" for key, value in entry["use"].items())
                bench.report(Row(name, entry["measured"]["us"], "us", note=use, more={"of": entry["measured"]["of"]}))
                put(result.setdefault(TUNABLES[name].kernel, []), entry)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(dump(result), "utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
