"""Small kernels and programs, for tests of the compiler and the thread pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import STEP, RecordLayout, Words
from pillion.kernels.cpu.runtime.compiler import CompiledKernels
from pillion.kernels.cpu.runtime.thread_pool import ENTRY_WORDS


@dataclass(frozen=True, slots=True)
class Scale(KernelSpec):
    """out [items, 16] += x * factor, with each vector computed by one thread."""

    layout = RecordLayout("scale", pointers=("x", "out"), numbers=("items",), reals=("factor",))
    chunk: int = 1

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        x, out, factor = args.pointer("x"), args.pointer("out"), args.real("factor")
        with call.shared_range(args.number("items"), self.chunk) as (begin, end), k.range(end, begin) as item:
            at = item * VECTOR_BYTES
            k.store(out + at, k.fma(k.load(x + at), factor, k.load(out + at)))


@dataclass(frozen=True, slots=True)
class WhoAmI(KernelSpec):
    """out [threads] int64 += 1 + thread * 1000, by each thread in its own place; ``turns`` makes it take time.

    ``waste`` [threads, 16] float32 is 1 at the beginning of a call.
    """

    layout = RecordLayout("who", pointers=("out", "waste"), numbers=("turns",))

    def emit(self, call: KernelCall) -> None:
        k = call.k
        k.store(call.args.pointer("waste") + call.thread * VECTOR_BYTES, k.vector(1.0))
        wasted = k.variable(k.vector(1.0))
        with k.range(call.args.number("turns")):
            wasted.value = k.fma(wasted.value, k.vector(0.5), k.vector(0.25))
        k.store(call.args.pointer("waste") + call.thread * VECTOR_BYTES, wasted.value)
        place = call.args.pointer("out") + call.thread * 8
        k.store_int(place, k.load_int(place) + call.thread * 1000 + 1)


@dataclass(frozen=True, slots=True)
class Uneven(KernelSpec):
    """The first thread's call takes ``turns``, the second's ``more`` times as long; ``waste`` [threads, 16] float32."""

    layout = RecordLayout("uneven", pointers=("waste",), numbers=("turns", "more"))

    def emit(self, call: KernelCall) -> None:
        k = call.k
        wasted = k.variable(k.vector(1.0))
        times = call.thread * call.args.number("more") + 1
        with k.range(call.args.number("turns") * times):
            wasted.value = k.fma(wasted.value, k.vector(0.5), k.vector(0.25))
        k.store(call.args.pointer("waste") + call.thread * VECTOR_BYTES, wasted.value)


@dataclass(frozen=True, slots=True)
class Stray(KernelSpec):
    """Write a vector ``offset`` bytes after the start of ``out``, or of the scratch."""

    layout = RecordLayout("stray", pointers=("out",), numbers=("offset",))
    scratch: bool = False

    @property
    def name(self) -> str:
        return f"stray_{self.scratch}"

    def emit(self, call: KernelCall) -> None:
        target = call.scratch if self.scratch else call.args.pointer("out")
        call.k.store(target + call.args.number("offset"), call.k.vector(1.0))


@dataclass(frozen=True, slots=True)
class Remember(KernelSpec):
    """out [threads] int64 = thread + 1, kept in the scratch for a while; where [threads]: its address."""

    layout = RecordLayout("remember", pointers=("out", "where"), numbers=("turns",))

    def emit(self, call: KernelCall) -> None:
        k, place = call.k, call.thread * 8
        k.store_int(call.scratch, call.thread + 1)
        with k.range(call.args.number("turns")):
            k.fetch_add(call.scratch + 64, 1)
        k.store_int(call.args.pointer("out") + place, k.load_int(call.scratch))
        k.store_int(call.args.pointer("where") + place, Int(k, call.scratch.ir))


@dataclass(frozen=True, slots=True)
class Halve(KernelSpec):
    """out [16] float32 = x / 2, by the last thread."""

    layout = RecordLayout("halve", pointers=("x", "out"))

    def emit(self, call: KernelCall) -> None:
        k = call.k
        with k.when((call.thread + 1).equals(call.threads)):
            k.store(call.args.pointer("out"), k.load(call.args.pointer("x")) * 0.5)


CONDITION = STEP.place["num_samples"]


class ProgramTable:
    """A program, and the records that it points to."""

    def __init__(self, kernels: CompiledKernels) -> None:
        self._kernels = kernels
        self._records: list[Any] = []
        self._entries: list[tuple[int, ...]] = []

    def add(self, spec: KernelSpec, condition: int = -1, **values: Any) -> ProgramTable:
        """Append an entry."""
        words = np.zeros(spec.layout.num_words, np.int64)
        spec.layout.fill(words, values)
        self._records.append((words, values))
        self._entries.append((self._kernels.address(spec.name), words.ctypes.data, condition, 0))
        return self

    @property
    def program(self) -> Words:
        """Return [entries, ENTRY_WORDS]; the table must outlive it."""
        return np.array(self._entries, np.int64).reshape(-1, ENTRY_WORDS)


def step_with(samples: int = 0) -> Words:
    """Return a step's record."""
    words = np.zeros(STEP.num_words, np.int64)
    words[CONDITION] = samples
    return words


def chain(kernels: CompiledKernels, items: int = 37, length: int = 20) -> tuple[ProgramTable, list[Any], list[Any]]:
    """Build kernels that read the output of the kernel before them: a thread that runs ahead corrupts the result.

    Return the table, its working rows, and their expected values.
    """
    rows = [np.full((items, 16), 1 + i, np.float32) for i in range(length + 1)]
    table = ProgramTable(kernels)
    for i in range(length):
        table.add(Scale(3 if i % 2 else 1), x=rows[i], out=rows[i + 1], items=items, factor=0.5)
    expected = [rows[0].copy()]
    for i in range(length):
        expected.append(rows[i + 1] + expected[i] * np.float32(0.5))
    return table, rows, expected
