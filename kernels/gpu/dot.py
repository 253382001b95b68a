"""The product of two tiles, for every kernel that multiplies tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.launch import interpreting

# Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
_INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def dot(left, right, acc):
    """Return the matrix product plus ``acc``, exact for float32, which tensor cores would truncate to 19 bits."""
    if _INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee" if left.dtype == tl.float32 else "tf32")
