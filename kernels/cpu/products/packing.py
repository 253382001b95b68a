"""The layout of weight matrices in memory for the products of :mod:`pillion.kernels.cpu.products.gemm`.

A matrix [N outputs, K inputs] is cut into panels of 32 outputs, and a panel into two tiles of 16: one output for each
lane of a vector. Kernels read a panel from its first byte to its last:

    bf16   [N / 32][K / 2][2 tiles][16][2]    a lane's pair: two neighbouring inputs of one output
    fp32   [N / 32][K][2 tiles][16]
    codes  [N / 32][groups of inputs]: scales [2 tiles][16], such offsets where the matrix has them, and the codes of
           the group's inputs (pillion.kernels.cpu.products.codes)

N is padded with zeros to a multiple of 32 and K to one of 16. The two matrices of a gated MLP are packed as one: of
each panel, the first tile holds 16 outputs of the gate and the second the same 16 of the other matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, plain, same_order

TILE_COLUMNS = 16
PANEL_COLUMNS = 2 * TILE_COLUMNS
DEPTH_MULTIPLE = 16
# Bytes of a panel's sums of one row.
TOTALS_BYTES = 4 * PANEL_COLUMNS
# A thread's scratch has room for a widened group of so many inputs; larger groups are packed as several.
MAX_GROUP_INPUTS = 512
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32} | dict.fromkeys(CODE_KINDS, torch.uint8)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix.

    Attributes:
        kind: "bf16", "fp32" or a key of ``CODE_KINDS``.
        data: a flat tensor of the kind's type; a multiple of 64 bytes.
        depth: inputs with padding: a row that meets this matrix has zeros behind its own values.
        pairs: number of panels, which are pairs of tiles.
        group: inputs of a group of codes, a multiple of 16; 0 for floating point.
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
    if kind not in CODE_KINDS:
        return PANEL_COLUMNS * depth * DTYPES[kind].itemsize
    constants = -(-depth // group) * PANEL_COLUMNS * CODE_KINDS[kind].constant_bytes * (2 if offsets else 1)
    return constants + depth // UNIT_INPUTS * CODE_KINDS[kind].unit_bytes


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
    codes = codes_of(first.coding, (matrix.codes for matrix in quantized))
    for name in (f"{codes}_half", f"{first.coding}_half"):
        kind = CODE_KINDS.get(name)
        if kind and all(_holds(kind, part) for matrix in quantized for part in _constants(matrix, kind)):
            return name
    return codes


def has_offsets(matrix: Matrix, kind: str) -> bool:
    """Whether the panels of a matrix need offsets."""
    return kind in CODE_KINDS and isinstance(matrix, QuantizedMatrix) and bool(_offsets(matrix, CODE_KINDS[kind]).any())


def pack_linear(weight: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Packs a matrix [N, K]; bf16 rounds to nearest even.

    A matrix in few bits has the kind that :func:`packed_kind` names, or is widened to ``kind``. ``offsets``: groups get
    offsets even if they are all 0.
    """
    if kind in CODE_KINDS:
        assert isinstance(weight, QuantizedMatrix)
        return _pack_codes([weight], kind, offsets)
    return _pack(_padded(plain(weight, torch.float32), PANEL_COLUMNS), kind)


def pack_gated(gate: Matrix, up: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Packs two matrices [N, K] as one matrix of 2 N outputs, with their tiles in turn."""
    if kind in CODE_KINDS:
        assert isinstance(gate, QuantizedMatrix)
        assert isinstance(up, QuantizedMatrix)
        return _pack_codes([gate, up], kind, offsets)
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
    steps = packed.data.view(packed.pairs, -1, PANEL_COLUMNS * (1 if packed.kind == "fp32" else 2))
    inputs = steps.reshape(packed.pairs, steps.shape[1], PANEL_COLUMNS, -1)
    return inputs.transpose(1, 2).reshape(packed.pairs * PANEL_COLUMNS, packed.depth)


def _pack(weight: torch.Tensor, kind: str) -> PackedWeight:
    columns, depth = weight.shape
    pairs = columns // PANEL_COLUMNS
    # [pairs, steps, columns, inputs of a step]
    steps = weight.to(DTYPES[kind]).view(pairs, PANEL_COLUMNS, -1, 1 if kind == "fp32" else 2).transpose(1, 2)
    return PackedWeight(kind, steps.reshape(-1), depth, pairs)


def _pack_codes(matrices: Sequence[QuantizedMatrix], kind_name: str, offsets: bool) -> PackedWeight:
    """Packs one matrix, or two with their tiles in turn."""
    first, kind = matrices[0], CODE_KINDS[kind_name]
    inputs = first.shape[1]
    depth = inputs + -inputs % DEPTH_MULTIPLE
    group = min(_packed_group(first), depth)
    offsets = offsets or any(has_offsets(matrix, kind_name) for matrix in matrices)
    source = (torch.arange(0, depth, group) // first.group).clamp(max=first.scales.shape[1] - 1)

    def panels(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, inputs or groups] -> [pairs, 32, the same]."""
        tile = PANEL_COLUMNS if len(parts) == 1 else TILE_COLUMNS
        wide = [pad(part, (0, 0, 0, -len(part) % tile)) for part in parts]
        packed = wide[0] if len(wide) == 1 else in_turn(*wide)
        return packed.view(-1, PANEL_COLUMNS, packed.shape[1])

    codes = panels([pad(kept_codes(first.coding, matrix.codes, kind), (0, depth - inputs)) for matrix in matrices])
    units = pack_codes(codes.view(len(codes), PANEL_COLUMNS, -1, UNIT_INPUTS).transpose(1, 2), kind.bits)
    parts = list(zip(*(_constants(matrix, kind) for matrix in matrices), strict=True))[: 2 if offsets else 1]
    constants = [panels([matrix[:, source] for matrix in part]).to(kind.constant_dtype) for part in parts]
    before = torch.cat([part.transpose(1, 2).contiguous().view(torch.uint8) for part in constants], 2)
    stream, step = units.flatten(1), group // UNIT_INPUTS * kind.unit_bytes
    pieces = [piece for number in range(len(source))
              for piece in (before[:, number], stream[:, number * step : (number + 1) * step])]  # fmt: skip
    order = None
    if first.order is not None:
        order = torch.cat((first.order, torch.arange(inputs, depth))).to(torch.int32)
    return PackedWeight(kind.name, torch.cat(pieces, 1).flatten(), depth, len(units), group, offsets, order)


def _packed_group(matrix: QuantizedMatrix) -> int:
    """The inputs of a packed group: as many of a group's as the kernels take. 0: they take no such group."""
    if matrix.group >= matrix.shape[1]:
        return MAX_GROUP_INPUTS
    fitting = range(DEPTH_MULTIPLE, MAX_GROUP_INPUTS + 1, DEPTH_MULTIPLE)
    return max((size for size in fitting if not matrix.group % size), default=0)


def _constants(matrix: QuantizedMatrix, kind: CodeKind) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and offsets [N, groups] of kept codes, float32."""
    return matrix.scales * kind.scale, _offsets(matrix, kind)


def _offsets(matrix: QuantizedMatrix, kind: CodeKind) -> torch.Tensor:
    offsets = torch.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets
    return offsets + 8 * matrix.scales if (matrix.coding, kind.codes) == ("uint4", "int4") else offsets


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
