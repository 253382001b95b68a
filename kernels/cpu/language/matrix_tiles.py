"""Instructions on the processor's matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes.

    sums[r][c] += dot product of row r of one tile with column c of another

A *step* is 4 bytes of a row, two bfloat16 or four codes, and the corresponding 4 bytes of 16 columns, adjacent in a
line of 64 bytes. One instruction adds up to TILE_STEPS steps to the sums of up to TILE_ROWS rows. In bfloat16 it sums
the first products of all its steps, and the second ones, each as one chain in float32, and adds both to the sum. So the
bits of a sum depend on which steps share an instruction, and on nothing in other rows. Products and additions are
fused, round to nearest even, and flush denormal operands and results to zero.

A thread configures its tiles, which zeroes them, and releases them at the end: the system then need not save them on a
context switch, and other instructions run at full speed. The kernels' language does not track tiles: a function that
has configured tiles must not call another function that does, but its subroutines may use its tiles.

Tests on processors without tiles emulate them in the function's frame (:attr:`Isa.emulated_tiles`): the tile
configuration, then each tile with 16 rows of 64 bytes. As on a processor, an instruction with operands of mismatched
shapes raises SIGILL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from pillion.kernels.cpu.language.emit import I8, I32, I64, VECTOR_BYTES, Bool, Int, Kernel, Ptr

TILE_ROWS, TILE_STEPS = 16, 16
STEP_BYTES = 4
TILES = 8
# Bytes of the tile configuration (operand of LDTILECFG): the palette, then per tile its bytes per row (uint16) and its
# rows (uint8), at the offsets below.
_SHAPES_BYTES = 64
_AT_ROW_BYTES, _AT_ROWS = 16, 48
_TILE_BYTES = TILE_ROWS * VECTOR_BYTES
_EMULATED_BYTES = _SHAPES_BYTES + TILES * _TILE_BYTES
_VOID = ir.VoidType()
_BYTE_PTR = I8.as_pointer()


@dataclass(frozen=True, slots=True)
class MatrixTiles:
    """The tiles of the thread that runs a kernel, addressed by number."""

    k: Kernel
    # Tile configuration, then emulated tiles. A subroutine that uses its caller's tiles gets the caller's address.
    memory: Ptr

    @classmethod
    def of(cls, k: Kernel) -> MatrixTiles:
        """Return the tiles of the thread that runs the kernel, not yet configured."""
        size = _EMULATED_BYTES if k.isa.emulated_tiles else _SHAPES_BYTES
        with k.builder.goto_entry_block():
            cell = k.builder.alloca(ir.ArrayType(I64, size // 8))
            cell.align = _SHAPES_BYTES
            address = k.builder.ptrtoint(cell, I64)
        return cls(k, Ptr(k, address, address, k.builder.add(address, I64(size))))

    def shape(self, rows: Sequence[Int | int], row_bytes: Sequence[Int | int]) -> None:
        """Configure the rows, 1 to 16, and the bytes per row, 4 to 64, of tiles 0, 1, ..., and zero all tiles. Further
        tiles are unusable."""
        k = self.k
        words: dict[int, Int | int] = dict.fromkeys(range(0, _SHAPES_BYTES, 8), 0)
        words[0] = 1  # the only palette
        for sizes, begin, size in ((row_bytes, _AT_ROW_BYTES, 2), (rows, _AT_ROWS, 1)):
            for tile, value in enumerate(sizes):
                word, byte = divmod(begin + size * tile, 8)
                words[8 * word] = k.int(value) * (1 << 8 * byte) + words[8 * word]
        for at, bits in words.items():
            k.store_int(self.memory + at, bits)
        self._run("ldtilecfg", self.memory)

    def release(self) -> None:
        """Release all tiles."""
        self._run("tilerelease")

    def clear(self, tile: int) -> None:
        self._run("tilezero", tile)

    def load(self, tile: int, ptr: Ptr, stride: Int | int, *, near: bool = True) -> None:
        """Load a tile whose rows are ``stride`` bytes apart. The caller must have checked the bounds. Without
        ``near``, the lines do not evict others from the L1 cache."""
        self._run("tileloadd64" if near else "tileloaddt164", tile, ptr, self.k.int(stride))

    def store(self, tile: int, ptr: Ptr, stride: Int | int) -> None:
        """Store a tile to rows ``stride`` bytes apart. The caller must have checked the bounds."""
        self._run("tilestored64", tile, ptr, self.k.int(stride))

    def add_pairs(self, sums: int, rows: int, columns: int) -> None:
        """Add the products of bfloat16 pairs to float32 sums."""
        self._run("tdpbf16ps", sums, rows, columns)

    def add_codes(self, sums: int, rows: int, columns: int) -> None:
        """Add the products of rows' signed codes and columns' unsigned codes to 32-bit sums."""
        self._run("tdpbsud", sums, rows, columns)

    def _run(self, name: str, *operands: int | Int | Ptr) -> None:
        """Append an instruction. Operands are tiles (Python integers), addresses and strides."""
        k, b = self.k, self.k.builder
        if k.isa.emulated_tiles:
            values = [k.int(each) if isinstance(each, int) else each for each in operands]
            k.call_subroutine(f"emulated_{name}", (self.memory, *values), _EMULATED[name])
            return
        raw = [
            I8(each) if isinstance(each, int) else b.inttoptr(each.ir, _BYTE_PTR) if isinstance(each, Ptr) else each.ir
            for each in operands
        ]
        b.call(k.function(f"llvm.x86.{name}", _VOID, [each.type for each in raw]), raw)


# Emulated instructions. ``memory`` is the tile configuration, then the tiles.


def _emulated_shape(k: Kernel, memory: Ptr, shapes: Ptr) -> None:
    for tile in range(TILES):
        rows, row_bytes = _shape_of(k, memory, k.int(tile))
        valid = (rows > 0) & (rows <= TILE_ROWS) & (row_bytes > 0) & (row_bytes <= VECTOR_BYTES)
        _require(k, valid | (rows.equals(0) & row_bytes.equals(0)))
    for at in range(_SHAPES_BYTES, _EMULATED_BYTES, VECTOR_BYTES):
        k.store(memory + at, k.vector(0.0))


def _emulated_release(k: Kernel, memory: Ptr) -> None:
    k.store(memory, k.vector(0.0))


def _emulated_clear(k: Kernel, memory: Ptr, tile: Int) -> None:
    rows, _ = _shape_of(k, memory, tile)
    _require(k, rows > 0)
    for row in range(TILE_ROWS):
        k.store(_tile(memory, tile) + row * VECTOR_BYTES, k.vector(0.0))


def _emulated_load(k: Kernel, memory: Ptr, tile: Int, ptr: Ptr, stride: Int) -> None:
    _emulated_clear(k, memory, tile)
    rows, row_bytes = _shape_of(k, memory, tile)
    with k.range(rows) as row:
        _copy_row(k, ptr + row * stride, _tile(memory, tile) + row * VECTOR_BYTES, row_bytes)


def _emulated_store(k: Kernel, memory: Ptr, tile: Int, ptr: Ptr, stride: Int) -> None:
    rows, row_bytes = _shape_of(k, memory, tile)
    _require(k, rows > 0)
    with k.range(rows) as row:
        _copy_row(k, _tile(memory, tile) + row * VECTOR_BYTES, ptr + row * stride, row_bytes)


def _emulated_pairs(k: Kernel, memory: Ptr, sums: Int, rows: Int, columns: Int) -> None:
    b = k.builder
    cells, pointers = [b.alloca(I32) for _ in range(2)], [_BYTE_PTR]
    before, flushing = (b.bitcast(cell, _BYTE_PTR) for cell in cells)
    # MXCSR with all exceptions masked, and denormal operands and results flushed to zero.
    b.store(I32(0x9FC0), cells[1])
    b.call(k.function("llvm.x86.sse.stmxcsr", _VOID, pointers), [before])
    b.call(k.function("llvm.x86.sse.ldmxcsr", _VOID, pointers), [flushing])
    # LLVM may move arithmetic across the change of mode, but not out of a separate function.
    k.call_subroutine("emulated_tdpbf16ps_flushing", (memory, sums, rows, columns), _emulated_flushing_pairs)
    b.call(k.function("llvm.x86.sse.ldmxcsr", _VOID, pointers), [before])


def _emulated_flushing_pairs(k: Kernel, memory: Ptr, sums: Int, rows: Int, columns: Int) -> None:
    count, steps, width = _product_of(k, memory, sums, rows, columns)
    with k.range(count) as row:
        chains = [k.variable(k.vector(0.0)) for _ in range(2)]
        with k.range(steps) as step:
            row_pair = k.broadcast_pair(_tile(memory, rows) + (row * VECTOR_BYTES + step * STEP_BYTES))
            column_pairs = k.load_pairs(_tile(memory, columns) + step * VECTOR_BYTES)
            for chain, half in zip(chains, (k.low, k.high), strict=True):
                chain.value = k.fma(half(row_pair), half(column_pairs), chain.value)
        at = _tile(memory, sums) + row * VECTOR_BYTES
        total = k.load(at) + (chains[0].value + chains[1].value)
        k.store(at, k.select(k.below(k.int(0), width), total, k.vector(0.0)))


def _emulated_codes(k: Kernel, memory: Ptr, sums: Int, rows: Int, columns: Int) -> None:
    count, steps, _ = _product_of(k, memory, sums, rows, columns)
    with k.range(count) as row:
        at = _tile(memory, sums) + row * VECTOR_BYTES
        total = k.variable(k.load_quads(at))
        with k.range(steps) as step:
            codes = k.broadcast_quad(_tile(memory, rows) + (row * VECTOR_BYTES + step * STEP_BYTES))
            total.value = k.dot_codes(total.value, k.load_quads(_tile(memory, columns) + step * VECTOR_BYTES), codes)
        # Columns beyond the shape are multiplied by weights of 0.
        k.store_quads(at, total.value)


_EMULATED: dict[str, Callable[..., None]] = {
    "ldtilecfg": _emulated_shape,
    "tilerelease": _emulated_release,
    "tilezero": _emulated_clear,
    "tileloadd64": _emulated_load,
    "tileloaddt164": _emulated_load,
    "tilestored64": _emulated_store,
    "tdpbf16ps": _emulated_pairs,
    "tdpbsud": _emulated_codes,
}


def _tile(memory: Ptr, tile: Int) -> Ptr:
    return memory + (tile * _TILE_BYTES + _SHAPES_BYTES)


def _shape_of(k: Kernel, memory: Ptr, tile: Int) -> tuple[Int, Int]:
    """Return a tile's rows and bytes per row."""
    return k.load_int(memory + (tile + _AT_ROWS), 8), k.load_int(memory + (tile * 2 + _AT_ROW_BYTES), 16)


def _product_of(k: Kernel, memory: Ptr, sums: Int, rows: Int, columns: Int) -> tuple[Int, Int, Int]:
    """Return the rows, steps and columns of a product; trap if the shapes of its tiles do not match."""
    (count, sums_bytes), (rows_count, rows_bytes), (steps, columns_bytes) = (
        _shape_of(k, memory, tile) for tile in (sums, rows, columns)
    )
    matching = rows_count.equals(count) & rows_bytes.equals(steps * STEP_BYTES) & columns_bytes.equals(sums_bytes)
    _require(k, matching & (count > 0) & (steps > 0))
    return count, steps, sums_bytes // STEP_BYTES


def _copy_row(k: Kernel, source: Ptr, target: Ptr, size: Int) -> None:
    with k.range(size, step=STEP_BYTES) as at:
        k.store_int(target + at, k.load_int(source + at, 32), 32)


def _require(k: Kernel, condition: Bool) -> None:
    """Raise SIGILL if the condition does not hold."""
    with k.builder.if_then(k.builder.not_(condition.ir), likely=False):
        k.builder.call(k.function("llvm.trap", _VOID, []), [])
