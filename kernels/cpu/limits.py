"""What the processor and its memory can do at most, measured by kernels that do nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pillion.kernels.cpu.language.emit import VECTOR_BYTES
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import Call
from pillion.kernels.cpu.language.records import Layout

# Sums in flight: enough to hide the latency of a product, few enough to stay in registers.
SUMS = 12
PEAK = Layout("peak", pointers=("sink",), numbers=("rounds",))
READ = Layout("read", pointers=("data", "sink"), numbers=("bytes",))
# What a thread takes at a time, and how far ahead it asks.
_PIECE_BYTES = 65536
_AHEAD_BYTES = 4096
_STREAMS = 8


@dataclass(frozen=True, slots=True)
class PeakDots:
    """Products of bfloat16 pairs (or of float32) that never leave the registers: ``rounds`` of SUMS on each thread."""

    layout: ClassVar[Layout] = PEAK
    bf16: bool

    @property
    def name(self) -> str:
        return f"peak_dots_{'bf16' if self.bf16 else 'f32'}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of a round."""
        return SUMS * LANES * (4 if self.bf16 else 2)

    def emit(self, call: Call) -> None:
        k, sink = call.k, call.args.pointer("sink") + call.thread * VECTOR_BYTES
        values, pairs = k.load(sink), k.load_pairs(sink)
        sums = [k.variable(k.vector(0.0)) for _ in range(SUMS)]
        with k.range(call.args.number("rounds")):
            for total in sums:
                total.value = k.dot(total.value, pairs, pairs) if self.bf16 else k.fma(values, values, total.value)
        result = sums[0].value
        for total in sums[1:]:
            result = result + total.value
        k.store(sink, result)


@dataclass(frozen=True, slots=True)
class ReadAll:
    """Reads ``bytes`` of ``data`` once, a multiple of 64 KiB, all threads together."""

    layout: ClassVar[Layout] = READ

    @property
    def name(self) -> str:
        return "read_all"

    def emit(self, call: Call) -> None:
        k, data = call.k, call.args.pointer("data")
        sums = [k.variable(k.vector(0.0)) for _ in range(_STREAMS)]
        with call.shared_range(call.args.number("bytes") // _PIECE_BYTES, 1) as (piece, _):
            base = data + piece * _PIECE_BYTES
            with k.range(_PIECE_BYTES // VECTOR_BYTES, step=_STREAMS) as line:
                for number, total in enumerate(sums):
                    at = base + (line + number) * VECTOR_BYTES
                    k.prefetch(at + _AHEAD_BYTES)
                    total.value = total.value + k.load(at)
        result = sums[0].value
        for total in sums[1:]:
            result = result + total.value
        k.store(call.args.pointer("sink") + call.thread * VECTOR_BYTES, result)
