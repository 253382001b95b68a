"""Single lanes of a vector, for kernels that put them in other places than sixteen side by side."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.emit import Kernel
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.values import Int, Ptr, Vec

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_HALF = LANES // 2


def constant(k: Kernel, values: list[float]) -> Vec:
    """Sixteen numbers that are known when the kernel is made."""
    return Vec(k, ir.Constant(ir.VectorType(_F32, LANES), values))


def joined(k: Kernel, a: Vec, b: Vec, first: int) -> Vec:
    """Lanes first .. first + 15 of the 32 that a and b have together."""
    order = ir.Constant(ir.VectorType(_I32, LANES), list(range(first, first + LANES)))
    return Vec(k, k.builder.shuffle_vector(a.ir, b.ir, order))


def load_halves(k: Kernel, low: Ptr, high: Ptr) -> Vec:
    """8 float32 from each of two places."""
    half = ir.VectorType(_F32, _HALF)
    order = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    return Vec(k, k.builder.shuffle_vector(k.read(low, half, 4), k.read(high, half, 4), order))


def scatter(k: Kernel, ptr: Ptr, values: Any, stride: int) -> None:
    """Each lane of an LLVM vector of whole numbers, ``stride`` bytes behind the one before it."""
    b, kind, count = k.builder, values.type.element, int(values.type.count)
    size = int(kind.width) // 8
    # One check for all lanes: sixteen would be sixteen times the code.
    with k.when(k.holds(ptr, (count - 1) * stride + size)):
        for lane in range(count):
            address = b.inttoptr((ptr + lane * stride).ir, kind.as_pointer())
            b.store(b.extract_element(values, _I32(lane)), address).align = size


def store_first(k: Kernel, ptr: Ptr, value: Vec) -> None:
    """The first lane, as one float32."""
    k.write(ptr, k.builder.extract_element(value.ir, _I32(0)), 4)


def first_as_int(k: Kernel, value: Vec) -> Int:
    """The first lane, which must hold a number that int64 has."""
    return Int(k, k.builder.fptosi(k.builder.extract_element(value.ir, _I32(0)), _I64))
