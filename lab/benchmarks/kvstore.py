"""`make bench BENCH=kvstore`: all figures of the KV store, one benchmark after the other, each in a process of its own.

Each benchmark compares with a limit of the same run and writes its own results/NAME.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

NAMES = ("kv_node", "kv_handoff", "kv_index", "kv_plane", "kv_fetch")


def main() -> None:
    """Runs the benchmarks; ends with the first one that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    for name in parser.parse_args().only:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
