"""A packed matrix of any kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pillion.kernels.cpu.products.tiles import TILE_COLUMNS

PLAIN_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix.

    Attributes:
        kind: one of :data:`pillion.kernels.cpu.quantized.matrix_packing.KINDS`.
        data: a flat tensor of the kind's type; a multiple of 64 bytes.
        depth: inputs with padding; rows have zeros in the padding.
        pairs: number of panels, which are pairs of tiles.
        group: inputs of a group of codes, a multiple of 16; 0 for other kinds.
        offsets: whether groups have offsets.
        order: int32 [depth], for each packed input its index in the matrix; None if packed inputs are in the matrix's
            order.
    """

    kind: str
    data: torch.Tensor
    depth: int
    pairs: int
    group: int = 0
    offsets: bool = False
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave the columns of two matrices by tiles of 16, ``gate`` first."""
    tiles = [matrix.view(-1, TILE_COLUMNS, *matrix.shape[1:]) for matrix in (gate, up)]
    return torch.stack(tiles, 1).flatten(0, 2)
