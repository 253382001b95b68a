"""The text models within models of text and images, beside transformers, which makes and saves the whole models."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.families import FAMILIES, TEXT_AS, TEXT_OF
from pillion.errors import ConfigError
from testbed.tiny_model import save_model
from tests.support.damaged_weights import CHANGES
from tests.support.families import tokens_of
from tests.support.hybrids import ATTENTION, DELTA, HYBRIDS, LINEAR, MROPE, StateDriver
from tests.support.torch_model import BackendDriver

TEXT = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLACES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
PART = {**PLACES, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
BLOCKS = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SEGMENTS = {"output_channels": 16, "mlp_dim": 32, "num_pos_feats": 16, "global_attn_indexes": [0]}
RADIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DELTA_NETS = {
    "model_type": "qwen3_5_text",
    **DELTA,
    "layer_types": [LINEAR, ATTENTION],
    "rope_parameters": MROPE,
}
STATE_SPACES = HYBRIDS["nemotron-h"]
CONVOLVED = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
# Each model's text model, and what sees.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {"model_type": "qwen2_vl_text", "rope_parameters": PLACES},
        {"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": 64},
    ),
    "qwen2_5_vl": (
        {"model_type": "qwen2_5_vl_text", "rope_parameters": PLACES},
        {**BLOCKS, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl_text", "rope_parameters": PLACES},
        {**BLOCKS, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "glm4v": ({"model_type": "glm4v_text", "rope_parameters": PART}, {**BLOCKS, "image_size": 28}),
    "glm4v_moe": ({"model_type": "glm4v_moe_text", **EXPERTS, "rope_parameters": PART}, {**BLOCKS, "image_size": 28}),
    "aya_vision": ({"model_type": "cohere2"}, {**EYES, "model_type": "siglip_vision_model"}),
    "cohere2_vision": ({"model_type": "cohere2"}, {**EYES, "model_type": "siglip_vision_model"}),
    "internvl": ({"model_type": "qwen2"}, {**EYES, "image_size": [28, 28], "patch_size": [14, 14]}),
    "llava": ({"model_type": "mistral"}, {**EYES, "model_type": "pixtral", "head_dim": 16}),
    "llava_next": ({"model_type": "llama"}, {**EYES, "model_type": "clip_vision_model"}),
    "llava_onevision": ({"model_type": "qwen2"}, {**EYES, "model_type": "siglip_vision_model"}),
    "idefics3": ({"model_type": "llama"}, EYES),
    "smolvlm": ({"model_type": "llama"}, EYES),
    "lfm2_vl": ({"model_type": "lfm2", **CONVOLVED}, {**EYES, "model_type": "siglip2_vision_model"}),
    "exaone4_5": ({"model_type": "exaone4"}, {**BLOCKS, "fullatt_block_indexes": [0]}),
    "lighton_ocr": ({"model_type": "qwen3"}, {**EYES, "model_type": "pixtral", "head_dim": 16}),
    "ovis2": ({"model_type": "qwen2"}, EYES),
    "qwen3_vl_moe": (
        {"model_type": "qwen3_vl_moe_text", **MIXED, "rope_parameters": PLACES},
        {**BLOCKS, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "deepseek_vl": ({"model_type": "llama"}, {**EYES, "model_type": "siglip_vision_model"}),
    "deepseek_vl_hybrid": ({"model_type": "llama"}, {**EYES, "model_type": "siglip_vision_model"}),
    "fast_vlm": ({"model_type": "qwen2"}, {**EYES, "model_type": "siglip_vision_model"}),
    "fuyu": ({"model_type": "persimmon", "hidden_act": "relu2"}, {}),
    "glmga": ({"model_type": "glm4v_text", "rope_parameters": PART}, {**BLOCKS, "image_size": 28}),
    "got_ocr2": ({"model_type": "qwen2"}, {**EYES, **SEGMENTS}),
    "hyperclovax_vision_v2": ({"model_type": "hyperclovax"}, {**BLOCKS, "fullatt_block_indexes": [0]}),
    "idefics2": ({"model_type": "mistral"}, EYES),
    "janus": ({"model_type": "llama"}, {**EYES, "depth": 1, "projection_dim": 64}),
    "llava_next_video": ({"model_type": "llama"}, {**EYES, "model_type": "clip_vision_model"}),
    "minicpm_ocr": (DELTA_NETS, {**EYES, "insert_layer_id": 0}),
    "minicpmv4_6": (DELTA_NETS, {**EYES, "insert_layer_id": 0}),
    "minicpmv4_7": (DELTA_NETS, {**EYES, "insert_layer_id": 0}),
    "nemotron_h_omni": (STATE_SPACES, {**RADIO, "model_type": "radio", "video_temporal_patch_size": 2}),
    "qianfan_ocr": ({"model_type": "qwen3"}, {**EYES, "image_size": [28, 28], "patch_size": [14, 14]}),
    "video_llama_3": ({"model_type": "qwen2"}, EYES),
    "video_llava": ({"model_type": "llama"}, {**EYES, "model_type": "clip_vision_model"}),
    "vipllava": ({"model_type": "llama"}, {**EYES, "model_type": "clip_vision_model"}),
}
# One of them has more that sees, and one draws.
BESIDE: dict[str, dict[str, Any]] = {
    "nemotron_h_omni": {"vision_hidden_size": 32, "projector_hidden_size": 32},
    "deepseek_vl_hybrid": {"high_res_vision_config": {**EYES, **SEGMENTS, "model_type": "sam_vision_model"}},
    "janus": {
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_embeddings": 16,
            "latent_channels": 32,
            "num_patches": 4,
            "image_token_embed_dim": 64,
            "projection_dim": 64,
        }
    },
}
# These are near others.
LONG = set(WHOLE) - {"qwen2_vl", "glm4v", "internvl", "idefics3"}


def saved(folder, name: str) -> torch.nn.Module:
    """Saves a random model with a tokenizer; returns it."""
    text, eyes = WHOLE[name]
    torch.manual_seed(1)
    ids = {"image_token_id": 5} if name not in ("llava", "llava_next", "llava_onevision") else {"image_token_index": 5}
    text = {key: value for key, value in {**TEXT, **text}.items() if key not in ("without", *text.get("without", ()))}
    seen = {"vision_config": eyes} if eyes else {}
    config = CONFIG_MAPPING[name](text_config=text, **seen, **BESIDE.get(name, {}), **ids)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for part, vector in model.named_parameters():
            if vector.dim() == 1:
                vector.add_(0.3 * torch.randn(vector.shape))
            elif "embed_tokens" in part:
                vector.normal_()
    save_model(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    # transformers writes these two otherwise than the published checkpoints that it reads.
    if name in ("qianfan_ocr", "qwen3_vl_moe"):
        published = {}
        for part, tensor in load_file(folder / "model.safetensors").items():
            turned = tensor.mT.contiguous() if ".experts." in part else tensor
            published[part.replace("language_model.model.encoder.", "language_model.model.")] = turned
        save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in WHOLE])
def test_a_text_has_the_logits_of_the_whole_model(name, tmp_path, own_cache):
    model, text = saved(tmp_path, name), tokens_of(40, 2)
    text = [token for token in text if token > 8]
    with torch.inference_mode():
        # In transformers the whole models of Cohere's do without the factor of their text models.
        factor = getattr(model.config.text_config, "logit_scale", 1.0)
        wanted = model(torch.tensor([text])).logits[0].float() * factor
    carries = parse_config(json.loads((tmp_path / "config.json").read_text())).linear is not None
    kind = StateDriver if carries and name != "lfm2_vl" else BackendDriver
    driver = kind(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))
    torch.testing.assert_close(driver.run_all(driver.sequences.add()[0], text, [17]), wanted, atol=1e-3, rtol=1e-4)


def test_an_old_config_of_qwen_2_vl_has_the_text_model_s_keys_beside_the_others(tmp_path, own_cache):
    model, text = saved(tmp_path, "qwen2_vl"), tokens_of(40, 3)
    text = [token for token in text if token > 8]
    raw = json.loads((tmp_path / "config.json").read_text())
    flat = {**raw.pop("text_config"), **raw, "vision_token_id": 7}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    driver = BackendDriver(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))
    torch.testing.assert_close(driver.run_all(driver.sequences.add()[0], text, [17]), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"qwen2: config\.json has residual_scaling = 0.5"):
        parse_config({**flat, "residual_scaling": 0.5})


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_a_rotary_base_that_a_text_config_leaves_out_is_that_of_transformers(name):
    raw = CONFIG_MAPPING[name]().to_dict()
    wanted = raw["text_config"].pop("rope_parameters")["rope_theta"]
    assert {rope.theta for rope in parse_config(raw).ropes} == {wanted}


def test_what_is_not_known_is_refused_by_its_name(tmp_path, own_cache):
    saved(tmp_path, "idefics3")
    tensors = load_file(tmp_path / "model.safetensors")
    other = {"model.text_model.layers.1.self_attn.k_sum.weight": torch.ones(3)}
    save_file({**tensors, **other}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.safetensors holds model\.layers\.1\.self_attn\.k_sum\.weight"):
        BackendDriver(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"idefics3: .*text_config of model_type = 'mamba'"):
        parse_config({**raw, "text_config": {**raw["text_config"], "model_type": "mamba"}})
    with pytest.raises(ConfigError, match=r"idefics3: config\.json has pooled = 3"):
        parse_config({**raw, "pooled": 3})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "idefics3" else pytest.mark.long) for name in WHOLE]
)
def test_damaged_weights_are_named_by_their_file_and_tensor(name, tmp_path, own_cache):
    saved(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    prefixes = ("model.language_model.", "language_model.", "model.text_model.", "model.layers.")
    part = max(part for part in tensors if part.startswith(prefixes) and re.search(r"layers\.1\..*weight", part))
    for change, (alter, words) in CHANGES.items():
        damaged = {**tensors, part: alter(tensors[part].clone())}
        save_file({key: one for key, one in damaged.items() if one is not None}, file, metadata={"format": "pt"})
        # What is missing has the name that it would have without what sees.
        shown = ".*" + re.escape(part[part.index("layers.") :]) if change == "missing" else re.escape(part)
        expected = words.format(folder=re.escape(str(tmp_path)), file=re.escape(str(file)), name=shown)
        with pytest.raises(ConfigError, match=expected):
            BackendDriver(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))


def test_every_text_model_that_may_stand_within_another_is_of_a_family():
    assert set(WHOLE) < set(TEXT_OF)
    kinds = {kind for one in TEXT_OF.values() for kind in one}
    assert set(TEXT_AS) < kinds
    assert {TEXT_AS[kind][0] if kind in TEXT_AS else kind for kind in kinds} <= set(FAMILIES)
