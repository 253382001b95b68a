"""Interface of a weight format: the storage of quantized matrices in checkpoints.

A format finds the tensors that store a matrix and converts them to a
:class:`pillion.kernels.torch.quantized_matrix.QuantizedMatrix`. Matrices that a producer left plain are ordinary
tensors in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# safetensors types of plain tensors.
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Type and shape of a tensor in a safetensors file; the type by its name there, e.g. "F8_E4M3" or "I32"."""

    dtype: str
    shape: tuple[int, ...]


class WeightFormat(Protocol):
    """Reader of a checkpoint's quantized matrices. Errors are ConfigError with the tensor's name."""

    def stored(self, name: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]) -> tuple[str, ...]:
        """Return the names of the tensors that store the matrix ``name`` ("...q_proj.weight"); () if it is plain or
        missing.

        Args:
            shape: shape of the plain matrix: [N, K], or [experts, N, K] for stacked experts.
            headers: type and shape of all tensors of the checkpoint, by name.

        Raises ConfigError for a tensor with a wrong type or shape.
        """

    def read(self, name: str, shape: tuple[int, int], get: Callable[[str], torch.Tensor]) -> QuantizedMatrix:
        """Read the matrix ``name`` [N, K]. ``get`` reads a tensor by its name from :meth:`stored`, or for stacked
        experts one expert's part of it. Raises ConfigError for invalid values, such as a NaN scale."""
