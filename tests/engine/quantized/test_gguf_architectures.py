"""GGUF files of small random models have transformers' logits. The changes of llama.cpp's converter are reimplemented
here from its published rules (``conversion/`` of llama.cpp); tensor names are those of gguf's own table."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import BOS, EOS, byte_prompt, save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.quantized.gguf_architectures import ARCHITECTURES
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix
from pillion.kernels.torch.quantized_matrix import plain as as_plain
from tests.engine.quantized.test_gguf import FILES
from tests.support.cpu_model import CpuDriver, needs_kernels
from tests.support.families import GPT_OSS, LATENTS, MULTIPLIERS, YARN
from tests.support.torch_model import BackendDriver, perturb_vectors

Tensors = Iterator[tuple[str, torch.Tensor]]
Config = dict[str, Any]
TOKENS = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a head's queries or keys in the order of LlamaModel.permute."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def llama(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith((f"{projection}.weight", f"{projection}.bias")):
            tensor = interleaved(tensor, config[heads])
    yield name, tensor


def unchanged(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def gemma(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def mixtral(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    for own, changed in llama(name, tensor, config):
        yield own.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward"), changed


def granite_moe(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if name.endswith("input_linear.weight"):
        shared = "shared_mlp" in name
        kind = "shexp" if shared else "exps"
        layer = name.split(".")[2]
        for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
            yield f"blk.{layer}.ffn_{part}_{kind}.weight", half
    else:
        yield from llama(name, tensor, config)


def lfm2(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    own = name.replace(".expert_bias", ".expert_bias.bias")
    yield own.removeprefix("model." if ".experts." in own else ""), tensor.squeeze(1) if "conv.conv" in name else tensor


def gpt_oss(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif name.endswith("_bias"):
        stem = name.removesuffix("_bias")
        if "gate_up" in name:
            yield stem.replace("gate_up", "gate") + ".bias", tensor[..., ::2]
            yield stem.replace("gate_up", "up") + ".bias", tensor[..., 1::2]
        else:
            yield f"{stem}.bias", tensor
    elif "gate_up_proj" in name:
        turned = tensor.transpose(-1, -2)
        yield name.replace("gate_up", "gate") + ".weight", turned[:, ::2]
        yield name.replace("gate_up", "up") + ".weight", turned[:, 1::2]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.transpose(-1, -2)
    else:
        yield name, tensor


def tiled(tensor: torch.Tensor, dim: int, config: Config, size: int) -> torch.Tensor:
    """Return value heads in the order of _LinearAttentionVReorderBase: the first of each key, then the second ones."""
    keys = config["linear_num_key_heads"]
    shape = list(tensor.shape)
    parted = tensor.reshape(*shape[:dim], keys, config["linear_num_value_heads"] // keys, size, *shape[dim + 1 :])
    return parted.transpose(dim, dim + 1).reshape(shape)


def delta_net(name: str, tensor: torch.Tensor) -> Tensors:
    """Apply Qwen3NextModel's changes except those to fused inputs."""
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    elif ".conv1d." in name:
        tensor = tensor.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
            yield name.replace("gate_up", part) + ".weight", half
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor


