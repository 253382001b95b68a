"""Products with quantized weights against their reference; a row's bits depend only on the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.cpu.products.gemm import GATED, Gemm
from pillion.kernels.cpu.quantized.codes import CODE_KINDS
from pillion.kernels.cpu.quantized.matrix_packing import pack_gated, pack_linear
from pillion.kernels.cpu.quantized.quantized_packing import packed_kind
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix
from tests.kernels.cpu.test_gemm import SPILL, GemmCase
from tests.kernels.cpu.test_gemm import assert_close as assert_plain_close
from tests.support.examples import LONG, examples
from tests.support.kernel_runner import (
    MODES,
    TILE_MODES,
    Runner,
    isa_or_skip,
    normal,
    outer_tiles,
    padded,
    rows_step,
    runner_of,
    with_checks,
)
from tests.support.machine_code import assembly_of

# The kinds with float32 constants, and the one whose codes have none.
CODES = [name for name, kind in CODE_KINDS.items() if kind.constant_bytes == 4 or kind.codes not in CODE_KINDS]

# The codings packed into panels of each kind, and whether their groups have offsets.
PLAIN = [
    Gemm("int4", "bf16", "store"),
    Gemm("int4", "bf16", "add", bias=True, offsets=True),
    Gemm("int4_half", "bf16", "store"),
    Gemm("uint4_half", "bf16", "store", offsets=True),
    Gemm("int8_half", "fp32", "store", offsets=True),
    Gemm("nf4", "bf16", "store"),
    Gemm("fp4_e2m1", "bf16", "store"),
    Gemm("int8", "bf16", "gated_silu"),
    Gemm("int8", "bf16", "store"),
    Gemm("int8_whole", "bf16", "store", offsets=True),
    Gemm("int8_whole", "bf16", "store"),
    Gemm("fp8_e4m3", "bf16", "store"),
    Gemm("int4", "fp32", "gated_silu", offsets=True),
    *(Gemm(kind, "fp32", "store") for kind in CODES),
]
GROUPED = [
    Gemm("int4", "bf16", "store", grouped=True),
    Gemm("int8", "bf16", "gated_silu", grouped=True, offsets=True),
    Gemm("fp4_e2m1_half", "bf16", "gated_clamped", grouped=True, bias=True),
]
SPECS = [*PLAIN, *GROUPED]
# In `make test`, other kinds have rows of one type in each mode: checked kernels have no products of bfloat16 pairs,
# and compute in float32 for rows of either type.
OF_BOTH_ROWS = ("int4", "nf4")


runner = runner_of(SPECS, dict.fromkeys([*MODES, *TILE_MODES]))


def left_to_long(checked: bool, name: str, params: dict[str, Any]) -> bool:
    """The hook of tests/kernels/cpu/conftest.py."""
    spec = params.get("spec")
    kind, rows = (spec.weights, spec.rows) if spec else (params.get("kind", "int4"), params.get("rows"))
    return kind not in OF_BOTH_ROWS and rows == ("bf16" if checked else "fp32")


def matrix(spec: Gemm, columns: int, inputs: int, group: int, seed: int) -> QuantizedMatrix:
    """Random codes of the spec's kind, each of which occurs, and numbers of about 1 / sqrt(inputs)."""
    kind = CODE_KINDS[spec.weights]
    coding = "uint4" if kind.codes == "int4" and spec.offsets else kind.codes.removesuffix("_whole")
    values = CODINGS[coding]
    known = torch.arange(len(values))[values.isfinite()]
    if kind.codes == "int8":
        known = known[known != 128]
    random = torch.Generator().manual_seed(seed)
    codes = known[torch.randint(len(known), (columns, inputs), generator=random)].to(torch.uint8)
    if kind.codes == "int8_whole":
        codes[0, 0] = 128
    groups = -(-inputs // group)
    size = values[known].pow(2).mean().sqrt() * inputs**0.5
    scales = (normal(columns, groups, seed=seed + 1).abs() + 0.5) / size
    offsets = normal(columns, groups, seed=seed + 2) / inputs**0.5 if spec.offsets else None
    if kind.constant_bytes == 2:
        scales, offsets = scales.half().float(), None if offsets is None else offsets.half().float()
    return QuantizedMatrix(coding, codes, scales, group, offsets)


def case(
    spec: Gemm, rows: int, columns: int, inputs: int, group: int, *, groups: list[int] | None = None, seed: int = 0
) -> GemmCase:
    """A product of random values; ``groups``: the rows of each expert."""
    packed = []
    for number in range(len(groups or [0])):
        parts = [matrix(spec, columns, inputs, group, seed + 10 * number + half) for half in range(2)]
        if spec.epilogue in GATED:
            packed.append(pack_gated(*parts, spec.weights, spec.offsets))
        else:
            packed.append(pack_linear(parts[0], spec.weights, spec.offsets))
    bias = normal(len(packed) * packed[0].pairs * 32, seed=seed + 3) if spec.bias else None
    x = torch.zeros(rows, packed[0].depth)
    x[:, :inputs] = normal(rows, inputs, seed=seed + 4)
    starts = None if groups is None else torch.tensor([0, *groups]).cumsum(0).to(torch.int32)
    return GemmCase(spec, packed, bias, x.to(torch.bfloat16 if spec.rows == "bf16" else torch.float32), starts)


def assert_close(one: GemmCase, found: torch.Tensor) -> None:
    """Like test_gemm's; NF4 has 16 bits where rows are bfloat16."""
    if one.spec.weights == "nf4" and one.spec.rows == "bf16":
        torch.testing.assert_close(found.double(), one.expected(), rtol=1e-5, atol=1e-4)
    else:
        assert_plain_close(found, one.expected())


@pytest.mark.parametrize("spec", PLAIN, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("rows", "columns", "inputs", "group"),
    [
        (5, 40, 20, 16),
        (37, 96, 256, 64),
        *(pytest.param(*shape, marks=pytest.mark.long) for shape in ((1, 64, 160, 32), (2, 32, 700, 700))),
    ],
)
def test_products_match_the_reference(runner, spec, rows, columns, inputs, group):
    one = case(spec, rows, columns, inputs, group)
    assert_close(one, one.run(runner))


@settings(max_examples=examples(25))
@given(
    spec=st.sampled_from([one for one in PLAIN if LONG or one.weights in OF_BOTH_ROWS]),
    rows=st.integers(1, 50),
    columns=st.integers(1, 130),
    inputs=st.integers(1, 300),
    group=st.sampled_from((16, 32, 48, 128, 1024)),
    threads=st.sampled_from((1, 3)),
)
def test_ragged_products(runner, spec, rows, columns, inputs, group, threads):
    one = case(spec, rows, columns, inputs, group, seed=rows)
    assert_close(one, one.run(runner, threads=threads))


@pytest.mark.parametrize("spec", PLAIN, ids=lambda spec: spec.name)
def test_a_row_does_not_depend_on_the_others(runner, spec):
    """Alone, among any number of rows, at any place, with any number of threads: the same bits."""
    one = case(spec, 80, 40, 208, 32)
    start = one.new_out(80)
    whole = one.run(runner)
    for rows in (1, 2, 3, 4, 5, 8, 11, 12, 14, 16, 31):
        for begin in (0, 39, 80 - rows):
            end = begin + rows
            part = one.run(runner, one.x[begin:end], start[begin:end], threads=1 + 2 * (rows % 2))
            assert torch.equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("groups", [[3, 0, 17, 1], [0, 0]], ids=str)
def test_groups_are_multiplied_by_their_own_matrix(runner, spec, groups):
    one = case(spec, sum(groups), 72, 80, 32, groups=groups)
    assert_close(one, one.run(runner))


@pytest.mark.parametrize("columns", [32, 2048], ids=["in_blocks", "whole_panels"])
@pytest.mark.parametrize(
    "spec", [PLAIN[0], *(one for one in PLAIN if one.weights == "nf4")], ids=lambda spec: spec.name
)
def test_products_of_many_rows_match_the_reference(runner, spec, columns):
    """Few panels are cut into blocks of rows. Many panels are multiplied by all rows at once, more than fit beside
    widened groups."""
    one = case(spec, 1100, columns, 48, 16)
    found = one.run(runner, threads=1)
    assert_close(one, found)
    assert torch.equal(one.run(runner), found)
    assert torch.equal(one.run(runner, one.x[1050:1051])[0], found[1050])


@pytest.mark.parametrize("spec", [one for one in PLAIN if one.rows == "bf16" and one.epilogue == "store"], ids=str)
def test_products_with_and_without_loads_have_the_same_bits(spec):
    one, isa = case(spec, 80, 40, 208, 32), isa_or_skip("avx512_bf16")
    found = []
    for loads in (False, True):
        runner = Runner([spec], replace(isa, products_load=loads), checked=False)
        found.append(one.run(runner))
        runner.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", CODES)
def test_every_code_is_exact(runner, kind, rows):
    """Alone and among others, a code becomes exactly its value; NF4 with bfloat16 rows has 16 bits of it."""
    spec = next(one for one in PLAIN if (one.weights, one.rows, one.epilogue) == (kind, rows, "store"))
    coding = CODE_KINDS[kind].codes.removesuffix("_whole")
    values = CODINGS[coding].nan_to_num()
    codes = torch.arange(len(values))
    if kind == "int8":
        codes[128] = 0
    codes[~CODINGS[coding].isfinite()] = 0
    # A scale of 1 is a float16 number as well.
    weight = QuantizedMatrix(coding, codes.to(torch.uint8).repeat(32, 1), torch.ones(32, 1), len(values))
    assert packed_kind([weight], "fp32").removesuffix("_half") in (kind, "int4")
    x = torch.eye(len(values), dtype=torch.float32 if rows == "fp32" else torch.bfloat16)
    one = GemmCase(spec, [pack_linear(weight, kind, spec.offsets)], None, x)
    found, wanted = one.run(runner), values[codes][:, None].expand(-1, 32)
    torch.testing.assert_close(found, wanted, rtol=2**-16 if kind == "nf4" and rows == "bf16" else 0, atol=0)
    for row in (0, 7, len(values) - 1):
        assert torch.equal(one.run(runner, x[row : row + 1])[0], found[row])


@with_checks
@pytest.mark.parametrize("rows", [2, 17])
@pytest.mark.parametrize("short", ["x", "weights", "input_sums", "bias", "out"])
def test_out_of_bounds_accesses_are_reported(runner, short, rows):
    """A checked product whose memory is too small is reported, and accesses no other memory."""
    one = case(PLAIN[1], rows, 64, 96, 32)
    out = one.new_out(rows)
    values: dict[str, Any] = one.values(padded(one.x), out)
    buffer = values[short].contiguous()
    values[short] = (buffer.data_ptr(), buffer.nbytes - 64 if short != "input_sums" else buffer.nbytes - 4)
    with pytest.raises(Internal, match="gemm_int4_bf16_add"):
        runner.run(one.spec, values, rows_step(rows))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("avx512_bf16", "bf16"),
        pytest.param("avx512_bf16", "fp32", marks=pytest.mark.long),
        pytest.param("avx512", "bf16", marks=pytest.mark.long),
    ],
)
def test_sums_stay_in_registers(name, rows):
    """No tile spills a vector, in code for this processor: neither the tallest ones, with the most sums, nor the
    lowest. Tiles of float32 rows are the same without products of bfloat16 pairs."""
    tiles = assembly_of(
        [Gemm(kind, rows, "store", offsets=True) for kind in CODE_KINDS], isa_or_skip(name), outer_tiles
    )
    assert len(tiles) >= len(CODE_KINDS) * 2
    for tile, text in tiles.items():
        spilled = [line for line in text.splitlines() if SPILL.search(line)]
        assert not spilled, (tile, spilled)
