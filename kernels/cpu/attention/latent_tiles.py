"""Attention to latents (MLA) in matrix tiles: the first values of a key are also its value.

    weighted  A[c, r]: tiles of 16 latents of 32 tokens, times 16 lines of transposed weights; then transposed to A[r,
    c]

Each strip copies the latents into tiles, one pair of groups ahead of the products.
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
from pillion.kernels.cpu.language.emit import I32, VECTOR_BYTES, VI, WORDS, Int, Ptr, Quads
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.matrix_tiles import TILE_ROWS, TILE_STEPS

# Scratch memory: the values of 32 tokens, twice, at 0; then transposed weights of a partition, sums, scores of rotated
# keys, and dequantized keys.
_AT_TRANSPOSED = 2 * SUMS * TILE_BYTES
_AT_SUMS = _AT_TRANSPOSED + (PARTITION_GROUPS // 2 + 1) * STRIP_ROWS * VECTOR_BYTES
_AT_SCORES = _AT_SUMS + SUMS * TILE_BYTES
_AT_KEYS = _AT_SCORES + SUMS * TILE_BYTES


def latents_bytes(shape: AttentionShape) -> int:
    """Return the bytes of scratch memory of :class:`LatentTiles`."""
    return _AT_KEYS + SIDE_GROUPS * shape.head_dim * VECTOR_BYTES // 2


@dataclass(frozen=True, slots=True)
class LatentTiles(StripTiles):
    """Products of strips with keys of latents, which are also the values."""

    def copy_values(self, groups: Groups) -> None:
        """Do nothing: each strip copies the latents (:meth:`emit_sums`)."""

    def emit_scores(self, groups: Groups, strip: Int, scores: Ptr) -> None:
        """Store the scores of all groups, and some after the last group, which are never read."""
        k, shape, lines = self.tiles.k, self.shape, PoolLines(self.tiles.k, self.shape)
        self.set_shape(self.rows, self.width // 2)
        queries = self.queries + strip * self.strip_bytes
        with k.range(groups.count, step=self.side) as first:
            keys = [groups.at(first + i) for i in range(self.side)]
            ahead = [groups.at(first + SIDE_GROUPS + i) for i in range(self.side)] if self.prefetches else []
            out, step = scores + (first_group(groups) + first) * VECTOR_BYTES, 0
            if shape.codes and self.prefetches:
                for index in (first, groups.values + first):
                    for i in range(self.side):
                        k.prefetch(groups.at(index + SIDE_GROUPS + i) + shape.lines_bytes, near=False)
            plain_keys = self._dequantized(keys, ahead) if shape.codes else keys
            for number, firsts in enumerate(key_parts(shape)):
                self._add_keys(
                    plain_keys, [] if shape.codes else ahead, firsts, queries + step * (self.height * TILE_BYTES)
                )
                step += len(firsts)
                # Scores of rotated keys, which have other scales, are stored separately and then added.
                rotated = self.scratch + _AT_SCORES, self.side * VECTOR_BYTES
                target, stride = rotated if number else (out, SCORE_BYTES)
                self.store_sums(target, stride, self.side)
                if not shape.codes:
                    continue
                scales = [lines.scales(key, number) for key in keys]
                with k.range(self.rows) as row:
                    for i, scale in enumerate(scales):
                        at = out + row * SCORE_BYTES + i * VECTOR_BYTES
                        score = k.load(target + row * stride + i * VECTOR_BYTES) * scale
                        k.store(at, score if number == 0 else score + k.load(at))

    def scale_scores(self, groups: Groups, scores: Ptr) -> None:
        """Do nothing: :meth:`emit_scores` has scaled the scores."""

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
            for line in range(0, size, VECTOR_BYTES):
                for key in ahead:
                    k.prefetch(key + at + line, near=False)

    def _dequantized(self, keys: Sequence[Ptr], ahead: Sequence[Ptr]) -> list[Ptr]:
        """Dequantize groups of K, and prefetch the groups ``ahead``; return the addresses of the copies."""
        k, size = self.tiles.k, self.shape.head_dim * (VECTOR_BYTES // 2)
        copies = [self.scratch + (_AT_KEYS + i * size) for i in range(len(keys))]
        with k.range(self.shape.lines_bytes, step=VECTOR_BYTES) as at:
            for far in ahead:
                k.prefetch(far + at, near=False)
            for key, to in zip(keys, copies, strict=True):
                for i, pairs in enumerate(self.pairs(key + at)):
                    k.write(to + at * 2 + i * VECTOR_BYTES, pairs.ir, 4)
        return copies

    def _copy_latents(self, groups: Groups, pair: Int, begin: Int, side: int) -> None:
        """Copy latents of 32 tokens, from latent 16 * ``begin`` on, into ``side`` tiles, so that a latent's values of
        all tokens are adjacent."""
        k, b, lane_values = self.tiles.k, self.tiles.k.builder, line_values(self.shape.kind)
        to = self.scratch + (pair & 1) * (SUMS * TILE_BYTES)
        first = first_group(groups)
        keys = [groups.at(k.min(k.max(pair * 2 + i - first, 0), groups.count - 1)) for i in range(2)]
        at = begin * (LANES // lane_values * VECTOR_BYTES)
        for line in range(side * LANES // lane_values):
            lines = [self.pairs(key + at + line * VECTOR_BYTES) for key in keys]
            for i, both in enumerate(zip(*lines, strict=True)):
                words = [b.bitcast(pairs.ir, WORDS) for pairs in both]
                for value in range(2):
                    order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(value, 4 * LANES, 2)))
                    latent = b.bitcast(b.shuffle_vector(*words, order), VI)
                    k.write(to + (line * lane_values + 2 * i + value) * VECTOR_BYTES, latent, 4)

    def _add_latents(self, pair: Int, side: int) -> None:
        """Add the weighted latents of a pair of groups to the sums of ``side`` tiles."""
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
        """Store the transposed weights of the pairs of groups begin .. end - 1 in scratch memory."""
        k, stride = self.tiles.k, SCORE_BYTES
        with k.range(end, begin) as pair, k.range(self.height) as tile:
            rows = weights + pair * VECTOR_BYTES + tile * (TILE_ROWS * stride)
            out = self.scratch + pair * (STRIP_ROWS * VECTOR_BYTES) + tile * TILE_BYTES + _AT_TRANSPOSED
            for i, values in enumerate(_transposed([k.load_quads(rows + row * stride) for row in range(TILE_ROWS)])):
                k.write(out + i * VECTOR_BYTES, values.ir, 4)

    def _transpose_sums(self, sums: Ptr, side: int) -> None:
        """Store the sums of ``side`` tiles of latents at ``sums``, transposed."""
        k, stride = self.tiles.k, self.shape.sum_bytes
        stored = self.scratch + _AT_SUMS
        with k.when(k.in_bounds(stored, SUMS * TILE_BYTES)):
            for tile in (row * self.side + number for row in range(self.height) for number in range(side)):
                self.tiles.store(tile, stored + tile * TILE_BYTES, VECTOR_BYTES)
        with k.range(self.height) as row, k.range(side) as number:
            begin = stored + (row * self.side + number) * TILE_BYTES
            out = sums + row * (TILE_ROWS * stride) + number * VECTOR_BYTES
            for i, values in enumerate(_transposed([k.load_quads(begin + i * VECTOR_BYTES) for i in range(TILE_ROWS)])):
                k.write(out + i * stride, values.ir, 4)


def _transposed(rows: Sequence[Quads]) -> list[Quads]:
    """Transpose 16 rows of 16 lanes: swap blocks of 8 x 8, then blocks of 4 x 4 within them, and so on."""
    k, swapped = rows[0].k, list(rows)
    for width in (8, 4, 2, 1):
        upper: list[Any] = [lane if lane // width % 2 == 0 else LANES + lane - width for lane in range(LANES)]
        lower = [lane + width if lane // width % 2 == 0 else LANES + lane for lane in range(LANES)]
        for row in range(LANES):
            if row // width % 2 == 0:
                pair = swapped[row].ir, swapped[row + width].ir
                for at, order in ((row, upper), (row + width, lower)):
                    swapped[at] = Quads(k, k.builder.shuffle_vector(*pair, ir.Constant(VI, order)))
    return swapped
