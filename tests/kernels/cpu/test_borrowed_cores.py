"""Workers lend each other cores: participation in runs, workers that die or stop, and shutdown."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from lab.testbed.conditions import wait_for
from pillion.errors import ConfigError
from pillion.host import core_lending_table
from pillion.host.core_lending_table import LINE_BYTES, LINGER_NS, LOAN_NS, OWNED_UNTIL, CoreLendingTable, CoreShare
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from pillion.kernels.cpu.runtime.thread_pool import ThreadPool
from pillion.kernels.cpu.runtime.thread_pool_code import _DRAWN
from tests.kernels.cpu.test_thread_pool_threads import child, name_of
from tests.support.small_kernels import ProgramTable, Remember, Scale, Uneven, WhoAmI, chain, step_with

# Longer than any test: no word may contain it, except where a test simulates an owner that never stops.
FOREVER_NS = 2**62


@pytest.fixture(scope="module")
def kernels():
    isa = choose_isa("auto", host_features()) or pytest.skip("no row of the table fits this processor")
    return compile_kernels([Scale(), Scale(3), WhoAmI(), Remember(), Uneven()], isa)


@pytest.fixture
def lending_table():
    """Two workers with a core each."""
    made = CoreLendingTable.create([0, 1])
    yield made
    made.check_integrity()
    made.close()


@pytest.fixture
def pool_of(kernels, lending_table):
    """Make the pool of the worker with this core."""
    made = []

    def make(first):
        made.append(ThreadPool(kernels, 1, (), CoreShare(lending_table, first)))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def held(lending_table):
    """The first cores of the owners that currently use their cores, and the cores that are currently lent."""
    times, now = lending_table._times(), time.monotonic_ns()
    return tuple([core for core, pair in enumerate(times) if pair[word] > now] for word in (0, 1))


def kept_after(lending_table, begun_ns):
    """The first cores of the owners that keep their cores until after the end of a run that began at ``begun_ns``."""
    return [core for core, (owned_ns, _) in enumerate(lending_table._times()) if owned_ns > begun_ns + LINGER_NS]


def own(lending_table, first, until_ns):
    """Write the time until which an owner uses its cores."""
    lending_table._words[(first * LINE_BYTES + OWNED_UNTIL) // 8] = until_ns


def threads_of_runs(kernels, pool, runs=40, turns=20_000):
    """The scratch address of each call of a run: at least one per participating thread."""
    out, where = np.zeros(pool.threads, np.int64), np.zeros(pool.threads, np.int64)
    table = ProgramTable(kernels).add(Remember(), out=out, where=where, turns=turns)
    seen = set()
    for _ in range(runs):
        pool.run(table.program, step_with())
        seen.update(where.tolist())
    return seen


def test_a_worker_computes_on_the_core_of_an_idle_one(kernels, lending_table, pool_of):
    pool = pool_of(0)
    assert pool.threads == 2
    begun_ns = time.monotonic_ns()
    wait_for("the borrower to take part", lambda: len(threads_of_runs(kernels, pool)) == 2)
    assert kept_after(lending_table, begun_ns) == [0], "an owner keeps its cores for a moment after a run"

    def borrowing_s():
        begun_s = time.monotonic()
        threads = len(threads_of_runs(kernels, pool, 1, turns=2_000_000))
        return time.monotonic() - begun_s if threads == 2 else 0.0

    took_s = wait_for("a run to have borrowed", borrowing_s)
    assert 0 < pool.borrowed_s <= took_s, "one core, for no longer than the run"
    wait_for("everything to be given back", lambda: held(lending_table) == ([], []))


def test_a_worker_of_several_processes_keeps_its_cores_and_borrows_none(kernels):
    """One of them reserves the cores of all, a number that differs from that of its threads."""
    lending_table = CoreLendingTable.create([0, 0, 2])
    pool = ThreadPool(kernels, 1, (), CoreShare(lending_table, 0, borrows=False))
    assert pool.threads == 1
    begun_ns = time.monotonic_ns()
    assert len(threads_of_runs(kernels, pool)) == 1
    assert kept_after(lending_table, begun_ns) == [0], "the line of the owner stands for all its cores"
    pool.close()
    lending_table.close()


def test_a_borrower_sleeps_while_others_end_an_entry(kernels, pool_of):
    """It has then returned its core, and draws work items in vain once or twice, not once per poll."""
    pool, waste = pool_of(0), np.zeros((2, 16), np.float32)
    table = ProgramTable(kernels).add(Uneven(), waste=waste, turns=20_000, more=100)
    wait_for("the borrower to take part", lambda: len(threads_of_runs(kernels, pool)) == 2)
    for _ in range(30):
        pool.run(table.program, step_with())
        assert pool._native._counters.view(np.int64)[_DRAWN // 8] <= 3 * pool.threads


def test_cores_of_busy_workers_are_not_borrowed(kernels, lending_table, pool_of):
    pool = pool_of(0)
    own(lending_table, 1, FOREVER_NS)
    assert len(threads_of_runs(kernels, pool)) == 1
    assert pool.borrowed_s == 0.0
    assert held(lending_table)[1] == []
    own(lending_table, 1, 0)


def test_a_borrower_leaves_when_the_owner_begins_and_comes_back(kernels, lending_table, pool_of):
    lender, borrower = pool_of(1), pool_of(0)
    wait_for("the borrower to take part", lambda: len(threads_of_runs(kernels, borrower)) == 2)
    done = threading.Event()

    def lend():
        while not done.is_set():
            threads_of_runs(kernels, lender, 1)

    thread = threading.Thread(target=lend)
    thread.start()
    # A borrower may finish the entry that it had started, and a descheduled owner is not busy.
    wait_for("the borrower to leave", lambda: len(threads_of_runs(kernels, borrower, 10)) == 1)
    done.set()
    thread.join()
    wait_for("the borrower to come back", lambda: len(threads_of_runs(kernels, borrower)) == 2)


def tasks():
    return {int(task) for task in os.listdir("/proc/self/task")}


def sleeps_of(task):
    """The number of times that a thread of this process has gone to sleep."""
    with open(f"/proc/self/task/{task}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))


def test_steps_wake_one_borrower_of_a_busy_owner(kernels):
    """Regardless of the number of its cores. Once it is idle, all of them take part."""
    lending_table, before = CoreLendingTable.create([0, 1, 1, 1]), tasks()
    pool = ThreadPool(kernels, 1, (), CoreShare(lending_table, 0))
    first, *others = sorted(tasks() - before)

    def all_take_part():
        return len(threads_of_runs(kernels, pool, turns=200_000)) == 4

    wait_for("all cores of an idle owner to be borrowed", all_take_part)
    slept = [sum(map(sleeps_of, some)) for some in ([first], others)]
    own(lending_table, 1, FOREVER_NS)
    threads_of_runs(kernels, pool, 200)
    # The others go to sleep once, and once more if they were just called.
    assert sum(map(sleeps_of, others)) - slept[1] <= 2 * len(others)
    wait_for("the first one to sleep", lambda: sleeps_of(first) > slept[0])
    own(lending_table, 1, 0)
    wait_for("all of them to take part again", all_take_part)
    pool.close()
    assert held(lending_table)[1] == []
    lending_table.close()


def test_one_borrower_has_a_core_at_a_time(kernels):
    """Three workers; the third one is idle, and both others want its core."""
    lending_table = CoreLendingTable.create([0, 1, 2])
    pools = [ThreadPool(kernels, 1, (), CoreShare(lending_table, first)) for first in (0, 1)]
    work = [chain(kernels) for _ in pools]

    def lead(pool, table):
        for _ in range(500):
            pool.run(table.program, step_with())

    leaders = [threading.Thread(target=lead, args=(pool, made[0])) for pool, made in zip(pools, work, strict=True)]
    for leader in leaders:
        leader.start()
    while any(leader.is_alive() for leader in leaders):
        lending_table.check_integrity()
    for leader in leaders:
        leader.join()
    _, expected, _ = lone = chain(kernels)
    for _ in range(500):
        pools[0].run(lone[0].program, step_with())
    for _, rows, _ in work:
        np.testing.assert_array_equal(rows[-1], expected[-1])
    for pool in pools:
        pool.close()
    wait_for("everything to be given back", lambda: held(lending_table) == ([], []))
    lending_table.close()


@pytest.mark.parametrize("seed", range(3))
def test_results_stay_right_while_cores_come_and_go(kernels, lending_table, pool_of, seed):
    """The owner of the borrowed core becomes busy and idle at random moments, thousands of times."""
    pool, choices, done = pool_of(0), random.Random(seed), threading.Event()

    def owner():
        while not done.is_set():
            own(lending_table, 1, time.monotonic_ns() + choices.choice([0, 20_000, 200_000, 2_000_000]))
            done.wait(choices.choice([0, 1e-5, 1e-4]))
        own(lending_table, 1, 0)

    coming_and_going = threading.Thread(target=owner)
    coming_and_going.start()
    try:
        for _ in range(400):
            table, rows, expected = chain(kernels)
            pool.run(table.program, step_with())
            np.testing.assert_array_equal(rows[-1], expected[-1])
    finally:
        done.set()
        coming_and_going.join()


def test_close_does_not_wait_for_a_core(kernels, lending_table):
    """A borrower that sleeps until a core is free wakes when a loan expires."""
    own(lending_table, 1, FOREVER_NS)
    pool = ThreadPool(kernels, 1, (), CoreShare(lending_table, 0))
    threads_of_runs(kernels, pool)
    own(lending_table, 1, 0)
    pool.close()
    assert held(lending_table)[1] == []


WORKER = """
from pillion.host.core_lending_table import CoreLendingTable, CoreShare
share = CoreShare(CoreLendingTable.open(sys.argv[1]), 1)
pool, table = ThreadPool(kernels, 1, (), share), program(20, 1.0)
pool.run(table, step)
print("running", flush=True)
while True:
    pool.run(table, step)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_cores_of_dead_or_stopped_workers_become_free(kernels, lending_table, pool_of, how):
    pool, process = pool_of(0), child(WORKER, lending_table.path)
    try:
        assert process.stdout.readline() == "running\n"
        wait_for("the worker to keep its core", lambda: 1 in held(lending_table)[0])
        os.kill(process.pid, how)
        wait_for("its core to be borrowed", lambda: len(threads_of_runs(kernels, pool)) == 2)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_two_busy_workers_both_make_progress(kernels, lending_table, pool_of):
    pool, process = pool_of(0), child(WORKER, lending_table.path)
    try:
        assert process.stdout.readline() == "running\n"
        for _ in range(200):
            table, rows, expected = chain(kernels)
            pool.run(table.program, step_with())
            np.testing.assert_array_equal(rows[-1], expected[-1])
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_threads_beyond_the_lending_tables_share_are_refused(kernels, lending_table):
    with pytest.raises(ConfigError, match="--cpu-threads 2: the core lending table has 1 for this worker"):
        ThreadPool(kernels, 2, (), CoreShare(lending_table, 0))


