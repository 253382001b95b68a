"""The micro-kernels of attention: a few query rows of one KV head against at most a partition of its tokens.

    scores    S[r, t] = query r . key t                               accumulators: rows x groups side by side
    weights   P[r, t] = 2**(S * factor - m[r]), 0 where hidden        m[r] the largest visible score, l[r] their sum
    weighted  A[r, c] = sum over t of P[r, t] * V[t, c]               accumulators: rows x columns
    fold      two partitions' (m, l, A) of a row become one

A *line* is 64 bytes of the pool: 16 pairs of bfloat16, 16 float32, or 16 times 4 codes of 8 bits
(:mod:`pillion.kernels.cpu.attention.kv_layout`). The scales of codes stay out of the products: a score is multiplied by
its key's scale, and a weight by its value's scale after it was added to l. Both products walk over lines and multiply
each with the values of a row that belong to it (a *step*). Every sum is one chain of additions in rising order, so a
row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pillion.kernels.cpu.attention.cpu_attention_plan import PARTITION_TOKENS
from pillion.kernels.cpu.attention.eight_bits import FLOAT_FACTORS, widen_to_floats, widen_to_pairs
from pillion.kernels.cpu.attention.kv_layout import group_bytes, line_values, lines_bytes
from pillion.kernels.cpu.language.emit import LOG2E, VECTOR_BYTES, Int, Kernel, KernelVariable, Pairs, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES

PARTITION_GROUPS = PARTITION_TOKENS // LANES
# The score of a hidden token, and the lower bound of a row's maximum. The score is below the bound, so a row that sees
# nothing of a partition has weights of exactly 0 there, and folding these changes nothing.
HIDDEN_SCORE = -1e30
LEAST_MAXIMUM = -1e29
# A row of scores, later of weights in their place. It has a spare line, so that rows do not share cache sets.
SCORE_BYTES = PARTITION_TOKENS * 4 + VECTOR_BYTES
# The most groups whose lines are prefetched side by side.
AHEAD_GROUPS = 4
# How many entries behind the last group the list of groups is read, for prefetches and to fill up groups side by side.
TAIL_GROUPS = 2 * AHEAD_GROUPS


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters that a model's attention kernels share.

    Attributes:
        head_dim: values of a head, a multiple of 16.
        group: query heads of a KV head.
        block_size: tokens of a block, a multiple of 16.
        bf16: whether queries and results, and keys and values of the model's type, are bfloat16, not float32.
        codes: the type of keys and values in 8 bits, "fp8_e4m3" or "int8"; "" for the model's type.
    """

    head_dim: int
    group: int
    block_size: int
    bf16: bool
    codes: str = ""

    @property
    def name(self) -> str:
        """A name with every parameter, for the names of kernels."""
        model = "bf16" if self.bf16 else "f32"
        return "_".join(filter(None, (f"{self.head_dim}x{self.group}_{self.block_size}_{model}", self.codes)))

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
        """Bytes of 16 tokens' lines in K, and in V."""
        return lines_bytes(self.head_dim, self.kind)

    @property
    def group_bytes(self) -> int:
        """Bytes of 16 tokens in K, and in V: their lines, and their scales where they have any."""
        return group_bytes(self.head_dim, self.kind)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a block's K, or V, of one KV head in one layer."""
        return self.block_size // LANES * self.group_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of a row's (A, m, l): head_dim float32, then m in 16 lanes, then l in 16 lanes."""
        return 4 * self.head_dim + 2 * VECTOR_BYTES


