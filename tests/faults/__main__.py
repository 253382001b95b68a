"""`make faults RUNS=20 SEED=1 SHAPE=wide`: runs seeds on one cluster after the other, and adds them to the ledger.

Each run is a line of JSON in ``ledger.jsonl`` beside this file: shape, seed, faults, questions, what came of it, the
longest pause that a client saw, and the commit. The exit status is 1 where a run was not right.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from tests.faults.fault_runs import FaultRecord, FaultRunner, draw
from tests.faults.places import FaultPlace, fault_place

LEDGER = pathlib.Path(__file__).with_name("ledger.jsonl")
SHAPES = ("small", "wide", "nodes")
ROLES = ("prefill", "decode", "kvnode", "gateway", "redis-server")
# A supervisor gives up where a component dies six times within a minute.
MOST_DEATHS, DEATHS_WINDOW_S = 4, 60.0
# How much of what was found wrong the ledger keeps; the whole text is printed.
MAX_OUTCOME_CHARS = 200


class Deaths:
    """Counts which components die, and rests where so many did that they would look like some that cannot live."""

    def __init__(self, place: FaultPlace) -> None:
        self._place = place
        self._pids = {role: set(place.pids(role)) for role in ROLES}
        self._at_s: dict[str, list[float]] = {role: [] for role in ROLES}

    def rest(self) -> None:
        """Called after each run."""
        for role, before in self._pids.items():
            now = set(self._place.pids(role))
            self._at_s[role] += [time.monotonic()] * len(before - now)
            self._pids[role] = now
            if len(self._at_s[role]) >= MOST_DEATHS:
                time.sleep(max(0.0, self._at_s[role][-MOST_DEATHS] + DEATHS_WINDOW_S - time.monotonic()))


def row(shape: str, record: FaultRecord, commit: str) -> dict[str, Any]:
    """The ledger's entry of a run."""
    return {
        "shape": shape,
        "seed": record.plan.seed,
        "faults": [fault.words for fault in record.plan.faults],
        "fired": record.fired,
        "questions": record.plan.questions,
        "outcome": record.outcome[:MAX_OUTCOME_CHARS],
        "pause_s": round(record.pause_s, 2),
        "replays": record.replays,
        "seconds": round(record.seconds, 1),
        "commit": commit,
    }


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="the first seed; the others follow it")
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--one-fault", action="store_true", help="never draw a second fault")
    parser.add_argument("--ledger", type=pathlib.Path, default=LEDGER)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    wrong = 0
    with fault_place(args.shape) as place, args.ledger.open("a") as ledger:
        runner, deaths = FaultRunner(place), Deaths(place)
        for seed in range(args.seed, args.seed + args.runs):
            record = runner.run(draw(seed, one_fault=args.one_fault))
            entry = row(args.shape, record, commit.stdout.strip())
            ledger.write(json.dumps(entry, ensure_ascii=False) + "\n")
            ledger.flush()
            print(f"{seed}: {'; '.join(entry['faults'])}: {record.outcome}, pause {record.pause_s:.2f} s", flush=True)
            wrong += bool(record.wrong)
            deaths.rest()
        if wrong:
            sys.stderr.write(place.log()[-20_000:])
    print(f"{args.runs} runs, {wrong} not right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
