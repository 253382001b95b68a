"""Conversion of GGUF's quantized blocks to quantized matrices, bit-exact with the gguf package.

A row of a matrix is a sequence of blocks; a block has a few float16 values and the codes of 32 or 256 inputs. Layouts
are those of ggml-quants.h of llama.cpp. In all of them

    weight = scale * code + offset

and float32 represents the product exactly, so any order of operations gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# Codes [blocks, inputs per block], scales [blocks, groups per block], and offsets of the scales' shape or None.
Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layout of a quantized type of GGUF.

    Attributes:
        coding: key of :data:`pillion.kernels.torch.quantized_matrix.CODINGS`.
        group: inputs per scale.
        read: unpacks uint8 [blocks, block_bytes].
    """

    block_bytes: int
    coding: str
    group: int
    read: Callable[[torch.Tensor], Unpacked]


def read_blocks(layout: BlockLayout, data: torch.Tensor) -> QuantizedMatrix:
    """Convert the blocks of a matrix, uint8 [N, bytes per row], to a quantized matrix [N, K]."""
    codes, scales, offsets = layout.read(data.reshape(-1, layout.block_bytes))
    rows = len(data)
    return QuantizedMatrix(
        layout.coding,
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        layout.group,
        None if offsets is None else offsets.reshape(rows, -1),
    )


def reorder_inputs(matrix: QuantizedMatrix, order: torch.Tensor) -> QuantizedMatrix | None:
    """Return a matrix whose input k is input ``order[k]`` of ``matrix``; None if the order divides a group."""
    groups = order.view(-1, matrix.group)
    first = groups[:, 0]
    if not torch.equal(groups, first[:, None] + torch.arange(matrix.group)) or bool((first % matrix.group).any()):
        return None
    scales, offsets = (
        None if values is None else values[:, first // matrix.group] for values in (matrix.scales, matrix.offsets)
    )
    assert scales is not None
    return replace(matrix, codes=matrix.codes[:, order], scales=scales, offsets=offsets)


def _float16_at(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 value at byte ``at`` of each block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [..., n] to [..., 2 n]: all lower nibbles, then all upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the 32 bits at byte ``at`` of each block, shifted to the fifth bit of a code: [blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    return _nibbles(blocks[:, 2:]), _float16_at(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Unpacked:
    return _nibbles(blocks[:, 4:]), _float16_at(blocks, 0), _float16_at(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Unpacked:
    # uint8 wraps around: the two's complement of a code below 16.
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) - 16, _float16_at(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Unpacked:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _float16_at(blocks, 0), _float16_at(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    return blocks[:, 2:], _float16_at(blocks, 0), None


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes.flatten(1), *_scales_and_offsets(blocks)


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Bit g of byte i is the fifth bit of input i in group g.
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return (low | high << 4).flatten(1), *_scales_and_offsets(blocks)


def _q6_k(blocks: torch.Tensor) -> Unpacked:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    scales = _float16_at(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return ((low | high << 4) - 32).flatten(1), scales, None


def _mxfp4(blocks: torch.Tensor) -> Unpacked:
    exponents = blocks[:, :1].int() - 127
    return _nibbles(blocks[:, 1:]), torch.ldexp(torch.ones(len(blocks), 1), exponents), None


def _scales_and_offsets(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and offsets [blocks, 8] of Q4_K and Q5_K: two float16 values, and 6 bits per group packed in 12
    bytes. The upper two bits of the last four groups are in the bytes of the first four."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), 1)
    offsets = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), 1)
    return _float16_at(blocks, 0) * scales.float(), -(_float16_at(blocks, 2) * offsets.float())


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(18, "int4", 32, _q4_0),
    "Q4_1": BlockLayout(20, "uint4", 32, _q4_1),
    "Q5_0": BlockLayout(22, "int8", 32, _q5_0),
    "Q5_1": BlockLayout(24, "int8", 32, _q5_1),
    "Q8_0": BlockLayout(34, "int8", 32, _q8_0),
    "Q4_K": BlockLayout(144, "uint4", 32, _q4_k),
    "Q5_K": BlockLayout(176, "int8", 32, _q5_k),
    "Q6_K": BlockLayout(210, "int8", 16, _q6_k),
    "MXFP4": BlockLayout(17, "fp4_e2m1", 32, _mxfp4),
}
