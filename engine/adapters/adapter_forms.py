"""An adapter on its way from the process that reads it to its worker: its matrices as bits, and the form of a backend.

    files --read_pairs--> Layers --AdapterForm.pack--> what JSON can say, and bytes --a pipe--> the worker's backend

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

# The bits of numbers: uint32 for float32, uint16 for bfloat16.
Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
LINE_BYTES = 64
NO_BYTES: Bytes = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class PairBits:
    """One pair of matrices as bits, as :class:`pillion.engine.adapters.adapter_weights.LowRank` has it as tensors.

    Attributes:
        first_output: the first output of the fused layer that it adds to.
        a: [rank, inputs].
        b: [outputs, rank], multiplied by the adapter's scale.
    """

    first_output: int
    a: Bits
    b: Bits


# The pairs of each fused layer, in the order of their outputs.
Layers = Mapping[str, Sequence[PairBits]]


class AdapterForm(Protocol):
    """The form in which a backend takes adapters; :func:`described` for the process that reads them."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Returns a list for JSON, and bytes. Raises ConfigError for what the backend cannot take."""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """All matrices, one behind the other, for backends that take them as tensors."""

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Returns the size of one number in bytes with the shapes of all pairs, and the matrices' bytes."""
        about = [
            [name, pair.first_output, *pair.a.shape, len(pair.b)] for name, pairs in layers.items() for pair in pairs
        ]
        matrices = [matrix for pairs in layers.values() for pair in pairs for matrix in (pair.a, pair.b)]
        return [matrices[0].itemsize, *about], np.concatenate([one.reshape(-1).view(np.uint8) for one in matrices])


def plain_layers(about: list[Any], data: Bytes) -> Layers:
    """What a :class:`PlainForm` packed, as views of its bytes."""
    size_bytes, *pairs = about
    layers: dict[str, list[PairBits]] = {}
    values, end = data.view(f"u{size_bytes}"), 0
    for name, first_output, rank, inputs, outputs in pairs:
        middle = end + rank * inputs
        a, begin, end = values[end:middle], middle, middle + outputs * rank
        pair = PairBits(first_output, a.reshape(rank, inputs), values[begin:end].reshape(outputs, rank))
        layers.setdefault(name, []).append(pair)
    return layers


def described(thing: Any) -> Any:
    """Turns a dataclass of JSON's types and of such dataclasses into what JSON holds; :func:`made` reverts it."""
    if not is_dataclass(thing):
        return thing
    kind = type(thing)
    own = {field.name: described(getattr(thing, field.name)) for field in fields(thing)}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": own}


def made(about: Any) -> Any:
    """Makes what was :func:`described`."""
    if not isinstance(about, dict) or "class" not in about:
        return about
    module, _, name = about["class"].partition(":")
    return getattr(import_module(module), name)(**{key: made(value) for key, value in about["fields"].items()})


def line_bytes(size_bytes: int) -> Bytes:
    """Memory for so many bytes that begins at a cache line."""
    buffer = np.empty(size_bytes + LINE_BYTES, np.uint8)
    begin = -buffer.ctypes.data % LINE_BYTES
    return buffer[begin : begin + size_bytes]
