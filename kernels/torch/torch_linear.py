"""Defines a linear layer on the CPU by torch, whose bfloat16 weight is packed once.

oneDNN multiplies bfloat16 from a blocked layout and repacks a plain weight in every call. Packing at load time makes
the small products of a decode step about 1.7 times as fast (SmolLM2-135M's layers on one AVX-512 core: one row 26 to 15
ms, 16 rows 39 to 23 ms); long chunks take as long as before. Weights in float32 stay plain: they are used by parity
tests, and packing them gains little. :func:`torch.nn.functional.linear` is the oracle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, rounded_rows

# The layout hardly depends on the expected number of rows; measured with 1, 16 and 256.
PACKED_FOR_ROWS = 16


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this build of torch, on this processor, packs weights of ``dtype``.

    bfloat16 is the only type that is packed. oneDNN refuses it on processors without AVX-512 (and without
    AVX-NE-CONVERT), so torch is asked what the processor can do; everywhere else the weight stays plain.
    """
    ops = torch.ops.mkldnn
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and all(hasattr(ops, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
        and hasattr(ops, "_is_mkldnn_bf16_supported")
        and bool(ops._is_mkldnn_bf16_supported())
    )


class Linear:
    """Multiplies rows by a matrix [out, in] and adds a bias [out], if there is one. It is immutable.

    A quantized matrix is only carried, for callers that pack it; :func:`pillion.kernels.torch.quantized_matrix.plain`
    makes one that torch multiplies by.
    """

    def __init__(
        self,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        *,
        pack: bool | None = None,
        row_group: int = 0,
    ) -> None:
        """Packs the weight if ``pack`` is true, or if it is None and :func:`can_pack` allows it. A packed weight is a
        copy of its own. ``row_group`` is how many inputs share a scale where rows are rounded before the product, or
        0."""
        self._bias = bias
        self._row_group = row_group
        self._weight: Any = weight
        if isinstance(weight, QuantizedMatrix):
            assert pack is False
            self._packed = False
            return
        self._packed = can_pack(weight.dtype) if pack is None else pack
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)

    @classmethod
    def plain(cls, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        """Makes a layer with the weight as it is in the checkpoint, for callers that pack in their own way."""
        return cls(weight, bias, pack=False)

    @property
    def weight(self) -> Matrix:
        """Returns the weight [out, in]; only a plain layer has it."""
        assert not self._packed
        found: Matrix = self._weight
        return found

    @property
    def bias(self) -> torch.Tensor | None:
        """Returns the bias [out], or None."""
        return self._bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiplies rows [T, in] -> [T, out]."""
        if self._row_group:
            rows = rounded_rows(rows, self._row_group)
        if not self._packed:
            return linear(rows, self._weight, self._bias)
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return found
