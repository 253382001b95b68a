"""Memory layout of 4-bit and 8-bit codes, and their dequantization in registers.

A *unit* is 4 inputs of the 32 outputs of a panel. Its codes are dequantized without rounding; scales are applied to
finished sums (:mod:`pillion.kernels.cpu.quantized.quantized_tiles`). A *constant* is a scale or an offset: float16 if
that represents all constants of a matrix exactly, because those of small groups take much of the memory, else float32.

    4 bits   one line of 64 bytes; a lane of 32 bits has the 8 codes of column c of both tiles:
             [16 lanes][2 inputs of a pair][2 pairs][2 tiles], the first code in the lowest bits
    8 bits   a line for each of its two pairs of inputs: [4 quarters][2 tiles][4 columns][2 inputs], a byte is a sign
             and 7 bits

Numbers are bfloat16 pairs if the processor multiplies these and rows are bfloat16, else float32. Pairs come from tables
in registers: for 4 bits a shift and a look-up yield 16 pairs, for 8 bits both bytes of each bfloat16 are looked up and
interleaved within each quarter of a line. 4 bits become a float32 by a table with AVX-512, and those of NF4 and E2M1 on
all processors; other 4-bit integers become the lowest bits of a float32 from which a subtraction extracts them (AVX2),
or are shifted and converted (NEON). 8 bits become a float16, which is converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from llvmlite import ir

from pillion.kernels.cpu.language.byte_codes import (
    FP8_SHRINK,
    LINE,
    LINE_BYTES,
    QUARTERS,
    SIGN,
    fp8_floats,
    half_words,
    lookup_values,
    word_lanes,
)
from pillion.kernels.cpu.language.emit import (
    HALVES,
    I8,
    I32,
    VECTOR_BYTES,
    VF,
    VI,
    WORDS,
    Kernel,
    Pairs,
    Ptr,
    Vec,
    int_lanes,
)
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.torch.quantized_matrix import CODINGS

UNIT_INPUTS = 4
_MAGNITUDES = 0x7F
# Dequantized weights of a pair of inputs: Pairs, two Pairs that add up to the weights, or a Vec per input.
Parts = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CodeKind:
    """Packing of codes in panels.

    Attributes:
        codes: name of the stored codes.
        bits: 4 or 8.
        values: the numbers that stored codes represent before scaling, float32 [16] or [256].
        scale: power of two by which packing multiplies the scales.
        constant_bytes: 4 for float32 constants, 2 for float16.
    """

    codes: str
    bits: int
    values: tuple[float, ...]
    scale: float = 1.0
    constant_bytes: int = 4

    @property
    def name(self) -> str:
        """The kind of the packed weights."""
        return self.codes + "_half" * (self.constant_bytes == 2)

    @property
    def constant_dtype(self) -> torch.dtype:
        """The type of constants."""
        return torch.float16 if self.constant_bytes == 2 else torch.float32

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of packed codes."""
        return UNIT_INPUTS * 2 * LANES * self.bits // 8

    @property
    def parts(self) -> int:
        """Bfloat16 numbers that add up to a value: 1 if bfloat16 represents all values, else 2."""
        values = torch.tensor(self.values)
        return 1 if torch.equal(values.bfloat16().float().nan_to_num(), values.nan_to_num()) else 2


def _signed_bytes(lowest: float) -> tuple[float, ...]:
    """Return the values of sign-magnitude bytes; ``lowest`` is that of 0x80 (-0)."""
    return tuple(float(code) if code < SIGN else float(SIGN - code) or lowest for code in range(256))


def _code_kinds() -> Iterator[CodeKind]:
    int4 = CodeKind("int4", 4, tuple(float(code if code < 8 else code - 16) for code in range(16)))
    yield int4
    yield replace(int4, constant_bytes=2)
    # uint4 normally packs as int4, with offsets larger by 8 scales. This kind is for offsets that float16 represents
    # only without that shift.
    yield CodeKind("uint4", 4, tuple(map(float, range(16))), constant_bytes=2)
    for floats in ("nf4", "fp4_e2m1"):
        yield CodeKind(floats, 4, tuple(CODINGS[floats].tolist()))
    # int8 without the code -128, and with it ("whole"), whose look-up costs two more instructions.
    for whole in (CodeKind("int8", 8, _signed_bytes(0.0)), CodeKind("int8_whole", 8, _signed_bytes(-128.0))):
        yield whole
        yield replace(whole, constant_bytes=2)
    yield CodeKind("fp8_e4m3", 8, tuple((CODINGS["fp8_e4m3"] / FP8_SHRINK).tolist()), FP8_SHRINK)
    # MXFP4's scales are powers of two, most of which are float16 numbers.
    yield CodeKind("fp4_e2m1", 4, tuple(CODINGS["fp4_e2m1"].tolist()), constant_bytes=2)