class PoolLines:
    """The product of the pool's lines with rows in the scratch.

    Where the processor multiplies pairs, rows are kept in bfloat16; elsewhere keys and values are widened when they are
    loaded, and rows are kept in float32.
    """

    def __init__(self, k: Kernel, shape: AttentionShape) -> None:
        self._k = k
        self._shape = shape
        self.bf16_rows = shape.bf16 and k.isa.bf16_dot != ""
        self.scaled = shape.codes != ""
        # How many bytes of a row belong to a line.
        self.step_bytes = line_values(shape.kind) * (2 if self.bf16_rows else 4)

    def load(self, ptr: Ptr) -> tuple[Vec | Pairs, ...]:
        """Loads a line: the pairs of its lanes, or vectors of their first, second ... values."""
        k, codes = self._k, self._shape.codes
        if codes:
            return widen_to_pairs(k, ptr, codes) if self.bf16_rows else widen_to_floats(k, ptr, codes)
        if not self._shape.bf16:
            return (k.load(ptr),)
        pairs = k.load_pairs(ptr)
        return (pairs,) if self.bf16_rows else (k.low(pairs), k.high(pairs))

    def scales(self, group: Ptr) -> Vec:
        """Loads the factors by which the tokens' codes of a group must be multiplied."""
        scales = self._k.load(group + self._shape.lines_bytes)
        factor = 1.0 if self.bf16_rows else FLOAT_FACTORS[self._shape.codes]
        return scales if factor == 1.0 else scales * factor

    def spread(self, ptr: Ptr) -> tuple[Vec | Pairs, ...]:
        """Loads a row's values for one step, each (or each pair) into all lanes."""
        k = self._k
        return tuple(
            k.broadcast_pair(ptr + at) if self.bf16_rows else k.broadcast(ptr + at)
            for at in range(0, self.step_bytes, 4)
        )

    def add(self, total: KernelVariable, line: tuple[Vec | Pairs, ...], row: tuple[Vec | Pairs, ...]) -> None:
        """Appends total += line * row."""
        for a, b in zip(line, row, strict=True):
            if isinstance(a, Pairs) and isinstance(b, Pairs):
                total.value = self._k.dot(total.value, a, b)
            else:
                assert isinstance(a, Vec)
                assert isinstance(b, Vec)
                total.value = self._k.fma(a, b, total.value)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of 16 tokens of a partition.

    Attributes:
        pool: the layer's K of this KV head in slot 0.
        places: [2 * count + TAIL_GROUPS] int64: bytes from ``pool`` to each group of K, then to each group of V, then
            to the groups that are likely to be read next.
        first: position of the first group's first token.
        count: number of groups.
    """

    pool: Ptr
    places: Ptr
    first: Int
    count: Int

    def at(self, index: Int) -> Ptr:
        """The address of the group at ``places[index]``."""
        return self.pool + self.pool.k.load_int(self.places + index * 8)


@dataclass(frozen=True, slots=True)
class Visibility:
    """The tokens that a row sees: positions first .. behind - 1. ``first`` is None where there is no window."""

    first: Int | None
    behind: Int


def emit_scores(
    lines: PoolLines, shape: AttentionShape, groups: Groups, queries: Ptr, scores: Ptr, row_count: int, side: int
) -> None:
    """Scores of ``row_count`` queries [row_count, head_dim] for all groups, ``side`` (1, 2 or 4) at a time.

    Scores behind the last group are computed too, and never read.
    """
    k = groups.pool.k
    steps = shape.lines_bytes // VECTOR_BYTES
    query_bytes = steps * lines.step_bytes
    # An iteration of the inner loop reads as many lines as there are groups to prefetch.
    unrolled = AHEAD_GROUPS // side
    with k.range(groups.count, step=side) as index:
        bases = [groups.at(index + i) for i in range(side)]
        ahead = _ahead(shape, groups, k.int(0), index, AHEAD_GROUPS)
        if lines.scaled:
            for i in range(side):
                k.prefetch(groups.at(index + (AHEAD_GROUPS + i)) + shape.lines_bytes)
                k.prefetch(groups.at(groups.count + index + i) + shape.lines_bytes)
        sums = [[k.variable(k.vector(0.0)) for _ in bases] for _ in range(row_count)]
        with k.range(steps, step=unrolled) as first:
            for ptr in ahead:
                k.prefetch(ptr + first * (VECTOR_BYTES // unrolled))
            for u in range(unrolled):
                keys = [lines.load(base + (first * VECTOR_BYTES + u * VECTOR_BYTES)) for base in bases]
                at = queries + first * lines.step_bytes
                for r in range(row_count):
                    query = lines.spread(at + (u * lines.step_bytes + r * query_bytes))
                    for total, key in zip(sums[r], keys, strict=True):
                        lines.add(total, key, query)
        for i, base in enumerate(bases):
            scales = lines.scales(base) if lines.scaled else None
            for r in range(row_count):
                score = sums[r][i].value if scales is None else sums[r][i].value * scales
                k.store(scores + (index * VECTOR_BYTES + (r * SCORE_BYTES + i * VECTOR_BYTES)), score)


def _ahead(shape: AttentionShape, groups: Groups, begin: Int, index: Int, side: int) -> list[Ptr]:
    """The addresses to prefetch during group ``index`` of the groups that are listed from ``begin`` on: a part of each
    of ``side`` groups that follow. Memory delivers several groups side by side faster than one after the other.
    """
    part = index % side
    first = begin + index - part + side
    return [groups.at(first + i) + part * (shape.lines_bytes // side) for i in range(side)]


def emit_softcap(scores: Ptr, count: Int, scale: Vec, softcap: Vec) -> None:
    """Turns a row's scores into softcap * tanh(score * scale / softcap) * log2(e)."""
    k = scores.k
    inner, outer = scale / softcap, softcap * LOG2E
    with k.range(count) as index:
        at = scores + index * VECTOR_BYTES
        k.store(at, k.tanh(k.load(at) * inner) * outer)


