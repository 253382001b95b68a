"""Rows quantized to int8, and their integer products, against torch; a row's bits depend only on the row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.cpu.language.isa import BY_NAME
from pillion.kernels.cpu.products.gemm import GATED, Gemm
from pillion.kernels.cpu.products.gemm_tiles import TileKind
from pillion.kernels.cpu.products.packed_weight import PackedWeight
from pillion.kernels.cpu.quantized.input_rows import ROW_CONSTANTS_BYTES, CodeInputs
from pillion.kernels.cpu.quantized.matrix_packing import pack_gated, pack_linear
from pillion.kernels.cpu.quantized.quantized_packing import INT8_DOTS, packed_kind
from pillion.kernels.torch.quantized_matrix import WHOLE_ROWS, QuantizedMatrix, rounded_rows, stack_rows
from tests.kernels.cpu.test_gemm import SPILL, assert_close
from tests.support.cpu_references import BENDS, CLAMPED, reference_gemm
from tests.support.examples import examples
from tests.support.kernel_runner import (
    ALL_MODES,
    TILE_MODES,
    Runner,
    isa_or_skip,
    normal,
    padded,
    registers_of,
    rows_step,
    runner_of,
    stride,
    with_checks,
)
from tests.support.machine_code import assembly

PRODUCTS = (
    Gemm(INT8_DOTS, "bf16", "store"),
    Gemm(INT8_DOTS, "fp32", "add", bias=True, offsets=True),
    Gemm(INT8_DOTS, "bf16", "gated_silu"),
    Gemm(INT8_DOTS, "fp32", "gated_silu"),
)
GROUPED = (Gemm(INT8_DOTS, "bf16", "store", grouped=True), Gemm(INT8_DOTS, "bf16", "gated_silu", grouped=True))
CODES = [CodeInputs(True), CodeInputs(False), CodeInputs(False, each=2)]
SPECS = [*PRODUCTS, *GROUPED, *CODES]
FACTOR = 0.5

runner = runner_of(SPECS, ALL_MODES)


def rounded_by(runner: Any, spec: CodeInputs, x: torch.Tensor, threads: int = 3):
    """Return codes and constants of rows; fail if something was written after them."""
    count, depth = x.shape
    out, constants = torch.full((count + 1, depth + 64), 7, dtype=torch.int8), torch.full((count + 1, 3), 7.0)
    values = {"x": x, "out": out, "constants": constants, "depth": depth, "inputs": depth, "x_stride": stride(x)}
    values |= {"out_stride": stride(out), "constants_stride": ROW_CONSTANTS_BYTES}
    runner.run(spec, values, rows_step(count // spec.each), threads)
    assert (out[count] == 7).all()
    assert (out[:, depth:] == 7).all()
    assert (constants[count:] == 7).all()
    return out[:count, :depth].contiguous(), constants[:count]


def meaning(codes: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """scale * code."""
    return codes.float() * constants[:, :1]


@pytest.mark.parametrize("bf16", [True, False])
def test_rows_are_quantized_as_in_torch(runner, bf16):
    x = normal(7, 208, seed=3) * torch.tensor([1e-3, 1.0, 30.0, 1.0, 1.0, 1.0, 1e4])[:, None]
    x[3], x[4], x[5] = 0, x[4].abs(), -x[5].abs()
    x = x.bfloat16() if bf16 else x
    codes, constants = rounded_by(runner, CodeInputs(bf16), x)
    found = meaning(codes, constants)
    assert torch.equal(found, rounded_rows(x.float()))
    torch.testing.assert_close(constants[:, 2], found.double().sum(1).float(), rtol=1e-5, atol=1e-5)
    for row in (0, 6):
        alone = rounded_by(runner, CodeInputs(bf16), x[row : row + 1].clone())
        assert torch.equal(alone[0][0], codes[row])
        assert torch.equal(alone[1].view(torch.int32)[0], constants.view(torch.int32)[row])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so(runner, wrong):
    x = normal(3, 64)
    x[1, 40] = wrong
    _, constants = rounded_by(runner, CodeInputs(False), x)
    assert constants[:, 0].isfinite().tolist() == [True, False, True]


class Product:
    """A product of random rows with random codes."""

    def __init__(self, spec: Gemm, rows: int, columns: int, inputs: int, groups: list[int] | None = None) -> None:
        self.spec = spec
        self.packed: list[PackedWeight] = []
        for seed in range(0, 2 * len(groups or [0]), 2):
            gate, up = (_matrix(columns, inputs, spec.offsets, seed + half) for half in range(2))
            assert packed_kind([gate, up], "fp32") == INT8_DOTS
            gated = spec.epilogue in GATED
            self.packed.append(pack_gated(gate, up, INT8_DOTS) if gated else pack_linear(gate, INT8_DOTS))
        first = self.packed[0]
        self.bias = normal(first.pairs * 32, seed=5) if spec.bias else None
        self.x = torch.zeros(rows, first.depth)
        self.x[:, :inputs] = normal(rows, inputs, seed=6)
        if spec.rows == "bf16":
            self.x = self.x.bfloat16()
        self.starts = None if groups is None else torch.tensor([0, *groups]).cumsum(0).to(torch.int32)

    def new_out(self, begin: int, end: int) -> torch.Tensor:
        """Random rows, by their number, so that parts begin alike."""
        width = self.packed[0].pairs * (16 if self.spec.epilogue in GATED else 32)
        dtype = self.x.dtype if self.spec.epilogue in GATED else torch.float32
        rows = [normal(width, seed=100 + row).to(dtype) for row in range(begin, end)]
        return torch.stack(rows) if rows else torch.zeros(0, width, dtype=dtype)

    def values(self, runner: Any, x: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        first = self.packed[0]
        codes, constants = rounded_by(runner, CodeInputs(self.spec.rows == "bf16"), x)
        return {
            "x": padded(codes, extra=1, filler=127),
            "weights": torch.stack([one.data for one in self.packed]),
            "input_sums": constants.contiguous(),
            "bias": self.bias,
            "out": out,
            "group_starts": self.starts,
            "x_stride": stride(padded(codes)),
            "depth": first.depth,
            "pairs": first.pairs,
            "out_stride": stride(out),
            "num_groups": len(self.packed),
            "group_bytes": first.nbytes,
            "inputs": 0,
            "input_sums_stride": ROW_CONSTANTS_BYTES,
            "factor": FACTOR,
            "alpha": CLAMPED.alpha,
            "limit": CLAMPED.limit,
            "above": BENDS[0],
            "below": BENDS[1],
        }

    def run(self, runner: Any, begin: int = 0, end: int | None = None, threads: int = 3) -> torch.Tensor:
        """Return the product of rows begin .. end - 1; fail if it wrote after them."""
        end = len(self.x) if end is None else end
        room = self.new_out(begin, end + 2)
        behind = room[end - begin :].clone()
        values = self.values(runner, self.x[begin:end].clone(), room)
        runner.run(self.spec, values, rows_step(end - begin), threads)
        assert torch.equal(room[end - begin :], behind)
        return room[: end - begin]

    def expected(self) -> torch.Tensor:
        rounded, out = rounded_rows(self.x.float()), self.new_out(0, len(self.x))
        if self.starts is None:
            return reference_gemm(rounded, self.packed[0], self.spec.epilogue, self.bias, out, FACTOR)
        found = [
            reference_gemm(rounded[begin:end], packed, self.spec.epilogue)
            for packed, (begin, end) in zip(self.packed, pairwise(self.starts.tolist()), strict=True)
        ]
        return torch.cat(found)


def _matrix(columns: int, inputs: int, shifted: bool, seed: int) -> QuantizedMatrix:
    """Random codes, including both ends."""
    codes = torch.randint(0, 256, (columns, inputs), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    codes[0, 0], codes[-1, -1] = 128, 127
    scales = (normal(columns, 1, seed=seed + 50).abs() + 0.5) / (74 * inputs**0.5)
    offsets = normal(columns, 1, seed=seed + 60) / inputs**0.5 if shifted else None
    return QuantizedMatrix("int8", codes, scales, inputs, offsets, row_codes=WHOLE_ROWS)


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("rows", "columns", "inputs"), [(1, 64, 160), (5, 40, 20), (37, 96, 272)])
def test_products_match_the_reference(runner, spec, rows, columns, inputs):
    one = Product(spec, rows, columns, inputs)
    assert_close(one.run(runner), one.expected())


@settings(max_examples=examples(20))
@given(
    spec=st.sampled_from(PRODUCTS),
    rows=st.integers(1, 50),
    columns=st.integers(1, 130),
    inputs=st.integers(1, 300),
    threads=st.sampled_from((1, 3)),
)
def test_ragged_products(runner, spec, rows, columns, inputs, threads):
    one = Product(spec, rows, columns, inputs)
    assert_close(one.run(runner, threads=threads), one.expected())


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_a_row_does_not_depend_on_the_others(runner, spec):
    """Alone, among any number of rows, at any place, with any number of threads: the same bits."""
    one = Product(spec, 80, 40, 208)
    whole = one.run(runner)
    for rows in (1, 2, 3, 4, 7, 14, 15, 31):
        for begin in (0, 39, 80 - rows):
            part = one.run(runner, begin, begin + rows, threads=1 + 2 * (rows % 2))
            assert torch.equal(part, whole[begin : begin + rows]), (begin, rows)


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("groups", [[3, 0, 17, 1], [0, 0]], ids=str)
def test_groups_are_multiplied_by_their_own_matrix(runner, spec, groups):
    one = Product(spec, sum(groups), 72, 80, groups)
    assert_close(one.run(runner), one.expected())


@pytest.mark.parametrize("ends", [(-128, -128), (-128, 127), (127, 127)], ids=str)
def test_sums_do_not_overflow(runner, ends):
    """All codes at their ends, in a depth at which sums exceed 16 bits and float32's 24."""
    of_weights, of_rows = ends
    codes = torch.full((32, 16_384), of_weights, dtype=torch.int8).view(torch.uint8)
    matrix = QuantizedMatrix("int8", codes, torch.ones(32, 1), 16_384, row_codes=WHOLE_ROWS)
    packed = pack_linear(matrix, INT8_DOTS)
    one = Product(PRODUCTS[0], 3, 32, 16)
    one.packed = [packed]
    one.x = torch.full((3, 16_384), float(of_rows)).bfloat16()
    # The scale of a row is a float32, by which its sum is multiplied once.
    torch.testing.assert_close(one.run(runner).double(), one.expected(), rtol=1e-6, atol=0)


