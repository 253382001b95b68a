"""Products with packed weights against their reference; a row's bits depend only on the row."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.cpu.language.isa import BY_NAME
from pillion.kernels.cpu.products.gemm import ACTIVATED, GATED, LAYOUT, Gemm
from pillion.kernels.cpu.products.gemm_tiles import TileKind
from pillion.kernels.cpu.products.packed_weight import PLAIN_TYPES, PackedWeight
from pillion.kernels.cpu.quantized.matrix_packing import pack_gated, pack_linear, unpack
from pillion.kernels.cpu.quantized.quantized_packing import INT8_DOTS
from tests.support.cpu_references import BENDS, CLAMPED, reference_gemm, reference_sum_inputs
from tests.support.examples import examples
from tests.support.kernel_runner import (
    ALL_MODES,
    TILE_MODES,
    Runner,
    isa_or_skip,
    kernel_modes,
    normal,
    padded,
    rows_step,
    runner_of,
    stride,
    with_checks,
)
from tests.support.machine_code import assembly
from tests.support.matrix_tile import add_pairs

# Kinds of weights, and types of rows.
KINDS = (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"))
EPILOGUES = ("store", "add", *GATED)
# Every epilogue and every option, not all pairs: tiles are shared, and compiling takes most of the time.
PLAIN = [
    Gemm(*kind, epilogue, bias=epilogue in ("add", "gated_gelu", "gated_clamped"))
    for kind in KINDS
    for epilogue in EPILOGUES
]
PLAIN += [
    Gemm(kind, kind, epilogue, bias=kind == "bf16")
    for kind in ("bf16", "fp32")
    for epilogue in ("act_erf_gelu", "act_xielu")
]
GROUPED = [Gemm(*kind, epilogue, grouped=True) for kind in KINDS for epilogue in ("store", "gated_silu")]
GROUPED += [Gemm("bf16", "fp32", epilogue, grouped=True, bias=True) for epilogue in ("store", "gated_clamped")]
SAMPLED = Gemm("bf16", "bf16", "store", "num_samples", bias=True)
# Matrices of two heads, whose columns are adjacent in a row of x and of out.
HEAD_COLUMNS, HEAD_INPUTS = 32, 48
HEADS = [
    Gemm("bf16", rows, "store", x_step=HEAD_INPUTS * (2 if rows == "bf16" else 4), out_step=HEAD_COLUMNS * 4)
    for rows in ("bf16", "fp32")
]
SPECS = [*PLAIN, *GROUPED, SAMPLED, *HEADS]
FACTOR = 0.5
# A vector register that is stored to or loaded from the stack.
SPILL = re.compile(r"[yz]mm\d.*\(%rsp|\(%rsp.*[yz]mm\d|\b(q|v)\d.*\[sp")
FILLER = 7.0


runner = runner_of(SPECS, ALL_MODES)


@dataclass(frozen=True)
class GemmCase:
    """One product. x [T, depth] of the kind's type; ``packed``: one matrix per group."""

    spec: Gemm
    packed: list[PackedWeight]
    bias: torch.Tensor | None
    x: torch.Tensor
    starts: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Columns of out."""
        return self.packed[0].pairs * (16 if self.spec.epilogue in GATED else 32)

    def new_out(self, rows: int) -> torch.Tensor:
        """The output before the product. ``add`` gets random rows, each with its own seed, so that parts begin
        alike."""
        if self.spec.epilogue == "add":
            return torch.stack([normal(self.width, seed=100 + row) for row in range(rows)])
        dtype = self.x.dtype if self.spec.epilogue in (*GATED, *ACTIVATED) else torch.float32
        return torch.full((rows, self.width), FILLER, dtype=dtype)

    def values(self, x: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        first = self.packed[0]
        sums = reference_sum_inputs(x, first.depth, first.group) if first.offsets else None
        return {
            "x": x,
            "weights": torch.stack([one.data for one in self.packed]),
            "input_sums": sums,
            "bias": self.bias,
            "out": out,
            "group_starts": self.starts,
            "x_stride": stride(x),
            "depth": first.depth,
            "pairs": first.pairs,
            "out_stride": stride(out),
            "num_groups": len(self.packed) if self.spec.grouped or self.spec.x_step else 0,
            "group_bytes": first.nbytes,
            "inputs": first.group,
            "input_sums_stride": 0 if sums is None else stride(sums),
            "factor": FACTOR,
            "alpha": CLAMPED.alpha,
            "limit": CLAMPED.limit,
            "above": BENDS[0],
            "below": BENDS[1],
        }

    def run(self, runner: Any, x: torch.Tensor | None = None, out: torch.Tensor | None = None, threads: int = 3):
        """Return the product of ``x``, or of all rows; fail if it wrote after them."""
        x = self.x if x is None else x
        room = self.new_out(len(x) + 2)
        if out is not None:
            room[: len(x)] = out
        behind = room[len(x) :].clone()
        step = rows_step(0, len(x)) if self.spec.rows_of == "num_samples" else rows_step(len(x))
        # Rows after the last one must not affect the result.
        runner.run(self.spec, self.values(padded(x, extra=1, filler=torch.nan), room), step, threads)
        assert torch.equal(room[len(x) :], behind)
        return room[: len(x)]

    def expected(self) -> torch.Tensor:
        out = self.new_out(len(self.x))
        if self.starts is None:
            return reference_gemm(self.x, self.packed[0], self.spec.epilogue, self.bias, out, FACTOR)
        biases = [None] * len(self.packed) if self.bias is None else self.bias.view(len(self.packed), -1)
        found = [
            reference_gemm(self.x[begin:end], packed, self.spec.epilogue, bias)
            for packed, bias, (begin, end) in zip(self.packed, biases, pairwise(self.starts.tolist()), strict=True)
        ]
        return torch.cat(found)


def case(spec: Gemm, rows: int, columns: int, depth: int, seed: int = 0, groups: list[int] | None = None) -> GemmCase:
    """Random values, such that products are about 1; ``groups``: rows of each."""
    packed = []
    for group in range(len(groups or [0])):
        weight, up = (normal(columns, depth, seed=seed + number + group) / depth**0.5 for number in (10, 30))
        if spec.epilogue in GATED:
            packed.append(pack_gated(weight, up, spec.weights))
        else:
            packed.append(pack_linear(weight, spec.weights))
    bias = normal(len(packed) * packed[0].pairs * 32, seed=seed + 3) if spec.bias else None
    x = torch.zeros(rows, packed[0].depth)
    x[:, :depth] = normal(rows, depth, seed=seed + 4)
    starts = None if groups is None else torch.tensor([0, *groups]).cumsum(0).to(torch.int32)
    return GemmCase(spec, packed, bias, x.to(torch.float32 if spec.rows == "fp32" else torch.bfloat16), starts)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the tolerance of float32 sums, and one rounding to out's type."""
    rounding = 2**-8 if found.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("spec", [*PLAIN, SAMPLED], ids=lambda spec: spec.name)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 48), (5, 40, 20), (37, 96, 256)])
