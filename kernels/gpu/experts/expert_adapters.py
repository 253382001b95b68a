"""Contributions of the adapters of a step's rows to the products of their experts (LoRA), before activation and sums.

    shrink: shrunk[place] = A[adapter, expert] x    a separate launch before the product
    expand: sums += B[adapter, expert] shrunk       a part of the product (grouped_product.py), before its bias

Both iterate over the tiles of the product, which have pairs of one expert, so pairs need no second sort by adapter. For
each tile a program iterates over the adapters of its rows, from the lowest slot to the highest, and multiplies the
matrix of each by the tile's rows, with zeros for rows of other adapters. A decode's tile has few rows, and a chunk's
tile mostly one adapter, so little work is wasted. Rows without an adapter, and matrices of adapters that no row of the
tile has, are not read.

The matrices are the left operands, as in the product, and each sum is one chain of additions over the inputs, or the
ranks, in order. Other rows' adapters add zeros to a row's sums. So a row's bits do not depend on its tile.

In a slot (:class:`pillion.kernels.gpu.products.low_rank_product.LayerSlot`) the matrices of a layer are

    A [experts, slices, max_rank, inputs]      B [experts, outputs, max_rank]

Grids depend on the max tiles of the rows, like the product's, and slots never move: a CUDA graph serves any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.launch import check, check_tensor
from pillion.kernels.gpu.products.low_rank_product import LayerSlot, padded_rank
from pillion.kernels.gpu.tuned import tuned

# Above all slots.
_NO_SLOT = tl.constexpr(2**30)
# Ranks multiplied at a time. The same for any number of rows, because it determines the tensor-core instruction.
BLOCK_RANKS = 32


@dataclass(frozen=True, slots=True)
class PairAdapters:
    """The adapters of a product of rows with their experts' matrices.

    Attributes:
        slots: [S, values] of the rows' type, one adapter per slot.
        layer: offsets of the layer's matrices in a slot.
        row_slots: int32 [T], the slot of each row's adapter, -1 without one.
        per_token: pairs per row; pair p belongs to row ``p // per_token``.
        shrunk: scratch [at least P, slices * rank] of the rows' type.
    """

    slots: torch.Tensor
    layer: LayerSlot
    row_slots: torch.Tensor
    per_token: int
    shrunk: torch.Tensor

    def check(self, experts: int, inputs: int, outputs: int, like: torch.Tensor) -> None:
        """Raise Internal unless these are adapters of a product of this shape, with the type and device of ``like``."""
        layer, ranks = self.layer, len(self.layer.ends) * self.layer.rank
        shape = layer.experts, layer.inputs, layer.outputs
        check(shape == (experts, inputs, outputs), "{} is another layer's", layer)
        check(len(layer.ends) <= 2 and layer.ends[-1] == outputs, "slices end at {}", layer.ends)
        check(padded_rank(layer.rank) == layer.rank, "the kernels need ranks of 16, 32, 64 ..., not {}", layer.rank)
        check_tensor("slots", self.slots, (None, None), like.dtype, like.device)
        check_tensor("row_slots", self.row_slots, (None,), torch.int32, like.device)
        check_tensor("shrunk", self.shrunk, (None, ranks), like.dtype, like.device)

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """Tensor arguments of the product: slots of the rows, shrunk rows, and the layer's B in the first slot."""
        return self.row_slots, self.shrunk, self.slots[0, self.layer.b_at :]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Integer arguments of the product: pairs per row, first output of the second slice, values per slot."""
        return self.per_token, self.layer.ends[0], self.slots.shape[1]


@triton.jit
def slots_of(row_slots, pair, inside, per_token):
    """Return the adapter slot of each pair of a tile, -1 without one, and the lowest and highest slot. The lowest is
    above the highest if no pair has a slot."""
    slot = tl.load(row_slots + pair // per_token, mask=inside, other=-1)
    return slot, tl.min(tl.where(slot < 0, _NO_SLOT, slot), 0), tl.max(slot, 0)


# fmt: off
@triton.jit(do_not_specialize=["choices", "per_token"])
def _shrink_pairs(
    rows, order, tiles, count, row_slots, a, shrunk, choices, per_token, inputs, slot_values,
    GATHERED: tl.constexpr, RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Compute a block of ranks of the shrunk rows of one tile."""
    tile = tl.program_id(0)
    wait_for_earlier(DEPENDENT)
    if tile < tl.load(count):
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        begin = tl.load(tiles + tile * 3 + 1)
        pairs = tl.load(tiles + tile * 3 + 2)
        index = tl.arange(0, BLOCK_T)
        place = begin + tl.minimum(index, pairs - 1)
        pair = tl.load(order + place)
        slot, lowest, highest = slots_of(row_slots, pair, index < pairs, per_token)
        token = pair // choices if GATHERED else place
        rank = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
        columns = tl.arange(0, BLOCK_INPUTS)
        left = a + (expert * RANKS + rank[:, None]) * inputs + columns[None, :]
        right = rows + token.to(tl.int64)[None, :] * inputs + columns[:, None]
        sums = tl.zeros((BLOCK_RANKS, BLOCK_T), tl.float32)
        for adapter in range(lowest, highest + 1):
            row_mask = slot == adapter
            if tl.max(row_mask.to(tl.int32), 0) > 0:
                matrix = left + adapter * slot_values.to(tl.int64)
                for k in range(0, inputs, BLOCK_INPUTS):
                    k_mask = k + columns < inputs
                    weights = tl.load(matrix + k, mask=k_mask[None, :], other=0.0)
                    values = tl.load(right + k, mask=k_mask[:, None] & row_mask[None, :], other=0.0)
                    sums = dot(weights, values, sums)
        target = shrunk + place.to(tl.int64)[None, :] * RANKS + rank[:, None]
        tl.store(target, sums.to(shrunk.dtype.element_ty), mask=(slot >= 0)[None, :])


