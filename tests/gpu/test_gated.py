"""The gated activations against torch's, and their reference against the decoder's own."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, rounded  # isort: skip  (before the kernels)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed import gpu_reference as reference
from pillion.engine.models.layers import ACTIVATIONS as DECODERS
from pillion.engine.models.layers import GATED, xielu, xielu_factors
from pillion.errors import Internal
from pillion.kernels.gpu.rows.gated import ACTIVATIONS, NAMED, gated
from tests.support.examples import examples
from tests.support.guarded import Guarded

# Exponentials may become infinite, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(
    tokens=st.integers(1, 5),
    inner=st.sampled_from([1, 7, 64, 1030, 2049]),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(NAMED),
    size=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60))
def test_the_kernel_agrees_with_torch(tokens, inner, dtype, activation, size, seed):
    torch.manual_seed(seed)
    gate_up = torch.randn(tokens, 2 * inner)
    gate_up[:, :inner] *= size
    gate_up = gate_up.to(dtype).to(DEVICE)
    out = Guarded((tokens, inner), dtype)
    gated(gate_up, out.inside, activation)
    # Exponential and division are some float32 units off on a device.
    roundings = 8 if dtype == torch.float32 else 2
    torch.testing.assert_close(out.inside, reference.gated(gate_up, activation), **rounded(dtype, roundings))
    assert out.margins_are_whole()
    # Gates and their factors may also be rows of two tensors.
    together = out.inside.clone()
    gated(gate_up[:, :inner].contiguous(), out.inside, activation, up=gate_up[:, inner:])
    assert torch.equal(out.inside, together)
    assert out.margins_are_whole()


# relu needs no rounding.
@pytest.mark.parametrize("activation", [name for name in NAMED if name != "relu"])
def test_the_activation_is_rounded_before_it_multiplies(activation):
    """float16, because the interpreter truncates bfloat16 instead of rounding it."""
    torch.manual_seed(1)
    gate_up = torch.randn(4, 4096).half().to(DEVICE)
    out = torch.empty(4, 2048, dtype=torch.float16, device=DEVICE)
    gated(gate_up, out, activation)
    same = (out == reference.gated(gate_up, activation)).float().mean()
    gate, up = gate_up.float().chunk(2, -1)
    once = reference.gated(torch.cat((gate, up), -1), activation).half()
    assert same > 0.99
    assert (out == once).float().mean() < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", NAMED)
def test_the_reference_matches_the_decoder(activation, dtype):
    torch.manual_seed(2)
    gate_up = torch.randn(3, 48).to(dtype)
    if activation in GATED:
        assert torch.equal(reference.gated(gate_up, activation), GATED[activation](gate_up))
    assert torch.equal(reference.activated(gate_up, activation), DECODERS[activation](gate_up))


def test_the_xielu_reference_matches_the_decoder():
    values, bends = torch.linspace(-20, 20, 1001), torch.tensor([0.3, -0.7])
    factors = xielu_factors(bends)
    found = reference.activated(values, "xielu", tuple(factors.tolist()))
    torch.testing.assert_close(found, xielu(values, bends), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0.01, 3.0, 60.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_without_a_gate(activation, dtype, size):
    torch.manual_seed(3)
    up, bends = (torch.randn(3, 1030) * size).to(dtype).to(DEVICE), (0.9, 1.3)
    out = Guarded((3, 1030), dtype)
    gated(up, out.inside, activation, bends)
    expected = reference.activated(up, activation, bends)
    tolerance = rounded(dtype, 8 if dtype == torch.float32 else 2)
    # Values near 0 are as exact as others.
    torch.testing.assert_close(out.inside, expected, rtol=tolerance["rtol"], atol=tolerance["atol"] * min(size, 1.0))
    assert out.margins_are_whole()


@pytest.mark.skipif(not NATIVE, reason="the interpreter takes too long")
def test_a_long_prefill_is_within_the_grid():
    gate_up = torch.randn(70_000, 256, device=DEVICE).half()
    out = torch.empty(70_000, 128, dtype=torch.float16, device=DEVICE)
    gated(gate_up, out, "silu")
    torch.testing.assert_close(out, reference.gated(gate_up, "silu"), **rounded(torch.float16, 2))


def test_misshapen_tensors_are_refused():
    gate_up = torch.zeros(2, 8, device=DEVICE)
    for out in (torch.zeros(2, 7), torch.zeros(3, 4), torch.zeros(2, 4).half(), torch.zeros(4, 2).T):
        with pytest.raises(Internal):
            gated(gate_up, out.to(DEVICE), "silu")
    with pytest.raises(Internal):
        gated(torch.zeros(2, 7, device=DEVICE), torch.zeros(2, 3, device=DEVICE), "silu")
    with pytest.raises(Internal):
        gated(gate_up, torch.zeros(2, 4, device=DEVICE), "relu6")
