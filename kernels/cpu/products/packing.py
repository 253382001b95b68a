"""Lays out weight matrices in memory for the products of :mod:`pillion.kernels.cpu.products.gemm`.

A matrix [N outputs, K inputs] is cut into panels of 32 outputs, and a panel into two tiles of 16: one output for each
lane of a vector. Kernels read a panel from its first byte to its last:

    bf16   [N / 32][K / 2][2 tiles][16][2]    a lane's pair: two neighbouring inputs of one output
    fp32   [N / 32][K][2 tiles][16]

N is padded with zeros to a multiple of 32 and K to one of 16. The two matrices of a gated MLP are packed as one: of
each panel, the first tile holds 16 outputs of the gate and the second the same 16 of the other matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS, TILE_COLUMNS
from pillion.kernels.torch.quantized_matrix import Matrix, plain
from pillion.rooms import Seam, entered, entered_one

# Weights that are not in few bits are packed in one of these types.
PLAIN_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Holds a packed matrix.

    Attributes:
        kind: one of :func:`kinds`.
        data: a flat tensor of the kind's type; a multiple of 64 bytes.
        depth: inputs with padding: a row that meets this matrix has zeros after its own values.
        pairs: number of panels, which are pairs of tiles.
        group: inputs of a group of codes, a multiple of 16; 0 for other kinds.
        offsets: whether groups have offsets.
        order: int32 [depth], for each packed input its number in the matrix; None where packed inputs are in the
            matrix's order.
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
        """Returns the number of bytes of ``data``."""
        return self.data.numel() * self.data.element_size()


class FewBitKinds(Protocol):
    """Packs matrices in few bits, and multiplies by them: kinds of panels beside those of plain numbers, whose data are
    bytes.

    Attributes:
        names: the kinds.
    """

    names: tuple[str, ...]

    def kind_of(self, matrices: Sequence[Matrix], wide: str) -> str:
        """Returns the kind in which panels hold all these matrices, ``wide`` where no kind in few bits does."""

    def has_offsets(self, matrix: Matrix, kind: str) -> bool:
        """Returns whether the panels of a matrix need offsets."""

    def pack(self, matrices: Sequence[Matrix], kind: str, offsets: bool) -> PackedWeight:
        """Packs one matrix, or two with their tiles in turn."""

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Returns the columns of a packed matrix in few bits, as :func:`unpack` does for other ones."""

    def panel_bytes(self, kind: str, depth: int, group: int, offsets: bool) -> int:
        """Returns the number of bytes of a panel."""

    def sound(self, kind: str, depth: int, group: int, *, rounded: bool) -> bool:
        """Returns whether the kernels can work with these sizes. ``rounded`` says whether rows become codes."""

    def panels(self, body: Any) -> Any:
        """Makes the object that reads panels of such a kind for a product, a
        :class:`pillion.kernels.cpu.products.gemm.Panels`."""


FEW_BITS = Seam[FewBitKinds]("kernels.cpu.few_bits")


def few_bits(what: str) -> FewBitKinds:
    """Returns the object that packs and multiplies by matrices in few bits. Raises ConfigError where its room is
    gone."""
    return entered_one(FEW_BITS)


def kinds() -> tuple[str, ...]:
    """Returns all kinds of packed weights, in the order of their numbers in files."""
    return (*PLAIN_TYPES, *(name for each in entered(FEW_BITS) for name in each.names))


def exact_kind(weights: Iterable[torch.Tensor], kind: str) -> str:
    """Returns the kind that holds ``weights`` in the least memory without rounding: "bf16" instead of "fp32" where all
    of them are bfloat16 numbers, because products with float32 rows are the same then, and else ``kind``."""
    if kind == "fp32" and all(torch.equal(weight.float(), weight.bfloat16().float()) for weight in weights):
        return "bf16"
    return kind


def panel_bytes(kind: str, depth: int, group: int, offsets: bool) -> int:
    """Returns the number of bytes of a panel."""
    if kind not in PLAIN_TYPES:
        return few_bits(kind).panel_bytes(kind, depth, group, offsets)
    return PANEL_COLUMNS * depth * PLAIN_TYPES[kind].itemsize


def pack_linear(weight: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Packs a matrix [N, K]; bf16 rounds to nearest even.

    A matrix in few bits has the kind that :meth:`FewBitKinds.kind_of` names, or is widened to ``kind``. With
    ``offsets``, groups get offsets even if they are all 0.
    """
    if kind not in PLAIN_TYPES:
        return few_bits(kind).pack([weight], kind, offsets)
    return _pack(_padded(plain(weight, torch.float32), PANEL_COLUMNS), kind)


def pack_gated(gate: Matrix, up: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Packs two matrices [N, K] as one matrix of 2 N outputs, with their tiles in turn."""
    if kind not in PLAIN_TYPES:
        return few_bits(kind).pack([gate, up], kind, offsets)
    return _pack(in_turn(*(_padded(plain(matrix, torch.float32), TILE_COLUMNS) for matrix in (gate, up))), kind)


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """Packs a bias [N] as float32, padded to the number of packed columns."""
    return pad(bias.float(), (0, -len(bias) % PANEL_COLUMNS))


def pack_gated_bias(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Packs two biases [N] as float32, in the order of :func:`pack_gated`."""
    return in_turn(*(pad(bias.float(), (0, -len(bias) % TILE_COLUMNS)) for bias in (gate, up)))


def unpack(packed: PackedWeight) -> torch.Tensor:
    """Returns the columns of a packed matrix [pairs * 32, depth] in packed order, in the kind's type; of codes, in
    float64."""
    if packed.kind not in PLAIN_TYPES:
        return few_bits(packed.kind).unpack(packed)
    steps = packed.data.view(packed.pairs, -1, PANEL_COLUMNS * (1 if packed.kind == "fp32" else 2))
    inputs = steps.reshape(packed.pairs, steps.shape[1], PANEL_COLUMNS, -1)
    return inputs.transpose(1, 2).reshape(packed.pairs * PANEL_COLUMNS, packed.depth)


def _pack(weight: torch.Tensor, kind: str) -> PackedWeight:
    columns, depth = weight.shape
    pairs = columns // PANEL_COLUMNS
    # The columns of a step lie together: [pairs, steps, columns, inputs of a step].
    steps = weight.to(PLAIN_TYPES[kind]).view(pairs, PANEL_COLUMNS, -1, 1 if kind == "fp32" else 2).transpose(1, 2)
    return PackedWeight(kind, steps.reshape(-1), depth, pairs)


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    columns, depth = weight.shape
    return pad(weight, (0, -depth % DEPTH_MULTIPLE, 0, -columns % multiple))


def in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns 16 columns of ``gate``, then 16 of ``up``, and so on."""
    tiles = [matrix.view(-1, TILE_COLUMNS, *matrix.shape[1:]) for matrix in (gate, up)]
    return torch.stack(tiles, 1).flatten(0, 2)
