"""The table of model families that can be served, one row each: where a new family goes. Imports no torch.

A row holds the values that transformers assumes for keys missing in a config, and the decoder's options that the family
has; :mod:`pillion.engine.models.model_config` reads a config by its row. A family with an option that the decoder does
not have yet also needs that option in :class:`pillion.engine.models.model_config.ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One row of the table; the options have the meaning of the fields of ``ModelConfig`` with the same names.

    ``defaults`` are the values that transformers assumes for missing keys. They also switch options on: a key such as
    ``attention_bias`` or ``logits_scaling`` is read only for families that have it among their defaults, and refused
    for others (:mod:`pillion.engine.models.config_keys`). ``ignored`` are keys that stand in configs of the family
    although transformers does not read them there. ``fused_projections``: transformers has qkv_proj and gate_up_proj
    in place of their parts.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    norm: str = "plain"
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str = ""
    scaled_embedding: bool = False
    partial_rope: bool = False
    fused_projections: bool = False
    ignored: tuple[str, ...] = ()


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_QWEN = {
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

_MISTRAL = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    # With it transformers reads a config of Mistral as one of Ministral.
    "layer_types": None,
}

FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily({"max_position_embeddings": 2048, **_NO_BIAS}),
    "smollm3": ModelFamily(
        {
            "max_position_embeddings": 32_768,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            **_NO_BIAS,
            "tie_word_embeddings": True,
        }
    ),
    "mistral": ModelFamily(_MISTRAL),
    "ministral": ModelFamily(_MISTRAL),
    "mixtral": ModelFamily(
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    ),
    # Its projections have their biases whatever the key says.
    "qwen2": ModelFamily(_QWEN, qkv_bias=True, ignored=("attention_bias",)),
    "qwen3": ModelFamily({**_QWEN, "head_dim": 128, "attention_bias": False}, qk_norm="head"),
    "qwen3_moe": ModelFamily(
        {
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        qk_norm="head",
    ),
    "phi3": ModelFamily(
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        partial_rope=True,
        fused_projections=True,
    ),
    "gemma2": ModelFamily(
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norm="offset",
        post_norm=True,
        scaled_embedding=True,
        # An old name of the window, which stands beside the new one.
        ignored=("sliding_window_size",),
    ),
    "gemma3_text": ModelFamily(
        {
            **_GEMMA,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": None,
        },
        norm="offset",
        post_norm=True,
        qk_norm="head",
        scaled_embedding=True,
    ),
    "olmo2": ModelFamily(
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
        norm="wide",
        pre_norm=False,
        post_norm=True,
        qk_norm="projection",
    ),
    "granite": ModelFamily(
        {
            "max_position_embeddings": 2048,
            **_NO_BIAS,
            **dict.fromkeys(
                ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
            ),
        }
    ),
}

# Models of text and images whose text model can be served: their model_type, and the family of their text_config.
TEXT_OF = {"gemma3": "gemma3_text"}
