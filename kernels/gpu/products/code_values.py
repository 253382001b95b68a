"""Dequantization of codes to weights, in the registers of a product of tiles.

There are two ways, chosen by the matrix and the rows' type, never by the number of rows:

*Exact* weights, for rows of bfloat16: integers, less their zero, and floats of 4 or 8 bits, times a scale of a byte,
have at most 8 significant bits, so they are bfloat16 without rounding. Scales and factors of float32 multiply sums of a
group's products, or of all products. Integers times scales of bfloat16 or float16 are made the same way, and rounded
once. Signed numbers, for other scales and offsets, are off by little more (gpu_packing._pack_signed).

*Rounded* weights, for everything else: value * scale + offset in float32, rounded once to the rows' type. NF4's are
rounded before they are looked up, for the codes of a group have 16 weights in total.

Exact weights of two columns are made at once, in the halves of a register, by instructions that Triton has no
operations for: so they are PTX, one piece for each place of a word (gpu_packing.py). A word's half has several places;
the halves of two words are first brought together, which the assembler does once for all places of it.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from pillion.kernels.gpu.fp8 import decode_e4m3
from pillion.kernels.gpu.launch import interpreting
from pillion.kernels.gpu.products.gpu_packing import FREE_BITS, MIN_GROUP, ZERO_BASE
from pillion.kernels.torch.quantized_matrix import CODINGS

_INTERPRETED = tl.constexpr(interpreting())
_MIN_GROUP, _ZERO_BASE = tl.constexpr(MIN_GROUP), tl.constexpr(ZERO_BASE)
# Bits of signed numbers mean the number times 2**-130 and 2**-133, and their scales are larger by that. A float32 can
# represent these powers only in two steps.
_SIGNED_SCALE_STEP, _SIGNED4_STEP, _SIGNED8_STEP = (tl.constexpr(2.0**power) for power in (-100, -30, -33))
# Bits of a half word with the smaller part of a float16 scale, and those of its zero.
_PART_BITS, _ZERO_BITS = tl.constexpr(0xFFFF - FREE_BITS), tl.constexpr(0xF)
# _MAGIC is the bits of 2**23, whose last digit is 1: a number below 2**23 in its low bits is added to it. They are
# among those of _ABOVE, which are above all codes of half a word.
_ABOVE = tl.constexpr(0x7FFF0000)
_MAGIC, _MAGIC_VALUE = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)
# Bits of floats of 4 and 8 bits, placed as a bfloat16's, mean the value times 2**-126 and 2**-120. Bits of scales of a
# byte mean the scale times 2**126: so their product with the former is the weight.
_SCALE_STEP = tl.constexpr(2.0**-126)
# The lookup tables of lop3 for (a & b) | c, (a & b) ^ c, and b where a is set, else c.
_AND_OR, _AND_XOR, _CHOICE = 0xEA, 0x6A, 0xCA
# NF4's values in PTX.
_NF4 = [f"0f{struct.pack('>f', value).hex().upper()}" for value in CODINGS["nf4"].tolist()]


@triton.constexpr_function
def _halves_of(first, second, upper, target):
    """Return the PTX that joins the lower or the upper halves of two registers. For one register it is no instruction,
    because bfloat16 instructions can use a half of a register for both of theirs."""
    return [
        f"mov.b32 {{l, h}}, {first};",
        f"mov.b32 {{n, m}}, {second};",
        f"mov.b32 {target}, {'{h, m}' if upper else '{l, n}'};",
    ]


@triton.constexpr_function
def _assembly(coding, place, shift, scale, byte, half=0):
    """Return the PTX that makes two bfloat16 from the codes at one place of two words, $1 and $2. With float32 scales
    $3 is added to codes, if there are zeros. $3 and $4 contain other scales of the two: those of a byte or two in byte
    or half ``byte``. $5 and $6 contain offsets in half ``half``."""
    if scale == "two_halves":
        return _signed_assembly(coding, place, shift == "offsets", half)
    zeros = shift == "zeros"
    bits = 8 if coding in ("int8", "fp8_e4m3") else 4
    half, inner = divmod(place, 16 // bits)
    lines = [f"prmt.b32 w, $1, $2, {0x7632 if half else 0x5410};"]
    # Left shifts (negative: right shifts) that bring the bits of floats to their places, and masks of these, for both
    # halves of a register, inverse to gpu_packing._pack_half_word.
    parts = {
        "fp4_e2m1": (
            ((0, 0x81C0),),
            ((3, 0x81C0),),
            ((6, 0x81C0),),
            ((4, 0x8000), (-6, 0x0180), (-4, 0x0040)),
        ),
        "fp8_e4m3": (((0, 0x87F0),), ((4, 0x80F0), (-4, 0x0700))),
    }
    if coding in parts:
        lines.append("mov.b32 v, 0;")
        for shift, mask in parts[coding][inner]:
            if shift:
                lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 t, w, {abs(shift)};")
            lines.append(f"lop3.b32 v, {'t' if shift else 'w'}, {mask * 0x10001}, v, {_AND_OR};")
        # The product with a scale, or with 2**120; adding -0 changes no number.
        if coding == "fp4_e2m1":
            # Both halves of a word get the scale of one of their bytes each; the wanted half is doubled. Of the four
            # scales of a word, two are brought to their places at once, which the assembler does once.
            top, mask, above = (7, 0x7F80, 0) if scale == "e8m0" else (4, 0xFF0, 0x7000)
            move = f"shr.b32 t, $9, {8 - top};" if byte % 2 else f"shl.b32 t, $9, {top};"
            for operand, target in (("$3", "c"), ("$4", "f")):
                lines.append(move.replace("$9", operand))
                lines.append(f"lop3.b32 {target}, t, {mask * 0x10001}, {above * 0x10001}, {_AND_OR};")
            lines += _halves_of("c", "f", byte > 1, "f")
        else:
            lines.append(f"mov.b32 f, {0x7B807B80};")
        lines += [f"mov.b32 c, {0x80008000};", "fma.rn.bf16x2 $0, v, f, c;"]
    else:
        if inner:
            lines.append(f"shr.b32 w, w, {bits * inner};")
        # 128 + the low bits of the code, of which a bfloat16 has 7 beside its leading one.
        lines.append(f"lop3.b32 v, w, {0x7F007F if bits == 8 else 0xF000F}, {0x43004300}, {_AND_OR};")
        if bits == 8:
            # -128 if the code's highest bit is set, for which 128 more are added, else -256.
            lines.append(f"lop3.b32 c, w, {0x800080}, {0xC380C380}, {_AND_XOR};")
        else:
            lines.append(f"mov.b32 c, {0xC308C308 if coding == 'int4' else 0xC300C300};")
        lines.append(f"mov.b32 f, {0x3F803F80};")
        if scale == "float32":
            lines.append(f"fma.rn.bf16x2 $0, v, f, {'$3' if zeros else 'c'};")
        else:
            lines += _scaled(zeros, scale, byte)
    return "{ .reg .b32 w, t, v, f, c, a, b; .reg .b16 l, h, n, m; " + " ".join(lines) + " }"


@triton.constexpr_function
def _scaled(zeros, scale, byte):
    """Return the end of the PTX of integers with scales in halves of $3 and $4 (gpu_packing._half_word_scales): v is
    the number to which c is added, or a zero, and then $0 is the product with the scale. f contains ones."""
    lines, parts = [], ("$3", "$4")
    if zeros:
        if scale == "float16":
            lines += [f"lop3.b32 {to}, {of}, {0xF}, {0xC300}, {_AND_OR};" for to, of in (("a", "$3"), ("b", "$4"))]
        lines += _halves_of(*(("a", "b") if scale == "float16" else parts), False, "c")
    lines += ["fma.rn.bf16x2 v, v, f, c;", *_halves_of(*parts, scale == "float16" or zeros or byte, "t")]
    lines.append(f"mov.b32 c, {0x80008000};")
    if scale == "float16":
        # A float16 scale is the sum t + f of two bfloat16 numbers: v * f is exact, so only the final sum is rounded.
        if zeros:
            lines += [f"and.b32 {to}, {of}, {0xFFE0};" for to, of in (("a", "$3"), ("b", "$4"))]
        lines += [*_halves_of(*(("a", "b") if zeros else parts), False, "f"), "fma.rn.bf16x2 c, v, f, c;"]
    return [*lines, "fma.rn.bf16x2 $0, v, t, c;"]


@triton.constexpr_function
def _signed_assembly(coding, place, offsets, upper):
    """Return the PTX of :func:`_assembly` for signed numbers, whose bits are a bfloat16's in place, or a shift or a
    byte swap away (gpu_packing._pack_half_word). Offsets are in the upper or the lower halves of $5 and $6."""
    if coding == "signed8":
        # Each code is twice in its half, above for its sign and below for its magnitude.
        lines = [f"prmt.b32 v, $1, $2, {0x4400 + 0x1111 * place};", f"and.b32 v, v, {0x807F807F};"]
    else:
        upper_codes, exchanged, shifted = place // 4, place % 4 // 2, place % 2
        lines = [f"prmt.b32 v, $1, $2, {(0x4501 if exchanged else 0x5410) + 0x2222 * upper_codes};"]
        if shifted:
            lines.append("shl.b32 v, v, 4;")
        lines.append(f"lop3.b32 v, v, {0x80708070}, {0x00080008}, {_AND_OR};")
    lines += _halves_of("$5", "$6", upper, "c") if offsets else [f"mov.b32 c, {0x80008000};"]
    lines += [*_halves_of("$3", "$4", False, "f"), "fma.rn.bf16x2 c, v, f, c;"]
    lines += [*_halves_of("$3", "$4", True, "t"), "fma.rn.bf16x2 $0, v, t, c;"]
    return "{ .reg .b32 t, v, f, c; .reg .b16 l, h, n, m; " + " ".join(lines) + " }"


@triton.constexpr_function
def _nf4_table(half):
    """Return the PTX that makes NF4's 16 weights with the scale $8, rounded to a 16-bit type (``half``: PTX's name of
    two of them): their lower bytes in $0 to $3, and their upper ones in $4 to $7."""
    lines = []
    for at in range(4):
        for lane, value in zip("abcd", _NF4[4 * at : 4 * at + 4], strict=True):
            # 1 and -1 need no product; that with 0 keeps its sign.
            plain = {"0f3F800000": f"mov.f32 {lane}, $8;", "0fBF800000": f"neg.f32 {lane}, $8;"}
            lines.append(plain.get(value, f"mul.rn.f32 {lane}, $8, {value};"))
        lines += [f"cvt.rn.{half}.f32 l, b, a;", f"cvt.rn.{half}.f32 h, d, c;"]
        lines += [f"prmt.b32 ${at}, l, h, {0x6420};", f"prmt.b32 ${at + 4}, l, h, {0x7531};"]
    return "{ .reg .f32 a, b, c, d; .reg .b32 l, h; " + " ".join(lines) + " }"


@triton.constexpr_function
def _nf4_lookup(place):
    """Return the PTX that looks up the weights of the codes at a place of two words, $1 and $2. Every other operand
    from $3 to $17 is a word of :func:`_nf4_table`.

    Bytes of a register are looked up by the lower three bits of four codes, among the first and among the last eight
    weights, and the fourth bits choose. So two places are made at once, which the assembler does once for both.
    """
    half, inner = divmod(place, 4)
    lines = [
        # The bytes of both words alternate: a byte has two codes of one word.
        f"prmt.b32 w, $1, $2, {0x7362 if half else 0x5140};",
        # Bytes of ones where codes have their fourth bit, which is a byte's highest in w or in t.
        "shl.b32 t, w, 4;",
        f"prmt.b32 u, w, t, {0xBFAE if inner > 1 else 0x9D8C};",
        f"and.b32 s, w, {0x77777777};",
    ]
    if inner > 1:
        lines.append("shr.b32 s, s, 16;")
    for target, first in (("a", 3), ("b", 11)):
        lines += [f"prmt.b32 t, ${first}, ${first + 2}, s;", f"prmt.b32 v, ${first + 4}, ${first + 6}, s;"]
        lines.append(f"lop3.b32 {target}, u, v, t, {_CHOICE};")
    lines.append(f"prmt.b32 $0, a, b, {0x7351 if inner % 2 else 0x6240};")
    return "{ .reg .b32 w, s, t, u, v, a, b; " + " ".join(lines) + " }"


@triton.jit
def nf4_table(scale, BFLOAT16: tl.constexpr):
    """Return words with NF4's 16 weights for each scale, rounded to bfloat16, or else to float16."""
    ASSEMBLY: tl.constexpr = _nf4_table("bf16x2" if BFLOAT16 else "f16x2")
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r,=r,=r,=r,=r,f", [scale],
        (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
    )  # fmt: skip


