"""All-reduce over ranks, the processes that share a model (tensor parallelism), in memory that all of them map.

    each rank writes its partial rows -> SumRanks: sets ARRIVED, waits for all ranks, sums the partials in rank order
    ... -> MeetRanks: sets ARRIVED, waits for all ranks (a barrier)

Both are phases of a step. A phase has a number that only grows, the same in all ranks: the phase at the step's begin
plus the operation's ``number``. Every rank sums all partials itself, so that each sum needs one wait, and a result
has the same bits in all ranks, in whatever order they arrive. Two buffers of partials alternate: when a rank writes its
partials of a phase, all ranks have arrived at the previous phase, so partials from two phases ago are no longer read.

A waiting rank polls for a while, then sleeps in the operating system, because ranks may share a core. An arrival wakes
it; after a nap it also checks ABORT. After too many naps in one wait it sets ABORT itself, which ends all waits; the
results of the step must then be discarded.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import I64, VECTOR_BYTES, Int, Kernel, Ptr
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.language.sync import (
    ALL_SLEEPERS,
    FUTEX_WAIT,
    FUTEX_WAKE,
    atomic_add,
    atomic_load,
    atomic_raise,
    atomic_swap,
    futex,
    pause,
)
from pillion.kernels.cpu.rows.rows import row_squares, vectors_of

# The shared words: a line with ABORT, then a line for each rank. Processors prefetch lines of 64 bytes in pairs.
RANK_LINE_BYTES = 128
ABORT = 0
# Offsets in a rank's line: the last phase that it has arrived at, and the number of ranks that sleep until it arrives.
ARRIVED, SLEEPERS = 0, 8
# Offsets in the int64 parameters of a rank's kernels: the phase of all ranks when the step began, the naps in one wait
# before ABORT, the duration of a nap, and the bytes between two ranks' partials.
PHASE, NAPS, NAP_NS, STRIDE = 0, 8, 16, 24
# Polls before a rank sleeps, some 40 us: a phase is about as long, and another rank may need this core.
POLLS = 1_500
# Vectors of a row per work item. Rows are divided because a step often has fewer rows than there are threads.
_CHUNK_VECTORS = 32


def words_bytes(ranks: int) -> int:
    """Return the bytes of the shared words of ``ranks`` ranks."""
    return (1 + ranks) * RANK_LINE_BYTES


@dataclass(frozen=True, slots=True)
class SumRanks(KernelSpec):
    """Sum over ranks: ``out`` [rows, width] = factor * (the sum of all ranks' ``partials`` [ranks][allocated
    rows][width]), all float32.

    ``rank`` is this rank, and ``number`` the index of the operation among the step's sums and barriers. Ranks wait for
    one another at the shared ``words``; ``collective`` has the parameters (PHASE and so on). ``add``: add to ``out``
    instead.
    """

    layout = RecordLayout(
        "sum_ranks",
        pointers=("partials", "out", "words", "collective"),
        numbers=("rank", "number", "width", "row_stride", "out_stride"),
        reals=("factor",),
    )

    ranks: int
    add: bool
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        _meet(call, self.ranks)
        k, args = call.k, call.args
        partials, out, factor = args.pointer("partials"), args.pointer("out"), args.real("factor")
        rank_stride, row_stride, out_stride = (
            k.load_int(args.pointer("collective") + STRIDE),
            args.number("row_stride"),
            args.number("out_stride"),
        )
        vectors = vectors_of(args.number("width"))
        chunks = (vectors + (_CHUNK_VECTORS - 1)) // _CHUNK_VECTORS
        with call.even_share(call.step.number(f"num_{self.rows_of}") * chunks) as item:
            row, first = item // chunks, item % chunks * _CHUNK_VECTORS
            sources = [partials + (rank_stride * rank + row * row_stride) for rank in range(self.ranks)]
            with k.range(k.min(first + _CHUNK_VECTORS, vectors), first) as i:
                at = i * VECTOR_BYTES
                total = k.load(sources[0] + at)
                for source in sources[1:]:
                    total = total + k.load(source + at)
                target = out + (row * out_stride + at)
                k.store(target, k.fma(factor, total, k.load(target)) if self.add else total * factor)


@dataclass(frozen=True, slots=True)
class MeetRanks(KernelSpec):
    """Barrier of all ranks: afterwards each can read what all have written before it."""

    layout = RecordLayout("meet_ranks", pointers=("words", "collective"), numbers=("rank", "number"))

    ranks: int

    def emit(self, call: KernelCall) -> None:
        _meet(call, self.ranks)


@dataclass(frozen=True, slots=True)
class ProjectionSquares(KernelSpec):
    """Squares of projections: ``out`` [T, 2] float32, the sums of squares of a row's queries and of its keys in
    ``qkv``. RotateWrite needs their sums over all ranks.

    ``counts_keys``: whether to sum the keys; False if another rank has the same keys, and sums them.
    """

    layout = RecordLayout("projection_squares", pointers=("qkv", "out"), numbers=("qkv_stride", "out_stride"))

    head_dim: int
    heads: int
    kv_heads: int
    counts_keys: bool

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        qkv, out = args.pointer("qkv"), args.pointer("out")
        qkv_stride, out_stride = args.number("qkv_stride"), args.number("out_stride")
        with call.even_share(call.step.number("num_tokens")) as row:
            source, target = qkv + row * qkv_stride, out + row * out_stride
            keys = source + self.heads * self.head_dim * 4
            k.store_first(target, row_squares(k, source, k.int(self.heads * self.head_dim)))
            sums = row_squares(k, keys, k.int(self.kv_heads * self.head_dim)) if self.counts_keys else k.vector(0.0)
            k.store_first(target + 4, sums)


def _meet(call: KernelCall, ranks: int) -> None:
    """Arrive at the operation's phase, and wait for all ranks. Any of the operation's calls may run first, so each of
    them arrives and waits."""
    k, args = call.k, call.args
    words, collective = args.pointer("words"), args.pointer("collective")
    phase = k.load_int(collective + PHASE) + args.number("number")
    with k.when(k.in_bounds(words, words_bytes(ranks))):
        limits = k.load_int(collective + NAPS), k.load_int(collective + NAP_NS)
        values = words, args.number("rank"), k.int(ranks), phase, *limits
        k.call_subroutine("meet_ranks_words", values, _arrive_and_wait)


def _arrive_and_wait(k: Kernel, words: Ptr, rank: Int, ranks: Int, phase: Int, naps: Int, nap_ns: Int) -> None:
    """Set this rank's ARRIVED, and wait for each rank until it has arrived, or ABORT is set."""
    own_line = words + (rank * RANK_LINE_BYTES + RANK_LINE_BYTES)
    with k.when(atomic_load(k, own_line + ARRIVED) < phase):
        atomic_raise(k, own_line + ARRIVED, phase)
        with k.when(atomic_load(k, own_line + SLEEPERS) > 0):
            futex(k, own_line + ARRIVED, FUTEX_WAKE, I64(ALL_SLEEPERS))
    polls, naps_taken = k.variable(k.int(0)), k.variable(k.int(0))
    with k.range(ranks) as peer:
        line = words + (peer * RANK_LINE_BYTES + RANK_LINE_BYTES)
        with k.forever() as end:
            arrived = atomic_load(k, line + ARRIVED)
            k.break_if(end, (arrived >= phase) | (atomic_load(k, words + ABORT) > 0))
            polls.value = polls.value + 1
            with k.builder.if_else((polls.value < POLLS).ir) as (soon, late):
                with soon:
                    pause(k)
                with late:
                    atomic_add(k, line + SLEEPERS, 1)
                    futex(k, line + ARRIVED, FUTEX_WAIT, arrived.ir, nap_ns)
                    atomic_add(k, line + SLEEPERS, -1)
                    with k.when(atomic_load(k, line + ARRIVED).equals(arrived)):
                        naps_taken.value = naps_taken.value + 1
                    with k.when(naps_taken.value >= naps):
                        atomic_swap(k, words + ABORT, 1)
