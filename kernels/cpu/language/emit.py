"""The language in which the CPU kernels are written: Python that writes LLVM IR, sixteen lanes at a time.

A kernel is a Python function that calls a :class:`Kernel`; each call appends instructions. Values carry their type, so
the arithmetic reads like arithmetic:

    total = k.variable(k.vector(0.0))
    with k.range(count) as i:
        x = k.load(rows + i * VECTOR_BYTES)
        total.value = k.fma(x, x, total.value)

A vector has 16 lanes everywhere; LLVM cuts it into what the processor has (one AVX-512 register, two of AVX2, four of
NEON). What differs by processor are the tile sizes (:mod:`pillion.kernels.cpu.language.isa`) and the bf16 product
(:meth:`Kernel.dot`).

In checked mode (``PILLION_CHECK_KERNELS=1``) every pointer knows its bounds: an access outside of them is noted in the
team's fault cell, and goes to a dummy line instead. Without it a pointer is a bare address, and what is read and
written was proven to be inside by :mod:`pillion.kernels.cpu.program.program` before the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.isa import LANES, Isa
from pillion.kernels.cpu.language.values import Bool, Int, Pairs, Ptr, Variable, Vec

VECTOR_BYTES = 64

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F32 = ir.FloatType()
_VF, _VI = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_VH, _VB = ir.VectorType(_I16, LANES), ir.VectorType(_I8, LANES)
# A Python number; :meth:`Kernel.int` hides the name inside the class.
Count = int
_LOG2E = 1.4426950408889634
# exp2 on [-0.5, 0.5]: Taylor of 2**x to the sixth power, within 3e-7 of the true value; highest power first.
_EXP2 = (1.5403530393381609e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2,
         2.402265069591007e-1, 6.931471805599453e-1, 1.0)  # fmt: skip
# Below this 2**x is taken as 0: a hidden token must weigh exactly nothing, whatever its row holds.
_LEAST_EXPONENT = -126.0


class _BFloat(ir.Type):  # type: ignore[misc]
    """llvmlite has no name for LLVM's bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()


