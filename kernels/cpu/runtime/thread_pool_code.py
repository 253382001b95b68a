"""The thread pool's machine code, in the kernels' language: how threads divide a program, and how they wait.

Each entry of a program is divided into one work item per thread of the pool. A thread draws a work item, calls the
kernel with the item's number, and draws the next one; the thread that finishes the last item moves the gate on to the
next entry. A run never waits for a thread that has not begun: if a helper still sleeps or another process occupies its
core, the leader executes all items. Results are the same, because a kernel's bits do not depend on its caller.

    helper: wait at the gate -> ACTIVE -> execute items -> not ACTIVE -> wait at the gate
    leader: open the door -> move the gate -> execute items -> close the door -> wait until no helper is ACTIVE

The gate is a word that only grows: BASE of the run + the first unfinished entry. Helpers wait at the gate; when it
moves they join at the entry that it names, and leave when no work item is left. A helper inside sets ACTIVE in its
line; a run ends by closing the door (OPEN = 0) and waiting until no line is ACTIVE. From then on no helper reads the
program, the step or the counters. Door and lines are accessed in sequentially consistent order, so that the leader sees
every helper that has found the door open.

    borrower: wait at the gate -> wait for the core -> ACTIVE -> execute items of one entry -> not ACTIVE -> wait ...

A borrower is a helper on a core of another worker (:mod:`pillion.host.core_lending_table`). Before each entry it checks
whether the owner wants the core; if so, it sleeps until the owner is idle. It polls only while it has the core. Of the
borrowers of one owner's cores only the first waits for the owner and wakes the others, so that a step wakes one thread
per busy owner, not one per core. The leader renews its worker's claim on its own cores at each entry.

A waiting thread polls for a while and then sleeps in the operating system (futex), so that an idle pool costs nothing
and two pools can share cores. Nothing calls sched_yield, by which a thread loses its whole time slice on Linux. No
wake-up is lost: the futex compares the word once more under a lock, and the thread that moves the gate counts the
sleepers after moving it. thread_pool.pml beside this file models all this; a test compares it with these methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from time import CLOCK_MONOTONIC
from typing import Any

from llvmlite import ir

from pillion.host.core_lending_table import LENT_UNTIL, LINE_BYTES, LINGER_NS, LOAN_NS, OWNED_UNTIL
from pillion.kernels.cpu.language.emit import I8, I32, I64, Bool, Int, Kernel, KernelVariable, Ptr
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.module import COUNTER_BYTES, SIGNATURE
from pillion.kernels.cpu.language.sync import (
    ALL_SLEEPERS,
    FUTEX_WAIT,
    FUTEX_WAKE,
    NS_PER_S,
    PRIVATE,
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_raise,
    atomic_swap,
    futex,
    pause,
    time_cell,
)

# Words of a program's entry: address of the kernel, address of its arguments, the word of the step's record that must
# be above 0 for the kernel to run (-1: it always runs), and a word for the program's owner.
ENTRY_WORDS = 4
_ENTRY_BYTES = 8 * ENTRY_WORDS

# Byte offsets of words in the pool's memory; words that different threads write are in different cache lines.
# LENDING_TABLE is the address of this worker's first line in the core lending table, or 0.
PROGRAM, ENTRIES, STEP, COUNTERS, THREADS, BASE, LENDING_TABLE = (8 * word for word in range(7))
GATE, DOOR, FIRST_THREAD_LINE = LINE_BYTES, 2 * LINE_BYTES, 3 * LINE_BYTES
# Offsets in the gate's line, in the door's line, and in a thread's line.
_VALUE, _SLEEPERS = 0, 8
OPEN, _STOP = 0, 8
POOL, SCRATCH, ACTIVE = 0, 8, 16
# In a borrower's line: addresses of two lines of the lending table, those of the core's owner and of the core, and the
# total nanoseconds of this thread in kernels.
OWNER_LINE, CORE_LINE, BORROWED_NS = 24, 32, 40
# Addresses of the gate at which a borrower sleeps, and of the gate that it moves for others, or 0. The first borrower
# of an owner's cores sleeps at the pool's gate, the others at a gate that the first one moves.
SLEEPS_AT, CALLS = 48, 56
# Offsets in an entry's counters: after the kernel's own counter, the numbers of work items drawn and done.
_DRAWN, _DONE = COUNTER_BYTES, COUNTER_BYTES + 8
COUNTER_STRIDE = COUNTER_BYTES + LINE_BYTES

# Polls before a thread sleeps: some 100 us, as a poll with its pause takes 10 to 50 ns. That is about the cost of
# sleeping and waking, and longer than threads wait for a kernel's last work items.
POLLS = 4_000
# The leader's sleep between polls for a helper that has finished but is descheduled.
_NAP_US = 50
# A borrower's sleep while another worker has borrowed the core.
_TAKEN_NAP_US = 1_000

# The leader calls pool_run(pool, program, entries, step); a helper starts in pool_main(its line), or in
# pool_borrow(its line) on a borrowed core.
THREAD_POOL_FUNCTIONS = RUN, MAIN, BORROW = "pool_run", "pool_main", "pool_borrow"


class _ThreadRole(IntEnum):
    """Role of a thread that runs work(), which returns at a different point for each."""

    LEADER = 1
    HELPER = 0
    BORROWER = -1


def add_thread_pool(module: ir.Module, isa: Isa) -> None:
    """Emit the pool's functions into ``module``."""
    code = _ThreadPoolCode(module, isa)
    sleep = code.sleep()
    wait = code.wait(sleep)
    work = code.work(wait)
    code.main(wait, work)
    code.borrow(sleep, work)
    code.run(work)


