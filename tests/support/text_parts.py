"""Random small multimodal models, whose text models can be served."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.support.families import FAMILIES
from tests.support.hybrids import ATTENTION, DELTA, HYBRIDS, LINEAR, MROPE

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
WATCHING = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
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
    "lfm3_vl": (HYBRIDS["lfm3"], {**WATCHING, "layer_types": ["conv"]}),
    "exaone4_5": ({"model_type": "exaone4"}, {**BLOCKS, "fullatt_block_indexes": [0]}),
    "lighton_ocr": ({"model_type": "qwen3"}, {**EYES, "model_type": "pixtral", "head_dim": 16}),
    "ovis2": ({"model_type": "qwen2"}, {**EYES, "vocab_size": 64}),
    "qwen3_vl_moe": (
        {"model_type": "qwen3_vl_moe_text", **MIXED, "rope_parameters": PLACES},
        {**BLOCKS, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "deepseek_vl": ({"model_type": "llama"}, {**EYES, "model_type": "siglip_vision_model"}),
    "deepseek_vl_hybrid": ({"model_type": "llama"}, {**EYES, "model_type": "siglip_vision_model"}),
    "fast_vlm": ({"model_type": "qwen2"}, {**EYES, "model_type": "siglip_vision_model"}),
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
    "gemma3": (FAMILIES["gemma3"], {**EYES, "model_type": "siglip_vision_model"}),
    "gemma4": (FAMILIES["gemma4"], WATCHING),
    "gemma4_unified": (
        FAMILIES["gemma4-unified"],
        {**WATCHING, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
    ),
    "glm46v": ({"model_type": "glm4v_moe_text", **EXPERTS, "rope_parameters": PART}, {**BLOCKS, "image_size": 28}),
    "kimi_k25": (FAMILIES["deepseek-v3"], EYES),
    "llama4": (
        {**FAMILIES["llama4"], "model_type": "llama4_text"},
        {**EYES, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "mistral3": ({"model_type": "mistral"}, {**EYES, "model_type": "pixtral", "head_dim": 16}),
    "qwen3_5": (DELTA_NETS, {**BLOCKS, "num_position_embeddings": 16}),
    "qwen3_5_moe": (HYBRIDS["qwen3-5-moe"], {**BLOCKS, "num_position_embeddings": 16}),
    "vipllava": ({"model_type": "llama"}, {**EYES, "model_type": "clip_vision_model"}),
}
# Further vision parts, and one that generates images. Where saving takes seconds, the published vision size is the
# default.
BESIDE: dict[str, dict[str, Any]] = {
    "ovis2": {"hidden_size": 64},
    "cohere2_vision": {"alignment_intermediate_size": 64},
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


def whole_model(name: str, **of_text: Any) -> Any:
    """Return a random multimodal model, with these keys of its text model's config."""
    text, eyes = WHOLE[name]
    text = {**text, **of_text}
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
    return model


def as_published(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors in the form of published checkpoints, where transformers 5 saves them differently."""
    outer = "language_model.model."
    match name:
        case "qwen3_vl_moe":
            return {part: each.mT.contiguous() if ".experts." in part else each for part, each in tensors.items()}
        case "qianfan_ocr":
            return {part.replace(f"{outer}encoder.", outer): each for part, each in tensors.items()}
        case "kimi_k25":
            return {part.replace(f"{outer}blocks.", f"{outer}layers."): each for part, each in tensors.items()}
    return tensors
