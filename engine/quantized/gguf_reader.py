"""Reader of GGUF files: metadata, and tensors as views of the mapped files. Imports no torch.

    GGUF | version (4 bytes) | tensors (8) | entries (8) | entry ... | tensor's name, shape, type, offset ... | data

An entry is a key, a type and a value: a number, a text, or an array (type, length, items). Lengths are checked against
the file's size before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pillion.engine.models.config_json import MAX_EXPERTS
from pillion.errors import ConfigError

# Numpy formats of number types; 8 is a text, 9 an array.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)
# Lower bounds in bytes. Entry: length of the key, type; tensor: length of the name, dimensions, type, offset; text: its
# length; array: type and length.
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES, _MIN_TEXT_BYTES, _MIN_ARRAY_BYTES = 12, 24, 8, 12
_MAX_NESTED = 4
_MAX_DIMENSIONS = 4
_COUNT = struct.Struct("<Q")
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
PLAIN_TYPES = frozenset(_PLAIN)
# Tensor types by number: name, values per block, bytes per block. The gguf package has the rarer ones.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its name, the name of its type ("Q4_K"), its shape in C order, and its data: values of that shape for
    plain types (uint16 for BF16), else uint8 [..., bytes per row]."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray

    def numbers(self) -> np.ndarray:
        """Return the tensor in float32 (float64 if stored so)."""
        if self.kind == "BF16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.kind in _PLAIN:
            return self.data if self.kind == "F64" else self.data.astype(np.float32)
        from gguf import GGMLQuantizationType, dequantize

        found: np.ndarray = dequantize(self.data, GGMLQuantizationType[self.kind])
        return found


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in one GGUF file, or in several parts. Numeric arrays in ``metadata`` are numpy arrays."""

    metadata: Mapping[str, Any]
    tensors: Sequence[GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "llama"))

    def get(self, key: str) -> Any:
        """Return the architecture's value of a key, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    @property
    def quantized_types(self) -> list[str]:
        return sorted({tensor.kind for tensor in self.tensors} - PLAIN_TYPES)


def read_gguf(parts: Sequence[Path]) -> GgufModel:
    """Read the parts of a model, usually one; metadata are those of the first. Raises ConfigError, without the file's
    name, for damaged files and for parts that do not belong together."""
    read = [_read_file(path) for path in parts]
    metadata = read[0][0]
    tensors = [tensor for _, found in read for tensor in found]
    count = metadata.get("split.count", 0)
    if count > 1 and count != len(parts):
        raise ConfigError(f"it is part {metadata.get('split.no', 0) + 1} of {count}, and {len(parts)} were found")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ConfigError("it has duplicate tensor names")
    _check_counts(metadata, len(tensors))
    return GgufModel(metadata, tensors)


def _check_counts(metadata: Mapping[str, Any], tensors: int) -> None:
    """Limit what later code allocates per layer and expert."""
    for key, value in metadata.items():
        most = {"block_count": tensors, "expert_count": MAX_EXPERTS}.get(key.rpartition(".")[2])
        if most is not None and isinstance(value, int) and value > most:
            raise ConfigError(f"{key} = {value}, and at most {most} have room in the file")


def _read_file(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    with path.open("rb") as file:
        cursor = GgufCursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if cursor.skip(4) != b"GGUF":
        raise ConfigError("it is not a GGUF file")
    version = cursor.number(4)
    if int.from_bytes(version.to_bytes(4, "big"), "little") in _VERSIONS:
        raise ConfigError("it is in big-endian byte order, which is not supported")
    if version not in _VERSIONS:
        raise ConfigError(f"it has the version {version}, which is not known; it may be damaged or truncated")
    num_tensors, entries = cursor.number(10), cursor.number(10)
    cursor.need(entries, _MIN_ENTRY_BYTES)
    cursor.need(num_tensors, _MIN_TENSOR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text()
        if key in metadata:
            raise ConfigError(f"its header has {key!r} twice")
        metadata[key] = cursor.value(cursor.number(4))
    headers = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ConfigError(f"its alignment is {alignment!r}, which is no power of two")
    begin = -(-cursor.place // alignment) * alignment
    return metadata, [_tensor(cursor, begin + offset, name, shape, kind) for name, shape, kind, offset in headers]


def _tensor_header(cursor: GgufCursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's name, shape, type, and offset in the data."""
    name, dimensions = cursor.text(), cursor.number(4)
    if dimensions > _MAX_DIMENSIONS:
        raise ConfigError(f"{name} has {dimensions} dimensions")
    shape = tuple(cursor.number(10) for _ in range(dimensions))[::-1] or (1,)
    return name, shape, cursor.number(4), cursor.number(10)