def qwen35(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    size, before = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if ".in_proj_qkv." in name or ".conv1d." in name:
        tensor = torch.cat((tensor[:before], tiled(tensor[before:], 0, config, size)))
    elif ".in_proj_z." in name:
        tensor = tiled(tensor, 0, config, size)
    elif ".in_proj_a." in name or ".in_proj_b." in name or name.endswith((".A_log", ".dt_bias")):
        tensor = tiled(tensor, 0, config, 1)
    elif ".linear_attn.out_proj." in name:
        tensor = tiled(tensor, 1, config, size)
    yield from delta_net(name, tensor)


def qwen3_next(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if "in_proj_qkvz" not in name:
        yield from delta_net(name, tensor)
        return
    keys, hidden, layer = config["linear_num_key_heads"], config["hidden_size"], name.split(".")[2]
    each = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    sizes = [config["linear_key_head_dim"]] * 2 + [each] * 2
    *mixed, gates = (part.reshape(-1, hidden) for part in tensor.view(keys, sum(sizes), hidden).split(sizes, 1))
    yield f"blk.{layer}.attn_qkv.weight", torch.cat(mixed)
    yield f"blk.{layer}.attn_gate.weight", gates


def drafting(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """A file with the layer for multi-token prediction."""
    if name == "model.norm.weight":
        yield f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight", tensor
    yield from qwen35(name, tensor, config)


def deepseek(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if name.endswith("kv_b_proj.weight"):
        parts = (config["qk_nope_head_dim"], config["v_head_dim"])
        keys, values = tensor.view(-1, sum(parts), tensor.shape[-1]).split(parts, 1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def gemma4(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    else:
        bare = name.endswith("layer_scalar") or (".experts." in name and not name.endswith(".weight"))
        yield f"{name}.weight" if bare else name, tensor


def base_keys(config: Config) -> Config:
    """Return the keys of TextModel.set_gguf_parameters."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    names = {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "top_k_experts": "expert_used_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "vocab_size": "vocab_size",
    }
    found = {ours: config[key] for key, ours in names.items() if config.get(key) is not None}
    if config.get("head_dim") is not None:
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if full.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(full["factor"]),
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
        for key in ("beta_fast", "beta_slow"):
            if full.get(key) is not None:
                found[f"rope.scaling.yarn_{key}"] = float(full[key])
    found["rope.freq_base"] = float(full["rope_theta"])
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    return found


def latent_keys(config: Config) -> Config:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
    }
    if config["q_lora_rank"] is not None:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("norm_topk_prob"):
        found["expert_weights_norm"] = True
    if (log := config["rope_parameters"].get("mscale_all_dim")) is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * log
    return found


def glm_keys(config: Config) -> Config:
    return {
        "rope.dimension_count": config["head_dim"] // 2,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": 2,
    }


def old_latent_keys(config: Config) -> Config:
    """Return the keys of files from before keys and values of latents were stored as one head."""
    new = latent_keys(config)
    own = {"attention.head_count_kv": config["num_attention_heads"]}
    for kind in ("key", "value"):
        own[f"attention.{kind}_length"] = new[f"attention.{kind}_length_mla"]
    return {key: value for key, value in new.items() if not key.endswith(("_mla", "gating_func"))} | own


def dense_latent_keys(config: Config) -> Config:
    """Return the keys of Youtu, which has no experts."""
    none = {"n_routed_experts": 0, "n_shared_experts": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
    widths = {
        "moe_intermediate_size": config["intermediate_size"],
        "first_k_dense_replace": config["num_hidden_layers"],
    }
    found = latent_keys({**config, **none, **widths})
    return {key: value for key, value in found.items() if key not in ("expert_count", "expert_gating_func")}


def drafting_keys(config: Config) -> Config:
    return hybrid_keys(config) | {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}


def hybrid_keys(config: Config) -> Config:
    width = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": width,
        "full_attention_interval": 4,
        "rope.dimension_count": config["head_dim"] // 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def gemma4_keys(config: Config) -> Config:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    wide, local = config["global_head_dim"], config["head_dim"]
    found = {
        "attention.sliding_window": config["sliding_window"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.sliding_window_pattern": slides,
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": local,
    }
    if config["final_logit_softcapping"]:
        found["final_logit_softcapping"] = config["final_logit_softcapping"]
    if config.get("moe_intermediate_size"):
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["use_double_wide_mlp"]:
        first, width = len(slides) - config["num_kv_shared_layers"], config["intermediate_size"]
        found["feed_forward_length"] = [width if layer < first else 2 * width for layer in range(len(slides))]
    if config["num_global_key_value_heads"] is not None:
        heads = config["num_global_key_value_heads"], config["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads[slide] for slide in slides]
    return found


def experts_keys(config: Config) -> Config:
    return {"expert_feed_forward_length": config["moe_intermediate_size"]}


def qwen_shared_keys(config: Config) -> Config:
    return experts_keys(config) | {
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


def lfm2_keys(config: Config) -> Config:
    heads = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in config["layer_types"]],
        "shortconv.l_cache": config["conv_L_cache"],
    }


def lfm2_moe_keys(config: Config) -> Config:
    dense = {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    return lfm2_keys(config) | experts_keys(config) | dense


def granite_keys(config: Config) -> Config:
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    keys = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    found = {name: float(config[key]) for name, key in zip(names, keys, strict=True)}
    if config.get("shared_intermediate_size"):
        found["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    return found | {"rope.dimension_count": 16}


def ministral_keys(config: Config) -> Config:
    rope = config["rope_parameters"]
    return {
        "rope.dimension_count": 16,
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }


def of_llama_keys(config: Config) -> Config:
    return {"rope.dimension_count": 16}


def gpt_oss_keys(config: Config) -> Config:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def minimax_keys(config: Config) -> Config:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": 8,
        "expert_gating_func": 2,
    }


Rules = tuple[str, dict[str, Any], Callable[..., Tensors], Callable[[Config], Config]]
HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "head_dim": 32,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DEEPSEEK = {
    **LATENTS,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "global_head_dim": 32,
    "final_logit_softcapping": 8.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
GLM = {key: value for key, value in DEEPSEEK.items() if key not in LATENTS} | {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
}
V2_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}
# A transformers model, options that its files can express, changes of the converter, and its metadata.
CASES: dict[str, Rules] = {
    "llama-mixtral": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        mixtral,
        of_llama_keys,
    ),
    "qwen2vl": ("qwen2", {}, unchanged, lambda config: {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": ("qwen3", {}, unchanged, lambda config: {"n_deepstack_layers": 3}),
    "qwen3vlmoe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}, unchanged, experts_keys),
    "glm4moe": ("glm4_moe", {**GLM, "use_qk_norm": True, "attention_bias": True}, deepseek, glm_keys),
    "glm4moe-plain": ("glm4_moe", {**GLM, "norm_topk_prob": False}, deepseek, glm_keys),
    "gemma": ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, gemma, lambda config: {}),
    "granite": ("granite", MULTIPLIERS, llama, granite_keys),
    "granitemoe": ("granitemoe", {**MULTIPLIERS, "num_local_experts": 5}, granite_moe, granite_keys),
    "granitemoe-shared": (
        "granitemoeshared",
        {**MULTIPLIERS, "num_local_experts": 5, "shared_intermediate_size": 80},
        granite_moe,
        granite_keys,
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "pad_token_id": 2}, llama, of_llama_keys),
    "arcee": ("arcee", {}, llama, of_llama_keys),
    "olmo2": ("olmo2", {}, unchanged, lambda config: {}),
    "seed_oss": ("seed_oss", {}, unchanged, lambda config: {}),
    "mistral3": ("llama", {"tie_word_embeddings": False}, llama, of_llama_keys),
    "mistral3-ministral": (
        "ministral3",
        {"rope_parameters": {**V2_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        llama,
        ministral_keys,
    ),
    "qwen2moe": (
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 96, "num_hidden_layers": 2},
        unchanged,
        qwen_shared_keys,
    ),
    "qwen35": ("qwen3_5_text", HYBRID, qwen35, hybrid_keys),
    "qwen35-drafting": ("qwen3_5_text", HYBRID, drafting, drafting_keys),
    "qwen35moe": (
        "qwen3_5_moe_text",
        {**HYBRID, **MOE, "shared_expert_intermediate_size": 96},
        qwen35,
        lambda config: hybrid_keys(config) | qwen_shared_keys(config),
    ),
    "qwen3next": (
        "qwen3_next",
        {**HYBRID, **MOE, "shared_expert_intermediate_size": 96},
        qwen3_next,
        lambda config: hybrid_keys(config) | qwen_shared_keys(config),
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        lfm2,
        lfm2_keys,
    ),
    "lfm2moe": (
        "lfm2_moe",
        {**MOE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
        lfm2,
        lfm2_moe_keys,
    ),
    "minimax-m2": (
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64, "rotary_dim": 8},
        unchanged,
        minimax_keys,
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **{key: value for key, value in GPT_OSS.items() if key != "model_type"},
            "intermediate_size": 96,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        gpt_oss,
        gpt_oss_keys,
    ),
    "deepseek2": (
        "deepseek_v2",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "rope_parameters": V2_YARN},
        deepseek,
        latent_keys,
    ),
    "deepseek2-lite": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        deepseek,
        latent_keys,
    ),
    "deepseek2-v3": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**V2_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        deepseek,
        latent_keys,
    ),
    "deepseek2-old": (
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        unchanged,
        old_latent_keys,
    ),
    "deepseek2-glm": ("glm4_moe_lite", {**DEEPSEEK, "mlp_layer_types": None}, deepseek, latent_keys),
    "deepseek2-youtu": ("youtu", LATENTS, deepseek, dense_latent_keys),
    "gemma4": ("gemma4_text", GEMMA4, gemma4, gemma4_keys),
    "gemma4-inputs": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": len(TOKENS),
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        gemma4,
        gemma4_keys,
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        gemma4,
        gemma4_keys,
    ),
}


def merged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack a layer's experts in one tensor per matrix."""
    found, experts = {}, dict[str, dict[int, torch.Tensor]]()
    for name, tensor in tensors.items():
        one = _EXPERT.fullmatch(name)
        if one is None:
            found[name] = tensor
        else:
            experts.setdefault(f"{one['before']}.{one['matrix']}.weight", {})[int(one["number"])] = tensor
    return found | {name: torch.stack([own[number] for number in sorted(own)]) for name, own in experts.items()}


def file_tensors(
    folder: pathlib.Path, architecture: str, change: Callable[..., Tensors], config: Config
) -> dict[str, np.ndarray]:
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    found = {}
    for name, tensor in merged(load_file(folder / "model.safetensors")).items():
        for own, changed in change(name, tensor, config):
            place = own if own.startswith("blk.") else names.get_name(own, (".weight", ".bias"))
            assert place is not None, own
            found[place] = changed.contiguous().numpy()
    return found


def write(path: pathlib.Path, architecture: str, tensors: dict[str, np.ndarray], keys: Config, kind: str = "") -> None:
    """Write a file whose matrices have the type ``kind``, or plain if empty."""
    writer = gguf.GGUFWriter(path, architecture)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        add = writer.add_array if isinstance(value, list) else adders[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in tensors.items():
        few = tensor.ndim < 2 or "gate_inp" in name or "conv" in name or "ssm_a" in name or tensor.shape[-1] % 32
        if kind and not few:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(tensor, number), raw_dtype=number)
        else:
            writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_plain(path: pathlib.Path, wide: pathlib.Path) -> None:
    """Rewrite a file with all tensors in float32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(wide, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture_of(case: str) -> str:
    return next(name for name in sorted(ARCHITECTURES, key=len, reverse=True) if case.startswith(name))


def test_every_architecture_that_is_read_is_tested() -> None:
    assert {*FILES, *map(architecture_of, CASES)} == {*ARCHITECTURES}


def prepared_from(case: str, folder: pathlib.Path, kind: str = "") -> tuple[Any, Any]:
    """Return transformers' model, and its prepared file."""
    architecture = architecture_of(case)
    model_type, options, change, keys = CASES[case]
    save_model(folder / "model", model_type=model_type, marks=("ab",), **options)
    perturb_vectors(folder / "model")
    # transformers writes sizes of some layers differently.
    config = {
        "num_global_key_value_heads": None,
        **json.loads((folder / "model" / "config.json").read_text()),
        **options,
    }
    tensors = file_tensors(folder / "model", architecture, change, config)
    if architecture == "gemma4":
        full = config["rope_parameters"]["full_attention"]
        half = config["global_head_dim"] // 2
        turning = int(half * full["partial_rotary_factor"])
        tensors["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (half - turning), np.float32)
    write(folder / "a.gguf", architecture, tensors, base_keys(config) | keys(config), kind)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    return model, prepare(ModelFlags(model=str(folder / "a.gguf"), dtype="float32", max_model_len=100))


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))


def check(model: Any, prepared: Any) -> None:
    text = torch.randint(0, len(TOKENS), (70,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = BackendDriver(prepared)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0]
    # The driver does not carry states from step to step.
    chunks = [33] if load_config(prepared.folder).linear is None else []
    found = driver.run_all(driver.sequences.add()[0], text, chunks)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_logits_of_each_architecture_match_its_model(case: str, tmp_path: pathlib.Path) -> None:
    check(*prepared_from(case, tmp_path))


@pytest.mark.parametrize(
    ("case", "kind"), [*((case, "Q8_0") for case in CASES), *((case, "MXFP4") for case in ("gpt-oss", "qwen35"))]
)
def test_quantized_matrices_stay_quantized_and_match_the_file(case: str, kind: str, tmp_path: pathlib.Path) -> None:
    """A file of the dequantized values has the same logits."""
    prepared = prepared_from(case, tmp_path, kind)[1]
    wide = tmp_path / "wide.gguf"
    write_plain(tmp_path / "a.gguf", wide)
    plain = prepare(ModelFlags(model=str(wide), dtype="float32", max_model_len=100))
    assert kind in prepared.weights
    config = load_config(prepared.folder)
    with (
        open_checkpoint(prepared.folder, config) as found,
        open_checkpoint(plain.folder, load_config(plain.folder)) as wanted,
    ):
        quantized = 0
        for key in decoder_tensors(config):
            matrix = found.load_matrix(key, torch.float32)
            quantized += isinstance(matrix, QuantizedMatrix)
            assert torch.equal(as_plain(matrix, torch.float32), wanted.load(key, torch.float32)), key
    assert quantized > len(decoder_tensors(config)) // 3


@needs_kernels
@pytest.mark.parametrize("case", ["gpt-oss", "qwen2moe"])
def test_mxfp4_files_run_on_the_kernels(case: str, tmp_path: pathlib.Path) -> None:
    prepared = prepared_from(case, tmp_path, "MXFP4")[1]
    text = byte_prompt(1, 30)
    found, wanted = (
        one.run_all(one.sequences.add()[0], text, []) for one in (CpuDriver(prepared), BackendDriver(prepared))
    )
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
