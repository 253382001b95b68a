"""The layout of weight matrices in memory for the products of :mod:`pillion.kernels.cpu.products.gemm`.

A matrix [N outputs, K inputs] is cut into panels of 32 outputs, and a panel into two tiles of 16: one output for each
lane of a vector. Kernels read a panel from its first byte to its last:

    bf16   [N / 32][K / 2][2 tiles][16][2]    a lane's pair: two neighbouring inputs of one output
    fp32   [N / 32][K][2 tiles][16]
    int8   [N / 32][K / 2][64]                a line of 32 outputs and 2 inputs (pillion.kernels.cpu.products.int8),
                                              and one float32 scale for each output

N is padded with zeros to a multiple of 32 and K to one of 16. The two matrices of a gated MLP are packed as one: of
each panel, the first tile holds 16 outputs of the gate and the second the same 16 of the other matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from pillion.kernels.cpu.products.int8 import pack_lines, quantize, unpack_lines

TILE_COLUMNS = 16
PANEL_COLUMNS = 2 * TILE_COLUMNS
DEPTH_MULTIPLE = 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.uint8}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix.

    Attributes:
        kind: "bf16", "fp32" or "int8".
        data: [pairs * depth * 32], contiguous, of the kind's type; a multiple of 64 bytes.
        scales: float32 [pairs * 32] of int8 weights, in the order of the packed columns, else None.
        depth: inputs with padding: a row that meets this matrix has zeros behind its own values.
        pairs: number of panels, which are pairs of tiles.
    """

    kind: str
    data: torch.Tensor
    scales: torch.Tensor | None
    depth: int
    pairs: int

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


def pack_linear(weight: torch.Tensor, kind: str) -> PackedWeight:
    """Packs a matrix [N, K] of any floating-point type; bf16 rounds to nearest even."""
    return _pack(_padded(weight, PANEL_COLUMNS), kind)


def pack_gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> PackedWeight:
    """Packs two matrices [N, K] as one matrix of 2 N outputs, with their tiles in turn."""
    return _pack(_in_turn(_padded(gate, TILE_COLUMNS), _padded(up, TILE_COLUMNS)), kind)


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """Packs a bias [N] as float32, padded to the number of packed columns."""
    return pad(bias.float(), (0, -len(bias) % PANEL_COLUMNS))


def pack_gated_bias(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Packs two biases [N] as float32, in the order of :func:`pack_gated`."""
    return _in_turn(*(pad(bias.float(), (0, -len(bias) % TILE_COLUMNS)) for bias in (gate, up)))


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The columns of a packed matrix [pairs * 32, depth] in packed order, without scales: int8 weights as quanta."""
    steps = packed.data.view(packed.pairs, -1, PANEL_COLUMNS * (1 if packed.kind == "fp32" else 2))
    if packed.kind == "int8":
        steps = unpack_lines(steps)
    inputs = steps.reshape(packed.pairs, steps.shape[1], PANEL_COLUMNS, -1)
    return inputs.transpose(1, 2).reshape(packed.pairs * PANEL_COLUMNS, packed.depth)


def _pack(weight: torch.Tensor, kind: str) -> PackedWeight:
    columns, depth = weight.shape
    pairs = columns // PANEL_COLUMNS
    scales = None
    if kind == "int8":
        weight, scales = quantize(weight)
    else:
        weight = weight.to(DTYPES[kind])
    # [pairs, steps, columns, inputs of a step]
    steps = weight.view(pairs, PANEL_COLUMNS, -1, 1 if kind == "fp32" else 2).transpose(1, 2)
    data = pack_lines(steps) if kind == "int8" else steps
    return PackedWeight(kind, data.reshape(-1), scales, depth, pairs)


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    columns, depth = weight.shape
    return pad(weight, (0, -depth % DEPTH_MULTIPLE, 0, -columns % multiple))


def _in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 columns of ``gate``, 16 of ``up``, and so on."""
    tiles = [matrix.view(-1, TILE_COLUMNS, *matrix.shape[1:]) for matrix in (gate, up)]
    return torch.stack(tiles, 1).flatten(0, 2)
