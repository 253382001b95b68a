"""Layout of a quantized matrix in GPU memory.

    words[unit, output, column] : int32, PER_WORD codes: code i is that of input unit * UNIT + i * COLUMNS + column
    scales, offsets[group, output] : float32
    or scales[unit, word, output] : int32, a byte for each group, and factors[output] : float32
    or scales[unit, word, output] : int32, two bytes for each group, or four

A *unit* is the inputs of COLUMNS words of a row: 256 in 4 bits, 128 in 8. So a kernel that loads a tile [outputs,
COLUMNS] of words, one contiguous piece of memory, gets PER_WORD tiles of codes by a shift and a mask each, and every
tile belongs to COLUMNS consecutive inputs. If inputs are no whole number of units, the last unit has fewer codes in a
column, and several columns share a word. Outputs are padded to multiples of OUTPUTS, and inputs as far as words need
it, with codes and scales of 0.

The bits of float codes are arranged in a word so that kernels extract a float by few instructions
(``_pack_half_word``). 8-bit scales stay in 8 bits: powers of two (MXFP4) and floats (NVFP4), each times its output's
factor. Scales of small groups of integers stay in 16 bits, if a checkpoint has them in bfloat16. If it has zeros or
float16 scales, a group has a word (``_half_word_scales``). For rows of bfloat16 other small groups of integers, and all
with arbitrary offsets, are signed numbers with a word for each scale and half a word for each offset
(``_pack_signed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch.nn.functional import pad

from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# Words of a row per unit; also the depth of the kernels' products of tiles.
COLUMNS = 32
# Outputs are padded to a multiple of this.
OUTPUTS = 64
# Bits of a code, by coding (pillion.kernels.torch.quantized_matrix.CODINGS). Signed numbers are sign and magnitude: 0
# .. 127 in 8 bits; in 4, twice the code's distance from mid-range, which is odd, 1 .. 15, and stored without its lowest
# bit.
BITS = {"uint4": 4, "int4": 4, "nf4": 4, "fp4_e2m1": 4, "int8": 8, "fp8_e4m3": 8, "signed4": 4, "signed8": 8}
# Groups of other sizes are divided into groups of this many inputs, with equal scales.
MIN_GROUP = 16
# Types of scales: float32; bytes b for a power of two, 2**(b - 253), or for a float with 3 bits of mantissa, (1 + b % 8
# / 8) * 2**(b // 8 - 29), at most 2**2, neither with a 0; bfloat16; float16, and those of signed numbers, with 16 bits
# in total, each stored as the sum of two bfloat16.
SCALES = ("float32", "e8m0", "e5m3", "bfloat16", "float16", "two_halves")
# An output's scales are multiplied by a power of two that keeps the largest of them below 2**127, because a signed
# number's bits are those of a bfloat16 without an exponent, i.e. the number times 2**-133 or 2**-130.
_MAX_POWER, _SIZE_POWERS = 127, {"signed4": 3, "signed8": 6}
# Factor of offsets beside scales in the maximum that normalizes an output's scales: larger offsets shrink the scales,
# so that no product overflows.
_OFFSET_SHARE = 2.0**-7
# Max magnitude of an 8-bit code less an integer; bounds of the power of two of an output's largest scale.
_MAX_SIZE, _POWERS = 127, (-100, 100)
# Min inputs of a group with float32 scales, which multiply sums and not weights.
MIN_SUM = 64
_POWER_BIAS, _FLOAT_BIAS, _MANTISSA = 253, 29, 8
# Shifts of weights: none, offsets, or integers z from 0 to 15 that are subtracted from codes: then the offsets are
# -ZERO_BASE - z.
SHIFTS = ("none", "offsets", "zeros")
ZERO_BASE, _MAX_ZERO = 128, 15
# Low bits that are 0 in the smaller bfloat16 of a float16: it has 3 significant bits, so its product with (code - zero)
# is exact. The lowest store the zero point.
FREE_BITS = 0x1F
# E4M3 numbers are divided by this power of two, and are then below 2**2; max relative error of scales' products with a
# factor.
_E4M3_SHIFT, _ROUNDED = 7, 2.0**-22


@dataclass(frozen=True, slots=True)
class PackedKind:
    """The properties of a packed matrix [outputs, inputs] that determine its size in memory.

    Attributes:
        group: inputs that share a scale: MIN_GROUP or a multiple of COLUMNS; 0 for one scale per output. Scales of a
            byte or two have MIN_GROUP or COLUMNS; those of a word, other than float32, have COLUMNS; those of signed
            numbers have at most half a unit.
        scale: one of SCALES.
        shift: one of SHIFTS.
    """

    coding: str
    outputs: int
    inputs: int
    group: int
    scale: str = "float32"
    shift: str = "none"

    @property
    def per_word(self) -> int:
        """Codes in a word of 32 bits."""
        return 32 // BITS[self.coding]

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        return COLUMNS * self.per_word

    @property
    def units(self) -> int:
        """Number of units, including a partial last one."""
        return -(-self.inputs // self.unit)

    @property
    def tail(self) -> int:
        """Codes per column in a partial last unit, padding included; else 0."""
        codes = -(-(self.inputs % self.unit) // COLUMNS)
        return next(size for size in (0, 2, 4, 8) if codes <= size)

    @property
    def per_scale_word(self) -> int:
        """Scales in a word of 32 bits."""
        halves = 2 if self.shift == "none" else 1
        return {"bfloat16": halves, "e8m0": 4, "e5m3": 4}.get(self.scale, 1)

    @property
    def padded(self) -> int:
        """Outputs of the packed matrix, with padding."""
        return -(-self.outputs // OUTPUTS) * OUTPUTS


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed matrix.

    Attributes:
        words: int32 [N]: whole units [units, padded outputs, COLUMNS], then the partial one.
        scales: float32 [groups, padded outputs], or int32 [units, words, padded outputs] of smaller numbers.
        offsets: float32 [groups, padded outputs], or int32 [units, words, padded outputs] of two bfloat16 each with
            signed numbers; None if all are 0 or with scales of bfloat16 and float16.
        factors: float32 [padded outputs], which multiply scales of a byte, and signed numbers; else None.
        order: int32 [inputs], the input of each column, or None if columns are in order.
    """

    kind: PackedKind
    words: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The matrix's tensors by attribute, without those that are None."""
        found = {name: getattr(self, name) for name in ("words", "scales", "offsets", "factors", "order")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def can_pack(matrix: QuantizedMatrix) -> bool:
    """Return whether the kernels support this matrix: its groups are all of its inputs, or a multiple of
    MIN_GROUP."""
    return matrix.group % MIN_GROUP == 0 or matrix.group >= matrix.shape[1]


def pack(matrix: QuantizedMatrix, dtype: torch.dtype, *, least: int = 0) -> PackedMatrix:
    """Pack a matrix for which :func:`can_pack` holds, for products with rows of a type.

    Uses the first of three forms that represents the matrix: exact weights of a type's products, signed numbers for
    rows of bfloat16, and scales and offsets of float32, which represent every matrix. Forms before number ``least`` are
    skipped.
    """
    assert can_pack(matrix)
    group = matrix.group if matrix.group % COLUMNS == 0 else MIN_GROUP
    group = 0 if matrix.group >= matrix.shape[1] else group
    found = _pack_exact(matrix, group) if least < 1 else None
    if found is None and least < 2 and dtype == torch.bfloat16:
        found = _pack_signed(matrix, group)
    return found or _pack_in_float32(matrix, group)


def pack_alike(matrices: Sequence[QuantizedMatrix], dtype: torch.dtype) -> list[PackedMatrix]:
    """Pack matrices of one shape, such as those of experts, as one common kind if possible: an all-zero matrix might
    get another kind by itself."""
    for least in range(3):
        found = [pack(matrix, dtype, least=least) for matrix in matrices]
        if len({(each.kind, *each.parts) for each in found}) == 1:
            break
    return found


def _pack_exact(matrix: QuantizedMatrix, group: int) -> PackedMatrix | None:
    """Pack a matrix whose scales fit in a byte or half a word, or have groups so large that sums are scaled; None for
    others, and for offsets that are not integer zero points."""
    outputs, inputs = matrix.shape
    small = _byte_scales(matrix) if group else None
    if small is not None:
        scale, numbers, factors = small
        kind = PackedKind(matrix.coding, outputs, inputs, min(group, COLUMNS), scale)
        # Scales of a byte have no 0, so codes become 0 instead.
        codes = torch.where(_repeat_groups(matrix.scales == 0, matrix.group, inputs), 0, matrix.codes)
        scales = _pack_scales(numbers, matrix.group, kind, kind.per_scale_word)
        return _assemble(matrix, codes, kind, scales, factors=factors)
    zeros = None if matrix.offsets is None else _integer_zeros(matrix.coding, matrix.scales, matrix.offsets)
    if matrix.offsets is not None and zeros is None:
        return None
    scale, halves = _half_word_scales(matrix, group, zeros)
    if 0 < group < MIN_SUM and halves is None:
        return None
    kind = PackedKind(matrix.coding, outputs, inputs, group, scale, "none" if zeros is None else "zeros")
    if halves is not None:
        return _assemble(matrix, matrix.codes, kind, _pack_scales(halves, matrix.group, kind, kind.per_scale_word))
    return _with_float32_scales(matrix, kind, None if zeros is None else -ZERO_BASE - zeros)


def _pack_in_float32(matrix: QuantizedMatrix, group: int) -> PackedMatrix:
    """Pack any matrix, with scales and offsets of float32."""
    outputs, inputs = matrix.shape
    shift = "none" if matrix.offsets is None else "offsets"
    kind = PackedKind(matrix.coding, outputs, inputs, group, "float32", shift)
    return _with_float32_scales(matrix, kind, matrix.offsets)


def _with_float32_scales(matrix: QuantizedMatrix, kind: PackedKind, offsets: torch.Tensor | None) -> PackedMatrix:
    scales, offsets = (
        None if values is None else _regroup(values, matrix.group, kind).T.contiguous()
        for values in (matrix.scales, offsets)
    )
    assert scales is not None
    return _assemble(matrix, matrix.codes, kind, scales, offsets)


def _assemble(
    matrix: QuantizedMatrix,
    codes: torch.Tensor,
    kind: PackedKind,
    scales: torch.Tensor,
    offsets: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> PackedMatrix:
    """Assemble a packed matrix; codes [outputs, inputs] and factors [outputs] are still to be laid out."""
    if kind.coding == "int8":
        # Stored unsigned, with a bias of 128, like all integers here; the kernel subtracts it.
        codes = codes ^ 0x80
    factors = None if factors is None else pad(factors, (0, kind.padded - kind.outputs))
    order = None if matrix.order is None else matrix.order.int()
    return PackedMatrix(kind, _pack_codes(codes, kind), scales, offsets, factors, order)


def _repeat_groups(values: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    """Turn values [outputs, G] of groups into [outputs, inputs]."""
    return values.repeat_interleave(min(group, inputs), 1)[:, :inputs]


def _regroup(values: torch.Tensor, group: int, kind: PackedKind) -> torch.Tensor:
    """Turn values [outputs, G] of groups of a matrix into [padded outputs, groups of ``kind``], with groups for the
    padding of the inputs."""
    groups = 1
    if kind.group:
        groups = -(-kind.units * kind.unit // kind.group)
        values = values.repeat_interleave(group // kind.group, 1)[:, :groups]
    return pad(values, (0, groups - values.shape[1], 0, kind.padded - kind.outputs))


def _byte_scales(matrix: QuantizedMatrix) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """Return one of SCALES, scales as one-byte numbers, uint8 [outputs, G], and the outputs' factors; None if they
    cannot be stored so. Products of these scales with codes of other codings would have to be rounded."""
    scales = matrix.scales
    if matrix.coding != "fp4_e2m1" or matrix.offsets is not None:
        return None
    fractions, exponents = torch.frexp(scales)
    if matrix.group % COLUMNS == 0 and bool((fractions == 0.5).all()):
        most = exponents.amax(1)
        numbers = (exponents - most[:, None] + _POWER_BIAS).clamp(min=1)
        return "e8m0", numbers.to(torch.uint8), torch.ldexp(torch.ones(len(most)), most - 1)
    if matrix.factors is None or bool((scales < 0).any()):
        return None
    floats = (scales / matrix.factors[:, None]).to(torch.float8_e4m3fn).float()
    if not bool(((floats * matrix.factors[:, None] - scales).abs() <= _ROUNDED * scales).all()):
        return None
    fractions, exponents = torch.frexp(floats)
    numbers = (exponents - 1 - _E4M3_SHIFT + _FLOAT_BIAS) * _MANTISSA + (2 * fractions - 1) * _MANTISSA
    return "e5m3", numbers.clamp(min=0).to(torch.uint8), matrix.factors * 2.0**_E4M3_SHIFT


def _half_word_scales(
    matrix: QuantizedMatrix, group: int, zeros: torch.Tensor | None
) -> tuple[str, torch.Tensor | None]:
    """Return one of SCALES, and scales of small groups of integers in halves of words, int32 [outputs, G]: each in 16
    bits, or in 32 with an additional number. None, with float32 scales, if halves cannot represent them.

    A bfloat16 scale is in 16 bits, or in the upper half of a word whose lower half is -ZERO_BASE - zero. A float16
    scale is the sum of the upper half and of the lower one, whose lowest bits are the zero. A weight, its number times
    its scale, is rounded once, as in float32.
    """
    shifted = matrix.offsets is not None
    if not (0 < group < MIN_SUM and matrix.coding in ("uint4", "int4", "int8")) or (shifted and zeros is None):
        return "float32", None
    upper = matrix.scales.to(torch.bfloat16)
    rest = matrix.scales - upper.float()
    lower = rest.to(torch.bfloat16)
    wide = group >= COLUMNS
    if not bool(rest.any()) and (wide or zeros is None):
        halves = _bfloat16_bits(upper)
        return "bfloat16", halves if zeros is None else halves << 16 | _bfloat16_bits(-ZERO_BASE - zeros)
    whole = torch.equal(lower.float(), rest) and not bool((_bfloat16_bits(lower) & FREE_BITS).any())
    if not (whole and wide and matrix.coding != "int8"):
        return "float32", None
    return "float16", _bfloat16_bits(upper) << 16 | _bfloat16_bits(lower) | (0 if zeros is None else zeros.int())


def _bfloat16_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of bfloat16 numbers, int32."""
    return values.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF


def _pack_scales(numbers: torch.Tensor, group: int, kind: PackedKind, per_word: int) -> torch.Tensor:
    """Join numbers [outputs, G] of groups of ``group`` inputs into words int32 [units, words, padded outputs]."""
    parts = _regroup(numbers, group, kind).view(kind.padded, kind.units, -1, per_word)
    return _join_bits(parts.unbind(-1), 32 // per_word).permute(1, 2, 0).contiguous()


def _pack_signed(matrix: QuantizedMatrix, group: int) -> PackedMatrix | None:
    """Pack integers as signed numbers, whose bits are those of a bfloat16, sign and all; None for other numbers, and if
    8 bits do not suffice.

    A weight is n * scale + offset; subtracting a middle of the codes from n adds to the offset, which is then small:
    half a scale at most in 8 bits, where each group has its own middle. It is rounded twice, and the sum once, so that
    a weight is off by at most 2**-8 of its size and 2**-7 of that offset, and by 2**-16 of n * scale.
    """
    if matrix.coding not in ("uint4", "int4", "int8"):
        return None
    scales = matrix.scales.double()
    offsets = torch.zeros_like(scales) if matrix.offsets is None else matrix.offsets.double()
    if matrix.coding == "int8":
        coding, moved = "signed8", _center_codes(matrix, scales, offsets)
        if moved is None:
            return None
        codes, middles = moved
    else:
        coding, middles = "signed4", torch.tensor(7.5 if matrix.coding == "uint4" else -0.5)
        codes = torch.where(matrix.codes < 8, matrix.codes ^ 15, matrix.codes ^ 8)
    offsets = offsets + middles * scales
    if coding == "signed4":
        scales = scales / 2
    most = torch.maximum(scales.abs(), offsets.abs() * _OFFSET_SHARE).amax(1)
    power = torch.frexp(most).exponent.clamp(min=_POWERS[0])
    if int(power.max()) > _POWERS[1]:
        return None
    outputs, inputs = matrix.shape
    shift = "none" if matrix.offsets is None and coding == "signed8" else "offsets"
    # A group is so small that a unit has two or more, because a word of offsets contains those of two groups.
    kept = group if group == MIN_GROUP else gcd(group, COLUMNS * 16 // BITS[coding])
    kind = PackedKind(coding, outputs, inputs, kept, "two_halves", shift)
    spread = matrix.group if group else kind.units * kind.unit
    scales = torch.ldexp(scales, _MAX_POWER - power[:, None])
    upper = scales.to(torch.bfloat16)
    words = _bfloat16_bits(upper) << 16 | _bfloat16_bits(scales - upper.double())
    power += _SIZE_POWERS[coding]
    rest = None
    if shift == "offsets":
        rest = _pack_scales(_bfloat16_bits(torch.ldexp(offsets, -power[:, None])), spread, kind, 2)
    factors = torch.ldexp(torch.ones(outputs), power)
    return _assemble(matrix, codes, kind, _pack_scales(words, spread, kind, 1), rest, factors)


def _center_codes(
    matrix: QuantizedMatrix, scales: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Subtract an integer from the int8 codes of each group, near its offset, so that 8 bits with a sign suffice.
    Returns sign-magnitude codes, uint8, and the integers, float64, which are 0 without offsets; None if there are no
    such integers."""
    inputs = matrix.shape[1]
    size = min(matrix.group, inputs)
    numbers = matrix.codes.view(torch.int8).short()
    groups = pad(numbers, (0, -inputs % size)).view(len(numbers), -1, size)
    least, most = groups.amax(2) - _MAX_SIZE, groups.amin(2) + _MAX_SIZE
    if bool((least > most).any()) or (matrix.offsets is None and bool((most < 0).any())):
        return None
    middles = torch.where(scales == 0, 0.0, -offsets / scales).round().clamp(least.double(), most.double())
    if matrix.offsets is not None:
        numbers = numbers - _repeat_groups(middles.short(), size, inputs)
    return (numbers.abs() | (numbers < 0) << 7).to(torch.uint8), middles


def _integer_zeros(coding: str, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
    """Return the zero points, float32 integers that offsets subtract from codes; None if they subtract others."""
    if coding != "uint4":
        return None
    zeros = torch.where(scales == 0, 0.0, -offsets / scales).round().clamp(0, _MAX_ZERO)
    return zeros if torch.equal(-scales * zeros, offsets + 0.0) else None


def _pack_codes(codes: torch.Tensor, kind: PackedKind) -> torch.Tensor:
    """Pack codes uint8 [outputs, inputs] into consecutive int32 words."""
    whole = kind.inputs // kind.unit
    codes = pad(codes, (0, whole * kind.unit + kind.tail * COLUMNS - kind.inputs, 0, kind.padded - kind.outputs))
    units = codes[:, : whole * kind.unit].reshape(kind.padded, whole, kind.per_word, COLUMNS).transpose(0, 1)
    words = _pack_columns(units.unbind(2), kind).flatten()
    if not kind.tail:
        return words
    rest = _pack_columns(codes[:, whole * kind.unit :].reshape(kind.padded, kind.tail, COLUMNS).unbind(1), kind)
    bits = kind.tail * BITS[kind.coding]
    return torch.cat((words, _join_bits(rest.view(kind.padded, -1, 32 // bits).unbind(-1), bits).flatten()))


def _pack_columns(places: Sequence[torch.Tensor], kind: PackedKind) -> torch.Tensor:
    """Join the codes of each column: two of them in order, half a word or a word by :func:`_pack_half_word`."""
    half = kind.per_word // 2
    if len(places) < half:
        return _join_bits(places, BITS[kind.coding])
    halves = [places[begin : begin + half] for begin in range(0, len(places), half)]
    return _join_bits([_pack_half_word(each, kind.coding) for each in halves], 16)


def _pack_half_word(places: Sequence[torch.Tensor], coding: str) -> torch.Tensor:
    """Join the codes a, b, ... of half a word. ``s``: sign. ``a`` has the sign and the bits of a bfloat16, but for the
    exponent's bias; few shifts move the others there.

        bit        15  14 13 12  11  10  9  8   7   6  5  4   3   2  1  0
        fp8_e4m3   as  b6 b5 b4  bs  a6 a5 a4  a3  a2 a1 a0  b3  b2 b1 b0
        fp4_e2m1   as  d2 d1 bs  ds  d0 cs a2  a1  a0 b2 b1  b0  c2 c1 c0
        signed4    as  c2 c1 c0  bs  d2 d1 d0  cs  a2 a1 a0  ds  b2 b1 b0

    Integers are in order, ``a`` lowest.
    """
    if coding == "fp8_e4m3":
        first, second = (place.int() for place in places)
        found = (first & 0x80) << 8 | (first & 0x7F) << 4
        return found | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0xF
    if coding == "fp4_e2m1":
        first, second, third, fourth = (place.int() for place in places)
        found = (first & 8) << 12 | (first & 7) << 6 | (second & 8) << 9 | (second & 7) << 3
        found |= (third & 8) << 6 | third & 7
        return found | (fourth & 8) << 8 | (fourth & 6) << 12 | (fourth & 1) << 10
    if coding == "signed4":
        first, second, third, fourth = ((place.int() & 8) << 12 | (place.int() & 7) << 4 for place in places)
        # A left shift, a byte swap, or both away from the bfloat16's bits.
        return first | second >> 4 | _swap_bytes(third) | _swap_bytes(fourth >> 4)
    return _join_bits(places, BITS[coding])


def _swap_bytes(halves: torch.Tensor) -> torch.Tensor:
    return halves << 8 & 0xFF00 | halves >> 8


def _join_bits(parts: Sequence[torch.Tensor], bits: int) -> torch.Tensor:
    """Join ``bits``-bit numbers to int32, the first one lowest."""
    found = parts[0].int()
    for place, part in enumerate(parts[1:], 1):
        found = found | part.int() << (bits * place)
    return found
