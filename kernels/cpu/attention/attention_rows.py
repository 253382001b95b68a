"""Inner kernels of attention, of a few query rows of one KV head and at most a partition of its tokens.

    scores    S[r, t] = query r . key t                               accumulators: rows x groups side by side
    weights   P[r, t] = 2**(S * factor - m[r]), 0 if masked           m[r] the largest visible score, l[r] their sum
    weighted  A[r, c] = sum over t of P[r, t] * V[t, c]               accumulators: rows x columns
    fold      merge two partitions' (m, l, A) of a row
    sink      add a score without a value to a row's l

A *line* is 64 bytes of the pool: 16 pairs of bfloat16, 16 float32, or 16 times 4 codes of 8 bits
(:mod:`pillion.kernels.cpu.attention.kv_layout`). The scales of codes stay out of the products: a score is multiplied by
its key's scale, and a weight by its value's scale after it was added to l. Both products iterate over lines and
multiply each by the corresponding values of a row (a *step*). Every sum is one chain of additions whose order follows
from positions alone, so a row's bits do not depend on other rows: scores sum a key's values in ascending order,
weighted sums alternate between SIDE_GROUPS groups, TURN_TOKENS tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pillion.kernels.cpu.attention.cpu_attention_plan import PARTITION_TOKENS
from pillion.kernels.cpu.attention.eight_bits import FLOAT_FACTORS, widen_to_floats, widen_to_pairs
from pillion.kernels.cpu.attention.kv_layout import group_bytes, line_values, lines_bytes
from pillion.kernels.cpu.language.emit import LOG2E, VECTOR_BYTES, Int, Kernel, KernelVariable, Pairs, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES

PARTITION_GROUPS = PARTITION_TOKENS // LANES
# Score of a masked token, and the lower bound of a row's maximum, which is higher. So a row that sees no token of a
# partition has weights of exactly 0 in it, and folding that partition changes nothing.
HIDDEN_SCORE = -1e30
MAXIMUM_FLOOR = -1e29
# Bytes of a row of scores, or of the weights that replace them. A spare line keeps rows from sharing cache sets.
SCORE_BYTES = PARTITION_TOKENS * 4 + VECTOR_BYTES
# Groups to read interleaved, a few lines of each per turn, which is faster than one after the other. The next groups
# are prefetched into L2, since L1 has too few fill buffers.
SIDE_GROUPS = 4
# Tokens of V, and lines of K, that are read of a group per turn.
TURN_TOKENS, TURN_LINES = 8, 8
# Entries after the list's last group, which are read for prefetches and to fill up interleaved groups.
TAIL_GROUPS = 2 * SIDE_GROUPS


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters that a model's attention kernels share.

    Attributes:
        head_dim: values of a head, a multiple of 16.
        group: query heads per KV head.
        block_size: tokens per block, a multiple of 16.
        bf16: whether queries, results, and keys and values of the model's type are bfloat16, not float32.
        codes: the 8-bit type of keys and values, "fp8_e4m3" or "int8"; "" for the model's type.
        latents: number of first values of a key that are also the token's value; 0 if V is separate.
        index: values of an index key that follows each key, and that attention does not read; 0 for none.
    """

    head_dim: int
    group: int
    block_size: int
    bf16: bool
    codes: str = ""
    latents: int = 0
    index: int = 0

    @property
    def name(self) -> str:
        """Name with all parameters, part of the names of kernels."""
        model = "bf16" if self.bf16 else "f32"
        latents, index = (
            f"{kind}{size}" if size else "" for kind, size in (("latents", self.latents), ("index", self.index))
        )
        shape = f"{self.head_dim}x{self.group}_{self.block_size}_{model}"
        return "_".join(filter(None, (shape, self.codes, latents, index)))

    @property
    def value_dim(self) -> int:
        """Values of a row's result."""
        return self.latents or self.head_dim

    @property
    def kind(self) -> str:
        """The type of keys and values."""
        return self.codes or ("bfloat16" if self.bf16 else "float32")

    @property
    def element_bytes(self) -> int:
        """Bytes of a value of queries and results."""
        return 2 if self.bf16 else 4

    @property
    def lines_bytes(self) -> int:
        """Bytes of the keys of 16 tokens of a KV head, without scales and index keys (the same for values)."""
        return lines_bytes(self.head_dim, self.kind)

    @property
    def group_bytes(self) -> int:
        """Bytes of the keys of 16 tokens of a KV head, with scales and index keys, if any (the same for values)."""
        return group_bytes(self.head_dim + self.index, self.kind, 2 if self.latents else 1)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a block's K, or V, of one KV head in one layer."""
        return self.block_size // LANES * self.group_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of a row's (A, m, l): value_dim float32, then m in 16 lanes, then l in 16 lanes (in matrix tiles, parts
        of l, whose sum is l)."""
        return 4 * self.value_dim + 2 * VECTOR_BYTES


class PoolLines:
    """Emitter of products of lines of K or V with rows in the thread's scratch memory.

    If the processor multiplies bfloat16 pairs, rows are stored in bfloat16. Otherwise, or if ``wide``, lines are
    widened to float32 when loaded, and rows are stored in float32.
    """

    def __init__(self, k: Kernel, shape: AttentionShape, *, wide: bool = False) -> None:
        self._k = k
        self._shape = shape
        self.bf16_rows = shape.bf16 and k.isa.bf16_dot != "" and not wide
        self.scaled = shape.codes != ""
        self.step_bytes = line_values(shape.kind) * (2 if self.bf16_rows else 4)

    def load(self, ptr: Ptr) -> tuple[Vec | Pairs, ...]:
        """Load a line: the pairs of its lanes, or vectors of their first, second ... values."""
        k, codes = self._k, self._shape.codes
        if codes:
            return widen_to_pairs(k, ptr, codes) if self.bf16_rows else widen_to_floats(k, ptr, codes)
        if not self._shape.bf16:
            return (k.load(ptr),)
        pairs = k.load_pairs(ptr)
        return (pairs,) if self.bf16_rows else (k.low(pairs), k.high(pairs))

    @property
    def factor(self) -> float:
        """Constant factor of loaded values in addition to their scales, a power of two."""
        return FLOAT_FACTORS[self._shape.codes] if self.scaled and not self.bf16_rows else 1.0

    def scales(self, group: Ptr, part: int = 0) -> Vec:
        """Load the scales of a group's tokens. In rows of latents, ``part`` 1 has those of the rotated keys."""
        return self._k.load(group + (self._shape.lines_bytes + part * VECTOR_BYTES))

    def add(
        self, sums: list[list[KernelVariable]], loaded: list[tuple[Vec | Pairs, ...]], rows: Ptr, stride: int
    ) -> None:
        """Add loaded lines times a step of each row to sums [rows][lines]; the rows' steps are ``stride`` bytes apart.

        Parts of lines are processed in sequence, so that few of them are in registers at a time.
        """
        k = self._k
        for part in range(self.step_bytes // 4):
            for row, totals in enumerate(sums):
                at = rows + (row * stride + 4 * part)
                value = k.broadcast_pair(at) if self.bf16_rows else k.broadcast(at)
                for total, line in zip(totals, loaded, strict=True):
                    operand = line[part]
                    if isinstance(operand, Pairs) and isinstance(value, Pairs):
                        total.value = k.dot(total.value, operand, value)
                    else:
                        assert isinstance(operand, Vec)
                        assert isinstance(value, Vec)
                        total.value = k.fma(operand, value, total.value)


@dataclass(frozen=True, slots=True)
class Groups:
    """A list of groups of 16 tokens of a partition, with their addresses.

    Attributes:
        pool: the layer's K of this KV head in slot 0.
        places: [2 * values + TAIL_GROUPS] int64, byte offsets from ``pool``: of the groups of K, of the groups of V,
            and of groups likely to be read next.
        first: position of the first group's first token.
        count: number of groups.
        values: index in ``places`` of the first group of V.
    """

    pool: Ptr
    places: Ptr
    first: Int
    count: Int
    values: Int

    def at(self, index: Int) -> Ptr:
        """Return the address of the group at ``index`` in ``places``."""
        return self.pool + self.pool.k.load_int(self.places + index * 8)

    def part(self, begin: Int, end: Int) -> Groups:
        """Return the groups ``begin`` .. ``end`` - 1."""
        return Groups(self.pool, self.places + begin * 8, self.first + begin * LANES, end - begin, self.values)


@dataclass(frozen=True, slots=True)
class Visibility:
    """The tokens visible to a query row, at positions ``first`` .. ``end`` - 1; ``first`` is None without a sliding
    window."""

    first: Int | None
    end: Int


@dataclass(frozen=True, slots=True)
class Weights:
    """Where to store a row's weights of all groups of a list: from ``begin`` on. ``narrow``: they are bfloat16, not
    float32."""

    lines: PoolLines
    begin: Ptr
    narrow: bool

    @property
    def group_bytes(self) -> int:
        return VECTOR_BYTES // 2 if self.narrow else VECTOR_BYTES


@dataclass(frozen=True, slots=True)
class RowTile:
    """The rows that are computed at a time, and the number of their sums in registers.

    Attributes:
        rows: the number of rows.
        side: groups whose scores are computed at a time: 1, 2 or 4.
        columns: vectors of V's columns that are summed at a time, a divisor of a head's vectors.
        in_turns: whether groups are read in turns, a few lines of each, which stores and reloads the sums at each turn.
            Faster if memory is the bottleneck, slower with more rows, when the products are.
    """

    rows: int
    side: int
    columns: int
    in_turns: bool


class _Sums:
    """Sums in registers: ``columns`` vectors for each of ``rows`` rows. In memory, vectors of a row are adjacent, and
    rows ``row_bytes`` apart."""

    def __init__(self, k: Kernel, rows: int, columns: int, row_bytes: int) -> None:
        self._k, self._row_bytes = k, row_bytes
        self.rows = [[k.variable(k.vector(0.0)) for _ in range(columns)] for _ in range(rows)]

    def clear(self) -> None:
        for _, total in self._with_offsets():
            total.value = self._k.vector(0.0)

    def load(self, ptr: Ptr) -> None:
        for offset, total in self._with_offsets():
            total.value = self._k.load(ptr + offset)

    def store(self, ptr: Ptr) -> None:
        for offset, total in self._with_offsets():
            self._k.store(ptr + offset, total.value)

    def add_to(self, ptr: Ptr) -> None:
        for offset, total in self._with_offsets():
            self._k.store(ptr + offset, self._k.load(ptr + offset) + total.value)

    def scale(self, factors: Sequence[Vec]) -> None:
        """Multiply each row's sums by ``factors``, one per column."""
        for row in self.rows:
            for total, factor in zip(row, factors, strict=True):
                total.value = total.value * factor

    def _with_offsets(self) -> Iterator[tuple[int, KernelVariable]]:
        for number, row in enumerate(self.rows):
            for column, total in enumerate(row):
                yield number * self._row_bytes + column * VECTOR_BYTES, total


def emit_scores(
    lines: PoolLines, shape: AttentionShape, groups: Groups, queries: Ptr, scores: Ptr, tile: RowTile
) -> None:
    """Store the scores of the tile's queries [rows, head_dim] for all groups, and some after the last group, which are
    never read."""
    k = groups.pool.k
    all_lines = shape.lines_bytes // VECTOR_BYTES
    # If rotated keys have separate scales, their lines are summed after those of the latents.
    first_lines = shape.latents // line_values(shape.kind) if lines.scaled and shape.latents else all_lines
    turn = math.gcd(first_lines, TURN_LINES) if tile.in_turns and tile.side < SIDE_GROUPS else first_lines
    sums = _Sums(k, tile.rows, tile.side, SCORE_BYTES)

    def add(begin: Int, end: Int | int, index: Int) -> list[Ptr]:
        """Add the products of lines of the interleaved groups from ``index`` on; return these groups."""
        here, ahead = ([groups.at(index + (far + i)) for i in range(tile.side)] for far in (0, SIDE_GROUPS))
        with k.range(end, begin, step=SIDE_GROUPS // tile.side) as line:
            for step in range(SIDE_GROUPS // tile.side):
                at_line = line * VECTOR_BYTES + step * VECTOR_BYTES
                for ptr in ahead:
                    k.prefetch(ptr + at_line, near=False)
                keys = [lines.load(ptr + at_line) for ptr in here]
                query = queries + line * lines.step_bytes + step * lines.step_bytes
                lines.add(sums.rows, keys, query, all_lines * lines.step_bytes)
        return here

    with k.range(groups.count, step=SIDE_GROUPS) as first:
        end = k.min(first + SIDE_GROUPS, groups.count)
        if lines.scaled:
            for i in range(SIDE_GROUPS):
                for begin in (end, groups.count + first):
                    k.prefetch(groups.at(begin + i) + shape.lines_bytes, near=False)
        if turn < first_lines:
            with k.range(tile.rows) as row, k.range(end, first) as index:
                k.store(scores + (row * SCORE_BYTES + index * VECTOR_BYTES), k.vector(0.0))
        with k.range(first_lines, step=turn) as line, k.range(end, first, step=tile.side) as index:
            at = scores + index * VECTOR_BYTES
            if turn < first_lines:
                sums.load(at)
            else:
                sums.clear()
            here = add(line, line + turn, index)
            if lines.scaled and turn == first_lines:
                sums.scale([lines.scales(ptr) * lines.factor for ptr in here])
            sums.store(at)
        if lines.scaled and turn < first_lines:
            with k.range(end, first) as index, k.range(tile.rows) as row:
                at = scores + (row * SCORE_BYTES + index * VECTOR_BYTES)
                k.store(at, k.load(at) * (lines.scales(groups.at(index)) * lines.factor))
        if first_lines < all_lines:
            with k.range(end, first, step=tile.side) as index:
                sums.clear()
                here = add(k.int(first_lines), all_lines, index)
                sums.scale([lines.scales(ptr, 1) * lines.factor for ptr in here])
                sums.add_to(scores + index * VECTOR_BYTES)


def emit_softcap(scores: Ptr, count: Int, scale: Vec, softcap: Vec) -> None:
    """Replace a row's scores by softcap * tanh(score * scale / softcap) * log2(e)."""
    k = scores.k
    inner, outer = scale / softcap, softcap * LOG2E
    with k.range(count) as index:
        at = scores + index * VECTOR_BYTES
        k.store(at, k.tanh(k.load(at) * inner) * outer)


def emit_weights(
    groups: Groups, visibility: Visibility, scores: Ptr, factor: Vec | None, maximum: Ptr, weights: Weights
) -> None:
    """Replace a row's scores by its ``weights``, and store its maximum m at ``maximum``, then its sum l. Without
    ``factor`` the scores are scaled already.

    If V is stored as 8-bit codes, the weights are multiplied by the scales of V.
    """
    k, lines = scores.k, weights.lines
    below = emit_maximum(groups, visibility, scores, factor, maximum)
    sums = k.variable(k.vector(0.0))
    with k.range(groups.count) as index:
        score = k.load(scores + index * VECTOR_BYTES)
        weight = k.exp2(score + below if factor is None else k.fma(score, factor, below))
        sums.value = sums.value + weight
        if lines.scaled:
            weight = weight * lines.scales(groups.at(groups.values + index))
        k.store_float(weights.begin + index * weights.group_bytes, weight, weights.narrow)
    k.store(maximum + VECTOR_BYTES, k.sum(sums.value))


def emit_maximum(groups: Groups, visibility: Visibility, scores: Ptr, factor: Vec | None, maximum: Ptr) -> Vec:
    """Mask a row's scores; store their scaled maximum at ``maximum``, and return the negated maximum."""
    k = scores.k
    top = k.maximum(k.max_lane(_masked_maximum(groups, visibility, scores).value), MAXIMUM_FLOOR)
    if factor is not None:
        top = top * factor
    k.store(maximum, top)
    return k.vector(0.0) - top


def _masked_maximum(groups: Groups, visibility: Visibility, scores: Ptr) -> KernelVariable:
    """Set the scores of masked tokens, which are only in groups at an edge, to HIDDEN_SCORE; return the maximum per
    lane."""
    k = scores.k
    best = k.variable(k.vector(HIDDEN_SCORE))
    whole_end = k.min(k.max(visibility.end - groups.first, 0) // LANES, groups.count)
    whole_begin = k.int(0)
    if visibility.first is not None:
        whole_begin = k.min((k.max(visibility.first - groups.first, 0) + (LANES - 1)) // LANES, groups.count)
    # Maxima of SIDE_GROUPS vectors at a time shorten the chain of dependent instructions.
    side_end = whole_begin + k.max(whole_end - whole_begin, 0) // SIDE_GROUPS * SIDE_GROUPS
    with k.range(side_end, whole_begin, SIDE_GROUPS) as index:
        a, b, c, d = (k.load(scores + index * VECTOR_BYTES + i * VECTOR_BYTES) for i in range(SIDE_GROUPS))
        best.value = k.maximum(best.value, k.maximum(k.maximum(a, b), k.maximum(c, d)))
    with k.range(whole_end, side_end) as index:
        best.value = k.maximum(best.value, k.load(scores + index * VECTOR_BYTES))

    def mask(begin: Int, end: Int) -> None:
        with k.range(end, begin) as index:
            at = scores + index * VECTOR_BYTES
            first, hidden = groups.first + index * LANES, k.vector(HIDDEN_SCORE)
            score = k.select(k.below(first, visibility.end), k.load(at), hidden)
            if visibility.first is not None:
                score = k.select(k.below(first, visibility.first), hidden, score)
            k.store(at, score)
            best.value = k.maximum(best.value, score)

    if visibility.first is not None:
        mask(k.int(0), whole_begin)
    mask(k.max(whole_end, whole_begin), groups.count)
    return best


def emit_weighted(
    lines: PoolLines, shape: AttentionShape, groups: Groups, weights: Ptr, sums: Ptr, tile: RowTile
) -> None:
    """Store A, the weighted sums of V, for the tile's rows of weights, in rows of ``sum_bytes``."""
    k = groups.pool.k
    row_bytes, column_bytes = shape.head_dim // LANES * VECTOR_BYTES, tile.columns * VECTOR_BYTES
    steps = shape.lines_bytes // row_bytes
    turn = TURN_TOKENS * steps // LANES
    totals = _Sums(k, tile.rows, tile.columns, shape.sum_bytes)
    # Turns begin at multiples of SIDE_GROUPS groups of the context; a window may begin between them.
    lowest = k.int(0) - groups.first // LANES % SIDE_GROUPS

    def add(first: Int, left: Int) -> None:
        """Add the weighted values of up to SIDE_GROUPS groups of the list to the columns from ``left`` bytes on."""
        end = k.min(first + SIDE_GROUPS, groups.count)
        with k.range(steps, step=turn) as begin, k.range(end, k.max(first, 0)) as group:
            index, at = groups.count + group, begin * row_bytes + left
            here, ahead = groups.at(index) + at, groups.at(index + SIDE_GROUPS) + at
            row = weights + (group * steps + begin) * lines.step_bytes
            for step in range(turn):
                columns = range(step * row_bytes, step * row_bytes + column_bytes, VECTOR_BYTES)
                for column in columns:
                    k.prefetch(ahead + column, near=False)
                values = [lines.load(here + column) for column in columns]
                lines.add(totals.rows, values, row + step * lines.step_bytes, SCORE_BYTES)

    if not tile.in_turns or column_bytes == row_bytes:
        with k.range(row_bytes, step=column_bytes) as left:
            totals.clear()
            with k.range(groups.count, lowest, SIDE_GROUPS) as first:
                add(first, left)
            totals.store(sums + left)
        return
    with k.range(tile.rows) as row, k.range(row_bytes, step=VECTOR_BYTES) as column:
        k.store(sums + (row * shape.sum_bytes + column), k.vector(0.0))
    with k.range(groups.count, lowest, SIDE_GROUPS) as first, k.range(row_bytes, step=column_bytes) as left:
        totals.load(sums + left)
        add(first, left)
        totals.store(sums + left)


def emit_weighted_keys(
    shape: AttentionShape, groups: Groups, weights: Ptr, sums: Ptr, rows: int, max_sums: int
) -> None:
    """Store A for keys whose first values are also their values: for ``rows`` rows of float32 weights, with at most
    ``max_sums`` sums in registers, or those of one line. 8-bit codes become float32.

    Lanes are tokens in keys, so the sum of a value is a vector, whose lanes are added up after the last group.
    """
    k = groups.pool.k
    pool, lane_values = PoolLines(k, shape, wide=True), line_values(shape.kind)
    lines = shape.latents // lane_values
    fitting = max(1, max_sums // (rows * lane_values))
    width = max(count for count in (1, 2, 4, 8) if lines % count == 0 and count <= fitting)
    totals = _Sums(k, rows, width * lane_values, SCORE_BYTES)
    with k.range(lines, step=width) as line:
        totals.clear()
        with k.range(groups.count) as group:
            key, weight = groups.at(group) + line * VECTOR_BYTES, weights + group * VECTOR_BYTES
            loaded: list[Any] = [value for i in range(width) for value in pool.load(key + i * VECTOR_BYTES)]
            for row, sums_of_row in enumerate(totals.rows):
                factor = k.load(weight + row * SCORE_BYTES)
                for total, value in zip(sums_of_row, loaded, strict=True):
                    total.value = k.fma(value, factor, total.value)
        out = sums + line * (4 * lane_values)
        for row, sums_of_row in enumerate(totals.rows):
            for column, total in enumerate(sums_of_row):
                k.store_first(out + (row * shape.sum_bytes + 4 * column), k.sum(total.value))


def emit_fold(shape: AttentionShape, left: Ptr, right: Ptr) -> None:
    """Fold the (A, m, l) at ``right``, of the following partition, into the one at ``left``."""
    k = left.k
    at_maximum, at_total = 4 * shape.value_dim, 4 * shape.value_dim + VECTOR_BYTES
    left_maximum, right_maximum = k.load(left + at_maximum), k.load(right + at_maximum)
    maximum = k.maximum(left_maximum, right_maximum)
    left_share, right_share = k.exp2(left_maximum - maximum), k.exp2(right_maximum - maximum)
    k.store(left + at_maximum, maximum)

    def fold(at: Int | int) -> None:
        k.store(left + at, k.fma(k.load(left + at), left_share, k.load(right + at) * right_share))

    fold(at_total)
    with k.range(4 * shape.value_dim, step=VECTOR_BYTES) as at:
        fold(at)


def emit_sink(shape: AttentionShape, sums: Ptr, sink: Vec) -> None:
    """Fold a score without a value, an attention sink, into the (A, m, l) at ``sums``."""
    k = sums.k
    at_maximum, at_total = 4 * shape.value_dim, 4 * shape.value_dim + VECTOR_BYTES
    score, left = sink * LOG2E, k.load(sums + at_maximum)
    maximum = k.maximum(left, score)
    share = k.exp2(left - maximum)
    k.store(sums + at_total, k.fma(k.load(sums + at_total), share, k.exp2(score - maximum)))
    with k.range(4 * shape.value_dim, step=VECTOR_BYTES) as at:
        k.store(sums + at, k.load(sums + at) * share)


def emit_result(shape: AttentionShape, sums: Ptr, out: Ptr, factor: float) -> None:
    """Store A / l, a row's attention, in the model's type. ``factor``, the constant factor of widened values, is
    applied only here: earlier, small weights would lose bits."""
    k = sums.k
    share = k.vector(factor) / k.load(sums + (4 * shape.value_dim + VECTOR_BYTES))
    with k.range(shape.value_dim // LANES) as column:
        value = k.load(sums + column * VECTOR_BYTES) * share
        k.store_float(out + column * (LANES * shape.element_bytes), value, shape.bf16)
