"""Emits instructions on the processor's matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes.

    sums[r][c] += dot product of row r of one tile with column c of another

A *step* is 4 bytes of a row, two bfloat16 or four codes, and the same of 16 columns, which lie side by side: a line of
64 bytes. One instruction adds up to TILE_STEPS steps to the sums of up to TILE_ROWS rows. In bfloat16 it adds up the
first products of all its steps, and the second ones, each as one chain in float32, and adds both to the sum. So the
bits of a sum depend on which steps are multiplied by one instruction, and on nothing in other rows.

A thread gives its tiles their shapes, which zeroes them, and releases them at last: the system then need not save them
when it takes the thread's core away, and other instructions run at full speed. The kernels' language does not know
which tiles are in use; a function that has shaped tiles calls no other function that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.emit import I8, I64, Int, Kernel, Ptr

TILE_ROWS, TILE_STEPS = 16, 16
STEP_BYTES = 4
TILES = 8
# The description of all shapes has 64 bytes: a version, then 16 bits for the bytes of each tile's rows, and a byte for
# its number of rows.
_SHAPES_BYTES, _VERSION = 64, 1
_AT_ROW_BYTES, _AT_ROWS = 16, 48
_NOTHING = ir.VoidType()
_ANY = I8.as_pointer()


@dataclass(frozen=True, slots=True)
class MatrixTiles:
    """Appends instructions on tiles, which are named by their numbers, to a kernel."""

    k: Kernel
    _shapes: Ptr

    @classmethod
    def of(cls, k: Kernel) -> MatrixTiles:
        """Returns the tiles of the thread that runs the kernel; they have no shapes yet."""
        with k.builder.goto_entry_block():
            cell = k.builder.alloca(ir.ArrayType(I64, _SHAPES_BYTES // 8))
            cell.align = _SHAPES_BYTES
            address = k.builder.ptrtoint(cell, I64)
        size = k.int(_SHAPES_BYTES).ir
        return cls(k, Ptr(k, address, address, k.builder.add(address, size)))

    def shape(self, rows: Sequence[Int | int], row_bytes: Sequence[Int | int]) -> None:
        """Gives each tile its number of rows, 1 to 16, and the bytes of a row, 4 to 64, and zeroes all tiles. Tiles
        that are not named have no shape."""
        k = self.k
        words: dict[int, Int | int] = dict.fromkeys(range(0, _SHAPES_BYTES, 8), 0)
        words[0] = _VERSION
        for sizes, begin, size in ((row_bytes, _AT_ROW_BYTES, 2), (rows, _AT_ROWS, 1)):
            for tile, value in enumerate(sizes):
                word, place = divmod(begin + size * tile, 8)
                words[8 * word] = k.int(value) * (1 << 8 * place) + words[8 * word]
        for at, bits in words.items():
            k.store_int(self._shapes + at, bits)
        self._call("ldtilecfg", [_ANY], [self._pointer(self._shapes)])

    def release(self) -> None:
        """Takes all tiles' shapes away."""
        self._call("tilerelease", [], [])

    def clear(self, tile: int) -> None:
        """Zeroes a tile."""
        self._call("tilezero", [I8], [I8(tile)])

    def load(self, tile: int, ptr: Ptr, stride: Int | int) -> None:
        """Loads a tile, whose rows are ``stride`` bytes apart. The caller has checked the memory."""
        self._call("tileloadd64", [I8, _ANY, I64], [I8(tile), self._pointer(ptr), self.k.int(stride).ir])

    def store(self, tile: int, ptr: Ptr, stride: Int | int) -> None:
        """Stores a tile, whose rows are ``stride`` bytes apart. The caller has checked the memory."""
        self._call("tilestored64", [I8, _ANY, I64], [I8(tile), self._pointer(ptr), self.k.int(stride).ir])

    def add_pairs(self, sums: int, rows: int, columns: int) -> None:
        """Adds the products of bfloat16 pairs to float32 sums."""
        self._multiply("tdpbf16ps", sums, rows, columns)

    def add_codes(self, sums: int, rows: int, columns: int) -> None:
        """Adds the products of signed codes of rows with unsigned codes of columns to sums of 32 bits."""
        self._multiply("tdpbsud", sums, rows, columns)

    def _multiply(self, name: str, *tiles: int) -> None:
        self._call(name, [I8] * 3, [I8(tile) for tile in tiles])

    def _pointer(self, ptr: Ptr) -> Any:
        return self.k.builder.inttoptr(ptr.ir, _ANY)

    def _call(self, name: str, kinds: Sequence[Any], values: Sequence[Any]) -> None:
        self.k.builder.call(self.k.function(f"llvm.x86.{name}", _NOTHING, kinds), values)
