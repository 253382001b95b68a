"""Products in FP8 against the arithmetic of the checkpoint's producer: rows rounded to FP8 by their own sizes."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, gpu_backend, own_memory  # isort: skip  (before the kernels)

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.backends.gpu import gpu_loading
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.quantized.quantization_methods import parse_quantization
from pillion.kernels.gpu.products.fp8_product import BLOCK, SPLIT_K_MAX_ROWS, Fp8Gemm, Fp8Matrix, fp8_matrix, splits_of
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix
from tests.support.families import tokens_of
from tests.support.gpu import DEVICE, NATIVE, rounded
from tests.support.guarded import Guarded
from tests.support.quantized import fp8, quantize_folder

LARGEST = 448.0


def rounded_rows(rows: torch.Tensor, group: int) -> torch.Tensor:
    """The rounded rows, float32, with a scale per ``group`` inputs."""
    wide = rows.float()
    padded = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % group)).unflatten(-1, (-1, group))
    scales = padded.abs().amax(-1, keepdim=True) / LARGEST
    codes = (padded / scales.clamp(min=1e-30)).to(torch.float8_e4m3fn).float()
    return (codes * scales).flatten(-2)[..., : wide.shape[-1]]


def random_matrix(outputs: int, inputs: int, *, in_blocks: bool) -> QuantizedMatrix:
    codes = (torch.randn(outputs, inputs) * 60).to(torch.float8_e4m3fn).view(torch.uint8)
    if not in_blocks:
        return QuantizedMatrix("fp8_e4m3", codes, torch.rand(outputs, 1) + 0.5, inputs)
    blocks = torch.rand(-(-outputs // BLOCK), -(-inputs // BLOCK)) + 0.5
    return QuantizedMatrix("fp8_e4m3", codes, blocks.repeat_interleave(BLOCK, 0)[:outputs], BLOCK)


# A matrix that fits into one block is multiplied by the same kernels for every number of rows.
@pytest.mark.parametrize(
    ("in_blocks", "outputs", "inputs", "count"),
    [(True, 48, 80, 40), *((in_blocks, 160, 400, count) for in_blocks in (False, True) for count in (1, 40, 150))],
)
def test_fp8_products_match_the_reference(in_blocks, outputs, inputs, count):
    """Of few rows, whose programs share the inputs, and of many."""
    torch.manual_seed(0)
    matrix = random_matrix(outputs, inputs, in_blocks=in_blocks)
    found = fp8_matrix(matrix)
    assert found is not None
    on_device = Fp8Matrix(*(part.to(DEVICE) for part in found.parts.values()))
    assert found.in_blocks == (in_blocks and inputs > BLOCK)
    product = Fp8Gemm([on_device], 150, torch.bfloat16, DEVICE)
    bias = torch.randn(outputs).bfloat16() * 50
    product.compile(on_device, bias.to(DEVICE))
    rows = torch.randn(count, inputs).bfloat16()
    rows[0] = 0
    out = Guarded((count, outputs), torch.bfloat16)
    product(rows.to(DEVICE), on_device, bias.to(DEVICE), out.inside)
    assert out.margins_are_whole()
    taken = rounded_rows(rows, BLOCK if found.in_blocks else inputs).double()
    weights = matrix.dequantize(torch.float32).double()
    size = (taken.abs() @ weights.abs().T).amax()
    wanted = taken @ weights.T + bias.double()
    # Tensor cores sum with 14 bits.
    slack = rounded(torch.bfloat16, 2)["atol"] if not NATIVE else 2.0**-7
    torch.testing.assert_close(out.inside.cpu().double() / size, wanted / size, rtol=0, atol=slack)
    if count == 150:
        # Without rounded rows, the error is larger.
        far = (rows.double() @ weights.T + bias.double() - wanted).abs().max()
        assert far > 3 * (out.inside.cpu().double() - wanted).abs().mean()


def test_programs_share_the_inputs_of_few_rows():
    assert splits_of(160, 1000) > 1
    assert splits_of(4096 * 8, 4096) == 1
    assert SPLIT_K_MAX_ROWS < 150


@pytest.mark.parametrize(
    "change", [{"coding": "int8"}, {"offsets": torch.zeros(32, 1)}, {"group": 16, "scales": torch.rand(32, 4)}]
)
def test_matrices_without_fp8_products(change):
    parts = {"coding": "fp8_e4m3", "codes": torch.zeros(32, 64, dtype=torch.uint8), "scales": torch.ones(32, 1)}
    assert fp8_matrix(QuantizedMatrix(**{**parts, "group": 64, **change})) is None
    assert fp8_matrix(QuantizedMatrix(**parts, group=64)) is not None


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, False),
        ({"quant_method": "fbgemm_fp8"}, True),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, False),
    ],
)
def test_configs_whose_producers_round_rows_to_fp8(config, wanted):
    """On a GPU no note is logged that rows are not rounded."""
    found = parse_quantization("llama", {"quantization_config": config})
    assert found is not None
    assert found.fp8_rows == wanted
    notes = list(found.rounding_notes("cuda", latents=False))
    assert bool(notes) == ("fp8" in found.activations and not wanted)


DYNAMIC, STATIC = fp8((BLOCK, BLOCK)), fp8(None)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("producer", "flags", "able", "kind", "said"),
    [
        (DYNAMIC, {}, True, Fp8Matrix, "multiply in FP8, with inputs quantized as in the checkpoint's config"),
        (DYNAMIC, {}, False, PackedMatrix, "but they are not quantized on this GPU"),
        (DYNAMIC, {"batch_invariant": True}, True, PackedMatrix, "but they are not quantized with --batch-invariant"),
        (DYNAMIC, {"dtype": "float32"}, True, PackedMatrix, ""),
        (STATIC, {}, True, PackedMatrix, ""),
    ],
    ids=["in FP8", "device", "invariant", "float32", "static"],
)
def test_a_worker_loads_fp8_if_producer_and_device_use_it(
    producer, flags, able, kind, said, tmp_path, monkeypatch, caplog
):
    """Otherwise the same checkpoint is packed for products without rounded inputs, and a worker logs that."""
    caplog.set_level("INFO", "pillion.worker")
    monkeypatch.setattr(gpu_loading, "computes_in_fp8", lambda device: able)
    folder, _ = quantize_folder(save_model(tmp_path / "plain", num_hidden_layers=1), tmp_path, producer)
    worker = DecodeFlags(model=str(folder), max_num_batched_tokens=8, max_num_seqs=2, **{"dtype": "bfloat16", **flags})
    prepared, models = prepare(worker), []

    def make(model: GpuModel, *_: object, **__: object) -> SimpleNamespace:
        models.append(model)
        return SimpleNamespace(allocate_workspace=lambda: None)

    gpu_loading.load_gpu_backend(
        worker, gpu_loading.limits_of(worker, prepared), prepared, own_memory(DEVICE), lambda line: None, make=make
    )
    (model,) = models
    assert {type(model.weights.matrix(f"layers.0.{name}")) for name in ("qkv", "o", "gate_up", "down")} == {kind}
    found = [line for line in caplog.messages if "FP8" in line]
    assert [said in line for line in found] == [True] * bool(said)


@pytest.mark.long
@pytest.mark.usefixtures("own_cache")
def test_logits_match_the_producers_arithmetic(tmp_path):
    """A model in blocks: close to transformers with rounded inputs, and less close to it without."""
    plain = save_model(tmp_path / "plain", hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64)
    folder, wide = quantize_folder(plain, tmp_path, fp8((BLOCK, BLOCK)))
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    text = tokens_of(40, 2)

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([text])).logits[0]

    without = logits()
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (rounded_rows(given[0].bfloat16(), BLOCK),))
    wanted = logits()
    prepared = prepare(ModelFlags(model=str(folder), dtype="bfloat16"))
    driver = GpuDriver(prepared, num_slots=8, backend=gpu_backend(prepared, in_fp8=True))
    for name in ("qkv", "o", "gate_up", "down"):
        assert isinstance(driver.backend._model.weights.matrix(f"layers.0.{name}"), Fp8Matrix), name
    (number,) = driver.sequences.add()
    found = driver.step((number, text), sample=range(8)).cpu()
    error, beside = ((found - each[:8]).abs().mean() for each in (wanted, without))
    # A code changed by another rounding of bfloat16 is off by up to an eighth of its size.
    assert error < 0.9 * beside, (error, beside)
    driver.backend.close()
