"""State spaces, token by token, with a decay per token (Mamba-2, arXiv 2405.21060), or per token and value of the state
(Mamba-1, arXiv 2312.00752).

    steps --softplus, decay--> times, keeps        values, writes, reads, times, keeps --each sequence and head--> out
    values, writes, reads, steps --each sequence and head--> out                                           (Mamba-1)

A head's matrix [state_dim, head_dim] is divided into pieces of PIECE_COLUMNS columns. Columns are values of the head,
so that its output is a sum of vectors. A thread processes one piece through all rows of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.states.state_pages import (
    STATE_NUMBERS,
    STATE_POINTERS,
    HeadPiece,
    Memory,
    each_piece,
    total_of,
    zeros,
)
from pillion.kernels.state_pieces import PIECE_COLUMNS


@dataclass(frozen=True, slots=True)
class PrepareSpace(KernelSpec):
    """Compute the time steps (delta) ``times`` of T rows, and the decay factors ``keeps`` of the heads' matrices.

    steps    [T, ...] float32: input of each head's time step
    decay, shift  [heads] float32: each head's decay times -log2(e), and the bias of its time step
    times, keeps  [T, heads] float32
    """

    layout = RecordLayout(
        "prepare_space",
        pointers=("steps", "decay", "shift", "times", "keeps"),
        numbers=("steps_stride", "heads_stride"),
    )

    heads: int

    def emit(self, call: KernelCall) -> None:
        k, args, vectors = call.k, call.args, -(-self.heads // LANES)
        with call.even_share(call.step.number("num_tokens") * vectors) as item:
            row, at = item // vectors, item % vectors * VECTOR_BYTES
            steps = k.load(args.pointer("steps") + row * args.number("steps_stride") + at)
            time = k.softplus(steps + k.load(args.pointer("shift") + at))
            target = row * args.number("heads_stride") + at
            k.store(args.pointer("times") + target, time)
            k.store(args.pointer("keeps") + target, k.exp2(time * k.load(args.pointer("decay") + at)))


@dataclass(frozen=True, slots=True)
class RunStateSpace(KernelSpec):
    """Run the state space over each sequence's rows, from its old state to its new one.

    values   [T, heads, head_dim] float32
    writes, reads  [T, groups, state_dim] float32 (B and C), rows of the same buffer; neighbouring heads share a group
    times, keeps  output of :class:`PrepareSpace`
    skip     [heads] float32 (D): factor of the values added to a head's outputs
    out      [T, heads * head_dim] float32

    head_dim is a multiple of PIECE_COLUMNS.
    """

    layout = RecordLayout(
        "run_state_space",
        pointers=("values", "writes", "reads", "times", "keeps", "skip", "out", *STATE_POINTERS),
        numbers=("mixed_stride", "heads_stride", "out_stride", *STATE_NUMBERS),
    )

    heads: int
    head_dim: int
    groups: int
    state_dim: int

    def emit(self, call: KernelCall) -> None:
        with each_piece(call, self.heads, self.head_dim // PIECE_COLUMNS) as piece:
            for row, memory in piece.memories(self.state_dim):
                self._row(call, memory, row, piece)

    def _row(self, call: KernelCall, memory: Memory, row: Int, piece: HeadPiece) -> None:
        k, args, head, column = call.k, call.args, piece.head, piece.column
        of_row = row * args.number("mixed_stride")
        group = of_row + head // (self.heads // self.groups) * (self.state_dim * 4)
        writes, reads = args.pointer("writes") + group, args.pointer("reads") + group
        of_head = row * args.number("heads_stride") + head * 4
        keeps = k.broadcast(args.pointer("keeps") + of_head)
        at_column = head * (self.head_dim * 4) + column * VECTOR_BYTES
        value = k.load(args.pointer("values") + of_row + at_column)
        written = value * k.broadcast(args.pointer("times") + of_head)
        sums = zeros(k, self.state_dim)
        with k.range(self.state_dim, step=len(sums)) as first:
            for part, total in enumerate(sums):
                at = (first + part) * 4
                state = k.fma(k.broadcast(writes + at), written, memory.load(first + part) * keeps)
                memory.store(first + part, state)
                total.value = k.fma(state, k.broadcast(reads + at), total.value)
        out = k.fma(value, k.broadcast(args.pointer("skip") + head * 4), total_of(sums))
        k.store(args.pointer("out") + row * args.number("out_stride") + at_column, out)


@dataclass(frozen=True, slots=True)
class RunSelectiveScan(KernelSpec):
    """Run the selective scan over each sequence's rows, from its old state to its new one.

    values, steps  [T, heads * head_dim] float32: steps are the inputs of each channel's time step
    writes, reads  [T, state_dim] float32 (B and C)
    decay    [heads * head_dim / PIECE_COLUMNS, state_dim, PIECE_COLUMNS] float32 (A): decay of each value of a
             channel's row, times -log2(e)
    skip     [heads * head_dim] float32 (D): factor of the values added to a channel's outputs
    out      [T, heads * head_dim] float32

    head_dim is a multiple of PIECE_COLUMNS.
    """

    layout = RecordLayout(
        "run_selective_scan",
        pointers=("values", "steps", "writes", "reads", "decay", "skip", "out", *STATE_POINTERS),
        numbers=("values_stride", "steps_stride", "writes_stride", "reads_stride", "out_stride", *STATE_NUMBERS),
    )

    heads: int
    head_dim: int
    state_dim: int

    def emit(self, call: KernelCall) -> None:
        with each_piece(call, self.heads, self.head_dim // PIECE_COLUMNS) as piece:
            for row, memory in piece.memories(self.state_dim):
                self._row(call, memory, row, piece)

    def _row(self, call: KernelCall, memory: Memory, row: Int, piece: HeadPiece) -> None:
        k, args, at_piece = call.k, call.args, piece.number * VECTOR_BYTES
        of_row = {
            name: args.pointer(name) + row * args.number(f"{name}_stride")
            for name in ("values", "steps", "writes", "reads", "out")
        }
        value, time = k.load(of_row["values"] + at_piece), k.softplus(k.load(of_row["steps"] + at_piece))
        written, decay = value * time, args.pointer("decay") + at_piece * self.state_dim
        sums = zeros(k, self.state_dim)
        with k.range(self.state_dim, step=len(sums)) as first:
            for part, total in enumerate(sums):
                at = (first + part) * 4
                decayed = memory.load(first + part) * k.exp2(time * k.load(decay + (first + part) * VECTOR_BYTES))
                state = k.fma(k.broadcast(of_row["writes"] + at), written, decayed)
                memory.store(first + part, state)
                total.value = k.fma(state, k.broadcast(of_row["reads"] + at), total.value)
        k.store(of_row["out"] + at_piece, k.fma(value, k.load(args.pointer("skip") + at_piece), total_of(sums)))
