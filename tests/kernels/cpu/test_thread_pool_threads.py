"""The threads of a pool: their start, end and cost, and several pools that share cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from lab.testbed.conditions import wait_for
from pillion.errors import ConfigError, Internal
from pillion.host.cores import MAX_CPU_THREADS
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from pillion.kernels.cpu.runtime.thread_pool import ThreadPool
from tests.support.small_kernels import CONDITION, ProgramTable, Scale, Uneven, WhoAmI, chain, step_with

# Real time of an idle pool: the test measures the CPU time that the system charges to this process meanwhile.
IDLE_S = 1.0


@pytest.fixture(scope="module")
def fast():
    isa = choose_isa("auto", host_features())
    return compile_kernels(
        [Scale(), Scale(3), WhoAmI(), Uneven()], isa or pytest.skip("no row of the table fits this processor")
    )


@pytest.mark.parametrize("threads", [0, -1, MAX_CPU_THREADS + 1])
def test_invalid_numbers_of_threads(fast, threads):
    with pytest.raises(ConfigError, match="a thread pool has"):
        ThreadPool(fast, threads)


def test_threads_are_bound_and_named_and_leave_signals_alone(fast):
    allowed = sorted(os.sched_getaffinity(0))
    bound = [allowed[0], allowed[-1]]
    before = set(os.listdir("/proc/self/task"))
    found = {}

    def lead():
        pool = ThreadPool(fast, 2, bound)
        pool.run(ProgramTable(fast).program, step_with())
        found["leader"] = os.sched_getaffinity(0)
        (helper,) = {task for task in os.listdir("/proc/self/task") if name_of(task).startswith("pillion-")} - before
        found["helper"] = os.sched_getaffinity(int(helper))
        # A thread begins with all of them blocked.
        wait_for("SIGSEGV to be let through", lambda: signal.SIGSEGV not in blocked_signals(helper))
        found["blocked"] = blocked_signals(helper)
        pool.close()

    thread = threading.Thread(target=lead)  # The test's own thread stays free.
    thread.start()
    thread.join()
    assert (found["leader"], found["helper"]) == ({bound[0]}, {bound[1]})
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGALRM} <= found["blocked"]
    assert signal.SIGSEGV not in found["blocked"]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def name_of(task):
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):  # It ends just now.
        return ""


def blocked_signals(task):
    with open(f"/proc/self/task/{task}/status") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk:"))
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def test_an_unusable_affinity_is_refused(fast):
    allowed = sorted(os.sched_getaffinity(0))
    for affinity in ([allowed[0]], [allowed[0], 100_000]):
        with pytest.raises(ConfigError, match="affinity"):
            ThreadPool(fast, 2, affinity)


def helpers():
    """The number of helper threads in this process."""
    return sum(name_of(task).startswith("pillion-") for task in os.listdir("/proc/self/task"))


def assert_helpers(expected):
    """Wait for this number of helpers: the system lists a joined thread a moment longer."""
    wait_for(f"{expected} helpers", lambda: helpers() == expected)


def test_close_joins_and_may_be_repeated(fast):
    before = helpers()
    pool = ThreadPool(fast, 4)
    assert_helpers(before + 3)
    pool.run(ProgramTable(fast).program, step_with())
    pool.close()
    pool.close()
    assert_helpers(before)
    with pytest.raises(Internal, match="closed"):
        pool.run(ProgramTable(fast).program, step_with())


def test_a_garbage_collected_pool_ends(fast):
    before = helpers()
    pool = ThreadPool(fast, 3)
    assert_helpers(before + 2)
    del pool
    assert_helpers(before)


def test_close_waits_for_a_run(fast):
    pool = ThreadPool(fast, 2)
    out, waste = np.zeros(2, np.int64), np.zeros((2, 16), np.float32)
    table = ProgramTable(fast).add(WhoAmI(), out=out, waste=waste, turns=50_000_000)
    thread = threading.Thread(target=lambda: pool.run(table.program, step_with()))
    thread.start()
    # Each call of the kernel writes there when it begins.
    wait_for("both calls to begin", lambda: waste.all() or not thread.is_alive())
    pool.close()
    thread.join()
    assert out.tolist() == [1, 1001]


def test_a_run_in_a_forked_child_is_refused(fast):
    pool = ThreadPool(fast, 2)
    pid = os.fork()
    if not pid:
        try:
            pool.run(ProgramTable(fast).program, step_with())
        except Internal as error:
            pool.close()
            os._exit(17 if "fork" in error.message else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    pool.run(ProgramTable(fast).program, step_with())
    pool.close()


def test_an_idle_pool_uses_no_cpu_time(fast):
    pool = ThreadPool(fast, 3)
    table, _, _ = chain(fast)
    for _ in range(20):
        pool.run(table.program, step_with())

    def burned_s():
        """Return the CPU time of the helpers. Other tests of this process may have left threads behind."""
        return sum(
            thread.user_time + thread.system_time
            for thread in psutil.Process().threads()
            if name_of(thread.id).startswith("pillion-")
        )

    def idle():
        before = burned_s()
        time.sleep(IDLE_S)
        return burned_s() - before < 0.02

    # On a loaded machine a helper may end its last spin only now.
    wait_for("a second in which nothing is burned", idle)
    pool.close()


# The beginning of a child's script: ``program`` has entries that each add ``factor`` to ``out``.
CHILD = """
import sys
import numpy as np
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.cpu.language.records import STEP
from pillion.kernels.cpu.runtime.thread_pool import ThreadPool
from tests.support.small_kernels import Scale

