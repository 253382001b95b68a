"""Random small models of each family, with every option that a config can enable."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import torch

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.models.layer_operations import Experts, LayerTensor, Role
from tests.support.torch_model import perturb_vectors

PROMPT_TOKENS = 70

THETA = {"rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    **THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", **THETA, "factor": 4.0, "original_max_position_embeddings": 32}
NTK = {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", **THETA, "factor": 4.0}}
SHORT, LONG = [1.0, 1.0, 1.0, 1.1, 1.2, 1.3], [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]
PHI3 = {"model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 2}
PHI3_SCALED = {
    **PHI3,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
    "rope_parameters": {"rope_type": "longrope", **THETA, "short_factor": SHORT, "long_factor": LONG},
}
FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0]
ONE_SET = {"rope_type": "longrope", **THETA, "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 3}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 8.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
GEMMA4_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MINISTRAL = {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
WINDOWS = {"sliding_window": 24, "num_hidden_layers": 5}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "tie_word_embeddings": False,
}
SHARED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}

GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
LLAMA4 = {
    "num_local_experts": 5,
    "intermediate_size": 48,
    "intermediate_size_mlp": 160,
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "pad_token_id": 2,
}

LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-3,
}
V3 = {**LATENTS, "model_type": "deepseek_v3", **SHARED, **GROUPS}
SPARSE = {"index_topk": 20, "index_n_heads": 12, "index_head_dim": 32, "mlp_layer_types": None}

# ``serve``: --max-model-len, if the rotary embedding depends on it; otherwise such models are served at their original
# length.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {},
    "llama-mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama-mqa-biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama-odd-hidden": {"hidden_size": 40},
    "llama-wide-heads": {"head_dim": 32, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 100_000.0}},
    "llama-llama3-rope": {"rope_parameters": LLAMA3},
    "llama-linear-rope": {"rope_parameters": {"rope_type": "linear", **THETA, "factor": 2.0}},
    "llama-dynamic-rope-within": {**NTK, "max_position_embeddings": 100},
    "llama-dynamic-rope-beyond": {**NTK, "serve": PROMPT_TOKENS},
    "llama-yarn-rope": {"rope_parameters": YARN},
    "llama-longrope": {"rope_parameters": {**ONE_SET, "original_max_position_embeddings": 1024}},
    "smollm3-nope": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 2},
    "smollm3-window": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 20,
        "pad_token_id": 2,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 24, "tie_word_embeddings": False},
    "mistral-layer-types": {**MINISTRAL, "model_type": "mistral", "tie_word_embeddings": False},
    "ministral": {**MINISTRAL, "model_type": "ministral"},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2-bias": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", **QWEN_WINDOW},
    "qwen3-qk-norm": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-window": {"model_type": "qwen3", **QWEN_WINDOW, "attention_bias": True},
    "phi3": {**PHI3, "sliding_window": 24},
    "phi3-partial-rope": {**PHI3, "partial_rotary_factor": 0.5},
    "phi3-longrope-short": {**PHI3_SCALED, "original_max_position_embeddings": 100},
    "phi3-longrope-long": {**PHI3_SCALED, "serve": PROMPT_TOKENS},
    "gemma2": {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma2-no-caps": {
        "model_type": "gemma2",
        **GEMMA,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": GEMMA3_ROPE,
    },
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "granite": {"model_type": "granite", **MULTIPLIERS, "attention_bias": True},
    "mixtral": MIXTRAL,
    "mixtral-window-stacked": {**MIXTRAL, "sliding_window": 24, "stacked_experts": True},
    "qwen3-moe": {**QWEN3_MOE, "norm_topk_prob": True},
    "qwen3-moe-some-dense": {
        **QWEN3_MOE,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "stacked_experts": True,
    },
    "gemma": {"model_type": "gemma", "attention_bias": True},
    "vaultgemma": {
        "model_type": "vaultgemma",
        **GEMMA,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "olmo3": {
        "model_type": "olmo3",
        **WINDOWS,
        "tie_word_embeddings": False,
        "rope_parameters": {**GEMMA3_ROPE, "full_attention": YARN},
    },
    "olmoe": {"model_type": "olmoe", **EXPERTS, "num_key_value_heads": 2},
    "flex-olmo": {"model_type": "flex_olmo", **EXPERTS, "norm_topk_prob": True, "pad_token_id": 2},
    "cwm": {"model_type": "cwm", **WINDOWS, "rope_parameters": LLAMA3},
    "internlm3": {"model_type": "internlm3", "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"model_type": "iquestcoder", "mlp_bias": True},
    "exaone4": {"model_type": "exaone4", **WINDOWS},
    "exaone4-full": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "seed-oss": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
    "granitemoe": {"model_type": "granitemoe", **MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2},
    "granitemoe-stacked": {"model_type": "granitemoe", "num_local_experts": 5, "stacked_experts": True},
    "granite-swa": {
        "model_type": "granite_swa",
        **MULTIPLIERS,
        **WINDOWS,
        "layer_rope_theta": [10_000.0, 0, 500.0, 10_000.0, 500.0],
    },
    # Activation parameters at which many values are clamped.
    "gpt-oss": {
        **GPT_OSS,
        "rope_parameters": {**YARN, "truncate": False},
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.7,
    },
    "gpt-oss-plain": {**GPT_OSS, "attention_bias": False, "layer_types": ["full_attention"] * 3, "hidden_size": 40},
    "ernie4-5": {"model_type": "ernie4_5", "use_bias": True},
    "helium": {"model_type": "helium", "attention_bias": True, "mlp_bias": True},
    "glm": {"model_type": "glm", "tie_word_embeddings": False, "pad_token_id": 2},
    "glm4": {"model_type": "glm4", "attention_bias": False, "head_dim": 32, "pad_token_id": 2},
    "arcee": {"model_type": "arcee", "mlp_bias": True, "attention_bias": True},
    "jais2": {"model_type": "jais2"},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 24},
    "starcoder2-plain": {"model_type": "starcoder2", "use_bias": False, "hidden_size": 40},
    "cohere": {"model_type": "cohere", "logit_scale": 0.5, "attention_bias": True},
    "cohere-norms": {"model_type": "cohere", "logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", **WINDOWS, "num_hidden_layers": 4, "logit_scale": 2.0},
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        **MULTIPLIERS,
        "num_local_experts": 5,
        "shared_intermediate_size": 144,
    },
    "granitemoe-swa": {
        "model_type": "granitemoe_swa",
        **MULTIPLIERS,
        **WINDOWS,
        "num_local_experts": 5,
        "shared_intermediate_size": 80,
    },
    "glm4-moe": {"model_type": "glm4_moe", **SHARED, "use_qk_norm": True, "attention_bias": True},
    "glm4-moe-plain": {"model_type": "glm4_moe", **SHARED, "norm_topk_prob": False, "first_k_dense_replace": 0},
    "glm4-moe-groups": {"model_type": "glm4_moe", **SHARED, **GROUPS},
    "dots1": {"model_type": "dots1", **SHARED, "sliding_window": 24, "max_window_layers": 1},
    "solar-open": {
        "model_type": "solar_open",
        **{key: value for key, value in SHARED.items() if key != "first_k_dense_replace"},
        "tie_word_embeddings": False,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "rotary_dim": 8,
    },
    "ernie4-5-moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
    },
    "exaone-moe": {
        "model_type": "exaone_moe",
        **WINDOWS,
        **EXPERTS,
        "moe_intermediate_size": 48,
        "num_shared_experts": 2,
    },
    "afmoe": {
        "model_type": "afmoe",
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "moe_intermediate_size": 48,
        "sliding_window": 24,
        "global_attn_every_n_layers": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
        "initializer_range": 0.04,
    },
    "apertus": {"model_type": "apertus", "hidden_act": "xielu", "initializer_range": 0.06},
    "cohere2-moe": {
        "model_type": "cohere2_moe",
        **EXPERTS,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "prefix_dense_intermediate_size": 96,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "logit_scale": 0.5,
        "initializer_range": 0.04,
    },
    "cohere2-moe-softmax": {
        "model_type": "cohere2_moe",
        **EXPERTS,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "rms_norm_eps": 1e-5,
        "sliding_window": 24,
        "logit_scale": 0.5,
        "initializer_range": 0.04,
    },
    "hy-v3": {"model_type": "hy_v3", **EXPERTS, "moe_intermediate_size": 48, "initializer_range": 0.04},
    "hy-v3-dense-between": {
        "model_type": "hy_v3",
        **EXPERTS,
        "moe_intermediate_size": 48,
        "initializer_range": 0.04,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": True,
    },
    "qwen2-moe-window": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 144,
        "mlp_only_layers": [1],
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 3,
        "qkv_bias": False,
        "stacked_experts": True,
    },
    "flint": {
        "model_type": "flint",
        **EXPERTS,
        **WINDOWS,
        "num_hidden_layers": 6,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense", "attention_bias": True},
    "hunyuan-dense-alpha": {
        "model_type": "hunyuan_v1_dense",
        "rope_parameters": {"rope_type": "dynamic", **THETA, "alpha": 1000.0, "factor": 1.0, "beta_fast": 32},
    },
    "hunyuan-moe": {"model_type": "hunyuan_v1_moe", "num_experts": 6, "moe_topk": 2, "intermediate_size": 48},
    "ministral3": {
        "model_type": "ministral3",
        "tie_word_embeddings": False,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 100, "llama_4_scaling_beta": 0.1},
    },
    "ministral3-beyond": {
        "model_type": "ministral3",
        "tie_word_embeddings": False,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
    },
    "mellum": {
        **QWEN3_MOE,
        **WINDOWS,
        "model_type": "mellum",
        "layer_types": ["full_attention", *["sliding_attention"] * 4],
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "rope_parameters": GEMMA3_ROPE,
    },
    "llama4": {
        "model_type": "llama4_text",
        **LLAMA4,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "attention_bias": True,
        "rope_parameters": LLAMA3,
    },
    "llama4-two-each": {
        "model_type": "llama4_text",
        **LLAMA4,
        "num_experts_per_tok": 2,
        "use_qk_norm": False,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": False,
    },
    # The last two layers reuse keys and values of earlier ones, with MLPs of twice the width.
    "gemma4": {
        **GEMMA4,
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 300,
    },
    "gemma4-keys": {**GEMMA4, **GEMMA4_KEYS, "attention_bias": True},
    "gemma4-moe": {
        **GEMMA4,
        **GEMMA4_KEYS,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "stacked_experts": True,
    },
    "gemma4-unified": {
        **{key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"},
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
    },
    "gpt2": {"model_type": "gpt2", "without": ("head_dim",)},
    "opt": {"model_type": "opt", "without": ("head_dim",), "ffn_dim": 144, "pad_token_id": 2},
    "hyperclovax": {"model_type": "hyperclovax", **MULTIPLIERS, "mlp_bias": True},
    "hyperclovax-pre-norm": {"model_type": "hyperclovax", "use_post_norm": False},
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash",
        **{key: value for key, value in SHARED.items() if key not in ("n_shared_experts", "first_k_dense_replace")},
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "v_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    },
    "deepseek-v3": {**V3, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    "deepseek-v2": {
        **LATENTS,
        "model_type": "deepseek_v2",
        **{key: value for key, value in {**SHARED, **GROUPS}.items() if key != "norm_topk_prob"},
        "topk_method": "group_limited_greedy",
        "q_lora_rank": None,
        "mlp_bias": True,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "mistral4": {
        **LATENTS,
        "model_type": "mistral4",
        "without": ("head_dim",),
        **SHARED,
        "qk_nope_head_dim": 16,
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
            "partial_rotary_factor": 0.5,
        },
    },
    "mistral4-groups": {
        **LATENTS,
        "model_type": "mistral4",
        "without": ("head_dim",),
        **SHARED,
        **GROUPS,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "attention_bias": True,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "partial_rotary_factor": 0.4},
    },
    "axk1": {**LATENTS, "model_type": "axk1", **SHARED, **GROUPS},
    "deepseek-v32": {**V3, "model_type": "deepseek_v32", **SPARSE},
    "glm-moe-dsa": {
        **V3,
        "model_type": "glm_moe_dsa",
        **SPARSE,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "glm4-moe-lite": {**LATENTS, "model_type": "glm4_moe_lite", **SHARED, "qk_nope_head_dim": 16, "v_head_dim": 64},
    "youtu": {**LATENTS, "model_type": "youtu", "attention_bias": True, "initializer_range": 0.03},
    "minicpm3": {
        **LATENTS,
        "model_type": "minicpm3",
        "initializer_range": 0.03,
        "v_head_dim": None,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "scale_emb": 3,
        "dim_model_base": 32,
    },
}
# Excludes long-factor families: transformers applies long factors by a text's length.
SAME_AT_ANY_LENGTH = sorted(name for name, settings in FAMILIES.items() if "serve" not in settings)

# Families whose names and options others cover as well. ``make test`` runs each of them once, in chunks.
BY_ROWS = tuple(
    name for name in tuple(FAMILIES)[list(FAMILIES).index("gemma") :] if name not in ("starcoder2", "cohere")
)

# Blocks contain latents, which ranks and GPUs do not support yet.
OF_LATENTS = tuple(name for name, shape in FAMILIES.items() if "kv_lora_rank" in shape)

# Sparse attention with an indexer, for which there is no GPU kernel.
OF_INDEXERS = tuple(name for name, shape in FAMILIES.items() if "index_topk" in shape)

FIRST = {options.get("model_type", "llama"): name for name, options in reversed(FAMILIES.items())}

_ANY = LayerTensor(name="any", role=Role.MATRIX, rows=(), checkpoint_names=())
_ANY_EXPERTS = Experts(_ANY, _ANY, _ANY, "silu", 2, True)


def make_model(folder: pathlib.Path, overrides: dict[str, Any]) -> tuple[pathlib.Path, ModelFlags]:
    """Write a family's model; return its folder and its serving flags."""
    shape = dict(overrides)
    serve = shape.pop("serve", 0)
    perturb_vectors(save_model(folder, **shape))
    return folder, ModelFlags(model=str(folder), dtype="float32", max_model_len=serve)


def mixed(per_token: int, normalize: bool) -> Experts:
    """Return a mixture with this number of experts; its tensors are not used."""
    return dataclasses.replace(_ANY_EXPERTS, per_token=per_token, normalize=normalize)


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
