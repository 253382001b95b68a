"""Numbers of a model's weights and operations. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import MATRICES, Experts, tensors_of
from pillion.engine.models.model_config import ModelConfig


def model_weights(config: ModelConfig) -> tuple[int, int]:
    """Return the number of weights in layers, and of those used per token."""
    inputs = config.token_inputs
    every = met = 0 if inputs is None else config.num_layers * inputs.width * config.hidden_size
    for operation in (operation for layer in layers_of(config) for operation in layer):
        for tensor in tensors_of((operation,)):
            if tensor.role in MATRICES:
                size = prod(tensor.shape)
                every += size * max(1, tensor.experts)
                met += size * (operation.per_token if isinstance(operation, Experts) and tensor.experts else 1)
    return every, met


def looked_up_weights(config: ModelConfig) -> int:
    """Return the number of weights in tables beside the token embedding, of which a token reads one row."""
    inputs = config.token_inputs
    return 0 if inputs is None else inputs.vocab_size * config.num_layers * inputs.width


def pair_operations(config: ModelConfig, layers: Iterable[int]) -> int:
    """Return the operations of a query-key pair in these layers with attention."""
    return sum(4 * config.num_heads * config.heads_of(layer).head_dim for layer in layers)


def pair_tokens(config: ModelConfig) -> float:
    """Return the cost of a query-key pair in tokens: its operations divided by those of a token's products. Layers with
    a sliding window are omitted, since late in a prompt they attend to few of the pairs."""
    layers = (layer for layer in config.kv_layers if not config.sliding_windows[layer])
    return pair_operations(config, layers) / (2 * model_weights(config)[1])
