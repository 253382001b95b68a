"""Interface of a layout of quantized matrices, and the checks and unpacking shared by layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.engine.checkpoints.weight_format import FLOATS, TensorHeader
from pillion.engine.quantized.quantization import MatrixScheme
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix

# safetensors types of scales.
SCALES = (*FLOATS, "F8_E8M0")

Headers = Mapping[str, TensorHeader]
Get = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that, with others, stores a quantized matrix.

    Attributes:
        dtypes: allowed types, by their names in safetensors.
        shapes: allowed shapes; () if they are checked on reading.
        optional: True if the tensor may be missing.
        instead: name of a tensor in whose presence this one may be missing; "" for none.
    """

    name: str
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    optional: bool = False
    instead: str = ""


class Layout(Protocol):
    """A layout of quantized matrices in files. Methods take the name of the plain matrix, "...q_proj.weight", and its
    shape: [N, K], or [experts, N, K] for stacked experts."""

    def marks(self, name: str, headers: Headers) -> bool:
        """Return whether the files have the matrix in this layout."""

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        """Return the tensors that store the matrix. Raises ConfigError for a shape that does not fit the scheme."""

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        """Read a matrix, or that of one expert, whose tensors' types and shapes have been checked. ``get`` returns a
        tensor by name, and raises KeyError for a missing one. Raises ConfigError, with the tensor's name, for invalid
        values."""


def stem(name: str) -> str:
    """Return the name of a tensor's module: its own without ".weight"."""
    return name.removesuffix(".weight")


def read_optional(name: str, get: Get) -> torch.Tensor | None:
    """Return a tensor; None if it is missing."""
    try:
        return get(name)
    except KeyError:
        return None


def unstacked_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return ``shape`` as [N, K]. Raises ConfigError for stacked experts, in layouts that do not support them."""
    if len(shape) != 2:
        raise ConfigError(f"{name}: stacked experts are not supported in this format")
    return shape[0], shape[1]


def groups_of(name: str, columns: int, group: int) -> int:
    """Return the number of groups of ``group`` inputs; 0 means all inputs. Raises ConfigError if ``group`` does not
    divide ``columns``."""
    if group and columns % group:
        raise ConfigError(f"{name}: groups of {group} do not divide its {columns} inputs")
    return columns // group if group else 1


def whole_words(name: str, what: str, size: int, bits: int) -> int:
    """Return the number of int32 words that ``size`` codes of ``bits`` bits fill. Raises ConfigError, with the name
    ``what`` of the codes, if the last word is not full."""
    if size * bits % 32:
        raise ConfigError(f"{name}: its {size} {what} of {bits} bits do not fill whole numbers of 32 bits")
    return size * bits // 32


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [R, W] -> uint8 [R, W * 32 / bits], one code of 2, 3, 4 or 8 bits per byte, lowest bits first. 3-bit
    codes may span words."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 3:
        a, b, c = packed.view(*packed.shape[:-1], -1, 3).unbind(-1)
        codes = (a, a >> 3, a >> 6 | b << 2, b >> 1, b >> 4, b >> 7 | c << 1, c >> 2, c >> 5)
        return torch.stack([code & 7 for code in codes], dim=-1).flatten(-2)
    if bits == 2:
        return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    return packed if bits == 8 else unpack_halves(packed)


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [R, C] -> uint8 [R, 2 * C], lower nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def finite(name: str, values: torch.Tensor, max_factor: float = 1.0) -> torch.Tensor:
    """Cast to float32. Raises ConfigError if a value times ``max_factor`` is not finite."""
    floats = values.float()
    if not bool((floats.abs() * max_factor).isfinite().all()):
        raise ConfigError(f"{name} contains NaN or infinities")
    return floats


def from_unsigned(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    order: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """Return the matrix ``scale * (code - zero)`` for unsigned codes.

    Args:
        codes: uint8 [N, K]; codes of 2 and 3 bits become 4-bit codes.
        scales: float32 [N, G].
        zeros: uint8 [N, G]; None if each is half the number of codes.
        group: inputs per group; 0 for all.
        order: as in :class:`QuantizedMatrix`.
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


def check_symmetric(name: str, zeros: torch.Tensor, middle: int) -> None:
    """Raise ConfigError unless all zero points of a symmetric matrix are ``middle``."""
    if not bool((zeros == middle).all()):
        raise ConfigError(f"{name} has zero points other than {middle}, but quantization_config is symmetric")


def largest(coding: str) -> float:
    """Return the largest finite absolute value of the codes of a coding."""
    values = CODINGS[coding]
    return float(values[values.isfinite()].abs().max())