def _tensor(cursor: GgufCursor, place: int, name: str, shape: tuple[int, ...], kind: int) -> GgufTensor:
    type_name, numbers, size = _TYPES.get(kind) or _rare_type(kind)
    if shape[-1] % numbers:
        raise ConfigError(f"the rows of {name} have {shape[-1]} numbers, and blocks of {type_name} {numbers}")
    rows = (*shape[:-1], shape[-1] // numbers * size)
    cursor.place = place
    cursor.need(math.prod(rows), 1)
    data = np.frombuffer(cursor.data, np.uint8, math.prod(rows), place)
    plain = _PLAIN.get(type_name)
    return GgufTensor(name, type_name, shape, data.reshape(rows) if plain is None else data.view(plain).reshape(shape))


def _rare_type(kind: int) -> tuple[str, int, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        found = GGMLQuantizationType(kind)
    except ValueError:
        raise ConfigError(f"it has tensors of the type {kind}, which is not known") from None
    return found.name, *GGML_QUANT_SIZES[found]


class GgufCursor:
    """Sequential reader of a mapped file. Raises ConfigError at a premature end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def need(self, count: int, size: int) -> None:
        """Check that ``count`` items of at least ``size`` bytes each can follow."""
        left = max(len(self.data) - self.place, 0)
        if count * size > left:
            raise ConfigError(
                f"its header counts {count:,} items of {size} bytes or more where {left:,} bytes are left;"
                " it may be damaged or truncated"
            )

    def skip(self, size: int) -> bytes:
        self.need(size, 1)
        begin, self.place = self.place, self.place + size
        return self.data[begin : self.place]

    def number(self, kind: int) -> Any:
        form = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.skip(form.itemsize), form)[0].item()

    def count(self, size: int) -> int:
        """Read a count of items of at least ``size`` bytes each."""
        found: int = self.number(10)
        self.need(found, size)
        return found

    def text(self) -> str:
        return str(self.skip(self.count(1)), "utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(kind)
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth == _MAX_NESTED:
            raise ConfigError(f"its header has a value of the type {kind}, which is not known")
        inner: int = self.number(4)
        if inner in _NUMBERS:
            form = np.dtype(_NUMBERS[inner])
            return np.frombuffer(self.skip(self.count(form.itemsize) * form.itemsize), form)
        if inner == _TEXT:
            return self._texts(self.count(_MIN_TEXT_BYTES))
        return [self.value(inner, depth + 1) for _ in range(self.count(_MIN_ARRAY_BYTES))]

    def _texts(self, count: int) -> list[str]:
        """Read an array of texts; fast, as a vocabulary has hundreds of thousands."""
        data, place, end, found = self.data, self.place, len(self.data), []
        for _ in range(count):
            begin = place + _MIN_TEXT_BYTES
            if begin > end:
                break
            place = begin + _COUNT.unpack_from(data, place)[0]
            if place > end:
                break
            found.append(str(data[begin:place], "utf-8"))
        else:
            self.place = place
            return found
        raise ConfigError("its header ends within a text; it may be damaged or truncated")
