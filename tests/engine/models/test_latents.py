"""Models with latents (MLA): shapes of published ones, long texts, 8-bit rows and quantized weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import open_checkpoint
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import precision_notes
from pillion.engine.models.config_parser import load_config, parse_config
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix
from pillion.kernels.torch.torch_attention import StepAttention
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.eight_bit_kv import quantize_rows
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.quantized import PRODUCERS, quantize_folder
from tests.support.torch_model import BackendDriver

# The config of DeepSeek V3.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18_432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10_000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129_280,
}
# Changes of Kimi K2's config to it.
K2 = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1, "topk_group": 1, "n_routed_experts": 384}


@pytest.mark.parametrize("change", [{}, K2])
def test_the_shapes_of_published_models(change):
    config = parse_config({**V3, **change})
    assert (config.num_kv_heads, config.kv_planes, config.head_dim, config.value_dim) == (1, 1, 576, 512)
    # 1 / sqrt(192), times the square of YaRN's 0.1 * ln(40) + 1.
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.36889**2, rel=1e-5)
    assert config.max_position_embeddings == 163_840
    assert config.moe.groups == change.get("n_group", 8)
    assert config.quantization.words == "fp8, 8-bit floats in blocks of 128 x 128"


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-4), ("bfloat16", 0.06)])
def test_long_texts_with_rows_as_wide_as_deepseeks(own_cache, tmp_path, dtype, near):
    """Contexts of several partitions split into items, in chunks and token by token beside other texts."""
    wide = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    shape = {**FAMILIES["youtu"], **wide, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_hidden_layers": 1}
    _, flags = make_model(tmp_path / "model", shape)
    text, other = tokens_of(1100, 2), tokens_of(60, 3)
    exact = BackendDriver(prepare(flags), num_slots=100)
    wanted = exact.run_all(exact.sequences.add()[0], text, [600])
    prepared = prepare(dataclasses.replace(flags, dtype=dtype))
    for block_size, checked in ((16, False), (32, True)):
        backend = cpu_backend(prepared, block_size, threads=2, checked=checked)
        driver = CpuDriver(prepared, block_size, num_slots=300, backend=backend)
        one, two, three = driver.sequences.add(3)
        found = driver.run_all(one, text, [1030, 1, 1, 40])
        assert float((found - wanted).abs().mean() / wanted.std()) < near
        driver.step((three, other), sample=[])
        assert torch.equal(driver.run_all(two, text, [900, 129, 1, 1, 1]), found)
        driver.check_among_others(driver.sequences.add()[0], text, [600, 400, 60, 1], found, [three])


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "flag", "kind"),
    [
        ("float32", "int8", "int8"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("float32", "fp8", "fp8_e4m3"), ("bfloat16", "int8", "int8"), ("bfloat16", "fp8", "fp8_e4m3"))
        ),
    ],
)
def test_rows_in_8_bits(own_cache, tmp_path, monkeypatch, dtype, flag, kind):
    """Rotated keys are far larger than latents and have their own scale. The reference is torch with rounded rows;
    values between two codes may round either way."""
    folder, flags = make_model(tmp_path / "model", FAMILIES["youtu"])
    enlarge_keys(folder)
    prepared, text = prepare(dataclasses.replace(flags, dtype=dtype)), tokens_of(100, 2)
    chunks, rank = [33, 1, 2, 20], load_config(prepared.folder).latents.kv_lora_rank
    exact = BackendDriver(prepare(flags))
    wanted, write = exact.run_all(exact.sequences.add()[0], text, chunks), StepAttention.write
    driver = CpuDriver(prepared, backend=cpu_backend(prepared, kv_cache_dtype=flag, checked=dtype == "float32"))
    found = driver.run_all(driver.sequences.add()[0], text, chunks)
    (other, again) = driver.sequences.add(2)
    driver.step((other, text[:20]), sample=[])
    driver.check_among_others(again, text, [1, 40], found, [other])
    plain = CpuDriver(prepared)
    unrounded = plain.run_all(plain.sequences.add()[0], text, chunks)

    def rounded(self, layer, rows):
        pairs = [quantize_rows(part.float(), kind) for part in rows.tensor_split([rank], -1)]
        write(self, layer, torch.cat([codes.float() * scales[..., None] for codes, scales in pairs], -1).to(rows.dtype))

    monkeypatch.setattr(StepAttention, "write", rounded)
    reference = BackendDriver(prepare(flags))
    rounds = reference.run_all(reference.sequences.add()[0], text, chunks)
    assert (found - rounds).abs().mean() < 0.2 * (rounds - wanted).abs().mean() + 2 * (unrounded - wanted).abs().mean()
    assert (found - wanted).abs().mean() < 0.1 * wanted.std()


def enlarge_keys(folder):
    """Make rotated keys 64 times as large, and rotated queries as much smaller."""
    config, tensors = load_config(folder), load_file(folder / "model.safetensors")
    latents = config.latents
    for name, tensor in tensors.items():
        if ".kv_a_proj_with_mqa." in name:
            tensor[latents.kv_lora_rank :] *= 64
        elif ".q_b_proj." in name:
            tensor.view(config.num_heads, latents.head_dim, -1)[:, latents.qk_nope_head_dim :] /= 64
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# Groups of 16 divide all inputs; the 48 outputs of latents and rotated key are not a multiple of 32.
FEW = {**FAMILIES["deepseek-v3"], "q_lora_rank": 32}
PLAIN_QUERIES = FAMILIES["deepseek-v2"]
# Formats in turn by model: DeepSeek's own, and those with reordered inputs or group offsets.
QUANTIZED = [
    ("deepseek-fp8", FEW),
    *(
        pytest.param(name, shape, marks=pytest.mark.long, id=f"{name}-{number}")
        for number, (name, shape) in enumerate(
            (
                ("deepseek-fp8-ue8m0", PLAIN_QUERIES),
                ("awq", FEW),
                ("gptq-act-order", {**FAMILIES["youtu"], "q_lora_rank": 32}),
                ("w4a16", PLAIN_QUERIES),
                ("nvfp4", FEW),
            )
        )
    ),
]


@needs_kernels
@pytest.mark.parametrize(("name", "shape"), QUANTIZED)
def test_quantized_checkpoints(own_cache, tmp_path, name, shape):
    """The dequantized values in transformers are the reference: projections, MLPs and experts stay quantized, and the
    latents' up-projections are widened."""
    plain, _ = make_model(tmp_path / "plain", shape)
    few, wide = quantize_folder(plain, tmp_path / "few", PRODUCERS[name](16))
    prepared, config = prepare(ModelFlags(model=str(few), dtype="float32")), load_config(few)
    down = "query_down" if config.latents.q_lora_rank else "query_up"
    with open_checkpoint(few, config) as checkpoint:
        for tensor in (f"{down}.weight", "query_up.weight", "latents.weight", "o.weight", "latent_up"):
            assert isinstance(checkpoint.load_matrix(f"layers.1.{tensor}", torch.float32), QuantizedMatrix), tensor
    model, text = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval(), tokens_of(40, 7)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    assert wanted.std() > 0.5
    for driver in (BackendDriver(prepared), CpuDriver(prepared)):
        (number,) = driver.sequences.add()
        torch.testing.assert_close(driver.run_all(number, text, [17, 1]), wanted, atol=1e-4, rtol=1e-4)


def test_rounding_of_latents_is_reported_as_unsupported(own_cache, tmp_path):
    """The latents' product is absorbed into queries, which are other rows."""
    plain, _ = make_model(tmp_path / "plain", FEW)
    few, _ = quantize_folder(plain, tmp_path / "few", PRODUCERS["w8a8"](16))
    (note,) = precision_notes(prepare(ModelFlags(model=str(few), dtype="float32")))
    assert "latents are not rounded to int8" in note
    own = prepare(ModelFlags(model=str(plain), dtype="float32", quantization="int8-dynamic"))
    assert not list(precision_notes(own))
