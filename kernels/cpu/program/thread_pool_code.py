"""The code of the thread team, in the kernels' own language: how threads share out a program, and how they wait.

Each entry of a program is cut into as many tickets as the team has threads. A thread takes a ticket, calls the kernel
with the ticket's number, and takes the next; who finishes the last one moves the gate on to the next entry. So nobody
is waited for who did not begin: where a helper still sleeps or other processes hold its core, the leader does the work
of all. Results cannot tell, because kernels give the same bits whoever calls them.

The gate is a word that only grows: BASE of the run + the first entry that is not finished. Helpers wait at the gate;
when it moves they join at the entry that it says, and leave when no ticket is left. While they are in, their line says
ACTIVE; a run ends by closing the door (OPEN = 0) and seeing that all are out. Then nobody looks at the program, the
step and the counters any more. Door and line are changed and read in sequentially consistent order: whoever goes in
and finds the door open is seen by the leader.

Waiting is looking for a while, then sleeping in the kernel (futex), so an idle team costs nothing and two teams can
share the same cores. There is no sched_yield: Linux takes a whole time slice away from who calls it. No wake-up is
lost: the futex compares the word once more under a lock, and who moves the gate counts sleepers after moving it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.emit import Kernel
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.module import COUNTER_BYTES, SIGNATURE
from pillion.kernels.cpu.language.values import Bool, Int, Ptr

# A program is a table of entries: address of the kernel, address of its arguments, the word of the step's record that
# has to be above 0 for the kernel to run (-1: it always runs), and a word that the owner may use.
ENTRY_WORDS = 4
_ENTRY_BYTES = 8 * ENTRY_WORDS

# The team's memory. Words that different threads write lie in different lines.
LINE_BYTES = 64
PROGRAM, ENTRIES, STEP, COUNTERS, THREADS, BASE = (8 * word for word in range(6))
GATE, DOOR, FIRST_THREAD_LINE = LINE_BYTES, 2 * LINE_BYTES, 3 * LINE_BYTES
# In the gate; in the line of the door; in the line of a thread.
_VALUE, _SLEEPERS = 0, 8
OPEN, _STOP = 0, 8
TEAM, SCRATCH, ACTIVE = 0, 8, 16
# For each entry: the kernel's own counter, then a line for the tickets taken and for those done.
_TICKETS, _DONE = COUNTER_BYTES, COUNTER_BYTES + 8
COUNTER_STRIDE = COUNTER_BYTES + LINE_BYTES

# How often a thread looks before it sleeps. A look with its pause takes 10 to 50 ns, so this is some 100 us: about what
# sleeping and waking up take, and longer than the last pieces of a kernel keep the others waiting.
LOOKS = 4_000
# The leader's sleep while a helper that does nothing any more is kept from saying so.
_NAP_US = 50

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_ALL = 2**31 - 1
# Round to nearest, denormals kept, nothing trapped.
_PLAIN_MXCSR, _PLAIN_FPCR = 0x1F80, 0

_I32, _I64 = ir.IntType(32), ir.IntType(64)


# Called from outside: team_run(team, program, entries, step) by the leader, team_main(thread's line) by a new helper.
TEAM_FUNCTIONS = RUN, MAIN = "team_run", "team_main"


def add_team(module: ir.Module, isa: Isa) -> None:
    """Writes the team's functions."""
    code = _TeamCode(module, isa)
    wait = code.wait()
    work = code.work(wait)
    code.main(wait, work)
    code.run(work)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is read once of a run, by who works on it."""

    k: Kernel
    gate: Ptr
    program: Int
    entries: Int
    step: Int
    counters: Int
    threads: Int
    base: Int

    def wants(self, condition: Int) -> Bool:
        """Whether an entry with this condition runs."""
        number = self.k.load_int(Ptr(self.k, self.step.ir) + self.k.most(condition, 0) * 8)
        return (condition < 0) | (number > 0)


@dataclass(frozen=True, slots=True)
class _TeamCode:
    module: ir.Module
    isa: Isa

    @contextmanager
    def _function(self, name: str, num_args: int, result: Any = None) -> Iterator[tuple[Any, Kernel, list[Any]]]:
        kind = ir.FunctionType(result or ir.VoidType(), [_I64] * num_args)
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

    def wait(self) -> Any:
        """wait(gate, old): returns when the gate's value is above ``old``."""
        with self._function("team_wait", 2) as (function, k, (gate_address, old_value)):
            b, gate, old = k.builder, Ptr(k, gate_address), Int(k, old_value)

            def return_if_moved() -> None:
                with k.when(self._look(k, gate + _VALUE) > old):
                    b.ret_void()

            with k.range(LOOKS):
                return_if_moved()
                self._pause(k)
            with k.forever():
                now = self._look(k, gate + _VALUE)
                with k.when(now > old):
                    b.ret_void()
                self._add(k, gate + _SLEEPERS, 1)
                self._futex(k, gate + _VALUE, _FUTEX_WAIT_PRIVATE, now.ir)
                self._add(k, gate + _SLEEPERS, -1)
        return function

    def work(self, wait: Any) -> Any:
        """work(team, scratch, leads): takes tickets from the first unfinished entry on.

        A helper returns when there are none, the leader when the program is finished.
        """
        with self._function("team_work", 3) as (function, k, (team_address, scratch, leads)):
            b, team = k.builder, Ptr(k, team_address)
            places = (PROGRAM, ENTRIES, STEP, COUNTERS, THREADS, BASE)
            run = _Run(k, team + GATE, *(k.load_int(team + place) for place in places))
            # One below 0 where the leader has opened the door and not yet moved the gate.
            position = k.variable(k.most(self._look(k, run.gate) - run.base, 0))
            with k.forever() as end:
                index = position.value
                k.leave(end, index >= run.entries)
                entry = Ptr(k, run.program.ir) + index * _ENTRY_BYTES
                kernel, args, condition = (k.load_int(entry + 8 * word) for word in range(3))
                with b.if_else(run.wants(condition).ir) as (wanted, skipped):
                    with wanted:
                        self._take_tickets(run, index, kernel, [args.ir, run.step.ir], scratch)
                        with k.when(self._look(k, run.gate) <= run.base + index):
                            with k.when(Int(k, leads).equals(0)):
                                b.ret_void()
                            b.call(wait, [run.gate.ir, (run.base + index).ir])
                        position.value = self._look(k, run.gate) - run.base
                    with skipped:
                        position.value = index + 1
        return function

    def _take_tickets(self, run: _Run, index: Int, kernel: Int, front: list[Any], scratch: Any) -> None:
        k, b = run.k, run.k.builder
        counter = Ptr(k, (run.counters + index * COUNTER_STRIDE).ir)
        function = b.inttoptr(kernel.ir, SIGNATURE.as_pointer())
        with k.forever() as none_left:
            ticket = self._add(k, counter + _TICKETS, 1)
            k.leave(none_left, ticket >= run.threads)
            b.call(function, [*front, counter.ir, scratch, ticket.ir, run.threads.ir])
            done = self._add(k, counter + _DONE, 1) + 1
            with k.when(done.equals(run.threads)):
                self._move(k, run.gate, run.base + index + 1)
            k.leave(none_left, (ticket + 1).equals(run.threads))

    def main(self, wait: Any, work: Any) -> None:
        """main(thread line): a helper's life."""
        with self._function(MAIN, 1, _I64) as (_, k, (line_address,)):
            b, line = k.builder, Ptr(k, line_address)
            team_address, scratch = (k.load_int(line + place) for place in (TEAM, SCRATCH))
            team = Ptr(k, team_address.ir)
            self._set_arithmetic(k)
            seen = k.variable(k.int(0))
            with k.forever() as end:
                b.call(wait, [(team + GATE).ir, seen.value.ir])
                seen.value = self._look(k, team + GATE)
                k.leave(end, self._look(k, team + (DOOR + _STOP)) > 0)
                self._swap(k, line + ACTIVE, 1)
                with k.when(self._look(k, team + (DOOR + OPEN)) > 0):
                    b.call(work, [team.ir, scratch.ir, _I64(0)])
                self._swap(k, line + ACTIVE, 0)

    def run(self, work: Any) -> None:
        """run(team, program, entries, step): the leader's part of a step. Fewer than 0 entries end the helpers."""
        with self._function(RUN, 4, _I64) as (_, k, (team_address, program, entries, step)):
            b, team = k.builder, Ptr(k, team_address)
            base = self._look(k, team + GATE) + 1
            for place, value in ((PROGRAM, program), (ENTRIES, entries), (STEP, step), (BASE, base.ir)):
                k.store_int(team + place, Int(k, value))
            counters = Ptr(k, k.load_int(team + COUNTERS).ir)
            with k.range(Int(k, entries)) as index:
                for word in (0, _TICKETS, _DONE):
                    k.store_int(counters + (index * COUNTER_STRIDE + word), 0)
            stopping = Int(k, entries) < 0
            with b.if_else(stopping.ir) as (stop, go):
                with stop:
                    self._swap(k, team + (DOOR + _STOP), 1)
                with go:
                    self._swap(k, team + (DOOR + OPEN), 1)
            self._move(k, team + GATE, base)
            with k.when(stopping):
                b.ret(_I64(0))
            before = self._set_arithmetic(k)
            scratch = k.load_int(team + (FIRST_THREAD_LINE + SCRATCH))
            b.call(work, [team.ir, scratch.ir, _I64(1)])
            self._set_arithmetic(k, before)
            self._swap(k, team + (DOOR + OPEN), 0)
            with k.range(k.load_int(team + THREADS), 1) as thread:
                self._until_out(k, team + thread * LINE_BYTES + FIRST_THREAD_LINE)

    def _until_out(self, k: Kernel, line: Ptr) -> None:
        looks = k.variable(k.int(0))
        looks.value = k.int(0)
        with k.forever() as out:
            k.leave(out, self._look(k, line + ACTIVE).equals(0))
            looks.value = looks.value + 1
            with k.builder.if_else((looks.value < LOOKS).ir) as (soon, late):
                with soon:
                    self._pause(k)
                with late:
                    k.builder.call(k.function("usleep", _I32, [_I32]), [_I32(_NAP_US)])

    # -- what the language of the kernels does not have

    def _look(self, k: Kernel, ptr: Ptr) -> Int:
        return Int(k, k.builder.load_atomic(_word(k, ptr), "seq_cst", 8))

    def _add(self, k: Kernel, ptr: Ptr, amount: int) -> Int:
        return Int(k, k.builder.atomic_rmw("add", _word(k, ptr), _I64(amount), "seq_cst"))

    def _swap(self, k: Kernel, ptr: Ptr, value: Int | int) -> None:
        k.builder.atomic_rmw("xchg", _word(k, ptr), k.int(value).ir, "seq_cst")

    def _move(self, k: Kernel, gate: Ptr, value: Int) -> None:
        k.builder.atomic_rmw("max", _word(k, gate + _VALUE), value.ir, "seq_cst")
        with k.when(self._look(k, gate + _SLEEPERS) > 0):
            self._futex(k, gate + _VALUE, _FUTEX_WAKE_PRIVATE, _I64(_ALL))

    def _futex(self, k: Kernel, word: Ptr, operation: int, value: Any) -> None:
        """The kernel compares 32 bits: on little-endian machines the low ones of the word, which change first."""
        name = "syscall"
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(_I64, [_I64], var_arg=True), name)
        number = _I64(_FUTEX_CALL[self.isa.machine])
        k.builder.call(function, [number, word.ir, _I64(operation), value, _I64(0), _I64(0), _I64(0)])

    def _pause(self, k: Kernel) -> None:
        if self.isa.machine == "x86_64":
            k.builder.call(k.function("llvm.x86.sse2.pause", ir.VoidType(), []), [])
        else:
            # YIELD does nothing on most cores; an instruction barrier waits for some 10 ns.
            k.builder.call(k.function("llvm.aarch64.isb", ir.VoidType(), [_I32]), [_I32(15)])

    def _set_arithmetic(self, k: Kernel, value: Any = None) -> Any:
        """Sets how this thread rounds, to the plain way or to ``value``; gives how it was.

        Libraries change this for the threads they meet (denormals to zero, for one), and a result must not depend on
        the thread that computed it.
        """
        b = k.builder
        if self.isa.machine == "x86_64":
            cell = b.alloca(_I32)
            kind = [ir.IntType(8).as_pointer()]
            raw = b.bitcast(cell, kind[0])
            b.call(k.function("llvm.x86.sse.stmxcsr", ir.VoidType(), kind), [raw])
            before = b.load(cell)
            b.store(_I32(_PLAIN_MXCSR) if value is None else value, cell)
            b.call(k.function("llvm.x86.sse.ldmxcsr", ir.VoidType(), kind), [raw])
            return before
        before = b.call(k.function("llvm.aarch64.get.fpcr", _I64, []), [])
        b.call(
            k.function("llvm.aarch64.set.fpcr", ir.VoidType(), [_I64]), [_I64(_PLAIN_FPCR) if value is None else value]
        )
        return before


def _word(k: Kernel, ptr: Ptr) -> Any:
    return k.builder.inttoptr(ptr.ir, _I64.as_pointer())
