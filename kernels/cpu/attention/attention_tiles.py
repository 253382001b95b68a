"""Attention of bfloat16 queries in matrix tiles (:mod:`pillion.kernels.cpu.language.matrix_tiles`): products of a
*strip*, up to 32 query rows, with the tokens of a partition.

    scores    S[r, t]: tiles of 16 queries with 32 values each, and the 16 lines of K with these values of 16 tokens
    weights   P[r, t] = 2**(S * factor - m[r]) in bfloat16, 0 if masked; m[r] the largest visible score, l[r] their sum
    weighted  A[r, c]: tiles of 16 rows of 32 weights, and the 16 lines of V with 16 columns of these 32 tokens

Each loaded tile of K or V is multiplied by both tiles of rows. All strips of an item share a partition's values, which
are first copied into tiles; 8-bit codes are dequantized by this copy, and K is copied, too.

Every sum is one chain of instructions. For a score an instruction adds 32 values of the key, and for a weighted sum the
32 tokens from a multiple of 32 on, so a row's bits depend neither on other rows nor on the listed groups. If one half
of these tokens is not listed, its weights are 0, and the other half's values are read in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pillion.kernels.cpu.attention.attention_rows import (
    HIDDEN_SCORE,
    PARTITION_GROUPS,
    SCORE_BYTES,
    SIDE_GROUPS,
    AttentionShape,
    Groups,
    PoolLines,
    Visibility,
    emit_maximum,
)
from pillion.kernels.cpu.attention.eight_bits import widen_to_pairs
from pillion.kernels.cpu.attention.kv_layout import line_values
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Pairs, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES, Isa
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, TILES, MatrixTiles

# Max query rows of a strip, and strips of an item.
STRIP_ROWS, MAX_STRIPS = 2 * TILE_ROWS, 8
# Values of a key, or tokens of a weighted sum, per instruction: a pair per step.
_STEP_VALUES = 2 * TILE_STEPS
# Tiles of sums, the first ones; tiles of rows and of K or V follow.
SUMS = 4
TILE_BYTES = TILE_ROWS * VECTOR_BYTES
_GROUP_PAIRS = LANES // 2


def in_matrix_tiles(isa: Isa, bf16: bool) -> bool:
    """Return whether attention of queries of this type runs in matrix tiles."""
    return isa.matrix_tiles and bf16


def key_parts(shape: AttentionShape) -> list[list[int]]:
    """Return the first values of a score's instructions, for each part of a key that has scales of its own. A part's
    last instruction may overlap the one before it; its query is 0 for the values that were already multiplied."""
    separate = shape.codes and shape.latents
    width = min(_STEP_VALUES, shape.head_dim)
    bounds = (0, shape.latents, shape.head_dim) if separate else (0, shape.head_dim)
    return [[max(0, min(first, end - width)) for first in range(begin, end, width)] for begin, end in pairwise(bounds)]


def tiles_bytes(shape: AttentionShape) -> int:
    """Return the bytes of scratch memory for a partition's values in tiles, and for its keys if they are codes."""
    values = PARTITION_GROUPS * shape.head_dim * VECTOR_BYTES // 2
    return 2 * values if shape.codes else values


