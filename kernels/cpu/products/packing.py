"""The layout of weight matrices in memory for the products of :mod:`pillion.kernels.cpu.products.gemm`.

A matrix [N outputs, K inputs] is cut into panels of 32 outputs, and a panel into two tiles of 16: one output for each
lane of a vector. Kernels read a panel from its first byte to its last:

    bf16   [N / 32][K / 2][2 tiles][16][2]    a lane's pair: two neighbouring inputs of one output
    fp32   [N / 32][K][2 tiles][16]
    int8_dots  [N / 32]: float32 scales [2 tiles][16], int32 sums of each output's codes, float32 offsets where the
           matrix has them, and the codes [K / 4][2 tiles][16][4], each with 128 added; a product in integers reads them
    codes  [N / 32][groups of inputs]: scales [2 tiles][16], such offsets where the matrix has them, and the codes of
           the group's inputs (pillion.kernels.cpu.products.codes)

N is padded with zeros to a multiple of 32 and K to one of 16. The two matrices of a gated MLP are packed as one: of
each panel, the first tile holds 16 outputs of the gate and the second the same 16 of the other matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from pillion.kernels.cpu.products.codes import (
    CODE_KINDS,
    UNIT_INPUTS,
    CodeKind,
    codes_of,
    kept_codes,
    pack_codes,
    unpack_codes,
)
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS, TILE_COLUMNS
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, plain, row_codes_of, same_order

# The most inputs whose products of codes, 255 * 128 each, add up to an integer of 32 bits.
MAX_DOT_INPUTS = 2**31 // (255 * 128)
# Bytes of a panel's sums of one row.
TOTALS_BYTES = 4 * PANEL_COLUMNS
# A thread's scratch has room for a widened group of so many inputs; larger groups are packed as several.
MAX_GROUP_INPUTS = 512
# The kind of weights in int8 with a scale for each output, which rows of int8 meet.
INT8_DOTS = "int8_dots"
# Kinds of packed weights that only matrices in few bits have.
FEW_BITS = (*CODE_KINDS, INT8_DOTS)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32} | dict.fromkeys(FEW_BITS, torch.uint8)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix.

    Attributes:
        kind: "bf16", "fp32", ``INT8_DOTS`` or a key of ``CODE_KINDS``.
        data: a flat tensor of the kind's type; a multiple of 64 bytes.
        depth: inputs with padding: a row that meets this matrix has zeros behind its own values.
        pairs: number of panels, which are pairs of tiles.
        group: inputs of a group of codes, a multiple of 16; 0 for other kinds.
        offsets: whether groups have offsets.
        order: int32 [depth], the input that each packed input is, or None where inputs are in order.
    """

    kind: str
    data: torch.Tensor
    depth: int
    pairs: int
    group: int = 0
    offsets: bool = False
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of ``data``."""
        return self.data.numel() * self.data.element_size()


def exact_kind(weights: Iterable[torch.Tensor], kind: str) -> str:
    """The kind that holds ``weights`` in least memory: "bf16" instead of "fp32" where all of them are bfloat16 numbers,
    because products with float32 rows are the same then, and else ``kind``."""
    if kind == "fp32" and all(torch.equal(weight.float(), weight.bfloat16().float()) for weight in weights):
        return "bf16"
    return kind


def panel_bytes(kind: str, depth: int, group: int, offsets: bool) -> int:
    """Bytes of a panel."""
    if kind == INT8_DOTS:
        return dots_constants_bytes(offsets) + depth * PANEL_COLUMNS
    if kind not in CODE_KINDS:
        return PANEL_COLUMNS * depth * DTYPES[kind].itemsize
    constants = -(-depth // group) * PANEL_COLUMNS * CODE_KINDS[kind].constant_bytes * (2 if offsets else 1)
    return constants + depth // UNIT_INPUTS * CODE_KINDS[kind].unit_bytes


def dots_constants_bytes(offsets: bool) -> int:
    """Bytes of a panel of ``INT8_DOTS`` before its codes."""
    return TOTALS_BYTES * (3 if offsets else 2)


def packed_kind(matrices: Sequence[Matrix], wide: str) -> str:
    """The kind in which panels hold all these matrices: ``wide`` where one is not in few bits, where they differ in
    their groups or in the order of their inputs, or where vectors do not divide a group."""
    first, quantized = matrices[0], [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    if not isinstance(first, QuantizedMatrix) or len(quantized) < len(matrices):
        return wide
    for matrix in quantized:
        if (matrix.coding, matrix.group) != (first.coding, first.group) or not _packed_group(matrix):
            return wide
        if not same_order(matrix, first):
            return wide
    if row_codes_of(matrices) is not None and all(map(_fits_dots, matrices)):
        return INT8_DOTS
    codes = codes_of(first.coding, (matrix.codes for matrix in quantized))
    for name in (f"{codes}_half", f"{first.coding}_half"):
        kind = CODE_KINDS.get(name)
        if kind and all(_holds(kind, part) for matrix in quantized for part in _constants(matrix, kind)):
            return name
    return codes


def _fits_dots(matrix: Matrix) -> bool:
    """Whether sums of products of codes are all that scales of rows and outputs are applied to."""
    assert isinstance(matrix, QuantizedMatrix)
    return matrix.coding == "int8" and matrix.group >= matrix.shape[1] <= MAX_DOT_INPUTS


def has_offsets(matrix: Matrix, kind: str) -> bool:
    """Whether the panels of a matrix need offsets."""
    return kind in FEW_BITS and isinstance(matrix, QuantizedMatrix) and bool(_offsets(matrix, kind).any())


def pack_linear(weight: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Packs a matrix [N, K]; bf16 rounds to nearest even.

    A matrix in few bits has the kind that :func:`packed_kind` names, or is widened to ``kind``. ``offsets``: groups get
    offsets even if they are all 0.
    """
    if kind in FEW_BITS:
        assert isinstance(weight, QuantizedMatrix)
        return _pack_few_bits([weight], kind, offsets)
    return _pack(_padded(plain(weight, torch.float32), PANEL_COLUMNS), kind)


