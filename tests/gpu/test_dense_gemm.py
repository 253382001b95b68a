"""Products by plain matrices against torch, the bits of a row alone and among others, and the choice of kernels."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, add_up_in_one_order, rounded  # isort: skip  (before the kernels)
from tests.support.gpu_model import GpuDriver  # isort: skip

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.benchmarks.gpu.bench import Bench
from lab.benchmarks.gpu.mixture_shapes import GPT_OSS_20B
from lab.benchmarks.gpu.model import RandomModel
from pillion.engine.backends.gpu import gpu_model
from pillion.errors import Internal
from pillion.kernels.gpu.launch import arch_of
from pillion.kernels.gpu.products import dense_gemm
from pillion.kernels.gpu.products.dense_gemm import SPLIT_K_MAX_ROWS, DenseGemm, splits_of
from pillion.kernels.gpu.tuned import tuning_file
from tests.support.examples import examples
from tests.support.families import tokens_of
from tests.support.guarded import Guarded

MAX_ROWS = 300


def check_against_torch(product, inputs, outputs, count, dtype, *, biased, wide, seed):
    torch.manual_seed(seed)
    rows, weight = (torch.randn(size, inputs).to(dtype) for size in (count, outputs))
    bias = torch.randn(outputs).to(dtype) if biased else None
    out = Guarded((count, outputs), torch.float32 if wide else dtype)
    product(rows.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE), out.inside)
    wanted = rows.double() @ weight.double().T
    sizes = rows.double().abs() @ weight.double().abs().T
    if bias is not None:
        wanted += bias.double()
        sizes += bias.double().abs()
    # Sums may cancel, so errors are relative to the sum of magnitudes.
    size = sizes.amax().clamp(min=1e-9)
    slack = rounded(dtype, 8 if dtype == torch.float32 else 2)
    torch.testing.assert_close(out.inside.cpu().double() / size, wanted / size, rtol=0, atol=slack["atol"])
    assert out.margins_are_whole()
    # All tickets are reset for the next launch.
    assert not product._tickets.any()


@given(
    shape=st.tuples(st.integers(1, 700), st.integers(1, 140)),
    count=st.sampled_from([1, 3, 16, 17, 40, 64, 65, 130]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    flags=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
@example((512, 128), 1, torch.bfloat16, (False, False), 0)  # Every tile is full, and two programs share the inputs.
@example((1152, 70), SPLIT_K_MAX_ROWS + 1, torch.float16, (True, False), 1)  # A program computes three parts itself.
@settings(max_examples=examples(12))
def test_products_of_any_shape_match_torch(shape, count, dtype, flags, seed):
    product = DenseGemm(MAX_ROWS, dtype, DEVICE)
    for turn in range(2):
        check_against_torch(product, *shape, count, dtype, biased=flags[0], wide=flags[1], seed=seed + turn)


def test_a_rows_bits_do_not_depend_on_the_others(monkeypatch):
    """Numbers of rows have different tiles; a program of few rows sums one part of the inputs, of many rows all."""
    add_up_in_one_order(monkeypatch)
    monkeypatch.setattr(dense_gemm, "SPLIT_K_MAX_ROWS", 64)
    inputs, outputs = 4 * 128 + 40, 40
    assert splits_of(inputs, outputs) > 1
    dtype = torch.bfloat16 if NATIVE else torch.float32
    product = DenseGemm(MAX_ROWS, dtype, DEVICE)
    rows, weight, bias = (torch.randn(*size).to(dtype).to(DEVICE) for size in ((140, inputs), (outputs, inputs), (40,)))

    def products(chosen):
        return product(rows[chosen], weight, bias, torch.empty(len(rows[chosen]), outputs, dtype=dtype, device=DEVICE))

    every = products(slice(None))
    for chosen in (slice(5, 6), slice(3, 20), slice(100, 140), slice(60, 125)):
        assert torch.equal(products(chosen), every[chosen]), chosen


@pytest.mark.skipif(not NATIVE, reason="programs of the interpreter do not run side by side")
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)])
def test_a_models_products_are_the_same_at_each_launch(inputs, outputs):
    """Llama 3 8B's products, whose programs finish in another order each time, for any number of rows."""
    product = DenseGemm(MAX_ROWS, torch.bfloat16, DEVICE)
    rows, weight = (torch.randn(size, inputs, device=DEVICE).bfloat16() for size in (MAX_ROWS, outputs))
    every = product(rows, weight, None, torch.empty(MAX_ROWS, outputs, dtype=torch.bfloat16, device=DEVICE))
    torch.testing.assert_close(every, rows @ weight.T, rtol=2**-6, atol=2**-6 * inputs**0.5)
    for count in (1, 16, 17, 64, 65, 128, 256):
        for _ in range(20):
            out = torch.empty(count, outputs, dtype=torch.bfloat16, device=DEVICE)
            assert torch.equal(product(rows[:count], weight, None, out), every[:count]), count


