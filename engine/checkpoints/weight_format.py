"""Interface of a weight format: how a checkpoint stores quantized matrices.

A format finds the tensors that represent a matrix and converts them to a
:class:`pillion.kernels.torch.quantized_matrix.QuantizedMatrix`. A module that the format skips, e.g. by a list of
exceptions, is a plain tensor in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file's header: its type by safetensors' name ("F8_E4M3", "I32") and its shape."""

    dtype: str
    shape: tuple[int, ...]


class WeightFormat(Protocol):
    """Reader of a checkpoint's quantized matrices. Errors are ConfigError with the tensor's name."""

    def stored(self, name: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]) -> tuple[str, ...]:
        """Return the names of the tensors that represent the matrix ``name`` ("...q_proj.weight"); () if it is plain or
        missing.

        Args:
            shape: of the plain matrix: [N, K], or [experts, N, K] for stacked experts.
            headers: all tensors of the checkpoint by name.

        Raises ConfigError if a type or shape violates the format.
        """

    def read(self, name: str, shape: tuple[int, int], get: Callable[[str], torch.Tensor]) -> QuantizedMatrix:
        """Read the matrix ``name`` [N, K]; ``get`` reads a tensor of ``stored`` (of one expert, where stacked). Raises
        ConfigError for invalid values, such as a NaN scale."""
