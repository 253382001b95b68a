"""One section in a process, so that an error on the device cannot harm other sections.

python -m lab.benchmarks.gpu.section NAME --rows FILE [--only WORD ...] [--smoke]
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from lab.benchmarks.gpu.bench import Bench, failure
from lab.gpu_builds.compilations import counted_kernels, stable_keys

# Sections in order, with their timeouts in seconds.
SECTIONS = {
    "attention": 150,
    "step": 240,
    "mixtures": 240,
    "prefill": 90,
    "small": 120,
    "states": 60,
    "products": 240,
    "grouped": 150,
    "line": 150,
    "e2e": 580,
}


def main() -> int:
    """Run the section. A failure becomes a row of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=tuple(SECTIONS))
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=(), help="measures what has one of these words in its name")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    # Raise on SIGTERM, so that a cluster of the section ends with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.smoke:
        from lab.testbed.triton_interpreter import replace_once

        replace_once()
    stable_keys()
    bench, kernels = Bench(smoke=args.smoke, rows=args.rows, only=args.only), counted_kernels()
    try:
        importlib.import_module(f"lab.benchmarks.gpu.{args.name}").run(bench)
    except Exception as error:  # noqa: BLE001  (whatever it is: it belongs into the result)
        bench.report(failure(args.name, error))
    print(f"kernels: {dict(kernels)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
