"""`make faults RUNS=20 SEED=1 SHAPE=wide`: runs seeds on one cluster after the other, and adds them to the ledger.

The exit status is 1 where a run was not right; the next seed has a new cluster then. ``--table`` counts the ledger's
runs, and ``--survey`` counts how often the questions of a run pass each point, without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pathlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

from lab.testbed.faults.points import POINTS
from tests.faults import ledger
from tests.faults.fault_runs import FaultPlan, FaultRecord, FaultRunner, draw
from tests.faults.places import ROLES, FaultPlace, fault_place

# A supervisor gives up where a component dies six times within a minute.
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0


class Deaths:
    """Pauses before faults that would make a role look like a crash loop."""

    def __init__(self) -> None:
        self._at_s: dict[str, list[float]] = {}

    def rest(self, plan: FaultPlan) -> None:
        """Called before each run."""
        for role, deaths in Counter(plan.struck).items():
            at_s = self._at_s.get(role, [])
            if deaths + len(at_s) > MAX_DEATHS:
                time.sleep(max(0.0, at_s[deaths - MAX_DEATHS - 1] + DEATHS_WINDOW_S - time.monotonic()))

    def note(self, record: FaultRecord) -> None:
        """Called after each run. A process that only slept may have been killed for that."""
        # A network's fault strikes no process.
        for role, fired in zip(record.plan.struck, record.fired, strict=False):
            if fired:
                self._at_s.setdefault(role, []).append(time.monotonic())


def run(args: argparse.Namespace, commit: str) -> Iterator[FaultRecord]:
    """Runs the seeds, each cluster until a run on it is not right."""
    drawn = (seed for seed in itertools.count(args.seed) if not args.role or _strikes(args, seed))
    seeds = itertools.islice(drawn, args.runs)
    for seed in seeds:
        with fault_place(args.shape) as place:
            runner, deaths = FaultRunner(place), Deaths()
            for number in itertools.chain((seed,), seeds):
                plan = draw(number, args.shape, one_fault=args.one_fault)
                if place.restarts_counted:
                    deaths.rest(plan)
                record = runner.run(plan)
                ledger.append(args.ledger, ledger.row(args.shape, record, commit))
                yield record
                if record.wrong:
                    _keep_log(args.logs, f"{args.shape}-{number}.log", place)
                    break
                deaths.note(record)


def _strikes(args: argparse.Namespace, seed: int) -> bool:
    """Whether a fault of a seed goes to a process of the role that was asked for."""
    return args.role in draw(seed, args.shape, one_fault=args.one_fault).struck


def _keep_log(folder: pathlib.Path | None, name: str, place: FaultPlace) -> None:
    log = place.log()
    if folder is None:
        sys.stderr.write(log[-20_000:])
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(log)


def survey(shape: str, rounds: int, seed: int) -> None:
    """Prints for each point how often the questions of a run pass it: the least and the most of some rounds."""
    with fault_place(shape) as place:
        runner, counts = FaultRunner(place), []
        for number in range(seed, seed + rounds):
            runner.run(draw(number, shape).undisturbed())
            counts.append([place.board.passings(point) for point in POINTS])
    for point, found in zip(POINTS, zip(*counts, strict=True), strict=True):
        print(f"{min(found):6} {max(found):6}  {point.passed:14} {point.name}")


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="the first seed; the others follow it")
    parser.add_argument("--shape", choices=ledger.SHAPES, default="wide")
    parser.add_argument("--role", choices=ROLES, help="leave out seeds that strike no process of this role")
    parser.add_argument("--one-fault", action="store_true", help="never draw a second fault")
    parser.add_argument("--ledger", type=pathlib.Path, default=ledger.LEDGER)
    parser.add_argument("--logs", type=pathlib.Path, help="folder for logs of clusters in which a run was not right")
    parser.add_argument("--table", action="store_true", help="count the ledger's runs, run none")
    parser.add_argument("--survey", action="store_true", help="count passings of points in undisturbed runs")
    args = parser.parse_args()
    if args.table:
        print(ledger.table(ledger.read(args.ledger)))
        return 0
    if args.survey:
        survey(args.shape, args.runs, args.seed)
        return 0
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    wrong = 0
    with contextlib.closing(run(args, commit.stdout.strip())) as records:
        for record in records:
            faults = "; ".join(record.plan.words)
            times = f"pause {record.pause_s:.2f} s, {record.seconds:.1f} s in all"
            print(f"{record.plan.seed}: {faults}: {record.outcome}, {times}", flush=True)
            wrong += bool(record.wrong)
    print(f"{args.runs} runs, {wrong} not right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
