"""A sequence's state in slots of the pool (docs/decisions/states.md).

A layer's state is pieces, each in one slot, at places that are int32 [pieces, 2]: which of the state's slots, and the
byte offset in it (:mod:`pillion.engine.models.state_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Bool, Int, Kernel, KernelVariable, Ptr, Vec
from pillion.kernels.cpu.language.module import KernelCall

# Record fields of kernels with a state: where the layer's pieces are in a state's slots.
STATE_POINTERS, STATE_NUMBERS = ("places",), ("slot_bytes",)


# Prefetch distance in pieces: a state's slots are scattered over the pool, which defeats the hardware prefetcher.
_PIECES_AHEAD = 2
# Ranges of a kernel's items that each thread draws, if there are enough items.
_RANGES_PER_THREAD = 16


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of a head's matrix in a kernel's code, rows of one vector, which one token changes.

    Attributes:
        source, target: where the piece is read, and where it is written.
        ahead: the piece to prefetch meanwhile, for the last token of a sequence; None for other tokens. The last token
            writes the sequence's state, with non-temporal stores: caching it would read each line before it is written
            and evict weights of the next step.
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
        k, step = call.k, call.step
        rows, row = step.pointer("query_starts") + sequence * 4, sequence * step.number("state_pages") * 4
        reads, writes = step.pointer("state_reads") + row, step.pointer("state_writes") + row
        begin, end, slot = k.load_int(rows, 32), k.load_int(rows + 4, 32), k.load_int(reads, 32)
        return CarriedState(call, begin, end, slot > -1, slot < 0, reads, writes)

    def old(self, piece: Int) -> Ptr:
        """Return the address of a piece of the state before the step, if there is one."""
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
def each_sequence_and(call: KernelCall, count: Int | int) -> Iterator[tuple[CarriedState, Int]]:
    """Yield the pairs (state of a sequence, number below ``count``) that a thread draws."""
    count = call.k.int(count)
    with call.shared_range(call.step.number("num_seqs") * count, 1) as (item, _):
        yield CarriedState.of(call, item // count), item % count


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """The piece ``column`` of a head's matrix in the state of one sequence; ``number`` is its index in the layer.
    ``ahead`` is a piece to prefetch, which the thread processes soon."""

    state: CarriedState
    head: Int
    column: Int
    number: Int
    ahead: Ptr

    def memories(self, rows: int) -> Iterator[tuple[Int, Memory]]:
        """Yield a row, and the piece [rows, PIECE_COLUMNS], twice: for the code of all rows of the sequence but the
        last, between which the piece is in scratch memory, and for the code of the last one. Without a state, the first
        row reads zeros."""
        state, k, between = self.state, self.state.call.k, self.state.call.scratch
        old, new, last = state.old(self.number), state.new(self.number), state.end - 1
        with k.when(state.fresh), k.range(rows) as row:
            k.store(between + row * VECTOR_BYTES, k.vector(0.0))
        with k.range(last, state.begin) as row:
            yield row, Memory(k, k.select_ptr(state.found & row.equals(state.begin), old, between), between, None)
        yield last, Memory(k, k.select_ptr(state.found & last.equals(state.begin), old, between), new, self.ahead)


@contextmanager
def each_piece(call: KernelCall, heads: int, pieces: int) -> Iterator[HeadPiece]:
    """Yield the pieces of matrices that a thread draws, all ``pieces`` of a sequence's head in sequence."""
    k, count = call.k, call.step.number("num_seqs") * heads
    with call.items_ahead(count, count // (call.threads * _RANGES_PER_THREAD)) as (item, after):
        state, head = CarriedState.of(call, item // heads), item % heads
        with k.range(pieces) as column:
            ahead = column + _PIECES_AHEAD
            mine = ahead < pieces
            place, then = k.select(mine, ahead, ahead - pieces), k.select(mine, item, after)
            coming = CarriedState.of(call, then // heads).old(then % heads * pieces + k.min(place, pieces - 1))
            yield HeadPiece(state, head, column, head * pieces + column, coming)
    k.store_fence()


def zeros(k: Kernel, rows: int) -> list[KernelVariable]:
    """Return variables for partial sums over ``rows`` rows of a matrix: enough to hide the latency of an addition, and
    a divisor of ``rows``."""
    count = next(count for count in (4, 3, 2, 1) if rows % count == 0)
    return [k.variable(k.vector(0.0)) for _ in range(count)]


def added_up(sums: list[KernelVariable]) -> Vec:
    total: Vec = sums[0].value
    for one in sums[1:]:
        total = total + one.value
    return total
