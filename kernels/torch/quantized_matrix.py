"""Quantized matrices, as read from checkpoints and packed by backends.

    a checkpoint's layout --engine/checkpoints--> QuantizedMatrix --packing--> a backend's own layout

This is the plain form, with one code per byte, of one layer at a time; no product reads it. Its arithmetic is the
reference of all kernels:

    weight[n, order[k]] = scales[n, k // group] * values[codes[n, k]] + offsets[n, k // group]

If the matrix has ``row_codes``, a row is rounded before the product with the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

# Values of NF4, quantiles of the normal distribution (arXiv 2305.14314, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Magnitudes of OCP's 4-bit floats: two bits of exponent and one of mantissa.
_FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Values of each coding's codes, float32 [16] or [256]. int4 starts at -8, int8 is two's complement, fp4_e2m1 a sign and
# one of eight magnitudes (as in NVFP4 and MXFP4), fp8_e4m3 OCP's 8-bit float without infinities.
CODINGS: dict[str, torch.Tensor] = {
    "uint4": torch.arange(16).float(),
    "int4": torch.arange(16).float() - 8,
    "nf4": torch.tensor(_NF4),
    "fp4_e2m1": torch.tensor([sign * size for sign in (1.0, -1.0) for size in _FP4_E2M1]),
    "int8": torch.arange(256).to(torch.uint8).view(torch.int8).float(),
    "fp8_e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float(),
}
# Max weights dequantized at once; each takes 20 bytes beside the result.
_PIECE_WEIGHTS = 2**22
# Codings whose values are integers within int8.
_WHOLE = ("uint4", "int4", "int8")
# Codings whose values are integers times one number.
_EVEN = (*_WHOLE, "fp4_e2m1")


# The range of int8, and the code of a row's largest magnitude, as in compressed-tensors. In rows of several groups it
# is a code, or each group would lose half a code.
MIN_CODE, MAX_CODE, LARGEST_SIZE, LARGEST_OF_GROUP = -128, 127, 127.5, 127.0


# Values of ``row_codes``: rows have one scale, or one per group of inputs.
WHOLE_ROWS, GROUPED_ROWS = "dynamic", "grouped"
# Max inputs of a grouped row that share a scale: a larger group of the matrix has several. Kernels require multiples of
# the second number.
MAX_ROW_GROUP, ROW_GROUP_MULTIPLE = 128, 16


def rounded_rows(rows: torch.Tensor, group: int = 0) -> torch.Tensor:
    """Round rows [..., K] to int8, each ``group`` of inputs (0: all) by a scale from its largest magnitude; return the
    dequantized rows, of the same shape and type."""
    columns = rows.shape[-1]
    group = min(group or columns, columns)
    wide = pad(rows.float(), (0, -columns % group)).reshape(*rows.shape[:-1], -(-columns // group), group)
    scale = wide.abs().amax(-1, keepdim=True) / (LARGEST_SIZE if group == columns else LARGEST_OF_GROUP)
    codes = (wide / scale).round().clamp(MIN_CODE, MAX_CODE)
    return torch.where(scale == 0, 0.0, codes * scale).flatten(-2)[..., :columns].to(rows.dtype)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N outputs, K inputs] quantized.

    Attributes:
        coding: a key of ``CODINGS``.
        codes: uint8 [N, K], one code per byte.
        scales: float32 [N, ceil(K / group)].
        offsets: float32, of the shape of ``scales``, or None if all are 0.
        group: inputs that share a scale; K or more for one scale per output.
        order: int64 [K], the input of each column (GPTQ's act-order), or None if columns are in order.
        row_codes: WHOLE_ROWS or GROUPED_ROWS if rows are rounded before the product (:func:`rounded_rows`), or "".
        factors: float32 [N], if each output's scales are products of this number and 8-bit floats (E4M3), else None.
            Packers may store such scales in 8 bits; values do not depend on it.
    """

    coding: str
    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None
    row_codes: str = ""
    factors: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.codes.dtype == torch.uint8
        assert self.scales.shape == (rows, -(-columns // self.group))
        assert self.offsets is None or self.offsets.shape == self.scales.shape
        assert self.order is None or self.order.shape == (columns,)
        assert self.factors is None or self.factors.shape == (rows,)

    @property
    def shape(self) -> torch.Size:
        """(N, K), the numbers of outputs and inputs."""
        return self.codes.shape

    @property
    def row_group(self) -> int:
        """Inputs of a row that share a scale if rows are rounded, or 0. Grouped rows require codes that are multiples
        of one number, in consecutive groups of the matrix."""
        columns = self.shape[1]
        if self.row_codes == WHOLE_ROWS:
            return columns
        if self.row_codes != GROUPED_ROWS or self.coding not in _EVEN or self.order is not None:
            return 0
        if self.group >= columns:
            return MAX_ROW_GROUP
        sizes = range(ROW_GROUP_MULTIPLE, MAX_ROW_GROUP + 1, ROW_GROUP_MULTIPLE)
        return max((size for size in sizes if not self.group % size), default=0)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the plain matrix [N, K], computed in float32 and rounded once, with the inputs in order."""
        found = torch.empty(self.shape, dtype=dtype)
        step = max(1, _PIECE_WEIGHTS // self.shape[1])
        for begin in range(0, len(found), step):
            found[begin : begin + step] = self.rows(slice(begin, begin + step))._wide()
        return found

    def _wide(self) -> torch.Tensor:
        columns = self.shape[1]
        wide = CODINGS[self.coding][self.codes.int()] * _spread(self.scales, self.group, columns)
        if self.offsets is not None:
            wide += _spread(self.offsets, self.group, columns)
        return wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)

    def rows(self, index: slice | torch.Tensor) -> QuantizedMatrix:
        """Return a matrix [M, K] of some outputs; ``index`` is a slice or int64 [M]."""
        offsets, factors = (None if values is None else values[index] for values in (self.offsets, self.factors))
        return replace(self, codes=self.codes[index], scales=self.scales[index], offsets=offsets, factors=factors)

    def columns(self, index: range) -> QuantizedMatrix:
        """Return some columns as stored, as a matrix with these inputs, in their order. Its groups are smaller if
        ``index`` begins inside a group."""
        group = math.gcd(self.group, index.start) if self.group < self.shape[1] and index.start else self.group
        source = torch.arange(index.start, index.stop, group) // self.group
        offsets = None if self.offsets is None else self.offsets[:, source]
        codes, scales = self.codes[:, index.start : index.stop], self.scales[:, source]
        return replace(self, codes=codes, scales=scales, offsets=offsets, group=group, order=None)


Matrix = torch.Tensor | QuantizedMatrix


def plain(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix [N, K] in floating point, dequantized if need be."""
    return matrix.dequantize(dtype) if isinstance(matrix, QuantizedMatrix) else matrix.to(dtype)


def row_group_of(matrices: Sequence[Matrix]) -> int:
    """Return the common ``row_group`` of matrices that multiply the same rows; 0 (rows are not rounded) if they
    differ."""
    found = {matrix.row_group if isinstance(matrix, QuantizedMatrix) else 0 for matrix in matrices}
    return found.pop() if len(found) == 1 else 0


def select_rows(matrix: Matrix, index: slice | torch.Tensor) -> Matrix:
    """Return the matrix of the outputs in ``index``."""
    return matrix.rows(index) if isinstance(matrix, QuantizedMatrix) else matrix[index]


def select_columns(matrix: Matrix, index: range) -> Matrix:
    """Return some columns as stored, as a matrix with these inputs, in their order."""
    return matrix.columns(index) if isinstance(matrix, QuantizedMatrix) else matrix[:, index.start : index.stop]


def select_inputs(matrix: Matrix, inputs: range) -> Matrix:
    """Return the matrix [N, inputs] for some of its inputs, with the same values.

    A quantized matrix stays quantized, with smaller groups if need be, unless its column order mixes these inputs with
    others; then it becomes float32.
    """
    order = matrix.order if isinstance(matrix, QuantizedMatrix) else None
    if order is None:
        return select_columns(matrix, inputs)
    mine = order[inputs.start : inputs.stop]
    if int(mine.min()) < inputs.start or int(mine.max()) >= inputs.stop:
        return plain(matrix, torch.float32)[:, inputs.start : inputs.stop]
    assert isinstance(matrix, QuantizedMatrix)
    return replace(matrix.columns(inputs), order=mine - inputs.start)


def stack_rows(parts: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Stack matrices of equal K along their outputs.

    Quantized matrices stay quantized if one coding and one group represent them all exactly; else every part becomes
    floating point of type ``dtype``.
    """
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if len(quantized) == len(parts) and _fit(quantized):
        alike = _alike(quantized)
        factors = [part.factors for part in alike if part.factors is not None]
        return replace(
            alike[0],
            factors=torch.cat(factors) if len(factors) == len(alike) else None,
            codes=torch.cat([part.codes for part in alike]),
            scales=torch.cat([part.scales for part in alike]),
            offsets=None
            if alike[0].offsets is None
            else torch.cat([part.offsets for part in alike if part.offsets is not None]),
        )
    return torch.cat([plain(part, dtype) for part in parts])


def same_order(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    """Return whether the columns of both matrices belong to the same inputs."""
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _fit(parts: Sequence[QuantizedMatrix]) -> bool:
    """Return whether :func:`_alike` can convert all parts to one coding, one group and one order of inputs."""
    first = parts[0]
    columns = first.shape[1]
    least = min(columns, *(part.group for part in parts))
    groups = all(min(part.group, columns) % least == 0 for part in parts)
    codings = len({part.coding for part in parts}) == 1 or all(part.coding in _WHOLE for part in parts)
    # Stacked matrices multiply the same rows of activations: either all of them round the rows, or none.
    rounded = len({part.row_codes for part in parts}) == 1
    return groups and codings and rounded and all(same_order(part, first) for part in parts)


def _alike(parts: Sequence[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """Convert the parts to one coding (int8 if they differ) and to the smallest of their groups, with the same
    values."""
    coding = parts[0].coding if len({part.coding for part in parts}) == 1 else "int8"
    group = min(parts[0].shape[1], *(part.group for part in parts))
    shifted = any(part.offsets is not None for part in parts)
    found = []
    for part in parts:
        codes = part.codes
        if part.coding != coding:
            codes = CODINGS[part.coding][codes.long()].to(torch.int8).view(torch.uint8)
        count = -(-part.shape[1] // group)
        scales, offsets = (
            None if values is None else _spread(values, max(1, part.group // group), count)
            for values in (part.scales, part.offsets)
        )
        assert scales is not None
        if shifted and offsets is None:
            offsets = torch.zeros_like(scales)
        found.append(replace(part, coding=coding, codes=codes, scales=scales, offsets=offsets, group=group))
    return found


def _spread(values: torch.Tensor, group: int, count: int) -> torch.Tensor:
    """Repeat each of the values [N, G] ``group`` times, and cut the result to [N, count]."""
    return values.repeat_interleave(min(group, count), 1)[:, :count]
