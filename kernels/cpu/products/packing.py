"""Memory layouts of weight matrices for the products of :mod:`pillion.kernels.cpu.products.gemm`.

A matrix [N outputs, K inputs] is cut into panels of 32 outputs, and a panel into two tiles of 16: one output for each
lane of a vector. Kernels read a panel from its first byte to its last:

    bf16   [N / 32][K / 2][2 tiles][16][2]    a lane's pair: two neighbouring inputs of one output
    fp32   [N / 32][K][2 tiles][16]

N is padded with zeros to a multiple of 32, and K to a multiple of 16. The two matrices of a gated MLP are packed as
one: in each panel, the first tile is 16 outputs of the gate projection, and the second the same 16 of the up
projection.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from pillion.kernels.cpu.products.packed_weight import PLAIN_TYPES, PackedWeight, interleave_tiles
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS, TILE_COLUMNS
from pillion.kernels.state_pieces import PIECE_CHANNELS


def exact_kind(weights: Iterable[torch.Tensor], kind: str) -> str:
    """Return the smallest kind that represents ``weights`` exactly: "bf16" instead of "fp32" if all are bfloat16
    numbers, since products with float32 rows then have the same bits; else ``kind``."""
    if kind == "fp32" and all(torch.equal(weight.float(), weight.bfloat16().float()) for weight in weights):
        return "bf16"
    return kind


def pack_plain(weight: torch.Tensor, kind: str) -> PackedWeight:
    """Pack a float32 matrix [N, K]; bf16 rounds to nearest even."""
    return _pack(_padded(weight, PANEL_COLUMNS), kind)


def pack_plain_gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> PackedWeight:
    """Pack two float32 matrices [N, K] as one matrix of 2 N outputs, with alternating tiles."""
    return _pack(interleave_tiles(*(_padded(matrix, TILE_COLUMNS) for matrix in (gate, up))), kind)


def pack_taps(factors: torch.Tensor) -> torch.Tensor:
    """Pack the factors [channels, taps] of a convolution, or its bias [channels, 1], as float32 [taps, channels padded
    to whole pieces]."""
    return pad(factors.float().t(), (0, -len(factors) % PIECE_CHANNELS)).contiguous()


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """Pack a bias [N] as float32, padded to the number of packed columns."""
    return pad(bias.float(), (0, -len(bias) % PANEL_COLUMNS))


def pack_gated_bias(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Pack two biases [N] as float32, in the order of :func:`pack_plain_gated`."""
    return interleave_tiles(*(pad(bias.float(), (0, -len(bias) % TILE_COLUMNS)) for bias in (gate, up)))


def unpack_plain(packed: PackedWeight) -> torch.Tensor:
    """Return the columns of a packed matrix [pairs * 32, depth] in packed order, in the kind's type."""
    steps = packed.data.view(packed.pairs, -1, PANEL_COLUMNS * (1 if packed.kind == "fp32" else 2))
    inputs = steps.reshape(packed.pairs, steps.shape[1], PANEL_COLUMNS, -1)
    return inputs.transpose(1, 2).reshape(packed.pairs * PANEL_COLUMNS, packed.depth)


def _pack(weight: torch.Tensor, kind: str) -> PackedWeight:
    columns, depth = weight.shape
    pairs = columns // PANEL_COLUMNS
    # The columns of a step are adjacent: [pairs, steps, columns, inputs of a step].
    steps = weight.to(PLAIN_TYPES[kind]).view(pairs, PANEL_COLUMNS, -1, 1 if kind == "fp32" else 2).transpose(1, 2)
    return PackedWeight(kind, steps.reshape(-1), depth, pairs)


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    columns, depth = weight.shape
    return pad(weight, (0, -depth % DEPTH_MULTIPLE, 0, -columns % multiple))
