"""The search of a kernel's constants, and their entry in the tuning file; see :mod:`lab.benchmarks.gpu.tune`."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lab.benchmarks.gpu.bench import Bench
from lab.benchmarks.gpu.tunables import Tunable
from pillion.kernels.gpu.tuned import tuned, tuning_file

SMOKE_CANDIDATES = 2
WHY = "measured: the fastest of {count}"

Say = Callable[[str], None]


@contextlib.contextmanager
def trying(kernel: str, arch: int, use: dict[str, int]) -> Iterator[None]:
    """Make ``kernel`` use these constants within the context, whatever the file has."""
    entries = tuning_file(arch).setdefault(kernel, [])
    entries.insert(0, {"when": {}, "use": use})
    try:
        yield
    finally:
        del entries[0]


def search(bench: Bench, name: str, tunable: Tunable, arch: int, until_s: float, say: Say) -> dict[str, Any] | None:
    """Search a kernel's constants; return the entry for the file, or None if no candidate worked."""
    now = tuned(tunable.kernel, arch, **tunable.facts)
    candidates = [now, *(use for use in tunable.candidates(now) if use != now)]
    if bench.smoke:
        candidates = candidates[:SMOKE_CANDIDATES]
    tried: list[dict[str, Any]] = []
    for use in candidates:
        if tried and time.monotonic() > until_s:
            say(f"{name}: no time is left for {len(candidates) - len(tried)} candidates")
            break
        with trying(tunable.kernel, arch, use):
            try:
                figure = _microseconds(bench, tunable)
                tried.append({"use": use, "us": round(figure, 3)})
            except Exception as error:  # noqa: BLE001  (too much shared memory, say: the next one may do)
                tried.append({"use": use, "failed": f"{type(error).__name__}: {str(error)[:160]}"})
        say(f"{name}: {tried[-1]}")
    found = sorted((each for each in tried if "us" in each), key=lambda each: float(each["us"]))
    if not found:
        return None
    measured = {
        "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else "none: a smoke run",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "us": found[0]["us"],
        "of": tried,
    }
    why = WHY.format(count=len(found))
    return {"when": tunable.facts, "use": found[0]["use"], "measured": measured, "why": why}


def _microseconds(bench: Bench, tunable: Tunable) -> float:
    logs = []
    for make in tunable.cases(bench):
        case = make()
        case.verify()
        logs.append(math.log(bench.time(case.calls).median_s * 1e6))
    return math.exp(sum(logs) / len(logs))


def put(entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """Replace the entry for the same facts by ``entry``, or insert it before the first entry that matches them."""
    for at, known in enumerate(entries):
        if known["when"] == entry["when"]:
            entries[at] = entry
            return
        if all(entry["when"].get(name) == value for name, value in known["when"].items()):
            entries.insert(at, entry)
            return
    entries.append(entry)


def dump(found: dict[str, list[dict[str, Any]]]) -> str:
    """Format a tuning file: a kernel with one entry on one line, others with a line per entry."""
    kernels = []
    for kernel, entries in found.items():
        lines = [json.dumps(entry) for entry in entries]
        body = lines[0] if len(lines) == 1 else "\n  " + ",\n  ".join(lines) + "\n "
        kernels.append(f' "{kernel}": [{body}]')
    return "{\n" + ",\n".join(kernels) + "\n}\n"
