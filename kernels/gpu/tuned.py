"""Constants of kernels (tile sizes, warps, stages) by architecture, from data files with their measurements.

A file ``tuning/sm_90.json`` maps a kernel's name to a list of entries, searched in order:

    {"when": {"head_dim": 128}, "use": {"tile_tokens": 64, "num_warps": 4}, "measured": {...} or null, "why": "..."}

The first entry whose ``when`` agrees with the given facts is used. ``measured`` has the figures, the device and the
date, and is null for entries that were never measured. A server never tunes: ``python -m lab.benchmarks.gpu.tune``
measures on a device and writes the file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pillion.errors import Internal

FOLDER = Path(__file__).parent / "tuning"
# Architectures with a file; others use the next smaller one, else the smallest.
ARCHITECTURES = (80, 90)


@cache
def tuning_file(arch: int) -> dict[str, list[dict[str, Any]]]:
    """Return all entries for an architecture, such as 90, by kernel."""
    nearest = max((known for known in ARCHITECTURES if known <= arch), default=min(ARCHITECTURES))
    found: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / f"sm_{nearest}.json").read_text("utf-8"))
    return found


def tuned(kernel: str, arch: int, **facts: int | str) -> dict[str, int]:
    """Return the constants of ``kernel`` for these facts. Raises Internal if no entry of the file agrees."""
    for entry in tuning_file(arch).get(kernel, ()):
        if all(facts.get(name) == value for name, value in entry["when"].items()):
            return dict(entry["use"])
    raise Internal(f"no tuning entry of {kernel} for sm_{arch} agrees with {facts}")
