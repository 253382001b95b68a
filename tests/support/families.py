"""Random small models of each family, with every option that a config can switch on."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from pillion.config import ModelFlags
from testbed.tiny_model import save_model
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

# ``serve``: --max-model-len, where the rotary embedding depends on it; without, such models are served at their
# original length.
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
}


def make_model(folder: pathlib.Path, overrides: dict[str, Any]) -> tuple[pathlib.Path, ModelFlags]:
    """Its folder, and the flags it is served with."""
    shape = dict(overrides)
    serve = shape.pop("serve", 0)
    perturb_vectors(save_model(folder, **shape))
    return folder, ModelFlags(model=str(folder), dtype="float32", max_model_len=serve)


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
