"""8-bit rows, with a scale per group of inputs, and their products with codes of 4 and 8 bits."""

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
from pillion.kernels.cpu.products.packed_weight import PackedWeight
from pillion.kernels.cpu.quantized.dot_kinds import DOT_KINDS
from pillion.kernels.cpu.quantized.input_rows import ROW_CONSTANTS_BYTES, CodeInputs
from pillion.kernels.cpu.quantized.matrix_packing import pack_gated, pack_linear, unpack
from pillion.kernels.cpu.quantized.quantized_packing import has_offsets, packed_kind
from pillion.kernels.torch.quantized_matrix import CODINGS, GROUPED_ROWS, QuantizedMatrix, rounded_rows
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
    Gemm("int4_dots_by_group_half", "bf16", "store"),
    Gemm("uint4_dots_by_group", "fp32", "add", bias=True, offsets=True),
    Gemm("uint4_dots_by_group_half", "bf16", "gated_silu", offsets=True),
    Gemm("fp4_e2m1_dots_by_group", "bf16", "store"),
    Gemm("int8_dots_by_group", "fp32", "gated_silu"),
    Gemm("int8_dots_by_group_half", "bf16", "store", offsets=True),
)
GROUPED = (
    Gemm("int4_dots_by_group", "bf16", "store", grouped=True),
    Gemm("int8_dots_by_group_half", "bf16", "gated_silu", grouped=True),
)
BIASES = sorted({kind.bias for kind in DOT_KINDS.values()})
CODES = {(bf16, bias): CodeInputs(bf16, bias=bias) for bf16 in (True, False) for bias in BIASES}
SPECS = [*PRODUCTS, *GROUPED, *CODES.values()]
FACTOR = 0.5

runner = runner_of(SPECS, ALL_MODES)


def rounded_by(runner: Any, spec: CodeInputs, x: torch.Tensor, group: int, threads: int = 3):
    """Return codes and constants of rows; fail if something was written after them."""
    (count, depth), groups = x.shape, -(-x.shape[1] // group)
    out, constants = torch.full((count + 1, depth + 64), 7, dtype=torch.int8), torch.full((count + 1, 3 * groups), 7.0)
    values = {"x": x, "out": out, "constants": constants, "depth": depth, "inputs": group, "x_stride": stride(x)}
    values |= {"out_stride": stride(out), "constants_stride": groups * ROW_CONSTANTS_BYTES}
    runner.run(spec, values, rows_step(count), threads)
    assert (out[count] == 7).all()
    assert (out[:, depth:] == 7).all()
    assert (constants[count:] == 7).all()
    return out[:count, :depth].contiguous(), constants[:count]


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("group", [16, 48, 128])
def test_row_groups_are_quantized_as_in_torch(runner, bf16, group):
    x = normal(5, 208, seed=3) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 1.0])[:, None]
    x[1, :100], x[2, 17] = 0, 1e5
    x = x.bfloat16() if bf16 else x
    codes, constants = rounded_by(runner, CODES[bf16, 8], x, group)
    constants = constants.view(5, -1, 3)
    scales = constants[..., 0].repeat_interleave(group, 1)[:, :208]
    assert torch.equal(codes.float() * scales, rounded_rows(x.float(), group))
    sums = torch.stack([part.sum(1) for part in codes.int().split(group, 1)], 1)
    assert torch.equal(constants[..., 1].contiguous().view(torch.int32), -8 * sums.int())
    torch.testing.assert_close(constants[..., 2], sums * constants[..., 0])


