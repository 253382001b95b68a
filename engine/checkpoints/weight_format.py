"""Defines how a checkpoint stores quantized matrices: the interface of a weight format.

A format knows which tensors of the files stand for a matrix, and turns them into a
:class:`pillion.kernels.torch.quantized_matrix.QuantizedMatrix`. A module that the format leaves alone, such as one on a
list of exceptions, has its plain tensor in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# Plain tensors of these types can be read.
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Holds what a file's header says of a tensor: its type by safetensors' name ("F8_E4M3", "I32") and its shape."""

    dtype: str
    shape: tuple[int, ...]


class WeightFormat(Protocol):
    """Finds and reads a checkpoint's quantized matrices. Raises ConfigError, which names the tensor, where it
    cannot."""

    def stored(self, name: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]) -> tuple[str, ...]:
        """Returns the names of the tensors that stand for the matrix ``name`` ("...q_proj.weight"), or () where it is
        plain or missing.

        Args:
            shape: that of the plain matrix: [N, K], or [experts, N, K] for the stacked matrices of experts.
            headers: all tensors of the checkpoint by name.

        Raises ConfigError where one of them has another type or shape than the format prescribes.
        """

    def read(self, name: str, shape: tuple[int, int], get: Callable[[str], torch.Tensor]) -> QuantizedMatrix:
        """Reads the matrix ``name`` [N, K]; ``get`` reads a tensor of ``stored``, of one expert where they are stacked.
        Raises ConfigError for numbers that cannot be, such as a scale that is NaN."""