@dataclass(frozen=True, slots=True)
class StripTiles:
    """Base of the products of strips: their queries, and the configuration of tiles.

    Attributes:
        rows: rows of a strip. With ``height`` 2 always 32; the last strip's last rows may be unused.
        height: tiles per strip, in its rows: 1 or 2.
        queries: the queries in tiles, [strips][steps][16 * height] of 64 bytes.
        scratch: scratch memory for intermediate values.
    """

    tiles: MatrixTiles
    shape: AttentionShape
    rows: Int
    height: int
    queries: Ptr
    scratch: Ptr

    @property
    def side(self) -> int:
        """Tiles of K or V that are multiplied at a time, so that their sums fit into SUMS tiles."""
        return SUMS // self.height

    @property
    def prefetches(self) -> bool:
        """Whether K and V are prefetched. In chunks of prompts they are in the L2 cache after a head's first item, and
        prefetches would take a fifth of the time."""
        return self.height == 1

    @property
    def width(self) -> int:
        """Values of a key per instruction."""
        return min(_STEP_VALUES, self.shape.head_dim)

    @property
    def one_shape(self) -> bool:
        """True if scores and weighted sums use tiles of the same shapes, so that tiles are configured once per item."""
        return self.width == _STEP_VALUES and not self.shape.latents

    @property
    def strip_bytes(self) -> int:
        """Bytes of a strip's queries."""
        return sum(map(len, key_parts(self.shape))) * self.height * TILE_BYTES

    def copy_queries(self, source: Ptr, rows: Int) -> None:
        """Copy the queries [rows, head_dim] at ``source`` into tiles, and configure the tiles."""
        k, size, step = self.tiles.k, TILE_ROWS * self.height, 0
        if self.one_shape:
            self.set_shape(self.rows, TILE_STEPS)
        with k.range(rows) as row:
            at_row = row // size * self.strip_bytes + row % size * VECTOR_BYTES
            done = 0
            for part in key_parts(self.shape):
                for first in part:
                    for value in range(first, first + self.width, LANES):
                        values = k.vector(0.0)
                        if value >= done:
                            values = k.load_float(source + row * (2 * self.shape.head_dim) + 2 * value, True)
                        offset = step * self.height * TILE_BYTES + 2 * (value - first)
                        k.store_float(self.queries + at_row + offset, values, True)
                    done = first + self.width
                    step += 1

    def set_shape(self, rows: Int | int, steps: int) -> None:
        """Configure all tiles for ``rows`` rows and instructions of ``steps`` steps."""
        k = self.tiles.k
        heights = [k.min(k.int(rows) - TILE_ROWS * i, TILE_ROWS) for i in range(self.height)]
        others = TILES - SUMS - self.height
        self.tiles.shape(
            [heights[tile // self.side] for tile in range(SUMS)] + heights + [k.int(steps)] * others,
            [VECTOR_BYTES] * SUMS + [STEP_BYTES * steps] * self.height + [VECTOR_BYTES] * others,
        )

    def other(self, number: int) -> int:
        """Return the number of the ``number``-th tile for K or V; tiles are reused cyclically."""
        begin = SUMS + self.height
        return begin + number % (TILES - begin)

    def load_rows(self, rows: Ptr, stride: int) -> None:
        """Load one instruction's values of a strip's rows, which are ``stride`` bytes apart."""
        k = self.tiles.k
        with k.when(k.in_bounds(rows, (self.rows - 1) * stride + STEP_BYTES * TILE_STEPS)):
            for row in range(self.height):
                self.tiles.load(SUMS + row, rows + row * (TILE_ROWS * stride), stride)

    def store_sums(self, out: Ptr, stride: int, side: int) -> None:
        """Store the strip's sums for ``side`` tiles of columns, in rows ``stride`` bytes apart."""
        k = self.tiles.k
        with k.when(k.in_bounds(out, (self.rows - 1) * stride + side * VECTOR_BYTES)):
            for row in range(self.height):
                for number in range(side):
                    at = out + (row * TILE_ROWS * stride + number * VECTOR_BYTES)
                    self.tiles.store(row * self.side + number, at, stride)

    def pairs(self, line: Ptr) -> tuple[Pairs, ...]:
        """Load a line of K or V as pairs of bfloat16."""
        k, codes = self.tiles.k, self.shape.codes
        return widen_to_pairs(k, line, codes) if codes else (k.load_pairs(line),)


@dataclass(frozen=True, slots=True)
class QueryTiles(StripTiles):
    """Products of strips with separate keys and values."""

    @property
    def _keys(self) -> Ptr:
        """Address of a partition's dequantized keys."""
        return self.scratch + PARTITION_GROUPS * self.shape.head_dim * VECTOR_BYTES // 2

    def copy_values(self, groups: Groups) -> None:
        """Copy a partition's values into tiles, [32 tokens][columns / 16], and dequantize its keys if they are codes.
        A single tile of rows copies them right before their products instead."""
        if self.height == 1:
            return
        k, columns, begin = self.tiles.k, self.shape.head_dim // LANES, first_group(groups)
        if self.shape.codes:
            with k.range(groups.count) as index:
                self._copy_key(groups, index, self._keys + (begin + index) * self._key_bytes)
        with k.range((begin + groups.count + 1) // 2, begin // 2) as pair:
            self._copy_pair(groups, pair, self.scratch + pair * (columns * TILE_BYTES), k.int(0), columns)

    @property
    def _key_bytes(self) -> int:
        """Bytes of a dequantized group of keys."""
        return self.shape.head_dim * VECTOR_BYTES // 2

    def _copy_key(self, groups: Groups, index: Int, to: Ptr) -> None:
        """Dequantize the keys of a group to ``to``."""
        k, shape = self.tiles.k, self.shape
        key, ahead = groups.at(index), groups.at(index + SIDE_GROUPS)
        with k.range(shape.lines_bytes, step=VECTOR_BYTES) as at:
            if self.prefetches:
                k.prefetch(ahead + at, near=False)
            for i, pairs in enumerate(self.pairs(key + at)):
                k.write(to + at * 2 + i * VECTOR_BYTES, pairs.ir, 4)
        if self.prefetches:
            k.prefetch(ahead + shape.lines_bytes, near=False)

    def _copy_pair(self, groups: Groups, pair: Int, to: Ptr, column: Int, columns: int) -> None:
        """Copy ``columns`` columns of 32 tokens' values, from ``column`` on, into tiles at ``to``. With column 0, also
        prefetch all values of the following groups, in memory order."""
        k, shape = self.tiles.k, self.shape
        row_bytes, lane_pairs = shape.head_dim // LANES * VECTOR_BYTES, line_values(shape.kind) // 2
        for half in range(2):
            listed = k.min(k.max(pair * 2 + half - first_group(groups), 0), groups.count - 1)
            value = groups.at(groups.values + listed) + column * VECTOR_BYTES
            if self.prefetches:
                ahead = groups.at(groups.values + listed + SIDE_GROUPS)
                with k.when(column < 1):
                    with k.range(shape.lines_bytes, step=VECTOR_BYTES) as at:
                        k.prefetch(ahead + at, near=False)
                    if shape.codes:
                        k.prefetch(ahead + shape.lines_bytes, near=False)
            with k.range(_GROUP_PAIRS // lane_pairs) as line:
                for number in range(columns):
                    tile = (
                        to
                        + line * (lane_pairs * VECTOR_BYTES)
                        + (number * TILE_BYTES + half * _GROUP_PAIRS * VECTOR_BYTES)
                    )
                    for i, pairs in enumerate(self.pairs(value + line * row_bytes + number * VECTOR_BYTES)):
                        k.write(tile + i * VECTOR_BYTES, pairs.ir, 4)

    def emit_scores(self, groups: Groups, strip: Int, scores: Ptr) -> None:
        """Store the scores of a strip for all listed groups, and some after the last and before the first group, which
        are never read."""
        k = self.tiles.k
        if not self.one_shape:
            self.set_shape(self.rows, self.width // 2)
        queries, begin = self.queries + strip * self.strip_bytes, scores + first_group(groups) * VECTOR_BYTES
        if self.height == 1:
            with k.range(groups.count, step=SUMS) as first:
                indices = [first + i for i in range(SUMS)]
                keys = [groups.at(index) for index in indices]
                ahead = [groups.at(index + SIDE_GROUPS) for index in indices]
                if self.shape.codes:
                    keys, ahead = [self._keys + i * self._key_bytes for i in range(SUMS)], []
                    for index, key in zip(indices, keys, strict=True):
                        self._copy_key(groups, index, key)
                self._add_keys(keys, ahead, range(SUMS), queries, [])
                self.store_sums(begin + first * VECTOR_BYTES, SCORE_BYTES, SUMS)
        else:
            self._emit_two_tile_scores(groups, queries, begin)

    def scale_scores(self, groups: Groups, scores: Ptr) -> None:
        """Multiply a row's scores by the scales of 8-bit keys, right before the softmax, which reads them from the L1
        cache."""
        k = self.tiles.k
        if self.shape.codes:
            with k.range(groups.count) as index:
                at = scores + index * VECTOR_BYTES
                k.store(at, k.load(at) * PoolLines(k, self.shape).scales(groups.at(index)))

    def _emit_two_tile_scores(self, groups: Groups, queries: Ptr, scores: Ptr) -> None:
        """Store the scores of two tiles of rows; those of a group are stored while the next group's are computed."""
        k, sum_tiles = self.tiles.k, ((0, 1), (2, 3))
        for tile in sum_tiles[1]:
            self.tiles.clear(tile)
        with k.range(groups.count, step=2) as first:
            for number, tiles in enumerate(sum_tiles):
                index, before = first + number, scores + first * VECTOR_BYTES + (number - 1) * VECTOR_BYTES
                key = self._keys + (first_group(groups) + index) * self._key_bytes
                pending = [(tile, before) for tile in sum_tiles[1 - number]]
                self._add_keys([key if self.shape.codes else groups.at(index)], [], tiles, queries, pending)
        last = scores + (groups.count - 1) // 2 * (2 * VECTOR_BYTES) + VECTOR_BYTES
        for row, tile in enumerate(sum_tiles[1]):
            self._store_scores(tile, last, row)

    def _add_keys(
        self,
        keys: Sequence[Ptr],
        ahead: Sequence[Ptr],
        sums: Sequence[int],
        queries: Ptr,
        pending: Sequence[tuple[int, Ptr]],
    ) -> None:
        """Compute the scores of groups, whose keys are at ``keys``, in the tiles ``sums``; prefetch the groups
        ``ahead``. Between the products, store the ``pending`` (tile, address) scores of earlier groups: processors do
        not overlap products with consecutive stores."""
        k, tiles = self.tiles.k, self.tiles
        size = self.width * (VECTOR_BYTES // 2)
        (firsts,) = key_parts(self.shape)
        for tile in sums:
            tiles.clear(tile)
        stores = list(enumerate(pending))
        for step, first in enumerate(firsts):
            at = first * (VECTOR_BYTES // 2)
            self.load_rows(queries + step * (self.height * TILE_BYTES), VECTOR_BYTES)
            for number, key in enumerate(keys):
                with k.when(k.in_bounds(key + at, size)):
                    tiles.load(self.other(number), key + at, VECTOR_BYTES, near=self.height == 1)
                for row in range(self.height):
                    tiles.add_pairs(sums[row * len(keys) + number], SUMS + row, self.other(number))
            for line in range(0, size, VECTOR_BYTES):
                for key in ahead:
                    k.prefetch(key + at + line, near=False)
            if stores and step in (0, len(firsts) - 1):
                row, (tile, out) = stores.pop(0)
                self._store_scores(tile, out, row)
        for row, (tile, out) in stores:
            self._store_scores(tile, out, row)

    def _store_scores(self, tile: int, out: Ptr, row: int) -> None:
        k, stride = self.tiles.k, SCORE_BYTES
        at = out + row * TILE_ROWS * stride
        with k.when(k.in_bounds(at, (TILE_ROWS - 1) * stride + VECTOR_BYTES)):
            self.tiles.store(tile, at, stride)

    def emit_sums(self, groups: Groups, weights: Ptr, sums: Ptr) -> None:
        """Store A, the weighted sums of a partition's values, in rows of ``sum_bytes``."""
        k, tiles, columns = self.tiles.k, self.tiles, self.shape.head_dim // LANES
        if not self.one_shape:
            self.set_shape(self.rows, TILE_STEPS)
        side, begin = min(self.side, columns), first_group(groups)
        end = (begin + groups.count + 1) // 2
        with k.range(columns, step=side) as first:
            # The last tiles may overlap those before them.
            column = k.min(first, columns - side)
            for tile in range(SUMS):
                tiles.clear(tile)
            if self.height == 1:
                self._copy_pair(groups, begin // 2, self._pair_values(begin // 2), column, side)
            with k.range(end, begin // 2) as pair:
                values = self.scratch + pair * (columns * TILE_BYTES) + column * TILE_BYTES
                if self.height == 1:
                    # Copy the next tiles while the processor multiplies these.
                    values = self._pair_values(pair)
                    with k.when(pair + 1 < end):
                        self._copy_pair(groups, pair + 1, self._pair_values(pair + 1), column, side)
                self.load_rows(weights + pair * VECTOR_BYTES, SCORE_BYTES)
                for number in range(side):
                    with k.when(k.in_bounds(values + number * TILE_BYTES, TILE_BYTES)):
                        tiles.load(
                            self.other(number), values + number * TILE_BYTES, VECTOR_BYTES, near=self.height == 1
                        )
                    for row in range(self.height):
                        tiles.add_pairs(row * self.side + number, SUMS + row, self.other(number))
            self.store_sums(sums + column * VECTOR_BYTES, self.shape.sum_bytes, side)

    def _pair_values(self, pair: Int) -> Ptr:
        """Return where a single tile of rows has its copy of a pair of groups' values; two copies alternate."""
        return self.scratch + (pair & 1) * (SUMS * TILE_BYTES)


def emit_tile_weights(
    shape: AttentionShape, groups: Groups, visibility: Visibility, scores: Ptr, factor: Vec | None, maximum: Ptr
) -> None:
    """Replace a row's scores by its weights, and store its maximum m at ``maximum``, then partial sums of l in its
    lanes. ``scores`` are those of the whole partition. Without ``factor`` they are scaled already.

    If V is stored as 8-bit codes, the weights are multiplied by the scales of V.
    """
    k, begin = scores.k, first_group(groups)
    end = begin + groups.count
    below = emit_maximum(groups, visibility, scores + begin * VECTOR_BYTES, factor, maximum)
    for is_odd, unlisted in ((begin % 2 > 0, begin - 1), (end % 2 > 0, end)):
        with k.when(is_odd):
            k.store(scores + unlisted * VECTOR_BYTES, k.vector(HIDDEN_SCORE))
    total = k.variable(k.vector(0.0))
    with k.range((end + 1) // 2, begin // 2) as pair:
        weights = []
        for half in range(2):
            score = k.load(scores + pair * (2 * VECTOR_BYTES) + half * VECTOR_BYTES)
            weights.append(k.exp2_rough(score + below if factor is None else k.fma(score, factor, below)))
        total.value = total.value + (weights[0] + weights[1])
        if shape.codes:
            # Unlisted groups get the scales of a listed one, because their own may be NaN.
            listed = [k.min(k.max(pair * 2 + half - begin, 0), groups.count - 1) for half in range(2)]
            scales = [PoolLines(k, shape).scales(groups.at(groups.values + index)) for index in listed]
            weights = [weight * scale for weight, scale in zip(weights, scales, strict=True)]
        k.store_two(scores + pair * VECTOR_BYTES, *weights)
    k.store(maximum + VECTOR_BYTES, total.value)


def first_group(groups: Groups) -> Int:
    """Return the index of the first listed group in its partition."""
    return groups.first // LANES % PARTITION_GROUPS
