"""Instructions on matrix tiles, the processor's own and emulated ones, against numpy, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pillion.kernels.cpu.language.emit import VECTOR_BYTES
from pillion.kernels.cpu.language.matrix_tiles import STEP_BYTES, TILE_ROWS, TILE_STEPS, MatrixTiles
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from tests.support.kernel_runner import EMULATED_TILES, TILES, Runner, isa_or_skip, rows_step
from tests.support.matrix_tile import add_codes, add_pairs

SUMS, ROWS, COLUMNS = 0, 5, 7
# Magnitudes of values: some sums are denormal, some products are, and some operands.
SCALES = (1.0, 2.0**-50, 2.0**-62, 2.0**-64, 2.0**-125)


@dataclass(frozen=True, slots=True)
class OneProduct(KernelSpec):
    """sums = sums + rows * columns, each in rows of 64 bytes."""

    layout = RecordLayout("one_product", pointers=("sums", "rows", "columns"), numbers=("height", "steps", "width"))
    codes: bool

    def emit(self, call: KernelCall) -> None:
        k, tiles = call.k, MatrixTiles.of(call.k)
        height, steps, width = (call.args.number(name) for name in self.layout.numbers)
        pointers = {SUMS: "sums", ROWS: "rows", COLUMNS: "columns"}
        shapes = {SUMS: (height, width), ROWS: (height, steps), COLUMNS: (steps, width)}
        heights, widths = ([shapes.get(tile, (0, 0))[side] for tile in range(8)] for side in range(2))
        with k.when(call.thread < 1):
            tiles.shape(heights, [k.int(each) * STEP_BYTES for each in widths])
            for tile, name in pointers.items():
                tiles.load(tile, call.args.pointer(name), VECTOR_BYTES)
            (tiles.add_codes if self.codes else tiles.add_pairs)(SUMS, ROWS, COLUMNS)
            tiles.store(SUMS, call.args.pointer("sums"), VECTOR_BYTES)
            tiles.release()


@pytest.fixture(scope="module", params=[EMULATED_TILES, TILES])
def runner(request):
    found = Runner([OneProduct(codes) for codes in (False, True)], isa_or_skip(request.param), checked=False)
    yield found
    found.close()


def product(runner, codes, sums, rows, columns):
    """Run the kernel on arrays [height, width], [height, steps] and [steps, width] of 32 bits; memory around them is
    not zero."""
    room = [np.full((TILE_ROWS, TILE_STEPS), -5, np.int32) for _ in range(3)]
    for memory, part in zip(room, (sums, rows, columns), strict=True):
        memory[: part.shape[0], : part.shape[1]] = part.view(np.int32)
    (height, width), steps = sums.shape, len(columns)
    values = dict(zip(("sums", "rows", "columns"), room, strict=True))
    runner.run(OneProduct(codes), values | {"height": height, "steps": steps, "width": width}, rows_step(1))
    found = room[0][:height, :width].copy()
    room[0][:height, :width] = -5
    assert (room[0] == -5).all()
    return found


SHAPES = [(16, 16, 16), (1, 16, 16), (16, 1, 16), (7, 8, 16), (3, 5, 2)]


def bfloat16(random, shape, scale):
    """Bits of random values."""
    values = (random.standard_normal(shape) * scale).astype(np.float32)
    values[random.random(shape) < 0.05] = 0
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("height", "steps", "width"), SHAPES)
def test_tile_products_of_bfloat16_pairs_match_the_model(runner, height, steps, width, scale):
    random = np.random.default_rng(height + steps)
    rows, columns = bfloat16(random, (height, steps, 2), scale), bfloat16(random, (steps, width, 2), scale)
    sums = (random.standard_normal((height, width)) * scale**2).astype(np.float32)
    found = product(runner, False, sums, rows.view(np.uint32)[..., 0], columns.view(np.uint32)[..., 0])
    expected = add_pairs(sums, rows, columns)
    np.testing.assert_array_equal(found, expected.view(np.int32))


def test_tile_products_of_any_magnitude_match_the_model(runner):
    """Sums whose terms are far apart are rounded once per product."""
    random = np.random.default_rng(1)
    for _ in range(50):
        rows, columns = (bfloat16(random, (16, 16, 2), 2.0 ** random.integers(-40, 40, (16, 16, 2))) for _ in range(2))
        sums = (random.standard_normal((16, 16)) * 2.0 ** random.integers(-60, 60, (16, 16))).astype(np.float32)
        found = product(runner, False, sums, rows.view(np.uint32)[..., 0], columns.view(np.uint32)[..., 0])
        np.testing.assert_array_equal(found, add_pairs(sums, rows, columns).view(np.int32))


@pytest.mark.parametrize(("height", "steps", "width"), SHAPES)
def test_tile_products_of_int8_codes_match_the_model(runner, height, steps, width):
    random = np.random.default_rng(height + steps)
    rows = random.integers(-128, 128, (height, steps, 4)).astype(np.int8)
    columns = random.integers(0, 256, (steps, width, 4)).astype(np.uint8)
    sums = random.integers(-(2**31), 2**31, (height, width)).astype(np.int32)
    found = product(runner, True, sums, rows.view(np.int32)[..., 0], columns.view(np.int32)[..., 0])
    np.testing.assert_array_equal(found, add_codes(sums, rows, columns))