def matrix_of(kind: str, columns: int, inputs: int, group: int, shifted: bool, seed: int) -> QuantizedMatrix:
    """Random codes, including both ends, with scales that fit a float16 or, wider, do not."""
    coding, wide = DOT_KINDS[kind].coding, DOT_KINDS[kind].constant_bytes == 4
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, len(CODINGS[coding]), (columns, inputs), generator=generator).to(torch.uint8)
    codes[0, 0], codes[-1, -1] = len(CODINGS[coding]) // 2, len(CODINGS[coding]) // 2 - 1
    size = CODINGS[coding].float().std() * inputs**0.5

    def constants(scale: float, seed: int) -> torch.Tensor:
        found = (normal(columns, -(-inputs // group), seed=seed).abs() + 0.5) * scale
        return found if wide else found.half().float()

    offsets = constants(-1 / inputs**0.5, seed + 60) if shifted else None
    return QuantizedMatrix(coding, codes, constants(1 / size, seed + 50), group, offsets, row_codes=GROUPED_ROWS)


class GroupedCodes:
    """A product of random rows with random codes."""

    def __init__(
        self, spec: Gemm, rows: int, columns: int, inputs: int, group: int, groups: list[int] | None = None
    ) -> None:
        self.spec, self.gated = spec, spec.epilogue in GATED
        self.packed: list[PackedWeight] = []
        for seed in range(0, 2 * len(groups or [0]), 2):
            gate, up = (matrix_of(spec.weights, columns, inputs, group, spec.offsets, seed + half) for half in range(2))
            assert packed_kind([gate, up], "fp32") == spec.weights
            assert has_offsets(gate, spec.weights) == spec.offsets
            packed = pack_gated(gate, up, spec.weights) if self.gated else pack_linear(gate, spec.weights)
            self.packed.append(packed)
        first = self.packed[0]
        self.bias = normal(first.pairs * 32, seed=5) if spec.bias else None
        self.x = torch.zeros(rows, first.depth)
        self.x[:, :inputs] = normal(rows, inputs, seed=6)
        if spec.rows == "bf16":
            self.x = self.x.bfloat16()
        self.starts = None if groups is None else torch.tensor([0, *groups]).cumsum(0).to(torch.int32)

    def new_out(self, begin: int, end: int) -> torch.Tensor:
        """Random rows, by their number, so that parts begin alike."""
        width = self.packed[0].pairs * (16 if self.gated else 32)
        dtype = self.x.dtype if self.gated else torch.float32
        rows = [normal(width, seed=100 + row).to(dtype) for row in range(begin, end)]
        return torch.stack(rows) if rows else torch.zeros(0, width, dtype=dtype)

    def values(self, runner: Any, x: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        first = self.packed[0]
        rounding = CODES[self.spec.rows == "bf16", DOT_KINDS[self.spec.weights].bias]
        codes, constants = rounded_by(runner, rounding, x, first.group)
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
            "inputs": first.group,
            "input_sums_stride": stride(constants),
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
        rounded, out = rounded_rows(self.x.float(), self.packed[0].group), self.new_out(0, len(self.x))
        if self.starts is None:
            return reference_gemm(rounded, self.packed[0], self.spec.epilogue, self.bias, out, FACTOR)
        found = [
            reference_gemm(rounded[begin:end], packed, self.spec.epilogue)
            for packed, (begin, end) in zip(self.packed, pairwise(self.starts.tolist()), strict=True)
        ]
        return torch.cat(found)


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("rows", "columns", "inputs", "group"), [(1, 64, 160, 32), (5, 40, 48, 16), (37, 96, 272, 272), (3, 32, 256, 256)]
)
def test_products_match_the_reference(runner, spec, rows, columns, inputs, group):
    one = GroupedCodes(spec, rows, columns, inputs, group)
    assert one.packed[0].group == min(group, 128)
    assert_close(one.run(runner), one.expected())


@settings(max_examples=examples(20))
@given(
    spec=st.sampled_from(PRODUCTS),
    rows=st.integers(1, 50),
    columns=st.integers(1, 130),
    inputs=st.integers(1, 300),
    group=st.sampled_from((16, 32, 48, 128, 512)),
    threads=st.sampled_from((1, 3)),
)
def test_ragged_products(runner, spec, rows, columns, inputs, group, threads):
    one = GroupedCodes(spec, rows, columns, inputs, group)
    assert_close(one.run(runner, threads=threads), one.expected())


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_a_row_does_not_depend_on_the_others(runner, spec):
    """Alone, among any number of rows, at any place, with any number of threads: the same bits."""
    one = GroupedCodes(spec, 80, 40, 208, 32)
    whole = one.run(runner)
    for rows in (1, 2, 3, 4, 7, 14, 15, 31, 64):
        for begin in (0, 39, 80 - rows):
            if begin + rows <= 80:
                part = one.run(runner, begin, begin + rows, threads=1 + 2 * (rows % 2))
                assert torch.equal(part, whole[begin : begin + rows]), (begin, rows)


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("groups", [[3, 0, 37, 1], [0, 0]], ids=str)
def test_each_expert_multiplies_its_own_rows(runner, spec, groups):
    one = GroupedCodes(spec, sum(groups), 72, 80, 16, groups)
    assert_close(one.run(runner), one.expected())


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_sums_of_extreme_codes_are_exact(runner, spec):
    """The largest codes of both signs, whose products would be wrong with 16 bits or saturation."""
    if spec.bias or spec.epilogue in GATED or spec.offsets:
        return
    kind = DOT_KINDS[spec.weights]
    for code in (len(kind.values) // 2 - 1, len(kind.values) // 2, len(kind.values) - 1, 0):
        codes = torch.full((32, 256), code, dtype=torch.uint8)
        matrix = QuantizedMatrix(kind.coding, codes, torch.full((32, 2), 2.0), 128, row_codes=GROUPED_ROWS)
        one = GroupedCodes(spec, 2, 32, 16, 16)
        one.packed = [pack_linear(matrix, spec.weights)]
        one.x = torch.tensor([[127.0], [-127.0]]).repeat(1, 256).to(one.x.dtype)
        value = float(CODINGS[kind.coding][code]) * 2 * 256
        assert one.run(runner).tolist() == [[value * 127] * 32, [value * -127] * 32]


@pytest.mark.parametrize("kind", DOT_KINDS)
@pytest.mark.parametrize("shifted", [False, True])
def test_packed_codes_dequantize_to_the_same_values(kind, shifted):
    matrix = matrix_of(kind, 40, 90, 30 if shifted else 90, shifted, 1)
    matrix = matrix if not shifted else matrix_of(kind, 40, 96, 48, True, 1)
    found = unpack(pack_linear(matrix, kind))[:40, : matrix.shape[1]]
    scales = matrix.scales.double().repeat_interleave(matrix.group, 1)[:, : matrix.shape[1]]
    wanted = CODINGS[matrix.coding].double()[matrix.codes.long()] * scales
    if matrix.offsets is not None:
        wanted += matrix.offsets.double().repeat_interleave(matrix.group, 1)
    assert torch.equal(found, wanted)


@with_checks
@pytest.mark.parametrize("rows", [2, 37])
@pytest.mark.parametrize("short", ["x", "weights", "input_sums", "bias", "out"])
def test_out_of_bounds_accesses_are_reported(runner, short, rows):
    """A checked product whose memory is too small is reported, and accesses no other memory."""
    one = GroupedCodes(PRODUCTS[1], rows, 64, 96, 32)
    values = one.values(runner, one.x, one.new_out(0, rows))
    values["x"] = values["x"][:rows]
    buffer = values[short].contiguous()
    values[short] = (buffer.data_ptr(), buffer.nbytes - (64 if short not in ("input_sums",) else 4))
    with pytest.raises(Internal, match="gemm_uint4_dots_by_group_fp32_add"):
        runner.run(one.spec, values, rows_step(rows))


@pytest.mark.parametrize("spec", [PRODUCTS[1], PRODUCTS[3], PRODUCTS[5]], ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "name",
    [*map(registers_of, ("avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "neon_dot", "neon"))],
)
def test_sums_stay_in_registers_and_are_dot_products(name, spec):
    """In code for this processor if it has these instructions."""
    isa = BY_NAME[name]
    texts = {text: code for text, code in assembly([spec], isa).items() if "_tile_" in text}
    instruction = isa.int8_dot or {"x86_64": "pmaddwd", "aarch64": "mla"}[isa.machine]
    assert len(texts) == isa.dot_tiles.tallest + max(0, isa.dot_tiles.narrow - isa.dot_tiles.wide)
    # A row alone is bound by memory. A table of values takes registers, of which this row of the table has 16.
    spilling = name == "avx2" and "fp4" in spec.weights
    for tile, text in texts.items():
        assert "_1x" in tile or spilling or not [line for line in text.splitlines() if SPILL.search(line)], tile
        assert instruction in text, tile


@pytest.mark.parametrize("name", ["amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2"])
@pytest.mark.parametrize("spec", PRODUCTS[1:4], ids=lambda spec: spec.name)
def test_all_instruction_sets_give_the_same_bits(name, spec):
    """Sums are whole numbers, and scales are applied in one order."""
    if spec.epilogue in GATED:
        spec = Gemm(spec.weights, "fp32", "store", offsets=spec.offsets)
    one, found = GroupedCodes(spec, 37, 64, 208, 32), []
    for row in ("avx512_bf16", name):
        runner = Runner([spec, *CODES.values()], isa_or_skip(row), checked=False)
        found.append(one.run(runner, threads=1))
        runner.close()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("group", [16, 32, 48, 80, 128])
@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_matrix_tiles_and_registers_give_the_same_bits(spec, group):
    """Groups of all numbers of steps, a shorter last one, and rows for one pass over the scratch and for two."""
    one, found = GroupedCodes(spec, 530 if group == 32 else 45, 64, 176, group), []
    for row in ("avx512_bf16", TILE_MODES[0][0]):
        runner = Runner([spec, *CODES.values()], isa_or_skip(row), checked=False)
        found.append(one.run(runner))
        runner.close()
    assert torch.equal(found[0], found[1])


def test_many_rows_use_matrix_tiles():
    """In code for a processor with matrix tiles, which any machine can compile."""
    for spec in PRODUCTS:
        tiles = {name: text for name, text in assembly([spec], BY_NAME["amx"]).items() if "_matrix_tile_" in name}
        # For up to 16 rows and up to 32, in a single tile and in several.
        assert len(tiles) == 4
        assert all("tdpbsud" in text for text in tiles.values())


def test_specs_have_distinct_names():
    assert len({spec.name for spec in SPECS}) == len(SPECS)
