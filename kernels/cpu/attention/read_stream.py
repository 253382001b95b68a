"""Reads what attention reads, and does next to nothing with it: the limit that attention is measured against.

The same items, the same pieces in the same order, several at a time; each line is added to one of four sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.attention.attention_rows import PARTITION_GROUPS, Groups, Shape
from pillion.kernels.cpu.attention.cpu_attention import Span, each_unit, emit_groups
from pillion.kernels.cpu.language.emit import VECTOR_BYTES
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import Call
from pillion.kernels.cpu.language.records import Layout
from pillion.kernels.cpu.language.values import Int, Variable

# ``sink`` has 64 bytes for each thread: what is read must go somewhere, or the compiler drops the reading.
STREAM = Layout(
    "stream",
    pointers=("sink",),
    numbers=("layer_offset", "slot_bytes", "piece_bytes", "value_offset", "kv_heads"),
)
# Groups that are read side by side, each into a sum of its own: several streams are fetched faster than one.
_SIDE = 4


@dataclass(frozen=True, slots=True)
class Stream:
    """Adds up the lines of all items of the step, as if they were float32."""

    shape: Shape

    @property
    def name(self) -> str:
        """Names every parameter."""
        return f"stream_{self.shape.name}"

    @property
    def layout(self) -> Layout:
        """Of its record."""
        return STREAM

    def emit(self, call: Call) -> None:
        """Writes its instructions."""
        k = call.k
        sums = [k.variable(k.vector(0.0)) for _ in range(_SIDE)]
        with each_unit(call, "items") as (head, unit):
            last = (unit.behind(self.shape.group, unit.rows - 1) + (LANES - 1)) // LANES
            with k.range(unit.last, unit.first) as partition:
                end = k.least((partition + 1) * PARTITION_GROUPS, last)
                span = Span(partition * PARTITION_GROUPS, end, last)
                groups = emit_groups(call, self.shape, unit.sequence, head, span, 0)
                with k.range(groups.count * 2, step=_SIDE) as place:
                    self._emit_groups(groups, place, sums)
        total = sums[0].value
        for other in sums[1:]:
            total = total + other.value
        k.store(call.args.pointer("sink") + call.thread * VECTOR_BYTES, total)

    def _emit_groups(self, groups: Groups, place: Int, sums: list[Variable]) -> None:
        k = groups.pool.k
        bases = [groups.at(place + i) for i in range(_SIDE)]
        ahead = [groups.at(place + (_SIDE + i)) for i in range(_SIDE)]
        with k.range(self.shape.group_bytes, step=VECTOR_BYTES) as offset:
            for total, base, ptr in zip(sums, bases, ahead, strict=True):
                k.prefetch(ptr + offset)
                total.value = total.value + k.load(base + offset)