# fmt: off
@triton.jit
def expanded(
    total, shrunk, b, slot, lowest, highest, expert, place, output, outputs, first_end, slot_values,
    RANK: tl.constexpr, SLICES: tl.constexpr, BLOCK_RANKS: tl.constexpr,
):
    # fmt: on
    """Return ``total`` float32 [outputs, places] plus the products of the places' shrunk rows with B. Outputs before
    ``first_end`` use the ranks of the first slice, later ones those of the second."""
    ranks = tl.arange(0, BLOCK_RANKS)
    left = b + (expert * outputs + output[:, None]) * RANK + ranks[None, :]
    right = shrunk + place.to(tl.int64)[None, :] * (SLICES * RANK) + ranks[:, None]
    second = (output >= first_end).to(tl.int32)
    for adapter in tl.range(lowest, highest + 1, num_stages=1):
        row_mask = slot == adapter
        if tl.max(row_mask.to(tl.int32), 0) > 0:
            matrix = left + adapter * slot_values.to(tl.int64)
            for slice_index in tl.static_range(SLICES):
                for begin in tl.range(0, RANK, BLOCK_RANKS, num_stages=1):
                    values = tl.load(right + slice_index * RANK + begin, mask=row_mask[None, :], other=0.0)
                    if SLICES > 1:
                        weights = tl.load(matrix + begin, mask=(second == slice_index)[:, None], other=0.0)
                    else:
                        weights = tl.load(matrix + begin)
                    total = dot(weights, values, total)
    return total


def shrink_pairs(
    rows: torch.Tensor,
    order: torch.Tensor | None,
    choices: int,
    tiles: torch.Tensor,
    count: torch.Tensor,
    adapters: PairAdapters,
    gathered: bool,
    tile_rows: int,
    arch: int,
) -> None:
    """Write the products of rows [R, K] with their adapters' A into ``adapters.shrunk``, in the order of places. The
    arguments are those of :class:`pillion.kernels.gpu.experts.grouped_product.GroupedGemm`, which has checked them."""
    layer = adapters.layer
    assert order is not None, "adapters need the order of the pairs"
    check(len(adapters.shrunk) >= len(order), "{} shrunk rows for {} pairs", len(adapters.shrunk), len(order))
    constants = shrink_constants(layer, tile_rows, rows.element_size(), arch)
    blocks = constants["RANKS"] // constants["BLOCK_RANKS"]
    # A separate pointer, because its offset may exceed 32 bits, for which Triton would compile another kernel.
    a = adapters.slots[0, layer.a_at :]
    _shrink_pairs[(len(tiles), blocks)](
        rows, order, tiles, count, adapters.row_slots, a, adapters.shrunk, choices, adapters.per_token, layer.inputs,
        adapters.slots.shape[1], GATHERED=gathered, **constants,
    )  # fmt: skip


def shrink_constants(layer: LayerSlot, tile_rows: int, item_bytes: int, arch: int) -> dict[str, Any]:
    """Return the constexprs and launch options of :func:`_shrink_pairs`, except GATHERED."""
    use = tuned("shrink_pairs", arch, rows=tile_rows, bytes=item_bytes)
    ranks = len(layer.ends) * layer.rank
    return {
        "RANKS": ranks,
        "BLOCK_RANKS": min(BLOCK_RANKS, ranks),
        "BLOCK_T": tile_rows,
        "BLOCK_INPUTS": use["inputs"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
        **dependent(arch),
    }


def expand_constants(layer: LayerSlot | None) -> dict[str, Any]:
    """Return the constexprs of adapters in a grouped product; zeros, for no adapters, if ``layer`` is None."""
    if layer is None:
        return {"RANK": 0, "SLICES": 0, "BLOCK_RANKS": 0}
    return {"RANK": layer.rank, "SLICES": len(layer.ends), "BLOCK_RANKS": min(BLOCK_RANKS, layer.rank)}
