"""Packed and plain linear layers against torch's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from pillion.kernels.torch.torch_linear import Linear, can_pack
from tests.support.examples import examples

# One layer of each type, made and called as the torch backend does it.
ONE_LAYER = """
import torch
from pillion.kernels.torch.torch_linear import Linear, can_pack
dtype = getattr(torch, "{dtype}")
generator = torch.Generator().manual_seed(1)
rows, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 16), (32, 16)))
found = Linear(weight)(rows)
torch.testing.assert_close(found, torch.nn.functional.linear(rows.double(), weight.double()).to(dtype))
print(can_pack(dtype))
"""


@settings(max_examples=examples(40))
@given(
    st.integers(1, 70),
    st.integers(1, 100),
    st.integers(1, 100),
    st.booleans(),
    st.sampled_from([None, False]),
    st.integers(0, 2**31),
)
def test_packed_products_match_plain_ones(
    rows: int, inner: int, outer: int, bias: bool, pack: bool | None, seed: int
) -> None:
    """``pack`` None packs where this processor can; elsewhere both are plain."""
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


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("float16", "float32"))]
)
def test_a_layer_works_on_a_processor_without_avx512(dtype: str) -> None:
    """With oneDNN and torch limited to AVX2, the layer stays plain and is correct."""
    narrow = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", ONE_LAYER.format(dtype=dtype)]
    done = subprocess.run(command, env=narrow, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