class Kernel:
    """Appends instructions to one function."""

    def __init__(self, builder: ir.IRBuilder, isa: Isa, fault: Any = None, number: Count = 0) -> None:
        """``fault``: address of the fault cell in checked mode, else None; ``number`` is what this kernel writes."""
        self.builder = builder
        self.isa = isa
        self._fault = fault
        self._number = number
        self._module = builder.module

    @property
    def checked(self) -> bool:
        """Whether accesses are checked."""
        return self._fault is not None

    # -- numbers

    def int(self, value: Int | Count) -> Int:
        """A number as a value."""
        return value if isinstance(value, Int) else Int(self, _I64(value))

    def vector(self, value: Vec | float) -> Vec:
        """Sixteen times the same number."""
        return value if isinstance(value, Vec) else Vec(self, ir.Constant(_VF, [float(value)] * LANES))

    def real(self, value: Int) -> Vec:
        """A number, as sixteen float32."""
        return Vec(self, self._splat(self.builder.sitofp(value.ir, _F32), _VF))

    def lanes(self, start: Int | Count = 0) -> Any:
        """start, start + 1 ... start + 15, as 16 numbers of 32 bits for :meth:`below`."""
        counted = ir.Constant(_VI, list(range(LANES)))
        return self.builder.add(counted, self._splat(self.builder.trunc(self.int(start).ir, _I32), _VI))

    def below(self, lanes: Any, limit: Int) -> Bool:
        """Which of :meth:`lanes` are smaller than ``limit``."""
        bound = self._splat(self.builder.trunc(limit.ir, _I32), _VI)
        return Bool(self, self.builder.icmp_signed("<", lanes, bound))

    def least(self, a: Int, b: Int | Count) -> Int:
        """The smaller one."""
        b = self.int(b)
        return Int(self, self.builder.select((a < b).ir, a.ir, b.ir))

    def most(self, a: Int, b: Int | Count) -> Int:
        """The larger one."""
        b = self.int(b)
        return Int(self, self.builder.select((a < b).ir, b.ir, a.ir))

    def select(self, condition: Bool, yes: Any, no: Any) -> Any:
        """``yes`` where the condition holds, lane by lane or as a whole; both of one type."""
        return type(yes)(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def variable(self, value: Vec | Int | Pairs) -> Variable:
        """Something that can be assigned to."""
        return Variable(self, value)

    # -- control

    @contextmanager
    def range(self, end: Int | Count, begin: Int | Count = 0, step: Count = 1) -> Iterator[Int]:
        """begin, begin + step ... below end."""
        b, first, last = self.builder, self.int(begin).ir, self.int(end).ir
        before, body, behind = b.block, b.append_basic_block("body"), b.append_basic_block("behind")
        b.cbranch(b.icmp_signed("<", first, last), body, behind)
        b.position_at_end(body)
        index = b.phi(_I64)
        index.add_incoming(first, before)
        yield Int(self, index)
        following = b.add(index, _I64(step))
        index.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, last), body, behind)
        b.position_at_end(behind)

    @contextmanager
    def forever(self) -> Iterator[Any]:
        """A loop that ends where :meth:`leave` is told the block it gives."""
        b = self.builder
        body, behind = b.append_basic_block("body"), b.append_basic_block("behind")
        b.branch(body)
        b.position_at_end(body)
        yield behind
        b.branch(body)
        b.position_at_end(behind)

    def leave(self, behind: Any, condition: Bool) -> None:
        """Ends a :meth:`forever` loop if the condition holds."""
        on = self.builder.append_basic_block("on")
        self.builder.cbranch(condition.ir, behind, on)
        self.builder.position_at_end(on)

    @contextmanager
    def when(self, condition: Bool) -> Iterator[None]:
        """Only if the condition holds."""
        with self.builder.if_then(condition.ir):
            yield

    # -- memory

    def holds(self, ptr: Ptr, size: Int | Count) -> Bool:
        """Whether ``size`` bytes at ``ptr`` may be used, noted if not. Kernels that are not checked believe so."""
        if self._fault is None:
            return Bool(self, _I1(1))
        assert ptr.begin is not None, "checked kernels need pointers with bounds"
        b = self.builder
        behind = b.add(ptr.ir, self.int(size).ir)
        inside = b.and_(b.icmp_unsigned(">=", ptr.ir, ptr.begin), b.icmp_unsigned("<=", behind, ptr.end))
        with b.if_then(b.not_(inside), likely=False):
            b.store(_I64(self._number), b.inttoptr(self._fault, _I64.as_pointer()))
            b.store(b.sub(ptr.ir, ptr.begin), b.inttoptr(b.add(self._fault, _I64(8)), _I64.as_pointer()))
        return Bool(self, inside)

    def _checked(self, ptr: Ptr, size: Count) -> Any:
        if self._fault is None:
            return ptr.ir
        # The line behind the cell is there to be read and written by strays.
        stray = self.builder.add(self._fault, _I64(VECTOR_BYTES))
        return self.builder.select(self.holds(ptr, size).ir, ptr.ir, stray)

    def read(self, ptr: Ptr, kind: Any, align: Count) -> Any:
        """An LLVM value of type ``kind``."""
        size = _bytes_of(kind)
        loaded = self.builder.load(self.builder.inttoptr(self._checked(ptr, size), kind.as_pointer()))
        loaded.align = align
        return loaded

    def write(self, ptr: Ptr, value: Any, align: Count) -> None:
        """Stores an LLVM value."""
        size = _bytes_of(value.type)
        address = self.builder.inttoptr(self._checked(ptr, size), value.type.as_pointer())
        self.builder.store(value, address).align = align

    def load(self, ptr: Ptr) -> Vec:
        """16 float32."""
        return Vec(self, self.read(ptr, _VF, 4))

    def store(self, ptr: Ptr, value: Vec) -> None:
        """16 float32."""
        self.write(ptr, value.ir, 4)

    def load_pairs(self, ptr: Ptr) -> Pairs:
        """32 bfloat16."""
        return Pairs(self, self.read(ptr, _VI, 4))

    def load_bf16(self, ptr: Ptr) -> Vec:
        """16 bfloat16, widened."""
        wide = self.builder.zext(self.read(ptr, _VH, 2), _VI)
        return Vec(self, self.builder.bitcast(self.builder.shl(wide, self._ints(16)), _VF))

    def store_bf16(self, ptr: Ptr, value: Vec) -> None:
        """16 bfloat16, rounded to nearest even."""
        self.write(ptr, self.to_bf16(value), 2)

    def load_float(self, ptr: Ptr, bf16: bool) -> Vec:
        """16 values that are bfloat16 or float32 in memory."""
        return self.load_bf16(ptr) if bf16 else self.load(ptr)

    def store_float(self, ptr: Ptr, value: Vec, bf16: bool) -> None:
        """16 values, as bfloat16 or float32."""
        (self.store_bf16 if bf16 else self.store)(ptr, value)

    def broadcast(self, ptr: Ptr) -> Vec:
        """One float32, sixteen times."""
        return Vec(self, self._splat(self.read(ptr, _F32, 4), _VF))

    def broadcast_pair(self, ptr: Ptr) -> Pairs:
        """Two bfloat16, sixteen times."""
        return Pairs(self, self._splat(self.read(ptr, _I32, 4), _VI))

    def load_int(self, ptr: Ptr, bits: Count = 64) -> Int:
        """A signed number of 8, 16, 32 or 64 bits."""
        raw = self.read(ptr, ir.IntType(bits), bits // 8)
        return Int(self, raw if bits == 64 else self.builder.sext(raw, _I64))

    def store_int(self, ptr: Ptr, value: Int | Count, bits: Count = 64) -> None:
        """The low bits of a number."""
        raw = self.int(value).ir
        self.write(ptr, raw if bits == 64 else self.builder.trunc(raw, ir.IntType(bits)), bits // 8)

    def load_ptr(self, ptr: Ptr) -> Ptr:
        """A pointer of a record: its address, and behind it how many bytes it may be used for."""
        address = self.read(ptr, _I64, 8)
        if self._fault is None:
            return Ptr(self, address)
        return Ptr(self, address, address, self.builder.add(address, self.read(ptr + 8, _I64, 8)))

    def prefetch(self, ptr: Ptr, near: bool = True) -> None:
        """Asks for a line of 64 bytes, into the first cache or only into the one behind it; may point anywhere."""
        function = self.function("llvm.prefetch.p0", ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        address = self.builder.inttoptr(ptr.ir, _I8.as_pointer())
        self.builder.call(function, [address, _I32(0), _I32(3 if near else 1), _I32(1)])

    def fetch_add(self, ptr: Ptr, amount: Int | Count) -> Int:
        """Adds atomically; gives what was there before."""
        cell = self.builder.inttoptr(self._checked(ptr, 8), _I64.as_pointer())
        return Int(self, self.builder.atomic_rmw("add", cell, self.int(amount).ir, "acq_rel"))

    # -- arithmetic of vectors

    def fma(self, a: Vec, b: Vec, c: Vec) -> Vec:
        """a * b + c with one rounding."""
        return Vec(self, self.builder.call(self.function("llvm.fma.v16f32", _VF, [_VF] * 3), [a.ir, b.ir, c.ir]))

    def dot(self, total: Vec, a: Pairs, b: Pairs) -> Vec:
        """total + the sum of both products of each lane's pair."""
        if self.isa.bf16_dot == "x86":
            wide = ir.VectorType(BFLOAT, 2 * LANES)
            function = self.function("llvm.x86.avx512bf16.dpbf16ps.512", _VF, [_VF, wide, wide])
            args = [total.ir, self.builder.bitcast(a.ir, wide), self.builder.bitcast(b.ir, wide)]
            return Vec(self, self.builder.call(function, args))
        return self.fma(self.high(a), self.high(b), self.fma(self.low(a), self.low(b), total))

    def low(self, pairs: Pairs) -> Vec:
        """The first value of each pair."""
        return Vec(self, self.builder.bitcast(self.builder.shl(pairs.ir, self._ints(16)), _VF))

    def high(self, pairs: Pairs) -> Vec:
        """The second value of each pair."""
        return Vec(self, self.builder.bitcast(self.builder.and_(pairs.ir, self._ints(-65536)), _VF))

    def to_bf16(self, value: Vec) -> Any:
        """16 numbers of 16 bits, rounded to nearest even."""
        b = self.builder
        if self.isa.bf16_dot == "x86":
            narrow = ir.VectorType(BFLOAT, LANES)
            function = self.function("llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, [_VF])
            return b.bitcast(b.call(function, [value.ir]), _VH)
        bits = b.bitcast(value.ir, _VI)
        odd = b.and_(b.lshr(bits, self._ints(16)), self._ints(1))
        rounded = b.add(b.add(bits, odd), self._ints(0x7FFF))
        # NaN would round to infinity or to zero: it keeps its sign and becomes quiet.
        unordered = b.fcmp_unordered("uno", value.ir, value.ir)
        kept = b.select(unordered, b.or_(bits, self._ints(0x00400000)), rounded)
        return b.trunc(b.lshr(kept, self._ints(16)), _VH)

    def larger(self, a: Vec, b: Vec | float) -> Vec:
        """The larger one of each lane; b's where a is NaN."""
        return self.select(a > b, a, self.vector(b))  # type: ignore[no-any-return]

    def smaller(self, a: Vec, b: Vec | float) -> Vec:
        """The smaller one of each lane; b's where a is NaN."""
        return self.select(a < b, a, self.vector(b))  # type: ignore[no-any-return]

    def sum(self, value: Vec) -> Vec:
        """The sum of all lanes, in every lane. The tree is fixed, so the result is."""
        for distance in (8, 4, 2, 1):
            value = value + self._rotated(value, distance)
        return value

    def maximum(self, value: Vec) -> Vec:
        """The largest lane, in every lane."""
        for distance in (8, 4, 2, 1):
            value = self.larger(value, self._rotated(value, distance))
        return value

    def exp2(self, x: Vec) -> Vec:
        """2**x for x up to 127; exactly 0 below -126. NaN counts as what lies at -126."""
        b = self.builder
        bounded = self.larger(x, _LEAST_EXPONENT)
        whole = Vec(self, b.call(self.function("llvm.rint.v16f32", _VF, [_VF]), [bounded.ir]))
        part = bounded - whole
        value = self.vector(_EXP2[0])
        for factor in _EXP2[1:]:
            value = self.fma(value, part, self.vector(factor))
        exponent = b.shl(b.fptosi(whole.ir, _VI), self._ints(23))
        power = Vec(self, b.bitcast(b.add(b.bitcast(value.ir, _VI), exponent), _VF))
        return self.select(x < _LEAST_EXPONENT, self.vector(0.0), power)  # type: ignore[no-any-return]

    def sigmoid(self, x: Vec) -> Vec:
        """1 / (1 + e**-x)."""
        return self.vector(1.0) / (self.exp2(self.smaller(x * -_LOG2E, 126.0)) + 1.0)

    def tanh(self, x: Vec) -> Vec:
        """1 - 2 / (1 + e**2x); exact to 1e-6 absolutely, which is what soft caps and gelu need. NaN stays NaN."""
        found = self.vector(1.0) - self.vector(2.0) / (self.exp2(self.smaller(x * (2 * _LOG2E), 126.0)) + 1.0)
        is_number = Bool(self, self.builder.fcmp_ordered("ord", x.ir, x.ir))
        return self.select(is_number, found, x)  # type: ignore[no-any-return]

    def sqrt(self, x: Vec) -> Vec:
        """Square root."""
        return Vec(self, self.builder.call(self.function("llvm.sqrt.v16f32", _VF, [_VF]), [x.ir]))

    # -- the rest

    def function(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """A function from outside: an LLVM intrinsic or one of libc."""
        found = self._module.globals.get(name)
        return found or ir.Function(self._module, ir.FunctionType(result, arguments), name)

    def _rotated(self, value: Vec, distance: Count) -> Vec:
        order = ir.Constant(_VI, [(lane + distance) % LANES for lane in range(LANES)])
        return Vec(self, self.builder.shuffle_vector(value.ir, value.ir, order))

    def _splat(self, scalar: Any, kind: Any) -> Any:
        empty = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(empty, scalar, _I32(0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(_VI, [0] * LANES))

    def _ints(self, value: Count) -> Any:
        return ir.Constant(_VI, [value] * LANES)


def _bytes_of(kind: Any) -> int:
    if isinstance(kind, ir.VectorType):
        return int(kind.count) * _bytes_of(kind.element)
    if isinstance(kind, ir.FloatType):
        return 4
    return 2 if isinstance(kind, _BFloat) else int(kind.width) // 8
