"""Products with codes that are rounded to bfloat16 with their scales: the bits of products with such plain weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pillion.errors import Internal
from pillion.kernels.cpu.language.isa import BY_NAME
from pillion.kernels.cpu.products.gemm import Gemm
from pillion.kernels.cpu.products.packed_weight import PackedWeight
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS
from pillion.kernels.cpu.quantized.codes import CODE_KINDS, UNIT_INPUTS, unpack_codes
from pillion.kernels.cpu.quantized.matrix_packing import pack_linear, unpack
from pillion.kernels.cpu.quantized.rounded_codes import CUT_FACTOR
from tests.kernels.cpu.quantized.test_quantized_products import case
from tests.kernels.cpu.test_gemm import SPILL, GemmCase
from tests.support.kernel_runner import Runner, padded, rounding_tiles, rows_step
from tests.support.machine_code import assembly

SPECS = [
    *(Gemm(kind, "bf16", "store") for kind in CODE_KINDS if kind != "uint4_half"),
    *(Gemm(kind, "bf16", "store", offsets=True) for kind in ("int4", "uint4_half", "int8_whole", "int8_half")),
    Gemm("int4", "bf16", "add", bias=True, offsets=True),
    Gemm("int8", "bf16", "gated_silu"),
]
GROUPED = [
    Gemm("int4", "bf16", "store", grouped=True),
    Gemm("fp4_e2m1_half", "bf16", "gated_clamped", grouped=True, bias=True),
]


@pytest.fixture(scope="module", params=[False, True], ids=["", "checked"])
def runner(request) -> Iterator[Runner]:
    specs = [*SPECS, *GROUPED]
    found = Runner([*specs, *map(plain_spec, specs)], rounding_tiles(), request.param)
    yield found
    found.close()


def plain_spec(spec: Gemm) -> Gemm:
    return replace(spec, weights="bf16", offsets=False)


def rounded(one: GemmCase) -> GemmCase:
    """The same product with plain weights, within a step of the exact ones and equal to them on average."""
    packed = []
    for weight in one.packed:
        exact = unpack(weight)
        bits = enlarged(weight).float().view(torch.int32) & -65536
        cut = bits.view(torch.float32)
        error = ((cut - exact) / exact)[exact != 0]
        assert error.abs().max() < 2**-7
        assert error.mean().abs() < 2**-11
        packed.append(pack_linear(cut.bfloat16(), "bf16"))
    return replace(one, spec=plain_spec(one.spec), packed=packed)


def enlarged(weight: PackedWeight) -> torch.Tensor:
    """The columns in float64, computed from their enlarged constants; products of a code and a constant are exact in
    float64."""
    kind, parts = CODE_KINDS[weight.kind], 2 if weight.offsets else 1
    size = parts * PANEL_COLUMNS * kind.constant_bytes
    whole, found = weight.data.view(weight.pairs, -1), []
    for begin in range(0, weight.depth, weight.group):
        units = min(weight.group, weight.depth - begin) // UNIT_INPUTS
        before, codes, whole = torch.split(
            whole, [size, units * kind.unit_bytes, whole.shape[1] - size - units * kind.unit_bytes], 1
        )
        constants = before.contiguous().view(kind.constant_dtype).float() * torch.tensor(CUT_FACTOR).float()
        scale, *offset = constants.double().view(weight.pairs, parts, PANEL_COLUMNS, 1).unbind(1)
        numbers = unpack_codes(codes.reshape(weight.pairs, units, kind.unit_bytes), kind.bits).transpose(1, 2)
        wide = torch.tensor(kind.values).double()[numbers.flatten(2).long()] * scale
        found.append(wide + offset[0] if offset else wide)
    return torch.cat(found, 2).flatten(0, 1)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("rows", "columns", "inputs", "group"),
    [(5, 40, 20, 16), (37, 96, 720, 48), (1, 32, 1400, 1400), (17, 64, 1100, 496), (66, 32, 4400, 48)],
)
def test_bits_are_those_of_plain_weights(runner, spec, rows, columns, inputs, group):
    one = case(spec, rows, columns, inputs, group)
    plain = rounded(one)
    found = one.run(runner)
    assert torch.equal(found, plain.run(runner))
    torch.testing.assert_close(
        found.double(), plain.expected().double(), rtol=1e-2 if found.dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
def test_groups_are_multiplied_by_their_own_matrix(runner, spec):
    one = case(spec, 21, 72, 80, 32, groups=[3, 0, 17, 1])
    assert torch.equal(one.run(runner), rounded(one).run(runner))


@pytest.mark.parametrize("columns", [32, 2048], ids=["in_blocks", "whole_panels"])
def test_a_row_does_not_depend_on_the_others(runner, columns):
    """Blocks of inputs have other sizes for few rows; many rows take several passes."""
    one = case(SPECS[0], 600, columns, 1040, 16)
    whole = one.run(runner)
    for begin, rows in ((0, 1), (39, 2), (300, 14), (17, 33), (599, 1)):
        part = one.run(runner, one.x[begin : begin + rows], threads=1 + 2 * (rows % 2))
        assert torch.equal(part, whole[begin : begin + rows])


@pytest.mark.parametrize("kind", ["int4_half", "uint4_half", "nf4", "int8", "fp8_e4m3"])
def test_rounded_products_use_matrix_tiles(kind):
    """In code that any machine can compile: nothing spills, and 128 weights take at most 60 instructions."""
    spec = Gemm(kind, "bf16", "store", offsets=kind == "uint4_half")
    texts = assembly([spec], BY_NAME["amx"])
    few = {name: text for name, text in texts.items() if name.startswith("gemm_round_tile_")}
    assert len(few) == 2
    assert all("tdpbf16ps" in text for text in few.values())
    assert not any("vdpbf16ps" in text for text in texts.values())
    widening = next(text for name, text in texts.items() if re.fullmatch(rf"gemm_round_{kind}(_offsets)?", name))
    for text in (widening, *few.values()):
        loop = max(re.split(r"^\.LBB.*:", text, flags=re.MULTILINE), key=lambda part: part.count("zmm"))
        assert not SPILL.search(loop)
        assert 30 < loop.count("\n\t") <= 60


def test_out_of_bounds_accesses_are_reported():
    spec = SPECS[0]
    runner = Runner([spec], rounding_tiles(), checked=True)
    for short in ("x", "weights", "out"):
        one = case(spec, 17, 64, 96, 32)
        out = one.new_out(17)
        values: dict[str, Any] = one.values(padded(one.x), out)
        buffer = values[short].contiguous()
        values[short] = (buffer.data_ptr(), buffer.nbytes - 64)
        with pytest.raises(Internal, match=f"gemm_{spec.weights}_bf16_store"):
            runner.run(spec, values, rows_step(17))
    runner.close()
