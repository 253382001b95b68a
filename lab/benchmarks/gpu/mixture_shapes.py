"""The measured mixtures of experts, with the shapes of their published config.json files, and a tiny one."""

from __future__ import annotations

from typing import Any

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201_088,
}
# All 36 layers take 234 GB in bfloat16, more than one GPU has; a layer's cost does not depend on their number.
GPT_OSS_120B_THIRD = {
    **GPT_OSS_20B,
    "layer_types": ["sliding_attention", "full_attention"] * 6,
    "num_hidden_layers": 12,
    "num_local_experts": 128,
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102_400,
}
GEMMA4_26B = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "max_position_embeddings": 262_144,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": 8,
    "torch_dtype": "bfloat16",
    "use_double_wide_mlp": False,
    "vocab_size": 262_144,
}
# All 48 layers take 218 GB in bfloat16.
LLAMA4_SCOUT_QUARTER = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "max_position_embeddings": 10_485_760,
    "no_rope_layers": [1, 1, 1, 0] * 3,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 12,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 202_048,
}
TINY_MIXTURE = {
    **QWEN3_30B,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 260,
}

MIXTURES = {
    "Qwen3-30B-A3B": QWEN3_30B,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b, 12 of 36 layers": GPT_OSS_120B_THIRD,
}

# Measured late; no goals yet.
FURTHER = {"Gemma 4 26B-A4B": GEMMA4_26B, "Llama 4 Scout, 12 of 48 layers": LLAMA4_SCOUT_QUARTER}
ALL_MIXTURES = {**MIXTURES, **FURTHER}
# Per-layer lists of a config.
_OF_LAYERS = ("layer_types", "no_rope_layers")
_TINY_SIZES = {name: TINY_MIXTURE[name] for name in ("hidden_size", "num_attention_heads", "vocab_size")}


def mixtures_of(smoke: bool) -> dict[str, dict[str, Any]]:
    """Return the config.json of each measured mixture by name."""
    if not smoke:
        return ALL_MIXTURES
    further = {name: {**fewer_layers(config, 1), **_TINY_SIZES, **_tiny(config)} for name, config in FURTHER.items()}
    return {next(iter(MIXTURES)): TINY_MIXTURE, **further}


def _tiny(config: dict[str, Any]) -> dict[str, Any]:
    """Return small values of a config's sizes."""
    sizes = {
        "global_head_dim": 32,
        "head_dim": 16,
        "intermediate_size": 48,
        "intermediate_size_mlp": 48,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_global_key_value_heads": 1,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "top_k_experts": 2,
    }
    return {name: size for name, size in sizes.items() if name in config}


def fewer_layers(config: dict[str, Any], fewest: int) -> dict[str, Any]:
    """Return a config of the first layers: at least ``fewest``, and one of each kind of layer."""
    lists = {name: config[name] for name in _OF_LAYERS if name in config}
    count = max(fewest, *(values.index(kind) + 1 for values in lists.values() for kind in values), 1)
    return {**config, "num_hidden_layers": count, **{name: values[:count] for name, values in lists.items()}}
