"""Conversion of float8 (e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities, largest 448) in a kernel's
arithmetic.

An sm_80 has no instruction for the format, and Triton's interpreter cannot round to it, so both directions work on
bits. The format is that of arXiv 2209.05433; results equal those of ``torch.float8_e4m3fn`` bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.launch import interpreting
from pillion.kernels.kv_codes import MAX_CODES, MIN_SCALE

# First architecture that converts e4m3 by an instruction.
NATIVE_FP8_ARCH = 89
# Largest value of the format, to which the largest value of a row is scaled.
MAX = tl.constexpr(MAX_CODES["fp8_e4m3"])
LEAST_SCALE = tl.constexpr(MIN_SCALE)
# Added to a value below 2**-6, it leaves multiples of 2**-9 in the low bits of the mantissa: e4m3's subnormals.
_SUBNORMAL_SHIFT = tl.constexpr(2.0**14)
# Triton's interpreter has no inline assembly.
_INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def decode_e4m3(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Decode uint8 ``codes`` to ``DTYPE`` exactly; unless NATIVE, the caller must multiply the result by 256.

    NATIVE uses Hopper's instruction, which Triton refuses for older devices. Otherwise the code's exponent and mantissa
    become those of a float16, whose bias differs by 8: the result is the value over 256, also for subnormals. Callers
    fold the factor into another one. The codes of NaN become +-480.
    """
    if NATIVE:
        eights = codes.to(tl.float8e4nv, bitcast=True)
        # Converted through float32: from float16 to bfloat16 the rate is a quarter, 16 per cycle.
        return eights.to(DTYPE) if tl.float16 == DTYPE else eights.to(tl.float32).to(DTYPE)
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def decode_pairs(words, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Decode uint16 ``words`` of two codes each like :func:`decode_e4m3`; return the values of the low bytes and those
    of the high bytes.

    In float16 two words, as they are in a register, become two registers of two values: by one permutation of bytes and
    two conversions, or without such conversions by 7 logical instructions.
    """
    if _INTERPRETED or tl.float16 != DTYPE:
        low = decode_e4m3((words & 0xFF).to(tl.uint8), DTYPE, NATIVE)
        high = decode_e4m3((words >> 8).to(tl.uint8), DTYPE, NATIVE)
    elif NATIVE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            .reg .b16 a, b;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            shl.b32 t, $2, 8;
            and.b32 s, t, 0x80008000;
            shr.b32 t, t, 1;
            and.b32 t, t, 0x3f803f80;
            or.b32 $0, s, t;
            and.b32 s, $2, 0x80008000;
            shr.b32 t, $2, 1;
            and.b32 t, t, 0x3f803f80;
            or.b32 $1, s, t;
            }""",
            "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def encode(values):
    """Encode float32 values, which must not be NaN, as uint8 codes.

    Values are rounded once, to nearest, ties to even, and clamped to +-448.
    """
    size = tl.minimum(tl.abs(values), MAX)
    bits = size.to(tl.int32, bitcast=True)
    # Round by dropping 20 bits of the mantissa; then change the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size + _SUBNORMAL_SHIFT).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 2.0**-6, subnormal, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def scale_of(largest):
    """Return the scale of a row whose largest magnitude is ``largest``; both are float32."""
    return tl.maximum(tl.math.div_rn(largest, MAX), LEAST_SCALE)
