"""Products by quantized matrices against plain torch, and the bits of a row alone and among others."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, add_up_in_one_order, rounded  # isort: skip  (before the kernels)

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.gpu.products.gpu_packing import PackedKind, PackedMatrix, can_pack, pack, pack_alike
from pillion.kernels.gpu.products.quantized_product import QuantizedGemm, splits_of
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix
from tests.support.examples import examples
from tests.support.guarded import Guarded

MAX_ROWS = 300


def random_matrix(
    coding: str, outputs: int, inputs: int, group: int, *, offsets: bool = False, ordered: bool = False, seed: int = 0
) -> QuantizedMatrix:
    """Make a matrix of random codes that are numbers, with scales of any size."""
    torch.manual_seed(seed)
    numbers = (~CODINGS[coding].isnan()).nonzero().flatten()
    codes = numbers[torch.randint(len(numbers), (outputs, inputs))].to(torch.uint8)
    groups = -(-inputs // group)
    scales = torch.randn(outputs, groups) * torch.rand(outputs, 1).exp2()
    return QuantizedMatrix(
        coding,
        codes,
        scales,
        group,
        torch.randn(outputs, groups) if offsets else None,
        torch.randperm(inputs) if ordered else None,
    )


def on_device(packed: PackedMatrix) -> PackedMatrix:
    return PackedMatrix(packed.kind, **{name: part.to(DEVICE) for name, part in packed.parts.items()})


def multiplier(matrix: QuantizedMatrix, dtype: torch.dtype):
    """Return a function of rows, a bias and a result that multiplies by the packed matrix."""
    packed = on_device(pack(matrix, dtype))
    product = QuantizedGemm([packed], MAX_ROWS, dtype, DEVICE)
    return lambda rows, bias, out: product(rows, packed, bias, out)


def check_against_torch(matrix, count, dtype, *, biased=False, wide=False):
    """Compare with float64 products by weights that are rounded once to the rows' type, or exact: errors must be below
    the slack."""
    outputs, inputs = matrix.shape
    rows = torch.randn(count, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    out = Guarded((count, outputs), torch.float32 if wide else dtype)
    multiplier(matrix, dtype)(rows.to(DEVICE), None if bias is None else bias.to(DEVICE), out.inside)
    weights = matrix.dequantize(torch.float32).to(dtype).double()
    wanted = rows.double() @ weights.T
    sizes = rows.double().abs() @ weights.abs().T
    if bias is not None:
        wanted += bias.double()
        sizes += bias.double().abs()
    # Sums may cancel, so errors are relative to the sum of magnitudes.
    size = sizes.amax().clamp(min=1e-9)
    slack = rounded(dtype, 2) if NATIVE or dtype != torch.float32 else rounded(dtype, 8)
    torch.testing.assert_close(out.inside.cpu().double() / size, wanted / size, rtol=0, atol=slack["atol"])
    assert out.margins_are_whole()


# Groups within a tile's columns, of one and of several, and one for all; ``make test`` has each coding and group once.
GROUPS = (16, 32, 48, 64, 128, 1024)
EACH = list(zip(itertools.cycle(sorted(CODINGS)), GROUPS, strict=False))


@pytest.mark.parametrize(
    ("coding", "group"),
    [
        pytest.param(*pair, marks=[] if NATIVE or pair in EACH else pytest.mark.long)
        for pair in itertools.product(sorted(CODINGS), GROUPS)
    ],
)
def test_products_of_every_coding_and_group_size_match_torch(coding, group):
    """Inputs that fill whole units and that do not."""
    for inputs, offsets in ((512, False), (328, True)):
        check_against_torch(random_matrix(coding, 19, inputs, group, offsets=offsets), 3, torch.float32)


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("group", [16, 48, 64])
def test_groups_in_bfloat16(group, count):
    """Groups of 16 inputs, and those divided into such, are rounded; sums of larger ones are multiplied."""
    check_against_torch(random_matrix("int4", 19, 512, group), count, torch.bfloat16)


@given(
    coding=st.sampled_from(sorted(CODINGS)),
    shape=st.tuples(st.integers(1, 140), st.integers(1, 700)),
    group=st.sampled_from([16, 32, 48, 128, 4096]),
    count=st.integers(1, 140),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    flags=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
@example("fp8_e4m3", (1, 1), 16, 1, torch.float16, [False, False, True, False], 0)  # Little but the bias is summed.
@settings(max_examples=examples(25))
def test_products_of_any_shape_match_torch(coding, shape, group, count, dtype, flags, seed):
    offsets, ordered, biased, wide = flags
    matrix = random_matrix(coding, *shape, group, offsets=offsets, ordered=ordered, seed=seed)
    check_against_torch(matrix, count, dtype, biased=biased, wide=wide)


@pytest.mark.parametrize("coding", ["fp8_e4m3", pytest.param("uint4", marks=[] if NATIVE else pytest.mark.long)])
def test_a_rows_bits_do_not_depend_on_the_others(monkeypatch, coding):
    """Numbers of rows have different tiles, and few rows share the parts of the inputs among programs."""
    add_up_in_one_order(monkeypatch)
    inputs = 4 * (256 if coding == "uint4" else 128) + 40
    matrix = random_matrix(coding, 30, inputs, 128, offsets=True, ordered=True)
    assert splits_of(pack(matrix, torch.bfloat16).kind) > 1
    multiply = multiplier(matrix, torch.float32)
    rows, bias = torch.randn(140, inputs, device=DEVICE), torch.randn(30, device=DEVICE)

    def products(chosen):
        return multiply(rows[chosen], bias, torch.empty(len(rows[chosen]), 30, device=DEVICE))

    every = products(slice(None))
    for chosen in (slice(5, 6), slice(3, 20), slice(100, 140), slice(60, 125)):
        assert torch.equal(products(chosen), every[chosen]), chosen


def test_weights_are_rounded_once():
    """Weights 1 + 1/300 and so on, whose products by one row of a unit matrix are the weights themselves."""
    matrix = random_matrix("uint4", 40, 64, 32, offsets=True)
    rows = torch.eye(64).half().to(DEVICE)
    found = multiplier(matrix, torch.float16)(rows, None, torch.empty(64, 40, dtype=torch.float16, device=DEVICE))
    # A GPU multiplies and adds with one rounding, torch with two, before both round to float16.
    same = (found.cpu() == matrix.dequantize(torch.float16).T).float().mean()
    assert same == 1 if not NATIVE else same > 0.99


@pytest.mark.parametrize("shape", [(4096, 14336), (28672, 4096), (128, 40), (70, 5000), (576, 1536), (1, 10**6)])
@pytest.mark.parametrize("coding", ["nf4", "int8"])
def test_no_part_of_a_matrix_is_empty(coding, shape):
    kind = PackedKind(coding, *shape, 32)
    splits = splits_of(kind)
    depth = -(-kind.units // splits)
    assert (splits - 1) * depth < kind.units <= splits * depth


def test_groups_without_a_kernel_are_not_packed():
    assert not can_pack(random_matrix("int4", 2, 64, 8))
    assert can_pack(random_matrix("int4", 2, 60, 60))


def test_misshapen_tensors_are_refused():
    multiply = multiplier(random_matrix("int4", 8, 64, 32, ordered=True), torch.float32)
    rows, out = torch.zeros(2, 64, device=DEVICE), torch.zeros(2, 8, device=DEVICE)
    for wrong in (torch.zeros(2, 63), torch.zeros(2, 64).int(), torch.zeros(64, 2).T):
        with pytest.raises(Internal):
            multiply(wrong.to(DEVICE), None, out)
    for wrong in (torch.zeros(3, 8), torch.zeros(2, 8).half(), torch.zeros(8, 2).T):
        with pytest.raises(Internal):
            multiply(rows, None, wrong.to(DEVICE))
    with pytest.raises(Internal):
        multiply(rows, torch.zeros(7, device=DEVICE), out)
    many = MAX_ROWS + 1
    with pytest.raises(Internal, match="workspace"):
        multiply(torch.zeros(many, 64, device=DEVICE), None, torch.zeros(many, 8, device=DEVICE))


def powers_and_floats() -> list[QuantizedMatrix]:
    """Matrices as in MXFP4 and NVFP4: scales that are powers of two, and floats of 8 bits times a factor."""
    torch.manual_seed(1)
    mxfp4 = random_matrix("fp4_e2m1", 70, 320, 32)
    powers = torch.randint(-30, 12, mxfp4.scales.shape).float().exp2()
    nvfp4 = random_matrix("fp4_e2m1", 70, 320, 16)
    factors = torch.rand(70) / 1000
    floats = (torch.rand(nvfp4.scales.shape) * torch.rand(70, 1).pow(4) * 448).to(torch.float8_e4m3fn).float()
    floats[:, 3] = 0
    return [replace(mxfp4, scales=powers), replace(nvfp4, scales=floats * factors[:, None], factors=factors)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", [0, 1])
def test_scales_of_a_byte(place, dtype):
    matrix = powers_and_floats()[place]
    packed = pack(matrix, torch.bfloat16)
    assert packed.kind.scale == ("e8m0", "e5m3")[place]
    assert packed.scales.numel() * 4 == 128 * (512 // packed.kind.group)
    check_against_torch(matrix, 3, dtype, biased=True)


def test_scales_that_do_not_fit_a_byte_stay_float32():
    mxfp4, nvfp4 = powers_and_floats()
    for matrix in (replace(mxfp4, scales=mxfp4.scales * 1.5), replace(nvfp4, factors=nvfp4.factors * 1.1)):
        assert pack(matrix, torch.bfloat16).kind.scale == "float32"


@pytest.mark.parametrize(("coding", "group"), [("int4", 32), ("int8", 16), ("uint4", 48)])
def test_scales_of_two_bytes(coding, group):
    """Inputs that are no multiple of a unit; products by all kinds of rows."""
    matrix = random_matrix(coding, 19, 328, group)
    matrix = replace(matrix, scales=matrix.scales.bfloat16().float())
    packed = pack(matrix, torch.bfloat16)
    assert (packed.kind.scale, packed.scales.dtype) == ("bfloat16", torch.int32)
    assert packed.scales.numel() == 64 * 512 // (2 * packed.kind.group) * (1 if coding != "int8" else 384 / 512)
    for count, dtype in ((3, torch.bfloat16), (40, torch.bfloat16), (3, torch.float32)):
        check_against_torch(matrix, count, dtype)
    for other in (replace(matrix, scales=matrix.scales * 1.001), replace(matrix, offsets=matrix.scales)):
        assert pack(other, torch.bfloat16).kind.scale != "bfloat16"


@pytest.mark.parametrize(
    ("coding", "scale", "zeros"),
    [("int4", "float16", False), ("uint4", "float16", True), ("uint4", "bfloat16", True), ("uint4", "float16", False)],
)
def test_scales_in_words_with_zeros(coding, scale, zeros):
    """Inputs that are no multiple of a unit, groups of one place and of two halves of it; products by all kinds of
    rows."""
    matrix = random_matrix(coding, 19, 328, 32)
    scales = matrix.scales.to(getattr(torch, scale)).float()
    matrix = replace(matrix, scales=scales)
    if zeros:
        matrix = replace(matrix, offsets=-scales * torch.randint(16, scales.shape))
    packed = pack(matrix, torch.bfloat16)
    assert (packed.kind.scale, packed.kind.shift, packed.offsets) == (scale, "zeros" if zeros else "none", None)
    assert packed.scales.numel() == 64 * 512 // 32
    for count, dtype in ((3, torch.bfloat16), (40, torch.bfloat16), (3, torch.float32), (3, torch.float16)):
        check_against_torch(matrix, count, dtype)
    for group in (16, 48):  # Half a place has no separate word.
        alike = scales[:, :1].repeat(1, -(-328 // group))
        small = replace(matrix, group=group, scales=alike, offsets=-8 * alike if zeros else None)
        assert pack(small, torch.bfloat16).kind.scale == "two_halves"
        check_against_torch(small, 3, torch.bfloat16)


def test_weights_with_float16_scales_match_torch_bit_by_bit():
    """All codes, zeros and scales that have more bits than bfloat16's, by rows of a unit matrix."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(48, 4)
    scales = torch.randn(48, 2).half().float()
    zeros = torch.arange(16).repeat(6).view(48, 2)
    for matrix in (
        QuantizedMatrix("int4", codes, scales, 32),
        QuantizedMatrix("uint4", codes, scales, 32, -scales * zeros),
    ):
        assert pack(matrix, torch.bfloat16).kind.scale == "float16"
        rows = torch.eye(64).bfloat16().to(DEVICE)
        found = multiplier(matrix, torch.bfloat16)(rows, None, torch.empty(64, 48, device=DEVICE))
        weights = matrix.dequantize(torch.float32)
        # Triton's interpreter truncates.
        once = weights.bfloat16() if NATIVE else (weights.view(torch.int32) >> 16 << 16).view(torch.float32)
        assert torch.equal(found.cpu().T, once.float())


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize(
    ("coding", "group"), [("uint4", 32), ("int4", 16), ("int8", 16), ("int8", 32), ("uint4", 4096), ("int8", 4096)]
)
def test_signed_numbers(coding, group, offsets):
    """Small groups, and all groups with any offsets, for rows of bfloat16: whole units, and two parts of one. Products
    by rows of a unit matrix are the weights."""
    for inputs in (512, 328, 552):
        matrix = random_matrix(coding, 19, inputs, group, offsets=offsets or group > 64)
        if coding == "int8":
            matrix = replace(matrix, codes=matrix.codes.view(torch.int8).clamp(-100, 100).view(torch.uint8))
        packed = pack(matrix, torch.bfloat16)
        assert packed.kind.scale == "two_halves"
        chosen = torch.cat((torch.randperm(inputs)[:12], torch.arange(inputs - 4, inputs)))
        rows = torch.eye(inputs)[chosen].bfloat16().to(DEVICE)
        found = multiplier(matrix, torch.bfloat16)(rows, None, torch.empty(16, 19, device=DEVICE)).cpu().T
        wanted = matrix.dequantize(torch.float32)[:, chosen]
        scales = matrix.scales if matrix.offsets is None else torch.maximum(matrix.scales.abs(), matrix.offsets.abs())
        allowed = wanted.abs() * 2.0**-7 + scales[:, chosen // group].abs() * 2.0**-3
        assert bool(((found - wanted).abs() <= allowed).all())


def test_numbers_that_do_not_fit_sign_and_seven_bits_stay_integers():
    matrix = random_matrix("int8", 2, 64, 32, offsets=True)
    matrix.codes[1, :2] = torch.tensor([0x80, 0x7F])
    assert pack(matrix, torch.bfloat16).kind.scale == "float32"
    check_against_torch(matrix, 3, torch.bfloat16)
    matrix.codes[matrix.codes == 0x80] = 0
    assert pack(matrix, torch.bfloat16).kind.coding == "signed8"
    packed = on_device(pack(matrix, torch.bfloat16))
    rows, out = torch.zeros(1, 64, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    with pytest.raises(Internal, match="rows of bfloat16"):
        QuantizedGemm([packed], 1, torch.float32, DEVICE)(rows, packed, None, out)


def test_a_zero_matrix_is_packed_like_any_other():
    """An expert that is never chosen may be 0, and a matrix of only zeros would have bfloat16 scales."""
    for offsets in (True, False):
        matrix = random_matrix("uint4", 20, 320, 32, offsets=offsets)
        dead = random_matrix("uint4", 20, 320, 32, offsets=offsets)
        for values in (dead.scales, dead.offsets):
            if values is not None:
                values.zero_()
        assert pack(dead, torch.bfloat16).kind != pack(matrix, torch.bfloat16).kind
        for dtype in (torch.bfloat16, torch.float32):
            one, other = pack_alike([matrix, dead], dtype)
            assert (one.kind, one.kind.scale) == (other.kind, "two_halves" if dtype == torch.bfloat16 else "float32")


def test_zeros_that_are_whole_numbers_are_subtracted_from_codes():
    matrix = random_matrix("uint4", 20, 320, 64)
    zeros = torch.randint(16, matrix.scales.shape)
    whole, other = (replace(matrix, offsets=-matrix.scales * each) for each in (zeros, zeros + 0.5))
    assert (pack(whole, torch.bfloat16).kind.shift, pack(other, torch.bfloat16).kind.shift) == ("zeros", "offsets")
    check_against_torch(whole, 3, torch.bfloat16)
    check_against_torch(whole, 3, torch.float32)


def test_bits_of_weights_in_memory():
    """For gpt-oss's shape: padding of 2,880 inputs and outputs is negligible."""
    matrix = random_matrix("fp4_e2m1", 2880, 2880, 32)
    packed = pack(replace(matrix, scales=matrix.scales.abs().log2().round().clamp(-9).exp2()), torch.bfloat16)
    assert sum(part.numel() * 32 for part in packed.parts.values()) / 2880**2 < 4.3
