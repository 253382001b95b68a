"""Float8 in a kernel's own arithmetic against torch's."""

from __future__ import annotations

import pytest

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kernels.gpu import fp8
from tests.support.examples import examples

LARGEST = 448.0


@triton.jit
def _decode_all(codes, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, fp8.decode_e4m3(tl.load(codes + at), tl.float32, False) * 256.0)


@triton.jit
def _encode_all(values, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, fp8.encode(tl.load(values + at)))


@triton.jit
def _scale_all(values, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, fp8.scale_of(tl.load(values + at)))


def encoded(values: torch.Tensor) -> torch.Tensor:
    size = triton.next_power_of_2(len(values))
    padded = torch.zeros(size, device=DEVICE)
    padded[: len(values)] = values.to(DEVICE)
    out = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    _encode_all[(1,)](padded, out, size)
    return out[: len(values)].cpu()


def torchs_codes(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def all_values() -> torch.Tensor:
    """Return the values of the 254 codes that are numbers, in rising order; zero occurs twice."""
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    return values[~values.isnan()].sort().values


def test_all_codes_are_decoded_exactly():
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, device=DEVICE)
    _decode_all[(1,)](codes.to(DEVICE), out, 256)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(expected.isnan().nonzero().flatten(), torch.tensor([0x7F, 0xFF]))
    expected[0x7F], expected[0xFF] = 480.0, -480.0
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(out.cpu().signbit(), expected.signbit())


def test_values_ties_and_their_neighbours_are_encoded_as_torch_does():
    values = all_values()
    ties = (values[1:] + values[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    near = torch.cat([values, ties, ties.nextafter(up), ties.nextafter(down)])
    # Rounding twice, by way of float16, would treat these as ties.
    near = torch.cat([near, ties * (1 + 2.0**-15), ties * (1 - 2.0**-15)])
    assert torch.equal(encoded(near), torchs_codes(near))


@pytest.mark.long
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64), st.integers(-12, 10))
@settings(max_examples=examples(60))
def test_any_values_are_encoded_as_torch_does(given_values, exponent):
    torch.manual_seed(len(given_values))
    values = torch.cat([torch.tensor(given_values), torch.randn(192) * 2.0**exponent])
    assert torch.equal(encoded(values), torchs_codes(values))


def test_scales_are_above_zero_and_their_inverse_is_finite():
    largest = torch.tensor([0.0, 1e-45, 1e-30, 1.0, 3.0, 448.0, 60000.0, 3e38], device=DEVICE)
    out = torch.empty_like(largest)
    _scale_all[(1,)](largest, out, 8)
    # The host divides: on a GPU torch multiplies by the reciprocal of a number.
    assert torch.equal(out.cpu(), (largest.cpu() / LARGEST).clamp(min=2.0**-100))
    assert bool((out > 0).all())
    assert bool((1 / out).isfinite().all())