@triton.jit
def nf4_weights(words, table, PLACE: tl.constexpr, BFLOAT16: tl.constexpr):
    """Return the weights of the codes at one place of each word, from their groups' words of :func:`nf4_table`."""
    ASSEMBLY: tl.constexpr = _nf4_lookup(PLACE)
    CONSTRAINTS: tl.constexpr = "=r" + ",r" * 18
    operands = (words, table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7])
    if BFLOAT16:
        weights = tl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, operands, tl.bfloat16, True, 2)
    else:
        weights = tl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, operands, tl.float16, True, 2)
    return weights


@triton.jit
def exact(
    words, beside, scales, PLACE: tl.constexpr, CODING: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr,
    SCALE: tl.constexpr, BYTE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return the weights of the codes at one place of each word, bfloat16, without float32 scales.

    beside: for zeros, the bfloat16 added to ZERO_BASE + code, unless scales contain them; for offsets, words with them
        in the half HALF; else unused.
    scales: the words of scales, those of a byte or two at BYTE. With GROUPS the scales of the sums, which the weights
        do not need: Triton prefetches, iterations ahead, only values from which the operands of a product of tiles are
        made.
    """
    if _INTERPRETED:
        return _interpreted(words, beside, scales, PLACE, CODING, SHIFT, SCALE, BYTE, HALF)
    ASSEMBLY: tl.constexpr = _assembly(CODING, PLACE, SHIFT, SCALE, BYTE, HALF)
    if SHIFT == "offsets":
        weights = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r,r,r,r", [words, scales, beside], tl.bfloat16, True, 2)
    elif SCALE != "float32":
        weights = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r,r", [words, scales], tl.bfloat16, True, 2)
    elif SHIFT == "zeros" and GROUPS:
        weights = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r,f,f", [words, beside, scales], tl.bfloat16, True, 2)
    elif SHIFT == "zeros":
        weights = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [words, beside], tl.bfloat16, True, 2)
    elif GROUPS:
        weights = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,f,f", [words, scales], tl.bfloat16, True, 2)
    else:
        weights = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [words], tl.bfloat16, True, 2)
    return weights


@triton.jit
def _interpreted(
    words, beside, scales, PLACE: tl.constexpr, CODING: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
    BYTE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return the result of :func:`exact` without PTX."""
    BIAS: tl.constexpr = 8.0 if CODING == "int4" else 128.0 if CODING == "int8" else 0.0
    values = code_values(words, words, PLACE, CODING, BIAS, False, True) * code_step(PLACE, CODING, False)
    if SHIFT == "zeros":
        values += (beside.to(tl.float32) if SCALE == "float32" else small_zero(scales, SCALE)) + _ZERO_BASE
    if SCALE != "float32":
        values *= small_scale(scales, BYTE, SCALE)
    if SHIFT == "offsets":
        values += small_scale(beside, HALF, "bfloat16")
    return values.to(tl.bfloat16)


@triton.jit
def _signed_values(words, PLACE: tl.constexpr, CODING: tl.constexpr):
    """Return the signed numbers at one place of each word, float32, the inverse of gpu_packing._pack_half_word."""
    if CODING == "signed8":
        bits = words >> (8 * PLACE)
        sign, size = bits & 0x80, bits & 0x7F
    else:
        # The sign and the bits below it are in separate nibbles.
        half = words >> (16 * (PLACE // 4))
        SIGN: tl.constexpr = 15 - 4 * (PLACE % 2) - 8 * (PLACE % 4 // 2)
        SIZE: tl.constexpr = 4 - 4 * (PLACE % 2) + 8 * (PLACE % 4 // 2)
        sign, size = half & (1 << SIGN), 2 * ((half >> SIZE) & 7) + 1
    return tl.where(sign != 0, -size, size).to(tl.float32)


@triton.jit
def _float_code(words, PLACE: tl.constexpr, CODING: tl.constexpr):
    """Return the code of a float at one place of each word as int32, the inverse of gpu_packing._pack_half_word."""
    if CODING == "fp8_e4m3":
        half = words >> (16 * (PLACE // 2))
        if PLACE % 2 == 0:
            return ((half >> 8) & 0x80) | ((half >> 4) & 0x7F)
        return ((half >> 4) & 0x80) | ((half >> 8) & 0x70) | (half & 0xF)
    half = words >> (16 * (PLACE // 4))
    if PLACE % 4 == 0:
        return ((half >> 12) & 0x8) | ((half >> 6) & 0x7)
    if PLACE % 4 == 1:
        return ((half >> 9) & 0x8) | ((half >> 3) & 0x7)
    if PLACE % 4 == 2:
        return ((half >> 6) & 0x8) | (half & 0x7)
    return ((half >> 8) & 0x8) | ((half >> 12) & 0x6) | ((half >> 10) & 0x1)


@triton.jit
def code_values(
    words, table, PLACE: tl.constexpr, CODING: tl.constexpr, BIAS: tl.constexpr, NATIVE_FP8: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return the float32 values of the codes at one place of each word, too small by :func:`code_step`. ``table`` has
    the values of NF4."""
    if CODING == "fp8_e4m3":
        return decode_e4m3(_float_code(words, PLACE, CODING).to(tl.uint8), tl.float32, NATIVE_FP8)
    if CODING == "nf4":
        return tl.load(table + ((words >> (4 * PLACE)) & 0xF))
    if CODING == "signed4" or CODING == "signed8":
        return _signed_values(words, PLACE, CODING)
    if CODING == "fp4_e2m1":
        # Exponent and mantissa become those of a float16, whose bias differs by 14, also for subnormals: fewer
        # instructions than a lookup.
        code = _float_code(words, PLACE, CODING)
        bits = ((code & 0x8) << 12) | ((code & 0x7) << 9)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    # A code stays at its place in its half of the word, as a multiple of a power of 2: one instruction masks its
    # neighbours and leaves the bits of a float, common to all codes of the half. An integer conversion would take
    # longer than that sum, which is exact.
    if CODING == "int8":
        half, shift, mask = words >> (16 * (PLACE // 2)), 8 * (PLACE % 2), 0xFF
    else:
        half, shift, mask = words >> (16 * (PLACE // 4)), 4 * (PLACE % 4), 0xF
    # The exact products of float32 leave no registers for the halves.
    bits = half & (mask << shift) | _MAGIC if FLOAT32 else (half | _ABOVE) & (_MAGIC | (mask << shift))
    return bits.to(tl.float32, bitcast=True) - (_MAGIC_VALUE + BIAS * (1 << shift))


@triton.jit
def code_step(PLACE: tl.constexpr, CODING: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return the factor by which the results of :func:`code_values` are too small, a power of 2, so that scales are
    multiplied by it exactly."""
    if CODING == "fp8_e4m3":
        return 1.0 if NATIVE_FP8 else 256.0
    if CODING == "nf4":
        return 1.0
    if CODING == "signed4":
        return _SIGNED4_STEP
    if CODING == "signed8":
        return _SIGNED8_STEP
    if CODING == "fp4_e2m1":
        return 16384.0
    return 1.0 / (1 << (8 * (PLACE % 2) if CODING == "int8" else 4 * (PLACE % 4)))


@triton.jit
def group_factors(values, first, output, padded, columns, GROUP: tl.constexpr):
    """Load scales or offsets of a tile of codes [outputs, COLUMNS] whose first input is ``first``."""
    if GROUP == 0:
        found = tl.load(values + output)[:, None]
    else:
        group = values + first // GROUP * padded + output
        found = tl.load(group)[:, None]
        if GROUP == _MIN_GROUP:
            found = tl.where(columns[None, :] < GROUP, found, tl.load(group + padded)[:, None])
    return found


@triton.jit
def small_scale(words, BYTE: tl.constexpr, SCALE: tl.constexpr):
    """Return one of the four scales in each word, or of the two of 16 bits, or the one of two halves, float32."""
    if SCALE == "float16":
        upper = ((words >> 16) << 16).to(tl.float32, bitcast=True)
        return upper + ((words & _PART_BITS) << 16).to(tl.float32, bitcast=True)
    if SCALE == "two_halves":
        upper = ((words >> 16) << 16).to(tl.float32, bitcast=True)
        return (upper + (words << 16).to(tl.float32, bitcast=True)) * _SIGNED_SCALE_STEP
    if SCALE == "bfloat16":
        return ((words >> (16 * BYTE)) << 16).to(tl.float32, bitcast=True)
    bits = (words >> (8 * BYTE)) & 0xFF
    # The bits of a bfloat16, as in _assembly, which are the upper half of a float32's.
    bits = bits << 7 if SCALE == "e8m0" else (bits << 4) | 0x7000
    return (bits << 16).to(tl.float32, bitcast=True) * _SCALE_STEP


@triton.jit
def small_zero(words, SCALE: tl.constexpr):
    """Return the number added to ZERO_BASE + code, if the words of scales contain it, float32."""
    if SCALE == "float16":
        return -(words & _ZERO_BITS).to(tl.float32) - _ZERO_BASE
    return (words << 16).to(tl.float32, bitcast=True)
