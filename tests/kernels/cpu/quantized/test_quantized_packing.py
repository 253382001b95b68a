"""Packed quantized weights: the order of codes, what panels do not support, and the constants of groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kernels.cpu.quantized.codes import pack_codes, unpack_codes
from pillion.kernels.cpu.quantized.matrix_packing import pack_gated, pack_linear, panel_bytes
from pillion.kernels.cpu.quantized.quantized_packing import has_offsets, packed_kind
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix
from tests.kernels.cpu.test_packing import weights_of
from tests.support.examples import examples
from tests.support.kernel_runner import normal


def random_matrix(
    columns: int, inputs: int, group: int, coding: str = "uint4", seed: int = 0, *, half: bool = False
) -> QuantizedMatrix:
    """Random codes and constants; ``half``: constants are float16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(len(CODINGS[coding]), (columns, inputs), generator=generator).to(torch.uint8)
    if coding == "fp8_e4m3":
        codes[codes & 127 == 127] = 0
    scales, offsets = (normal(columns, -(-inputs // group), seed=seed + part) for part in (1, 2))
    if half:
        scales, offsets = scales.half().float(), offsets.half().float()
    return QuantizedMatrix(coding, codes, scales, group, offsets)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_codes_round_trip(bits):
    codes = torch.arange(32 * 4 * 3).view(3, 32, 4).remainder(2**bits).to(torch.uint8)
    units = pack_codes(codes, bits)
    assert units.shape == (3, 16 * bits)
    assert torch.equal(unpack_codes(units, bits), codes)
    if bits == 4:
        # [16 lanes][2 inputs of a pair][2 pairs][2 tiles]: column 21 is lane 5 of the second tile.
        assert units.view(3, 16, 4)[1, 5, 0] >> 4 == codes[1, 21, 0]
        assert units.view(3, 16, 4)[1, 5, 3] & 15 == codes[1, 5, 3]
    else:
        # [2 pairs][4 quarters][2 tiles][4 columns][2 inputs]: column 21 is of the second tile, in its second quarter.
        assert units.view(3, 2, 4, 2, 4, 2)[1, 1, 1, 1, 1, 0] == codes[1, 21, 2]


@pytest.mark.parametrize("coding", list(CODINGS))
@settings(max_examples=examples(15))
@given(
    columns=st.integers(1, 70),
    inputs=st.integers(1, 200),
    group=st.sampled_from((16, 32, 96, 1024, 2048)),
    half=st.booleans(),
    seed=st.integers(0, 9),
)
def test_packed_codes_are_the_matrix(coding, columns, inputs, group, half, seed):
    """Dequantized by codes, scales and offsets, for one matrix and for two in turn."""
    matrix, other = (random_matrix(columns, inputs, group, coding, seed + part, half=half) for part in (0, 5))
    kind = packed_kind([matrix, other], "bf16")
    assert kind.endswith("_half") == (half and ("int" in coding or coding == "fp4_e2m1"))
    packed = pack_linear(matrix, kind)
    assert packed.nbytes == packed.pairs * panel_bytes(kind, packed.depth, packed.group, packed.offsets)
    wanted = matrix.dequantize(torch.float32)
    torch.testing.assert_close(weights_of(packed)[:columns, :inputs], wanted, rtol=1e-5, atol=1e-5)
    pair = weights_of(pack_gated(matrix, other, kind)).view(-1, 2, 16, packed.depth)
    for half, part in enumerate((matrix, other)):
        found = pair[:, half].reshape(-1, packed.depth)[:columns, :inputs]
        torch.testing.assert_close(found, part.dequantize(torch.float32), rtol=1e-5, atol=1e-5)


def test_matrices_that_do_not_fit_panels_are_widened():
    matrix = random_matrix(8, 100, 50)
    assert packed_kind([matrix], "bf16") == "bf16"
    assert torch.equal(weights_of(pack_linear(matrix, "fp32"))[:8, :100], matrix.dequantize(torch.float32))
    fits = random_matrix(8, 96, 32)
    assert packed_kind([fits], "bf16") == "int4"
    assert packed_kind([fits, random_matrix(8, 96, 48)], "bf16") == "bf16"
    assert packed_kind([fits, torch.zeros(8, 96)], "fp32") == "fp32"
    ordered = replace(fits, order=torch.arange(96).flip(0))
    assert packed_kind([fits, ordered], "bf16") == "bf16"
    assert packed_kind([ordered, replace(fits, order=ordered.order.clone())], "bf16") == "int4"
    assert pack_linear(ordered, "int4").order.tolist() == list(range(95, -1, -1))


def test_symmetric_codes_need_no_offsets():
    """The zero point 8 of uint4 is the value 0 of int4."""
    plain = random_matrix(8, 64, 32)
    assert has_offsets(plain, "int4")
    assert not has_offsets(replace(plain, offsets=-8 * plain.scales), "int4")
    assert has_offsets(replace(plain, offsets=None), "int4")
    assert not has_offsets(replace(plain, coding="int4", offsets=None), "int4")
    assert not has_offsets(plain, "bf16")


def test_constants_are_float16_where_that_is_exact():
    """All matrices have one type of constants. A zero point of 8 is dropped; other offsets stay, with codes from 0
    on."""
    half = random_matrix(8, 64, 32, half=True)
    assert packed_kind([half], "bf16") == "uint4_half"
    assert packed_kind([half, random_matrix(8, 64, 32)], "bf16") == "int4"
    assert packed_kind([replace(half, offsets=-8 * half.scales)], "bf16") == "int4_half"
    assert packed_kind([replace(half, scales=half.scales * 2**20)], "bf16") == "int4"
    packed = pack_linear(half, "uint4_half")
    # A group: scales [32], offsets [32], 8 units of 64 bytes.
    constants = packed.data.view(1, 2, 2 * 64 + 8 * 64)[0, 1, :128].view(torch.float16).view(2, 32)
    assert torch.equal(constants[0, :8].float(), half.scales[:, 1])
    assert torch.equal(constants[1, :8].float(), half.offsets[:, 1])
