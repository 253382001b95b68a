"""Finds a sequence's state in slots of the pool (docs/decisions/054-states.md).

A layer's state is pieces, each in one slot, at places that are int32 [pieces, 2]: which of the state's slots, and how
many bytes after its begin (:mod:`pillion.engine.models.state_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Bool, Int, Kernel, KernelVariable, Ptr, Vec
from pillion.kernels.cpu.language.module import KernelCall

# A kernel whose layer has a state has these fields in its record: where the layer's pieces are in a state's slots.
STATE_POINTERS, STATE_NUMBERS = ("places",), ("slot_bytes",)


@dataclass(frozen=True, slots=True)
class Memory:
    """Represents a piece of a head's matrix in a kernel's code: rows of one vector. ``distance`` is how far before the
    place that is written, ``new``, the piece is still read, in bytes."""

    k: Kernel
    new: Ptr
    distance: KernelVariable

    def load(self, row: Int) -> Vec:
        return self.k.load(self.new + self.distance.value + row * VECTOR_BYTES)

    def store(self, row: Int, value: Vec) -> None:
        self.k.store(self.new + row * VECTOR_BYTES, value)

    def stands(self) -> None:
        """Notes that all rows were stored: from now on they are read there."""
        self.distance.value = self.k.int(0)


@dataclass(frozen=True, slots=True)
class CarriedState:
    """Represents the state of one sequence and layer in a kernel's code.

    Attributes:
        begin, end: the sequence's rows in the step.
        found, fresh: whether there is a state before them, or none.
    """

    call: KernelCall
    begin: Int
    end: Int
    found: Bool
    fresh: Bool
    reads: Ptr
    writes: Ptr

    @staticmethod
    def of(call: KernelCall, sequence: Int) -> CarriedState:
        """Returns the state of the sequence with this number."""
        k, step = call.k, call.step
        rows, row = step.pointer("query_starts") + sequence * 4, sequence * step.number("state_pages") * 4
        reads, writes = step.pointer("state_reads") + row, step.pointer("state_writes") + row
        begin, end, slot = k.load_int(rows, 32), k.load_int(rows + 4, 32), k.load_int(reads, 32)
        return CarriedState(call, begin, end, slot > -1, slot < 0, reads, writes)

    def old(self, piece: Int) -> Ptr:
        """Returns where a piece of the state before the step is, if there is one."""
        return self._piece(self.reads, piece)

    def new(self, piece: Int) -> Ptr:
        """Returns where a piece of the state after the step goes."""
        return self._piece(self.writes, piece)

    def memory(self, piece: Int, rows: int) -> Memory:
        """Returns a piece [rows, PIECE_COLUMNS] of a head's matrix, filled with zeros where there is no state yet."""
        k, old, new = self.call.k, self.old(piece), self.new(piece)
        with k.when(self.fresh), k.range(rows) as row:
            k.store(new + row * VECTOR_BYTES, k.vector(0.0))
        distance = Int(k, k.builder.sub(old.ir, new.ir))
        return Memory(k, new, k.variable(k.select(self.found, distance, k.int(0))))

    def _piece(self, slots: Ptr, piece: Int) -> Ptr:
        k, args = self.call.k, self.call.args
        place = args.pointer("places") + piece * 8
        slot = k.load_int(slots + k.load_int(place, 32) * 4, 32)
        return self.call.step.pointer("pool") + (slot * args.number("slot_bytes") + k.load_int(place + 4, 32))


@contextmanager
def each_sequence_and(call: KernelCall, count: Int | int) -> Iterator[tuple[CarriedState, Int]]:
    """Yields the pairs (state of a sequence, number below ``count``) that a thread draws."""
    count = call.k.int(count)
    with call.shared_range(call.step.number("num_seqs") * count, 1) as (item, _):
        yield CarriedState.of(call, item // count), item % count


def zeros(k: Kernel, rows: int) -> list[KernelVariable]:
    """Returns variables for sums over so many rows of a matrix, as many as hide the latency of an addition and divide
    the rows."""
    count = next(count for count in (4, 3, 2, 1) if rows % count == 0)
    return [k.variable(k.vector(0.0)) for _ in range(count)]


def added_up(sums: list[KernelVariable]) -> Vec:
    """Returns the sum of the variables, one after the other."""
    total: Vec = sums[0].value
    for one in sums[1:]:
        total = total + one.value
    return total
