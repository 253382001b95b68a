"""Runs of many seeds, and the violations that they found."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from lab.simulator.mutations import MUTATIONS, Mutation
from lab.simulator.schedule import SimSchedule, draw
from lab.simulator.shrink import shrink
from lab.simulator.world import Result, World

# Errors with which a request may end during a fault; counted and printed, so that an increase is seen.
ALLOWED_BUT_RARE = ("Unavailable", "Overloaded", "Internal")
# Violations printed.
MAX_SHOWN = 20
# Seeds per task of a process.
PART_SEEDS = 10


def run_schedule(schedule: SimSchedule, *, careful: bool = False, told: bool = False) -> Result:
    """Run one schedule with the garbage collector off."""
    gc.disable()
    # Exempt imported modules from the collection after this world.
    gc.freeze()
    try:
        return World(schedule, careful=careful, told=told).run()
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


def run_one(seed: int, *, careful: bool, smallest: bool) -> int:
    """Run the schedule of a seed and print its history; return 1 on a violation."""
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


def _run_seed(seed: int, careful: bool) -> Result:
    return run_schedule(draw(seed), careful=careful)


def _results(seeds: range, careful: bool, processes: int) -> Iterator[Result]:
    """Yield the result of each seed's schedule, in the order of the seeds, from several processes."""
    if processes == 1:
        yield from map(_run_seed, seeds, itertools.repeat(careful))
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(_run_seed, seeds, itertools.repeat(careful), chunksize=PART_SEEDS)


def run_seeds(seeds: range, began_s: float, *, careful: bool, processes: int) -> int:
    """Run the schedules of many seeds; return 1 on a violation. ``began_s``: monotonic start time."""
    states: set[int] = set()
    endings: Counter[str] = Counter()
    failing: dict[int, list[str]] = {}
    errors: list[tuple[int, str]] = []
    events = messages = 0
    virtual_s = 0.0
    for seed, result in zip(seeds, _results(seeds, careful, processes), strict=True):
        events, messages, virtual_s = events + result.events, messages + result.messages, virtual_s + result.virtual_s
        states |= result.states
        endings.update(ending.partition(":")[0] for ending in result.endings)
        errors += [(seed, ending) for ending in result.endings if ending.startswith(ALLOWED_BUT_RARE)]
        if result.findings:
            failing[seed] = result.findings
            if len(failing) <= MAX_SHOWN:
                print(f"seed {seed}: {'; '.join(result.findings[:3])[:400]}", flush=True)
    took_s = time.monotonic() - began_s
    print(
        f"{len(seeds)} schedules in {took_s:.1f} s of {processes} processes ({60 * len(seeds) / took_s:.0f} a minute):"
        f" {events} events, {messages} messages, {virtual_s:.0f} virtual seconds, {len(states)} distinct states"
    )
    print("requests: " + ", ".join(f"{number} {ending}" for ending, number in endings.most_common()))
    for seed, ending in errors[:MAX_SHOWN]:
        print(f"seed {seed}: {ending[:200]}")
    print(f"{len(failing)} seeds found something" + (f": {list(failing)[:50]}" if failing else ""))
    return 1 if failing else 0


def seeds_to_find(mutation: Mutation, most: int, first: int = 0) -> tuple[int, str]:
    """Return the number of schedules until a mutant was found (0: not found), and the violations."""
    with mutation():
        for count, seed in enumerate(range(first, first + most), 1):
            findings = run_schedule(draw(seed)).findings
            if findings:
                return count, findings[0]
    return 0, ""


def run_mutations(most: int, first: int) -> int:
    """Run all mutants; return 1 if one of them is not found within ``most`` schedules."""
    missed = 0
    for name, mutation in MUTATIONS.items():
        count, finding = seeds_to_find(mutation, most, first)
        missed += not count
        print(f"{count or 'not found':>9}  {name}: {finding[:160]}", flush=True)
    return 1 if missed else 0