def pack_gated(gate: Matrix, up: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Packs two matrices [N, K] as one matrix of 2 N outputs, with their tiles in turn."""
    if kind in FEW_BITS:
        assert isinstance(gate, QuantizedMatrix)
        assert isinstance(up, QuantizedMatrix)
        return _pack_few_bits([gate, up], kind, offsets)
    return _pack(in_turn(*(_padded(plain(matrix, torch.float32), TILE_COLUMNS) for matrix in (gate, up))), kind)


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """Packs a bias [N] as float32, padded to the number of packed columns."""
    return pad(bias.float(), (0, -len(bias) % PANEL_COLUMNS))


def pack_gated_bias(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Packs two biases [N] as float32, in the order of :func:`pack_gated`."""
    return in_turn(*(pad(bias.float(), (0, -len(bias) % TILE_COLUMNS)) for bias in (gate, up)))


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The columns of a packed matrix [pairs * 32, depth] in packed order, in the kind's type; of codes, in float64."""
    if packed.kind in CODE_KINDS:
        return _unpack_codes(packed)
    if packed.kind == INT8_DOTS:
        scales, _, *offsets, codes = _dots_parts(packed)
        wide = (codes - 128.0).double() * scales.view(torch.float32).double()[..., None]
        return (wide + offsets[0].view(torch.float32).double()[..., None] if offsets else wide).flatten(0, 1)
    steps = packed.data.view(packed.pairs, -1, PANEL_COLUMNS * (1 if packed.kind == "fp32" else 2))
    inputs = steps.reshape(packed.pairs, steps.shape[1], PANEL_COLUMNS, -1)
    return inputs.transpose(1, 2).reshape(packed.pairs * PANEL_COLUMNS, packed.depth)


def _pack(weight: torch.Tensor, kind: str) -> PackedWeight:
    columns, depth = weight.shape
    pairs = columns // PANEL_COLUMNS
    # [pairs, steps, columns, inputs of a step]
    steps = weight.to(DTYPES[kind]).view(pairs, PANEL_COLUMNS, -1, 1 if kind == "fp32" else 2).transpose(1, 2)
    return PackedWeight(kind, steps.reshape(-1), depth, pairs)


def _pack_few_bits(matrices: Sequence[QuantizedMatrix], kind: str, offsets: bool) -> PackedWeight:
    """Packs one matrix, or two with their tiles in turn."""
    first = matrices[0]
    offsets = offsets or any(has_offsets(matrix, kind) for matrix in matrices)
    packed = _pack_dots(matrices, offsets) if kind == INT8_DOTS else _pack_codes(matrices, kind, offsets)
    if first.order is None:
        return packed
    return replace(packed, order=torch.cat((first.order, torch.arange(first.shape[1], packed.depth))).to(torch.int32))


def _panels(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[N, inputs or groups], of one matrix, or of two with their tiles in turn -> [pairs, 32, the same]."""
    tile = PANEL_COLUMNS if len(parts) == 1 else TILE_COLUMNS
    wide = [pad(part, (0, 0, 0, -len(part) % tile)) for part in parts]
    packed = wide[0] if len(wide) == 1 else in_turn(*wide)
    return packed.view(-1, PANEL_COLUMNS, packed.shape[1])


def _pack_dots(matrices: Sequence[QuantizedMatrix], offsets: bool) -> PackedWeight:
    inputs = matrices[0].shape[1]
    depth = inputs + -inputs % DEPTH_MULTIPLE
    codes = _panels([pad(matrix.codes.view(torch.int8), (0, depth - inputs)) for matrix in matrices])
    units = (codes.view(torch.uint8) ^ 128).view(len(codes), PANEL_COLUMNS, -1, UNIT_INPUTS).transpose(1, 2)
    constants = [_panels([matrix.scales for matrix in matrices]), codes.sum(2, dtype=torch.int32)]
    if offsets:
        constants.append(_panels([_offsets(matrix, INT8_DOTS) for matrix in matrices]))
    before = [part.reshape(len(codes), PANEL_COLUMNS).view(torch.uint8) for part in constants]
    return PackedWeight(INT8_DOTS, torch.cat([*before, units.flatten(1)], 1).flatten(), depth, len(codes), 0, offsets)


def _dots_parts(packed: PackedWeight) -> tuple[torch.Tensor, ...]:
    """Scales, sums and perhaps offsets, uint8 [pairs, 32 * 4], and the codes [pairs, 32, depth]."""
    constants = dots_constants_bytes(packed.offsets)
    whole = packed.data.view(packed.pairs, -1)
    units = whole[:, constants:].reshape(packed.pairs, -1, PANEL_COLUMNS, UNIT_INPUTS)
    codes = units.transpose(1, 2).reshape(packed.pairs, PANEL_COLUMNS, packed.depth)
    return *(part.contiguous() for part in torch.split(whole[:, :constants], TOTALS_BYTES, 1)), codes


def _pack_codes(matrices: Sequence[QuantizedMatrix], kind_name: str, offsets: bool) -> PackedWeight:
    first, kind = matrices[0], CODE_KINDS[kind_name]
    inputs = first.shape[1]
    depth = inputs + -inputs % DEPTH_MULTIPLE
    group = min(_packed_group(first), depth)
    source = (torch.arange(0, depth, group) // first.group).clamp(max=first.scales.shape[1] - 1)
    codes = _panels([pad(kept_codes(first.coding, matrix.codes, kind), (0, depth - inputs)) for matrix in matrices])
    units = pack_codes(codes.view(len(codes), PANEL_COLUMNS, -1, UNIT_INPUTS).transpose(1, 2), kind.bits)
    parts = list(zip(*(_constants(matrix, kind) for matrix in matrices), strict=True))[: 2 if offsets else 1]
    constants = [_panels([matrix[:, source] for matrix in part]).to(kind.constant_dtype) for part in parts]
    before = torch.cat([part.transpose(1, 2).contiguous().view(torch.uint8) for part in constants], 2)
    stream, step = units.flatten(1), group // UNIT_INPUTS * kind.unit_bytes
    pieces = [piece for number in range(len(source))
              for piece in (before[:, number], stream[:, number * step : (number + 1) * step])]  # fmt: skip
    return PackedWeight(kind.name, torch.cat(pieces, 1).flatten(), depth, len(units), group, offsets)


def _packed_group(matrix: QuantizedMatrix) -> int:
    """The inputs of a packed group: as many of a group's as the kernels take. 0: they take no such group."""
    if matrix.group >= matrix.shape[1]:
        return MAX_GROUP_INPUTS
    fitting = range(DEPTH_MULTIPLE, MAX_GROUP_INPUTS + 1, DEPTH_MULTIPLE)
    return max((size for size in fitting if not matrix.group % size), default=0)


def _constants(matrix: QuantizedMatrix, kind: CodeKind) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and offsets [N, groups] of kept codes, float32."""
    return matrix.scales * kind.scale, _offsets(matrix, kind.name)


def _offsets(matrix: QuantizedMatrix, kind: str) -> torch.Tensor:
    offsets = torch.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets
    shifted = matrix.coding == "uint4" and CODE_KINDS[kind].codes == "int4"
    return offsets + 8 * matrix.scales if shifted else offsets


def _holds(kind: CodeKind, constants: torch.Tensor) -> bool:
    """Whether the kind's constants are exactly these."""
    return torch.equal(constants.to(kind.constant_dtype).float(), constants)


def _unpack_codes(packed: PackedWeight) -> torch.Tensor:
    kind, parts = CODE_KINDS[packed.kind], 2 if packed.offsets else 1
    rest = packed.data.view(packed.pairs, -1)
    values, found = torch.tensor(kind.values).double(), []
    for begin in range(0, packed.depth, packed.group):
        inputs = min(packed.group, packed.depth - begin)
        sizes = [parts * PANEL_COLUMNS * kind.constant_bytes, inputs // UNIT_INPUTS * kind.unit_bytes]
        before, codes, rest = torch.split(rest, [*sizes, rest.shape[1] - sum(sizes)], 1)
        constants = before.contiguous().view(kind.constant_dtype).double().view(packed.pairs, parts, PANEL_COLUMNS, 1)
        plain_codes = unpack_codes(codes.reshape(packed.pairs, -1, kind.unit_bytes), kind.bits).transpose(1, 2)
        wide = values[plain_codes.flatten(2).long()] * constants[:, 0]
        found.append(wide + constants[:, 1] if packed.offsets else wide)
    return torch.cat(found, 2).flatten(0, 1)


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    columns, depth = weight.shape
    return pad(weight, (0, -depth % DEPTH_MULTIPLE, 0, -columns % multiple))


def in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 columns of ``gate``, 16 of ``up``, and so on."""
    tiles = [matrix.view(-1, TILE_COLUMNS, *matrix.shape[1:]) for matrix in (gate, up)]
    return torch.stack(tiles, 1).flatten(0, 2)