@with_checks
@pytest.mark.parametrize("rows", [2, 17, 40])
@pytest.mark.parametrize("short", ["x", "weights", "input_sums", "bias", "out"])
def test_out_of_bounds_accesses_are_reported(runner, short, rows):
    """A checked product whose memory is too small is reported, and accesses no other memory."""
    one = Product(PRODUCTS[1], rows, 64, 96)
    values = one.values(runner, one.x, one.new_out(0, rows))
    values["x"] = values["x"][:rows]
    buffer = values[short].contiguous()
    values[short] = (buffer.data_ptr(), buffer.nbytes - (64 if short not in ("input_sums",) else 4))
    with pytest.raises(Internal, match="gemm_int8_dots_fp32_add"):
        runner.run(one.spec, values, rows_step(rows))


@pytest.mark.parametrize(
    "name",
    [*map(registers_of, ("avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "neon_dot", "neon"))],
)
def test_sums_stay_in_registers_and_are_dot_products(name):
    """In code for this processor if it has these instructions."""
    isa = BY_NAME[name]
    texts, limits = assembly([Gemm(INT8_DOTS, "bf16", "store")], isa), TileKind(INT8_DOTS, "int8").tiles(isa)
    instruction = isa.int8_dot or {"x86_64": "pmaddwd", "aarch64": "mla"}[isa.machine]
    heights = [(rows, 2 if rows <= limits.wide else 1) for rows in range(1, limits.tallest + 1)]
    tiles = {f"gemm_tile_int8_dots_int8_{rows}x{width}": rows for rows, width in heights}
    assert {text for text in texts if "_tile_" in text} == set(tiles)
    for tile in tiles:
        lines = texts[tile].splitlines()
        assert not [line for line in lines if SPILL.search(line)], tile
        assert any(instruction in line for line in lines), tile


def test_int8_products_use_matrix_tiles():
    """In code for a processor with matrix tiles, which any machine can compile."""
    texts = assembly([Gemm(INT8_DOTS, "bf16", "store")], BY_NAME["amx"])
    tiles = {name: text for name, text in texts.items() if "_matrix_" in name}
    assert set(tiles) == {
        f"gemm_matrix_{name}_int8_dots_int8_{groups}" for name in ("tile", "block") for groups in (1, 2)
    }
    assert all("tdpbsud" in text for text in tiles.values())


@pytest.mark.parametrize("name", [TILE_MODES[0][0], "avx512_vnni", "avx512", "avx2"])
def test_all_instruction_sets_give_the_same_bits(name):
    """Sums are whole numbers, and scales are applied in one order."""
    one = Product(PRODUCTS[3], 21, 64, 80)
    specs, found = [one.spec, CodeInputs(False)], []
    for row in ("avx512_bf16", name):
        runner = Runner(specs, isa_or_skip(row), checked=False)
        found.append(rounded_by(runner, specs[1], one.x)[0])
        found.append(one.run(runner, threads=1))
        runner.close()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_fused_parts_quantize_rows_only_if_all_of_them_do():
    part = _matrix(32, 32, False, 1)
    taken = QuantizedMatrix("int8", part.codes, part.scales, 32)
    assert isinstance(stack_rows([part, taken], torch.float32), torch.Tensor)
    both = stack_rows([part, part], torch.float32)
    assert isinstance(both, QuantizedMatrix)
    assert both.row_codes == WHOLE_ROWS


def test_specs_have_distinct_names():
    assert len({spec.name for spec in SPECS}) == len(SPECS)
