"""The ledger of all runs with faults: `ledger.jsonl` beside this file, a line of JSON for each run.

A line has shape, seed, faults and which of them happened, questions, what came of it, the longest pause that a client
saw, how often answers were replayed, the seconds that the run took, and the commit.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tests.faults.fault_runs import FaultRecord

LEDGER = pathlib.Path(__file__).with_name("ledger.jsonl")
SHAPES = ("small", "wide", "nodes", "hosts")
# How much of what was found wrong the ledger keeps; the whole text is printed.
MAX_OUTCOME_CHARS = 200


def row(shape: str, record: FaultRecord, commit: str) -> dict[str, Any]:
    """The ledger's entry of a run."""
    return {
        "shape": shape,
        "seed": record.plan.seed,
        "faults": record.plan.words,
        "fired": record.fired,
        "questions": record.plan.questions,
        "outcome": record.outcome[:MAX_OUTCOME_CHARS],
        "pause_s": round(record.pause_s, 2),
        "replays": record.replays,
        "seconds": round(record.seconds, 1),
        "commit": commit,
    }


def append(path: pathlib.Path, entry: dict[str, Any]) -> None:
    """Add a run."""
    with path.open("a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(entry, ensure_ascii=False) + "\n")


def read(path: pathlib.Path = LEDGER) -> list[dict[str, Any]]:
    """All runs."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Runs by shape and outcome, as Markdown."""
    lines = ["| shape | runs | right, every fault happened | right, some did not | not right | longest pause, s |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    found = list(rows)
    for shape in (*SHAPES, "all"):
        of_shape = [row for row in found if shape in (row["shape"], "all")]
        counts = _counts(of_shape)
        longest = max((row["pause_s"] for row in of_shape), default=0.0)
        lines.append(f"| {shape} | {len(of_shape)} | {' | '.join(map(str, counts))} | {longest:.1f} |")
    return "\n".join(lines)


def _counts(rows: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    right = [row for row in rows if row["outcome"].startswith("right")]
    all_fired = sum(all(row["fired"]) for row in right)
    return all_fired, len(right) - all_fired, len(rows) - len(right)