def test_products_match_the_reference(runner, spec, rows, columns, depth):
    one = case(spec, rows, columns, depth)
    assert_close(one.run(runner), one.expected())


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@settings(max_examples=examples(10))
@given(
    rows=st.integers(1, 50),
    columns=st.integers(1, 130),
    depth=st.integers(1, 80),
    epilogue=st.sampled_from(EPILOGUES),
    threads=st.sampled_from((1, 3)),
)
def test_ragged_products(runner, kind, rows, columns, depth, epilogue, threads):
    spec = next(spec for spec in PLAIN if (spec.weights, spec.rows, spec.epilogue) == (*kind, epilogue))
    one = case(spec, rows, columns, depth, seed=rows)
    assert_close(one.run(runner, threads=threads), one.expected())


@pytest.mark.parametrize("columns", [1, 2, 15, 17, 31, 33])
@pytest.mark.parametrize("epilogue", ["store", "add"])
def test_narrow_products_stay_within_rows_of_whole_panels(runner, epilogue, columns):
    """Every number of rows, whose memory ends with the last one; columns after the matrix's own are products with
    zeros."""
    one = case(Gemm("fp32", "fp32", epilogue, bias=epilogue == "add"), 70, columns, 48)
    expected = one.expected()
    for rows in range(1, 71):
        memory = one.new_out(rows + 2)
        guards, out = memory[[0, -1]].clone(), memory[1:-1]
        out[:] = one.new_out(rows)
        runner.run(one.spec, one.values(one.x[:rows], out), rows_step(rows))
        assert torch.equal(memory[[0, -1]], guards)
        assert_close(out, expected[:rows])


@pytest.mark.parametrize("spec", [spec for spec in PLAIN if spec.epilogue in ("add", "gated_silu")], ids=str)
def test_a_row_does_not_depend_on_the_others(runner, spec):
    """Alone, among any number of rows, at any place, with any number of threads: the same bits."""
    one = case(spec, 200, 40, 48)
    start = one.new_out(200)
    whole = one.run(runner)
    for rows in (1, 2, 3, 8, 11, 14, 16, 31):
        for begin in (0, 57, 200 - rows):
            end = begin + rows
            part = one.run(runner, one.x[begin:end], start[begin:end], threads=1 + 2 * (rows % 2))
            assert torch.equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("runner", kernel_modes(TILE_MODES), indirect=True)
