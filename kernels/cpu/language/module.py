"""A set of kernels that are compiled together, and what a kernel is given when it runs.

Every kernel has the same signature, ``kernel(args, step, counter, scratch, thread, threads)``: its own record, the
step's record, a counter that is 0 when the team begins with it, scratch memory that is this call's alone while it
lasts, and which thread of how many this is. It is called once for each thread's number, and the calls share its work by
taking numbers from the counter (:meth:`Call.shared_range`) or by an even cut (:meth:`Call.even_range`). They run at the
same time or one after another (:mod:`pillion.kernels.cpu.program.thread_pool_code`), so a call never waits for
another, and what a kernel
computes never depends on which call computed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir

from pillion.kernels.cpu.language.emit import Kernel
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.records import STEP, Layout, View
from pillion.kernels.cpu.language.values import Int, Ptr

_I64 = ir.IntType(64)
SIGNATURE = ir.FunctionType(ir.VoidType(), [_I64] * 6)
# The counter of an operation has a line of its own, so that threads meet on it and on nothing else.
COUNTER_BYTES = 64
# Scratch of each thread.
SCRATCH_BYTES = 2**20
# What the fault cell is called in the compiled code.
FAULT_CELL = "fault_cell"


@dataclass(frozen=True, slots=True)
class Call:
    """What one thread knows while it runs a kernel."""

    k: Kernel
    args: View
    step: View
    counter: Ptr
    scratch: Ptr
    thread: Int
    threads: Int

    @contextmanager
    def shared_range(self, count: Int, chunk: Int | int) -> Iterator[tuple[Int, Int]]:
        """Pieces (begin, end) of 0 .. count, each of ``chunk``, taken by whoever is free. At most once per kernel."""
        k = self.k
        with k.forever() as behind:
            begin = k.fetch_add(self.counter, chunk)
            k.leave(behind, begin >= count)
            yield begin, k.least(begin + chunk, count)

    def even_range(self, count: Int) -> tuple[Int, Int]:
        """This thread's part of 0 .. count."""
        return count * self.thread // self.threads, count * (self.thread + 1) // self.threads


class KernelSpec(Protocol):
    """What a kernel is made from: a frozen dataclass of its parameters. Equal specs are one kernel."""

    @property
    def name(self) -> str:
        """Names the kernel and every parameter, so that two specs of one name are equal."""

    @property
    def layout(self) -> Layout:
        """Of its record."""

    def emit(self, call: Call) -> None:
        """Writes its instructions."""


class KernelModule:
    """Collects kernels; :mod:`pillion.kernels.cpu.language.compiler` makes machine code of them."""

    def __init__(self, isa: Isa, checked: bool = False) -> None:
        self.isa = isa
        self.checked = checked
        self.module = ir.Module("pillion")
        self.names: list[str] = []
        # Two words that say which kernel strayed and where to, then a line that strays may use (checked mode).
        self._fault = ir.GlobalVariable(self.module, ir.ArrayType(ir.IntType(8), 3 * 64), FAULT_CELL)
        self._fault.initializer = ir.Constant(self._fault.value_type, None)
        self._fault.align = 64

    def add(self, spec: KernelSpec) -> None:
        """Writes a kernel, once; a spec of a name that is here already is left out."""
        name, layout = spec.name, spec.layout
        if name in self.names:
            return
        function = ir.Function(self.module, SIGNATURE, name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        fault = builder.ptrtoint(self._fault, _I64) if self.checked else None
        k = Kernel(builder, self.isa, fault, len(self.names) + 1)
        raw_args, raw_step, raw_counter, raw_scratch, thread, threads = function.args
        call = Call(
            k,
            layout.view(k, self._memory(k, raw_args, 8 * layout.num_words)),
            STEP.view(k, self._memory(k, raw_step, 8 * STEP.num_words)),
            self._memory(k, raw_counter, COUNTER_BYTES),
            self._memory(k, raw_scratch, SCRATCH_BYTES),
            Int(k, thread),
            Int(k, threads),
        )
        spec.emit(call)
        k.builder.ret_void()
        self.names.append(name)

    def _memory(self, k: Kernel, address: ir.Value, size: int) -> Ptr:
        if not self.checked:
            return Ptr(k, address)
        return Ptr(k, address, address, k.builder.add(address, _I64(size)))
