"""Packed weights: places of values, and content of padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kernels.cpu.products.packed_weight import PLAIN_TYPES
from pillion.kernels.cpu.products.packing import pack_bias, pack_gated_bias
from pillion.kernels.cpu.quantized.matrix_packing import pack_gated, pack_linear, panel_bytes, unpack
from tests.support.examples import examples
from tests.support.kernel_runner import normal

KINDS = ("bf16", "fp32")


def weights_of(packed):
    """float32 [pairs * 32, depth], in the packed order."""
    return unpack(packed).float()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15))
@given(columns=st.integers(1, 100), depth=st.integers(1, 70), seed=st.integers(0, 9))
def test_packing_round_trip(kind, columns, depth, seed):
    weight = normal(columns, depth, seed=seed)
    packed = pack_linear(weight, kind)
    assert packed.pairs * 32 >= columns > packed.pairs * 32 - 32
    assert packed.depth >= depth > packed.depth - 16
    assert packed.depth % 16 == 0
    assert packed.data.dtype == PLAIN_TYPES[kind]
    assert packed.data.is_contiguous()
    assert packed.nbytes % 64 == 0
    assert packed.nbytes == packed.pairs * panel_bytes(kind, packed.depth, packed.group, False)
    found = weights_of(packed)
    assert (found[columns:] == 0).all()
    assert (found[:, depth:] == 0).all()
    assert torch.equal(found[:columns, :depth], weight.to(PLAIN_TYPES[kind]).float())


def test_bf16_weights_are_packed_in_the_documented_order():
    """[pairs][depth / 2][2 tiles][16 columns][2 inputs]."""
    weight = normal(64, 32).bfloat16()
    data = pack_linear(weight, "bf16").data.view(2, 16, 2, 16, 2)
    assert data[1, 5, 0, 3, 1] == weight[32 + 3, 11]
    assert data[0, 15, 1, 15, 0] == weight[31, 30]


def test_fp32_weights_are_packed_in_the_documented_order():
    """[pairs][depth][2 tiles][16 columns]."""
    weight = normal(64, 32)
    data = pack_linear(weight, "fp32").data.view(2, 32, 2, 16)
    assert data[1, 5, 0, 3] == weight[32 + 3, 5]
    assert data[0, 31, 1, 15] == weight[31, 31]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [48, 40])
def test_gate_and_up_are_interleaved(kind, inner):
    gate, up = normal(inner, 32), normal(inner, 32, seed=1)
    packed = pack_gated(gate, up, kind)
    assert packed.pairs == -(-inner // 16)
    found = weights_of(packed).view(packed.pairs, 2, 16, 32)
    for half, matrix in enumerate((gate, up)):
        alone = weights_of(pack_linear(matrix, kind))
        assert torch.equal(found[:, half].reshape(-1, 32)[:inner], alone[:inner])
        assert (found[:, half].reshape(-1, 32)[inner:] == 0).all()


def test_bias_follows_the_columns():
    bias = normal(40)
    assert torch.equal(pack_bias(bias.bfloat16()), torch.cat((bias.bfloat16().float(), torch.zeros(24))))
    gate, up = normal(24), normal(24, seed=1)
    found = pack_gated_bias(gate, up)
    assert torch.equal(found, torch.cat((gate[:16], up[:16], gate[16:], torch.zeros(8), up[16:], torch.zeros(8))))
