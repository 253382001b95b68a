"""Sort of pairs of a row and one of its experts by expert, and their division into tiles of one expert.

    chosen [T, k] --> order [P]: indices of pairs, sorted by (expert, index); P = T * k
                  --> tiles [C, 3]: expert, first index in ``order``, rows;  count [1]: tiles that are in use

Pair t * k + i is row t and its choice i. Pairs with expert -1 are in no tile. A tile has at most B pairs of one expert,
so there are at most min(E, P) + P // B tiles: a capacity that the shapes determine, so that the host can launch kernels
over tiles without reading their number.

Up to FEW_PAIRS pairs are sorted by the last program of the launch that chooses the experts: a pair's place is the
number of smaller keys (expert, pair). More pairs are sorted in three launches: each block of pairs counts its experts,
one program sums the counts over blocks and experts, and each block stores its pairs at their places. Places depend on
counts alone, not on the order in which programs finish, so a row has the same neighbours in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.products.dense_gemm import ROW_TILES
from pillion.kernels.gpu.tuned import tuned

# Max pairs sorted by one program.
FEW_PAIRS = 512
# Keys compared at a time.
COMPARED = 32
# Pairs per block.
BLOCK_PAIRS = 256
# Counts that are summed up at a time.
SUMMED_COUNTS = 4096
# int32 words of a tile: its expert, the place of its first pair, and its number of pairs.
TILE_WORDS = 3


@triton.jit
def _cut(totals, expert, tiles, count, tile_rows):
    """Write the tiles of experts [EXPERTS] with ``totals`` pairs; return the place of each expert's first pair."""
    first = tl.cumsum(totals, 0) - totals
    needed = (totals + tile_rows - 1) // tile_rows
    first_tile = tl.cumsum(needed, 0) - needed
    for turn in range(tl.max(needed, 0)):
        mask = turn < needed
        at, offset = tiles + (first_tile + turn) * 3, turn * tile_rows
        tl.store(at, expert, mask=mask)
        tl.store(at + 1, first + offset, mask=mask)
        tl.store(at + 2, tl.minimum(totals - offset, tile_rows), mask=mask)
    tl.store(count, tl.sum(needed, 0))
    return first


@triton.jit
def sort_few(
    chosen, order, tiles, count, pairs, tile_rows,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Sort at most PAIRS pairs, which other programs of this launch may have written."""
    pair = tl.arange(0, PAIRS)
    expert = tl.load(chosen + pair, mask=pair < pairs, other=-1, cache_modifier=".cg")
    counted = expert >= 0
    _cut(tl.histogram(expert, EXPERTS, mask=counted), tl.arange(0, EXPERTS), tiles, count, tile_rows)
    # Pairs without an expert sort last. Each thread makes all comparisons of its pairs, so sums need no exchange.
    key = expert * PAIRS + pair
    place = tl.zeros((PAIRS,), tl.int32)
    for begin in range(0, pairs, COMPARED):
        other = begin + tl.arange(0, COMPARED)
        other_expert = tl.load(chosen + other, mask=other < pairs, other=-1, cache_modifier=".cg")
        keys = tl.where(other_expert >= 0, other_expert * PAIRS + other, EXPERTS * PAIRS)
        place += tl.sum((keys[:, None] < key[None, :]).to(tl.int32), 0)
    tl.store(order + place, pair, mask=counted)


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen, counts, pairs, EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Count the pairs of each expert in one block: int32 [blocks, EXPERTS]."""
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    expert = tl.load(chosen + pair, mask=pair < pairs, other=-1)
    block_counts = tl.histogram(expert, EXPERTS, mask=expert >= 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), block_counts)


