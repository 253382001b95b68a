"""Attention to latents in matrix tiles: the first values of a key are also its value.

    latents   A[c, r]: tiles of 16 latents of 32 tokens, and 16 lines of transposed weights; the sums are transposed
    back

Latents are copied into tiles for each strip, one step ahead of the products.
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
)
from pillion.kernels.cpu.attention.attention_tiles import (
    STRIP_ROWS,
    SUMS,
    TILE_BYTES,
    StripTiles,
    first_group,
    key_parts,
)
from pillion.kernels.cpu.attention.kv_layout import line_values
from pillion.kernels.cpu.language.emit import I32, VECTOR_BYTES, VI, Int, Ptr, Quads
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.matrix_tiles import TILE_ROWS, TILE_STEPS

# Scratch memory: values of 32 tokens, twice; transposed weights of a partition, and sums; scores of rotated keys; keys.
_AT_TRANSPOSED = 2 * SUMS * TILE_BYTES
_AT_SUMS = _AT_TRANSPOSED + (PARTITION_GROUPS // 2 + 1) * STRIP_ROWS * VECTOR_BYTES
_AT_SCORES = _AT_SUMS + SUMS * TILE_BYTES
_AT_KEYS = _AT_SCORES + SUMS * TILE_BYTES

_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


def latents_bytes(shape: AttentionShape) -> int:
    """Return the bytes of scratch memory of :class:`LatentTiles`."""
    return _AT_KEYS + SIDE_GROUPS * shape.head_dim * VECTOR_BYTES // 2


@dataclass(frozen=True, slots=True)
class LatentTiles(StripTiles):
    """Products of strips with keys whose first values are their values."""

    def copy_values(self, groups: Groups) -> None:
        """Each strip copies its values."""

    def emit_scores(self, groups: Groups, strip: Int, scores: Ptr) -> None:
        """Store the scores of all groups, and a few more after the last one, which are never read."""
        k, shape, lines = self.tiles.k, self.shape, PoolLines(self.tiles.k, self.shape)
        self.set_shape(self.rows, self.width // 2)
        queries = self.queries + strip * self.strip_bytes
        with k.range(groups.count, step=self.side) as first:
            keys = [groups.at(first + i) for i in range(self.side)]
            ahead = [groups.at(first + SIDE_GROUPS + i) for i in range(self.side)] if self.prefetches else []
            out, step = scores + (first_group(groups) + first) * VECTOR_BYTES, 0
            if shape.codes and self.prefetches:
                for place in (first, groups.values + first):
                    for i in range(self.side):
                        k.prefetch(groups.at(place + SIDE_GROUPS + i) + shape.lines_bytes, near=False)
            read = self._widened(keys, ahead) if shape.codes else keys
            for number, firsts in enumerate(key_parts(shape)):
                self._add_keys(read, [] if shape.codes else ahead, firsts, queries + step * (self.height * TILE_BYTES))
                step += len(firsts)
                apart = self.scratch + _AT_SCORES, self.side * VECTOR_BYTES
                into, stride = apart if number else (out, SCORE_BYTES)
                self.store_sums(into, stride, self.side)
                if not shape.codes:
                    continue
                scales = [lines.scales(key, number) for key in keys]
                with k.range(self.rows) as row:
                    for i, scale in enumerate(scales):
                        at = out + row * SCORE_BYTES + i * VECTOR_BYTES
                        found = k.load(into + row * stride + i * VECTOR_BYTES) * scale
                        k.store(at, found if number == 0 else found + k.load(at))

    def scale_scores(self, groups: Groups, scores: Ptr) -> None:
        """Scores of latents are scaled already."""

    def emit_sums(self, groups: Groups, weights: Ptr, sums: Ptr) -> None:
        """Store A, the weighted sums of a partition's latents, in rows of ``sum_bytes``."""
        k, tiles = self.tiles.k, self.shape.latents // LANES
        side, begin_pair = min(self.side, tiles), first_group(groups) // 2
        pairs = (first_group(groups) + groups.count + 1) // 2
        self._transpose_weights(begin_pair, pairs, weights)
        self.set_shape(self.height * TILE_ROWS, TILE_STEPS)
        with k.range(tiles, step=side) as tile:
            # The last tiles may overlap those before them.
            begin = k.min(tile, tiles - side)
            for number in range(SUMS):
                self.tiles.clear(number)
            self._copy_latents(groups, begin_pair, begin, side)
            # Copy the next tiles while the processor multiplies these.
            with k.range(pairs, begin_pair) as pair:
                with k.when(pair + 1 < pairs):
                    self._copy_latents(groups, pair + 1, begin, side)
                self._add_latents(pair, side)
            self._transpose_sums(sums + begin * VECTOR_BYTES, side)

    def _add_keys(self, keys: Sequence[Ptr], ahead: Sequence[Ptr], firsts: Sequence[int], queries: Ptr) -> None:
        k, tiles = self.tiles.k, self.tiles
        size = self.width * (VECTOR_BYTES // 2)
        for tile in range(SUMS):
            tiles.clear(tile)
        with k.range(len(firsts)) as step:
            at = k.min(step * self.width + firsts[0], firsts[-1]) * (VECTOR_BYTES // 2)
            self.load_rows(queries + step * (self.height * TILE_BYTES), VECTOR_BYTES)
            for number, key in enumerate(keys):
                with k.when(k.in_bounds(key + at, size)):
                    tiles.load(self.other(number), key + at, VECTOR_BYTES)
                for row in range(self.height):
                    tiles.add_pairs(row * self.side + number, SUMS + row, self.other(number))
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
                for i, pairs in enumerate(self.pairs(key + at)):
                    k.write(to + at * 2 + i * VECTOR_BYTES, pairs.ir, 4)
        return found

    def _copy_latents(self, groups: Groups, pair: Int, begin: Int, side: int) -> None:
        """Copy latents of 32 tokens, from 16 * ``begin`` on, into ``side`` tiles, so that the values of all tokens of
        one latent are adjacent."""
        k, b, each = self.tiles.k, self.tiles.k.builder, line_values(self.shape.kind)
        to = self.scratch + (pair & 1) * (SUMS * TILE_BYTES)
        first = first_group(groups)
        keys = [groups.at(k.min(k.max(pair * 2 + i - first, 0), groups.count - 1)) for i in range(2)]
        at = begin * (LANES // each * VECTOR_BYTES)
        for line in range(side * LANES // each):
            lines = [self.pairs(key + at + line * VECTOR_BYTES) for key in keys]
            for i, both in enumerate(zip(*lines, strict=True)):
                words = [b.bitcast(pairs.ir, _WORDS) for pairs in both]
                for value in range(2):
                    order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(value, 4 * LANES, 2)))
                    latent = b.bitcast(b.shuffle_vector(*words, order), VI)
                    k.write(to + (line * each + 2 * i + value) * VECTOR_BYTES, latent, 4)

    def _add_latents(self, pair: Int, side: int) -> None:
        tiles, height = self.tiles, self.height
        values = self.scratch + (pair & 1) * (SUMS * TILE_BYTES)
        transposed = self.scratch + pair * (STRIP_ROWS * VECTOR_BYTES) + _AT_TRANSPOSED
        for row in range(height):
            tiles.load(SUMS + row, transposed + row * TILE_BYTES, VECTOR_BYTES)
        for number in range(side):
            tiles.load(self.other(number), values + number * TILE_BYTES, VECTOR_BYTES)
            for row in range(height):
                tiles.add_pairs(row * self.side + number, self.other(number), SUMS + row)

    def _transpose_weights(self, begin: Int, end: Int, weights: Ptr) -> None:
        k, stride = self.tiles.k, SCORE_BYTES
        with k.range(end, begin) as pair, k.range(self.height) as tile:
            rows = weights + pair * VECTOR_BYTES + tile * (TILE_ROWS * stride)
            out = self.scratch + pair * (STRIP_ROWS * VECTOR_BYTES) + tile * TILE_BYTES + _AT_TRANSPOSED
            for i, values in enumerate(_transposed([k.load_quads(rows + row * stride) for row in range(TILE_ROWS)])):
                k.write(out + i * VECTOR_BYTES, values.ir, 4)

    def _transpose_sums(self, sums: Ptr, side: int) -> None:
        """Store the sums of ``side`` tiles of latents, transposed."""
        k, stride = self.tiles.k, self.shape.sum_bytes
        found = self.scratch + _AT_SUMS
        with k.when(k.in_bounds(found, SUMS * TILE_BYTES)):
            for tile in (row * self.side + number for row in range(self.height) for number in range(side)):
                self.tiles.store(tile, found + tile * TILE_BYTES, VECTOR_BYTES)
        with k.range(self.height) as row, k.range(side) as number:
            begin = found + (row * self.side + number) * TILE_BYTES
            out = sums + row * (TILE_ROWS * stride) + number * VECTOR_BYTES
            for i, values in enumerate(_transposed([k.load_quads(begin + i * VECTOR_BYTES) for i in range(TILE_ROWS)])):
                k.write(out + i * stride, values.ir, 4)


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
