"""Packing of any matrix for the CPU kernels: plain ones, and quantized ones as codes."""

from __future__ import annotations

import torch

from pillion.kernels.cpu.products.packed_weight import PLAIN_TYPES, PackedWeight
from pillion.kernels.cpu.products.packing import pack_plain, pack_plain_gated, unpack_plain
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS
from pillion.kernels.cpu.quantized import quantized_packing
from pillion.kernels.torch.quantized_matrix import Matrix, plain

# Kinds of packed weights, in the order of their numbers in files.
KINDS = (*PLAIN_TYPES, *quantized_packing.KINDS)


def panel_bytes(kind: str, depth: int, group: int, offsets: bool) -> int:
    """Return the bytes of a panel of any kind."""
    if kind not in PLAIN_TYPES:
        return quantized_packing.panel_bytes(kind, depth, group, offsets)
    return PANEL_COLUMNS * depth * PLAIN_TYPES[kind].itemsize


def pack_linear(weight: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Pack a matrix [N, K]; bf16 rounds to nearest even.

    ``kind`` is that of ``quantized_packing.packed_kind``: a quantized matrix is dequantized if it is plain. With
    ``offsets``, groups get offsets even if all are 0.
    """
    if kind not in PLAIN_TYPES:
        return quantized_packing.pack_quantized([weight], kind, offsets)
    return pack_plain(plain(weight, torch.float32), kind)


def pack_gated(gate: Matrix, up: Matrix, kind: str, offsets: bool = False) -> PackedWeight:
    """Pack two matrices [N, K] as one matrix of 2 N outputs, with alternating tiles."""
    if kind not in PLAIN_TYPES:
        return quantized_packing.pack_quantized([gate, up], kind, offsets)
    return pack_plain_gated(plain(gate, torch.float32), plain(up, torch.float32), kind)


def unpack(packed: PackedWeight) -> torch.Tensor:
    """Return the columns of a packed matrix [pairs * 32, depth] in packed order, in the kind's type; codes in
    float64."""
    return unpack_plain(packed) if packed.kind in PLAIN_TYPES else quantized_packing.unpack_quantized(packed)
