"""Sort of pairs of a row and one of its experts by expert, and their division into tiles of one expert.

    chosen [T, k] --> order [P]: numbers of pairs, by expert, and by number within one; P = T * k
                  --> tiles [C, 3]: expert, first index in ``order``, rows;  count [1]: tiles that are in use

Pair t * k + i is row t and its choice i. Pairs with expert -1 are in no tile. A tile has at most B pairs of one expert,
so there are at most min(E, P) + P // B tiles: a capacity fixed by the shape, so that launches over tiles need not read
the number.

Up to FEW_PAIRS are sorted in the launch that chooses the experts, by its last program: a pair's place is the number of
smaller keys, (expert, pair). More are sorted in three launches: each block of pairs counts its experts, one program
sums the counts over blocks and experts, and each block places its pairs. Places are sums of counts, never the order in
which programs arrive, so a row has the same neighbours in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.products.quantized_product import ROW_TILES
from pillion.kernels.gpu.tuned import tuned

# Max pairs sorted by one program.
FEW_PAIRS = 512
# Keys compared at a time.
COMPARED = 32
# Pairs of a block that counts and places, and the size of the tile in which counts are summed up.
BLOCK_PAIRS = 256
SUMMED_COUNTS = 4096
# Words of a tile: the expert, its first place, its rows.
TILE_WORDS = 3


@triton.jit
def _cut(totals, expert, tiles, count, tile_rows):
    """Write the tiles of experts [EXPERTS] with ``totals`` pairs; return the first place of each."""
    first = tl.cumsum(totals, 0) - totals
    needed = (totals + tile_rows - 1) // tile_rows
    number = tl.cumsum(needed, 0) - needed
    for turn in range(tl.max(needed, 0)):
        mine = turn < needed
        at, done = tiles + (number + turn) * 3, turn * tile_rows
        tl.store(at, expert, mask=mine)
        tl.store(at + 1, first + done, mask=mine)
        tl.store(at + 2, tl.minimum(totals - done, tile_rows), mask=mine)
    tl.store(count, tl.sum(needed, 0))
    return first


@triton.jit
def sort_few(
    chosen, order, tiles, count, pairs, tile_rows,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Sort at most PAIRS pairs, which other programs may have written."""
    pair = tl.arange(0, PAIRS)
    expert = tl.load(chosen + pair, mask=pair < pairs, other=-1, cache_modifier=".cg")
    counted = expert >= 0
    _cut(tl.histogram(expert, EXPERTS, mask=counted), tl.arange(0, EXPERTS), tiles, count, tile_rows)
    # Pairs without an expert sort last. A thread has all comparisons of its pairs, and adds them up alone.
    key = expert * PAIRS + pair
    place = tl.zeros((PAIRS,), tl.int32)
    for begin in range(0, pairs, COMPARED):
        other = begin + tl.arange(0, COMPARED)
        theirs = tl.load(chosen + other, mask=other < pairs, other=-1, cache_modifier=".cg")
        keys = tl.where(theirs >= 0, theirs * PAIRS + other, EXPERTS * PAIRS)
        place += tl.sum((keys[:, None] < key[None, :]).to(tl.int32), 0)
    tl.store(order + place, pair, mask=counted)


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen, counts, pairs, EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Count the pairs of each expert in one block: int32 [blocks, EXPERTS]."""
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    expert = tl.load(chosen + pair, mask=pair < pairs, other=-1)
    found = tl.histogram(expert, EXPERTS, mask=expert >= 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["blocks", "tile_rows"])
def _sum_up(counts, tiles, count, blocks, tile_rows, EXPERTS: tl.constexpr, SUMMED: tl.constexpr):
    """Replace counts [blocks, EXPERTS] by the place of each block's first pair of each expert, and write tiles."""
    expert = tl.arange(0, EXPERTS)
    cell = tl.arange(0, SUMMED)[:, None] * EXPERTS + expert[None, :]
    totals = tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, blocks, SUMMED):
        inside = (begin + tl.arange(0, SUMMED) < blocks)[:, None]
        found = tl.load(counts + begin * EXPERTS + cell, mask=inside, other=0)
        tl.store(counts + begin * EXPERTS + cell, totals[None, :] + tl.cumsum(found, 0) - found, mask=inside)
        totals += tl.sum(found, 0)
    first = _cut(totals, expert, tiles, count, tile_rows)
    # The places of experts follow the counts.
    tl.store(counts + blocks * EXPERTS + expert, first)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _place(
    chosen, counts, order, pairs, blocks, EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, COMPARED: tl.constexpr
):
    """Write the pairs of one block to their places."""
    begin = tl.program_id(0) * BLOCK_PAIRS
    pair = begin + tl.arange(0, BLOCK_PAIRS)
    expert = tl.load(chosen + pair, mask=pair < pairs, other=-1)
    counted = expert >= 0
    place = tl.load(counts + blocks * EXPERTS + expert, mask=counted, other=0)
    place += tl.load(counts + tl.program_id(0) * EXPERTS + expert, mask=counted, other=0)
    # Earlier pairs of the same expert have keys in a range of this length.
    least, earlier = expert * BLOCK_PAIRS, (pair - begin).to(tl.uint32)
    for turn in range(0, BLOCK_PAIRS, COMPARED):
        other = turn + tl.arange(0, COMPARED)
        theirs = tl.load(chosen + begin + other, mask=begin + other < pairs, other=-1)
        keys = theirs * BLOCK_PAIRS + other
        past = (keys[:, None] - least[None, :]).to(tl.uint32)
        place += tl.sum((past < earlier[None, :]).to(tl.int32), 0)
    tl.store(order + place, pair, mask=counted)


