"""Random small models whose layers have recurrent states, and drivers for their backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pillion.kernels.step import StateSlots, StepBatch
from tests.support.torch_model import BackendDriver

ATTENTION, LINEAR = "full_attention", "linear_attention"
# Value heads share keys, all sizes differ, and a state spans several slots.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 48,
}
QWEN_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
MAMBA = {
    "model_type": "granitemoehybrid",
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "shared_intermediate_size": 80,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "without": ("num_hidden_layers",),
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "tie_word_embeddings": False,
}
KIMI = {
    "model_type": "kimi_linear",
    "pad_token_id": 2,
    "without": ("head_dim",),
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": False,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", ATTENTION, "conv"]},
    "lfm2-biases": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": [ATTENTION, "conv", ATTENTION],
        "conv_bias": True,
        "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "lfm2-moe": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": ["conv", ATTENTION, "conv"],
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    # The last layer has sliding-window attention; a layer between convolutions has full attention.
    "lfm3": {
        "model_type": "lfm3",
        "num_hidden_layers": 5,
        "layer_types": ["conv", "sliding_attention", "conv", ATTENTION, "sliding_attention"],
        "sliding_window": 24,
        "conv_L_cache": 7,
        "pad_token_id": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 100_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "lfm3-plain": {
        "model_type": "lfm3",
        "layer_types": ["conv", ATTENTION],
        "use_sandwich_norm": False,
        "use_attention_gate": False,
        "sliding_window": None,
        "conv_bias": True,
        "pad_token_id": 2,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        **DELTA,
        **QWEN_EXPERTS,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    },
    "qwen3-next-ends-linear": {
        "model_type": "qwen3_next",
        **DELTA,
        **QWEN_EXPERTS,
        "layer_types": [ATTENTION, LINEAR],
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "qwen3-5": {"model_type": "qwen3_5_text", **DELTA, "num_hidden_layers": 4, "rope_parameters": MROPE},
    "qwen3-5-moe": {
        "model_type": "qwen3_5_moe_text",
        **DELTA,
        **QWEN_EXPERTS,
        "layer_types": [LINEAR, ATTENTION],
        "rope_parameters": MROPE,
    },
    "granite-hybrid": {
        **MAMBA,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, ATTENTION, LINEAR],
        "num_local_experts": 5,
        "position_embedding_type": "rope",
    },
    "granite-hybrid-dense": {
        **MAMBA,
        "layer_types": [LINEAR, ATTENTION],
        "num_local_experts": 0,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
    },
    "bamba": {
        **{key: value for key, value in MAMBA.items() if key.startswith("mamba_")},
        "model_type": "bamba",
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "pad_token_id": 2,
        "mlp_bias": True,
    },
    "jamba": {
        "model_type": "jamba",
        "without": ("head_dim",),
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
        "num_experts": 5,
        "mamba_dt_rank": 32,
        "pad_token_id": 2,
    },
    "jamba-dense": {
        "model_type": "jamba",
        "without": ("head_dim",),
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "num_experts": 1,
        "mamba_expand": 3,
        "mamba_dt_rank": 16,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "pad_token_id": 2,
    },
    "falcon-h1": {
        **{key: value for key, value in MAMBA.items() if key.startswith("mamba_")},
        "model_type": "falcon_h1",
        "mamba_d_ssm": None,
        "num_hidden_layers": 2,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
        "mlp_multipliers": [0.7, 0.4],
    },
    "falcon-h1-normed": {
        **{key: value for key, value in MAMBA.items() if key.startswith("mamba_")},
        "model_type": "falcon_h1",
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "tie_word_embeddings": False,
    },
    "nemotron-h": {
        **NEMOTRON,
        "layers_block_type": [LINEAR, "moe", ATTENTION, "mlp"],
        "routed_scaling_factor": 1.5,
    },
    "nemotron-h-ends-linear": {
        **NEMOTRON,
        "layers_block_type": ["mlp", ATTENTION, "moe", LINEAR],
        "mlp_bias": True,
        "use_bias": True,
        "norm_topk_prob": False,
    },
    "kimi-linear": {
        **KIMI,
        "num_hidden_layers": 3,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 32,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
    },
    "kimi-linear-ends-attending": {
        **KIMI,
        "layer_types": [LINEAR, ATTENTION],
        "linear_head_dim": 48,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 3,
        "q_lora_rank": 24,
        "mlp_layer_types": ["sparse", "sparse"],
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "olmo-hybrid-nope": {
        "model_type": "olmo_hybrid",
        **DELTA,
        "layer_types": [ATTENTION, LINEAR],
        "without": ("head_dim",),
        "pad_token_id": 2,
        "linear_allow_neg_eigval": False,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "olmo-hybrid": {
        "model_type": "olmo_hybrid",
        **DELTA,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, LINEAR, ATTENTION],
        "without": ("head_dim",),
        "pad_token_id": 2,
    },
}


@torch.inference_mode()
def token_by_token(model: Any, text: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits for each token of a text, each in a separate step."""
    found, cache = [], None
    for place, token in enumerate(text):
        at = torch.tensor([[place]])
        out = model(torch.tensor([[token]]), position_ids=at, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1].float())
    return torch.stack(found)


class StateDriver(BackendDriver):
    """A driver that stores two states per text in the pool: a step reads one and writes the other."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._places: dict[int, list[tuple[int, ...]]] = {}

    def state(self, number: int) -> bytes:
        """Return the bytes of a text's state."""
        rows = np.frombuffer(self.memory, np.uint8).reshape(-1, self.backend.layout.block_bytes)
        return rows[list(self._places[number][0])].tobytes()[: self.backend.layout.state_bytes]

    def step(self, *parts: tuple[int, Sequence[int]], sample: Sequence[int] | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.backend.forward(self.batch(*parts, sample=sample)).clone()
        return logits

    def batch(self, *parts: tuple[int, Sequence[int]], sample: Sequence[int] | None = None) -> StepBatch:
        """Return a step with these parts, and advance their states."""
        batch, pages = self.sequences.step(parts, sample), self.backend.layout.state_pages
        assert pages > 0
        for number, _ in parts:
            if number not in self._places:
                self._places[number] = [self.sequences.take_slots(pages) for _ in range(2)]
        begun = (batch.context_lens - np.diff(batch.query_starts)) > 0
        reads = np.array([self._places[number][0] for number, _ in parts], np.int32)
        writes = np.array([self._places[number][1] for number, _ in parts], np.int32)
        reads[~begun] = -1
        for number, _ in parts:
            self._places[number].reverse()
        return replace(batch, states=StateSlots(reads, writes))