@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (40, 7), (10**6, 1)])
def test_no_part_of_a_matrix_is_empty(shape):
    splits, units = splits_of(*shape), -(-shape[0] // dense_gemm.UNIT_INPUTS)
    depth = -(-units // splits)
    assert (splits - 1) * depth < units <= splits * depth


@pytest.mark.parametrize(("arch", "rows"), [(80, 0), (90, 32)])
def test_the_tuning_file_chooses_the_kernel(monkeypatch, arch, rows):
    """Matrices that cuBLAS reads slowly, and others: a large one, and one of another type."""
    monkeypatch.setattr(dense_gemm, "arch_of", lambda device: arch)
    product = DenseGemm(16, torch.bfloat16, DEVICE)
    small, large = (torch.empty(size, 4096, dtype=torch.bfloat16, device="meta") for size in (4096, 28672))
    assert [product.max_rows(each) for each in (small, large, small.float())] == [rows, 0, 0]
    entry = {"when": {"inputs": 4096, "outputs": 28672}, "use": {"rows": 7, "most_mb": 1000}}
    monkeypatch.setitem(tuning_file(arch), "plain_product_rows", [entry, *tuning_file(arch)["plain_product_rows"]])
    assert DenseGemm(16, torch.bfloat16, DEVICE).max_rows(large) == 7


def test_a_model_on_our_products(monkeypatch, prepared):
    """The logits of a text in a chunk and decodes are torch's up to roundings; all layers and the head use the
    kernels."""
    text = tokens_of(7, 1)
    (wanted,) = (driver.run_all(driver.sequences.add()[0], text, [5]) for driver in (GpuDriver(prepared),))
    shapes = set()

    class SeenProduct(DenseGemm):
        def __call__(self, rows, weight, bias, out):
            shapes.add(tuple(weight.shape))
            return super().__call__(rows, weight, bias, out)

    monkeypatch.setattr(gpu_model, "DenseGemm", SeenProduct)
    use = {"when": {}, "use": {"rows": 64, "most_mb": 1}}
    monkeypatch.setitem(tuning_file(arch_of(DEVICE)), "plain_product_rows", [use])
    driver = GpuDriver(prepared)
    found = driver.run_all(driver.sequences.add()[0], text, [5])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # Queries, keys and values; results; gates and ups; downs; the head, in a model of two sizes of projections.
    assert len(shapes) >= 5


def test_misshapen_tensors_are_refused():
    product = DenseGemm(16, torch.float32, DEVICE)
    rows, weight, out = (torch.zeros(*size, device=DEVICE) for size in ((2, 64), (8, 64), (2, 8)))
    for wrong in (torch.zeros(2, 63), torch.zeros(2, 64).half(), torch.zeros(64, 2).T, torch.zeros(0, 64)):
        with pytest.raises(Internal):
            product(wrong.to(DEVICE), weight, None, out)
    for wrong in (torch.zeros(3, 8), torch.zeros(2, 8).half(), torch.zeros(8, 2).T):
        with pytest.raises(Internal):
            product(rows, weight, None, wrong.to(DEVICE))
    for wrong in (torch.zeros(64, 8).T, torch.zeros(8, 64).half()):
        with pytest.raises(Internal):
            product(rows, wrong.to(DEVICE), None, out)
    with pytest.raises(Internal):
        product(rows, weight, torch.zeros(7, device=DEVICE), out)
    many, wide, found = (torch.zeros(*size, device=DEVICE) for size in ((200, 512), (4096, 512), (200, 4096)))
    with pytest.raises(Internal, match="the workspace is too small"):
        product(many, wide, None, found)


def test_a_router_whose_bias_is_exact_is_left_to_its_own_kernel(tmp_path):
    """Its matrix has the model's type and its bias is float32 (gpt-oss), which no product here supports."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"head_dim": 16, "num_local_experts": 4, "num_hidden_layers": 2, "vocab_size": 64}
    config = {**GPT_OSS_20B, **sizes, **more, "layer_types": ["sliding_attention", "full_attention"]}
    bench = Bench(smoke=not NATIVE, rows=tmp_path / "rows")
    model = RandomModel(bench, max_tokens=2, max_seqs=1, max_model_len=64, config=config).model
    assert torch.float32 in [bias.dtype for bias in model.layers[0].biases.values() if bias is not None]
    model.compile_products()
