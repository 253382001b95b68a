"""The language of the CPU kernels: Python that writes LLVM IR, sixteen lanes at a time.

A kernel is a Python function that calls methods of a :class:`Kernel`; each call appends instructions. Values carry
their type, and their operators append instructions too:

    total = k.variable(k.vector(0.0))
    with k.range(count) as i:
        x = k.load(rows + i * VECTOR_BYTES)
        total.value = k.fma(x, x, total.value)

A vector has 16 lanes everywhere; LLVM cuts it into registers of the processor (one of AVX-512, two of AVX2, four of
NEON). Only the tile sizes (:mod:`pillion.kernels.cpu.language.isa`) and the bfloat16 product (:meth:`Kernel.dot`)
differ by processor.

In checked mode (``PILLION_CHECK_KERNELS=1``) every pointer has bounds: an access outside of them is recorded in the
fault cell and redirected to a dummy line. In fast mode a pointer is a bare address; before each run
:mod:`pillion.kernels.cpu.runtime.program` has checked that every access is in bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.isa import LANES, Isa

VECTOR_BYTES = 64

_I1, I8, _I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F32 = ir.FloatType()
VF, VI = ir.VectorType(_F32, LANES), ir.VectorType(I32, LANES)
# Sixteen lanes of 8 and 16 bits and of float16, and a vector's 32 words of 16 bits.
LANE_BYTES, LANE_WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (I8, _I16, ir.HalfType()))
WORDS = ir.VectorType(_I16, 2 * LANES)
# Python's int, which :meth:`Kernel.int` hides inside the class.
Count = int
LOG2E = 1.4426950408889634
# Taylor coefficients of 2**x up to the sixth power, highest first: exp2 on [-0.5, 0.5] is within 3e-7 of the true
# value.
_EXP2 = (1.5403530393381609e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2,
         2.402265069591007e-1, 6.931471805599453e-1, 1.0)  # fmt: skip
# 2**x on [0, 1) within a relative 8e-5, highest power first.
_EXP2_ROUGH = (7.802452e-2, 2.2606716e-1, 6.9583354e-1, 9.9992522e-1)
# Exponents below this one yield 0, so that the weight of a masked token is exactly 0.
_MIN_EXPONENT = -126.0
# Operands of AVX-512 intrinsics: a mask with a bit per lane; 4 for the rounding mode of MXCSR.
_LANE_BITS, _CURRENT_ROUNDING = ir.IntType(16), 4
_ALL_LANES = _LANE_BITS(0xFFFF)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()


@dataclass(frozen=True, slots=True)
class Bool:
    """A condition: one bit, or sixteen, one per lane."""

    k: Kernel
    ir: Any

    def __and__(self, other: Bool) -> Bool:
        return Bool(self.k, self.k.builder.and_(self.ir, other.ir))

    def __or__(self, other: Bool) -> Bool:
        return Bool(self.k, self.k.builder.or_(self.ir, other.ir))


def _integer(operation: str) -> Callable[[Int, Int | int], Int]:
    return lambda self, other: Int(self.k, getattr(self.k.builder, operation)(self.ir, self.k.int(other).ir))


def _integers_are(order: str) -> Callable[[Int, Int | int], Bool]:
    return lambda self, other: Bool(self.k, self.k.builder.icmp_signed(order, self.ir, self.k.int(other).ir))


@dataclass(frozen=True, slots=True)
class Int:
    """A signed 64-bit integer. ``//`` and ``%`` round towards 0; kernels divide only positive numbers."""

    k: Kernel
    ir: Any

    __add__ = __radd__ = _integer("add")
    __sub__ = _integer("sub")
    __mul__ = __rmul__ = _integer("mul")
    __floordiv__ = _integer("sdiv")
    __mod__ = _integer("srem")
    __and__ = _integer("and_")
    __lt__ = _integers_are("<")
    __le__ = _integers_are("<=")
    __gt__ = _integers_are(">")
    __ge__ = _integers_are(">=")
    # ``==`` stays Python's.
    equals = _integers_are("==")


def _real(operation: str) -> Callable[[Vec, Vec | float], Vec]:
    return lambda self, other: Vec(self.k, getattr(self.k.builder, operation)(self.ir, self.k.vector(other).ir))


def _reals_are(order: str) -> Callable[[Vec, Vec | float], Bool]:
    return lambda self, other: Bool(self.k, self.k.builder.fcmp_ordered(order, self.ir, self.k.vector(other).ir))


@dataclass(frozen=True, slots=True)
class Vec:
    """Sixteen float32 values. Comparisons are false in lanes with a NaN."""

    k: Kernel
    ir: Any

    __add__ = _real("fadd")
    __sub__ = _real("fsub")
    __mul__ = _real("fmul")
    __truediv__ = _real("fdiv")
    __lt__ = _reals_are("<")
    __gt__ = _reals_are(">")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sixteen pairs of bfloat16 values, a pair's first value in the low half of its 32 bits."""

    k: Kernel
    ir: Any


