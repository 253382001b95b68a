"""Quantized matrices, as read from checkpoints and packed by backends.

    a checkpoint's layout --engine/checkpoints--> QuantizedMatrix --packing--> a backend's own layout

QuantizedMatrix is an intermediate form with one code per byte, which exists for one layer at a time; products read
packed forms. Its arithmetic is the reference of all kernels:

    weight[n, order[k]] = scales[n, k // group] * values[codes[n, k]] + offsets[n, k // group]

If the matrix has ``row_codes``, the rows that it multiplies are rounded first (:func:`rounded_rows`).
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
# Values by code, per coding, float32 [16] or [256]. int4 starts at -8, int8 is two's complement, fp4_e2m1 is OCP's
# 4-bit float (of NVFP4 and MXFP4), fp8_e4m3 OCP's 8-bit float without infinities.
CODINGS: dict[str, torch.Tensor] = {
    "uint4": torch.arange(16).float(),
    "int4": torch.arange(16).float() - 8,
    "nf4": torch.tensor(_NF4),
    "fp4_e2m1": torch.tensor(
        [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    ),
    "int8": torch.arange(256).to(torch.uint8).view(torch.int8).float(),
    "fp8_e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float(),
}
# Codings whose values are integers within int8.
_INTEGERS = ("uint4", "int4", "int8")
# Codings whose values are integers times a constant.
_SCALED_INTEGERS = (*_INTEGERS, "fp4_e2m1")
# Range of the codes of rounded rows.
MIN_CODE, MAX_CODE = -128, 127
# The largest magnitude of a row with one scale is scaled to this, as in compressed-tensors; that of a group of a row to
# MAX_CODE, because each group would lose half a code.
MAX_SCALED_ROW = 127.5
# Values of ``row_codes``: rows have one scale, or one per group of inputs.
WHOLE_ROWS, GROUPED_ROWS = "dynamic", "grouped"
# Max inputs of a grouped row that share a scale; a larger group of the matrix is divided for rows.
MAX_ROW_GROUP = 128


def rounded_rows(rows: torch.Tensor, group: int = 0) -> torch.Tensor:
    """Round rows [..., K] to int8 with a scale per ``group`` of inputs (0: per row), from the largest magnitude; return
    the dequantized rows, of the same shape and type."""
    columns = rows.shape[-1]
    group = min(group or columns, columns)
    groups = pad(rows.float(), (0, -columns % group)).reshape(*rows.shape[:-1], -(-columns // group), group)
    scale = groups.abs().amax(-1, keepdim=True) / (MAX_SCALED_ROW if group == columns else float(MAX_CODE))
    codes = (groups / scale).round().clamp(MIN_CODE, MAX_CODE)
    return torch.where(scale == 0, 0.0, codes * scale).flatten(-2)[..., :columns].to(rows.dtype)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized matrix [N outputs, K inputs].

    Attributes:
        coding: a key of ``CODINGS``.
        codes: uint8 [N, K], one code per byte.
        scales: float32 [N, ceil(K / group)].
        offsets: float32, of the shape of ``scales``, or None if all are 0.
        group: inputs that share a scale; K or more for one scale per output.
        order: int64 [K], the input of each column (GPTQ's act-order), or None if columns are in order.
        row_codes: WHOLE_ROWS or GROUPED_ROWS if rows are rounded before the product (:func:`rounded_rows`), or "".
        factors: float32 [N], if each output's scales are products of its factor and E4M3 floats, else None. Packers may
            then store scales in 8 bits; values do not depend on it.
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
        if self.row_codes != GROUPED_ROWS or self.coding not in _SCALED_INTEGERS or self.order is not None:
            return 0
        if self.group >= columns:
            return MAX_ROW_GROUP
        # Kernels require multiples of 16.
        return max((size for size in range(16, MAX_ROW_GROUP + 1, 16) if not self.group % size), default=0)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the floating-point matrix [N, K], computed in float32 and rounded once, with the inputs in order."""
        weight = torch.empty(self.shape, dtype=dtype)
        # 2**22 weights at a time, each of which takes 20 bytes of temporary memory.
        step = max(1, 2**22 // self.shape[1])
        for begin in range(0, len(weight), step):
            weight[begin : begin + step] = self.rows(slice(begin, begin + step))._float32()
        return weight

    def _float32(self) -> torch.Tensor:
        columns = self.shape[1]
        weight = CODINGS[self.coding][self.codes.int()] * _spread(self.scales, self.group, columns)
        if self.offsets is not None:
            weight += _spread(self.offsets, self.group, columns)
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def rows(self, index: slice | torch.Tensor) -> QuantizedMatrix:
        """Return the matrix [M, K] of the outputs in ``index``, a slice or int64 [M]."""
        offsets, factors = (None if values is None else values[index] for values in (self.offsets, self.factors))
        return replace(self, codes=self.codes[index], scales=self.scales[index], offsets=offsets, factors=factors)

    def columns(self, index: range) -> QuantizedMatrix:
        """Return the stored columns in ``index`` as a matrix [N, len(index)] whose inputs are in this order. Groups
        become smaller if ``index`` begins inside a group."""
        group = math.gcd(self.group, index.start) if self.group < self.shape[1] and index.start else self.group
        source = torch.arange(index.start, index.stop, group) // self.group
        offsets = None if self.offsets is None else self.offsets[:, source]
        codes, scales = self.codes[:, index.start : index.stop], self.scales[:, source]
        return replace(self, codes=codes, scales=scales, offsets=offsets, group=group, order=None)


Matrix = torch.Tensor | QuantizedMatrix


def plain(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [N, K] in floating point, dequantized if it is quantized."""
    return matrix.dequantize(dtype) if isinstance(matrix, QuantizedMatrix) else matrix.to(dtype)


def row_group_of(matrices: Sequence[Matrix]) -> int:
    """Return the common ``row_group`` of matrices that multiply the same rows; 0 (rows are not rounded) if they
    differ."""
    row_groups = {matrix.row_group if isinstance(matrix, QuantizedMatrix) else 0 for matrix in matrices}
    return row_groups.pop() if len(row_groups) == 1 else 0


def select_rows(matrix: Matrix, index: slice | torch.Tensor) -> Matrix:
    """Return the matrix [M, K] of the outputs in ``index``, a slice or int64 [M]."""
    return matrix.rows(index) if isinstance(matrix, QuantizedMatrix) else matrix[index]


def select_columns(matrix: Matrix, index: range) -> Matrix:
    """Return the stored columns in ``index`` as a matrix [N, len(index)] whose inputs are in this order."""
    return matrix.columns(index) if isinstance(matrix, QuantizedMatrix) else matrix[:, index.start : index.stop]


def select_inputs(matrix: Matrix, inputs: range) -> Matrix:
    """Return the matrix [N, len(inputs)] of a range of inputs.

    A quantized matrix stays quantized, perhaps with smaller groups, unless its column order mixes ``inputs`` with other
    inputs; then it becomes float32.
    """
    order = matrix.order if isinstance(matrix, QuantizedMatrix) else None
    if order is None:
        return select_columns(matrix, inputs)
    sources = order[inputs.start : inputs.stop]
    if int(sources.min()) < inputs.start or int(sources.max()) >= inputs.stop:
        return plain(matrix, torch.float32)[:, inputs.start : inputs.stop]
    assert isinstance(matrix, QuantizedMatrix)
    return replace(matrix.columns(inputs), order=sources - inputs.start)


def stack_rows(parts: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Stack matrices of equal K along their outputs.

    Quantized matrices stay quantized if one coding and one group size represent all of them exactly; else all become
    floating point of type ``dtype``.
    """
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if len(quantized) == len(parts) and _can_unify(quantized):
        unified = _unify(quantized)
        factors = [part.factors for part in unified if part.factors is not None]
        return replace(
            unified[0],
            factors=torch.cat(factors) if len(factors) == len(unified) else None,
            codes=torch.cat([part.codes for part in unified]),
            scales=torch.cat([part.scales for part in unified]),
            offsets=None
            if unified[0].offsets is None
            else torch.cat([part.offsets for part in unified if part.offsets is not None]),
        )
    return torch.cat([plain(part, dtype) for part in parts])


def same_order(a: QuantizedMatrix, b: QuantizedMatrix) -> bool:
    """Return whether the columns of both matrices are in the same order of inputs."""
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def _can_unify(parts: Sequence[QuantizedMatrix]) -> bool:
    """Return whether :func:`_unify` can convert all matrices to one coding, one group size and one order of inputs."""
    first = parts[0]
    columns = first.shape[1]
    group = min(columns, *(part.group for part in parts))
    groups = all(min(part.group, columns) % group == 0 for part in parts)
    codings = len({part.coding for part in parts}) == 1 or all(part.coding in _INTEGERS for part in parts)
    # Stacked matrices multiply the same rows of activations: either all of them round the rows, or none.
    rounded = len({part.row_codes for part in parts}) == 1
    return groups and codings and rounded and all(same_order(part, first) for part in parts)


def _unify(parts: Sequence[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """Convert matrices to one coding (int8 if they differ) and to the smallest of their group sizes, without changing
    values."""
    coding = parts[0].coding if len({part.coding for part in parts}) == 1 else "int8"
    group = min(parts[0].shape[1], *(part.group for part in parts))
    shifted = any(part.offsets is not None for part in parts)
    unified = []
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
        unified.append(replace(part, coding=coding, codes=codes, scales=scales, offsets=offsets, group=group))
    return unified


def _spread(values: torch.Tensor, group: int, count: int) -> torch.Tensor:
    """Repeat each of the values [N, G] ``group`` times, and cut the result to [N, count]."""
    return values.repeat_interleave(min(group, count), 1)[:, :count]
