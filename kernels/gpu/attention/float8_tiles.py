"""Decodes over keys and values in float8: folds of tiles into few rows, at few instructions per code.

A decode is memory-bound in bfloat16, and instruction-bound in float8 if codes are loaded byte by byte and widened
through float32. So products are float16 here: every code is a float16, by one conversion for two codes. A value's codes
are loaded as words of two, which go to the tensor cores' registers like 16-bit numbers. The rows of V are then two
tiles, of the even columns and of the odd ones, and so are the results until the last key.

Queries in bfloat16 are divided by a power of two per row, so that they are exact in float16 down to 2**-25 of the row's
largest. Weights times the scales of values are divided by the tile's largest scale, and stay below _LIFT; the product
undoes that. A weight loses at most 2**-11 of itself or 2**-38 of the largest possible, less than in bfloat16 (2**-9).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.attention.attention_rows import _load, _weighed
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.fp8 import decode_e4m3, decode_pairs

# Attention weights are scaled up to at most this in float16, which keeps small ones out of its subnormals.
_LIFT = tl.constexpr(2.0**14)
# A float32's exponent bits, those of 2**-100, and the sum of those of a power of two and its inverse.
_EXPONENT, _LEAST, _INVERSE = map(tl.constexpr, (0x7F800000, 27 << 23, 254 << 23))


@triton.jit
def _halved(query):
    """Return bfloat16 queries in float16, divided by a power of two per row that makes the row's largest value 1 to 2,
    and these powers."""
    query = query.to(tl.float32)
    bits = tl.max(tl.abs(query), 1).to(tl.int32, bitcast=True) & _EXPONENT
    bits = tl.maximum(bits, _LEAST)
    # A constant less a tensor would be a constant in Triton's interpreter, so the constant is added.
    inverse = (-bits + _INVERSE).to(tl.float32, bitcast=True)
    return (query * inverse[:, None]).to(tl.float16), bits.to(tl.float32, bitcast=True)


# fmt: off
@triton.jit
def _float8_tiles(
    top, total, query, positions, pool, scales, table, begin, end, slot_stride, piece_offset, scale_slot_stride,
    scale_offset, score_scale, softcap,
    POOL_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, NATIVE_FP8: tl.constexpr,
):
    # fmt: on
    """Fold keys ``begin`` .. ``end`` - 1 into rows that have seen none; return their results, maxima and totals."""
    columns, pairs = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    piece: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4)
    folded: tl.constexpr = 1.0 if NATIVE_FP8 else 256.0
    divided: tl.constexpr = query.dtype == tl.bfloat16
    if divided:
        query, divisors = _halved(query)
    none = tl.zeros((query.shape[0], BLOCK_N), tl.float32)
    nothing = tl.zeros((query.shape[0], BLOCK_D // 2), tl.float32)
    even, odd = nothing, nothing
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        # A key after the last one is replaced by that one.
        read = tl.minimum(tokens, end - 1)
        slots = tl.load(table + read // BLOCK_SIZE).to(tl.int64)
        inside = read % BLOCK_SIZE
        rows = slots * slot_stride + piece_offset + inside * HEAD_DIM
        factors = scales + (slots * scale_slot_stride + scale_offset + inside)
        cells = pool + (rows[:, None] + columns[None, :])
        codes = _load(cells, columns[None, :], HEAD_DIM, BLOCK_D)
        scores = dot(query, tl.trans(decode_e4m3(codes, query.dtype, NATIVE_FP8)), none)
        scores *= (tl.load(factors) * folded)[None, :]
        if divided:
            scores *= divisors[:, None]
        weights, top, total, shrink = _weighed(
            scores, top, total, positions, tokens, score_scale, softcap, WINDOW, SOFTCAP, True
        )
        grown = tl.load(factors + POOL_HEADS * piece // 4)
        largest = tl.max(grown, 0)
        weights = (weights * (grown * (_LIFT / largest))[None, :]).to(query.dtype)
        words = (pool + (rows + POOL_HEADS * piece)).to(tl.pointer_type(tl.uint16))
        cells = words[:, None] + pairs[None, :]
        codes = _load(cells, pairs[None, :], HEAD_DIM // 2, BLOCK_D // 2)
        low, high = decode_pairs(codes, query.dtype, NATIVE_FP8)
        back = largest * (folded / _LIFT)
        even = even * shrink[:, None] + dot(weights, low, nothing) * back
        odd = odd * shrink[:, None] + dot(weights, high, nothing) * back
    return tl.interleave(even, odd), top, total
