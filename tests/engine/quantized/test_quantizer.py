"""The quantizer: no group is worse than round-to-nearest, and its output can be served."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.model_files import weight_files
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.quantized.quantizer import CODE_RANGES, choose_group_size, quantize_matrix
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix
from tests.support.examples import examples
from tests.support.torch_model import BackendDriver


def rounded_to_nearest(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Round groups [G, group] to the steps of a range that covers each, in float64."""
    wide, levels = weight.double(), CODE_RANGES[kind]
    if levels.offsets:
        low, high = wide.aminmax(dim=1, keepdim=True)
        scale = ((high - low) / levels.highest).clamp_min(1e-30)
        return (((wide - low) / scale).round().clamp(0, levels.highest)) * scale + low
    scale = (wide.abs().amax(1, keepdim=True) / levels.highest).clamp_min(1e-30)
    return (wide / scale).round().clamp(levels.lowest, levels.highest) * scale


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Return groups of normal numbers, with outliers, shifts, many zeros, or constants; of any size."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    groups = torch.randn(4, 32, generator=generator)
    kind = draw(st.sampled_from(["normal", "outlier", "shifted", "sparse", "alike"]))
    if kind == "outlier":
        groups[:, 3] *= 30
    elif kind == "shifted":
        groups += 5
    elif kind == "sparse":
        groups *= torch.rand(4, 32, generator=generator) < 0.1
    elif kind == "alike":
        groups[:] = groups[:, :1]
    return groups * 10.0 ** draw(st.integers(-6, 3))


@settings(max_examples=examples(60))
@given(weight=matrices(), kind=st.sampled_from(list(CODE_RANGES)))
def test_no_group_is_worse_than_rounded_to_nearest(weight, kind):
    found = quantize_matrix(weight, kind, 32)
    error = (found.dequantize(torch.float32).double() - weight.double()).square().sum(1)
    plain = (rounded_to_nearest(weight, kind) - weight.double()).square().sum(1)
    # float16 rounds scales and offsets by 2^-12 of them, or by 2^-25, which changes a matrix little.
    rounding = 32 * (weight.double().abs().amax(1) * 2**-10 + CODE_RANGES[kind].highest * 2**-24).square()
    assert bool((error <= plain * (1 + 1e-4) + rounding).all())
    rounding = 32 * (weight.double().abs().amax(1) * 2**-22).square()
    assert float(error.sum()) <= float((plain + rounding).sum()) * 1.011


def test_scales_are_float16_if_the_error_stays_small():
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    for kind in CODE_RANGES:
        found = quantize_matrix(weight, kind, 32)
        for constants in (found.scales, found.offsets):
            assert constants is None or torch.equal(constants.half().float(), constants)
    # Steps of a millionth lie between two float16 numbers, and so do offsets slightly above 5.
    for hard in (weight * 1e-6, weight * 1e-3 + 5):
        found = quantize_matrix(hard, "int4", 32)
        assert not torch.equal(found.scales.half().float(), found.scales)


def test_the_worse_result_is_freed():
    found = quantize_matrix(torch.randn(8, 64), "int4", 32)
    for tensor in (found.codes, found.scales, found.offsets):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_the_search_beats_rounding_to_nearest():
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    error = (quantize_matrix(weight, "int4", 32).dequantize(torch.float32) - weight).square().sum()
    plain = (rounded_to_nearest(weight.view(-1, 32), "int4") - weight.view(-1, 32).double()).square().sum()
    assert float(error) < 0.88 * float(plain)


@pytest.mark.parametrize(("columns", "wanted", "group"), [(64, 32, 32), (576, 128, 64), (48, 32, 16), (40, 32, 40)])
def test_groups_divide_the_inputs(columns, wanted, group):
    assert choose_group_size(columns, wanted) == group
    assert choose_group_size(columns, 0) == columns


def quantized(folder, kind: str, **more):
    return prepare(ModelFlags(model=str(folder), dtype="float32", quantization=kind, **more))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    return save_model(tmp_path / "model")