def emit_weights(
    lines: PoolLines, groups: Groups, visibility: Visibility, scores: Ptr, factor: Vec | None, maximum: Ptr, total: Ptr
) -> None:
    """Turns a row's scores into its weights, in the same place, and stores its m and l. ``factor`` None means 1.

    Weights of codes are multiplied by the scales of V.
    """
    k = scores.k
    best = _emit_masked_maximum(groups, visibility, scores)
    top = k.larger(k.maximum(best.value), LEAST_MAXIMUM)
    if factor is not None:
        top = top * factor
    k.store(maximum, top)
    below = k.vector(0.0) - top
    weight_bytes = VECTOR_BYTES // 2 if lines.bf16_rows else VECTOR_BYTES
    sums = k.variable(k.vector(0.0))
    with k.range(groups.count) as index:
        score = k.load(scores + index * VECTOR_BYTES)
        weight = k.exp2(score + below if factor is None else k.fma(score, factor, below))
        sums.value = sums.value + weight
        if lines.scaled:
            weight = weight * lines.scales(groups.at(groups.count + index))
        k.store_float(scores + index * weight_bytes, weight, lines.bf16_rows)
    k.store(total, k.sum(sums.value))


def _emit_masked_maximum(groups: Groups, visibility: Visibility, scores: Ptr) -> KernelVariable:
    """The maximum of each lane. Scores of hidden tokens become HIDDEN_SCORE; only groups at an edge are masked."""
    k = scores.k
    best = k.variable(k.vector(HIDDEN_SCORE))
    whole_end = k.least(k.most(visibility.behind - groups.first, 0) // LANES, groups.count)
    whole_begin = k.int(0)
    if visibility.first is not None:
        whole_begin = k.least((k.most(visibility.first - groups.first, 0) + (LANES - 1)) // LANES, groups.count)
    with k.range(whole_end, whole_begin) as index:
        best.value = k.larger(best.value, k.load(scores + index * VECTOR_BYTES))

    def mask(begin: Int, end: Int) -> None:
        with k.range(end, begin) as index:
            at = scores + index * VECTOR_BYTES
            first, hidden = groups.first + index * LANES, k.vector(HIDDEN_SCORE)
            score = k.select(k.below(first, visibility.behind), k.load(at), hidden)
            if visibility.first is not None:
                score = k.select(k.below(first, visibility.first), hidden, score)
            k.store(at, score)
            best.value = k.larger(best.value, score)

    if visibility.first is not None:
        mask(k.int(0), whole_begin)
    mask(k.most(whole_end, whole_begin), groups.count)
    return best


def emit_weighted(
    lines: PoolLines, shape: AttentionShape, groups: Groups, weights: Ptr, sums: Ptr, row_count: int, columns: int
) -> None:
    """Stores A[r] of ``row_count`` rows of weights into rows of ``sum_bytes``, ``columns`` vectors at a time."""
    k = groups.pool.k
    _emit_columns(lines, shape, groups, weights, sums, row_count, columns, prefetches=True)
    with k.range(4 * shape.head_dim, begin=columns * VECTOR_BYTES, step=columns * VECTOR_BYTES) as left:
        here = Groups(groups.pool + left, groups.places, groups.first, groups.count)
        _emit_columns(lines, shape, here, weights, sums + left, row_count, columns, prefetches=False)


def _emit_columns(
    lines: PoolLines,
    shape: AttentionShape,
    groups: Groups,
    weights: Ptr,
    sums: Ptr,
    row_count: int,
    columns: int,
    *,
    prefetches: bool,
) -> None:
    """The first ``columns`` vectors of A. ``prefetches``: also prefetches all columns of the groups that follow."""
    k = groups.pool.k
    width = shape.head_dim // LANES
    steps = shape.lines_bytes // (width * VECTOR_BYTES)
    side = math.gcd(width, AHEAD_GROUPS)
    totals = [[k.variable(k.vector(0.0)) for _ in range(columns)] for _ in range(row_count)]
    with k.range(groups.count) as index:
        base = groups.at(groups.count + index)
        ahead = _ahead(shape, groups, groups.count, index, side) if prefetches else []
        row = weights + index * (steps * lines.step_bytes)
        with k.range(steps) as step:
            for ptr in ahead:
                for c in range(width // side):
                    k.prefetch(ptr + (step * (width // side * VECTOR_BYTES) + c * VECTOR_BYTES))
            values = [lines.load(base + (step * (width * VECTOR_BYTES) + c * VECTOR_BYTES)) for c in range(columns)]
            for r in range(row_count):
                weight = lines.spread(row + (step * lines.step_bytes + r * SCORE_BYTES))
                for total, value in zip(totals[r], values, strict=True):
                    lines.add(total, value, weight)
    for r in range(row_count):
        for c, total in enumerate(totals[r]):
            k.store(sums + (r * shape.sum_bytes + c * VECTOR_BYTES), total.value)


def emit_fold(shape: AttentionShape, left: Ptr, right: Ptr) -> None:
    """Folds the (A, m, l) at ``right``, of the partition that follows, into the one at ``left``."""
    k = left.k
    at_maximum, at_total = 4 * shape.head_dim, 4 * shape.head_dim + VECTOR_BYTES
    left_maximum, right_maximum = k.load(left + at_maximum), k.load(right + at_maximum)
    maximum = k.larger(left_maximum, right_maximum)
    left_share, right_share = k.exp2(left_maximum - maximum), k.exp2(right_maximum - maximum)
    k.store(left + at_maximum, maximum)

    def fold(at: Int | int) -> None:
        k.store(left + at, k.fma(k.load(left + at), left_share, k.load(right + at) * right_share))

    fold(at_total)
    with k.range(4 * shape.head_dim, step=VECTOR_BYTES) as at:
        fold(at)


def emit_result(shape: AttentionShape, sums: Ptr, out: Ptr) -> None:
    """Stores A / l in the model's type."""
    k = sums.k
    share = k.vector(1.0) / k.load(sums + (4 * shape.head_dim + VECTOR_BYTES))
    with k.range(shape.head_dim // LANES) as column:
        value = k.load(sums + column * VECTOR_BYTES) * share
        k.store_float(out + column * (LANES * shape.element_bytes), value, shape.bf16)
