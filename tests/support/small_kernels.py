"""Small kernels, to test what runs kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.cpu.emit import VECTOR_BYTES
from kernels.cpu.module import Call
from kernels.cpu.records import Layout
from kernels.cpu.values import Int


@dataclass(frozen=True, slots=True)
class Scale:
    """out [items, 16] += x * factor, each vector by whichever thread took it."""

    layout: ClassVar[Layout] = Layout("scale", pointers=("x", "out"), numbers=("items",), reals=("factor",))
    chunk: int = 1

    @property
    def name(self) -> str:
        return f"scale_{self.chunk}"

    def emit(self, call: Call) -> None:
        k, args = call.k, call.args
        x, out, factor = args.pointer("x"), args.pointer("out"), args.real("factor")
        with call.shared_range(args.number("items"), self.chunk) as (begin, end), k.range(end, begin) as item:
            at = item * VECTOR_BYTES
            k.store(out + at, k.fma(k.load(x + at), factor, k.load(out + at)))


@dataclass(frozen=True, slots=True)
class WhoAmI:
    """out [threads] int64 += 1 + thread * 1000, by each thread in its own place; ``turns`` makes it take time."""

    layout: ClassVar[Layout] = Layout("who", pointers=("out", "waste"), numbers=("turns",))
    name: str = "who"

    def emit(self, call: Call) -> None:
        k = call.k
        wasted = k.variable(k.vector(1.0))
        with k.range(call.args.number("turns")):
            wasted.value = k.fma(wasted.value, k.vector(0.5), k.vector(0.25))
        k.store(call.args.pointer("waste") + call.thread * VECTOR_BYTES, wasted.value)
        place = call.args.pointer("out") + call.thread * 8
        k.store_int(place, k.load_int(place) + call.thread * 1000 + 1)


@dataclass(frozen=True, slots=True)
class Stray:
    """Writes a vector ``offset`` bytes behind the begin of ``out``, or of its scratch."""

    layout: ClassVar[Layout] = Layout("stray", pointers=("out",), numbers=("offset",))
    scratch: bool = False

    @property
    def name(self) -> str:
        return f"stray_{self.scratch}"

    def emit(self, call: Call) -> None:
        target = call.scratch if self.scratch else call.args.pointer("out")
        call.k.store(target + call.args.number("offset"), call.k.vector(1.0))


@dataclass(frozen=True, slots=True)
class Where:
    """out [threads] int64 = address of each thread's scratch."""

    layout: ClassVar[Layout] = Layout("where", pointers=("out",))
    name: str = "where"

    def emit(self, call: Call) -> None:
        k = call.k
        k.store_int(call.args.pointer("out") + call.thread * 8, Int(k, call.scratch.ir))


@dataclass(frozen=True, slots=True)
class Halve:
    """out [16] float32 = x / 2, by the last thread."""

    layout: ClassVar[Layout] = Layout("halve", pointers=("x", "out"))
    name: str = "halve"

    def emit(self, call: Call) -> None:
        k = call.k
        with k.when((call.thread + 1).equals(call.threads)):
            k.store(call.args.pointer("out"), k.load(call.args.pointer("x")) * 0.5)
