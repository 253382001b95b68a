"""Describes a packed matrix, whatever the kind of its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pillion.kernels.cpu.products.tiles import TILE_COLUMNS

# Weights that are not quantized are packed in one of these types.
PLAIN_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Holds a packed matrix.

    Attributes:
        kind: one of :data:`pillion.kernels.cpu.products.packing.KINDS`.
        data: a flat tensor of the kind's type; a multiple of 64 bytes.
        depth: inputs with padding: a row that meets this matrix has zeros after its own values.
        pairs: number of panels, which are pairs of tiles.
        group: inputs of a group of codes, a multiple of 16; 0 for other kinds.
        offsets: whether groups have offsets.
        order: int32 [depth], for each packed input its number in the matrix; None where packed inputs are in the
            matrix's order.
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
        """Returns the number of bytes of ``data``."""
        return self.data.numel() * self.data.element_size()


def in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns 16 columns of ``gate``, then 16 of ``up``, and so on."""
    tiles = [matrix.view(-1, TILE_COLUMNS, *matrix.shape[1:]) for matrix in (gate, up)]
    return torch.stack(tiles, 1).flatten(0, 2)
