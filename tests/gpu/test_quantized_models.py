"""Models quantized on a GPU: their weights' plan and memory, and their logits against transformers'."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, own_memory  # isort: skip  (before the kernels)

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.backends.gpu.gpu_weights import WeightMemory, load_gpu_weights
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.checkpoints.weights import load_weights
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_shard import whole_model
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from tests.gpu.test_backend import TOLERANCE
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.gpu import DEVICE
from tests.support.quantized import Producer, awq, experts_in_mxfp4, fp8, gptq, nf4, own, quantize_folder

# Coding and group of the tensors by the ends of their names; gate and up differ, so both become int8, and q, k and v
# have one kind.
CHOSEN = {
    "q_proj.weight": ("int4", 32),
    "k_proj.weight": ("int4", 32),
    "v_proj.weight": ("int4", 32),
    "o_proj.weight": ("uint4", 16),
    "gate_proj.weight": ("int8", 16),
    "up_proj.weight": ("int4", 64),
    "down_proj.weight": ("uint4", 64),
    "embed_tokens.weight": ("int8", 64),
    "w1.weight": ("int4", 32),
    "w2.weight": ("int8", 48),
    "w3.weight": ("int4", 32),
}
MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_hidden_layers": 1, "intermediate_size": 96},
}
PACKED = {
    "llama": {"qkv": "int4", "o": "signed4", "gate_up": "signed8", "down": "uint4"},
    "mixtral": {"qkv": "int4", "o": "signed4", "experts.gate_up": "int4", "experts.down": "signed8"},
}


@pytest.fixture(params=MODELS)
def made(request, tmp_path, monkeypatch):
    """The model's name, its folder quantized, and a plain folder with the same numbers."""
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    plain = save_model(tmp_path / "plain", **MODELS[request.param])
    return request.param, *quantize_folder(plain, tmp_path, own(CHOSEN), also=("embed_tokens",))


def load(folder, memory, dtype="float32"):
    config = load_config(folder)
    shard = whole_model(config)
    return load_gpu_weights(folder, config, fingerprint="f" * 64, dtype=dtype, shard=shard, memory=memory)


def test_quantized_matrices_are_not_dequantized(made):
    name, folder, _ = made
    weights = load(folder, own_memory(DEVICE), "bfloat16")
    for part, coding in {f"layers.0.{part}": coding for part, coding in PACKED[name].items()}.items():
        found = weights.matrix(part)
        assert isinstance(found, PackedMatrix), part
        assert found.kind.coding == coding, part
    assert isinstance(weights.head, PackedMatrix)
    # The table of the tied embedding is plain.
    assert weights["embedding"].dtype == torch.bfloat16
    assert isinstance(weights.matrix("embedding"), torch.Tensor)
    biases = load_weights(folder, load_config(folder), torch.bfloat16).layers[0]["qkv"].bias
    assert biases is None or torch.equal(weights["layers.0.qkv.bias"].cpu(), biases)


def test_a_second_worker_reads_no_weights(made):
    """The packed file's header is the plan; the checkpoint itself is not opened again."""
    _, folder, _ = made
    asked, regions = [], {}

    def memory(key, size):
        asked.append((key, size))
        first = key not in regions
        regions.setdefault(key, torch.zeros(size, dtype=torch.uint8, device=DEVICE))
        return WeightMemory(regions[key], first, lambda: asked.append("filled"))

    one = load(folder, memory)
    (folder / "model.safetensors").unlink()
    two = load(folder, memory)
    assert asked == [asked[0], "filled", asked[0]]
    assert {name: each.data_ptr() for name, each in one.items()} == {
        name: each.data_ptr() for name, each in two.items()
    }
    assert one.plan == two.plan


@pytest.mark.long
def test_logits_match_the_dequantized_model(made):
    _, folder, plain = made
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    text, other = tokens_of(40, 2), tokens_of(21, 3)
    with torch.inference_mode():
        wanted, beside = (model(torch.tensor([tokens])).logits[0].float() for tokens in (text, other))
    driver = GpuDriver(prepare(ModelFlags(model=str(folder), dtype="float32")))
    one, two = driver.sequences.add(2)
    driver.step((one, other[:20]), sample=())
    # More rows than a step samples, and few of them.
    every = driver.step((one, other[20:]), (two, text[:39]), sample=range(40))
    last = driver.step((two, text[39:]))
    for found, expected in ((every, torch.cat((beside[20:], wanted[:39]))), (last, wanted[39:])):
        torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)


# A format's file, and the kind of its matrices.
FORMATS: dict[str, tuple[Producer, str]] = {
    "awq": (awq(), "uint4"),
    "gptq in an order": (gptq(act_order=True), "int4"),
    "fp8 in blocks": (fp8((32, 32)), "fp8_e4m3"),
    "nf4": (nf4(), "nf4"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_checkpoints(name, tmp_path, monkeypatch):
    """One layer per format whose codings, offsets or orders differ; engine/checkpoints tests read all formats."""
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    producer, coding = FORMATS[name]
    plain = save_model(tmp_path / "plain", num_hidden_layers=1)
    folder, wide = quantize_folder(plain, tmp_path, producer)
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    text = tokens_of(20, 2)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    driver = GpuDriver(prepare(ModelFlags(model=str(folder), dtype="float32")))
    matrix = driver.backend._model.weights.matrix("layers.0.down")
    assert isinstance(matrix, PackedMatrix)
    assert matrix.kind.coding == coding
    assert (matrix.order is not None) == (name == "gptq in an order")
    (number,) = driver.sequences.add()
    found = driver.step((number, text), sample=range(20)).cpu()
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.long
def test_experts_in_mxfp4(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    wide, _ = make_model(tmp_path / "wide", {**FAMILIES["gpt-oss"], "intermediate_size": 96, "num_hidden_layers": 1})
    experts_in_mxfp4(wide, tmp_path / "few")
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    text = tokens_of(20, 2)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    driver = GpuDriver(prepare(ModelFlags(model=str(tmp_path / "few"), dtype="float32")))
    assert driver.backend._model.weights.matrix("layers.0.experts.down").kind.coding == "fp4_e2m1"
    found = driver.step((driver.sequences.add()[0], text), sample=range(20)).cpu()
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_workers_compile_all_products_before_they_serve(made, monkeypatch):
    """Every kernel runs once per tile of rows when the workspace is allocated."""
    _, folder, _ = made
    driver = GpuDriver(prepare(ModelFlags(model=str(folder), dtype="float32")))
    compiled = []
    model = driver.backend._model
    monkeypatch.setattr(model, "_quantized", type("Seen", (), {"compile": lambda self, *use: compiled.append(use)})())
    model.compile_products()
    kinds = {matrix.kind for matrix, _, _ in compiled}
    # Products of experts are compiled with their mixture.
    names = [name for name in model.weights.plan.kinds if ".experts." not in name]
    assert kinds == {each.kind for each in map(model.weights.matrix, names)}
    assert {dtype for matrix, _, dtype in compiled if matrix.kind == model.weights.head.kind} == {torch.float32}
