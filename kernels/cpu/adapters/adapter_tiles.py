"""Packs an adapter's matrices into tiles. Imports neither torch nor the compiler, because a small process packs
adapters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.kernels.cpu.products.tiles import TILE_COLUMNS

# An adapter's ranks are padded to a multiple of this, which is a whole number of iterations of the loops.
RANK_MULTIPLE = 8


def pack_tiles(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Packs a matrix [outputs, inputs] of an adapter as [outputs / 16][steps][16][inputs of a step]; returns it flat.

    ``bits`` are those of its numbers: uint32 for float32, of which a step has one input, and uint16 for bfloat16, of
    which it has two. Outputs are a multiple of 16 and inputs one of 8.
    """
    # All inputs of a step are moved as one word.
    steps = bits.view(np.uint32).reshape(len(bits) // TILE_COLUMNS, TILE_COLUMNS, -1)
    return steps.swapaxes(1, 2).reshape(-1).view(bits.dtype)
