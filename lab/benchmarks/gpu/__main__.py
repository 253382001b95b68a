"""Measures this machine's GPU and writes lab/benchmarks/results/gpu-DEVICE-DATE.json and .md.

    python -m lab.benchmarks.gpu                          all sections
    python -m lab.benchmarks.gpu attention step           these; the file keeps other sections of the day
    python -m lab.benchmarks.gpu --time-s 560             skips sections that no longer fit into the time
    python -m lab.benchmarks.gpu --smoke                  runs everything once with tiny shapes on the CPU

The file is rewritten after every section.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.benchmarks.gpu.result import RESULTS, device, merged, place, smi, write
from lab.benchmarks.gpu.section import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
# Least time left to begin a section.
MIN_S = 25.0
END_TIMEOUT_S = 20.0


def run_section(name: str, folder: Path, limit_s: float, smoke: bool) -> dict[str, Any]:
    """Run a section; return its rows, its seconds, and the error that ended it early ("" without one)."""
    rows = folder / f"{name}.jsonl"
    command = [sys.executable, "-m", "lab.benchmarks.gpu.section", name, "--rows", str(rows)]
    environment = dict(os.environ)
    if smoke:
        command.append("--smoke")
        environment["TRITON_INTERPRET"] = "1"
    began_s, error = time.monotonic(), ""
    # A process group, so that its children end with it.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(limit_s)
        if status:
            error = f"ended with {status}"
    except subprocess.TimeoutExpired:
        error = f"stopped after {limit_s:.0f} s"
    finally:
        _end(process)
    found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()] if rows.exists() else []
    return {"rows": found, "seconds": time.monotonic() - began_s, "error": error, "after": smi()}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--time-s", type=float, default=0.0, help="time of all sections together; 0: no limit")
    parser.add_argument("--out", type=Path, help=f"folder; default: {RESULTS.relative_to(ROOT)}, smoke runs: none")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in Triton's interpreter, on the CPU")
    args = parser.parse_args()
    strange = [name for name in args.sections if name not in SECTIONS]
    if strange:
        parser.error(f"there is no section {strange[0]}; there are {', '.join(SECTIONS)}")
    return args


def main() -> int:
    """Measure, print and write; return 1 if a section or measurement failed."""
    args = arguments()
    if not args.smoke and not has_gpu():
        print("bench-gpu: torch sees no CUDA device here; --smoke shows whether everything runs", file=sys.stderr)
        return 2
    began_s, sections = time.monotonic(), {}
    folder = args.out or (None if args.smoke else RESULTS)
    about = device()
    with tempfile.TemporaryDirectory(prefix="pil-") as temporary:
        for name in args.sections or SECTIONS:
            limit_s = float(SECTIONS[name])
            if args.time_s:
                limit_s = min(limit_s, args.time_s - (time.monotonic() - began_s))
            print(f"== {name}", flush=True)
            if limit_s < MIN_S:
                print("left out: no time is left", flush=True)
                continue
            sections[name] = run_section(name, Path(temporary), limit_s, args.smoke)
            print(f"== {name}: {sections[name]['seconds']:.0f} s {sections[name]['error']}", flush=True)
            if folder is not None:
                path = place(folder, about)
                write(path, merged(path, about, sections))
                print(f"written to {path}", flush=True)
    failed = [row for each in sections.values() for row in each["rows"] if row["note"].startswith("failed")]
    return 1 if failed or any(each["error"] for each in sections.values()) else 0


def has_gpu() -> bool:
    """Return whether torch can use a GPU, asking in another process, so that this one uses no GPU memory."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False, cwd=ROOT).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
