"""The code of the thread team, in the kernels' own language: how threads wait, meet, and walk a program.

Everything is in one piece of memory, :class:`kernels.cpu.team.Team`'s; offsets below are bytes in it. A gate is a word
that only grows, and the number of threads that sleep until it does. Waiting at a gate goes from cheap and fast to slow
and gentle: look again and again, then give the processor to whoever wants it, then sleep in the kernel (futex). The
last step is what lets two teams share the same cores, and what makes an idle team cost nothing.

The futex wait compares the word once more under the kernel's lock, and the opener of a gate counts sleepers after it
has changed the word, both in sequentially consistent order: so no wake-up can be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from kernels.cpu.emit import Kernel
from kernels.cpu.isa import Isa
from kernels.cpu.module import COUNTER_BYTES, SIGNATURE
from kernels.cpu.values import Int, Ptr

# A program is a table of entries: address of the kernel, address of its arguments, the word of the step's record that
# has to be above 0 for the kernel to run (-1: it always runs), and a word that the owner may use.
ENTRY_WORDS = 4
_ENTRY_BYTES = 8 * ENTRY_WORDS

# The team's memory. Words that different threads write lie in different lines.
LINE_BYTES = 64
PROGRAM, ENTRIES, STEP, COUNTERS, THREADS, STOP = (8 * word for word in range(6))
START_GATE, MEETING_GATE, ARRIVALS, FIRST_THREAD_LINE = (LINE_BYTES * line for line in range(1, 5))
# In the line of a thread.
TEAM, THREAD, SCRATCH = 0, 8, 16
# In a gate.
_VALUE, _SLEEPERS = 0, 8

# How long a thread looks before it yields, and how often it yields before it sleeps. A look with its pause takes
# 10 to 50 ns, a yield that nobody takes about 0.3 us.
MEETING_LOOKS = 2_000
MEETING_YIELDS = 400
# A team whose next step does not come within some 50 us goes to sleep.
START_LOOKS = 2_000
START_YIELDS = 20

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
    meet = code.meet(wait)
    walk = code.walk(meet)
    code.main(wait, walk)
    code.run(walk)


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
        """wait(gate, old, looks, yields): returns when the gate's value is above ``old``."""
        with self._function("team_wait", 4) as (function, k, (gate_address, old_value, looks, yields)):
            b, gate, old = k.builder, Ptr(k, gate_address), Int(k, old_value)

            def return_if_open() -> None:
                with k.when(self._look(k, gate) > old):
                    b.ret_void()

            with k.range(Int(k, looks)):
                return_if_open()
                self._pause(k)
            with k.range(Int(k, yields)):
                return_if_open()
                b.call(k.function("sched_yield", _I32, []), [])
            with k.forever():
                return_if_open()
                self._add(k, gate + _SLEEPERS, 1)
                self._futex(k, gate + _VALUE, _FUTEX_WAIT_PRIVATE, old.ir)
                self._add(k, gate + _SLEEPERS, -1)
        return function

    def meet(self, wait: Any) -> Any:
        """meet(team, threads): returns when all threads have called it."""
        with self._function("team_meet", 2) as (function, k, (team_address, threads)):
            b, team = k.builder, Ptr(k, team_address)
            gate = team + MEETING_GATE
            old = self._look(k, gate)
            last = self._add(k, team + ARRIVALS, 1).equals(Int(k, threads) - 1)
            with b.if_else(last.ir) as (everyone_is_here, others_are_missing):
                with everyone_is_here:
                    k.store_int(team + ARRIVALS, 0)
                    self._open(k, gate)
                with others_are_missing:
                    b.call(wait, [gate.ir, old.ir, _I64(MEETING_LOOKS), _I64(MEETING_YIELDS)])
        return function

    def walk(self, meet: Any) -> Any:
        """walk(team, thread, scratch): runs the program, as one of the threads.

        All threads meet behind every kernel that ran, and once more at the end: whoever returns knows that nobody
        reads the program, the step or the counters any more.
        """
        with self._function("team_walk", 3) as (function, k, (team_address, thread, scratch)):
            b, team = k.builder, Ptr(k, team_address)
            program, entries, step, counters, threads = (
                k.load_int(team + place) for place in (PROGRAM, ENTRIES, STEP, COUNTERS, THREADS)
            )
            with k.range(entries) as index:
                entry = Ptr(k, program.ir) + index * _ENTRY_BYTES
                kernel, args, condition = (k.load_int(entry + 8 * word) for word in range(3))
                wanted = k.load_int(Ptr(k, step.ir) + k.most(condition, 0) * 8) > 0
                with k.when((condition < 0) | wanted):
                    counter = counters + index * COUNTER_BYTES
                    pointer = b.inttoptr(kernel.ir, SIGNATURE.as_pointer())
                    b.call(pointer, [args.ir, step.ir, counter.ir, scratch, thread, threads.ir])
                    b.call(meet, [team.ir, threads.ir])
            b.call(meet, [team.ir, threads.ir])
        return function

    def main(self, wait: Any, walk: Any) -> None:
        """main(thread line): walks once for each opening of the start gate, until told to stop."""
        with self._function(MAIN, 1, _I64) as (_, k, (line_address,)):
            b, line = k.builder, Ptr(k, line_address)
            team_address, thread, scratch = (k.load_int(line + place) for place in (TEAM, THREAD, SCRATCH))
            team = Ptr(k, team_address.ir)
            self._set_arithmetic(k)
            seen = k.variable(k.int(0))
            with k.forever() as end:
                b.call(wait, [(team + START_GATE).ir, seen.value.ir, _I64(START_LOOKS), _I64(START_YIELDS)])
                seen.value = seen.value + 1
                k.leave(end, k.load_int(team + STOP) > 0)
                b.call(walk, [team.ir, thread.ir, scratch.ir])

    def run(self, walk: Any) -> None:
        """run(team, program, entries, step): the leader's part of a step. Fewer than 0 entries end the helpers."""
        with self._function(RUN, 4, _I64) as (_, k, (team_address, program, entries, step)):
            b, team = k.builder, Ptr(k, team_address)
            for place, value in ((PROGRAM, program), (ENTRIES, entries), (STEP, step)):
                k.store_int(team + place, Int(k, value))
            counters = Ptr(k, k.load_int(team + COUNTERS).ir)
            with k.range(Int(k, entries)) as index:
                k.store_int(counters + index * COUNTER_BYTES, 0)
            stopping = Int(k, entries) < 0
            with k.when(stopping):
                k.store_int(team + STOP, 1)
            self._open(k, team + START_GATE)
            with k.when(stopping):
                b.ret(_I64(0))
            before = self._set_arithmetic(k)
            scratch = k.load_int(team + (FIRST_THREAD_LINE + SCRATCH))
            b.call(walk, [team.ir, _I64(0), scratch.ir])
            self._set_arithmetic(k, before)

    # -- what the language of the kernels does not have

    def _look(self, k: Kernel, gate: Ptr) -> Int:
        word = k.builder.inttoptr((gate + _VALUE).ir, _I64.as_pointer())
        return Int(k, k.builder.load_atomic(word, "seq_cst", 8))

    def _add(self, k: Kernel, ptr: Ptr, amount: int) -> Int:
        word = k.builder.inttoptr(ptr.ir, _I64.as_pointer())
        return Int(k, k.builder.atomic_rmw("add", word, _I64(amount), "seq_cst"))

    def _open(self, k: Kernel, gate: Ptr) -> None:
        self._add(k, gate + _VALUE, 1)
        sleepers = k.builder.load_atomic(k.builder.inttoptr((gate + _SLEEPERS).ir, _I64.as_pointer()), "seq_cst", 8)
        with k.when(Int(k, sleepers) > 0):
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
