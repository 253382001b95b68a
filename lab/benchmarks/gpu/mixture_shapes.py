"""The measured mixtures of experts: what their published config.json files say of shapes, and a tiny one."""

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
# All 36 layers take 234 GB in bfloat16, more than one GPU has. What a layer costs does not depend on their number.
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


def mixtures_of(smoke: bool) -> dict[str, dict[str, Any]]:
    """Returns the config.json of each measured mixture by its name."""
    return {"tiny": TINY_MIXTURE} if smoke else MIXTURES
