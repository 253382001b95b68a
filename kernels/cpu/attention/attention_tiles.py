"""Emits the products of attention in matrix tiles (:mod:`pillion.kernels.cpu.language.matrix_tiles`), where queries,
keys and values are bfloat16: of up to 16 query rows with the tokens of a partition.

    scores    S[r, t]: rows of queries with 32 values each, and of K the 16 lines that hold these of 16 tokens
    weighted  A[r, c]: rows of 16 weights, and of V the 8 lines of their tokens' pairs that hold 16 columns
    latents   A[c, r]: rows of K turned, 16 tokens each, and 8 lines of turned weights; the sums are turned back

Every sum is one chain of instructions. For a score an instruction adds 32 values of the key, and for a weighted sum the
tokens of a group, so a row's bits depend neither on the rows beside it nor on the groups that are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.attention.attention_rows import (
    PARTITION_GROUPS,
    SCORE_BYTES,
    SIDE_GROUPS,
    AttentionShape,
    Groups,
)
from pillion.kernels.cpu.language.emit import I32, VECTOR_BYTES, VI, Int, Kernel, Ptr, Quads
from pillion.kernels.cpu.language.isa import LANES, Isa
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, MatrixTiles

# With fewer query heads of a KV head, a decode waits for memory alone, and vectors read a little faster.
_LEAST_GROUP = 4
# An instruction multiplies this many values of a key, two in each step.
_KEY_VALUES = 2 * TILE_STEPS
# A group of tokens has this many pairs, and a row of their weights, or of one of their values, this many bytes.
_PAIRS = LANES // 2
_GROUP_BYTES = _PAIRS * STEP_BYTES
# Sums are in as many tiles; the tile for rows, and those for what they meet, come after them.
_SUMS = 4
_ROWS, _OTHERS = _SUMS, (5, 6, 7)
# Values of this many latents are turned at a time: four tiles of sums. So many groups of them fit into the first cache.
_LATENTS = _SUMS * TILE_ROWS
_TURNED_GROUPS = 8
_TURNED_BYTES = _LATENTS * _GROUP_BYTES
_SUMS_BYTES = TILE_ROWS * VECTOR_BYTES
# The scratch memory of latents: turned weights of all groups, turned values of some groups, and sums.
_AT_VALUES = PARTITION_GROUPS * _PAIRS * VECTOR_BYTES
_AT_SUMS = _AT_VALUES + _TURNED_GROUPS * _TURNED_BYTES
LATENTS_BYTES = _AT_SUMS + _SUMS * _SUMS_BYTES

_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


def in_matrix_tiles(isa: Isa, shape: AttentionShape, rows: int) -> bool:
    """Returns whether up to ``rows`` rows of this shape are multiplied in matrix tiles."""
    plain = isa.matrix_tiles and shape.bf16 and not shape.codes and rows <= TILE_ROWS
    whole = shape.head_dim % _KEY_VALUES == 0 and shape.latents % _LATENTS == 0
    return plain and whole and (shape.latents > 0 or shape.group >= _LEAST_GROUP)


def emit_tile_scores(
    tiles: MatrixTiles, shape: AttentionShape, groups: Groups, queries: Ptr, scores: Ptr, rows: Int
) -> None:
    """Emits code that computes the scores of ``rows`` queries [rows, head_dim] for all groups, and for a few more after
    the last one, which nothing reads."""
    k = tiles.k
    query_bytes = 2 * shape.head_dim
    tiles.shape([rows] * (_SUMS + 1) + [TILE_STEPS] * len(_OTHERS), [VECTOR_BYTES] * 8)
    with k.range(groups.count, step=SIDE_GROUPS) as first:
        here, ahead = ([groups.at(first + (far + i)) for i in range(SIDE_GROUPS)] for far in (0, SIDE_GROUPS))
        inside = k.holds(queries, (rows - 1) * query_bytes + query_bytes)
        for key in here:
            inside = inside & k.holds(key, shape.lines_bytes)
        out = scores + first * VECTOR_BYTES
        with k.when(inside & k.holds(out, (rows - 1) * SCORE_BYTES + SIDE_GROUPS * VECTOR_BYTES)):
            for tile in range(_SUMS):
                tiles.clear(tile)
            with k.range(shape.head_dim // _KEY_VALUES) as step:
                tiles.load(_ROWS, queries + step * (TILE_STEPS * STEP_BYTES), query_bytes)
                at = step * (TILE_STEPS * VECTOR_BYTES)
                for tile, key in enumerate(here):
                    other = _OTHERS[tile % len(_OTHERS)]
                    tiles.load(other, key + at, VECTOR_BYTES)
                    tiles.add_pairs(tile, _ROWS, other)
                _prefetch(k, [key + at for key in ahead], range(0, TILE_STEPS * VECTOR_BYTES, VECTOR_BYTES))
            for tile in range(_SUMS):
                tiles.store(tile, out + tile * VECTOR_BYTES, SCORE_BYTES)


def emit_tile_weighted(
    tiles: MatrixTiles, shape: AttentionShape, groups: Groups, weights: Ptr, sums: Ptr, rows: Int
) -> None:
    """Stores A, the weighted sums of V, for ``rows`` rows of bfloat16 weights, in rows of ``sum_bytes``."""
    k = tiles.k
    columns = shape.head_dim // LANES
    width = max(count for count in range(1, _SUMS + 1) if columns % count == 0)
    pair_bytes = columns * VECTOR_BYTES
    tiles.shape(
        [rows] * (_SUMS + 1) + [_PAIRS] * len(_OTHERS), [VECTOR_BYTES] * _SUMS + [_GROUP_BYTES] + [VECTOR_BYTES] * 3
    )
    with k.range(columns, step=width) as column:
        left = column * VECTOR_BYTES
        for tile in range(width):
            tiles.clear(tile)
        with k.range(groups.count) as group:
            value, row = groups.at(groups.count + group), weights + group * _GROUP_BYTES
            inside = k.holds(row, (rows - 1) * SCORE_BYTES + _GROUP_BYTES)
            with k.when(inside & k.holds(value, shape.lines_bytes)):
                tiles.load(_ROWS, row, SCORE_BYTES)
                for tile in range(width):
                    other = _OTHERS[tile % len(_OTHERS)]
                    tiles.load(other, value + (left + tile * VECTOR_BYTES), pair_bytes)
                    tiles.add_pairs(tile, _ROWS, other)
            # The first columns ask for all columns of the groups that follow, in the order in which they lie there.
            with k.when(column < 1):
                _prefetch(k, [groups.at(groups.count + group + SIDE_GROUPS)], range(0, shape.lines_bytes, VECTOR_BYTES))
        out = sums + left
        with k.when(k.holds(out, (rows - 1) * shape.sum_bytes + width * VECTOR_BYTES)):
            for tile in range(width):
                tiles.store(tile, out + tile * VECTOR_BYTES, shape.sum_bytes)


def emit_tile_weighted_keys(
    tiles: MatrixTiles, shape: AttentionShape, groups: Groups, weights: Ptr, sums: Ptr, scratch: Ptr
) -> None:
    """Stores A where values are the first values of keys: for 16 rows of bfloat16 weights, whether or not all of them
    are wanted. ``scratch`` has LATENTS_BYTES."""
    k = tiles.k
    turned_weights, turned_values, turned_sums = scratch, scratch + _AT_VALUES, scratch + _AT_SUMS
    with k.range(groups.count, step=2) as group:
        rows = [k.load_quads(weights + (group * _GROUP_BYTES + row * SCORE_BYTES)) for row in range(TILE_ROWS)]
        for pair, values in enumerate(_turned(rows)):
            k.write(turned_weights + (group * (_PAIRS * VECTOR_BYTES) + pair * VECTOR_BYTES), values.ir, 4)
    # Rows of sums are latents here. One tile has the turned weights, and the others the values of 16 latents each.
    tiles.shape(
        [TILE_ROWS] * _SUMS + [_PAIRS] + [TILE_ROWS] * len(_OTHERS),
        [VECTOR_BYTES] * (_SUMS + 1) + [_GROUP_BYTES] * len(_OTHERS),
    )
    with k.range(shape.latents, step=_LATENTS) as latent:
        for tile in range(_SUMS):
            tiles.clear(tile)
        with k.range(groups.count, step=_TURNED_GROUPS) as first:
            behind = k.least(first + _TURNED_GROUPS, groups.count)
            with k.range(behind, first) as group:
                # A pair of latents has a line of each group.
                key = groups.at(group) + latent * (VECTOR_BYTES // 2)
                _emit_apart(k, key, turned_values + (group - first) * _TURNED_BYTES)
            with k.range(behind, first) as group:
                weight, value = turned_weights + group * (_PAIRS * VECTOR_BYTES), group - first
                with k.when(k.holds(weight, _PAIRS * VECTOR_BYTES)):
                    tiles.load(_ROWS, weight, VECTOR_BYTES)
                    for tile in range(_SUMS):
                        other, place = _OTHERS[tile % len(_OTHERS)], tile * (TILE_ROWS * _GROUP_BYTES)
                        tiles.load(other, turned_values + (value * _TURNED_BYTES + place), _GROUP_BYTES)
                        tiles.add_pairs(tile, other, _ROWS)
        for tile in range(_SUMS):
            tiles.store(tile, turned_sums + tile * _SUMS_BYTES, VECTOR_BYTES)
        with k.range(_SUMS) as number:
            begin = turned_sums + number * _SUMS_BYTES
            found = [k.load_quads(begin + row * VECTOR_BYTES) for row in range(TILE_ROWS)]
            for row, values in enumerate(_turned(found)):
                out = sums + (latent * 4 + number * VECTOR_BYTES)
                k.write(out + row * shape.sum_bytes, values.ir, 4)


def _emit_apart(k: Kernel, key: Ptr, out: Ptr) -> None:
    """Stores the values of _LATENTS latents of a group's keys so that those of one latent lie side by side."""
    b = k.builder
    order = [2 * lane for lane in range(LANES)] + [2 * lane + 1 for lane in range(LANES)]
    with k.when(k.holds(key, _TURNED_BYTES)):
        for line in range(_LATENTS // 2):
            words = b.bitcast(k.read(key + line * VECTOR_BYTES, VI, 4), _WORDS)
            apart = b.shuffle_vector(words, words, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
            k.write(out + line * VECTOR_BYTES, b.bitcast(apart, VI), 4)


def _turned(rows: Sequence[Quads]) -> list[Quads]:
    """Returns the columns of a matrix of 16 rows of 16 lanes: blocks of 8 x 8 change places, then those of 4 x 4 inside
    of them, and so on."""
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


def _prefetch(k: Kernel, begins: Sequence[Ptr], places: range) -> None:
    """Asks for memory, of which the second cache has room for more than the first."""
    for place in places:
        for begin in begins:
            k.prefetch(begin + place, near=False)
