"""Blocks of GGUF's types as matrices in few bits; gguf's own package is the oracle."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.checkpoints.gguf_blocks import BLOCK_LAYOUTS, read_blocks

# Where the float16 numbers of a block begin. All other bytes may be anything.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), blocks=st.integers(1, 3))
def test_numbers_are_those_of_gguf_bit_by_bit(kind, seed, rows, blocks):
    generator, layout = np.random.default_rng(seed), BLOCK_LAYOUTS[kind]
    data = generator.integers(0, 256, (rows, blocks, layout.block_bytes), np.uint8)
    for at in HALVES.get(kind, (0,)):
        data[..., at : at + 2] = generator.standard_normal((rows, blocks, 1)).astype(np.float16).view(np.uint8)
    data = data.reshape(rows, -1)
    found = read_blocks(layout, torch.from_numpy(data))
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert torch.equal(found.dequantize(torch.float32), torch.from_numpy(wanted))


def test_block_sizes_are_those_of_gguf():
    for kind, layout in BLOCK_LAYOUTS.items():
        numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert size == layout.block_bytes
        assert read_blocks(layout, torch.zeros(2, 3 * size, dtype=torch.uint8)).shape == (2, 3 * numbers)
