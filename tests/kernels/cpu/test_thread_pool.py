"""A thread pool runs each entry of a program in order, once per thread, and reports out-of-bounds accesses."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from lab.testbed.conditions import WITHIN_S, wait_for
from pillion.errors import Internal
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.cpu.language.module import SCRATCH_BYTES
from pillion.kernels.cpu.runtime import thread_pool_code
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from pillion.kernels.cpu.runtime.thread_pool import ThreadPool
from tests.support.small_kernels import CONDITION, Halve, ProgramTable, Remember, Scale, Stray, WhoAmI, chain, step_with

SPECS = [Scale(), Scale(3), WhoAmI(), Stray(), Stray(scratch=True), Remember(), Halve()]


@pytest.fixture(scope="module")
def isa():
    found = choose_isa("auto", host_features())
    return found or pytest.skip("no row of the table fits this processor")


@pytest.fixture(scope="module")
def fast(isa):
    return compile_kernels(SPECS, isa)


@pytest.fixture(scope="module")
def checked(isa):
    return compile_kernels(SPECS, isa, checked=True)


@pytest.fixture(params=["fast", "checked"])
def kernels(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def pool_of(kernels):
    """Make pools that end with the test."""
    made = []

    def make(threads, affinity=(), of=None):
        made.append(ThreadPool(of or kernels, threads, affinity))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernels_see_the_writes_of_earlier_ones(kernels, pool_of, threads):
    pool = pool_of(threads)
    for _ in range(50):
        table, rows, expected = chain(kernels)
        pool.run(table.program, step_with())
        for found, right in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_kernel_is_called_once_for_every_thread(kernels, pool_of, threads):
    pool = pool_of(threads)
    out, waste = np.zeros(threads, np.int64), np.zeros((threads, 16), np.float32)
    table = ProgramTable(kernels)
    for _ in range(7):
        table.add(WhoAmI(), out=out, waste=waste, turns=1)
    for run in range(1, 4):
        pool.run(table.program, step_with())
        np.testing.assert_array_equal(out, 7 * run * (1000 * np.arange(threads) + 1))


def test_kernels_are_skipped_by_their_condition(kernels, pool_of):
    pool, out, waste = pool_of(2), np.zeros((3, 2), np.int64), np.zeros((2, 16), np.float32)
    table = ProgramTable(kernels)
    table.add(WhoAmI(), out=out[0], waste=waste, turns=1)
    table.add(WhoAmI(), condition=CONDITION, out=out[1], waste=waste, turns=1)
    table.add(WhoAmI(), out=out[2], waste=waste, turns=1)
    for samples in (0, 1, 0, 9, -1):
        pool.run(table.program, step_with(samples))
    assert out.tolist() == [[5, 5005], [2, 2002], [5, 5005]]


def test_an_empty_program_and_one_of_skipped_kernels(kernels, pool_of):
    pool, out, waste = pool_of(3), np.zeros(3, np.int64), np.zeros((3, 16), np.float32)
    skipped = ProgramTable(kernels).add(WhoAmI(), condition=CONDITION, out=out, waste=waste, turns=1)
    for _ in range(500):
        pool.run(ProgramTable(kernels).program, step_with())
        pool.run(skipped.program, step_with())
    assert not out.any()
    pool.run(skipped.program, step_with(1))
    assert out.tolist() == [1, 1001, 2001]


def test_late_helpers_take_no_part_in_a_later_run(kernels, pool_of):
    """More threads than cores, and runs so short that most helpers arrive after the end."""
    threads, runs = 8, 3000
    pool = pool_of(threads)
    tables, outs = [], np.zeros((2, threads), np.int64)
    waste = np.zeros((threads, 16), np.float32)
    for out, length in zip(outs, (1, 3), strict=True):
        tables.append(ProgramTable(kernels))
        for _ in range(length):
            tables[-1].add(WhoAmI(), out=out, waste=waste, turns=100)
    programs, step = [table.program for table in tables], step_with()
    for run in range(runs):
        pool.run(programs[run % 2], step)
    each = 1000 * np.arange(threads) + 1
    np.testing.assert_array_equal(outs, [runs // 2 * each, runs // 2 * 3 * each])


def test_a_run_waits_until_its_helpers_have_left(fast):
    """The line of a helper that does not exist contains ACTIVE: the leader waits, with the door closed."""
    words = np.zeros(8 * 8, np.int64)
    lines = words[-words.ctypes.data % 64 // 8 :]
    lines[thread_pool_code.THREADS // 8] = 2
    active = (thread_pool_code.FIRST_THREAD_LINE + 64 + thread_pool_code.ACTIVE) // 8
    lines[active] = 1
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(fast.address(thread_pool_code.RUN))
    thread = threading.Thread(target=run, args=(lines.ctypes.data, 0, 0, 0))
    thread.start()
    gate, door = thread_pool_code.GATE // 8, (thread_pool_code.DOOR + thread_pool_code.OPEN) // 8
    wait_for("the door to be closed after the run", lambda: lines[gate] and not lines[door])
    assert thread.is_alive()
    lines[active] = 0
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def test_programs_can_be_extended(kernels, pool_of):
    pool, out, waste = pool_of(2), np.zeros(2, np.int64), np.zeros((2, 16), np.float32)
    table = ProgramTable(kernels)
    for _ in range(100):
        table.add(WhoAmI(), out=out, waste=waste, turns=1)
        pool.run(table.program, step_with())
    assert out[0] == sum(range(101))


def test_concurrent_calls_do_not_share_scratch(kernels, pool_of):
    pool, out, where = pool_of(3), np.zeros(3, np.int64), np.zeros(3, np.int64)
    table = ProgramTable(kernels).add(Remember(), out=out, where=where, turns=20_000)
    seen = set()

    def helped():
        for _ in range(100):
            pool.run(table.program, step_with())
            assert out.tolist() == [1, 2, 3]
            seen.update(where.tolist())
        return len(seen) > 1

    wait_for("a helper to take part", helped)
    assert all(address % 64 == 0 for address in seen)
    assert (np.diff(sorted(seen)) >= SCRATCH_BYTES).all()


@pytest.mark.parametrize("count", [1, 2])
def test_several_leaders_and_pools(kernels, pool_of, count):
    """Four concurrent leaders, of one pool, which then runs one program after the other, or of two pools."""
    pools = [pool_of(2) for _ in range(count)]
    work = [chain(kernels) for _ in range(4)]

    def lead(pool, table):
        for _ in range(100):
            pool.run(table.program, step_with())

    threads = [threading.Thread(target=lead, args=(pools[i % count], work[i][0])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, expected, _ = lone = chain(kernels)
    for _ in range(100):
        pools[0].run(lone[0].program, step_with())
    for _, rows, _ in work:
        np.testing.assert_array_equal(rows[-1], expected[-1])


def test_results_do_not_depend_on_the_leaders_denormal_mode(kernels, pool_of):
    import torch

    x, out = np.full(16, 2e-38, np.float32), np.zeros(16, np.float32)
    table = ProgramTable(kernels).add(Halve(), x=x, out=out)
    smallest_normal = float(np.finfo(np.float32).tiny)
    denormals = torch.tensor([smallest_normal, smallest_normal])
    flushes = torch.set_flush_denormal(True)
    try:
        for threads in (1, 2):
            out[:] = 0
            pool_of(threads).run(table.program, step_with())
            assert out.view(np.int32).all()  # As bits: comparisons would flush denormals as well.
        if flushes:  # And the leader's mode is restored.
            assert not (denormals * 0.5).any()
    finally:
        torch.set_flush_denormal(False)


def test_a_fault_is_reported_once_with_kernel_and_offset(checked, pool_of):
    pool, out = pool_of(2, of=checked), np.zeros((4, 16), np.float32)
    for offset in (out.nbytes, -64, out.nbytes - 60):
        with pytest.raises(Internal, match=rf"stray_False .* byte {offset} "):
            pool.run(ProgramTable(checked).add(Stray(), out=out, offset=offset).program, step_with())
    assert not out.any()
    pool.run(ProgramTable(checked).add(Stray(), out=out, offset=64).program, step_with())
    assert out[1].all()


def test_a_fault_in_the_scratch_is_reported(checked, pool_of):
    bad, pool = ProgramTable(checked).add(Stray(scratch=True), out=None, offset=SCRATCH_BYTES), pool_of(2, of=checked)
    with pytest.raises(Internal, match=f"stray_True .* byte {SCRATCH_BYTES} "):
        pool.run(bad.program, step_with())


def test_a_write_after_the_scratch_is_reported_once(checked, pool_of):
    pool, out, scratch = pool_of(1, of=checked), np.zeros(1, np.int64), np.zeros(1, np.int64)
    pool.run(ProgramTable(checked).add(Remember(), out=out, where=scratch, turns=1).program, step_with())
    table = ProgramTable(checked).add(Stray(), out=(int(scratch[0]) + SCRATCH_BYTES, 64), offset=0)
    with pytest.raises(Internal, match="scratch of thread 0"):
        pool.run(table.program, step_with())
    pool.run(ProgramTable(checked).program, step_with())


def test_wrong_tables_are_refused(kernels, pool_of):
    pool, good = pool_of(2), ProgramTable(kernels).program
    for program in (np.zeros((2, 3), np.int64), np.zeros((2, 4), np.int32), np.zeros((4, 4), np.int64)[::2]):
        with pytest.raises(Internal, match="program"):
            pool.run(program, step_with())
    for step in (step_with()[:-1], step_with().astype(np.int32)):
        with pytest.raises(Internal, match="step"):
            pool.run(good, step)
