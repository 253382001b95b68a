"""A set of kernels that are compiled together, and the arguments of a kernel's call.

Every kernel has the same signature, ``kernel(args, step, counter, scratch, thread, threads)``: its own record, the
step's record, a counter that is 0 when the thread pool begins the kernel, scratch memory private to this call, the
index of this call, and the number of calls. A kernel is called once per thread of the pool; the calls share its work by
drawing from the counter (:meth:`KernelCall.shared_range`) or by an even division (:meth:`KernelCall.even_share`). Calls
run concurrently or one after another (:mod:`pillion.kernels.cpu.runtime.thread_pool_code`): a call never waits for
another, and a kernel's result never depends on which call computed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar

from llvmlite import ir

from pillion.kernels.cpu.language.emit import I64, Int, Kernel, Ptr
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.records import STEP, RecordLayout, RecordView

SIGNATURE = ir.FunctionType(ir.VoidType(), [I64] * 6)
# Counters are a cache line apart, to avoid false sharing.
COUNTER_BYTES = 64
# Scratch memory per thread.
SCRATCH_BYTES = 2**22
# Symbol of the fault cell in compiled code.
FAULT_CELL = "fault_cell"


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Arguments of one call of a kernel, as its code sees them."""

    k: Kernel
    args: RecordView
    step: RecordView
    counter: Ptr
    scratch: Ptr
    thread: Int
    threads: Int

    @contextmanager
    def shared_range(self, count: Int, chunk: Int | int) -> Iterator[tuple[Int, Int]]:
        """Append a loop over the ranges of ``chunk`` numbers of 0 .. count that this call draws, and yield a range
        (begin, end). At most once per kernel."""
        k = self.k
        with k.forever() as end:
            begin = k.fetch_add(self.counter, chunk)
            k.break_if(end, begin >= count)
            yield begin, k.min(begin + chunk, count)

    @contextmanager
    def items_ahead(self, count: Int, chunk: Int) -> Iterator[tuple[Int, Int]]:
        """Append a loop over the work items of 0 .. count that this call draws, ``chunk`` at a time; yield an item and
        the one after it, whose memory may be prefetched. At most once per kernel."""
        k = self.k
        chunk = k.max(chunk, 1)
        # The next range is drawn before this one is processed, so that its first item can be prefetched.
        drawn = k.variable(k.fetch_add(self.counter, chunk))
        with k.forever() as done:
            begin = drawn.value
            k.break_if(done, begin >= count)
            following = k.fetch_add(self.counter, chunk)
            drawn.value = following
            end = k.min(begin + chunk, count)
            with k.range(end, begin) as item:
                after = k.select(item + 1 < end, item + 1, following)
                # The last item counts as its own successor: nothing is left to prefetch.
                yield item, k.select(after < count, after, item)

    @contextmanager
    def even_share(self, count: Int) -> Iterator[Int]:
        """Append a loop over this call's even share of 0 .. count, and yield its index."""
        begin, end = count * self.thread // self.threads, count * (self.thread + 1) // self.threads
        with self.k.range(end, begin) as index:
            yield index


class KernelSpec:
    """Base of kernels: a frozen dataclass of parameters, and the layout of the argument record. Equal specs are one
    kernel."""

    __slots__ = ()
    layout: ClassVar[RecordLayout]

    @property
    def name(self) -> str:
        """Name made of the kernel and every parameter: specs with equal names are equal."""
        parts = [self.layout.name]
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            parts += [field.name] * value if isinstance(value, bool) else [getattr(value, "name", str(value))]
        return "_".join(filter(None, parts))

    def emit(self, call: KernelCall) -> None:
        """Append the kernel's instructions to ``call.k``."""
        raise NotImplementedError


class KernelModule:
    """An LLVM module of kernels; :mod:`pillion.kernels.cpu.runtime.compiler` compiles it to machine code."""

    def __init__(self, isa: Isa, checked: bool = False) -> None:
        self.isa = isa
        self.checked = checked
        self.module = ir.Module("pillion")
        self.names: list[str] = []
        # Checked mode: a word for the address of the faulting kernel, one for the access's offset, and a cache line
        # that out-of-bounds accesses are redirected to.
        self._fault = ir.GlobalVariable(self.module, ir.ArrayType(ir.IntType(8), 3 * 64), FAULT_CELL)
        self._fault.align = 64

    def define_fault_cell(self) -> None:
        """Define the fault cell in this module; exactly one of the modules loaded together does."""
        self._fault.initializer = ir.Constant(self._fault.value_type, None)

    def add(self, spec: KernelSpec) -> None:
        """Emit the kernel of ``spec``, unless the module has a kernel of that name."""
        name, layout = spec.name, spec.layout
        if name in self.names:
            return
        function = ir.Function(self.module, SIGNATURE, name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        fault = builder.ptrtoint(self._fault, I64) if self.checked else None
        k = Kernel(builder, self.isa, fault, builder.ptrtoint(function, I64) if self.checked else None)
        raw_args, raw_step, raw_counter, raw_scratch, thread, threads = function.args
        call = KernelCall(
            k,
            RecordView(layout, k, self._memory(k, raw_args, 8 * layout.num_words)),
            RecordView(STEP, k, self._memory(k, raw_step, 8 * STEP.num_words)),
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
        return Ptr(k, address, address, k.builder.add(address, I64(size)))
