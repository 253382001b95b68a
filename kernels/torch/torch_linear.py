"""A linear layer on the CPU by torch, whose bfloat16 weight is packed once.

oneDNN multiplies bfloat16 from a blocked layout and repacks a plain weight in every call. Packing at load time makes
the small products of a decode step about 1.7 times as fast (SmolLM2-135M's layers on one AVX-512 core: one row 26 to 15
ms, 16 rows 39 to 23 ms); long chunks take as long as before. float32 weights stay plain: they are for parity tests, and
packing them gains little. :func:`torch.nn.functional.linear` is the oracle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, rounded_rows


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build of torch, on this processor, packs weights of ``dtype``.

    Only bfloat16 is packed. oneDNN refuses it on processors without AVX-512 (and without AVX-NE-CONVERT), so torch is
    queried; elsewhere the weight stays plain.
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
    """Product of rows with a matrix [out, in], plus a bias [out], if there is one. Immutable.

    A quantized matrix is only stored, for callers that pack it. To multiply by it, dequantize it first
    (:func:`pillion.kernels.torch.quantized_matrix.plain`).
    """

    def __init__(
        self,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        *,
        pack: bool | None = None,
        row_group: int = 0,
    ) -> None:
        """Pack a copy of the weight if ``pack`` is true, or if it is None and :func:`can_pack` allows it.
        ``row_group``: inputs that share a scale if rows are rounded before the product, or 0."""
        self._bias = bias
        self._row_group = row_group
        self._weight: Any = weight
        if isinstance(weight, QuantizedMatrix):
            assert pack is False
            self._packed = False
            return
        self._packed = can_pack(weight.dtype) if pack is None else pack
        if self._packed:
            # 16 expected rows: measured with 1, 16 and 256, the layout hardly depends on their number.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)

    @classmethod
    def plain(cls, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        """Create a layer with the weight as it is in the checkpoint, for callers that pack it themselves."""
        return cls(weight, bias, pack=False)

    @property
    def weight(self) -> Matrix:
        """The weight [out, in]; only of layers whose weight is not packed."""
        assert not self._packed
        weight: Matrix = self._weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [T, in] -> [T, out]."""
        if self._row_group:
            rows = rounded_rows(rows, self._row_group)
        if not self._packed:
            return linear(rows, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out
