"""Products of many rows with panels of packed weights in matrix tiles.

    for each block of up to 256 rows, and for each block of up to 2,048 inputs:      rows stay in the L2 cache
        copy the rows into tiles (once for all ranges of panels if the block is the whole depth)
        for each panel of the range, for each part of up to 576 inputs:              weights stay in the L1 cache
            widen codes, if any
            for each 32 rows: add to sums of 32 x 32; after the last input: epilogue

A tile has 16 adjacent rows of 64 bytes. Two tiles of rows are multiplied by two of weights, so each multiplying
instruction needs one load of a tile. Rows are loaded past the L1 cache, which then keeps a part's weights for all rows;
loading both from L2 takes a third longer. Tiles are configured once for a block of inputs; their content after the last
row is never read. Between parts, sums are stored as float32, so each is the same chain of additions as in
:mod:`pillion.kernels.cpu.products.gemm_tiles`, whatever the blocks and parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.byte_codes import LINE_BYTES
from pillion.kernels.cpu.language.emit import I32, VECTOR_BYTES, Bool, Int, Kernel, Ptr
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, MatrixTiles
from pillion.kernels.cpu.products.gemm_tiles import PANEL_STEP_BYTES, ROW_GROUPS, TileKind
from pillion.kernels.cpu.products.tiles import TOTALS_BYTES

# Rows whose sums are in tiles at a time. Products of so few rows do not copy them.
TILED_ROWS = ROW_GROUPS * TILE_ROWS
# Instructions per block of the depth (2,048 bfloat16 inputs), and 32-row tiles per block of rows: copied rows take up
# to half of a 2 MiB L2 cache.
_BLOCK, MAX_ROW_TILES = 64, 8
# Max instructions per part of a block: 36 KB of weights of a 48 KiB L1 cache.
_PART = 18
# Max panels per range. At this number, copying the rows costs a few percent of the products, and the sums kept between
# blocks of the depth fill a quarter of a 2 MiB L2 cache.
MAX_PANELS = 16
# Bytes of rows and of weights per instruction.
_INSTRUCTION_BYTES, _WEIGHTS_BYTES = TILED_ROWS * VECTOR_BYTES, TILE_STEPS * PANEL_STEP_BYTES
_SUMS_BYTES = TILED_ROWS * TOTALS_BYTES
# Scratch memory: copied rows, then sums, then a part's widened codes.
SUMS_OFFSET = MAX_ROW_TILES * _BLOCK * _INSTRUCTION_BYTES
_WIDE_OFFSET = SUMS_OFFSET + MAX_PANELS * MAX_ROW_TILES * _SUMS_BYTES
SCRATCH_NEEDED = _WIDE_OFFSET + _PART * _WEIGHTS_BYTES


@dataclass(frozen=True, slots=True)
class PanelRange:
    """Consecutive panels of one matrix.

    Attributes:
        first, end: the panels are first .. end - 1.
        weights: the weights of panel 0.
        panel_bytes: bytes from panel to panel.
        ahead: the weights of the panel to multiply after the range, for prefetches.
    """

    first: Int
    end: Int
    weights: Ptr
    panel_bytes: Int
    ahead: Ptr


@dataclass(frozen=True, slots=True)
class PanelPart:
    """Steps of a panel whose codes are to be widened.

    Attributes:
        panel, ahead: the panel, and the one to multiply next.
        first, steps: the first step, and the number of steps.
        wide: memory for the widened steps.
    """

    panel: Ptr
    ahead: Ptr
    first: Int
    steps: Int
    wide: Ptr


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Callbacks that emit the code around a panel's last products.

    Attributes:
        prefetch: emits code that runs before a panel's last products; called with the panel.
        prefetch_rows: emits code that runs before the last products of a tile of rows; called with its first row, its
            number of rows, and the panel.
        finish: emits code that processes the tile's finished sums; called with the same, and the sums' address.
    """

    prefetch: Callable[[Int], None]
    prefetch_rows: Callable[[Int, Int, Int], None]
    finish: Callable[[Int, Int, Int, Ptr], None]


