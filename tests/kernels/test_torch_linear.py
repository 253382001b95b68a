"""Packed and plain linear layers against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from pillion.kernels.torch.torch_linear import Linear, can_pack


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 100), st.integers(1, 100), st.booleans(), st.booleans(), st.integers(0, 2**31)
)
def test_packed_is_the_same_product(rows: int, inner: int, outer: int, bias: bool, pack: bool, seed: int) -> None:
    if pack and not can_pack(torch.bfloat16):
        pytest.skip("this build of torch packs nothing")
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(*s, generator=generator).bfloat16() for s in ((rows, inner), (outer, inner), (outer,)))
    found = Linear(w, b if bias else None, pack=pack)(x)
    wide = linear(x.double(), w.double(), b.double() if bias else None)
    # One rounding to bfloat16 of a sum that was kept in float32.
    torch.testing.assert_close(found.double(), wide, rtol=2**-8, atol=2**-8)


def test_float32_is_never_packed() -> None:
    assert not can_pack(torch.float32)
    x, w = torch.randn(3, 5), torch.randn(7, 5)
    assert torch.equal(Linear(w)(x), linear(x, w))
