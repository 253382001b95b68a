"""Attention of bfloat16 queries in matrix tiles (:mod:`pillion.kernels.cpu.language.matrix_tiles`): products of up to
32 query rows with the tokens of a partition.

    scores    S[r, t]: tiles of 16 queries with 32 values each, and of K the 16 lines with these values of 16 tokens
    weighted  A[r, c]: tiles of 16 rows of 32 weights, and of V the 16 lines of their tokens' pairs with 16 columns
    latents   A[c, r]: tiles of 16 latents of 32 tokens, and 16 lines of transposed weights; the sums are transposed
    back

Each loaded tile of K and V is multiplied by both tiles of rows. V is first copied into whole tiles, one step ahead of
the products; 8-bit codes are dequantized on the way, as those of K are.

Every sum is one chain of instructions. For a score an instruction adds 32 values of the key, and for a weighted sum the
32 tokens from a multiple of 32 on, so a row's bits depend neither on the rows beside it nor on the listed groups. If
one half of these tokens is not listed, its weights are 0, and its values are those of the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.attention.attention_rows import (
    PARTITION_GROUPS,
    SCORE_BYTES,
    SIDE_GROUPS,
    AttentionShape,
    Groups,
    PoolLines,
    Weights,
)
from pillion.kernels.cpu.attention.eight_bits import widen_to_pairs
from pillion.kernels.cpu.attention.kv_layout import line_values
from pillion.kernels.cpu.language.emit import I32, VECTOR_BYTES, VI, Bool, Int, Pairs, Ptr, Quads
from pillion.kernels.cpu.language.isa import LANES, Isa
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, MatrixTiles

# Max query rows of an item.
MAX_ROWS = 2 * TILE_ROWS
# Values of a key, or tokens of a weighted sum, per instruction: two per step.
_STEP_VALUES = 2 * TILE_STEPS
# Tiles of sums, before those of rows and those of K or V.
_SUMS = 4
_TILE_BYTES = TILE_ROWS * VECTOR_BYTES
_GROUP_PAIRS = LANES // 2
_WEIGHTS_BYTES = _GROUP_PAIRS * STEP_BYTES
# Scratch memory: values of 32 tokens, twice; transposed weights of a partition, and sums; scores of rotated keys; keys.
_AT_TRANSPOSED = 2 * _SUMS * _TILE_BYTES
_AT_SUMS = _AT_TRANSPOSED + (PARTITION_GROUPS // 2 + 1) * MAX_ROWS * VECTOR_BYTES
_AT_SCORES = _AT_SUMS + _SUMS * _TILE_BYTES
_AT_KEYS = _AT_SCORES + _SUMS * _TILE_BYTES

_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


def in_matrix_tiles(isa: Isa, bf16: bool) -> bool:
    """Return whether attention of queries of this type runs in matrix tiles."""
    return isa.matrix_tiles and bf16


def tiles_bytes(shape: AttentionShape) -> int:
    return _AT_KEYS + SIDE_GROUPS * shape.head_dim * VECTOR_BYTES // 2


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Products of an item's ``rows`` query rows, in ``height`` tiles.

    Attributes:
        queries: the queries in tiles, [steps][MAX_ROWS] of 64 bytes.
        scratch: ``tiles_bytes`` for intermediate values.
    """

    tiles: MatrixTiles
    shape: AttentionShape
    rows: Int
    height: int
    queries: Ptr
    scratch: Ptr

    @property
    def _side(self) -> int:
        """Tiles of K or V whose sums are in tiles at a time."""
        return _SUMS // self.height

    @property
    def _prefetches(self) -> bool:
        """Whether memory is prefetched. Chunks of prompts find it in the L2 cache after a head's first item, and
        prefetches would take a fifth of their time."""
        return self.height == 1

    @property
    def _parts(self) -> list[tuple[int, int]]:
        """Begin and end of the parts of a key with separate scales."""
        shape = self.shape
        apart = shape.codes and shape.latents
        return [(0, shape.latents), (shape.latents, shape.head_dim)] if apart else [(0, shape.head_dim)]

    @property
    def _width(self) -> int:
        """Values of a key per instruction."""
        return min(_STEP_VALUES, self.shape.head_dim)

    @property
    def _one_shape(self) -> bool:
        """True if all instructions of an item use tiles of the same shapes."""
        return self._width == _STEP_VALUES and not self.shape.latents

    def copy_queries(self, source: Ptr) -> None:
        """Copy the queries [rows, head_dim] at ``source`` into tiles. The last step of a part may begin with values of
        an earlier one, which are 0 there."""
        k, step, width = self.tiles.k, 0, self._width
        if self._one_shape:
            self._shape(self.rows, TILE_STEPS)
        with k.range(self.rows) as row:
            for part, behind in self._parts:
                for begin in range(part, behind, width):
                    first = self._first(begin, behind)
                    for value in range(first, first + width, LANES):
                        at = source + row * (2 * self.shape.head_dim) + 2 * value
                        seen = k.load_float(at, True) if begin <= value < behind else k.vector(0.0)
                        to = self.queries + row * VECTOR_BYTES + (step * MAX_ROWS * VECTOR_BYTES + 2 * (value - first))
                        k.store_float(to, seen, True)
                    step += 1

    def emit_scores(self, groups: Groups, scores: Ptr) -> None:
        """Store the scores of all groups, and a few more after the last one, which are never read."""
        k, shape, lines = self.tiles.k, self.shape, PoolLines(self.tiles.k, self.shape)
        if not self._one_shape:
            self._shape(self.rows, self._width // 2)
        with k.range(groups.count, step=self._side) as first:
            keys = [groups.at(first + i) for i in range(self._side)]
            ahead = [groups.at(first + SIDE_GROUPS + i) for i in range(self._side)] if self._prefetches else []
            out, step = scores + first * VECTOR_BYTES, 0
            if shape.codes and self._prefetches:
                for place in (first, groups.count + first):
                    for i in range(self._side):
                        k.prefetch(groups.at(place + SIDE_GROUPS + i) + shape.lines_bytes, near=False)
            read = self._widened(keys, ahead) if shape.codes else keys
            for number, (begin, behind) in enumerate(self._parts):
                steps = -(-(behind - begin) // self._width)
                self._add_keys(read, [] if shape.codes else ahead, (begin, behind), step, steps)
                step += steps
                apart = self.scratch + _AT_SCORES, self._side * VECTOR_BYTES
                into, stride = apart if number else (out, SCORE_BYTES)
                self._store_sums(into, stride, by_rows=True)
                if not shape.codes:
                    continue
                scales = [lines.scales(key, number) for key in keys]
                with k.range(self.rows) as row:
                    for i, scale in enumerate(scales):
                        at = out + row * SCORE_BYTES + i * VECTOR_BYTES
                        found = k.load(into + row * stride + i * VECTOR_BYTES) * scale
                        k.store(at, found if number == 0 else found + k.load(at))

    def weights(self, groups: Groups, scores: Ptr) -> Weights:
        """Return the address of a row's weights, which replace its ``scores``."""
        begin = scores + _skipped(groups) * _WEIGHTS_BYTES
        return Weights(PoolLines(self.tiles.k, self.shape), begin, narrow=True, rough=True)

    def emit_sums(self, groups: Groups, weights: Ptr, sums: Ptr) -> None:
        """Store A, the weighted sums of a partition's values, in rows of ``sum_bytes``."""
        k, shape = self.tiles.k, self.shape
        tiles = shape.value_dim // LANES
        side = min(self._side, tiles)
        pairs = (groups.count + _skipped(groups) + 1) // 2
        with k.range(self.rows) as row:
            self._clear_unlisted(groups, weights + row * SCORE_BYTES)
        if shape.latents:
            self._transpose_weights(pairs, weights)
            self._shape(self.height * TILE_ROWS, TILE_STEPS)
        elif not self._one_shape:
            self._shape(self.rows, TILE_STEPS)
        with k.range(tiles, step=side) as tile:
            # The last tiles may overlap those before them.
            begin = k.min(tile, tiles - side)
            for number in range(_SUMS):
                self.tiles.clear(number)
            self._copy_values(groups, k.int(0), begin, side, tile < 1)
            # Copy the next tiles while the processor multiplies these.
            with k.range(pairs) as pair:
                with k.when(pair + 1 < pairs):
                    self._copy_values(groups, pair + 1, begin, side, tile < 1)
                self._add_values(pair, weights, side)
            if shape.latents:
                self._transpose_sums(sums + begin * VECTOR_BYTES, side)
            else:
                self._store_sums(sums + begin * VECTOR_BYTES, shape.sum_bytes, by_rows=True, side=side)

    def _clear_unlisted(self, groups: Groups, weights: Ptr) -> None:
        """Zero a row's weights for the tokens before and after the listed ones."""
        k, nothing = self.tiles.k, self.tiles.k.vector(0.0)
        with k.when(_skipped(groups) > 0):
            k.store_float(weights, nothing, True)
        k.store_float(weights + (groups.count + _skipped(groups)) * _WEIGHTS_BYTES, nothing, True)

    def _first(self, begin: int, behind: int) -> int:
        return max(0, min(begin, behind - self._width))

    def _shape(self, rows: Int | int, steps: int) -> None:
        """Configure all tiles for ``rows`` rows and instructions of ``steps`` steps."""
        k = self.tiles.k
        heights = [k.min(k.int(rows) - TILE_ROWS * i, TILE_ROWS) for i in range(self.height)]
        others = 8 - _SUMS - self.height
        self.tiles.shape(
            [heights[tile // self._side] for tile in range(_SUMS)] + heights + [k.int(steps)] * others,
            [VECTOR_BYTES] * _SUMS + [STEP_BYTES * steps] * self.height + [VECTOR_BYTES] * others,
        )

    def _other(self, number: int) -> int:
        begin = _SUMS + self.height
        return begin + number % (8 - begin)

    def _add_keys(
        self, keys: Sequence[Ptr], ahead: Sequence[Ptr], values: tuple[int, int], first_step: int, steps: int
    ) -> None:
        k, tiles, (begin, behind) = self.tiles.k, self.tiles, values
        size = self._width * (VECTOR_BYTES // 2)
        for tile in range(_SUMS):
            tiles.clear(tile)
        with k.range(steps) as step:
            at = k.min(step * self._width + begin, self._first(behind, behind)) * (VECTOR_BYTES // 2)
            query = self.queries + (step + first_step) * (MAX_ROWS * VECTOR_BYTES)
            inside = k.in_bounds(query, MAX_ROWS * VECTOR_BYTES)
            for key in keys:
                inside = inside & k.in_bounds(key + at, size)
            with k.when(inside):
                for row in range(self.height):
                    tiles.load(_SUMS + row, query + row * _TILE_BYTES, VECTOR_BYTES)
                for number, key in enumerate(keys):
                    tiles.load(self._other(number), key + at, VECTOR_BYTES)
                    for row in range(self.height):
                        tiles.add_pairs(row * self._side + number, _SUMS + row, self._other(number))
            for place in range(0, size, VECTOR_BYTES):
                for key in ahead:
                    k.prefetch(key + at + place, near=False)

    def _widened(self, keys: Sequence[Ptr], ahead: Sequence[Ptr]) -> list[Ptr]:
        """Dequantize some groups of K; return the addresses of the copies."""
        k, size = self.tiles.k, self.shape.head_dim * (VECTOR_BYTES // 2)
        found = [self.scratch + (_AT_KEYS + i * size) for i in range(len(keys))]
        with k.range(self.shape.lines_bytes, step=VECTOR_BYTES) as at:
            for far in ahead:
                k.prefetch(far + at, near=False)
            for key, to in zip(keys, found, strict=True):
                for i, pairs in enumerate(widen_to_pairs(k, key + at, self.shape.codes)):
                    k.write(to + at * 2 + i * VECTOR_BYTES, pairs.ir, 4)
        return found

    def _copy_values(self, groups: Groups, pair: Int, begin: Int, side: int, first: Bool) -> None:
        """Copy values of 32 tokens, of columns or latents from 16 * ``begin`` on, into ``side`` tiles. Where ``first``
        holds, also prefetch all columns of the following groups, in memory order."""
        k, shape = self.tiles.k, self.shape
        to = self.scratch + (pair & 1) * (_SUMS * _TILE_BYTES)
        indices = [k.min(k.max(pair * 2 + i - _skipped(groups), 0), groups.count - 1) for i in range(2)]
        if shape.latents:
            self._copy_latents([groups.at(index) for index in indices], begin, side, to)
            return
        places = [groups.count + index for index in indices]
        if self._prefetches:
            with k.when(first):
                for place in places:
                    ahead = groups.at(place + SIDE_GROUPS)
                    with k.range(shape.lines_bytes, step=VECTOR_BYTES) as at:
                        k.prefetch(ahead + at, near=False)
        row_bytes, each = shape.head_dim // LANES * VECTOR_BYTES, line_values(shape.kind) // 2
        for half, place in enumerate(places):
            value = groups.at(place) + begin * VECTOR_BYTES
            for line in range(_GROUP_PAIRS // each):
                for column in range(side):
                    tile = to + (column * _TILE_BYTES + (half * _GROUP_PAIRS + line * each) * VECTOR_BYTES)
                    for i, pairs in enumerate(self._pairs(value + (line * row_bytes + column * VECTOR_BYTES))):
                        k.write(tile + i * VECTOR_BYTES, pairs.ir, 4)

    def _copy_latents(self, keys: Sequence[Ptr], begin: Int, side: int, to: Ptr) -> None:
        """Copy latents of two groups of keys so that the values of 32 tokens of one latent are adjacent."""
        k, b, each = self.tiles.k, self.tiles.k.builder, line_values(self.shape.kind)
        at = begin * (LANES // each * VECTOR_BYTES)
        for line in range(side * LANES // each):
            lines = [self._pairs(key + at + line * VECTOR_BYTES) for key in keys]
            for i, both in enumerate(zip(*lines, strict=True)):
                words = [b.bitcast(pairs.ir, _WORDS) for pairs in both]
                for value in range(2):
                    order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(value, 4 * LANES, 2)))
                    latent = b.bitcast(b.shuffle_vector(*words, order), VI)
                    k.write(to + (line * each + 2 * i + value) * VECTOR_BYTES, latent, 4)

    def _pairs(self, line: Ptr) -> tuple[Pairs, ...]:
        k, codes = self.tiles.k, self.shape.codes
        return widen_to_pairs(k, line, codes) if codes else (k.load_pairs(line),)

    def _add_values(self, pair: Int, weights: Ptr, side: int) -> None:
        k, tiles, height = self.tiles.k, self.tiles, self.height
        values = self.scratch + (pair & 1) * (_SUMS * _TILE_BYTES)
        if self.shape.latents:
            transposed = self.scratch + pair * (MAX_ROWS * VECTOR_BYTES) + _AT_TRANSPOSED
            for row in range(height):
                tiles.load(_SUMS + row, transposed + row * _TILE_BYTES, VECTOR_BYTES)
        else:
            rows = weights + pair * VECTOR_BYTES
            with k.when(k.in_bounds(rows, (self.rows - 1) * SCORE_BYTES + VECTOR_BYTES)):
                for row in range(height):
                    tiles.load(_SUMS + row, rows + row * (TILE_ROWS * SCORE_BYTES), SCORE_BYTES)
        for number in range(side):
            tiles.load(self._other(number), values + number * _TILE_BYTES, VECTOR_BYTES)
            for row in range(height):
                operands = (_SUMS + row, self._other(number))
                tiles.add_pairs(row * self._side + number, *(operands[::-1] if self.shape.latents else operands))

    def _store_sums(self, out: Ptr, stride: int, *, by_rows: bool, side: int | None = None) -> None:
        """Store the sums, rows of an item ``stride`` bytes apart, or tile by tile."""
        k, side = self.tiles.k, side or self._side
        size = (self.rows - 1) * stride + side * VECTOR_BYTES if by_rows else k.int(_SUMS * _TILE_BYTES)
        with k.when(k.in_bounds(out, size)):
            for row in range(self.height):
                for number in range(side):
                    at = row * TILE_ROWS * stride + number * VECTOR_BYTES
                    tile = row * self._side + number
                    self.tiles.store(tile, out + (at if by_rows else tile * _TILE_BYTES), stride)

    def _transpose_weights(self, pairs: Int, weights: Ptr) -> None:
        k = self.tiles.k
        with k.range(pairs) as pair, k.range(self.height) as tile:
            rows = weights + pair * VECTOR_BYTES + tile * (TILE_ROWS * SCORE_BYTES)
            out = self.scratch + pair * (MAX_ROWS * VECTOR_BYTES) + tile * _TILE_BYTES + _AT_TRANSPOSED
            for i, values in enumerate(
                _transposed([k.load_quads(rows + row * SCORE_BYTES) for row in range(TILE_ROWS)])
            ):
                k.write(out + i * VECTOR_BYTES, values.ir, 4)

    def _transpose_sums(self, sums: Ptr, side: int) -> None:
        """Store the sums of ``side`` tiles of latents, transposed."""
        k, stride = self.tiles.k, self.shape.sum_bytes
        found = self.scratch + _AT_SUMS
        self._store_sums(found, VECTOR_BYTES, by_rows=False, side=side)
        with k.range(self.height) as row, k.range(side) as number:
            begin = found + (row * self._side + number) * _TILE_BYTES
            out = sums + row * (TILE_ROWS * stride) + number * VECTOR_BYTES
            for i, values in enumerate(_transposed([k.load_quads(begin + i * VECTOR_BYTES) for i in range(TILE_ROWS)])):
                k.write(out + i * stride, values.ir, 4)


def _skipped(groups: Groups) -> Int:
    """Return the number of groups, 0 or 1, before the first listed one in its 32 tokens."""
    return groups.first // LANES % 2


def _transposed(rows: Sequence[Quads]) -> list[Quads]:
    """Transpose 16 rows of 16 lanes: swap blocks of 8 x 8, then those of 4 x 4 inside of them, and so on."""
    k, found = rows[0].k, list(rows)
    for width in (8, 4, 2, 1):
        upper: list[Any] = [lane if lane // width % 2 == 0 else LANES + lane - width for lane in range(LANES)]
        lower = [lane + width if lane // width % 2 == 0 else LANES + lane for lane in range(LANES)]
        for row in range(LANES):
            if row // width % 2 == 0:
                pair = found[row].ir, found[row + width].ir
                for at, order in ((row, upper), (row + width, lower)):
                    found[at] = Quads(k, k.builder.shuffle_vector(*pair, ir.Constant(VI, order)))
    return found
