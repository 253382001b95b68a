"""Layouts of quantized matrices for the products of :mod:`pillion.kernels.cpu.products.gemm`. Panels and tiles are
those of :mod:`pillion.kernels.cpu.products.packing`:

    int8_dots  [N / 32]: float32 scales [2 tiles][16], float32 offsets if the matrix has them, and the codes
           [K / 4][2 tiles][16][4], each with 128 added, for integer products
    codes  [N / 32][groups of inputs]: scales [2 tiles][16], offsets [2 tiles][16] if the matrix has them, and the
           codes of the group's inputs (pillion.kernels.cpu.quantized.codes; for int8 rows in groups dot_kinds)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from pillion.kernels.cpu.products.packed_weight import PackedWeight, interleave_tiles
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS, TILE_COLUMNS, TOTALS_BYTES
from pillion.kernels.cpu.quantized.codes import (
    CODE_KINDS,
    UNIT_INPUTS,
    CodeKind,
    codes_of,
    pack_codes,
    stored_codes,
    unpack_codes,
)
from pillion.kernels.cpu.quantized.dot_kinds import DOT_KINDS, DotKind, pack_units, unpack_units
from pillion.kernels.torch.quantized_matrix import GROUPED_ROWS, Matrix, QuantizedMatrix, row_group_of, same_order

# Max inputs of a 32-bit integer sum: products of codes are at most 255 * 128.
MAX_DOT_INPUTS = 2**31 // (255 * 128)
# Max inputs of a widened group in a thread's scratch; larger groups are packed as several.
MAX_GROUP_INPUTS = 512
# Kind of int8 weights with a scale per output, multiplied with rows of int8.
INT8_DOTS = "int8_dots"
KINDS = (*CODE_KINDS, INT8_DOTS, *DOT_KINDS)


def panel_bytes(kind: str, depth: int, group: int, offsets: bool) -> int:
    """Return the bytes of a panel of a quantized kind."""
    if kind == INT8_DOTS:
        return dots_constants_bytes(offsets) + depth * PANEL_COLUMNS
    codes = _grouped(kind)
    constants = -(-depth // group) * PANEL_COLUMNS * codes.constant_bytes * (2 if offsets else 1)
    return constants + depth // UNIT_INPUTS * codes.unit_bytes


def _grouped(kind: str) -> CodeKind | DotKind:
    """Return the kind of this name, which has constants per group of inputs."""
    return CODE_KINDS.get(kind) or DOT_KINDS[kind]


def sound(kind: str, depth: int, group: int) -> bool:
    """Return whether the kernels support these sizes."""
    if depth % DEPTH_MULTIPLE:
        return False
    if kind == INT8_DOTS:
        return depth < MAX_DOT_INPUTS + DEPTH_MULTIPLE
    return 0 < group <= MAX_GROUP_INPUTS and group % DEPTH_MULTIPLE == 0


def dots_constants_bytes(offsets: bool) -> int:
    """Return the bytes of a panel of ``INT8_DOTS`` before its codes."""
    return TOTALS_BYTES * (2 if offsets else 1)


def packed_kind(matrices: Sequence[Matrix], fallback: str) -> str:
    """Return a kind that represents all these matrices. It is the plain kind ``fallback`` if one of them is not
    quantized, if they differ in groups or order of inputs, or if their groups are not multiples of 16 inputs."""
    first, quantized = matrices[0], [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    if not isinstance(first, QuantizedMatrix) or len(quantized) < len(matrices):
        return fallback
    for matrix in quantized:
        if (matrix.coding, matrix.group) != (first.coding, first.group) or not _packed_group(matrix):
            return fallback
        if not same_order(matrix, first):
            return fallback
    if row_group_of(quantized):
        if first.row_codes == GROUPED_ROWS:
            names = [kind.name for kind in DOT_KINDS.values() if kind.coding == first.coding]
            return _smallest(names, quantized)
        if all(map(_fits_dots, matrices)):
            return INT8_DOTS
    codes = codes_of(first.coding, (matrix.codes for matrix in quantized))
    return _smallest([codes, f"{codes}_half", f"{first.coding}_half"], quantized)


def _smallest(names: Sequence[str], matrices: Sequence[QuantizedMatrix]) -> str:
    """Return the first of ``names[1:]`` whose float16 constants represent those of the matrices exactly, or else
    ``names[0]``, which has float32 constants."""
    for name in names[1:]:
        if name in KINDS and all(_represents(name, part) for one in matrices for part in _constants(one, name)):
            return name
    return names[0]


def _fits_dots(matrix: Matrix) -> bool:
    """Return whether an int8 matrix has one scale per output, which can be applied to sums over all inputs."""
    assert isinstance(matrix, QuantizedMatrix)
    return matrix.coding == "int8" and matrix.group >= matrix.shape[1] <= MAX_DOT_INPUTS


def has_offsets(matrix: Matrix, kind: str) -> bool:
    """Return whether the panels of a matrix need offsets."""
    return kind in KINDS and isinstance(matrix, QuantizedMatrix) and bool(_offsets(matrix, kind).any())


def pack_quantized(matrices: Sequence[Matrix], kind: str, offsets: bool) -> PackedWeight:
    """Pack one matrix, or two with alternating tiles."""
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    assert len(quantized) == len(matrices)
    first = quantized[0]
    offsets = offsets or any(has_offsets(matrix, kind) for matrix in quantized)
    packed = _pack_dots(quantized, offsets) if kind == INT8_DOTS else _pack_groups(quantized, kind, offsets)
    if first.order is None:
        return packed
    return replace(packed, order=torch.cat((first.order, torch.arange(first.shape[1], packed.depth))).to(torch.int32))


def unpack_quantized(packed: PackedWeight) -> torch.Tensor:
    """Return the columns of a packed matrix [pairs * 32, depth] in packed order, in float64."""
    if packed.kind != INT8_DOTS:
        return _unpack_groups(packed)
    scales, *offsets, codes = _dots_parts(packed)
    dequantized = (codes - 128.0).double() * scales.view(torch.float32).double()[..., None]
    if offsets:
        dequantized = dequantized + offsets[0].view(torch.float32).double()[..., None]
    return dequantized.flatten(0, 1)


def _panels(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Divide outputs into panels: [N, inputs or groups], of one matrix, or of two with alternating tiles, becomes
    [pairs, 32, inputs or groups]."""
    tile = PANEL_COLUMNS if len(parts) == 1 else TILE_COLUMNS
    padded = [pad(part, (0, 0, 0, -len(part) % tile)) for part in parts]
    packed = padded[0] if len(padded) == 1 else interleave_tiles(*padded)
    return packed.view(-1, PANEL_COLUMNS, packed.shape[1])


