"""Packing of an adapter's matrices into tiles. Imports neither torch nor the compiler, because a small process packs
adapters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.kernels.cpu.products.tiles import TILE_COLUMNS

# Ranks of an adapter are padded to a multiple of this, so that kernels' loops run whole iterations.
RANK_MULTIPLE = 8


def pack_tiles(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pack a matrix [outputs, inputs] of an adapter as [outputs / 16][steps][16][inputs of a step]; return it flat.

    ``bits``: the matrix as uint32 if it is float32 (one input per step), as uint16 if it is bfloat16 (two per step).
    Outputs are a multiple of 16, inputs a multiple of 8.
    """
    steps = bits.view(np.uint32).reshape(len(bits) // TILE_COLUMNS, TILE_COLUMNS, -1)
    return steps.swapaxes(1, 2).reshape(-1).view(bits.dtype)
