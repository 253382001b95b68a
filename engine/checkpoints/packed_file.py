"""File of named tensors, mapped and shared by processes: the format of packed weights on disk and in memory.

    PILLIONW | length of the header (8 bytes, little endian) | header (JSON) | padding | tensor | padding | tensor ...

Every tensor begins on a page, for aligned vector loads and whole-page reads. The mapping is shared and read-only: its
pages are in memory once, whatever the number of workers on a host.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from pillion.engine.checkpoints.model_cache import PACKING_VERSION, TEMP_SUFFIX, ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.errors import ConfigError
from pillion.kernels.cpu.runtime.code_cache import others_could_write

_MAGIC = b"PILLIONW"
_PAGE_BYTES = 4096
# Space for the header, which is written after the tensors.
_HEADER_BYTES = 2**20
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
}


class PackedWriter:
    """Writer that appends tensors to a packed file; see :func:`write_packed`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tensors: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        self._end = _HEADER_BYTES

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor. Raises ConfigError if the file already has one with this name."""
        if name in self._tensors:
            raise ConfigError(f"{name} is packed twice")
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert dtype in _DTYPES, dtype
        flat_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._tensors[name] = [dtype, list(tensor.shape), self._end]
        self._file.seek(self._end)
        self._file.write(flat_bytes.numpy().data)
        self._end += -(-flat_bytes.numel() // _PAGE_BYTES) * _PAGE_BYTES

    def number(self, name: str, value: int) -> None:
        self._numbers[name] = value

    def finish(self) -> None:
        header = json.dumps({"tensors": self._tensors, "numbers": self._numbers, "bytes": self._end}).encode()
        if len(header) + len(_MAGIC) + 8 > _HEADER_BYTES:
            raise ConfigError("too many tensors for a packed file's header")
        self._file.truncate(self._end)
        self._file.seek(0)
        self._file.write(_MAGIC + len(header).to_bytes(8, "little") + header)


@contextmanager
def write_packed(path: Path) -> Iterator[PackedWriter]:
    """Yield the writer of a packed file, which is renamed to ``path`` if the block succeeds, and removed otherwise."""
    draft = path.with_name(path.name + TEMP_SUFFIX)
    try:
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            writer = PackedWriter(file)
            yield writer
            writer.finish()
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"packed weights cannot be stored in {path.parent}: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)


class PackedFile:
    """Mapped packed file. Its ``tensors`` are read-only views, and the mapping lives until the last of them dies."""

    read_ahead = True

    def __init__(self, path: Path) -> None:
        """Map the file. Raises ConfigError for a damaged file, OSError for a missing one."""
        try:
            with path.open("rb") as file:
                if others_could_write(os.fstat(file.fileno())):
                    raise ValueError("other users could have written it")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = self._read_header()
            self.numbers: dict[str, int] = {name: int(value) for name, value in header["numbers"].items()}
            self.tensors = {name: self._view(*location) for name, location in header["tensors"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be used ({error}); remove it") from None
        if self.read_ahead and hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED)

    def _read_header(self) -> dict[str, Any]:
        start = len(_MAGIC) + 8
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise ValueError("no header")
        length = int.from_bytes(self._map[len(_MAGIC) : start], "little")
        if length > _HEADER_BYTES - start:
            raise ValueError("header too long")
        header: dict[str, Any] = json.loads(self._map[start : start + length])
        if header["bytes"] != len(self._map):
            raise ValueError(f"{len(self._map)} bytes instead of {header['bytes']}")
        return header

    def _view(self, dtype: str, shape: list[int], begin: int) -> torch.Tensor:
        count = math.prod(shape)
        size = count * _DTYPES[dtype].itemsize
        if begin < _HEADER_BYTES or count < 0 or begin + size > len(self._map):
            raise ValueError("a tensor reaches beyond the file")
        with warnings.catch_warnings():
            # Torch warns about read-only memory, since it has no read-only tensors.
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(self._map, dtype=_DTYPES[dtype], count=count, offset=begin).view(shape)


F = TypeVar("F", bound=PackedFile)


def packed_once(
    path: Path, make: Callable[[Path], F], pack: Callable[[PackedWriter], None], cache: ModelCache, progress: Progress
) -> F:
    """Return ``make(path)``, which maps a packed file. If the file is missing, one process of the machine writes it
    with ``pack`` first."""
    with contextlib.suppress(OSError):
        return make(path)
    with cache.lock(path, progress):
        with contextlib.suppress(OSError):
            return make(path)
        cache.remove_temporary(path.parent)
        _remove_older(path)
        with write_packed(path) as writer:
            pack(writer)
        return make(path)


def _remove_older(path: Path) -> None:
    """Remove the files of all models with an older packing version. Running workers of an older release keep their
    mappings."""
    for other in path.parent.iterdir():
        version = other.name.rpartition("-")[2].removesuffix(".weights")
        if version.isdigit() and int(version) < PACKING_VERSION:
            with contextlib.suppress(OSError):
                other.unlink()
