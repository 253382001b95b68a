"""The forward pass of every model: one pre-norm decoder over a paged pool, with the options of its config."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.model_config import ModelConfig
from engine.rope import Rope, rotate
from engine.weights import LayerWeights, ModelWeights
from kernels.torch_attention import StepAttention


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in float32, rounded before the weight is applied: as transformers does it."""
    wide = values.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(values.dtype)


def run_decoder(
    config: ModelConfig,
    weights: ModelWeights,
    rope: Rope,
    attention: StepAttention,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_rows: torch.Tensor,
) -> torch.Tensor:
    """Runs T tokens and writes their KV.

    Takes token_ids and positions [T], sample_rows [R] (int64 all); gives float32 logits [R, vocab]. What nobody asked
    for is not computed: the last layer ends after its KV where no row is sampled, and keeps only sampled rows else.
    """
    hidden = weights.embedding[token_ids]
    cos, signed_sin = rope.tables(positions, hidden.dtype)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        queries, keys, values = _project(config, layer, hidden, cos, signed_sin)
        attention.write(index, keys, values)
        if index == last and not len(sample_rows):
            return torch.empty((0, config.vocab_size), dtype=torch.float32)
        attended = attention.attend(index, queries, config.sliding_windows[index])
        if index == last:
            attended, hidden = attended[sample_rows], hidden[sample_rows]
        hidden = hidden + layer.o(attended)
        hidden = hidden + _mlp(config, layer, hidden)
    return weights.lm_head(rms_norm(hidden, weights.final_norm, config.rms_norm_eps)).float()


def _project(
    config: ModelConfig, layer: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """hidden [T, H] -> queries [T, heads, D], keys and values [T, kv_heads, D], rotated to their positions."""
    normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
    heads = layer.qkv(normed).view(len(hidden), -1, config.head_dim)
    turned = heads[:, : -config.num_kv_heads]
    if layer.qk_norm is not None:
        turned = rms_norm(turned, layer.qk_norm, config.rms_norm_eps)
    turned = rotate(turned, cos, signed_sin)
    return turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, -config.num_kv_heads :]


def _mlp(config: ModelConfig, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    normed = rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
    gate, up = layer.gate_up(normed).chunk(2, -1)
    return layer.down(silu(gate) * up)
