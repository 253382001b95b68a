"""Layouts awq and gptq: codes packed in int32 along outputs (awq) or inputs (gptq), with scales and zero points per
group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pillion.engine.checkpoints.weight_format import FLOATS
from pillion.engine.quantized.formats.layout import (
    Get,
    Headers,
    Part,
    check_symmetric,
    finite,
    from_unsigned,
    groups_of,
    read_optional,
    stem,
    unpack,
    unstacked_shape,
    whole_words,
)
from pillion.engine.quantized.quantization import MatrixScheme
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# Position of each of the eight outputs of an int32 in AWQ, in nibbles from the lowest.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqLayout:
    """AWQ: ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8] and ``scales`` [G, N]."""

    def marks(self, name: str, headers: Headers) -> bool:
        return f"{stem(name)}.qweight" in headers

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        (rows, columns), module = unstacked_shape(name, shape), stem(name)
        groups, words = groups_of(name, columns, scheme.group), whole_words(name, "outputs", rows, 4)
        return (
            Part(f"{module}.qweight", ("I32",), [(columns, words)]),
            Part(f"{module}.qzeros", ("I32",), [(groups, words)], optional=scheme.symmetric),
            Part(f"{module}.scales", FLOATS, [(groups, rows)]),
        )

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        module = stem(name)
        scales = finite(f"{module}.scales", get(f"{module}.scales"), 16.0).t().contiguous()
        words = read_optional(f"{module}.qzeros", get)
        zeros = None if words is None else _unpack_awq(words)
        return from_unsigned(_unpack_awq(get(f"{module}.qweight")), 4, scales, zeros, scheme.group)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpack AWQ's int32 [R, N / 8] -> uint8 [N, R]."""
    transposed = words.t().contiguous()
    codes = torch.empty(len(transposed), 8, len(words), dtype=torch.uint8)
    for output, position in enumerate(_AWQ_ORDER):
        codes[:, output] = (transposed >> (4 * position)) & 15
    return codes.flatten(0, 1)


class GptqLayout:
    """GPTQ: ``qweight`` int32 [K * bits / 32, N], ``qzeros`` int32 [G, N * bits / 32], ``scales`` [G, N] and, with
    act-order, ``g_idx`` int32 [K], the group of each input."""

    def __init__(self, zeros_less_by: int) -> None:
        """Set the version of the format: its files have zero points less ``zeros_less_by``."""
        self._zeros_less_by = zeros_less_by

    def marks(self, name: str, headers: Headers) -> bool:
        return f"{stem(name)}.qweight" in headers

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        (rows, columns), module, bits = unstacked_shape(name, shape), stem(name), scheme.bits
        groups, words = groups_of(name, columns, scheme.group), whole_words(name, "inputs", columns, bits)
        return (
            Part(f"{module}.qweight", ("I32",), [(words, rows)]),
            Part(f"{module}.qzeros", ("I32",), [(groups, whole_words(name, "outputs", rows, bits))]),
            Part(f"{module}.scales", FLOATS, [(groups, rows)]),
            Part(f"{module}.g_idx", ("I32", "I64"), [(columns,)], optional=not scheme.ordered),
        )

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        module, bits = stem(name), scheme.bits
        scales = finite(f"{module}.scales", get(f"{module}.scales"), 2.0**bits).t().contiguous()
        codes = unpack(get(f"{module}.qweight").t(), bits)
        zeros = unpack(get(f"{module}.qzeros"), bits).t()
        zeros = (zeros + self._zeros_less_by) & (2**bits - 1)
        if scheme.symmetric:
            check_symmetric(f"{module}.qzeros", zeros, 2 ** (bits - 1))
        groups = read_optional(f"{module}.g_idx", get)
        order = None if groups is None else input_order(f"{module}.g_idx", groups, scales.shape[1])
        if order is not None:
            codes = codes[:, order]
        return from_unsigned(codes, bits, scales, None if scheme.symmetric else zeros, scheme.group, order)


def input_order(name: str, groups: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return the indices of the inputs, int64 [K], sorted by ``groups``, the group of each input; None if groups are
    contiguous and in order. Raises ConfigError unless there are ``count`` groups of equal size."""
    size = len(groups) // count
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise ConfigError(f"{name} names groups outside of 0 to {count - 1}")
    sizes = torch.bincount(groups.long(), minlength=count)
    uneven = (sizes != size).nonzero()
    if len(uneven):
        group = int(uneven[0])
        raise ConfigError(f"{name} gives group {group} {int(sizes[group])} inputs, not {size}")
    order = torch.argsort(groups, stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order