class ManyRows:
    """Emitter of one kernel's products of many rows. ``widen``, for panels of codes: emits code that widens a part's
    codes and prefetches the same part of the panel ahead."""

    def __init__(
        self, k: Kernel, kind: TileKind, steps: Int, scratch: Ptr, widen: Callable[[PanelPart], None] | None = None
    ) -> None:
        self._k, self._kind, self._widen = k, kind, widen
        self._tiles = MatrixTiles.of(k)
        self._whole = steps // TILE_STEPS
        self._rest = steps - self._whole * TILE_STEPS
        self._whole_blocks = (self._whole + (_BLOCK - 1)) // _BLOCK
        self._blocks: Int = self._whole_blocks + k.select(self._rest > 0, k.int(1), k.int(0))
        self._copies, self._sums, self._wide = scratch, scratch + SUMS_OFFSET, scratch + _WIDE_OFFSET
        # Address of the rows whose copy is complete, or 0.
        self._copied = k.variable(k.int(0))

    @property
    def deep(self) -> Bool:
        """True if there are several blocks of inputs, so that rows are copied again for each range of panels."""
        return self._blocks > 1

    def multiply(self, x: Ptr, x_stride: Int, rows: Int, panels: PanelRange, epilogue: Epilogue) -> None:
        """Multiply ``rows`` rows from ``x`` on by a range of up to MAX_PANELS panels."""
        k = self._k
        block_rows = MAX_ROW_TILES * TILED_ROWS
        with k.range(rows, step=block_rows) as first:
            height, begin = k.min(rows - first, block_rows), x + first * x_stride
            with k.range(self._blocks) as block:
                self._shape(block)
                self._copy(begin, x_stride, height, block)
                with k.range(panels.end, panels.first) as panel:
                    self._multiply_panel(first, height, block, panel, panels, epilogue)
        self._tiles.release()

    def _is_rest(self, block: Int) -> Bool:
        """Return whether a block is the last one, of fewer steps than an instruction's."""
        return block >= self._whole_blocks

    def _count(self, block: Int) -> Int:
        """Return the instructions per sum in a block."""
        k = self._k
        count: Int = k.select(self._is_rest(block), k.int(1), k.min(self._whole - block * _BLOCK, _BLOCK))
        return count

    def _shape(self, block: Int) -> None:
        """Configure the tiles for a block."""
        k = self._k
        steps = k.select(self._is_rest(block), self._rest, k.int(TILE_STEPS))
        sums = 2 * ROW_GROUPS
        self._tiles.shape(
            [TILE_ROWS] * (sums + ROW_GROUPS) + [steps] * 2,
            [VECTOR_BYTES] * sums + [steps * STEP_BYTES] * ROW_GROUPS + [VECTOR_BYTES] * 2,
        )

    def _offset(self, block: Int) -> Int:
        """Return the index of a block's first instruction."""
        return self._k.min(block * _BLOCK, self._whole)

    def _copy(self, x: Ptr, x_stride: Int, rows: Int, block: Int) -> None:
        """Copy a block's values into tiles: [32 rows][instructions][32][64 bytes]."""
        k, address = self._k, Int(self._k, x.ir)
        count = self._count(block)
        with k.builder.if_then(k.builder.not_(self._copied.value.equals(address).ir)):
            with k.range(rows) as row:
                tile = row // TILED_ROWS
                source = x + (row * x_stride + self._offset(block) * VECTOR_BYTES)
                target = self._copies + (tile * count * _INSTRUCTION_BYTES + (row - tile * TILED_ROWS) * VECTOR_BYTES)
                with k.builder.if_else(self._is_rest(block).ir) as (rest, whole):
                    # Depths are multiples of 16 codes or 16 bfloat16, so 16 bytes are copied at a time.
                    with rest, k.range(self._rest * STEP_BYTES, step=16) as at:
                        k.write(target + at, k.read(source + at, ir.VectorType(I32, 4), 4), 4)
                    with whole, k.range(count) as number:
                        k.store(target + number * _INSTRUCTION_BYTES, k.load(source + number * VECTOR_BYTES))
            self._copied.value = k.select(self._blocks < 2, address, k.int(0))

    def _multiply_panel(
        self, first: Int, rows: Int, block: Int, panel: Int, panels: PanelRange, epilogue: Epilogue
    ) -> None:
        """Multiply a block of rows, from row ``first`` on, and a block of inputs, by one panel."""
        k, count = self._k, self._count(block)
        tiles = (rows + (TILED_ROWS - 1)) // TILED_ROWS
        final = block + 1 >= self._blocks
        here = panels.weights + panel * panels.panel_bytes
        # Next come the same block of the next panel, the next block of the first one, or another range.
        offset, in_range = self._offset(block), panel + 1 < panels.end
        first_panel = panels.weights + panels.first * panels.panel_bytes
        next_panel = k.select_ptr(in_range, here + panels.panel_bytes, k.select_ptr(final, panels.ahead, first_panel))
        next_offset = k.select(in_range, offset, k.select(final, k.int(0), offset + count))
        # The memory ahead is at most as large as this block. Each tile of rows prefetches its share.
        share = k.int(_WEIGHTS_BYTES if self._widen is None else 0) // tiles
        parts = (count + (_PART - 1)) // _PART
        sums_stride = k.select((self._blocks < 2) & (parts < 2), k.int(0), k.int(_SUMS_BYTES))
        with k.when(final):
            epilogue.prefetch(panel)
        with k.range(parts) as part:
            at = count * part // parts
            length = count * (part + 1) // parts - at
            if self._widen is None:
                near = here + (offset + at) * _WEIGHTS_BYTES
            else:
                near, steps = self._wide, self._steps(block, length)
                self._widen(PanelPart(here, next_panel, (offset + at) * TILE_STEPS, steps, near))
            ahead = next_panel + (next_offset + at) * _WEIGHTS_BYTES
            with k.range(tiles) as tile:
                sums = self._sums + ((panel - panels.first) * tiles + tile) * sums_stride
                height, last = k.min(rows - tile * TILED_ROWS, TILED_ROWS), final & (part + 1 >= parts)
                copies = self._copies + (tile * count + at) * _INSTRUCTION_BYTES
                inside = k.in_bounds(copies, length * _INSTRUCTION_BYTES) & k.in_bounds(sums, _SUMS_BYTES)
                with k.when(last):
                    epilogue.prefetch_rows(first + tile * TILED_ROWS, height, panel)
                with k.when(inside & k.in_bounds(near, self._steps(block, length) * PANEL_STEP_BYTES)):
                    prefetched = ahead + tile * length * share
                    self._call(height, (copies, near, length, prefetched, share, sums, block + part))
                with k.when(last):
                    epilogue.finish(first + tile * TILED_ROWS, height, panel, sums)

    def _steps(self, block: Int, count: Int) -> Int:
        """Return the steps of ``count`` instructions of a block."""
        steps: Int = self._k.select(self._is_rest(block), self._rest, count * TILE_STEPS)
        return steps

    def _call(self, height: Int, values: tuple[Int | Ptr, ...]) -> None:
        k, kind = self._k, self._kind
        for groups, fits in ((1, height <= TILE_ROWS), (ROW_GROUPS, height > TILE_ROWS)):

            def body(inner: Kernel, memory: Ptr, *params: Any, groups: int = groups) -> None:
                _write_block(MatrixTiles(inner, memory), kind, groups, *params)

            with k.when(fits):
                name = f"gemm_matrix_block_{kind.weights}_{kind.rows}_{groups}"
                k.call_subroutine(name, (self._tiles.memory, *values), body)


