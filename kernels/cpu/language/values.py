"""Typed values of the kernels' language (:mod:`pillion.kernels.cpu.language.emit`): operators that append
instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pillion.kernels.cpu.language.emit import Kernel


@dataclass(frozen=True, slots=True)
class Bool:
    """One bit, or sixteen."""

    k: Kernel
    ir: Any

    def __and__(self, other: Bool) -> Bool:
        return Bool(self.k, self.k.builder.and_(self.ir, other.ir))

    def __or__(self, other: Bool) -> Bool:
        return Bool(self.k, self.k.builder.or_(self.ir, other.ir))


@dataclass(frozen=True, slots=True)
class Int:
    """A signed number of 64 bits."""

    k: Kernel
    ir: Any

    def _with(self, operation: str, other: Int | int) -> Int:
        return Int(self.k, getattr(self.k.builder, operation)(self.ir, self.k.int(other).ir))

    def __add__(self, other: Int | int) -> Int:
        return self._with("add", other)

    def __sub__(self, other: Int | int) -> Int:
        return self._with("sub", other)

    def __mul__(self, other: Int | int) -> Int:
        return self._with("mul", other)

    def __floordiv__(self, other: Int | int) -> Int:
        """Rounds towards 0: all that is divided here is positive."""
        return self._with("sdiv", other)

    def __mod__(self, other: Int | int) -> Int:
        return self._with("srem", other)

    __radd__, __rmul__ = __add__, __mul__

    def _compare(self, operation: str, other: Int | int) -> Bool:
        return Bool(self.k, self.k.builder.icmp_signed(operation, self.ir, self.k.int(other).ir))

    def __lt__(self, other: Int | int) -> Bool:
        return self._compare("<", other)

    def __le__(self, other: Int | int) -> Bool:
        return self._compare("<=", other)

    def __gt__(self, other: Int | int) -> Bool:
        return self._compare(">", other)

    def __ge__(self, other: Int | int) -> Bool:
        return self._compare(">=", other)

    def equals(self, other: Int | int) -> Bool:
        """``==`` is left to Python."""
        return self._compare("==", other)


@dataclass(frozen=True, slots=True)
class Vec:
    """Sixteen float32 values. Comparisons are false where a side is NaN."""

    k: Kernel
    ir: Any

    def _with(self, operation: str, other: Vec | float) -> Vec:
        return Vec(self.k, getattr(self.k.builder, operation)(self.ir, self.k.vector(other).ir))

    def __add__(self, other: Vec | float) -> Vec:
        return self._with("fadd", other)

    def __sub__(self, other: Vec | float) -> Vec:
        return self._with("fsub", other)

    def __mul__(self, other: Vec | float) -> Vec:
        return self._with("fmul", other)

    def __truediv__(self, other: Vec | float) -> Vec:
        return self._with("fdiv", other)

    def __lt__(self, other: Vec | float) -> Bool:
        return Bool(self.k, self.k.builder.fcmp_ordered("<", self.ir, self.k.vector(other).ir))

    def __gt__(self, other: Vec | float) -> Bool:
        return Bool(self.k, self.k.builder.fcmp_ordered(">", self.ir, self.k.vector(other).ir))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sixteen pairs of bfloat16 values, the first of a pair in the low half of its 32 bits."""

    k: Kernel
    ir: Any


@dataclass(frozen=True, slots=True)
class Ptr:
    """An address in bytes and, in checked mode, the memory that it may be used in."""

    k: Kernel
    ir: Any
    begin: Any = None
    end: Any = None

    def __add__(self, offset: Int | int) -> Ptr:
        if isinstance(offset, int) and offset == 0:
            return self
        return Ptr(self.k, self.k.builder.add(self.ir, self.k.int(offset).ir), self.begin, self.end)


class Variable:
    """A value that changes: LLVM turns it into a register."""

    def __init__(self, k: Kernel, value: Vec | Int | Pairs) -> None:
        self._k, self._kind = k, type(value)
        with k.builder.goto_entry_block():
            self._cell = k.builder.alloca(value.ir.type)
        k.builder.store(value.ir, self._cell)

    @property
    def value(self) -> Any:
        """What was stored last."""
        return self._kind(self._k, self._k.builder.load(self._cell))

    @value.setter
    def value(self, value: Any) -> None:
        self._k.builder.store(value.ir, self._cell)
