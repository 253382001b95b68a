"""Serialization of an adapter from the process that reads it to its worker: matrices as bits, packed for a backend.

    files --read_adapter--> Layers --AdapterForm.pack--> JSON and bytes --a pipe--> the backend

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from pillion.host.core_lending_table import LINE_BYTES

# Bit patterns: uint32 of float32, uint16 of bfloat16.
Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
NO_BYTES: Bytes = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class PairBits:
    """A pair of LoRA matrices as bits; as tensors, :class:`pillion.engine.adapters.adapter_weights.LowRank`.

    Attributes:
        first_output: index of the first output of the fused layer to which the product is added.
        a: [rank, inputs], or [experts, rank, inputs] for stacked experts.
        b: [outputs, rank] or [experts, outputs, rank], multiplied by the adapter's scale.
    """

    first_output: int
    a: Bits
    b: Bits


# Pairs by name of their fused layer.
Layers = Mapping[str, Sequence[PairBits]]


class AdapterForm(Protocol):
    """Packer of adapters for a backend, a dataclass. It is sent to the process that reads them by :func:`described`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Pack an adapter into a list of JSON values, and bytes. Raises ConfigError for one that the backend does not
        support."""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """Packer that concatenates all matrices, for backends that use tensors."""

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Return [layer, first output, dtype, shape of A, shape of B] of each pair, and the bytes of all matrices."""
        about: list[Any] = []
        matrices: list[Bits] = []
        for name, pairs in layers.items():
            for pair in pairs:
                about.append([name, pair.first_output, pair.a.dtype.str, pair.a.shape, pair.b.shape])
                matrices += [pair.a, pair.b]
        return about, np.concatenate([_padded_bytes(matrix) for matrix in matrices])


def _padded_bytes(numbers: npt.NDArray[Any]) -> Bytes:
    """Return the bytes of an array, padded to a multiple of 4, the alignment of float32."""
    flat = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
    return np.pad(flat, (0, -len(flat) % 4))


def plain_bits(about: list[Any], data: Bytes) -> Layers:
    """Unpack an adapter packed by :class:`PlainForm`; the matrices are views of ``data``."""
    layers: dict[str, list[PairBits]] = {}
    end = 0

    def next_matrix(kind: str, shape: Sequence[int]) -> npt.NDArray[Any]:
        nonlocal end
        size_bytes = math.prod(shape) * np.dtype(kind).itemsize
        begin, end = end, end + size_bytes + -size_bytes % 4
        return data[begin : begin + size_bytes].view(kind).reshape(shape)

    for name, first_output, kind, a, b in about:
        layers.setdefault(name, []).append(PairBits(first_output, next_matrix(kind, a), next_matrix(kind, b)))
    return layers


def described(value: Any) -> Any:
    """Convert a dataclass, whose fields are JSON values or dataclasses, to JSON; :func:`made` is the inverse."""
    if not is_dataclass(value):
        return value
    kind = type(value)
    values = {field.name: described(getattr(value, field.name)) for field in fields(value)}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": values}


def made(about: Any) -> Any:
    """Reconstruct a dataclass from the result of :func:`described`."""
    if not isinstance(about, dict) or "class" not in about:
        return about
    module, _, name = about["class"].partition(":")
    return getattr(import_module(module), name)(**{key: made(value) for key, value in about["fields"].items()})


def line_bytes(size_bytes: int) -> Bytes:
    """Allocate uninitialized memory that is aligned to a cache line."""
    buffer = np.empty(size_bytes + LINE_BYTES, np.uint8)
    begin = -buffer.ctypes.data % LINE_BYTES
    return buffer[begin : begin + size_bytes]