@triton.jit(do_not_specialize=["blocks", "tile_rows"])
def _sum_up(counts, tiles, count, blocks, tile_rows, EXPERTS: tl.constexpr, SUMMED: tl.constexpr):
    """Write the tiles. Replace counts [blocks, EXPERTS] by the number of the expert's pairs in earlier blocks, and
    store the place of each expert's first pair after them."""
    expert = tl.arange(0, EXPERTS)
    cell = tl.arange(0, SUMMED)[:, None] * EXPERTS + expert[None, :]
    totals = tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, blocks, SUMMED):
        inside = (begin + tl.arange(0, SUMMED) < blocks)[:, None]
        block_counts = tl.load(counts + begin * EXPERTS + cell, mask=inside, other=0)
        earlier = totals[None, :] + tl.cumsum(block_counts, 0) - block_counts
        tl.store(counts + begin * EXPERTS + cell, earlier, mask=inside)
        totals += tl.sum(block_counts, 0)
    first = _cut(totals, expert, tiles, count, tile_rows)
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
    # Earlier pairs of the same expert have the ``earlier`` keys from ``first_key`` on.
    first_key, earlier = expert * BLOCK_PAIRS, (pair - begin).to(tl.uint32)
    for turn in range(0, BLOCK_PAIRS, COMPARED):
        other = turn + tl.arange(0, COMPARED)
        other_expert = tl.load(chosen + begin + other, mask=begin + other < pairs, other=-1)
        keys = other_expert * BLOCK_PAIRS + other
        distance = (keys[:, None] - first_key[None, :]).to(tl.uint32)
        place += tl.sum((distance < earlier[None, :]).to(tl.int32), 0)
    tl.store(order + place, pair, mask=counted)


def tile_rows_of(experts: int, pairs: int) -> int:
    """Return the rows per tile for ``pairs`` pairs: the average per expert, rounded up to one of ROW_TILES."""
    return next((rows for rows in ROW_TILES if pairs <= rows * experts), ROW_TILES[-1])


def most_tiles(experts: int, pairs: int, tile_rows: int) -> int:
    """Return the max number of tiles of ``tile_rows`` pairs."""
    return min(experts, pairs) + pairs // tile_rows


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Output of the sort: ``order`` int32 [P], ``tiles`` int32 [C, 3] of at most ``tile_rows`` pairs each, and their
    number ``count`` int32 [1]. Entries past the last pair and the last tile are not written."""

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
    """Sorts many pairs by expert. Owns the workspace: pairs per block and expert.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph.
    """

    def __init__(self, experts: int, max_pairs: int, device: torch.device) -> None:
        """Allocate the workspace for up to ``max_pairs`` pairs and ``experts`` experts."""
        self._experts, self._columns = experts, columns_of(experts)
        blocks = cdiv(max_pairs, BLOCK_PAIRS) + 1
        self._counts = torch.zeros(blocks * self._columns, dtype=torch.int32, device=device)

    def __call__(self, chosen: torch.Tensor, into: PairOrder) -> None:
        """Sort the pairs of ``chosen`` int32 [T, k], expert ids or -1, into ``into``. Raises Internal for misshapen
        tensors."""
        into.check(chosen, self._experts)
        pairs, use = chosen.numel(), tuned("sort_pairs", arch_of(chosen.device))
        blocks, warps = cdiv(pairs, BLOCK_PAIRS), use["num_warps"]
        check((blocks + 1) * self._columns <= len(self._counts), "the workspace is too small for {} pairs", pairs)
        own = {"EXPERTS": self._columns, "BLOCK_PAIRS": BLOCK_PAIRS, "num_warps": warps}
        _count[(blocks,)](chosen, self._counts, pairs, **own)
        _sum_up[(1,)](
            self._counts, into.tiles, into.count, blocks, into.tile_rows, EXPERTS=self._columns,
            SUMMED=_summed(self._columns), num_warps=use["sum_warps"],
        )  # fmt: skip
        _place[(blocks,)](chosen, self._counts, into.order, pairs, blocks, COMPARED=COMPARED, **own)


def columns_of(experts: int) -> int:
    """Return the number of experts padded for kernels: a power of 2, and at least a warp's 32 threads."""
    return max(32, next_power_of_2(experts))


def _summed(columns: int) -> int:
    """Return the number of blocks whose counts are summed up at a time."""
    return max(1, SUMMED_COUNTS // columns)
