"""Checks the header of a GGUF file before any library reads it: what it counts must have room in the file.

    GGUF | version (4 bytes) | tensors (8) | entries (8) | entry ... | tensor's name, shape, type, place ... | numbers

An entry is a key, a type, and a value: a number, a text, or an array, which has a type, a length, and its items. The
readers believe each length, and work through an array of 2**61 items item by item. Imports nothing heavy.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from pillion.engine.models.config_json import MAX_EXPERTS
from pillion.errors import ConfigError

# The formats of plain values by their numbers; 8 is a text, and 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
# An entry has a key's length and a type at least; a tensor a name's length, a number of dimensions, a type and a place.
_LEAST_ENTRY_BYTES, _LEAST_TENSOR_BYTES, _LEAST_TEXT_BYTES = 12, 24, 8
_MOST_NESTED = 4


class GgufCursor:
    """Reads one value of a header after another. Raises ConfigError where the file ends before one does."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place, self.order = data, 4, "<"

    def number(self, form: str) -> int | float:
        size = struct.calcsize(form)
        value: int | float = struct.unpack(self.order + form, self.skip(size))[0]
        return value

    def skip(self, size: int) -> bytes:
        """Returns the next bytes."""
        self.need(size, 1)
        begin, self._place = self._place, self._place + size
        return self._data[begin : self._place]

    def need(self, count: int | float, size: int) -> None:
        """Checks that so many items of at least so many bytes have room behind this place."""
        left = len(self._data) - self._place
        if count * size > left:
            raise ConfigError(
                f"its header counts {count:,} items of {size} bytes or more where {left:,} bytes are left;"
                " it may be damaged, or cut short"
            )

    def count(self, size: int) -> int:
        """Reads the number of items of at least so many bytes."""
        found = int(self.number("Q"))
        self.need(found, size)
        return found

    def text(self) -> bytes:
        return self.skip(self.count(1))

    def value(self, kind: int, depth: int = 0) -> int | float | None:
        """Reads past a value; returns it if it is a number."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            self.text()
        elif kind == _ARRAY and depth < _MOST_NESTED:
            inner = int(self.number("I"))
            if inner in _NUMBERS:
                size = struct.calcsize(_NUMBERS[inner])
                self.skip(self.count(size) * size)
            else:
                for _ in range(self.count(_LEAST_TEXT_BYTES)):
                    self.value(inner, depth + 1)
        else:
            raise ConfigError(f"its header has a value of the type {kind}, which is not known")
        return None


def check_header(path: Path) -> None:
    """Raises ConfigError where a file's header counts more than the file has room for: entries, items, tensors, layers
    and experts."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = GgufCursor(data)
        if int.from_bytes(data[4:8], "little") > 0xFFFF:
            cursor.order = ">"
        cursor.number("I")
        tensors, entries = int(cursor.number("Q")), int(cursor.number("Q"))
        cursor.need(entries, _LEAST_ENTRY_BYTES)
        cursor.need(tensors, _LEAST_TENSOR_BYTES)
        for _ in range(entries):
            key = cursor.text()
            value = cursor.value(int(cursor.number("I")))
            most = {b"block_count": tensors, b"expert_count": MAX_EXPERTS}.get(key.rpartition(b".")[2])
            if most is not None and value is not None and value > most:
                raise ConfigError(f"{key.decode(errors='replace')} = {value}, and at most {most} have room in the file")