@pytest.mark.parametrize(
    "settings_of",
    [
        {},
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "stacked_experts": True},
        {"model_type": "gpt_oss", "num_local_experts": 4, "tie_word_embeddings": False},
        {"model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 2},
        {"model_type": "gemma2", "query_pre_attn_scalar": 16},
    ],
    ids=lambda settings_of: settings_of.get("model_type", "llama"),
)
@pytest.mark.parametrize(("kind", "bound"), [("int8", 2e-4), ("int8-dynamic", 2e-4), ("int4", 1e-2)])
def test_linear_layers_are_quantized_and_close_to_the_plain_ones(tmp_path, monkeypatch, settings_of, kind, bound):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model", **settings_of)
    plain, few = prepare(ModelFlags(model=str(folder), dtype="float32")), quantized(folder, kind)
    assert few.fingerprint != plain.fingerprint
    config = load_config(few.folder)
    with (
        open_checkpoint(plain.folder, load_config(plain.folder)) as exact,
        open_checkpoint(few.folder, config) as found,
    ):
        for key, checkpoint_names in {
            **decoder_tensors(config),
            "lm_head": decoder_tensors(config)["embedding"],
        }.items():
            wanted = exact.load(key if exact.has(key) else "embedding", torch.float32)
            matrix = found.load_matrix(key, torch.float32)
            if len(checkpoint_names[0][0].shape) > 1 and key != "embedding" and not key.endswith(("router", ".bias")):
                assert isinstance(matrix, QuantizedMatrix)
                assert (matrix.coding == "int8") == (kind != "int4" or key == "lm_head")
                assert matrix.row_codes == ("dynamic" if kind == "int8-dynamic" else "")
                matrix = matrix.dequantize(torch.float32)
                assert float((matrix - wanted).square().sum()) < bound * float(wanted.square().sum())
            else:
                assert isinstance(matrix, torch.Tensor)
                assert torch.equal(matrix, wanted)
    assert len(BackendDriver(few).greedy([5, 6, 7], 4)) == 4


def test_a_quantized_model_is_remade_only_if_the_source_changes(folder, monkeypatch):
    lines: list[str] = []
    flags = ModelFlags(model=str(folder), dtype="float32", quantization="int4")
    first = prepare(flags, lines.append)
    assert any(line.startswith("quantizing weights to int4") for line in lines)
    lines.clear()
    assert prepare(flags, lines.append) == first
    assert not lines
    assert quantized(folder, "int4", quantization_group_size="128").fingerprint != first.fingerprint
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert prepare(flags).fingerprint != first.fingerprint


def test_templates_and_end_tokens_follow_the_source_model(folder):
    """A chat template or end tokens may change without the weights."""
    first = quantized(folder, "int4")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    again = quantized(folder, "int4")
    assert again.folder != first.folder
    assert 7 in again.eos_token_ids
    assert (again.folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (again.folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert again.fingerprint == first.fingerprint, "their KV is the same"


def test_unquantizable_models_are_refused_by_name(folder):
    few = quantized(folder, "int8")
    with pytest.raises(
        ConfigError,
        match=r"--quantization int4 is for plain weights.*quantized already \(int8, a scale for each output\)",
    ):
        quantized(few.folder, "int4")
    with pytest.raises(ConfigError, match="--quantization int4 needs weights, which --load-format dummy"):
        quantized(folder, "int4", load_format="dummy")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.layers.1.self_attn.o_proj.weight contains NaN"):
        quantized(folder, "int4")


def test_four_bits_take_a_third_of_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model", hidden_size=256, intermediate_size=1024, head_dim=64)
    sizes = [
        sum(
            tensor.nbytes
            for path in weight_files(quantized(folder, "int4", **group).folder)
            for name, tensor in load_file(path).items()
            if "mlp" in name
        )
        for group in ({}, {"quantization_group_size": "128"})
    ]
    weights = 2 * 3 * 256 * 1024
    assert [size / weights for size in sizes] == [0.75, 0.5625]
    assert quantized(folder, "int4").weights == "int4 in groups of 32"
    assert quantized(folder, "none").weights == "float32"