@dataclass(frozen=True, slots=True)
class Quads:
    """Sixteen lanes of 32 bits: integers, or four 8-bit codes each, the first in the lowest bits."""

    k: Kernel
    ir: Any

    def __add__(self, other: Quads) -> Quads:
        return Quads(self.k, self.k.builder.add(self.ir, other.ir))

    def __sub__(self, other: Quads) -> Quads:
        return Quads(self.k, self.k.builder.sub(self.ir, other.ir))

    def __mul__(self, other: Quads) -> Quads:
        return Quads(self.k, self.k.builder.mul(self.ir, other.ir))


@dataclass(frozen=True, slots=True)
class Ptr:
    """An address in bytes and, in checked mode, the bounds of its memory."""

    k: Kernel
    ir: Any
    begin: Any = None
    end: Any = None

    def __add__(self, offset: Int | int) -> Ptr:
        if isinstance(offset, int) and offset == 0:
            return self
        return Ptr(self.k, self.k.builder.add(self.ir, self.k.int(offset).ir), self.begin, self.end)


class KernelVariable:
    """A variable of a kernel; LLVM allocates it to a register."""

    def __init__(self, k: Kernel, value: Vec | Int | Pairs | Quads) -> None:
        self._k, self._kind = k, type(value)
        with k.builder.goto_entry_block():
            self._cell = k.builder.alloca(value.ir.type)
        k.builder.store(value.ir, self._cell)

    @property
    def value(self) -> Any:
        """The value assigned last."""
        return self._kind(self._k, self._k.builder.load(self._cell))

    @value.setter
    def value(self, value: Any) -> None:
        self._k.builder.store(value.ir, self._cell)