@pytest.mark.parametrize("spec", [spec for spec in PLAIN[: len(EPILOGUES)] if "gelu" not in spec.epilogue], ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(600, 48), (72, 2096), (33, 16)])
def test_many_rows_in_matrix_tiles_have_the_bits_of_each_alone(runner, spec, columns, depth):
    """Rows of several blocks, and panels of several ranges; a depth of two blocks of inputs and a rest, and one of only
    a rest."""
    one = case(spec, 300, columns, depth)
    start = one.new_out(300)
    alone = torch.cat([one.run(runner, one.x[row : row + 1], start[row : row + 1]) for row in range(0, 300, 7)])
    for rows, threads in ((33, 3), (48, 1), (65, 3), (256, 3), (257, 1), (300, 3)):
        found = one.run(runner, one.x[:rows], start[:rows], threads=threads)[::7]
        assert torch.equal(found, alone[: len(found)]), rows


@pytest.mark.parametrize("spec", HEADS, ids=str)
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_heads_are_multiplied_by_their_own_matrix(runner, spec, rows):
    one = case(replace(spec, x_step=0), rows, HEAD_COLUMNS, HEAD_INPUTS, groups=[rows, 0])
    x = normal(rows, 2 * HEAD_INPUTS, seed=9).to(one.x.dtype)
    out = torch.full((rows, 2 * HEAD_COLUMNS), FILLER)
    heads = replace(one, spec=spec, starts=None)
    runner.run(spec, heads.values(padded(x), out), rows_step(rows))
    expected = [
        reference_gemm(part, packed, "store", None, torch.zeros(rows, HEAD_COLUMNS))
        for part, packed in zip(x.split(HEAD_INPUTS, 1), one.packed, strict=True)
    ]
    assert_close(out, torch.cat(expected, 1))


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("groups", [[3, 0, 17, 1], [0, 0, 5, 0], [0, 0], [40, 2, 70]], ids=str)
def test_groups_are_multiplied_by_their_own_matrix(runner, spec, groups):
    one = case(spec, sum(groups), 72, 48, groups=groups)
    assert_close(one.run(runner), one.expected())


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_group_of_rows_has_the_bits_of_the_same_rows_alone(runner, kind):
    one = case(Gemm(kind[0], kind[1], "store", grouped=True), 21, 72, 48, groups=[4, 17])
    alone = Gemm(kind[0], kind[1], "add", bias=True)
    for packed, begin, end in zip(one.packed, (0, 4), (4, 21), strict=True):
        other = GemmCase(alone, [packed], torch.zeros(packed.pairs * 32), one.x[begin:end])
        sums = other.run(runner, out=torch.zeros(end - begin, other.width))
        assert torch.equal(one.run(runner)[begin:end] * FACTOR, sums)


@pytest.mark.parametrize("spec", [PLAIN[0], GROUPED[0], SAMPLED], ids=lambda spec: spec.name)
def test_no_rows(runner, spec):
    one = case(spec, 0, 40, 48, groups=[0] if spec.grouped else None)
    assert one.run(runner).shape == (0, 64)


@with_checks
@pytest.mark.parametrize("rows", [17, 40])
@pytest.mark.parametrize("short", ["x", "weights", "bias", "out"])
def test_out_of_bounds_accesses_are_reported(runner, short, rows):
    """A checked product whose memory is too small is reported, and accesses no other memory."""
    one = case(Gemm("bf16", "bf16", "add", bias=True), rows, 64, 48)
    out = one.new_out(rows)
    values = one.values(padded(one.x), out)
    buffer = values[short].contiguous()
    values[short] = (buffer.data_ptr(), buffer.nbytes - 64)
    with pytest.raises(Internal, match="gemm_bf16_bf16_add"):
        runner.run(one.spec, values, rows_step(rows))


def test_bfloat16_weights_have_the_bits_of_float32_weights(runner):
    """With float32 rows, in every tile: one row, tiles of every height, and many rows."""
    narrow, wide = (case(Gemm(kind, "fp32", "add", bias=True), 50, 72, 80) for kind in ("bf16", "fp32"))
    rounded = replace(wide.packed[0], data=pack_linear(unpack(narrow.packed[0]).float(), "fp32").data)
    expected, start = replace(wide, packed=[rounded]).run(runner), wide.new_out(50)
    for rows in (*range(1, 15), 50):
        assert torch.equal(narrow.run(runner, narrow.x[:rows], start[:rows]), expected[:rows])


