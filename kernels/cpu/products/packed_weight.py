"""A packed weight matrix of any kind, plain or quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pillion.kernels.cpu.products.tiles import TILE_COLUMNS

# Types of plain weights, by kind.
PLAIN_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix.

    Attributes:
        kind: one of :data:`pillion.kernels.cpu.quantized.matrix_packing.KINDS`.
        data: a flat tensor of the kind's type; a multiple of 64 bytes.
        depth: inputs with padding; rows have zeros in the padding.
        pairs: number of panels, each of which is a pair of tiles.
        group: inputs that share a scale, a multiple of 16; 0 for kinds without groups.
        offsets: whether groups have offsets.
        order: int32 [depth], the matrix's input of each packed input; None if both are in the same order.
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


def interleave_tiles(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave the outputs of two matrices in tiles of 16, ``gate`` first."""
    tiles = [matrix.view(-1, TILE_COLUMNS, *matrix.shape[1:]) for matrix in (gate, up)]
    return torch.stack(tiles, 1).flatten(0, 2)
