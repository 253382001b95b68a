"""Sums over ranks, the processes that share a model (tensor parallelism), in memory that all of them map.

    each rank writes its partial rows -> SumRanks: says ARRIVED, waits for all others, adds all partials in their order
    ... -> MeetRanks: says ARRIVED, waits for all others

Both are phases of a step. A phase has a number that only grows, the same in all ranks: the step's ``phase`` and the
operation's ``number``. Every rank adds up all partials for itself, so that there is one wait for each sum, and a result
has the same bits in each rank and whenever a rank arrives. Two buffers of partials take turns: where a rank writes its
partials of a phase, all have arrived at the phase before, and so nobody reads those of two phases before any more.

A rank that waits polls for a while, then sleeps in the operating system, because ranks may share a core. An arrival
wakes it; after a nap it also looks whether the ranks shall end (ABORT). A rank that has napped often enough in one wait
says so itself. From then on no wait lasts, and what the step computes is worth nothing.
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
from pillion.kernels.cpu.rows.rows import vectors_of

# The shared words: a line with ABORT, then a line for each rank. Processors fetch lines of 64 bytes in pairs.
RANK_LINE_BYTES = 128
ABORT = 0
# Words in the line of a rank: the last phase that it has arrived at, and how many others sleep until it arrives.
ARRIVED, SLEEPERS = 0, 8
# How often a rank polls before it sleeps, some 40 us: a phase is about as long, and another rank may need this core.
POLLS = 1_500
# Vectors of a row in a work item: a step has often fewer rows than there are threads, so rows are cut.
_CHUNK_VECTORS = 32


def words_bytes(ranks: int) -> int:
    """Bytes of the shared words of so many ranks."""
    return (1 + ranks) * RANK_LINE_BYTES


@dataclass(frozen=True, slots=True)
class SumRanks(KernelSpec):
    """``out`` [rows, width] = factor * (the sum of all ranks' ``partials`` [ranks][room for rows][width]), all float32.

    ``rank``: this rank. ``number``: of the operation among those of a step that wait. ``add``: adds to ``out`` instead.
    """

    layout = RecordLayout(
        "sum_ranks",
        pointers=("partials", "out"),
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
            call.step.number("rank_stride"),
            args.number("row_stride"),
            args.number("out_stride"),
        )
        vectors = vectors_of(args.number("width"))
        chunks = (vectors + (_CHUNK_VECTORS - 1)) // _CHUNK_VECTORS
        with call.even_share(call.step.number(f"num_{self.rows_of}") * chunks) as item:
            row, first = item // chunks, item % chunks * _CHUNK_VECTORS
            sources = [partials + (rank_stride * rank + row * row_stride) for rank in range(self.ranks)]
            with k.range(k.least(first + _CHUNK_VECTORS, vectors), first) as i:
                at = i * VECTOR_BYTES
                total = k.load(sources[0] + at)
                for source in sources[1:]:
                    total = total + k.load(source + at)
                target = out + (row * out_stride + at)
                k.store(target, k.fma(factor, total, k.load(target)) if self.add else total * factor)


@dataclass(frozen=True, slots=True)
class MeetRanks(KernelSpec):
    """Ends when all ranks have arrived: what each has written before, all can read."""

    layout = RecordLayout("meet_ranks", numbers=("rank", "number"))

    ranks: int

    def emit(self, call: KernelCall) -> None:
        _meet(call, self.ranks)


def _meet(call: KernelCall, ranks: int) -> None:
    """Arrives at the operation's phase, and waits for all ranks. Each call of the operation may be the first one."""
    k, args = call.k, call.args
    words, phase = call.step.pointer("rank_words"), call.step.number("phase") + args.number("number")
    with k.when(k.holds(words, words_bytes(ranks))):
        limits = call.step.number("rank_naps"), call.step.number("rank_nap_ns")
        values = words, args.number("rank"), k.int(ranks), phase, *limits
        k.call_subroutine("meet_ranks_words", values, _arrive_and_wait)


def _arrive_and_wait(k: Kernel, words: Ptr, rank: Int, ranks: Int, phase: Int, naps: Int, nap_ns: Int) -> None:
    mine = words + (rank * RANK_LINE_BYTES + RANK_LINE_BYTES)
    with k.when(atomic_load(k, mine + ARRIVED) < phase):
        atomic_raise(k, mine + ARRIVED, phase)
        with k.when(atomic_load(k, mine + SLEEPERS) > 0):
            futex(k, mine + ARRIVED, FUTEX_WAKE, I64(ALL_SLEEPERS))
    polls, napped = k.variable(k.int(0)), k.variable(k.int(0))
    with k.range(ranks) as other:
        line = words + (other * RANK_LINE_BYTES + RANK_LINE_BYTES)
        with k.forever() as end:
            arrived = atomic_load(k, line + ARRIVED)
            k.leave(end, (arrived >= phase) | (atomic_load(k, words + ABORT) > 0))
            polls.value = polls.value + 1
            with k.builder.if_else((polls.value < POLLS).ir) as (soon, late):
                with soon:
                    pause(k)
                with late:
                    atomic_add(k, line + SLEEPERS, 1)
                    futex(k, line + ARRIVED, FUTEX_WAIT, arrived.ir, nap_ns)
                    atomic_add(k, line + SLEEPERS, -1)
                    with k.when(atomic_load(k, line + ARRIVED).equals(arrived)):
                        napped.value = napped.value + 1
                    with k.when(napped.value >= naps):
                        atomic_swap(k, words + ABORT, 1)
