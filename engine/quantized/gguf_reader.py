"""Reader of GGUF files: metadata, and tensors as views of the mapped files. Imports no torch.

    GGUF | version (4 bytes) | tensors (8) | entries (8) | entry ... | tensor's name, shape, type, offset ... | data

An entry of the metadata is a key, a type and a value: a number, a string, or an array (type, length, items). Lengths
are checked against the file's size before anything is allocated.
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

# GGUF value types: NumPy dtypes of numeric types by id; ids of string and array.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
# Min sizes: entry (length of its key, type), tensor (length of its name, number of dimensions, type, offset), string
# (length), array (type, length).
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES, _MIN_STRING_BYTES, _MIN_ARRAY_BYTES = 12, 24, 8, 12
# Limits on nested arrays, and on a tensor's dimensions.
_MAX_NESTED, _MAX_DIMENSIONS = 4, 4
_COUNT = struct.Struct("<Q")
# Plain tensor types -> NumPy dtypes of their data.
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
# Number of a tensor type -> name, values per block, bytes per block. Other types are looked up in the gguf package.
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
    """A tensor of a GGUF file.

    Attributes:
        kind: name of its type, e.g. "Q4_K".
        shape: in C order.
        data: values of that shape for plain types (uint16 for BF16); else uint8 [..., bytes per row].
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray

    def numbers(self) -> np.ndarray:
        """Return the dequantized values: float64 for F64, else float32."""
        if self.kind == "BF16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.kind in _PLAIN:
            return self.data if self.kind == "F64" else self.data.astype(np.float32)
        from gguf import GGMLQuantizationType, dequantize

        values: np.ndarray = dequantize(self.data, GGMLQuantizationType[self.kind])
        return values


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Metadata and tensors of a model in one or several GGUF files. Numeric arrays in ``metadata`` are NumPy arrays."""

    metadata: Mapping[str, Any]
    tensors: Sequence[GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "llama"))

    def get(self, key: str) -> Any:
        """Return the value of the metadata key ARCHITECTURE.key; None if it is missing."""
        return self.metadata.get(f"{self.architecture}.{key}")

    @property
    def quantized_types(self) -> list[str]:
        return sorted({tensor.kind for tensor in self.tensors} - _PLAIN.keys())


def read_gguf(parts: Sequence[Path]) -> GgufModel:
    """Read the files of a model; metadata are those of the first one. Raises ConfigError, without a file name, for
    damaged files and for files of different models."""
    files = [_read_file(path) for path in parts]
    metadata = files[0][0]
    tensors = [tensor for _, file_tensors in files for tensor in file_tensors]
    count = metadata.get("split.count", 0)
    if count > 1 and count != len(parts):
        raise ConfigError(f"it is part {metadata.get('split.no', 0) + 1} of {count}, and {len(parts)} were found")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ConfigError("it has duplicate tensor names")
    _check_counts(metadata, len(tensors))
    return GgufModel(metadata, tensors)


def _check_counts(metadata: Mapping[str, Any], tensors: int) -> None:
    """Raise ConfigError for more layers than tensors, or more than MAX_EXPERTS experts, for each of which later code
    allocates memory."""
    for key, value in metadata.items():
        limit = {"block_count": tensors, "expert_count": MAX_EXPERTS}.get(key.rpartition(".")[2])
        if limit is not None and isinstance(value, int) and value > limit:
            raise ConfigError(f"{key} = {value}, but the file has room for at most {limit}")


def _read_file(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Return the metadata and tensors of one file."""
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
        key = cursor.string()
        if key in metadata:
            raise ConfigError(f"its header has {key!r} twice")
        metadata[key] = cursor.value(cursor.number(4))
    headers = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ConfigError(f"its alignment is {alignment!r}, which is not a power of two")
    begin = -(-cursor.offset // alignment) * alignment
    return metadata, [_tensor(cursor, begin + offset, name, shape, kind) for name, shape, kind, offset in headers]


def _tensor_header(cursor: GgufCursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read a tensor's name, shape, type, and offset in the data section."""
    name, dimensions = cursor.string(), cursor.number(4)
    if dimensions > _MAX_DIMENSIONS:
        raise ConfigError(f"{name} has {dimensions} dimensions")
    shape = tuple(cursor.number(10) for _ in range(dimensions))[::-1] or (1,)
    return name, shape, cursor.number(4), cursor.number(10)


def _tensor(cursor: GgufCursor, begin: int, name: str, shape: tuple[int, ...], kind: int) -> GgufTensor:
    type_name, block_values, block_bytes = _TYPES.get(kind) or _rare_type(kind)
    if shape[-1] % block_values:
        raise ConfigError(f"the rows of {name} have {shape[-1]} numbers, and blocks of {type_name} {block_values}")
    data_shape = (*shape[:-1], shape[-1] // block_values * block_bytes)
    cursor.offset = begin
    cursor.need(math.prod(data_shape), 1)
    data = np.frombuffer(cursor.data, np.uint8, math.prod(data_shape), begin)
    plain = _PLAIN.get(type_name)
    return GgufTensor(
        name, type_name, shape, data.reshape(data_shape) if plain is None else data.view(plain).reshape(shape)
    )


def _rare_type(kind: int) -> tuple[str, int, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        quantization_type = GGMLQuantizationType(kind)
    except ValueError:
        raise ConfigError(f"it has tensors of the type {kind}, which is not known") from None
    return quantization_type.name, *GGML_QUANT_SIZES[quantization_type]


class GgufCursor:
    """Sequential reader of a mapped file. Raises ConfigError at a premature end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.offset = data, 0

    def need(self, count: int, size: int) -> None:
        """Raise ConfigError if fewer than ``count`` * ``size`` bytes are left."""
        left = max(len(self.data) - self.offset, 0)
        if count * size > left:
            raise ConfigError(
                f"its header counts {count:,} items of {size} bytes or more where {left:,} bytes are left;"
                " it may be damaged or truncated"
            )

    def skip(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        self.need(size, 1)
        start, self.offset = self.offset, self.offset + size
        return self.data[start : self.offset]

    def number(self, kind: int) -> Any:
        """Read a number of type ``kind``."""
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.skip(dtype.itemsize), dtype)[0].item()

    def count(self, size: int) -> int:
        """Read a number of items of at least ``size`` bytes each. Raises ConfigError if they exceed the file."""
        count: int = self.number(10)
        self.need(count, size)
        return count

    def string(self) -> str:
        return str(self.skip(self.count(1)), "utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of type ``kind``."""
        if kind in _NUMBERS:
            return self.number(kind)
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _MAX_NESTED:
            raise ConfigError(f"its header has a value of the type {kind}, which is not known")
        item_kind: int = self.number(4)
        if item_kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[item_kind])
            return np.frombuffer(self.skip(self.count(dtype.itemsize) * dtype.itemsize), dtype)
        if item_kind == _STRING:
            return self._strings(self.count(_MIN_STRING_BYTES))
        return [self.value(item_kind, depth + 1) for _ in range(self.count(_MIN_ARRAY_BYTES))]

    def _strings(self, count: int) -> list[str]:
        """Read an array of strings. In one loop without calls of other methods, since vocabularies have hundreds of
        thousands."""
        data, offset, end, strings = self.data, self.offset, len(self.data), []
        for _ in range(count):
            begin = offset + _MIN_STRING_BYTES
            if begin > end:
                break
            offset = begin + _COUNT.unpack_from(data, offset)[0]
            if offset > end:
                break
            strings.append(str(data[begin:offset], "utf-8"))
        else:
            self.offset = offset
            return strings
        raise ConfigError("its header ends within a string; it may be damaged or truncated")
