"""Counts a model's weights and operations by the shape that its config describes. Imports no torch."""

from __future__ import annotations

from pillion.engine.models.model_config import ModelConfig


def model_weights(config: ModelConfig) -> tuple[int, int]:
    """Returns how many weights the layers of a model have, and how many of them a token meets."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    attention = hidden * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    moe, latents = config.moe, config.latents
    if latents is not None:
        inputs = latents.query_rank or hidden
        attention = hidden * (latents.query_rank + config.head_dim) + config.num_heads * (
            inputs * latents.head_dim + latents.rank * (latents.still + latents.values) + latents.values * hidden
        )
    mixed = 0 if moe is None else sum(moe.layers)
    dense = (config.num_layers - mixed) * 3 * hidden * config.intermediate_size
    expert = 0 if moe is None else 3 * hidden * moe.intermediate_size
    experts, met = (0, 0) if moe is None else (mixed * moe.num_experts * expert, mixed * moe.experts_per_token * expert)
    common = config.num_layers * attention + dense
    return common + experts, common + met


def pair_operations(config: ModelConfig, layers: int) -> int:
    """Returns the operations of a query-key pair in so many layers with attention."""
    return 4 * config.num_heads * config.head_dim * layers


def pair_tokens(config: ModelConfig) -> float:
    """Returns the cost of a query-key pair in tokens: the operations of a pair, divided by those of a token's
    products. Layers with a sliding window are left out, because late in a prompt they attend to few of the pairs."""
    layers = sum(not config.sliding_windows[layer] for layer in config.kv_layers)
    return pair_operations(config, layers) / (2 * model_weights(config)[1])
