"""Blocks of GGUF's types as quantized matrices; gguf's own package is the oracle."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.quantized.formats.layout import from_unsigned
from pillion.engine.quantized.gguf_blocks import BLOCK_LAYOUTS, read_blocks
from pillion.kernels.cpu.quantized.matrix_packing import pack_linear, unpack
from pillion.kernels.cpu.quantized.quantized_packing import packed_kind
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix
from tests.support.examples import examples

# Offsets of a block's float16 numbers. Other bytes may have any value.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), blocks=st.integers(1, 3))
def test_dequantized_values_match_gguf_bit_by_bit(kind, seed, rows, blocks):
    generator, layout = np.random.default_rng(seed), BLOCK_LAYOUTS[kind]
    data = generator.integers(0, 256, (rows, blocks, layout.block_bytes), np.uint8)
    for at in HALVES.get(kind, (0,)):
        data[..., at : at + 2] = generator.standard_normal((rows, blocks, 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        # A scale of 255 is not a number.
        data[..., 0] = np.minimum(data[..., 0], 254)
    data = data.reshape(rows, -1)
    found = read_blocks(layout, torch.from_numpy(data))
    # MXFP4's largest scales overflow float32.
    with np.errstate(over="ignore"):
        wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert torch.equal(found.dequantize(torch.float32), torch.from_numpy(wanted))


def test_block_sizes_match_gguf():
    for kind, layout in BLOCK_LAYOUTS.items():
        numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert size == layout.block_bytes
        assert read_blocks(layout, torch.zeros(2, 3 * size, dtype=torch.uint8)).shape == (2, 3 * numbers)


def exact(matrix: QuantizedMatrix, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return the matrix in float64, which is exact here, with these offsets."""
    codes = CODINGS[matrix.coding].double()[matrix.codes.int()].unflatten(1, (-1, matrix.group))
    wide = codes * matrix.scales.double()[..., None]
    return (wide if offsets is None else wide + offsets[..., None]).flatten(1)


def check_panels(matrix: QuantizedMatrix, wanted: torch.Tensor) -> None:
    """Assert that panels hold these numbers. Codes stored 8 lower have offsets 8 scales higher, rounded to float32 with
    2**-24 error, where float16 would have 2**-12."""
    kind = packed_kind([matrix], "bf16")
    found = unpack(pack_linear(matrix, kind))[: len(wanted), : wanted.shape[1]]
    lost = torch.zeros(())
    if matrix.coding == "uint4" and kind.startswith("int4"):
        assert matrix.offsets is not None
        lost = (matrix.offsets + 8 * matrix.scales).abs().double().repeat_interleave(matrix.group, 1) * 2**-24
    assert ((found - wanted).abs() <= lost).all(), kind


# The smallest and largest float16 numbers, the limits of subnormal ones, and typical scales.
SCALES = (2**-24, 3 * 2**-24, 1023 * 2**-24, 2**-14, 1.2345e-4, 3.3e-3, 0.0171, 1.7, 65504.0)


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_panels_of_the_cpu_kernels_round_no_scale(kind):
    """Scales and offsets become float16 if exact, else float32: products of two levels in Q4_K, Q5_K and Q6_K exceed
    float16's precision."""
    layout, generator = BLOCK_LAYOUTS[kind], np.random.default_rng(3)
    data = generator.integers(0, 256, (len(SCALES), 4, layout.block_bytes), np.uint8)
    for shift, at in enumerate(HALVES.get(kind, (0,))):
        halves = np.roll(np.array(SCALES, np.float16), shift)
        data[..., at : at + 2] = halves.view(np.uint8).reshape(-1, 1, 2)
    if kind == "MXFP4":
        data[..., 0] = np.linspace(1, 250, len(SCALES))[:, None]
    matrix = read_blocks(layout, torch.from_numpy(data.reshape(len(SCALES), -1)))
    offsets = None if matrix.offsets is None else matrix.offsets.double()
    wanted = exact(matrix, offsets)
    library = gguf.quants.dequantize(data.reshape(len(SCALES), -1), gguf.GGMLQuantizationType[kind])
    assert torch.equal(wanted.float(), torch.from_numpy(library))
    check_panels(matrix, wanted)
    half = kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    assert packed_kind([matrix], "bf16").endswith("_half") == half


@pytest.mark.parametrize("bits", [4, 8])
def test_panels_round_no_zero_point(bits):
    """AWQ's and GPTQ's zero points become offsets of up to 19 bits."""
    generator = torch.Generator().manual_seed(bits)
    codes, zeros = (torch.randint(2**bits, (9, size), generator=generator).to(torch.uint8) for size in (256, 8))
    scales = torch.tensor(SCALES).half().float()[:, None].repeat(1, 8)
    matrix = from_unsigned(codes, bits, scales, zeros, 32)
    numbers = codes.double() - zeros.double().repeat_interleave(32, 1)
    check_panels(matrix, numbers * scales.double().repeat_interleave(32, 1))
