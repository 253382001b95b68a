"""Defines the interface of a layout of quantized matrices, and what all layouts check and unpack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.engine.checkpoints.weight_format import FLOATS, TensorHeader
from pillion.engine.quantized.quantization import MatrixScheme
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix

# Tensors of scales may have these types; the last one holds powers of two.
SCALES = (*FLOATS, "F8_E8M0")

Headers = Mapping[str, TensorHeader]
Get = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Describes one of the tensors of a matrix: the types and shapes that it may have, and whether it may be missing,
    always or where the tensor ``instead`` is there. Without ``shapes`` only reading the tensor can tell."""

    name: str
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    optional: bool = False
    instead: str = ""


class Layout(Protocol):
    """Says which tensors stand for a matrix. ``name`` is that of the plain tensor, "...q_proj.weight", and ``shape``
    its shape: [N, K], or [experts, N, K] for the stacked matrices of experts."""

    def marks(self, name: str, headers: Headers) -> bool:
        """Returns whether the files hold the matrix in this layout."""

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        """Returns all tensors of the matrix. Raises ConfigError for a shape that the scheme does not fit."""

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        """Reads a matrix whose parts have been checked, or that of one expert. Raises ConfigError, which names the
        tensor, for numbers that cannot be. ``get`` raises KeyError for a part that is missing."""


def stem(name: str) -> str:
    """Returns the module of a tensor: the name without ".weight"."""
    return name.removesuffix(".weight")


def found_in(name: str, get: Get) -> torch.Tensor | None:
    """Returns a tensor, or None where the file lacks it."""
    try:
        return get(name)
    except KeyError:
        return None


def one_matrix(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the shape [N, K]. Raises ConfigError for stacked experts, which this layout does not have."""
    if len(shape) != 2:
        raise ConfigError(f"{name}: stacked experts are not read in this format")
    return shape[0], shape[1]


def groups_of(name: str, columns: int, group: int) -> int:
    """Returns the number of groups of one output. Raises ConfigError where they would differ in size."""
    if group and columns % group:
        raise ConfigError(f"{name}: groups of {group} do not divide its {columns} inputs")
    return columns // group if group else 1


def whole_words(name: str, what: str, size: int, bits: int) -> int:
    """Returns the int32 words that hold ``size`` codes. Raises ConfigError where the last one would not be full."""
    if size * bits % 32:
        raise ConfigError(f"{name}: its {size} {what} of {bits} bits do not fill whole numbers of 32 bits")
    return size * bits // 32


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks int32 [R, W] -> uint8 [R, W * 32 / bits], one code of 2, 3, 4 or 8 bits a byte, the lowest bits first. A
    code of 3 bits may begin in one word and end in the next."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 3:
        a, b, c = octets.view(*octets.shape[:-1], -1, 3).unbind(-1)
        codes = (a, a >> 3, a >> 6 | b << 2, b >> 1, b >> 4, b >> 7 | c << 1, c >> 2, c >> 5)
        return torch.stack([code & 7 for code in codes], dim=-1).flatten(-2)
    if bits == 2:
        return torch.stack([octets >> place & 3 for place in (0, 2, 4, 6)], dim=-1).flatten(-2)
    return octets if bits == 8 else unpack_halves(octets)


def unpack_halves(octets: torch.Tensor) -> torch.Tensor:
    """Unpacks uint8 [R, C] -> uint8 [R, 2 * C], the lower halves first."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def finite(name: str, values: torch.Tensor, most: float = 1.0) -> torch.Tensor:
    """Returns the values in float32. Raises ConfigError where one of them, times ``most``, is not finite."""
    wide = values.float()
    if not bool((wide.abs() * most).isfinite().all()):
        raise ConfigError(f"{name} holds NaN or infinite numbers")
    return wide


def from_unsigned(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    order: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """Makes the matrix ``scale * (code - zero)`` of codes from 0 on.

    Args:
        codes: uint8 [N, K] in groups of ``group`` inputs, or of all inputs where it is 0; ``order`` as in
            QuantizedMatrix. Those of fewer than 4 bits become codes of 4.
        scales: float32 [N, G].
        zeros: uint8 [N, G], or None where all are half of the codes.
    """
    middle = 1 << (bits - 1) if bits == 8 else 0
    if bits < 4 and zeros is None:
        codes = codes + (8 - (1 << (bits - 1)))
    return QuantizedMatrix(
        coding="int8" if bits == 8 else "int4" if zeros is None else "uint4",
        codes=codes ^ 128 if bits == 8 else codes,
        scales=scales,
        group=group or codes.shape[1],
        offsets=None if zeros is None else -scales * (zeros.float() - middle),
        order=order,
    )


def even(name: str, zeros: torch.Tensor, middle: int) -> None:
    """Raises ConfigError for zero points of a symmetric matrix that are not all in the middle of its codes."""
    if not bool((zeros == middle).all()):
        raise ConfigError(f"{name} holds zero points other than {middle}, though quantization_config says symmetric")


def largest(coding: str) -> float:
    """Returns the largest absolute value of a code."""
    values = CODINGS[coding]
    return float(values[values.isfinite()].abs().max())
