"""Products of rows by their experts' matrices against plain torch: every coding, activation, order and tile."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, add_up_in_one_order, rounded  # isort: skip  (before the kernels)

from dataclasses import replace

import pytest
import torch

from pillion.engine.models.layer_operations import ClampedSwiglu
from pillion.engine.models.layers import ACTIVATIONS, GATED, clamped_swiglu
from pillion.errors import Internal
from pillion.kernels.gpu.experts.grouped_product import GroupedGemm
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix, pack
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix
from tests.gpu.test_quantized_product import random_matrix
from tests.support.guarded import MARK, Guarded

EXPERTS, CHOICES = 4, 2
CLAMPED = (1.702, 7.0)


def experts_of(name: str, outputs: int, inputs: int, dtype: torch.dtype):
    """Experts' matrices by the name of their kind: the stack on the device, and their weights in float64."""
    torch.manual_seed(outputs)
    if name == "plain":
        plain = (torch.randn(EXPERTS, outputs, inputs) / inputs**0.5).to(dtype)
        return plain.to(DEVICE), plain.double()
    coding, group, *more = name.split()
    matrices = [_expert(coding, int(group), more, outputs, inputs, seed) for seed in range(EXPERTS)]
    packed = [pack(matrix, dtype) for matrix in matrices]
    (kind,) = {each.kind for each in packed}
    assert (kind.scale, kind.shift) == ("float32", "none") or more
    assert (kind.scale == "two_halves") == ("signed" in more)
    parts = {key: torch.stack([each.parts[key] for each in packed]).to(DEVICE) for key in packed[0].parts}
    return PackedMatrix(kind, **parts), torch.stack([matrix.dequantize(torch.float32) for matrix in matrices]).double()


def _expert(coding: str, group: int, more: list[str], outputs: int, inputs: int, seed: int) -> QuantizedMatrix:
    matrix = random_matrix(coding, outputs, inputs, group or inputs, ordered="ordered" in more, seed=seed)
    if "signed" in more:
        matrix.codes[matrix.codes == 0x80] = 0
    values = CODINGS[coding]
    size = inputs**0.5 * float(values[values.isfinite()].square().mean().sqrt())
    scales = (torch.rand(matrix.scales.shape) + 0.5) / size
    if "halves" in more:
        scales = scales.bfloat16().float()
    if "float16" in more:
        scales = scales.half().float()
    if "powers" in more:
        scales = torch.exp2(scales.log2().round())
    if "floats" in more:
        factors = (torch.rand(outputs) + 0.5) / 100
        scales = (scales / factors[:, None]).to(torch.float8_e4m3fn).float() * factors[:, None]
        scales[0] = 0
        return replace(matrix, scales=scales, factors=factors)
    offsets = None
    if "zeros" in more:
        offsets = -scales * torch.randint(16, scales.shape)
    if "offsets" in more:
        offsets = torch.randn(scales.shape) / inputs
    return replace(matrix, scales=scales, offsets=offsets)


def routed(counts: list[int], tile_rows: int):
    """Pairs in a random order, the given number per expert, and their tiles."""
    torch.manual_seed(sum(counts))
    order = torch.randperm(sum(counts)).int()
    tiles, begin = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, begin + first, min(tile_rows, count - first)) for first in range(0, count, tile_rows)]
        begin += count
    # Content after the last tile must not be read.
    count = len(tiles)
    return order, torch.tensor([*tiles, (99, -(10**6), 99)], dtype=torch.int32), torch.tensor([count]).int()


def expected(rows, order, choices, tiles, count, weights, bias, activate, out, scatter):
    for expert, first, held in tiles[: int(count)].tolist():
        places = torch.arange(first, first + held)
        read = places if order is None else order[places] // choices
        found = rows[read].double() @ weights[expert].T
        if bias is not None:
            found += bias[expert].double()
        out[order[places].long() if scatter else places] = activate(found.to(rows.dtype))
    return out


def activation_of(name, gated):
    if name is None:
        return lambda values: values
    if isinstance(name, tuple):
        return lambda values: clamped_swiglu(values, ClampedSwiglu(*name))
    return GATED[name] if gated else ACTIVATIONS[name]


# Kind of the matrix, type, activation, gated, biased, rows are in the order of places, scattered.
CASES = [
    ("plain", torch.float32, "silu", True, False, True, False),
    ("plain", torch.bfloat16, CLAMPED, True, True, True, True),
    ("plain", torch.float16, "gelu_tanh", True, True, True, False),
    ("plain", torch.float32, "relu2", False, True, True, False),
    ("plain", torch.float32, "relu", False, False, False, False),
    ("plain", torch.float16, "gelu", False, True, False, False),
    ("plain", torch.bfloat16, None, False, True, True, True),
    ("int4 64", torch.bfloat16, "silu", True, True, True, False),
    ("int4 32 signed", torch.bfloat16, None, False, False, True, True),
    ("int4 32 halves", torch.bfloat16, "silu", True, False, True, False),
    ("uint4 16 halves ordered", torch.bfloat16, None, False, False, True, True),
    ("int4 32 float16 ordered", torch.bfloat16, "silu", True, False, True, False),
    ("uint4 32 float16 zeros", torch.bfloat16, "silu", True, False, True, False),
    ("uint4 32 halves zeros", torch.bfloat16, None, False, False, True, True),
    ("uint4 32 float16 zeros", torch.float32, None, False, False, True, True),
    ("uint4 128 zeros", torch.bfloat16, "silu", True, False, True, False),
    ("uint4 128 zeros ordered", torch.float32, "silu", True, False, True, False),
    ("uint4 64 signed offsets", torch.bfloat16, None, False, False, False, False),
    ("nf4 64", torch.bfloat16, "silu", True, False, True, False),
    ("int8 0", torch.bfloat16, "silu", True, False, True, True),
    ("int8 128 ordered", torch.bfloat16, None, False, False, True, False),
    ("int8 64 offsets", torch.float32, None, False, False, False, False),
    ("int8 32 signed", torch.bfloat16, "silu", True, False, True, False),
    ("int8 16 signed offsets ordered", torch.bfloat16, None, False, False, True, True),
    ("fp8_e4m3 128", torch.bfloat16, "silu", True, True, True, False),
    ("fp8_e4m3 0", torch.float32, None, False, False, True, False),
    ("fp4_e2m1 32 powers", torch.bfloat16, CLAMPED, True, True, True, True),
    ("fp4_e2m1 32 powers", torch.float16, None, False, True, True, False),
    ("fp4_e2m1 16 floats", torch.bfloat16, "silu", True, False, True, False),
    ("fp4_e2m1 16 floats", torch.float32, None, False, False, True, True),
]


