"""Layouts of 4-bit and 8-bit codes for products with int8 rows, whose sums are integers.

A panel is a sequence of groups of inputs. A group has scales [2 tiles][16], offsets [2 tiles][16] if the matrix has
them, and codes, unit by unit; a unit is 4 inputs of the 32 outputs of a panel.

    4 bits   a line of 64 bytes [16 lanes][4 inputs]: the first tile in the lower halves of bytes, the second in the
    upper 8 bits   a line for each tile [16 lanes][4 inputs]

Codes are stored unsigned, as processors' products require: larger by the kind's ``bias``. The initial value of a sum is
minus the bias times the sum of the row's codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Kernel, Ptr, Quads, int_lanes
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.quantized.codes import UNIT_INPUTS
from pillion.kernels.cpu.quantized.input_rows import CODE_BIAS
from pillion.kernels.torch.quantized_matrix import CODINGS


@dataclass(frozen=True, slots=True)
class DotKind:
    """Packing of codes whose products with int8 rows are summed group by group.

    Attributes:
        coding: a key of :data:`pillion.kernels.torch.quantized_matrix.CODINGS`.
        bits: 4 or 8.
        bias: stored codes minus the integers that they represent.
        scale: factor by which packing multiplies the scales; the represented integers are larger by its inverse.
        constant_bytes: 4 for float32 scales and offsets, 2 for float16.
    """

    coding: str
    bits: int
    bias: int
    scale: float = 1.0
    constant_bytes: int = 4

    @property
    def name(self) -> str:
        """The kind of the packed weights."""
        return f"{self.coding}_dots_by_group{'_half' * (self.constant_bytes == 2)}"

    @property
    def constant_dtype(self) -> torch.dtype:
        """The type of scales and offsets."""
        return torch.float16 if self.constant_bytes == 2 else torch.float32

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of packed codes."""
        return 2 * LANES * UNIT_INPUTS * self.bits // 8

    @property
    def values(self) -> torch.Tensor:
        """The integers that a coding's codes represent, int32 [16] or [256]."""
        return (CODINGS[self.coding] / self.scale).to(torch.int32)


def _dot_kinds() -> Iterator[DotKind]:
    for kind in (
        DotKind("uint4", 4, 0),
        DotKind("int4", 4, 8),
        DotKind("fp4_e2m1", 4, 12, 0.5),
        DotKind("int8", 8, CODE_BIAS),
    ):
        yield kind
        yield replace(kind, constant_bytes=2)


DOT_KINDS = {kind.name: kind for kind in _dot_kinds()}


def pack_units(codes: torch.Tensor, kind: DotKind) -> torch.Tensor:
    """Pack a coding's codes, uint8 [..., 32 columns, 4 inputs], into units, uint8 [..., bytes]."""
    lead = codes.shape[:-2]
    if kind.bits == 8:
        return (codes ^ CODE_BIAS).reshape(*lead, -1)
    return (codes[..., :LANES, :] | codes[..., LANES:, :] << 4).reshape(*lead, -1)


def unpack_units(units: torch.Tensor, kind: DotKind) -> torch.Tensor:
    """Unpack units into a coding's codes, the inverse of :func:`pack_units`."""
    lead = units.shape[:-1]
    if kind.bits == 8:
        return (units ^ CODE_BIAS).reshape(*lead, 2 * LANES, UNIT_INPUTS)
    line = units.reshape(*lead, LANES, UNIT_INPUTS)
    return torch.cat((line & 15, line >> 4), -2)


def unit_codes(k: Kernel, kind: DotKind, unit: Ptr, halves: range) -> list[Quads]:
    """Load a unit; return the stored codes of some of its two tiles."""
    if kind.bits == 8:
        return [k.load_quads(unit + half * VECTOR_BYTES) for half in halves]
    b, line = k.builder, k.load_quads(unit).ir
    nibbles = [b.and_(b.lshr(line, int_lanes(4)) if half else line, int_lanes(0x0F0F0F0F)) for half in halves]
    if kind.coding != "fp4_e2m1":
        return [Quads(k, nibble) for nibble in nibbles]
    table = (kind.values + kind.bias).tolist()
    return [k.table_lookup(Quads(k, nibble), table) for nibble in nibbles]
