"""Serialization of an adapter between the process that reads it and its worker: matrices as bits, in a backend's form.

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

# Bit patterns: uint32 of float32, uint16 of bfloat16.
Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
LINE_BYTES = 64
NO_BYTES: Bytes = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class PairBits:
    """A pair of matrices as bits; the tensor form is :class:`pillion.engine.adapters.adapter_weights.LowRank`.

    Attributes:
        first_output: first output of the fused layer that the pair adds to.
        a: [rank, inputs], or [experts, rank, inputs] for stacked experts.
        b: [outputs, rank] or [experts, outputs, rank], multiplied by the adapter's scale.
    """

    first_output: int
    a: Bits
    b: Bits


Layers = Mapping[str, Sequence[PairBits]]


class AdapterForm(Protocol):
    """Packed form of adapters for a backend; :func:`described` sends the object to the process that reads them."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Pack an adapter and return a list for JSON, and bytes. Raises ConfigError for an adapter that the backend
        does not support."""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """All matrices concatenated, for backends that use tensors."""

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Return layer, first output, type and shapes of each pair, and the bytes of all matrices."""
        about: list[Any] = []
        matrices: list[Bits] = []
        for name, pairs in layers.items():
            for pair in pairs:
                about.append([name, pair.first_output, pair.a.dtype.str, pair.a.shape, pair.b.shape])
                matrices += [pair.a, pair.b]
        return about, np.concatenate([_padded_bytes(one) for one in matrices])


def _padded_bytes(numbers: npt.NDArray[Any]) -> Bytes:
    """Return the bytes of numbers, padded to 4 bytes, so that float32 may follow."""
    flat = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
    return np.pad(flat, (0, -len(flat) % 4))


def plain_bits(about: list[Any], data: Bytes) -> Layers:
    """Return the adapter packed by :class:`PlainForm`, as views of its bytes."""
    layers: dict[str, list[PairBits]] = {}
    end = 0

    def taken(kind: str, shape: Sequence[int]) -> npt.NDArray[Any]:
        nonlocal end
        size_bytes = math.prod(shape) * np.dtype(kind).itemsize
        begin, end = end, end + size_bytes + -size_bytes % 4
        return data[begin : begin + size_bytes].view(kind).reshape(shape)

    for name, first_output, kind, a, b in about:
        layers.setdefault(name, []).append(PairBits(first_output, taken(kind, a), taken(kind, b)))
    return layers


def described(thing: Any) -> Any:
    """Convert a dataclass of JSON types and of such dataclasses to JSON; :func:`made` is the inverse."""
    if not is_dataclass(thing):
        return thing
    kind = type(thing)
    own = {field.name: described(getattr(thing, field.name)) for field in fields(thing)}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": own}


def made(about: Any) -> Any:
    """Reconstruct a dataclass from the result of :func:`described`."""
    if not isinstance(about, dict) or "class" not in about:
        return about
    module, _, name = about["class"].partition(":")
    return getattr(import_module(module), name)(**{key: made(value) for key, value in about["fields"].items()})


def line_bytes(size_bytes: int) -> Bytes:
    """Allocate memory aligned to a cache line."""
    buffer = np.empty(size_bytes + LINE_BYTES, np.uint8)
    begin = -buffer.ctypes.data % LINE_BYTES
    return buffer[begin : begin + size_bytes]