@pytest.mark.parametrize(("name", "dtype", "activation", "gated", "biased", "ordered", "scatter"), CASES)
@pytest.mark.parametrize("inputs", [96, pytest.param(296, marks=[] if NATIVE else pytest.mark.long)])
def test_grouped_products_match_torch(name, dtype, activation, gated, biased, ordered, scatter, inputs):
    """An expert with several tiles, one with none, and inputs and outputs that are no multiples of tiles."""
    width = 40
    outputs = 2 * width if gated else width
    matrix, weights = experts_of(name, outputs, inputs, dtype)
    order, tiles, count = routed([3, 0, 18, 1], 16)
    # Some gates and values exceed the limits of a clamped activation.
    rows = torch.randn(len(order) // CHOICES if ordered else len(order), inputs).mul(8).to(dtype)
    bias = torch.randn(EXPERTS, outputs).to(dtype) if biased else None
    out = Guarded((len(order) + 1, width), dtype)
    GroupedGemm(dtype, DEVICE)(
        rows.to(DEVICE), order.to(DEVICE) if ordered else None, CHOICES, tiles.to(DEVICE), count.to(DEVICE), matrix,
        None if bias is None else bias.to(DEVICE), activation, gated=gated, out=out.inside, scatter=scatter,
        tile_rows=16,
    )  # fmt: skip
    wanted = expected(
        rows, order if ordered else None, CHOICES, tiles, count, weights, bias, activation_of(activation, gated),
        torch.full(out.inside.shape, MARK, dtype=dtype), scatter,
    )  # fmt: skip
    slack = rounded(dtype, 8 if dtype == torch.float32 else 4)
    size = wanted[:-1].abs().max().double()
    torch.testing.assert_close(out.inside.cpu().double() / size, wanted.double() / size, **slack)
    assert out.margins_are_whole()


@pytest.mark.parametrize("name", ["plain", pytest.param("int4 64", marks=[] if NATIVE else pytest.mark.long)])
def test_a_rows_bits_do_not_depend_on_its_tile(monkeypatch, name):
    add_up_in_one_order(monkeypatch)
    dtype = torch.bfloat16 if NATIVE else torch.float32
    matrix, _ = experts_of(name, 24, 96, dtype)
    counts = [40, 7, 0, 70]
    order, _, _ = routed(counts, 16)
    rows = torch.randn(len(order), 96, device=DEVICE).to(dtype)
    found = []
    for tile_rows in (16, 32, 64, 128):
        _, tiles, count = routed(counts, tile_rows)
        out = torch.zeros(len(order), 12, dtype=dtype, device=DEVICE)
        GroupedGemm(dtype, DEVICE)(
            rows, order.to(DEVICE), 1, tiles.to(DEVICE), count.to(DEVICE), matrix, None, "silu", gated=True, out=out,
            scatter=True, tile_rows=tile_rows,
        )  # fmt: skip
        found.append(out)
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_no_tiles_write_nothing():
    """Kernels are compiled like this before there are rows."""
    product = GroupedGemm(torch.float32, DEVICE)
    matrix, _ = experts_of("plain", 24, 96, torch.float32)
    out = torch.full((3, 12), float(MARK), device=DEVICE)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    product(
        torch.zeros(3, 96, device=DEVICE), None, 1, none.new_zeros(1, 3), none, matrix, None, "silu", gated=True,
        out=out, scatter=False, tile_rows=16,
    )  # fmt: skip
    assert bool((out == MARK).all())


def test_wrong_arguments_are_refused():
    product = GroupedGemm(torch.float32, DEVICE)
    matrix = torch.zeros(2, 8, 32, device=DEVICE)
    right = {
        "rows": torch.zeros(3, 32, device=DEVICE),
        "order": torch.zeros(3, dtype=torch.int32, device=DEVICE),
        "choices": 1,
        "tiles": torch.zeros(1, 3, dtype=torch.int32, device=DEVICE),
        "count": torch.zeros(1, dtype=torch.int32, device=DEVICE),
        "matrix": matrix,
        "bias": None,
        "activation": "silu",
        "gated": True,
        "out": torch.zeros(3, 4, device=DEVICE),
        "scatter": True,
        "tile_rows": 16,
    }
    product(**right)
    for name, wrong in {
        "rows": right["rows"][:, :16].contiguous(),
        "order": None,
        "tiles": right["tiles"].long(),
        "bias": torch.zeros(2, 4, device=DEVICE),
        "activation": None,
        "out": torch.zeros(3, 8, device=DEVICE),
        "tile_rows": 24,
        "matrix": matrix[0],
    }.items():
        with pytest.raises(Internal):
            product(**{**right, name: wrong})
    with pytest.raises(Internal, match="needs gates"):
        product(**{**right, "activation": CLAMPED, "gated": False, "out": torch.zeros(3, 8, device=DEVICE)})