REGISTERS = list(itertools.product(("avx512_bf16", "avx512", "avx2", "neon"), KINDS))
# Each instruction set once, and AVX2 with the kind that needs nearly all registers.
SHORT = [REGISTERS[0], REGISTERS[4], REGISTERS[8], REGISTERS[9]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*each, marks=() if each in SHORT else pytest.mark.long) for each in REGISTERS],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_sums_stay_in_registers(name, kind):
    """No tile spills a vector, in code for this processor. Only the second input of a pair of bfloat16 may be on the
    stack, once in each of the two steps of AVX2's loop, while the first is multiplied."""
    # Code for generic AVX-512, which is never run, does spill some.
    isa = isa_or_skip(name) if name.startswith("avx512") else BY_NAME[name]
    limits = TileKind(*kind).tiles(isa)
    texts, prefix = assembly([Gemm(kind[0], kind[1], "store")], isa), f"gemm_tile_{'_'.join(kind)}_"
    heights = [(rows, 2 if rows <= limits.wide else 1) for rows in range(1, limits.tallest + 1)]
    allowed = 4 if (name, kind) == ("avx2", ("bf16", "fp32")) else 0
    assert {text for text in texts if text.startswith(prefix)} == {f"{prefix}{rows}x{width}" for rows, width in heights}
    for rows, width in heights:
        spilled = [line for line in texts[f"{prefix}{rows}x{width}"].splitlines() if SPILL.search(line)]
        assert len(spilled) <= allowed, (rows, width, spilled)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_bfloat16_products_use_matrix_tiles(kind):
    """In code for a processor with matrix tiles, which any machine can compile, for any number of rows."""
    texts = assembly([Gemm(*kind, "store")], BY_NAME["amx"])
    tiles = {name: text for name, text in texts.items() if "_matrix_" in name}
    few = {name for name in texts if name.startswith("gemm_tile_")}
    if kind == ("bf16", "bf16"):
        assert set(tiles) == {
            f"gemm_matrix_{name}_bf16_bf16_{groups}" for name in ("tile", "block") for groups in (1, 2)
        }
        assert not few
    else:
        assert few
        assert not tiles
    for name, text in tiles.items():
        assert text.count("tdpbf16ps") >= 2
        # A block of many rows leaves the tile configuration to its caller.
        assert ("ldtilecfg" in text) == bool(re.search(r"tilerelease\s.*retq", text, re.DOTALL)) == ("_tile_" in name)


@pytest.mark.parametrize("spec", [Gemm("bf16", "bf16", "store"), Gemm(INT8_DOTS, "bf16", "store")], ids=str)
def test_products_of_many_rows_load_one_tile_each(spec):
    """The loop over the depth loads two tiles of rows and two of weights for four products, and has no vectors, no tile
    configurations, and hardly anything else."""
    name = f"gemm_matrix_block_{spec.weights}_{'bf16' if spec.weights == 'bf16' else 'int8'}_2"
    text = assembly([spec], BY_NAME["amx"])[name]
    (loop,) = [block for block in re.split(r"^\.L\w+:", text, flags=re.MULTILINE) if "tdp" in block]
    instructions = re.findall(r"^\t([a-z]\w*)", loop, re.MULTILINE)
    assert sum(each.startswith("tdp") for each in instructions) == 4
    assert instructions.count("tileloadd") == instructions.count("tileloaddt1") == 2
    assert len(instructions) <= 4 + 4 + 16, instructions
    assert not re.search(r"%[xyz]mm", loop)
    assert len(re.findall(r"tileloadd\s", text)) == 6
    assert text.count("tilestored") == 4


@pytest.mark.parametrize("rows", [19, 300])
@pytest.mark.parametrize("depth", [16, 32, 48, 64, 528, 2096])
def test_sums_in_matrix_tiles_are_one_chain_over_the_depth(rows, depth):
    """An instruction adds the first products of 16 pairs, then the second ones, and both to the sum."""
    isa, spec = isa_or_skip(TILE_MODES[0][0]), Gemm("bf16", "bf16", "store")
    one = case(spec, rows, 64, depth)
    runner = Runner([spec], isa, checked=False)
    found = one.run(runner)
    runner.close()
    x, weights = (
        values.contiguous().view(torch.uint16).numpy().reshape(len(values), -1, 2)
        for values in (one.x, unpack(one.packed[0]))
    )
    total = np.zeros((rows, 64), np.float32)
    for step in range(0, x.shape[1], 16):
        total = add_pairs(total, x[:, step : step + 16], weights[:, step : step + 16].swapaxes(0, 1))
    assert torch.equal(found, torch.from_numpy(total))


def test_specs_have_distinct_names():
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    assert {spec.layout for spec in SPECS} == {LAYOUT}
    assert set(PLAIN_TYPES) == {weights for weights, _ in KINDS}
