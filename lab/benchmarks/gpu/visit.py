"""A visit to a GPU for some minutes: ``make gpu-visit``.

    python -m lab.benchmarks.gpu.visit --time-s 560 --out FOLDER    most valuable parts first; stops in time
    python -m lab.benchmarks.gpu.visit --known FILE ...             continues the visit with these results
    python -m lab.benchmarks.gpu.visit --dry --out FOLDER           runs everything once, tiny, on a CPU

    visit.json --> parts without a result for their files --> kernels, by all cores --> a process --> visit.json, .md

FOLDER has few files, since few can be carried back: ``visit.json`` (results by part, read by the next visit),
``visit.md`` (figures, and what is next), ``visit.log`` and ``sm_90.json`` (constants found). All are rewritten after
every part, so an interrupted visit loses nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NoReturn

from lab.benchmarks.gpu.result import RESULTS, device, smi, table
from lab.benchmarks.gpu.visit_parts import FOLDER, ROOT, ROWS, SECONDS, TESTS, VisitPart, batches, in_order, visit_parts

KNOWN = RESULTS / "gpu-visit.json"
# Cache made by `make gpu-cache`.
CARRIED = ROOT / "build" / "gpu-cache" / "triton.tar.xz"
# Time reserved for ending processes and writing.
RESERVE_S = 10.0
END_TIMEOUT_S = 10.0
# Test files run at once: mostly compilation, on a core each.
BESIDE = min(8, os.cpu_count() or 1)
# Limit of compiling a part's kernels ahead; the rest are compiled when they run.
COMPILE_S = 90.0
LOG_BYTES = 200_000
# Modules (with submodules) that run in forks of the visit in a dry run, where importing torch would dominate.
FORKED = "lab.benchmarks.gpu"


class Visit:
    """One visit: its time, its folder and the results so far."""

    def __init__(self, every: list[VisitPart], folder: Path, known: Path, time_s: float, *, dry: bool) -> None:
        """``every``: all parts, for the page. ``known``: results of earlier visits, if the folder has none."""
        self.every, self.folder, self.dry = every, folder, dry
        self._until_s = time.monotonic() + time_s
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "visit.json"
        source = self._path if self._path.exists() else known
        before = json.loads(source.read_text("utf-8")) if source.exists() and not dry else {}
        self.about = device()
        # Ignore results of another GPU.
        same = before.get("device", {}).get("name") == self.about.get("name")
        self.parts: dict[str, dict[str, Any]] = before.get("parts", {}) if same else {}
        self._compiled: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds in which parts may still run."""
        return self._until_s - time.monotonic() - RESERVE_S

    def run(self, parts: list[VisitPart], environment: dict[str, str]) -> None:
        """Run the parts that the time allows."""
        for batch in batches(parts):
            fits = [part for part in batch if part.seconds <= self.left_s]
            self._compile({pattern: None for part in fits for pattern in part.kernels}, environment)
            with ThreadPoolExecutor(BESIDE) as pool:
                under_way = {pool.submit(self._run, part, environment): part for part in fits}
                for ended in as_completed(under_way):
                    part, found = under_way[ended], ended.result()
                    if found is None:
                        continue
                    self.parts[part.name] = found
                    figures = len(found["rows"])
                    print(f"== {part.name}: {found['seconds']:.0f} s, {figures} figures {found['error']}", flush=True)
                    self.write()

    def _run(self, part: VisitPart, environment: dict[str, str]) -> dict[str, Any] | None:
        """Run a part; return its result, or None if too little time was left when its turn came."""
        limit_s = float(part.seconds)
        if limit_s > self.left_s:
            return None
        print(f"== {part.name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="pil-") as temporary:
            rows, log = Path(temporary) / "rows.jsonl", Path(temporary) / "log"
            words = {FOLDER: str(self.folder), ROWS: str(rows), SECONDS: str(int(limit_s * 0.8))}
            command = [sys.executable, *(words.get(word, word) for word in part.command), *self._dry_words(part)]
            began_s = time.monotonic()
            forks = self.dry and part.command[1].startswith(FORKED)
            with log.open("wb") as output:
                error = _limited(command, environment, output, limit_s, forks=forks)
            text = log.read_text("utf-8", "replace")
            self.log(part.name, text)
            found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()] if rows.exists() else []
        found += _tests(text) if "pytest" in part.command else []
        notes = [row["note"] for row in found if row["value"] is None]
        failed = [note for note in notes if note.startswith("failed")]
        # Retry a part without any figure.
        error = error or next(iter(failed), "") or ("" if len(notes) < len(found) else next(iter(notes), "no figures"))
        seconds, today = time.monotonic() - began_s, self.about["date"]
        return {
            "digest": part.digest(),
            "date": today,
            "rows": found,
            "seconds": seconds,
            "error": error,
            "after": smi(),
        }

    def _compile(self, patterns: Iterable[str], environment: dict[str, str]) -> None:
        """Compile kernels on all cores into the parts' cache."""
        patterns = [pattern for pattern in patterns if pattern not in self._compiled]
        if not patterns or (self.dry and self._compiled):
            return
        command = [sys.executable, "-m", "lab.gpu_builds.cache", "--folder", environment["TRITON_CACHE_DIR"]]
        command += ["--carried", str(CARRIED)] if CARRIED.exists() and not self._compiled else []
        command += ["--only", *patterns, *(["--most", "1"] if self.dry else [])]
        self._compiled += patterns
        # Compiling uses no GPU.
        environment = {**environment, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
        with tempfile.NamedTemporaryFile(prefix="pil-") as output:
            error = _limited(command, environment, output, min(COMPILE_S, max(0.0, self.left_s)))
            text = Path(output.name).read_text("utf-8", "replace")
        self.log(f"kernels {patterns}", text)
        said = [line for line in text.splitlines() if line.startswith(("kernels:", CARRIED.name, "Triton's"))]
        self.about["kernels"] = [*self.about.get("kernels", []), *said, *([error] if error else [])]
        print(f"== compiled ahead, {', '.join(patterns)}: {'; '.join(said)} {error}", flush=True)

    def _dry_words(self, part: VisitPart) -> list[str]:
        if not self.dry:
            return []
        # A dry run only collects the tests, which the suite runs.
        return ["--collect-only", TESTS] if "pytest" in part.command else ["--smoke"]

    def log(self, name: str, text: str) -> None:
        """Add to the visit's log."""
        with (self.folder / "visit.log").open("a", encoding="utf-8") as file:
            file.write(f"\n==== {name}\n{text[-LOG_BYTES:]}")

    def write(self) -> None:
        """Write the results and the page."""
        result = {"device": self.about, "parts": self.parts}
        self._path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")
        (self.folder / "visit.md").write_text(visit_page(result, self.every), "utf-8")


class _Fork:
    """``python -m MODULE ...`` in a fork of this process, with the methods of a Popen used here."""

    def __init__(self, command: list[str], environment: dict[str, str], output: Any) -> None:
        self._command = command
        words = (command[2:], environment, output.fileno())
        self._process = multiprocessing.get_context("fork").Process(target=_be_program, args=words)
        self._process.start()
        self.pid = self._process.ident or 0

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises TimeoutExpired after ``timeout`` seconds."""
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return status


def _be_program(words: list[str], environment: dict[str, str], output: int) -> NoReturn:
    """Turn this fork into the program ``words`` in a new session."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.chdir(ROOT)
    sys.argv, status = list(words), 1
    # Drop the module as imported by the visit.
    sys.modules.pop(words[0], None)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  (whatever it is, it belongs into the log)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip the cleanup of the visit's threads and temporary folders.
        os._exit(status)


def _limited(
    command: list[str], environment: dict[str, str], output: Any, limit_s: float, *, forks: bool = False
) -> str:
    """Run a command with a time limit; return how it failed, or ""."""
    # A process group, so that its children end with it.
    process = (
        _Fork(command, environment, output)
        if forks
        else subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    )
    try:
        status = process.wait(limit_s)
        return f"ended with {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        for number, patience_s in ((signal.SIGTERM, END_TIMEOUT_S), (signal.SIGKILL, None)):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(patience_s)
                except subprocess.TimeoutExpired:
                    continue


def _tests(text: str) -> list[dict[str, Any]]:
    """Parse pytest's last line into a figure."""
    words = r"(\d+) (passed|failed|skipped|error|tests? collected)"
    counts = {word: int(number) for number, word in re.findall(words, text[-2000:])}
    if not counts:
        return []
    note = ", ".join(f"{number} {word}" for word, number in counts.items() if word != "passed")
    figure = {"name": "tests", "value": counts.get("passed", 0), "unit": "passed", "note": note, "more": counts}
    return [{**figure, "share": None, "of": "", "target": "", "met": None}]


def visit_page(result: dict[str, Any], parts: list[VisitPart]) -> str:
    """Return the page of figures: a table per part with a result, and what is next."""
    about, known = result["device"], result["parts"]
    names = ("name", "driver_version", "torch", "triton", "transformers", "python")
    lines = [f"# A visit to {about.get('name', 'no GPU')}, {about['date']}", ""]
    lines += [", ".join(f"{name.replace('_', ' ')} {about.get(name, 'unknown')}" for name in names[1:]) + "."]
    lines += ["", f"Compiled ahead: {'; '.join(about['kernels'])}."] if about.get("kernels") else []
    lines += ["", "## What is next", ""]
    pending = in_order(parts, known)
    for part in pending:
        before = known.get(part.name)
        why = "never ran" if before is None else before["error"] or "its files have changed"
        lines.append(f"* {part.name} (up to {part.seconds} s): {why}")
    lines += [] if pending else ["Nothing: all parts have run with these files."]
    for part in parts:
        if found := known.get(part.name):
            about_it = f"{found['date']}, {found['seconds']:.0f} s. {found['error']}".rstrip()
            lines += ["", f"## {part.name}", "", about_it, "", *table(found["rows"])]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="words; only parts with one of them in their names")
    parser.add_argument("--time-s", type=float, default=560.0, help="seconds of the whole visit (560)")
    parser.add_argument("--out", type=Path, default=RESULTS / "visit", help="folder of the results")
    parser.add_argument("--known", type=Path, default=KNOWN, help="results of earlier visits, where --out has none")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")
    parser.add_argument("--list", action="store_true", help="says what would run, and ends")
    return parser.parse_args()


def main() -> int:
    """Visit; return 1 if a dry run failed. Results of a GPU's parts are in the files."""
    args = arguments()
    every = visit_parts()
    if args.dry:
        # One part collects the tests of all.
        tests = [part for part in every if "pytest" in part.command]
        every = [part for part in every if part not in tests[1:]]
    visit = Visit(every, args.out, args.known, args.time_s, dry=args.dry)
    wanted = [part for part in every if not args.parts or any(word in part.name for word in args.parts)]
    pending = in_order(wanted, visit.parts)
    if args.list:
        for part in pending:
            print(f"{part.seconds:4} s  {part.name}")
        return 0
    cache = os.environ.get("TRITON_CACHE_DIR") or str(Path(tempfile.gettempdir()) / "pillion-visit-kernels")
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}
    if args.dry:
        # Read by Triton at its import, which is done once for all forks.
        environment["TRITON_INTERPRET"] = os.environ["TRITON_INTERPRET"] = "1"
        importlib.import_module("triton")
    visit.run(pending, environment)
    visit.write()
    print((args.out / "visit.md").read_text("utf-8"))
    failed = [name for name, found in visit.parts.items() if found["error"]]
    return 1 if args.dry and failed else 0


if __name__ == "__main__":
    sys.exit(main())
