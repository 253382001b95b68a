"""Pillion's own layout of quantized matrices, for checkpoints that it converts or quantizes.

Tensors of a matrix ``X.weight`` [N, K], or of ``X`` if the name has no such suffix:

    X.codes    uint8 [N, K / 2], two codes per byte, the first in the lower half; or int8 [N, K], one code per byte
    X.fp4      the same as uint8, but codes are 4-bit floats (e2m1)
    X.scales   float32 [N, groups], each for K / groups adjacent inputs
    X.offsets  of the same shape; absent if all are 0

4-bit codes are unsigned with offsets, and begin at -8 without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pillion.engine.checkpoints.weight_format import TensorHeader
from pillion.engine.quantized.formats.layout import finite, stem, unpack_halves
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import GROUPED_ROWS, QuantizedMatrix

_FP4 = "fp4_e2m1"
_FOUR_BITS = {True: "uint4", False: "int4"}


class PillionFormat:
    """Pillion's own layout, as a :class:`pillion.engine.checkpoints.weight_format.WeightFormat`.

    ``row_codes``: quantization of a product's inputs; whole-row scales apply to matrices of one-byte codes only.
    """

    def __init__(self, row_codes: str = "") -> None:
        self._row_codes = row_codes
        self._shifted: set[str] = set()  # Names of matrices with offsets.
        self._floats: set[str] = set()

    def stored(self, name: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]) -> tuple[str, ...]:
        codes, scales, offsets = _names(name)
        if codes not in headers:
            codes = _floats(name)
            if codes not in headers:
                return ()
            self._floats.add(name)
        *rows, columns = shape
        found = headers[codes]
        width = {"U8": -(-columns // 2), "I8": columns}.get(found.dtype)
        if found.shape != (*rows, width):
            raise ConfigError(f"{codes} is {found.dtype} {list(found.shape)}, which holds no codes of {list(shape)}")
        if scales not in headers:
            raise ConfigError(f"{scales} is missing beside {codes}")
        groups = headers[scales].shape[-1] if headers[scales].shape else 0
        parts: tuple[str, ...] = (scales,)
        if offsets in headers:
            self._shifted.add(name)
            parts = (scales, offsets)
        for part in parts:
            if headers[part] != TensorHeader("F32", (*rows, groups)) or not groups or columns % groups:
                kind, sizes = headers[part].dtype, list(headers[part].shape)
                raise ConfigError(f"{part} is {kind} {sizes}, which gives no groups to {list(shape)}")
        return (codes, *parts)

    def read(self, name: str, shape: tuple[int, int], get: Callable[[str], torch.Tensor]) -> QuantizedMatrix:
        codes_name, scales_name, offsets_name = _names(name)
        if name in self._floats:
            codes_name = _floats(name)
        codes, scales, columns = get(codes_name), get(scales_name), shape[1]
        scales = finite(scales_name, scales)
        offsets = finite(offsets_name, get(offsets_name)) if name in self._shifted else None
        group = columns // scales.shape[1]
        if codes.dtype == torch.int8:
            return QuantizedMatrix("int8", codes.view(torch.uint8), scales, group, offsets, row_codes=self._row_codes)
        halves = unpack_halves(codes)[..., :columns]
        coding = _FP4 if name in self._floats else _FOUR_BITS[offsets is not None]
        grouped = self._row_codes if self._row_codes == GROUPED_ROWS else ""
        return QuantizedMatrix(coding, halves.contiguous(), scales, group, offsets, row_codes=grouped)


def stored_tensors(name: str, matrix: QuantizedMatrix) -> dict[str, torch.Tensor]:
    """Return the tensors that represent the matrix ``name``, which has a coding of this layout and no order."""
    codes_name, scales_name, offsets_name = _names(name)
    codes, offsets = matrix.codes, matrix.offsets
    assert matrix.order is None
    if matrix.coding == "int8":
        codes = codes.view(torch.int8)
    else:
        if matrix.coding == _FP4:
            codes_name = _floats(name)
        else:
            assert matrix.coding == _FOUR_BITS[offsets is not None]
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    found = {codes_name: codes, scales_name: matrix.scales, offsets_name: offsets}
    return {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}


def _floats(name: str) -> str:
    return f"{stem(name)}.fp4"


def _names(name: str) -> tuple[str, str, str]:
    module = stem(name)
    return f"{module}.codes", f"{module}.scales", f"{module}.offsets"