def _write_block(
    tiles: MatrixTiles,
    kind: TileKind,
    groups: int,
    x: Ptr,
    lines: Ptr,
    count: Int,
    ahead: Ptr,
    share: Int,
    sums: Ptr,
    number: Int,
) -> None:
    """Emit the function that adds ``count`` instructions per tile to the sums of up to 32 rows and a panel. ``number``:
    0 for the first part of the first block, whose sums begin at zero."""
    k = tiles.k
    stored = [(2 * group + half, sums + (group * TILE_ROWS * TOTALS_BYTES + half * VECTOR_BYTES))
              for group in range(groups) for half in range(2)]  # fmt: skip
    first_rows, first_weights = 2 * ROW_GROUPS, 3 * ROW_GROUPS
    with k.builder.if_else((number < 1).ir) as (begin, further):
        with begin:
            for tile, _ in stored:
                tiles.clear(tile)
        with further:
            for tile, address in stored:
                tiles.load(tile, address, TOTALS_BYTES)
    add = tiles.add_codes if kind.rows == "int8" else tiles.add_pairs
    with k.range(count) as step:
        with k.range(share, step=LINE_BYTES) as at:
            k.prefetch(ahead + (step * share + at), near=False)
        line, row = lines + step * _WEIGHTS_BYTES, x + step * _INSTRUCTION_BYTES
        for half in range(2):
            tiles.load(first_weights + half, line + half * VECTOR_BYTES, PANEL_STEP_BYTES)
        for group in range(groups):
            tiles.load(first_rows + group, row + group * TILE_ROWS * VECTOR_BYTES, VECTOR_BYTES, near=False)
            for half in range(2):
                add(2 * group + half, first_rows + group, first_weights + half)
    for tile, address in stored:
        tiles.store(tile, address, TOTALS_BYTES)