def _pack_dots(matrices: Sequence[QuantizedMatrix], offsets: bool) -> PackedWeight:
    inputs = matrices[0].shape[1]
    depth = inputs + -inputs % DEPTH_MULTIPLE
    codes = _panels([pad(matrix.codes.view(torch.int8), (0, depth - inputs)) for matrix in matrices])
    units = (codes.view(torch.uint8) ^ 128).view(len(codes), PANEL_COLUMNS, -1, UNIT_INPUTS).transpose(1, 2)
    constants = [_panels([matrix.scales for matrix in matrices])]
    if offsets:
        constants.append(_panels([_offsets(matrix, INT8_DOTS) for matrix in matrices]))
    before = [part.reshape(len(codes), PANEL_COLUMNS).view(torch.uint8) for part in constants]
    return PackedWeight(INT8_DOTS, torch.cat([*before, units.flatten(1)], 1).flatten(), depth, len(codes), 0, offsets)


def _dots_parts(packed: PackedWeight) -> tuple[torch.Tensor, ...]:
    """Return the scales of a matrix of kind INT8_DOTS, and its offsets if it has them, uint8 [pairs, 32 * 4] each, and
    its codes [pairs, 32, depth]."""
    constants = dots_constants_bytes(packed.offsets)
    whole = packed.data.view(packed.pairs, -1)
    units = whole[:, constants:].reshape(packed.pairs, -1, PANEL_COLUMNS, UNIT_INPUTS)
    codes = units.transpose(1, 2).reshape(packed.pairs, PANEL_COLUMNS, packed.depth)
    return *(part.contiguous() for part in torch.split(whole[:, :constants], TOTALS_BYTES, 1)), codes