def test_borrowed_cores_may_be_bound(kernels):
    processor, before = sorted(os.sched_getaffinity(0))[-1], tasks()
    lending_table = CoreLendingTable.create([0, 1], [processor, processor])
    pool = ThreadPool(kernels, 1, (), CoreShare(lending_table, 0))
    (helper,) = {task for task in tasks() - before if name_of(task).startswith("pillion-1")}
    assert os.sched_getaffinity(helper) == {processor}
    pool.close()
    lending_table.close()


def test_a_lending_table_that_is_closed_too_early_stays_mapped_for_its_pool(kernels):
    lending_table = CoreLendingTable.create([0, 1])
    pool = ThreadPool(kernels, 1, (), CoreShare(lending_table, 0))
    lending_table.close()
    assert threads_of_runs(kernels, pool)
    pool.close()


def open_descriptors():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def test_other_files_are_refused_as_lending_table(tmp_path, lending_table):
    path = tmp_path / "lending"
    for content in (
        b"",
        bytes(LINE_BYTES - 8),
        b"\xff" * LINE_BYTES,
        bytes(LINE_BYTES * (core_lending_table.MAX_CORES + 1)),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="--core-lending-table"):
            CoreLendingTable.open(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        CoreLendingTable.open(str(tmp_path / "other"))
    assert not any(os.path.samefile(path, f"/proc/self/fd/{fd}") for fd in open_descriptors())
    found = CoreLendingTable.open(lending_table.path)
    assert (found.cores, list(found.owned(1)), found.owner(1), found.processor(0)) == (2, [1], 1, -1)
    found.close()
    found.close()


@pytest.mark.parametrize(
    ("owners", "processors"), [([1, 1], ()), ([0, 0, 1], ()), ([0, 2, 0], ()), ([-1], ()), ([0], [2**45])]
)
def test_invalid_owners_are_refused(owners, processors):
    lending_table = CoreLendingTable.create(owners, processors)
    with pytest.raises(AssertionError):
        lending_table.check_integrity()
    lending_table.close()


def test_an_endless_loan_is_detected(lending_table):
    own(lending_table, 0, time.monotonic_ns() + 2 * LOAN_NS)
    with pytest.raises(AssertionError, match="until too late"):
        lending_table.check_integrity()
    own(lending_table, 0, 0)
