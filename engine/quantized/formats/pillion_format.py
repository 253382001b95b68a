"""Pillion's own layout of quantized matrices, for checkpoints that it converts or quantizes.

Tensors of a matrix ``X.weight`` [N, K], or of ``X`` if the name has no such suffix:

    X.codes    uint8 [N, K / 2], two 4-bit integers per byte, the first in the lower half; or int8 [N, K]
    X.fp4      instead of X.codes: uint8 [N, K / 2], 4-bit floats (e2m1)
    X.scales   float32 [N, groups], each for K / groups adjacent inputs
    X.offsets  float32 [N, groups]; absent if all are 0

A 4-bit code c stands for c if there are offsets, else for c - 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pillion.engine.checkpoints.weight_format import TensorHeader
from pillion.engine.quantized.formats.layout import finite, stem, unpack_halves
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import GROUPED_ROWS, QuantizedMatrix

# Codings of 4-bit integers, with and without offsets.
_FOUR_BITS = {True: "uint4", False: "int4"}


class PillionFormat:
    """Pillion's own layout, as a :class:`pillion.engine.checkpoints.weight_format.WeightFormat`.

    ``row_codes``: quantization of a linear layer's inputs. WHOLE_ROWS only applies to int8 matrices.
    """

    def __init__(self, row_codes: str = "") -> None:
        self._row_codes = row_codes
        self._with_offsets: set[str] = set()  # names of matrices
        self._with_fp4: set[str] = set()

    def stored(self, name: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]) -> tuple[str, ...]:
        codes, scales, offsets = _names(name)
        if codes not in headers:
            codes = _fp4_name(name)
            if codes not in headers:
                return ()
            self._with_fp4.add(name)
        *rows, columns = shape
        header = headers[codes]
        width = {"U8": -(-columns // 2), "I8": columns}.get(header.dtype)
        if header.shape != (*rows, width):
            raise ConfigError(f"{codes} is {header.dtype} {list(header.shape)}, which does not fit {list(shape)}")
        if scales not in headers:
            raise ConfigError(f"{scales} is missing beside {codes}")
        groups = headers[scales].shape[-1] if headers[scales].shape else 0
        parts: tuple[str, ...] = (scales,)
        if offsets in headers:
            self._with_offsets.add(name)
            parts = (scales, offsets)
        for part in parts:
            if headers[part] != TensorHeader("F32", (*rows, groups)) or not groups or columns % groups:
                kind, sizes = headers[part].dtype, list(headers[part].shape)
                raise ConfigError(f"{part} is {kind} {sizes}, which does not fit {list(shape)}")
        return (codes, *parts)

    def read(self, name: str, shape: tuple[int, int], get: Callable[[str], torch.Tensor]) -> QuantizedMatrix:
        codes_name, scales_name, offsets_name = _names(name)
        if name in self._with_fp4:
            codes_name = _fp4_name(name)
        codes, scales, columns = get(codes_name), get(scales_name), shape[1]
        scales = finite(scales_name, scales)
        offsets = finite(offsets_name, get(offsets_name)) if name in self._with_offsets else None
        group = columns // scales.shape[1]
        if codes.dtype == torch.int8:
            return QuantizedMatrix("int8", codes.view(torch.uint8), scales, group, offsets, row_codes=self._row_codes)
        halves = unpack_halves(codes)[..., :columns]
        coding = "fp4_e2m1" if name in self._with_fp4 else _FOUR_BITS[offsets is not None]
        row_codes = self._row_codes if self._row_codes == GROUPED_ROWS else ""
        return QuantizedMatrix(coding, halves.contiguous(), scales, group, offsets, row_codes=row_codes)


def stored_tensors(name: str, matrix: QuantizedMatrix) -> dict[str, torch.Tensor]:
    """Return the tensors that store the matrix ``name``, which has a coding of this layout, and no ``order``."""
    codes_name, scales_name, offsets_name = _names(name)
    codes, offsets = matrix.codes, matrix.offsets
    assert matrix.order is None
    if matrix.coding == "int8":
        codes = codes.view(torch.int8)
    else:
        if matrix.coding == "fp4_e2m1":
            codes_name = _fp4_name(name)
        else:
            assert matrix.coding == _FOUR_BITS[offsets is not None]
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    tensors = {codes_name: codes, scales_name: matrix.scales, offsets_name: offsets}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def _fp4_name(name: str) -> str:
    return f"{stem(name)}.fp4"


def _names(name: str) -> tuple[str, str, str]:
    module = stem(name)
    return f"{module}.codes", f"{module}.scales", f"{module}.offsets"