class Kernel:
    """A builder of one function, in which each call appends instructions."""

    def __init__(self, builder: ir.IRBuilder, isa: Isa, fault: Any = None, own_address: Any = None) -> None:
        """Begin a function. In checked mode ``fault`` is the fault cell's address (else None) and ``own_address`` this
        kernel's, recorded in the cell on an out-of-bounds access."""
        self.builder = builder
        self.isa = isa
        self._fault = fault
        self._own_address = own_address
        self._module = builder.module

    def int(self, value: Int | Count) -> Int:
        return value if isinstance(value, Int) else Int(self, I64(value))

    def vector(self, value: Vec | float) -> Vec:
        return value if isinstance(value, Vec) else Vec(self, ir.Constant(VF, [float(value)] * LANES))

    def real(self, value: Int) -> Vec:
        """Return an integer as float32 in all sixteen lanes."""
        return Vec(self, self.splat(self.builder.sitofp(value.ir, _F32)))

    def real_lanes(self, value: Quads) -> Vec:
        return Vec(self, self.builder.sitofp(value.ir, VF))

    def whole_lanes(self, value: Vec) -> Quads:
        """Convert integral values to 32-bit integers; they must fit."""
        return Quads(self, self.builder.fptosi(value.ir, VI))

    def below(self, start: Int, limit: Int) -> Bool:
        """Return the mask of lanes for which start + lane is below ``limit``, compared as 32-bit integers."""
        counted = ir.Constant(VI, list(range(LANES)))
        lanes = self.builder.add(counted, self.splat(self.builder.trunc(start.ir, I32)))
        bound = self.splat(self.builder.trunc(limit.ir, I32))
        return Bool(self, self.builder.icmp_signed("<", lanes, bound))

    def at_least(self, values: Quads, limit: Int) -> Bool:
        """Return the mask of lanes whose 32-bit integer is at least ``limit``, which may be 2**31."""
        wide = ir.VectorType(I64, LANES)
        return Bool(self, self.builder.icmp_signed(">=", self.builder.sext(values.ir, wide), self.splat(limit.ir)))

    def bits(self, condition: Bool) -> Int:
        """Return a mask's sixteen lanes as an integer, the first lane in the lowest bit."""
        return Int(self, self.builder.zext(self.builder.bitcast(condition.ir, _I16), I64))

    def lanes(self, bits: Int) -> Bool:
        """Return an integer's lowest sixteen bits as a mask of the lanes."""
        return Bool(self, self.builder.bitcast(self.builder.trunc(bits.ir, _I16), ir.VectorType(_I1, LANES)))

    def popcount(self, bits: Int) -> Int:
        return Int(self, self.builder.call(self.function("llvm.ctpop.i64", I64, [I64]), [bits.ir]))

    def sortable(self, value: Vec, valid: Bool) -> Quads:
        """Return integers that order like the values; the smallest integer in lanes that are not ``valid``."""
        b = self.builder
        raw = b.bitcast(value.ir, VI)
        ordered = b.xor(raw, b.and_(b.ashr(raw, int_lanes(31)), int_lanes(0x7FFFFFFF)))
        return Quads(self, b.select(valid.ir, ordered, int_lanes(-(2**31))))

    def min(self, a: Int, b: Int | Count) -> Int:
        b = self.int(b)
        return Int(self, self.builder.select((a < b).ir, a.ir, b.ir))

    def max(self, a: Int, b: Int | Count) -> Int:
        b = self.int(b)
        return Int(self, self.builder.select((a < b).ir, b.ir, a.ir))

    def select(self, condition: Bool, yes: Any, no: Any) -> Any:
        """Return ``yes`` where the condition holds, else ``no``, per lane or as a whole. Both have one type."""
        return type(yes)(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def variable(self, value: Vec | Int | Pairs | Quads) -> KernelVariable:
        """Return a variable with the initial value ``value``."""
        return KernelVariable(self, value)

    @contextmanager
    def range(self, end: Int | Count, begin: Int | Count = 0, step: Count = 1) -> Iterator[Int]:
        """Append a loop over begin, begin + step ... below end, and yield its index."""
        b, first, last = self.builder, self.int(begin).ir, self.int(end).ir
        before, body, after = b.block, b.append_basic_block("body"), b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", first, last), body, after)
        b.position_at_end(body)
        index = b.phi(I64)
        index.add_incoming(first, before)
        yield Int(self, index)
        following = b.add(index, I64(step))
        index.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, last), body, after)
        b.position_at_end(after)

    def cases(self, value: Int, count: Count) -> Iterator[Count]:
        """Append a switch; yield 1 .. ``count``, one per case: instructions appended after a number was yielded run if
        ``value`` equals it."""
        b = self.builder
        after, blocks = b.append_basic_block("after"), [b.append_basic_block("case") for _ in range(count)]
        choice = b.switch(value.ir, blocks[0])
        for number, block in enumerate(blocks, 1):
            if number > 1:
                choice.add_case(number, block)
            b.position_at_end(block)
            yield number
            b.branch(after)
        b.position_at_end(after)

    @contextmanager
    def forever(self) -> Iterator[Any]:
        """Append a loop that only :meth:`break_if` ends; yield the block after it, to pass to :meth:`break_if`."""
        b = self.builder
        body, after = b.append_basic_block("body"), b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        yield after
        b.branch(body)
        b.position_at_end(after)

    def break_if(self, after: Any, condition: Bool) -> None:
        """Break out of a :meth:`forever` loop, which yielded ``after``, if the condition holds."""
        following = self.builder.append_basic_block("next")
        self.builder.cbranch(condition.ir, after, following)
        self.builder.position_at_end(following)

    def when(self, condition: Bool) -> AbstractContextManager[Any]:
        """Return a context whose instructions run only if the condition holds."""
        return self.builder.if_then(condition.ir)  # type: ignore[no-any-return]

    def in_bounds(self, ptr: Ptr, size: Int | Count) -> Bool:
        """Return whether ``size`` bytes at ``ptr`` are in bounds, and record a fault if not. Always true in fast
        mode."""
        if self._fault is None:
            return Bool(self, _I1(1))
        assert ptr.begin is not None, "checked kernels need pointers with bounds"
        b = self.builder
        end = b.add(ptr.ir, self.int(size).ir)
        inside = b.and_(b.icmp_unsigned(">=", ptr.ir, ptr.begin), b.icmp_unsigned("<=", end, ptr.end))
        with b.if_then(b.not_(inside), likely=False):
            b.store(self._own_address, b.inttoptr(self._fault, I64.as_pointer()))
            b.store(b.sub(ptr.ir, ptr.begin), b.inttoptr(b.add(self._fault, I64(8)), I64.as_pointer()))
        return Bool(self, inside)

    def _checked(self, ptr: Ptr, size: Count) -> Any:
        if self._fault is None:
            return ptr.ir
        # Redirect out-of-bounds accesses to the line after the fault cell.
        dummy = self.builder.add(self._fault, I64(VECTOR_BYTES))
        return self.builder.select(self.in_bounds(ptr, size).ir, ptr.ir, dummy)

    def read(self, ptr: Ptr, kind: Any, align: Count) -> Any:
        """Load an LLVM value of type ``kind``."""
        size = _bytes_of(kind)
        loaded = self.builder.load(self.builder.inttoptr(self._checked(ptr, size), kind.as_pointer()))
        loaded.align = align
        return loaded

    def write(self, ptr: Ptr, value: Any, align: Count) -> None:
        size = _bytes_of(value.type)
        address = self.builder.inttoptr(self._checked(ptr, size), value.type.as_pointer())
        self.builder.store(value, address).align = align

    def load(self, ptr: Ptr) -> Vec:
        return Vec(self, self.read(ptr, VF, 4))

    def load_half(self, ptr: Ptr) -> Vec:
        """Load 16 float16 as float32."""
        halves = self.builder.bitcast(self.read(ptr, LANE_WORDS, 2), HALVES)
        return Vec(self, self.builder.fpext(halves, VF))

    def store(self, ptr: Ptr, value: Vec) -> None:
        """Store the 16 float32 of a vector."""
        self.write(ptr, value.ir, 4)

    def stream(self, ptr: Ptr, value: Vec) -> None:
        """Store 16 float32 at a multiple of 64 with a non-temporal store, which neither reads the line nor evicts
        another. Other threads see it after :meth:`store_fence`."""
        address = self.builder.inttoptr(self._checked(ptr, VECTOR_BYTES), VF.as_pointer())
        stored = self.builder.store(value.ir, address)
        stored.align = VECTOR_BYTES
        stored.set_metadata("nontemporal", self._module.add_metadata([I32(1)]))

    def store_fence(self) -> None:
        """Order the stores of :meth:`stream` before the stores that follow (SFENCE on x86)."""
        if self.isa.machine == "x86_64":
            self.builder.call(self.function("llvm.x86.sse.sfence", ir.VoidType(), []), [])

    def select_ptr(self, condition: Bool, yes: Ptr, no: Ptr) -> Ptr:
        """Return one of two pointers, with its bounds."""
        chosen = [
            None if one is None else self.builder.select(condition.ir, one, other)
            for one, other in ((yes.ir, no.ir), (yes.begin, no.begin), (yes.end, no.end))
        ]
        return Ptr(self, *chosen)

    def load_pairs(self, ptr: Ptr) -> Pairs:
        """Load 32 bfloat16 as 16 pairs."""
        return Pairs(self, self.read(ptr, VI, 4))

    def load_quads(self, ptr: Ptr) -> Quads:
        """Load 16 integers of 32 bits, or 64 codes."""
        return Quads(self, self.read(ptr, VI, 4))

    def store_quads(self, ptr: Ptr, value: Quads) -> None:
        """Store 16 integers of 32 bits."""
        self.write(ptr, value.ir, 4)

    def broadcast_quad(self, ptr: Ptr) -> Quads:
        """Load one 32-bit integer, or four codes, into all sixteen lanes."""
        return Quads(self, self.splat(self.read(ptr, I32, 4)))

    def load_float(self, ptr: Ptr, bf16: bool) -> Vec:
        """Load 16 values that are bfloat16 or float32 in memory, as float32."""
        if not bf16:
            return self.load(ptr)
        wide = self.builder.zext(self.read(ptr, LANE_WORDS, 2), VI)
        return Vec(self, self.builder.bitcast(self.builder.shl(wide, int_lanes(16)), VF))

    def store_float(self, ptr: Ptr, value: Vec, bf16: bool) -> None:
        """Store 16 values as bfloat16, rounded to nearest even, or as float32."""
        if bf16:
            self.write(ptr, self.to_bf16(value), 2)
        else:
            self.store(ptr, value)

    def copy(self, source: Ptr, target: Ptr, size: Int | Count) -> None:
        """Copy ``size`` bytes, a multiple of 64."""
        with self.range(size, step=VECTOR_BYTES) as at:
            self.store(target + at, self.load(source + at))

    def broadcast(self, ptr: Ptr) -> Vec:
        """Load one float32 into all sixteen lanes."""
        return Vec(self, self.splat(self.read(ptr, _F32, 4)))

    def broadcast_pair(self, ptr: Ptr) -> Pairs:
        """Load one pair of bfloat16 into all sixteen lanes."""
        return Pairs(self, self.splat(self.read(ptr, I32, 4)))

    def load_int(self, ptr: Ptr, bits: Count = 64) -> Int:
        """Load a signed integer of 8, 16, 32 or 64 bits."""
        raw = self.read(ptr, ir.IntType(bits), bits // 8)
        return Int(self, raw if bits == 64 else self.builder.sext(raw, I64))

    def store_int(self, ptr: Ptr, value: Int | Count, bits: Count = 64) -> None:
        """Store the low bits of an integer."""
        raw = self.int(value).ir
        self.write(ptr, raw if bits == 64 else self.builder.trunc(raw, ir.IntType(bits)), bits // 8)

    def load_ptr(self, ptr: Ptr) -> Ptr:
        """Load a pointer of a record: its address, then its accessible bytes."""
        address = self.read(ptr, I64, 8)
        if self._fault is None:
            return Ptr(self, address)
        return Ptr(self, address, address, self.builder.add(address, self.read(ptr + 8, I64, 8)))

    def prefetch(self, ptr: Ptr, near: bool = True) -> None:
        """Prefetch a line of 64 bytes into L1, or only into L2 if not ``near``; ``ptr`` may point anywhere."""
        function = self.function("llvm.prefetch.p0", ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        address = self.builder.inttoptr(ptr.ir, I8.as_pointer())
        self.builder.call(function, [address, I32(0), I32(3 if near else 1), I32(1)])

    def fetch_add(self, ptr: Ptr, amount: Int | Count) -> Int:
        """Add to a word atomically; return its previous value."""
        cell = self.builder.inttoptr(self._checked(ptr, 8), I64.as_pointer())
        return Int(self, self.builder.atomic_rmw("add", cell, self.int(amount).ir, "acq_rel"))

    def fma(self, a: Vec, b: Vec, c: Vec) -> Vec:
        """Return a * b + c, rounded once."""
        return Vec(self, self.builder.call(self.function("llvm.fma.v16f32", VF, [VF] * 3), [a.ir, b.ir, c.ir]))

    def dot(self, total: Vec, a: Pairs, b: Pairs) -> Vec:
        """Return ``total`` plus both products of each lane's pairs."""
        if self.isa.bf16_dot == "x86":
            wide = ir.VectorType(BFLOAT, 2 * LANES)
            function = self.function("llvm.x86.avx512bf16.dpbf16ps.512", VF, [VF, wide, wide])
            args = [total.ir, self.builder.bitcast(a.ir, wide), self.builder.bitcast(b.ir, wide)]
            return Vec(self, self.builder.call(function, args))
        return self.fma(self.high(a), self.high(b), self.fma(self.low(a), self.low(b), total))

    @property
    def code_bias(self) -> Count:
        """The bias of stored weight codes that remains in results of :meth:`dot_codes`."""
        return 0 if self.isa.int8_dot == "sdot" else 128

    def dot_codes(self, total: Quads, weights: Quads, x: Quads, *, small: bool = False) -> Quads:
        """Return ``total`` plus the dot product of each lane's four codes of both sides, exact modulo 2**32.

        Codes of ``x`` are signed, those of ``weights`` are stored with 128 added. The result is too large by
        :attr:`code_bias` times the sum of the lane's codes of ``x``, which callers subtract: most processors multiply
        unsigned by signed codes. ``small`` weight codes are 0 to 127, stored without a bias.
        """
        b, isa = self.builder, self.isa
        if isa.int8_dot == "vpdpbusd":
            wide = ir.VectorType(I32, LANES if "avx512f" in isa.needs else LANES // 2)
            dot = self.function(f"llvm.x86.avx512.vpdpbusd.{32 * wide.count}", wide, [wide] * 3)
            return Quads(self, self._in_parts(dot, (total.ir, weights.ir, x.ir)))
        if isa.int8_dot == "sdot":
            wide, codes = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
            dot = self.function("llvm.aarch64.neon.sdot.v4i32.v16i8", wide, [wide, codes, codes])
            signed = weights.ir if small else b.xor(weights.ir, int_lanes(-0x7F7F7F80))
            return Quads(self, self._in_parts(dot, (total.ir, signed, x.ir)))
        if isa.machine == "aarch64":
            for bit in range(0, 32, 8):
                first = b.and_(b.lshr(weights.ir, int_lanes(bit)), int_lanes(0xFF))
                second = b.ashr(b.shl(x.ir, int_lanes(24 - bit)), int_lanes(24))
                total = total + Quads(self, b.mul(first, second))
            return total
        wide, name = (ir.VectorType(I32, LANES), "avx512.pmaddw.d.512") if "avx512f" in isa.needs else (
            ir.VectorType(I32, LANES // 2), "avx2.pmadd.wd")  # fmt: skip
        halves = ir.VectorType(_I16, 2 * wide.count)
        multiply = self.function(f"llvm.x86.{name}", wide, [halves, halves])
        eight, low = (ir.Constant(WORDS, [value] * (2 * LANES)) for value in (8, 0xFF))
        first, second = b.bitcast(weights.ir, WORDS), b.bitcast(x.ir, WORDS)
        # Widened to 16 bits: even bytes first, then odd ones.
        even = b.and_(first, low), b.ashr(b.shl(second, eight), eight)
        odd = b.lshr(first, eight), b.ashr(second, eight)
        for pair in (even, odd):
            total = total + Quads(self, self._in_parts(multiply, tuple(b.bitcast(each, VI) for each in pair)))
        return total

    def table_lookup(self, indices: Quads, table: Sequence[Count]) -> Quads:
        """Look up each of the 64 bytes of ``indices``, all below 16, in a table of 16 bytes."""
        if self.isa.machine == "aarch64":
            name, wide = "aarch64.neon.tbl1.v16i8", ir.VectorType(I8, 16)
        elif "avx512f" in self.isa.needs:
            name, wide = "x86.avx512.pshuf.b.512", ir.VectorType(I8, 64)
        else:
            name, wide = "x86.avx2.pshuf.b", ir.VectorType(I8, 32)
        entries = self.builder.bitcast(ir.Constant(ir.VectorType(I8, 64), [*table] * 4), VI)
        return Quads(self, self._in_parts(self.function(f"llvm.{name}", wide, [wide, wide]), (entries, indices.ir)))

    def _in_parts(self, function: Any, values: Sequence[Any]) -> Any:
        """Call an LLVM function of narrower vectors for successive parts of the sixteen lanes; return the joined
        results."""
        b, part_lanes = self.builder, _bytes_of(function.function_type.return_type) // 4
        part = ir.VectorType(I32, part_lanes)
        results = []
        for first in range(0, LANES, part_lanes):
            order = ir.Constant(part, list(range(first, first + part_lanes)))
            parts = values if part_lanes == LANES else [b.shuffle_vector(each, each, order) for each in values]
            kinds = function.function_type.args
            called = b.call(function, [b.bitcast(one, kind) for one, kind in zip(parts, kinds, strict=True)])
            results.append(b.bitcast(called, part))
        while len(results) > 1:
            count = 2 * results[0].type.count
            order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
            results = [b.shuffle_vector(a, c, order) for a, c in zip(results[::2], results[1::2], strict=True)]
        return results[0]

    def pairs(self, low: Vec, high: Vec) -> Pairs:
        """Pack values that are exact in bfloat16 into pairs."""
        b = self.builder
        lower, upper = b.lshr(b.bitcast(low.ir, VI), int_lanes(16)), b.and_(b.bitcast(high.ir, VI), int_lanes(-65536))
        return Pairs(self, b.or_(lower, upper))

    def low(self, pairs: Pairs) -> Vec:
        """Return the first value of each pair as float32."""
        return Vec(self, self.builder.bitcast(self.builder.shl(pairs.ir, int_lanes(16)), VF))

    def high(self, pairs: Pairs) -> Vec:
        """Return the second value of each pair as float32."""
        return Vec(self, self.builder.bitcast(self.builder.and_(pairs.ir, int_lanes(-65536)), VF))

    def to_bf16(self, value: Vec) -> Any:
        """Return sixteen bfloat16 as 16-bit integers, rounded to nearest even."""
        b = self.builder
        if self.isa.bf16_dot == "x86":
            narrow = ir.VectorType(BFLOAT, LANES)
            function = self.function("llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, [VF])
            return b.bitcast(b.call(function, [value.ir]), LANE_WORDS)
        bits = b.bitcast(value.ir, VI)
        odd = b.and_(b.lshr(bits, int_lanes(16)), int_lanes(1))
        rounded = b.add(b.add(bits, odd), int_lanes(0x7FFF))
        # A NaN would round to infinity or zero: make it a quiet NaN of the same sign.
        unordered = b.fcmp_unordered("uno", value.ir, value.ir)
        result = b.select(unordered, b.or_(bits, int_lanes(0x00400000)), rounded)
        return b.trunc(b.lshr(result, int_lanes(16)), LANE_WORDS)

    def store_two(self, ptr: Ptr, first: Vec, second: Vec) -> None:
        """Store two vectors as 32 bfloat16, rounded to nearest even."""
        if self.isa.bf16_dot != "x86":
            for i, value in enumerate((first, second)):
                self.store_float(ptr + i * (VECTOR_BYTES // 2), value, True)
            return
        wide = ir.VectorType(BFLOAT, 2 * LANES)
        function = self.function("llvm.x86.avx512bf16.cvtne2ps2bf16.512", wide, [VF, VF])
        narrow = self.builder.call(function, [second.ir, first.ir])
        self.write(ptr, self.builder.bitcast(narrow, VI), 4)

    def cut_pairs(self, first: Vec, second: Vec) -> Pairs:
        """Return pairs of two vectors' lanes truncated to bfloat16. Needs AVX-512."""
        b = self.builder
        low, high = b.lshr(b.bitcast(first.ir, VI), int_lanes(16)), b.bitcast(second.ir, VI)
        # LLVM would turn a shift and an "or" into one permutation, which is slower than both.
        function = self.function("llvm.x86.avx512.pternlog.d.512", VI, [VI, VI, VI, I32])
        # Truth table of "the second operand's bit where the third's is set, else the first's".
        return Pairs(self, b.call(function, [low, high, int_lanes(-65536), I32(0xD8)]))

    def maximum(self, a: Vec, b: Vec | float) -> Vec:
        """Return the larger value per lane; b's if a is NaN."""
        return self.select(a > b, a, self.vector(b))  # type: ignore[no-any-return]

    def minimum(self, a: Vec, b: Vec | float) -> Vec:
        """Return the smaller value per lane; b's if a is NaN."""
        return self.select(a < b, a, self.vector(b))  # type: ignore[no-any-return]

    def maximum_abs(self, magnitude: Vec, value: Vec) -> Vec:
        """Return max(magnitude, abs(value)) per lane; ``magnitude`` is not negative. NaN exceeds all numbers."""
        b = self.builder
        a, c = b.bitcast(magnitude.ir, VI), b.and_(b.bitcast(value.ir, VI), int_lanes(0x7FFFFFFF))
        return Vec(self, b.bitcast(b.select(b.icmp_signed(">", a, c), a, c), VF))

    def max_abs_lane(self, magnitude: Vec) -> Vec:
        """Return the largest lane of ``magnitude``, which is not negative, in every lane; NaN if a lane is NaN."""
        for distance in (8, 4, 2, 1):
            magnitude = self.maximum_abs(magnitude, self._rotated(magnitude, distance))
        return magnitude

    def rounded(self, value: Vec) -> Vec:
        """Round to integers, ties to even."""
        return Vec(self, self.builder.call(self.function("llvm.rint.v16f32", VF, [VF]), [value.ir]))

    def sum_quads(self, value: Quads) -> Quads:
        """Return the sum of all lanes, in every lane."""
        for distance in (8, 4, 2, 1):
            order = ir.Constant(VI, [(lane + distance) % LANES for lane in range(LANES)])
            value = value + Quads(self, self.builder.shuffle_vector(value.ir, value.ir, order))
        return value

    def sum(self, value: Vec) -> Vec:
        """Return the sum of all lanes, in every lane. The tree of additions is fixed, so the result is
        deterministic."""
        for distance in (8, 4, 2, 1):
            value = value + self._rotated(value, distance)
        return value

    def store_sums(self, ptr: Ptr, one: Vec, two: Vec, three: Vec, four: Vec) -> None:
        """Store the sums of all lanes of four vectors as four float32, bit-identical to :meth:`sum`.

        Halves of two vectors, then quarters of four, share one vector: four sums take hardly more additions than one.
        """

        def joined(a: Vec, b: Vec, width: Count) -> Vec:
            """Return a vector of sums: in each group of 2 * width lanes of ``a``, then of ``b``, the first half plus
            the second."""
            first = [lane for lane in range(2 * LANES) if lane // width % 2 == 0]
            sides = ([lane + shift for lane in first] for shift in (0, width))
            parts = (self.builder.shuffle_vector(a.ir, b.ir, ir.Constant(VI, side)) for side in sides)
            return Vec(self, next(parts)) + Vec(self, next(parts))

        total = joined(joined(one, two, 8), joined(three, four, 8), 4)
        for width in (2, 1):
            total = joined(total, total, width)
        first_four = ir.Constant(ir.VectorType(I32, 4), list(range(4)))
        self.write(ptr, self.builder.shuffle_vector(total.ir, total.ir, first_four), 4)

    def max_lane(self, value: Vec) -> Vec:
        """Return the largest lane, in every lane."""
        for distance in (8, 4, 2, 1):
            value = self.maximum(value, self._rotated(value, distance))
        return value

    def exp2(self, x: Vec) -> Vec:
        """Return 2**x for x up to 127, and exactly 0 below -126 and for NaN."""
        b = self.builder
        above = Bool(self, b.fcmp_ordered(">=", x.ir, self.vector(_MIN_EXPONENT).ir))
        scales = "avx512f" in self.isa.needs
        # Scaling by a power of two underflows; building the power from bits would not.
        bounded = x if scales else self.maximum(x, _MIN_EXPONENT)
        whole = self.rounded(bounded)
        part = bounded - whole
        value = self.vector(_EXP2[0])
        for factor in _EXP2[1:]:
            value = self.fma(value, part, self.vector(factor))
        if scales:
            return self._scaled(value, whole, b.bitcast(above.ir, _LANE_BITS))
        exponent = b.shl(b.fptosi(whole.ir, VI), int_lanes(23))
        power = Vec(self, b.bitcast(b.add(b.bitcast(value.ir, VI), exponent), VF))
        return self.select(above, power, self.vector(0.0))  # type: ignore[no-any-return]

    def exp2_rough(self, x: Vec) -> Vec:
        """Return 2**x within a relative 8e-5, a twentieth of a rounding to bfloat16, and exactly 0 below -149. With
        AVX-512 NaN stays NaN."""
        if "avx512dq" not in self.isa.needs:
            return self.exp2(x)
        reduce = self.function("llvm.x86.avx512.mask.reduce.ps.512", VF, [VF, I32, VF, _LANE_BITS, I32])
        # 9: x - floor(x), without exceptions.
        operands = [x.ir, I32(9), self.vector(0.0).ir, _ALL_LANES, I32(_CURRENT_ROUNDING)]
        part = Vec(self, self.builder.call(reduce, operands))
        value = self.vector(_EXP2_ROUGH[0])
        for factor in _EXP2_ROUGH[1:]:
            value = self.fma(value, part, self.vector(factor))
        # Scaling rounds the exponent down.
        return self._scaled(value, x, _ALL_LANES)

    def _scaled(self, value: Vec, exponent: Vec, lanes: Any) -> Vec:
        """Return value * 2**floor(exponent) in the lanes of the mask ``lanes``, else 0. Needs AVX-512."""
        scale = self.function("llvm.x86.avx512.mask.scalef.ps.512", VF, [VF, VF, VF, _LANE_BITS, I32])
        operands = [value.ir, exponent.ir, self.vector(0.0).ir, lanes, I32(_CURRENT_ROUNDING)]
        return Vec(self, self.builder.call(scale, operands))

    def sigmoid(self, x: Vec) -> Vec:
        return self.vector(1.0) / (self.exp2(self.minimum(x * -LOG2E, 126.0)) + 1.0)

    def sigmoid_rough(self, x: Vec) -> Vec:
        """Return 1 / (1 + e**-x) within a relative 1.5e-4, a tenth of a rounding to bfloat16."""
        if "avx512f" not in self.isa.needs:
            return self.sigmoid(x)
        below = self.exp2_rough(self.minimum(x * -LOG2E, 126.0)) + 1.0
        reciprocal = self.function("llvm.x86.avx512.rcp14.ps.512", VF, [VF, VF, _LANE_BITS])
        return Vec(self, self.builder.call(reciprocal, [below.ir, self.vector(0.0).ir, _ALL_LANES]))

    def softplus(self, x: Vec) -> Vec:
        """Return log(1 + e**x), within a relative 1e-5 where it is at least e**-85. NaN stays NaN."""
        magnitude = self.maximum(x, x * -1.0)
        power = self.exp2(magnitude * -LOG2E)
        # log(1 + y) is twice the inverse hyperbolic tangent of y / (2 + y), which is at most a third.
        part = power / (power + 2.0)
        square, series = part * part, self.vector(1 / 15)
        for odd in range(13, 0, -2):
            series = self.fma(series, square, self.vector(1 / odd))
        curve = self.maximum(x, 0.0) + part * 2.0 * series
        is_number = Bool(self, self.builder.fcmp_ordered("ord", x.ir, x.ir))
        return self.select(is_number, curve, x)  # type: ignore[no-any-return]

    def tanh(self, x: Vec) -> Vec:
        """Return tanh(x) = 1 - 2 / (1 + e**2x), within 1e-6 absolutely, enough for soft caps and gelu. NaN stays
        NaN."""
        curve = self.vector(1.0) - self.vector(2.0) / (self.exp2(self.minimum(x * (2 * LOG2E), 126.0)) + 1.0)
        is_number = Bool(self, self.builder.fcmp_ordered("ord", x.ir, x.ir))
        return self.select(is_number, curve, x)  # type: ignore[no-any-return]

    def sqrt(self, x: Vec) -> Vec:
        return Vec(self, self.builder.call(self.function("llvm.sqrt.v16f32", VF, [VF]), [x.ir]))

    def constant(self, values: Sequence[float]) -> Vec:
        """Return a vector of sixteen compile-time constants."""
        return Vec(self, ir.Constant(VF, list(values)))

    def joined(self, a: Vec, b: Vec, first: Count) -> Vec:
        """Return lanes first .. first + 15 of the 32 lanes of ``a`` then ``b``."""
        order = ir.Constant(VI, list(range(first, first + LANES)))
        return Vec(self, self.builder.shuffle_vector(a.ir, b.ir, order))

    def load_halves(self, low: Ptr, high: Ptr) -> Vec:
        """Load 8 float32 from each of two addresses."""
        half = ir.VectorType(_F32, LANES // 2)
        order = ir.Constant(VI, list(range(LANES)))
        return Vec(self, self.builder.shuffle_vector(self.read(low, half, 4), self.read(high, half, 4), order))

    def scatter(self, ptr: Ptr, values: Any, offsets: Sequence[Count]) -> None:
        """Store each lane of an LLVM vector of integers at ``ptr`` plus its byte offset; ``offsets`` are ascending."""
        b, kind = self.builder, values.type.element
        size = kind.width // 8
        # One bounds check for all lanes: sixteen checks would be sixteen times the code.
        assert len(offsets) == values.type.count
        with self.when(self.in_bounds(ptr, offsets[-1] + size)):
            for lane, offset in enumerate(offsets):
                address = b.inttoptr((ptr + offset).ir, kind.as_pointer())
                b.store(b.extract_element(values, I32(lane)), address).align = size

    def store_first(self, ptr: Ptr, value: Vec) -> None:
        """Store the first lane as one float32."""
        self.write(ptr, self.builder.extract_element(value.ir, I32(0)), 4)

    def first_as_int(self, value: Vec) -> Int:
        """Return the first lane as an integer; its value must fit into int64."""
        return Int(self, self.builder.fptosi(self.builder.extract_element(value.ir, I32(0)), I64))

    def call_subroutine(self, name: str, values: Sequence[Int | Ptr], body: Callable[..., None]) -> None:
        """Call the module's function ``name`` with ``values``; kernels of one module share it, compiled once.

        On first use, ``body`` emits it: it gets a :class:`Kernel` and the function's parameters. The function does not
        check its accesses: in checked mode the caller checks with :meth:`in_bounds` all memory that it accesses.
        """
        function = self._module.globals.get(name)
        if function is None:
            function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), [I64] * len(values)), name)
            function.attributes.add("noinline")
            builder = ir.IRBuilder(function.append_basic_block("entry"))
            inner = Kernel(builder, self.isa)
            params: list[Any] = [type(value)(inner, raw) for value, raw in zip(values, function.args, strict=True)]
            body(inner, *params)
            builder.ret_void()
        self.builder.call(function, [value.ir for value in values])

    def function(self, name: str, result: Any, arguments: Sequence[Any], var_arg: bool = False) -> Any:
        """Return an external function: an LLVM intrinsic or a function of libc."""
        declared = self._module.globals.get(name)
        return declared or ir.Function(self._module, ir.FunctionType(result, arguments, var_arg), name)

    def _rotated(self, value: Vec, distance: Count) -> Vec:
        order = ir.Constant(VI, [(lane + distance) % LANES for lane in range(LANES)])
        return Vec(self, self.builder.shuffle_vector(value.ir, value.ir, order))

    def splat(self, scalar: Any) -> Any:
        """Return an LLVM scalar in all sixteen lanes of a vector."""
        empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, scalar, I32(0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(VI, [0] * LANES))


def int_lanes(value: int) -> Any:
    """Return an LLVM vector constant with the 32-bit integer ``value`` in all sixteen lanes."""
    return ir.Constant(VI, [value] * LANES)


def _bytes_of(kind: Any) -> int:
    if isinstance(kind, ir.VectorType):
        return int(kind.count) * _bytes_of(kind.element)
    if isinstance(kind, ir.FloatType):
        return 4
    return 2 if isinstance(kind, _BFloat) else int(kind.width) // 8