def _pack_groups(matrices: Sequence[QuantizedMatrix], kind_name: str, offsets: bool) -> PackedWeight:
    first, kind = matrices[0], _grouped(kind_name)
    inputs = first.shape[1]
    depth = inputs + -inputs % DEPTH_MULTIPLE
    group = min(_packed_group(first) if isinstance(kind, CodeKind) else first.row_group, depth)
    source = (torch.arange(0, depth, group) // first.group).clamp(max=first.scales.shape[1] - 1)
    parts = list(zip(*(_constants(matrix, kind_name) for matrix in matrices), strict=True))[: 2 if offsets else 1]
    stored = [
        stored_codes(first.coding, matrix.codes, kind) if isinstance(kind, CodeKind) else matrix.codes
        for matrix in matrices
    ]
    codes = _panels([pad(part, (0, depth - inputs)) for part in stored])
    units = _units(codes.view(len(codes), PANEL_COLUMNS, -1, UNIT_INPUTS).transpose(1, 2), kind)
    constants = [_panels([matrix[:, source] for matrix in part]).to(kind.constant_dtype) for part in parts]
    before = torch.cat([part.transpose(1, 2).contiguous().view(torch.uint8) for part in constants], 2)
    stream, step = units.flatten(1), group // UNIT_INPUTS * kind.unit_bytes
    pieces = [piece for number in range(len(source))
              for piece in (before[:, number], stream[:, number * step : (number + 1) * step])]  # fmt: skip
    return PackedWeight(kind.name, torch.cat(pieces, 1).flatten(), depth, len(units), group, offsets)


def _units(codes: torch.Tensor, kind: CodeKind | DotKind) -> torch.Tensor:
    return pack_codes(codes, kind.bits) if isinstance(kind, CodeKind) else pack_units(codes, kind)


def _packed_group(matrix: QuantizedMatrix) -> int:
    """Return the inputs per packed group: the largest supported divisor of the matrix's group, or 0 if none is."""
    if matrix.group >= matrix.shape[1]:
        return MAX_GROUP_INPUTS
    fitting = range(DEPTH_MULTIPLE, MAX_GROUP_INPUTS + 1, DEPTH_MULTIPLE)
    return max((size for size in fitting if not matrix.group % size), default=0)


def _constants(matrix: QuantizedMatrix, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and offsets [N, groups] of packed codes, float32."""
    return matrix.scales * _grouped(kind).scale, _offsets(matrix, kind)


def _offsets(matrix: QuantizedMatrix, kind: str) -> torch.Tensor:
    offsets = torch.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets
    shifted = matrix.coding == "uint4" and kind in CODE_KINDS and CODE_KINDS[kind].codes == "int4"
    return offsets + 8 * matrix.scales if shifted else offsets


def _represents(kind: str, constants: torch.Tensor) -> bool:
    """Return whether a kind's type of constants represents these exactly."""
    return torch.equal(constants.to(_grouped(kind).constant_dtype).float(), constants)


def _unpack_groups(packed: PackedWeight) -> torch.Tensor:
    kind, parts = _grouped(packed.kind), 2 if packed.offsets else 1
    rest = packed.data.view(packed.pairs, -1)
    values, groups = torch.as_tensor(kind.values).double(), []
    for begin in range(0, packed.depth, packed.group):
        inputs = min(packed.group, packed.depth - begin)
        sizes = [parts * PANEL_COLUMNS * kind.constant_bytes, inputs // UNIT_INPUTS * kind.unit_bytes]
        before, codes, rest = torch.split(rest, [*sizes, rest.shape[1] - sum(sizes)], 1)
        constants = before.contiguous().view(kind.constant_dtype).double().view(packed.pairs, parts, PANEL_COLUMNS, 1)
        units = codes.reshape(packed.pairs, -1, kind.unit_bytes)
        unpacked = unpack_codes(units, kind.bits) if isinstance(kind, CodeKind) else unpack_units(units, kind)
        plain_codes = unpacked.transpose(1, 2)
        dequantized = values[plain_codes.flatten(2).long()] * constants[:, 0]
        groups.append(dequantized + constants[:, 1] if packed.offsets else dequantized)
    return torch.cat(groups, 2).flatten(0, 1)