def tile_rows_of(experts: int, pairs: int) -> int:
    """Return the max rows of a tile: the expert's average number of these pairs, padded."""
    return next((rows for rows in ROW_TILES if pairs <= rows * experts), ROW_TILES[-1])


def most_tiles(experts: int, pairs: int, tile_rows: int) -> int:
    """Return the max number of tiles of ``tile_rows`` pairs."""
    return min(experts, pairs) + pairs // tile_rows


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Output of the sort: ``order`` int32 [P], ``tiles`` int32 [C, 3] of at most ``tile_rows`` pairs, and ``count``
    int32 [1]. Memory after the last pair and the last tile is unchanged."""

    order: torch.Tensor
    tiles: torch.Tensor
    count: torch.Tensor
    tile_rows: int

    def check(self, chosen: torch.Tensor, experts: int) -> None:
        """Raise Internal unless this fits pairs ``chosen`` int32 [T, k] of ``experts`` experts."""
        pairs, tiles = chosen.numel(), self.tiles
        check_tensor("chosen", chosen, (None, None), torch.int32)
        check_tensor("order", self.order, (pairs,), torch.int32, chosen.device)
        check_tensor("tiles", tiles, (None, TILE_WORDS), torch.int32, chosen.device)
        check_tensor("count", self.count, (1,), torch.int32, chosen.device)
        check(pairs > 0 and self.tile_rows > 0, "{} pairs in tiles of {} rows", pairs, self.tile_rows)
        check(len(tiles) >= most_tiles(experts, pairs, self.tile_rows), "{} tiles are too few", len(tiles))


class PairSorter:
    """Sort of many pairs by expert. Owns the workspace: counts of blocks.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph.
    """

    def __init__(self, experts: int, max_pairs: int, device: torch.device) -> None:
        """Reserve the workspace for at most ``max_pairs`` pairs of at most ``experts`` experts."""
        self._experts, self._columns = experts, columns_of(experts)
        blocks = cdiv(max_pairs, BLOCK_PAIRS) + 1
        self._counts = torch.zeros(blocks * self._columns, dtype=torch.int32, device=device)

    def __call__(self, chosen: torch.Tensor, into: PairOrder) -> None:
        """Sort ``chosen`` int32 [T, k], numbers of experts or -1. Raises Internal for misshapen tensors."""
        into.check(chosen, self._experts)
        pairs, use = chosen.numel(), tuned("sort_pairs", arch_of(chosen.device))
        blocks, warps = cdiv(pairs, BLOCK_PAIRS), use["num_warps"]
        check((blocks + 1) * self._columns <= len(self._counts), "more pairs than the workspace holds")
        own = {"EXPERTS": self._columns, "BLOCK_PAIRS": BLOCK_PAIRS, "num_warps": warps}
        _count[(blocks,)](chosen, self._counts, pairs, **own)
        _sum_up[(1,)](
            self._counts, into.tiles, into.count, blocks, into.tile_rows, EXPERTS=self._columns,
            SUMMED=_summed(self._columns), num_warps=use["sum_warps"],
        )  # fmt: skip
        _place[(blocks,)](chosen, self._counts, into.order, pairs, blocks, COMPARED=COMPARED, **own)


def columns_of(experts: int) -> int:
    """Return the experts of a kernel's tile, a power of 2, and at least the threads of a warp."""
    return max(32, next_power_of_2(experts))


def _summed(columns: int) -> int:
    """Return the blocks whose counts are summed up at a time."""
    return max(1, SUMMED_COUNTS // columns)
