"""Reading 8-bit floats (e4m3, "OCP 8-bit Floating Point Specification", OFP8) by arithmetic that every device has.

Hopper converts two of them by one instruction; an Ampere knows no such type, and Triton refuses it there.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
