"""Reading 8-bit floats (e4m3, "OCP 8-bit Floating Point Specification", OFP8) by arithmetic that every device has.

Hopper converts two of them by one instruction; an Ampere knows no such type, and Triton refuses it there.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a decoded value is to be multiplied by, unless it was decoded to bfloat16.
DECODED_SCALE = 256.0


@triton.jit
def decode_e4m3(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Values of uint8 ``codes`` in ``DTYPE``, exact; ``decoded_scale(DTYPE)`` is still to be multiplied with them.

    An e4m3's exponent and mantissa, shifted below the sign of a 16-bit float, are the same value but for the ratio of
    the two exponents' biases, subnormals too: 2**8 for float16, which the caller folds into a factor that it has
    anyhow, and 2**120 for bfloat16, which is multiplied here because such sums would leave float32.
    """
    if DTYPE == tl.bfloat16:
        if NATIVE:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
        return bits.to(tl.bfloat16, bitcast=True) * tl.full((), 2.0**120, tl.bfloat16)
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(DTYPE)
