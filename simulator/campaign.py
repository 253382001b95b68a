"""Runs the simulated worlds of many seeds, and prints the violations that they showed."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from pillion.simulator.mutations import MUTATIONS, Mutation
from pillion.simulator.schedule import SimSchedule, draw
from pillion.simulator.shrink import shrink
from pillion.simulator.world import Result, World

# A request may end with one of these errors where a fault happens. The errors are counted and printed all the same, so
# that a person sees when there are many.
ALLOWED_BUT_RARE = ("Unavailable", "Overloaded", "Internal")
# At most this many violations are printed.
MAX_SHOWN = 20
# A process runs so many schedules before it tells what they came to.
PART_SEEDS = 10


def run_schedule(schedule: SimSchedule, *, careful: bool = False, told: bool = False) -> Result:
    """Runs the simulated world of one schedule, without the garbage collector."""
    gc.disable()
    # Modules that are imported stay alive, so the garbage collector need only look through the objects that this world
    # has made.
    gc.freeze()
    try:
        return World(schedule, careful=careful, told=told).run()
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


def run_one(seed: int, *, careful: bool, smallest: bool) -> int:
    """Runs the schedule of a seed and prints its history; returns 1 where a violation was found."""
    schedule = draw(seed)
    if smallest:
        schedule = shrink(schedule, lambda one: bool(run_schedule(one, careful=careful).findings))
    print(schedule.shape)
    result = run_schedule(schedule, careful=careful, told=True)
    print("  event    seconds  process     what")
    print("\n".join(result.history))
    print(f"{result.events} events, {result.messages} messages, {result.virtual_s:.1f} s")
    for finding in result.findings:
        print(f"FOUND: {finding}")
    return 1 if result.findings else 0


@dataclass(slots=True)
class CampaignFindings:
    """Holds what the schedules of some seeds came to. ``failing`` has the violations by seed, ``errors`` the ends of
    requests that are allowed and rare."""

    count: int = 0
    events: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    states: set[int] = field(default_factory=set)
    endings: Counter[str] = field(default_factory=Counter)
    failing: dict[int, list[str]] = field(default_factory=dict)
    errors: list[tuple[int, str]] = field(default_factory=list)

    def note(self, seed: int, result: Result) -> None:
        """Adds the schedule of one more seed."""
        self.count += 1
        self.events += result.events
        self.messages += result.messages
        self.virtual_s += result.virtual_s
        self.states |= result.states
        self.endings.update(ending.partition(":")[0] for ending in result.endings)
        self.errors += [(seed, ending) for ending in result.endings if ending.startswith(ALLOWED_BUT_RARE)]
        if result.findings:
            self.failing[seed] = result.findings

    def add(self, other: CampaignFindings) -> None:
        """Adds the schedules of other seeds."""
        self.count += other.count
        self.events += other.events
        self.messages += other.messages
        self.virtual_s += other.virtual_s
        self.states |= other.states
        self.endings += other.endings
        self.failing |= other.failing
        self.errors += other.errors


def _run_some(seeds: range, careful: bool) -> CampaignFindings:
    found = CampaignFindings()
    for seed in seeds:
        found.note(seed, run_schedule(draw(seed), careful=careful))
    return found


def _parts(seeds: range, careful: bool, processes: int) -> Iterator[CampaignFindings]:
    """Runs the schedules of seeds in so many processes, and yields what each part of them came to, in order."""
    if processes == 1:
        yield from (_run_some(seeds[at : at + 1], careful) for at in range(len(seeds)))
        return
    parts = [seeds[at : at + PART_SEEDS] for at in range(0, len(seeds), PART_SEEDS)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(_run_some, parts, itertools.repeat(careful))


def run_seeds(seeds: range, began_s: float, *, careful: bool, processes: int) -> int:
    """Runs the schedules of many seeds in so many processes; returns 1 where a violation was found. ``began_s`` is a
    time of the monotonic clock."""
    found = CampaignFindings()
    for part in _parts(seeds, careful, processes):
        for seed, findings in list(part.failing.items())[: max(0, MAX_SHOWN - len(found.failing))]:
            print(f"seed {seed}: {'; '.join(findings[:3])[:400]}", flush=True)
        found.add(part)
    took_s = time.monotonic() - began_s
    print(
        f"{found.count} schedules in {took_s:.1f} s of {processes} processes"
        f" ({60 * found.count / took_s:.0f} a minute): {found.events} events, {found.messages} messages,"
        f" {found.virtual_s:.0f} virtual seconds, {len(found.states)} distinct states"
    )
    print("requests: " + ", ".join(f"{number} {ending}" for ending, number in found.endings.most_common()))
    for seed, ending in found.errors[:MAX_SHOWN]:
        print(f"seed {seed}: {ending[:200]}")
    failing = found.failing
    print(f"{len(failing)} seeds found something" + (f": {list(failing)[:50]}" if failing else ""))
    return 1 if failing else 0


def seeds_to_find(mutation: Mutation, most: int, first: int = 0) -> tuple[int, str]:
    """Returns the number of schedules that were run until a defect made by hand was found, or 0 where it was not found;
    and the violations that showed it."""
    with mutation():
        for count, seed in enumerate(range(first, first + most), 1):
            findings = run_schedule(draw(seed)).findings
            if findings:
                return count, findings[0]
    return 0, ""


def run_mutations(most: int, first: int) -> int:
    """Looks for each of the defects made by hand; returns 1 where one of them is not found within ``most``
    schedules."""
    missed = 0
    for name, mutation in MUTATIONS.items():
        count, finding = seeds_to_find(mutation, most, first)
        missed += not count
        print(f"{count or 'not found':>9}  {name}: {finding[:160]}", flush=True)
    return 1 if missed else 0
