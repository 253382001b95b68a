"""GEMM of matrix tiles in numpy, bitwise equal to the pseudocode of Intel's manual."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = np.float32(2.0**-126)


def add_pairs(sums: NDArray[np.float32], rows: NDArray[np.uint16], columns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return ``sums`` [M, N] after TDPBF16PS with ``rows`` [M, K, 2] and ``columns`` [K, N, 2], bits of bfloat16."""
    ones, others = (_flushed((bits.astype(np.uint32) << 16).view(np.float32)) for bits in (rows, columns))
    chains = np.zeros((2, *sums.shape), np.float32)
    for step in range(rows.shape[1]):
        for place in range(2):
            chains[place] = _fused(ones[:, step, place, None], others[None, step, :, place], chains[place])
    return _flushed(_flushed(sums) + _flushed(chains[0] + chains[1]))


def add_codes(sums: NDArray[np.int32], rows: NDArray[np.int8], columns: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return ``sums`` [M, N] after TDPBSUD with ``rows`` [M, K, 4] and ``columns`` [K, N, 4]."""
    return (sums + np.einsum("mki,kni->mn", rows.astype(np.int64), columns.astype(np.int64))).astype(np.int32)


def _fused(one: Any, other: Any, total: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return one * other + total, rounded once. The product of two bfloat16 is exact in float64."""
    product, wide = one.astype(np.float64) * other.astype(np.float64), total.astype(np.float64)
    found = product + wide
    rest = found - product
    error = (product - (found - rest)) + (wide - rest)
    # Rounding to odd first makes the second rounding, to float32, equal to rounding the exact sum.
    bits = found.view(np.int64)
    away = np.where((error > 0) == (found > 0), 1, -1)
    odd = np.where((error != 0) & (bits % 2 == 0), bits + away, bits).view(np.float64)
    # Denormals are detected as if the exponent were unlimited: below the least normal by at least half a step.
    tiny = np.abs(odd) < 2.0**-126 - 2.0**-151
    return np.where(tiny, np.copysign(np.float32(0), odd), odd).astype(np.float32)


def _flushed(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(values) < _LEAST, np.copysign(np.float32(0), values), values)
