"""Float8 (e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities, largest 448) in a kernel's own arithmetic.

An sm_80 has no instruction for it and Triton's interpreter no rounding, so both directions are done on the bits. The
format is that of arXiv 2209.05433; results are those of ``torch.float8_e4m3fn``, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The largest value. What is stored is scaled so that the largest of a row becomes this.
MAX = tl.constexpr(448.0)
# Scales are at least this, so that a row of zeros divides by something; its inverse is finite, too.
MIN_SCALE = tl.constexpr(2.0**-100)
# Added to a value below 2**-6, this leaves multiples of 2**-9 in the low bits of its mantissa: e4m3's subnormals.
_SUBNORMAL_SHIFT = tl.constexpr(2.0**14)


@triton.jit
def decode_e4m3(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Values of uint8 ``codes`` in ``DTYPE``, exact; unless NATIVE, they are still to be multiplied by 256.

    Exponent and mantissa of an e4m3, shifted to those of a float16, are the same number but for the ratio of their
    biases, 2**8, subnormals too. The caller folds it into a factor that it has anyhow.
    """
    if NATIVE:
        eights = codes.to(tl.float8e4nv, bitcast=True)
        # By way of float32: a processor converts float16 to bfloat16 at a quarter of the rate, 16 in a cycle.
        return eights.to(DTYPE) if tl.float16 == DTYPE else eights.to(tl.float32).to(DTYPE)
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def encode(values):
    """float32 values -> uint8 codes, rounded once, to nearest and ties to even; beyond +-448 they become +-448.

    Values must not be NaN.
    """
    size = tl.minimum(tl.abs(values), MAX)
    bits = size.to(tl.int32, bitcast=True)
    # 20 bits of the mantissa go; then the exponent's bias of 127 becomes one of 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size + _SUBNORMAL_SHIFT).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 2.0**-6, subnormal, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def scale_of(largest):
    """The scale of a row whose largest value by size is ``largest``: values over it fit e4m3. float32 both."""
    return tl.maximum(tl.math.div_rn(largest, MAX), MIN_SCALE)