kernels = compile_kernels([Scale()], choose_isa("auto", host_features()))
x, out = np.ones((8, 16), np.float32), np.zeros((8, 16), np.float32)
step, record = np.zeros(STEP.num_words, np.int64), np.zeros(Scale.layout.num_words, np.int64)

def program(entries, factor):
    Scale.layout.fill(record, {"x": x, "out": out, "items": 8, "factor": factor})
    return np.array([[kernels.address("scale_1"), record.ctypes.data, -1, 0]] * entries, np.int64)
"""

CROWD = """
pool, table = ThreadPool(kernels, 8), program(3, 0.0)
for _ in range(int(sys.argv[1])):
    pool.run(table, step)
print("done", flush=True)
"""


def child(script, *args):
    command = [sys.executable, "-c", CHILD + script, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_many_more_threads_than_cores_never_hang(fast):
    """A helper that wakes for the previous run may find the next one's door open before its gate is set."""
    process = child(CROWD, 5_000)
    try:
        assert process.communicate(timeout=200)[0] == "done\n"
    finally:
        process.kill()


def test_a_waiting_leader_sleeps_after_a_skipped_entry(fast):
    """The leader's call is short and the helper's long: the leader must not spin until the helper has finished."""
    pool, waste = ThreadPool(fast, 2), np.zeros((2, 16), np.float32)
    x, y = np.ones((1, 16), np.float32), np.zeros((1, 16), np.float32)
    table = ProgramTable(fast).add(Scale(), CONDITION, x=x, out=y, items=1, factor=1.0)
    table.add(Uneven(), waste=waste, turns=2_000_000, more=40)

    def sleeps():
        begin, mine = time.monotonic(), time.thread_time()
        pool.run(table.program, step_with())
        return (time.thread_time() - mine) / (time.monotonic() - begin) < 0.5

    # If the helper is late, the leader does its call as well; it is not late every time.
    wait_for("a run in which the leader sleeps", sleeps)
    pool.close()


def test_every_leader_is_bound_to_its_core(fast):
    """The first run is often a warm-up, on a thread that never leads again."""
    core = sorted(os.sched_getaffinity(0))[-1]
    pool, table, found = ThreadPool(fast, 1, [core]), ProgramTable(fast), []

    def lead():
        pool.run(table.program, step_with())
        found.append(os.sched_getaffinity(0))

    for _ in range(2):
        thread = threading.Thread(target=lead)
        thread.start()
        thread.join()
    assert found == [{core}, {core}]
    pool.close()


WORKER = """
pool, table, runs = ThreadPool(kernels, 2), program(20, 1.0), int(sys.argv[1])
for _ in range(runs):
    pool.run(table, step)
assert (out == 20.0 * runs).all()
print("done")
"""


def test_two_processes_with_pools_on_the_same_cores_both_make_progress(fast):
    """Both leave their pool open: the interpreter's exit ends it."""
    workers = [child(WORKER, 4000), child(WORKER, 4000)]
    for process in workers:
        assert process.communicate(timeout=200)[0] == "done\n"
        assert process.returncode == 0


ENDLESS = """
pool, table = ThreadPool(kernels, 2), program(20, 1.0)
pool.run(table, step)
print("running", flush=True)
while True:
    pool.run(table, step)
"""


def test_a_worker_can_be_killed_in_the_middle(fast):
    process = child(ENDLESS)
    assert process.stdout.readline() == "running\n"
    process.terminate()
    assert process.wait(timeout=200) == -15
    process.stdout.close()