CODE_KINDS = {kind.name: kind for kind in _code_kinds()}


def codes_of(coding: str, codes: Iterable[torch.Tensor]) -> str:
    """Return the ``CodeKind.codes`` that represent all ``codes`` of a matrix; ``coding`` is a key of
    :data:`pillion.kernels.torch.quantized_matrix.CODINGS`."""
    if coding in ("uint4", "int4"):
        return "int4"
    if coding == "int8":
        return "int8_whole" if any(bool((part == SIGN).any()) for part in codes) else "int8"
    return coding


def stored_codes(coding: str, codes: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Convert a coding's codes to those stored in panels. uint4 may become int4, whose values are smaller by 8; offsets
    must then grow by 8 scales."""
    if coding in ("uint4", "int4"):
        return codes if kind.codes == "uint4" else codes ^ 8
    return (
        (codes.view(torch.int8).abs().view(torch.uint8) & _MAGNITUDES) | (codes & SIGN) if coding == "int8" else codes
    )


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack stored codes, uint8 [..., 32 columns, 4 inputs], one code per byte, into units, uint8 [..., bytes]."""
    lead = codes.shape[:-2]
    if bits == 4:
        # A column's inputs are a word: both tiles share its bytes, and the two middle ones are swapped.
        words = codes.contiguous().view(torch.int32)[..., 0]
        both = words[..., :LANES] | words[..., LANES:] << 4
        swapped = (both & ~0xFFFF00) | (both >> 8 & 0xFF00) | (both << 8 & 0xFF0000)
        return swapped.view(torch.uint8)
    # [tiles][quarters][columns][pairs][inputs]
    split = codes.reshape(*lead, 2, QUARTERS, LANES // QUARTERS, 2, 2)
    return split.movedim((-2, -4, -5, -3, -1), (-5, -4, -3, -2, -1)).reshape(*lead, 2 * LINE_BYTES)


def unpack_codes(units: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack units into codes, the inverse of :func:`pack_codes`."""
    lead = units.shape[:-1]
    if bits == 4:
        nibbles = torch.stack((units & 15, units >> 4), -1).reshape(*lead, LANES, 2, 2, 2)
        split = nibbles.movedim((-4, -3, -2, -1), (-3, -1, -2, -4))
    else:
        split = units.reshape(*lead, 2, QUARTERS, 2, LANES // QUARTERS, 2)
        split = split.movedim((-5, -4, -3, -2, -1), (-2, -4, -5, -3, -1))
    return split.reshape(*lead, 2 * LANES, UNIT_INPUTS)


def load_constants(k: Kernel, kind: CodeKind, at: Ptr) -> Vec:
    """Load the scales, or offsets, of a tile's 16 outputs as float32."""
    return k.load(at) if kind.constant_bytes == 4 else k.load_half(at)


def in_pairs(k: Kernel, wide_rows: bool) -> bool:
    """Return whether products multiply bfloat16 pairs, not float32 numbers. ``wide_rows``: rows are float32."""
    return k.isa.bf16_dot == "x86" and not wide_rows


def unit_parts(k: Kernel, kind: CodeKind, unit: Ptr, wide_rows: bool) -> Iterator[tuple[Parts, Parts]]:
    """Dequantize a unit: yield, for each of its two pairs of inputs, the weights of outputs 0 to 15 and of 16 to 31.

    A pair's instructions are emitted only when the caller requests the pair, which limits register pressure.
    """
    pairs = in_pairs(k, wide_rows)
    if kind.bits == 4:
        line, widen = k.read(unit, VI, 4), _nibble_pairs if pairs else _nibble_floats
        for nibble in (0, 2):
            yield widen(k, kind, line, nibble), widen(k, kind, line, nibble + 1)
        return
    for at in (0, LINE_BYTES):
        if pairs:
            codes, (patterns,) = k.read(unit + at, LINE, 1), _patterns(kind)
            lowest = patterns[SIGN] >> 8 if kind.codes == "int8_whole" else None
            first, second = lookup_values(k, codes, codes, patterns[:SIGN], lowest)
            yield (first,), (second,)
        else:
            words = k.read(unit + at, WORDS, 1)
            yield _byte_floats(k, kind, words, 0), _byte_floats(k, kind, words, 1)


def _nibble_pairs(k: Kernel, kind: CodeKind, line: Any, nibble: int) -> Parts:
    """Look up a bfloat16 by the lowest 5 bits of each 16-bit word; the table contains all values twice, so the fifth
    bit has no effect."""
    b, words = k.builder, k.builder.bitcast(k.builder.lshr(line, int_lanes(4 * nibble)), WORDS)
    function = k.function("llvm.x86.avx512.permvar.hi.512", WORDS, [WORDS, WORDS])
    return tuple(
        Pairs(k, b.bitcast(b.call(function, [ir.Constant(WORDS, table * 2), words]), VI)) for table in _patterns(kind)
    )


def _nibble_floats(k: Kernel, kind: CodeKind, line: Any, nibble: int) -> Parts:
    """Return the float32 weights of the pairs' first inputs, and of the second ones."""
    return _nibble_float(k, kind, line, nibble), _nibble_float(k, kind, line, 4 + nibble)


def _nibble_float(k: Kernel, kind: CodeKind, line: Any, nibble: int) -> Vec:
    b = k.builder
    if "avx512f" in k.isa.needs:
        function = k.function("llvm.x86.avx512.permvar.sf.512", VF, [VF, VI])
        return Vec(k, b.call(function, [ir.Constant(VF, kind.values), b.lshr(line, int_lanes(4 * nibble))]))
    top = b.shl(line, int_lanes(28 - 4 * nibble))
    if kind.codes in ("int4", "uint4"):
        if k.isa.machine == "x86_64":
            return _whole_nibble(k, kind, line, nibble)
        shift = b.ashr if kind.codes == "int4" else b.lshr
        return Vec(k, b.sitofp(shift(top, int_lanes(28)), VF))
    if k.isa.machine == "aarch64":
        return _arm_table(k, kind, b.lshr(top, int_lanes(28)))
    eight = ir.VectorType(I32, LANES // 2)
    floats = ir.VectorType(VF.element, LANES // 2)
    function = k.function("llvm.x86.avx2.permps", floats, [floats, eight])
    lower, upper = (ir.Constant(floats, list(kind.values[begin : begin + 8])) for begin in (0, 8))
    halves = []
    for half in range(2):
        order = ir.Constant(eight, list(range(8 * half, 8 * half + 8)))
        sign, indices = (b.shuffle_vector(part, part, order) for part in (top, b.lshr(line, int_lanes(4 * nibble))))
        high = b.icmp_signed("<", sign, ir.Constant(eight, [0] * 8))
        halves.append(b.select(high, b.call(function, [upper, indices]), b.call(function, [lower, indices])))
    return Vec(k, b.shuffle_vector(*halves, ir.Constant(VI, list(range(LANES)))))


def _whole_nibble(k: Kernel, kind: CodeKind, line: Any, nibble: int) -> Vec:
    """Return the float32 of an integer code. AVX2 runs these instructions on more ports than shifts and conversions.

    The code stays where it is, as low bits of a float32 whose exponent makes its lowest bit count 1: the number is
    2**(23 - bit) + code. A subtraction extracts the code, exactly. Flipping int4's sign bit adds 8.
    """
    b, bit = k.builder, 4 * nibble
    # The 4 bits of a code must lie below bit 20 of the 23 of the mantissa: shift higher ones down.
    if bit > 16:
        line, bit = b.lshr(line, int_lanes(12)), bit - 12
    base = 2.0 ** (23 - bit)
    start = (150 - bit) << 23
    bits = b.and_(line, int_lanes(15 << bit))
    if kind.codes == "int4":
        start, base = start | 8 << bit, base + 8
    return Vec(k, b.bitcast(b.xor(bits, int_lanes(start)), VF)) - base


def _arm_table(k: Kernel, kind: CodeKind, indices: Any) -> Vec:
    """Look up float32 by the codes ``indices``, four bytes each, in a table of 64 bytes."""
    b, register = k.builder, ir.VectorType(I8, 16)
    function = k.function("llvm.aarch64.neon.tbl4.v16i8", register, [register] * 5)
    content = torch.tensor(kind.values).view(torch.uint8).tolist()
    table = [ir.Constant(register, content[begin : begin + 16]) for begin in range(0, 64, 16)]
    spread = b.add(b.mul(indices, int_lanes(0x04040404)), int_lanes(0x03020100))
    four = ir.VectorType(I32, 4)
    quarters = []
    for quarter in range(QUARTERS):
        order = ir.Constant(four, list(range(4 * quarter, 4 * quarter + 4)))
        quarters.append(b.call(function, [*table, b.bitcast(b.shuffle_vector(spread, spread, order), register)]))
    halves = [b.shuffle_vector(*quarters[at : at + 2], _counted(32)) for at in (0, 2)]
    return Vec(k, b.bitcast(b.shuffle_vector(*halves, _counted(64)), VF))


def _counted(count: int) -> Any:
    return ir.Constant(ir.VectorType(I32, count), list(range(count)))


def _byte_floats(k: Kernel, kind: CodeKind, words: Any, tile: int) -> Parts:
    """Convert the codes of a column's two inputs, the bytes of a 16-bit word, to float32."""
    if kind.codes == "fp8_e4m3":
        return fp8_floats(k, words, tile)
    tile_words = half_words(k, words, tile)
    return tuple(_int8_float(k, kind, tile_words, bit) for bit in (0, 8))


def _int8_float(k: Kernel, kind: CodeKind, words: Any, bit: int) -> Vec:
    """Convert the code at ``bit`` of each word: its sign becomes a float16's, its magnitude a subnormal, times
    2**-24."""
    b = k.builder
    magnitude = b.and_(b.lshr(words, word_lanes(bit)) if bit else words, word_lanes(_MAGNITUDES))
    sign = word_lanes(0x8000 - 0x10000)
    half = b.or_(magnitude, b.and_(words if bit else b.shl(words, word_lanes(8)), sign))
    if kind.codes == "int8_whole":
        half = b.select(b.icmp_unsigned("==", half, sign), word_lanes(0x8000 + SIGN - 0x10000), half)
    return Vec(k, b.fpext(b.bitcast(half, HALVES), VF))


def register_unit(k: Kernel, kind: CodeKind, wide_rows: bool) -> float:
    """Return the number that a code of 1 becomes in registers: 2**-24 if int8 codes become float16 subnormals, else 1.
    Scales, which are applied to finished sums, compensate."""
    return 2.0**-24 if kind.codes in ("int8", "int8_whole") and not in_pairs(k, wide_rows) else 1.0


@cache
def _patterns(kind: CodeKind) -> tuple[list[int], ...]:
    """Return the bits of the bfloat16 numbers that add up to a kind's values: a table per part."""
    values = torch.tensor(kind.values)
    tables = []
    for _ in range(kind.parts):
        rounded = values.bfloat16()
        tables.append([pattern & 0xFFFF for pattern in rounded.view(torch.int16).tolist()])
        values = values - rounded.float()
    return tuple(tables)


def parts_of(k: Kernel, kind: CodeKind, wide_rows: bool) -> int:
    """Return the number of parts that :func:`unit_parts` yields for a pair of inputs."""
    return kind.parts if in_pairs(k, wide_rows) else 2


def load_parts(k: Kernel, at: Ptr, parts: int, width: int, wide_rows: bool) -> Iterator[tuple[Parts, ...]]:
    """Load a widened unit written by :func:`store_parts`; yield, for each pair of inputs, the parts of both tiles, or
    with ``width`` 1 of the tile at ``at``."""
    read = k.load_pairs if in_pairs(k, wide_rows) else k.load

    def tile(step: int, number: int) -> Any:
        return tuple(read(at + _offset(step, part, number, parts)) for part in range(parts))

    for step in range(2):
        yield tuple(tile(step, number) for number in range(width))


def store_parts(k: Kernel, at: Ptr, unit: Iterator[tuple[Parts, Parts]]) -> None:
    """Store a widened unit [2 pairs of inputs][parts][2 tiles][64 bytes]."""
    for step, tiles in enumerate(unit):
        for tile, parts in enumerate(tiles):
            for part, value in enumerate(parts):
                k.write(at + _offset(step, part, tile, len(parts)), value.ir, 4)


def _offset(step: int, part: int, tile: int, parts: int) -> int:
    """Return the byte offset of a vector in a widened unit."""
    return ((step * parts + part) * 2 + tile) * VECTOR_BYTES
