"""Atomics, futexes and pauses, with which threads and processes that share memory wait for one another.

Used by the thread pool and the sums over ranks. Accesses are sequentially consistent and unchecked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.emit import I32, I64, Int, Kernel, Ptr

# Operations of Linux's futex(2), and the flag PRIVATE for futexes whose sleepers are threads of one process.
FUTEX_WAIT, FUTEX_WAKE, PRIVATE = 0, 1, 128
# FUTEX_WAKE's number of sleepers to wake, for all of them.
ALL_SLEEPERS = 2**31 - 1
NS_PER_S = 1_000_000_000


def atomic_load(k: Kernel, ptr: Ptr) -> Int:
    """Load the word at ``ptr`` atomically."""
    return Int(k, k.builder.load_atomic(_word(k, ptr), "seq_cst", 8))


def atomic_add(k: Kernel, ptr: Ptr, amount: int) -> Int:
    """Add to a word atomically; return its previous value."""
    return Int(k, k.builder.atomic_rmw("add", _word(k, ptr), I64(amount), "seq_cst"))


def atomic_swap(k: Kernel, ptr: Ptr, value: Int | int) -> None:
    k.builder.atomic_rmw("xchg", _word(k, ptr), k.int(value).ir, "seq_cst")


def atomic_raise(k: Kernel, ptr: Ptr, value: Int) -> Int:
    """Raise a word to at least ``value`` atomically; return its previous value."""
    return Int(k, k.builder.atomic_rmw("max", _word(k, ptr), value.ir, "seq_cst"))


def atomic_exchange(k: Kernel, ptr: Ptr, old: Int, new: Int) -> Int:
    """Write ``new`` if the word is ``old`` (compare and exchange); return its previous value."""
    result = k.builder.cmpxchg(_word(k, ptr), old.ir, new.ir, "seq_cst", "seq_cst")
    return Int(k, k.builder.extract_value(result, 0))


def futex(k: Kernel, word: Ptr, operation: int, value: Any, timeout_ns: Int | None = None) -> None:
    """Sleep at a word, or wake its sleepers. Linux compares 32 bits: on little-endian machines the low half of the
    word, which changes first."""
    timeout = k.int(0)
    if timeout_ns is not None:
        at = time_cell(k)
        k.store_int(at, timeout_ns // NS_PER_S)
        k.store_int(at + 8, timeout_ns % NS_PER_S)
        timeout = Int(k, at.ir)
    function = k.function("syscall", I64, [I64], var_arg=True)
    number = I64({"x86_64": 202, "aarch64": 98}[k.isa.machine])
    k.builder.call(function, [number, word.ir, I64(operation), value, timeout.ir, I64(0), I64(0)])


def time_cell(k: Kernel) -> Ptr:
    """Allocate a timespec, seconds and nanoseconds, on the stack."""
    with k.builder.goto_entry_block():
        return Ptr(k, k.builder.ptrtoint(k.builder.alloca(ir.ArrayType(I64, 2)), I64))


def pause(k: Kernel) -> None:
    """Yield the core to its other hardware thread for 10 to 50 ns."""
    if k.isa.machine == "x86_64":
        k.builder.call(k.function("llvm.x86.sse2.pause", ir.VoidType(), []), [])
    else:
        # YIELD does nothing on most ARM cores; an instruction barrier takes some 10 ns.
        k.builder.call(k.function("llvm.aarch64.isb", ir.VoidType(), [I32]), [I32(15)])


def _word(k: Kernel, ptr: Ptr) -> Any:
    return k.builder.inttoptr(ptr.ir, I64.as_pointer())
