"""Kernels that measure the limits of a processor and its memory: they only multiply, or only read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pillion.kernels.cpu.attention.attention_rows import PARTITION_GROUPS, AttentionShape, Groups
from pillion.kernels.cpu.attention.cpu_attention import GroupRange, each_attention_item, emit_groups
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, KernelVariable
from pillion.kernels.cpu.language.isa import LANES, Isa
from pillion.kernels.cpu.language.matrix_tiles import TILE_ROWS, TILE_STEPS, MatrixTiles
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout

# ``sink`` has 64 bytes per thread: without a stored result the compiler would drop the work.
# Bytes that a thread draws at a time, and prefetch distance.
_CHUNK_BYTES = 65536
_AHEAD_BYTES = 4096
_STREAMS = 8
# Groups read side by side into separate sums: memory delivers several streams faster than one.
_SIDE = 4
# Matrix tiles of sums that hide the latency of a product.
_TILE_SUMS = 4


@dataclass(frozen=True, slots=True)
class PeakDots(KernelSpec):
    """Products of bfloat16 pairs, float32 or int8 codes that never leave the registers: ``rounds`` per thread.

    A round has the sums of the largest product tile: enough to hide a product's latency, few enough for the registers.
    Without an instruction for bfloat16 pairs, the limit of bfloat16 is that of float32.

    ``rows``: "bf16", "fp32" or "int8".
    """

    layout = RecordLayout("peak", pointers=("sink",), numbers=("rounds",))

    rows: str

    def operations(self, isa: Isa) -> int:
        """Return the multiplications and additions of a round."""
        steps = self._sums(isa) * LANES
        if self._in_matrix_tiles(isa):
            steps = _TILE_SUMS * TILE_ROWS * TILE_STEPS * LANES
        return steps * {"fp32": 2, "bf16": 4, "int8": 8}[self._rows(isa)]

    def _in_matrix_tiles(self, isa: Isa) -> bool:
        return isa.matrix_tiles and self._rows(isa) != "fp32"

    def _rows(self, isa: Isa) -> str:
        return "fp32" if self.rows == "bf16" and not isa.bf16_dot else self.rows

    def _sums(self, isa: Isa) -> int:
        tiles = {"fp32": isa.fp32_tiles, "bf16": isa.bf16_tiles, "int8": isa.int8_tiles}[self._rows(isa)]
        return max(2 * tiles.wide, tiles.narrow)

    def emit(self, call: KernelCall) -> None:
        k, sink, rows = call.k, call.args.pointer("sink") + call.thread * VECTOR_BYTES, self._rows(call.k.isa)
        if self._in_matrix_tiles(k.isa):
            self._emit_matrix_tiles(call, rows)
            return
        values, pairs, quads = k.load(sink), k.load_pairs(sink), k.load_quads(sink)
        sums = [k.variable(quads if rows == "int8" else values) for _ in range(self._sums(k.isa))]
        with k.range(call.args.number("rounds")):
            for number, total in enumerate(sums):
                if rows == "int8":
                    # Varying codes: a product of several instructions would be hoisted out of the loop.
                    total.value = k.dot_codes(total.value, sums[(number + 1) % len(sums)].value, quads)
                elif rows == "bf16":
                    total.value = k.dot(total.value, pairs, pairs)
                else:
                    total.value = k.fma(values, values, total.value)
        k.write(sink, _added(sums).ir, 4)

    def _emit_matrix_tiles(self, call: KernelCall, rows: str) -> None:
        tiles, (one, other) = MatrixTiles.of(call.k), (_TILE_SUMS, _TILE_SUMS + 1)
        tiles.shape([TILE_ROWS] * (_TILE_SUMS + 2), [VECTOR_BYTES] * (_TILE_SUMS + 2))
        with call.k.range(call.args.number("rounds")):
            for total in range(_TILE_SUMS):
                if rows == "int8":
                    tiles.add_codes(total, one, other)
                else:
                    tiles.add_pairs(total, one, other)
        tiles.release()


@dataclass(frozen=True, slots=True)
class ReadAll(KernelSpec):
    """Reads ``bytes`` of ``data`` once, a multiple of 64 KiB, on all threads together."""

    layout = RecordLayout("read", pointers=("data", "sink"), numbers=("bytes",))

    def emit(self, call: KernelCall) -> None:
        k, data = call.k, call.args.pointer("data")
        sums = [k.variable(k.vector(0.0)) for _ in range(_STREAMS)]
        with call.shared_range(call.args.number("bytes") // _CHUNK_BYTES, 1) as (chunk, _):
            base = data + chunk * _CHUNK_BYTES
            with k.range(_CHUNK_BYTES // VECTOR_BYTES, step=_STREAMS) as line:
                for number, total in enumerate(sums):
                    at = base + (line + number) * VECTOR_BYTES
                    k.prefetch(at + _AHEAD_BYTES)
                    total.value = total.value + k.load(at)
        _store_sum(call, k, sums)


@dataclass(frozen=True, slots=True)
class AttentionRead(KernelSpec):
    """Reads the memory of attention item by item in its order, adding up its lines as float32: the limit for
    attention."""

    layout = RecordLayout(
        "stream",
        pointers=("sink",),
        numbers=("layer_offset", "slot_bytes", "piece_bytes", "value_offset", "kv_heads"),
    )

    shape: AttentionShape

    def emit(self, call: KernelCall) -> None:
        k = call.k
        sums = [k.variable(k.vector(0.0)) for _ in range(_SIDE)]
        with each_attention_item(call, "items", 0) as (head, item):
            last = (item.visible_end(self.shape.group, item.rows - 1) + (LANES - 1)) // LANES
            with k.range(item.last, item.first) as partition:
                end = k.min((partition + 1) * PARTITION_GROUPS, last)
                wanted = GroupRange(partition * PARTITION_GROUPS, end, last)
                groups = emit_groups(call, self.shape, item.sequence, head, wanted, 0)
                with k.range(groups.count * (1 if self.shape.latents else 2), step=_SIDE) as place:
                    self._read_groups(groups, place, sums)
        _store_sum(call, k, sums)

    def _read_groups(self, groups: Groups, place: Int, sums: list[KernelVariable]) -> None:
        k = groups.pool.k
        bases = [groups.at(place + i) for i in range(_SIDE)]
        ahead = [groups.at(place + (_SIDE + i)) for i in range(_SIDE)]
        with k.range(self.shape.group_bytes, step=VECTOR_BYTES) as offset:
            for total, base, ptr in zip(sums, bases, ahead, strict=True):
                k.prefetch(ptr + offset, near=False)
                total.value = total.value + k.load(base + offset)


def _added(sums: list[KernelVariable]) -> Any:
    result = sums[0].value
    for total in sums[1:]:
        result = result + total.value
    return result


def _store_sum(call: KernelCall, k: Kernel, sums: list[KernelVariable]) -> None:
    """Store the sum of all ``sums`` into this call's place in ``sink``."""
    result = _added(sums)
    k.store(call.args.pointer("sink") + call.thread * VECTOR_BYTES, result)
