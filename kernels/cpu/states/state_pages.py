"""A sequence's state in slots of the pool (docs/decisions/states.md).

A layer's state consists of pieces, each within one slot. Their ``places`` are int32 [pieces, 2]: the index among the
state's slots, and the byte offset in the slot (:mod:`pillion.engine.models.state_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Bool, Int, Kernel, KernelVariable, Ptr, Vec
from pillion.kernels.cpu.language.module import KernelCall

# Record fields of kernels with a state: the places of the layer's pieces, and the size of a slot.
STATE_POINTERS, STATE_NUMBERS = ("places",), ("slot_bytes",)


# Prefetch distance in pieces: a state's slots are scattered over the pool, which defeats the hardware prefetcher.
_PIECES_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of a head's matrix in a kernel's code, rows of one vector, which one token updates.

    Attributes:
        source, target: addresses at which the piece is read and written.
        ahead: for the last token of a sequence the piece to prefetch; None for earlier tokens. The last token writes
            the state with non-temporal stores: cached stores would first read each line, and evict weights of the next
            step.
    """

    k: Kernel
    source: Ptr
    target: Ptr
    ahead: Ptr | None

    def load(self, row: Int) -> Vec:
        return self.k.load(self.source + row * VECTOR_BYTES)

    def store(self, row: Int, value: Vec) -> None:
        at = row * VECTOR_BYTES
        if self.ahead is None:
            self.k.store(self.target + at, value)
            return
        self.k.prefetch(self.ahead + at, near=False)
        self.k.stream(self.target + at, value)


@dataclass(frozen=True, slots=True)
class CarriedState:
    """The state of one sequence and layer in a kernel's code.

    Attributes:
        begin, end: the sequence's rows in the step.
        exists, is_new: whether the sequence has a state from earlier steps, and the opposite.
        reads, writes: the slots of the old and of the new state.
    """

    call: KernelCall
    begin: Int
    end: Int
    exists: Bool
    is_new: Bool
    reads: Ptr
    writes: Ptr

    @staticmethod
    def of(call: KernelCall, sequence: Int) -> CarriedState:
        k, step = call.k, call.step
        rows, row = step.pointer("query_starts") + sequence * 4, sequence * step.number("state_pages") * 4
        reads, writes = step.pointer("state_reads") + row, step.pointer("state_writes") + row
        begin, end, slot = k.load_int(rows, 32), k.load_int(rows + 4, 32), k.load_int(reads, 32)
        return CarriedState(call, begin, end, slot > -1, slot < 0, reads, writes)

    def old(self, piece: Int) -> Ptr:
        """Return the address of a piece of the state before the step; only valid if the state exists."""
        return self._piece(self.reads, piece)

    def new(self, piece: Int) -> Ptr:
        """Return the address of a piece of the state after the step."""
        return self._piece(self.writes, piece)

    def _piece(self, slots: Ptr, piece: Int) -> Ptr:
        k, args = self.call.k, self.call.args
        place = args.pointer("places") + piece * 8
        slot = k.load_int(slots + k.load_int(place, 32) * 4, 32)
        return self.call.step.pointer("pool") + (slot * args.number("slot_bytes") + k.load_int(place + 4, 32))


@contextmanager
def each_sequence_piece(call: KernelCall, count: Int) -> Iterator[tuple[CarriedState, Int]]:
    """Append a loop over the pieces that a thread draws; yield the sequence's state and the index of the piece, below
    ``count``."""
    with call.shared_range(call.step.number("num_seqs") * count, 1) as (item, _):
        yield CarriedState.of(call, item // count), item % count


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """A piece of a head's matrix in a sequence's state: the head's ``column``-th, and the layer's ``number``-th.
    ``ahead`` is a piece that the thread processes soon, to prefetch."""

    state: CarriedState
    head: Int
    column: Int
    number: Int
    ahead: Ptr

    def memories(self, rows: int) -> Iterator[tuple[Int, Memory]]:
        """Yield a row and its piece [rows, PIECE_COLUMNS] twice: for the code of all rows of the sequence but the last,
        which keep the piece in scratch memory, and for the code of the last row. A new state begins with zeros."""
        state, k, scratch = self.state, self.state.call.k, self.state.call.scratch
        old, new, last = state.old(self.number), state.new(self.number), state.end - 1
        with k.when(state.is_new), k.range(rows) as row:
            k.store(scratch + row * VECTOR_BYTES, k.vector(0.0))
        with k.range(last, state.begin) as row:
            yield row, Memory(k, k.select_ptr(state.exists & row.equals(state.begin), old, scratch), scratch, None)
        yield last, Memory(k, k.select_ptr(state.exists & last.equals(state.begin), old, scratch), new, self.ahead)


@contextmanager
def each_piece(call: KernelCall, heads: int, pieces: int) -> Iterator[HeadPiece]:
    """Append a loop over the pieces of matrices that a thread draws, and yield a piece; the ``pieces`` of a sequence's
    head are consecutive."""
    k, count = call.k, call.step.number("num_seqs") * heads
    # 16 ranges of items per thread, if there are enough items.
    with call.items_ahead(count, count // (call.threads * 16)) as (item, following):
        state, head = CarriedState.of(call, item // heads), item % heads
        with k.range(pieces) as column:
            ahead = column + _PIECES_AHEAD
            is_own = ahead < pieces
            next_column, next_item = k.select(is_own, ahead, ahead - pieces), k.select(is_own, item, following)
            next_state = CarriedState.of(call, next_item // heads)
            prefetched = next_state.old(next_item % heads * pieces + k.min(next_column, pieces - 1))
            yield HeadPiece(state, head, column, head * pieces + column, prefetched)
    k.store_fence()


def zeros(k: Kernel, rows: int) -> list[KernelVariable]:
    """Return variables for partial sums over ``rows`` rows of a matrix: up to 4, which hide the latency of additions;
    their number divides ``rows``."""
    count = next(count for count in (4, 3, 2, 1) if rows % count == 0)
    return [k.variable(k.vector(0.0)) for _ in range(count)]


def total_of(sums: list[KernelVariable]) -> Vec:
    """Return the sum of the partial sums, added in order."""
    total: Vec = sums[0].value
    for partial in sums[1:]:
        total = total + partial.value
    return total