@dataclass(frozen=True, slots=True)
class _Run:
    """The pool's words of a run, which a thread reads once when it joins."""

    k: Kernel
    gate: Ptr
    program: Int
    entries: Int
    step: Int
    counters: Int
    threads: Int
    base: Int

    def wants(self, condition: Int) -> Bool:
        """Return whether an entry runs, by the word of the step's record that its condition names (-1: always)."""
        number = self.k.load_int(Ptr(self.k, self.step.ir) + self.k.max(condition, 0) * 8)
        return (condition < 0) | (number > 0)


@dataclass(frozen=True, slots=True)
class _Caller:
    """How the first borrower of an owner's cores wakes the others: it moves their ``gate`` to ``value``."""

    is_first: Bool
    gate: Ptr
    value: Int


@dataclass(frozen=True, slots=True)
class _ThreadPoolCode:
    module: ir.Module
    isa: Isa

    @contextmanager
    def _function(self, name: str, num_args: int, result: Any = None) -> Iterator[tuple[Any, Kernel, list[Any]]]:
        kind = ir.FunctionType(result or ir.VoidType(), [I64] * num_args)
        function = ir.Function(self.module, kind, name)
        function.attributes.add("noinline")
        if result is None:
            function.linkage = "internal"
        k = Kernel(ir.IRBuilder(function.append_basic_block("entry")), self.isa)
        yield function, k, list(function.args)
        if result is None:
            k.builder.ret_void()
        else:
            k.builder.ret(result(0))

    def sleep(self) -> Any:
        """Emit sleep(gate, old), which returns when the gate's value is above ``old``. Never polls."""
        with self._function("pool_sleep", 2) as (function, k, (gate_address, old_value)):
            gate, old = Ptr(k, gate_address), Int(k, old_value)
            with k.forever():
                now = atomic_load(k, gate + _VALUE)
                with k.when(now > old):
                    k.builder.ret_void()
                atomic_add(k, gate + _SLEEPERS, 1)
                futex(k, gate + _VALUE, FUTEX_WAIT | PRIVATE, now.ir)
                atomic_add(k, gate + _SLEEPERS, -1)
        return function

    def wait(self, sleep: Any) -> Any:
        """Emit wait(gate, old), which returns when the gate's value is above ``old``. Polls for a while, then
        sleeps."""
        with self._function("pool_wait", 2) as (function, k, (gate_address, old_value)):
            self._poll(k, Ptr(k, gate_address), Int(k, old_value))
            k.builder.call(sleep, [gate_address, old_value])
        return function

    def _poll(self, k: Kernel, gate: Ptr, old: Int) -> None:
        """Poll until the gate's value is above ``old``, at most POLLS times."""
        polls = k.variable(k.int(0))
        with k.forever() as end:
            k.break_if(end, (atomic_load(k, gate + _VALUE) > old) | (polls.value >= POLLS))
            polls.value = polls.value + 1
            pause(k)

    def work(self, wait: Any) -> Any:
        """Emit work(pool, scratch, role), which executes work items from the first unfinished entry on.

        A helper returns when no item is left, a borrower after the first entry, the leader when the program is
        finished.
        """
        with self._function("pool_work", 3) as (function, k, (pool_address, scratch, role)):
            b, pool = k.builder, Ptr(k, pool_address)
            lending_table = k.load_int(pool + LENDING_TABLE)
            words = (PROGRAM, ENTRIES, STEP, COUNTERS, THREADS, BASE)
            run = _Run(k, pool + GATE, *(k.load_int(pool + word) for word in words))
            # -1 between the leader's opening of the door and its move of the gate.
            position = k.variable(k.max(atomic_load(k, run.gate) - run.base, 0))
            with k.forever() as end:
                index = position.value
                k.break_if(end, index >= run.entries)
                entry = Ptr(k, run.program.ir) + index * _ENTRY_BYTES
                kernel, args, condition = (k.load_int(entry + 8 * word) for word in range(3))
                with b.if_else(run.wants(condition).ir) as (wanted, skipped):
                    with wanted:
                        with k.when((lending_table > 0) & Int(k, role).equals(_ThreadRole.LEADER)):
                            self._keep_cores(k, lending_table, LOAN_NS)
                        self._execute_items(run, index, kernel, [args.ir, run.step.ir], scratch)
                        with k.when(Int(k, role).equals(_ThreadRole.BORROWER)):
                            b.ret_void()
                        with k.when(atomic_load(k, run.gate) <= run.base + index):
                            with k.when(Int(k, role).equals(_ThreadRole.HELPER)):
                                b.ret_void()
                            b.call(wait, [run.gate.ir, (run.base + index).ir])
                        position.value = atomic_load(k, run.gate) - run.base
                    with skipped:
                        position.value = index + 1
        return function

    def _execute_items(self, run: _Run, index: Int, kernel: Int, pointers: list[Any], scratch: Any) -> None:
        """Draw and execute work items of an entry. The thread that finishes the last one moves the gate."""
        k, b = run.k, run.k.builder
        counter = Ptr(k, (run.counters + index * COUNTER_STRIDE).ir)
        function = b.inttoptr(kernel.ir, SIGNATURE.as_pointer())
        with k.forever() as none_left:
            item = atomic_add(k, counter + _DRAWN, 1)
            k.break_if(none_left, item >= run.threads)
            b.call(function, [*pointers, counter.ir, scratch, item.ir, run.threads.ir])
            done = atomic_add(k, counter + _DONE, 1) + 1
            with k.when(done.equals(run.threads)):
                self._move(k, run.gate, run.base + index + 1)
            k.break_if(none_left, (item + 1).equals(run.threads))

    def main(self, wait: Any, work: Any) -> None:
        """Emit main(thread line), which executes runs until the pool stops."""
        with self._function(MAIN, 1, I64) as (_, k, (line_address,)):
            b, line = k.builder, Ptr(k, line_address)
            pool_address, scratch = (k.load_int(line + word) for word in (POOL, SCRATCH))
            pool = Ptr(k, pool_address.ir)
            self._set_arithmetic(k)
            seen = k.variable(k.int(0))
            with k.forever() as end:
                b.call(wait, [(pool + GATE).ir, seen.value.ir])
                seen.value = atomic_load(k, pool + GATE)
                k.break_if(end, atomic_load(k, pool + (DOOR + _STOP)) > 0)
                self._join(k, work, pool, line, scratch, _ThreadRole.HELPER)

    def borrow(self, sleep: Any, work: Any) -> None:
        """Emit borrow(thread line), the main function of a thread on a core that another worker owns."""
        with self._function(BORROW, 1, I64) as (_, k, (line_address,)):
            b, line = k.builder, Ptr(k, line_address)
            words = (POOL, OWNER_LINE, CORE_LINE, SLEEPS_AT, CALLS)
            pool, owner, core, sleeps_at, calls = (Ptr(k, k.load_int(line + word).ir) for word in words)
            scratch, gate, is_first = k.load_int(line + SCRATCH), pool + GATE, Int(k, calls.ir) > 0
            self._set_arithmetic(k)
            # The value of LENT_UNTIL that this thread wrote for its core, or 0 if it has none.
            seen, loan = k.variable(k.int(0)), k.variable(k.int(0))
            with k.forever() as end:
                with k.when(loan.value > 0):
                    self._poll(k, gate, seen.value)
                    with k.when(atomic_load(k, gate) <= seen.value):
                        self._give_back(k, core, loan)
                with k.when(loan.value.equals(0)):
                    b.call(sleep, [sleeps_at.ir, seen.value.ir])
                now = atomic_load(k, gate)
                k.break_if(end, atomic_load(k, pool + (DOOR + _STOP)) > 0)
                with b.if_else(atomic_load(k, pool + (DOOR + OPEN)).equals(0).ir) as (between_runs, in_run):
                    with between_runs:
                        seen.value = now
                    with in_run:
                        self._claim(k, owner, core, loan, _Caller(is_first, calls, now))
                        with k.when((loan.value > 0) | Int(k, calls.ir).equals(0)):
                            seen.value = now
                        with k.when(loan.value > 0):
                            self._join(k, work, pool, line, scratch, _ThreadRole.BORROWER, loan.value - LOAN_NS)
            self._give_back(k, core, loan)
            with k.when(is_first):
                # Above every value that a borrower has seen: the leader may not have moved the pool's gate yet.
                self._move(k, calls, atomic_load(k, gate) + 1)

    def _join(
        self, k: Kernel, work: Any, pool: Ptr, line: Ptr, scratch: Int, role: int, began: Int | None = None
    ) -> None:
        """Work on the current run, if the door is still open. With ``began``, count the time since then as borrowed."""
        atomic_swap(k, line + ACTIVE, 1)
        with k.when(atomic_load(k, pool + (DOOR + OPEN)) > 0):
            k.builder.call(work, [pool.ir, scratch.ir, I64(role)])
            if began is not None:
                # Visible to the leader, which waits until this thread is not ACTIVE.
                k.store_int(line + BORROWED_NS, k.load_int(line + BORROWED_NS) + self._now(k) - began)
        atomic_swap(k, line + ACTIVE, 0)

    def _claim(self, k: Kernel, owner: Ptr, core: Ptr, loan: KernelVariable, caller: _Caller) -> None:
        """Claim, renew or return the core. Sets ``loan`` to the value of LENT_UNTIL, or to 0.

        The first borrower of the owner's cores wakes the others when the owner is idle. If it gets no core it sleeps
        for a while; the others must be woken again.
        """
        now = self._now(k)
        owned, lent = atomic_load(k, owner + OWNED_UNTIL), atomic_load(k, core + LENT_UNTIL)
        with k.builder.if_else((owned > now).ir) as (wanted, idle):
            with wanted:
                self._give_back(k, core, loan)
                with k.when(caller.is_first):
                    # The owner wakes its borrowers when a run ends; a dead owner cannot, hence the timeout.
                    futex(k, owner + OWNED_UNTIL, FUTEX_WAIT, owned.ir, k.min(owned - now, LOAN_NS))
            with idle:
                with k.when(caller.is_first):
                    self._move(k, caller.gate, caller.value)
                until = now + LOAN_NS
                with k.builder.if_else(((lent <= now) | lent.equals(loan.value)).ir) as (available, borrowed):
                    with available:
                        previous = atomic_exchange(k, core + LENT_UNTIL, lent, until)
                        loan.value = k.select(previous.equals(lent), until, k.int(0))
                    with borrowed:
                        loan.value = k.int(0)
                        with k.when(caller.is_first):
                            k.builder.call(k.function("usleep", I32, [I32]), [I32(_TAKEN_NAP_US)])

    def _give_back(self, k: Kernel, core: Ptr, loan: KernelVariable) -> None:
        """Return the core, if this thread has borrowed it."""
        with k.when(loan.value > 0):
            # If the loan has expired, another borrower may have the core.
            atomic_exchange(k, core + LENT_UNTIL, loan.value, k.int(0))
            loan.value = k.int(0)

    def _keep_cores(self, k: Kernel, lending_table: Int, time_ns: int) -> None:
        """Claim the worker's cores for the next ``time_ns``."""
        k.store_int(Ptr(k, lending_table.ir) + OWNED_UNTIL, self._now(k) + time_ns)

    def run(self, work: Any) -> None:
        """Emit run(pool, program, entries, step), the leader's part of a step. Negative ``entries`` stop the
        helpers."""
        with self._function(RUN, 4, I64) as (_, k, (pool_address, program, entries, step)):
            b, pool = k.builder, Ptr(k, pool_address)
            base = atomic_load(k, pool + GATE) + 1
            for word, value in ((PROGRAM, program), (ENTRIES, entries), (STEP, step), (BASE, base.ir)):
                k.store_int(pool + word, Int(k, value))
            counters = Ptr(k, k.load_int(pool + COUNTERS).ir)
            with k.range(Int(k, entries)) as index:
                for offset in (0, _DRAWN, _DONE):
                    k.store_int(counters + (index * COUNTER_STRIDE + offset), 0)
            stopping = Int(k, entries) < 0
            with b.if_else(stopping.ir) as (stop, go):
                with stop:
                    atomic_swap(k, pool + (DOOR + _STOP), 1)
                with go:
                    atomic_swap(k, pool + (DOOR + OPEN), 1)
            self._move(k, pool + GATE, base)
            with k.when(stopping):
                b.ret(I64(0))
            before = self._set_arithmetic(k)
            scratch = k.load_int(pool + (FIRST_THREAD_LINE + SCRATCH))
            b.call(work, [pool.ir, scratch.ir, I64(_ThreadRole.LEADER)])
            self._set_arithmetic(k, before)
            atomic_swap(k, pool + (DOOR + OPEN), 0)
            with k.range(k.load_int(pool + THREADS), 1) as thread:
                self._wait_until_out(k, pool + thread * LINE_BYTES + FIRST_THREAD_LINE)
            lending_table = k.load_int(pool + LENDING_TABLE)
            with k.when(lending_table > 0):
                self._keep_cores(k, lending_table, LINGER_NS)
                futex(k, Ptr(k, lending_table.ir) + OWNED_UNTIL, FUTEX_WAKE, I64(ALL_SLEEPERS))

    def _wait_until_out(self, k: Kernel, line: Ptr) -> None:
        """Wait until the helper whose line this is is not ACTIVE."""
        polls = k.variable(k.int(0))
        with k.forever() as out:
            k.break_if(out, atomic_load(k, line + ACTIVE).equals(0))
            polls.value = polls.value + 1
            with k.builder.if_else((polls.value < POLLS).ir) as (soon, late):
                with soon:
                    pause(k)
                with late:
                    k.builder.call(k.function("usleep", I32, [I32]), [I32(_NAP_US)])

    def _move(self, k: Kernel, gate: Ptr, value: Int) -> None:
        """Raise a gate to at least ``value``, and wake its sleepers."""
        atomic_raise(k, gate + _VALUE, value)
        with k.when(atomic_load(k, gate + _SLEEPERS) > 0):
            futex(k, gate + _VALUE, FUTEX_WAKE | PRIVATE, I64(ALL_SLEEPERS))

    def _now(self, k: Kernel) -> Int:
        """Return the nanoseconds of a clock common to all processes of the host."""
        at = time_cell(k)
        k.builder.call(k.function("clock_gettime", I32, [I32, I64]), [I32(CLOCK_MONOTONIC), at.ir])
        return k.load_int(at) * NS_PER_S + k.load_int(at + 8)

    def _set_arithmetic(self, k: Kernel, value: Any = None) -> Any:
        """Set this thread's floating-point state to ``value``, or by default to rounding to nearest, with denormals and
        without traps; return the previous state.

        Libraries change the state of threads that call them (denormals to zero, for instance), and a result must not
        depend on the thread that computed it.
        """
        b = k.builder
        if self.isa.machine == "x86_64":
            cell = b.alloca(I32)
            kind = [I8.as_pointer()]
            raw = b.bitcast(cell, kind[0])
            b.call(k.function("llvm.x86.sse.stmxcsr", ir.VoidType(), kind), [raw])
            before = b.load(cell)
            b.store(I32(0x1F80) if value is None else value, cell)
            b.call(k.function("llvm.x86.sse.ldmxcsr", ir.VoidType(), kind), [raw])
            return before
        before = b.call(k.function("llvm.aarch64.get.fpcr", I64, []), [])
        b.call(k.function("llvm.aarch64.set.fpcr", ir.VoidType(), [I64]), [I64(0) if value is None else value])
        return before
