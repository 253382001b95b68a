"""Lays out a quantized matrix in GPU memory.

    words[unit, output, column] : int32, PER_WORD codes: code i is that of input unit * UNIT + i * COLUMNS + column
    scales, offsets[group, output] : float32

A *unit* is as many inputs as COLUMNS words of a row hold: 256 in 4 bits, 128 in 8. So a kernel that loads a tile
[outputs, COLUMNS] of words, which is one contiguous piece of memory, has PER_WORD tiles of codes by a shift and a mask
each, and every tile belongs to COLUMNS inputs that follow each other. Outputs are padded to multiples of OUTPUTS, and
inputs to whole units, with codes and scales of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# A row has this many words in a unit; it is also the depth of the kernels' products of tiles.
COLUMNS = 32
# Outputs are padded to a multiple of this, the largest tile of the kernels.
OUTPUTS = 128
# A code has this many bits, by coding (pillion.kernels.torch.quantized_matrix.CODINGS).
BITS = {"uint4": 4, "int4": 4, "nf4": 4, "fp4_e2m1": 4, "int8": 8, "fp8_e4m3": 8}
# Groups of other sizes are divided into groups of this many inputs, with equal scales.
LEAST_GROUP = 16


@dataclass(frozen=True, slots=True)
class PackedKind:
    """Describes a packed matrix [outputs, inputs] as far as its size in memory depends on it.

    Attributes:
        group: inputs that share a scale: LEAST_GROUP or a multiple of COLUMNS; 0 for one scale for each output.
    """

    coding: str
    outputs: int
    inputs: int
    group: int

    @property
    def per_word(self) -> int:
        """Returns how many codes are in a word of 32 bits."""
        return 32 // BITS[self.coding]

    @property
    def unit(self) -> int:
        """Returns how many inputs of the matrix one unit has."""
        return COLUMNS * self.per_word

    @property
    def units(self) -> int:
        return -(-self.inputs // self.unit)

    @property
    def padded(self) -> int:
        """Returns how many outputs the packed matrix has, with padding."""
        return -(-self.outputs // OUTPUTS) * OUTPUTS


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Holds a packed matrix.

    Attributes:
        words: int32 [units, padded outputs, COLUMNS].
        scales: float32 [groups, padded outputs].
        offsets: float32, of the shape of ``scales``, or None where all are 0.
        order: int32 [inputs], the input of each column, or None where columns are in order.
    """

    kind: PackedKind
    words: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Returns the matrix's tensors by attribute, without those that are None."""
        found = {"words": self.words, "scales": self.scales, "offsets": self.offsets, "order": self.order}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def can_pack(matrix: QuantizedMatrix) -> bool:
    """Returns whether the kernels multiply by this matrix: its groups have all of its inputs, or a multiple of
    LEAST_GROUP."""
    return matrix.group % LEAST_GROUP == 0 or matrix.group >= matrix.shape[1]


def pack(matrix: QuantizedMatrix) -> PackedMatrix:
    """Packs a matrix for which :func:`can_pack` holds."""
    assert can_pack(matrix)
    outputs, inputs = matrix.shape
    whole = matrix.group >= inputs
    group = 0 if whole else matrix.group if matrix.group % COLUMNS == 0 else LEAST_GROUP
    kind = PackedKind(matrix.coding, outputs, inputs, group)
    codes = matrix.codes
    if matrix.coding == "int8":
        # An int8 code is stored as a number from 0 on, as all whole numbers are here; the kernel subtracts 128.
        codes = codes ^ 0x80
    codes = pad(codes, (0, kind.units * kind.unit - inputs, 0, kind.padded - outputs))
    places = codes.view(kind.padded, kind.units, kind.per_word, COLUMNS)
    words = torch.zeros(kind.units, kind.padded, COLUMNS, dtype=torch.int32)
    for place in range(kind.per_word):
        words |= places[:, :, place].transpose(0, 1).int() << (BITS[matrix.coding] * place)

    def columns(values: torch.Tensor) -> torch.Tensor:
        """Turns float32 [outputs, groups] into [groups, padded outputs], with groups for the padding of the inputs."""
        spread = values if whole else values.repeat_interleave(matrix.group // group, 1)
        groups = 1 if whole else -(-kind.units * kind.unit // group)
        return pad(spread[:, :groups], (0, max(0, groups - spread.shape[1]), 0, kind.padded - outputs)).T.contiguous()

    return PackedMatrix(
        kind,
        words,
        columns(matrix.scales),
        None if matrix.offsets is None else columns(matrix.offsets),
        None if matrix.order is None else matrix.order.int(),
    )
