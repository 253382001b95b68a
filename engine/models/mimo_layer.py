"""Layers of MiMo-V2-Flash. Imports no torch.

    hidden += attention(norm(hidden)), with a window, sinks and twice the KV heads in most layers
    hidden += mlp(norm(hidden)), or experts

Value heads are narrower than key heads. The value and output matrices are padded with zeros on load, so values in
blocks end with zeros.
"""

from __future__ import annotations

from dataclasses import replace

from pillion.engine.models.layer_operations import Attend, Entries, Layer, Multiply, Share, matrix
from pillion.engine.models.llama_layer import ExpertNames, attention_sinks, llama_layer, rotation
from pillion.engine.models.model_config import ModelConfig


def mimo_layer(config: ModelConfig, index: int) -> Layer:
    """Return the operations of layer ``index``."""
    heads, rope, window = config.heads_of(index), config.ropes[0], config.sliding_windows[index]
    size, rotated = heads.head_dim, rope.rotary_dim if rope.rotary_dim < heads.head_dim else 0
    hidden = (Entries(config.hidden_size),)
    rows = (
        Entries(config.num_heads * size, Share.HEADS, size, rotated),
        Entries(heads.kv_heads * size, Share.KV_HEADS, size, rotated),
        Entries(heads.kv_heads * size, Share.KV_HEADS, size, stored=config.value_width),
    )
    results = Entries(config.num_heads * size, Share.HEADS, size, stored=config.value_width)
    qkv = matrix("qkv", rows, hidden, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    attention = (
        Multiply(replace(qkv, scales=(1.0, 1.0, config.value_scale))),
        *rotation(config, index),
        Attend(window, attention_sinks(config) if window else None),
        Multiply(matrix("o", hidden, (results,), ("self_attn.o_proj",))),
    )
    experts = ExpertNames(choice_bias="mlp.gate.e_score_correction_bias")
    return llama_layer(config, index, experts=experts, mixer=attention)
