"""Gated delta rule (arXiv 2412.06464), token by token.

    queries, keys, rates --unit length, sigmoid, decay--> units, learns, forgets --each sequence and head--> out

A head's matrix [key_dim, head_dim] is divided into pieces of PIECE_COLUMNS columns. A thread processes one piece
through all rows of a sequence: the first row reads it from the old slot, and the last row writes it to the new slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.rows.rows import vectors_of
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
class PrepareDelta(KernelSpec):
    """Compute the inputs of :class:`RunDeltaRule` for T rows.

    queries, keys  [T, key_heads, key_dim] float32, rows of one buffer
    rates    [T, 2 * heads] float32: the inputs of the heads' learning rates, then of their forget rates
    decay, shift  [heads] float32: each head's decay times -log2(e), and the bias of its forget rate
    units    [T, 2 * key_heads, key_dim padded with zeros to a multiple of 16] float32: queries and keys of unit length,
             queries divided by the root of key_dim
    learns, forgets  [T, heads] float32: the learning rate (beta), and the factor of the old state

    ``doubled``: learning rates are doubled. ``by_rows``: each row of a head's matrix has a separate factor. ``rates``
    then has only learning rates; ``forgets`` [T, heads, key_dim] has the inputs of these factors, and is overwritten by
    them; ``decay`` and ``shift`` are [heads, key_dim]. Keys and values have the same number of heads, and key_dim is a
    multiple of 16.
    """

    layout = RecordLayout(
        "prepare_delta",
        pointers=("queries", "keys", "rates", "decay", "shift", "units", "learns", "forgets"),
        numbers=("mixed_stride", "rates_stride", "units_stride", "heads_stride", "forgets_stride"),
    )

    key_heads: int
    heads: int
    key_dim: int
    doubled: bool = False
    by_rows: bool = False

    def emit(self, call: KernelCall) -> None:
        # Work items of a row: its queries, its keys, and the rates of its heads.
        k, items = call.k, 2 * self.key_heads + 1
        with call.even_share(call.step.number("num_tokens") * items) as item:
            row, head = item // items, item % items
            with k.when(head < 2 * self.key_heads):
                self._unit(call, row, head)
            if self.by_rows:
                with k.when(head < self.heads):
                    self._factors(call, row, head)
            with k.when(head.equals(2 * self.key_heads)):
                self._rates(call, row)

    def _unit(self, call: KernelCall, row: Int, head: Int) -> None:
        k, args = call.k, call.args
        vectors, width = -(-self.key_dim // LANES), self.key_dim * 4
        queries, keys = args.pointer("queries") + head * width, args.pointer("keys") + (head - self.key_heads) * width
        source = k.select_ptr(head < self.key_heads, queries, keys) + row * args.number("mixed_stride")
        target = args.pointer("units") + row * args.number("units_stride") + head * (vectors * VECTOR_BYTES)
        values, squares = [], k.vector(0.0)
        for vector in range(vectors):
            value = k.load(source + vector * VECTOR_BYTES)
            inside = k.below(k.int(vector * LANES), k.int(self.key_dim))
            values.append(k.select(inside, value, k.vector(0.0)))
            squares = k.fma(values[-1], values[-1], squares)
        # 1e-6: the models' epsilon of the L2 norm.
        factor = k.vector(1.0) / k.sqrt(k.sum(squares) + 1e-6)
        scaled = k.variable(factor)
        with k.when(head < self.key_heads):
            scaled.value = factor * self.key_dim**-0.5
        for vector, value in enumerate(values):
            k.store(target + vector * VECTOR_BYTES, value * scaled.value)

    def _rates(self, call: KernelCall, row: Int) -> None:
        k, args = call.k, call.args
        rates = args.pointer("rates") + row * args.number("rates_stride")
        at_row = row * args.number("heads_stride")
        with k.range(vectors_of(k.int(self.heads))) as vector:
            at = vector * VECTOR_BYTES
            learns = k.sigmoid(k.load(rates + at)) * (2.0 if self.doubled else 1.0)
            k.store(args.pointer("learns") + at_row + at, learns)
            if not self.by_rows:
                rate = k.softplus(k.load(rates + self.heads * 4 + at) + k.load(args.pointer("shift") + at))
                factor = k.exp2(rate * k.load(args.pointer("decay") + at))
                k.store(args.pointer("forgets") + row * args.number("forgets_stride") + at, factor)

    def _factors(self, call: KernelCall, row: Int, head: Int) -> None:
        k, args, first = call.k, call.args, head * (self.key_dim * 4)
        forgets = args.pointer("forgets") + row * args.number("forgets_stride") + first
        decay, shift = (args.pointer(name) + first for name in ("decay", "shift"))
        with k.range(self.key_dim // LANES) as vector:
            at = vector * VECTOR_BYTES
            rate = k.softplus(k.load(forgets + at) + k.load(shift + at))
            k.store(forgets + at, k.exp2(rate * k.load(decay + at)))


@dataclass(frozen=True, slots=True)
class RunDeltaRule(KernelSpec):
    """Apply the delta rule to each sequence's rows, from its old state to its new one.

    units, learns, forgets   output of :class:`PrepareDelta`; neighbouring heads share a query and a key
    values   [T, heads * head_dim] float32
    out      [T, heads * head_dim] float32

    ``by_rows``: that of :class:`PrepareDelta`. Each sum over a key has the same order for every token. head_dim is a
    multiple of PIECE_COLUMNS.
    """

    layout = RecordLayout(
        "run_delta_rule",
        pointers=("units", "learns", "forgets", "values", "out", *STATE_POINTERS),
        numbers=("units_stride", "heads_stride", "forgets_stride", "values_stride", "out_stride", *STATE_NUMBERS),
    )

    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    by_rows: bool = False

    def emit(self, call: KernelCall) -> None:
        with each_piece(call, self.heads, self.head_dim // PIECE_COLUMNS) as piece:
            for row, memory in piece.memories(self.key_dim):
                self._row(call, memory, row, piece)

    def _row(self, call: KernelCall, memory: Memory, row: Int, piece: HeadPiece) -> None:
        k, args, head, column = call.k, call.args, piece.head, piece.column
        unit_bytes = -(-self.key_dim // LANES) * VECTOR_BYTES
        query = args.pointer("units") + row * args.number("units_stride")
        query = query + head // (self.heads // self.key_heads) * unit_bytes
        key = query + self.key_heads * unit_bytes
        learns = k.broadcast(args.pointer("learns") + row * args.number("heads_stride") + head * 4)
        forgets = args.pointer("forgets") + row * args.number("forgets_stride")
        forgets = forgets + head * (self.key_dim * 4 if self.by_rows else 4)
        factor = None if self.by_rows else k.broadcast(forgets)
        at_column = head * (self.head_dim * 4) + column * VECTOR_BYTES
        value = k.load(args.pointer("values") + row * args.number("values_stride") + at_column)
        sums = zeros(k, self.key_dim)
        with k.range(self.key_dim, step=len(sums)) as first:
            for part, total in enumerate(sums):
                state, at = memory.load(first + part), (first + part) * 4
                if factor is None:
                    state = state * k.broadcast(forgets + at)
                total.value = k.fma(state, k.broadcast(key + at), total.value)
        predicted = total_of(sums)
        delta = (value - (predicted if factor is None else predicted * factor)) * learns
        sums = zeros(k, self.key_dim)
        with k.range(self.key_dim, step=len(sums)) as first:
            for part, total in enumerate(sums):
                at = (first + part) * 4
                decayed = memory.load(first + part) * (k.broadcast(forgets + at) if factor is None else factor)
                state = k.fma(k.broadcast(key + at), delta, decayed)
                memory.store(first + part, state)
                total.value = k.fma(state, k.broadcast(query + at), total.value)
        k.store(args.pointer("out") + row * args.number("out_stride") + at_column, total_of(sums))
