"""Weights and floating-point operations of a model, per token and query-key pair. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import MATRICES, Experts, tensors_of
from pillion.engine.models.model_config import ModelConfig


def model_weights(config: ModelConfig) -> tuple[int, int]:
    """Return the number of weights of all layers, and the number that a token is multiplied by."""
    inputs = config.token_inputs
    total = used = 0 if inputs is None else config.num_layers * inputs.width * config.hidden_size
    for operation in (operation for layer in layers_of(config) for operation in layer):
        for tensor in tensors_of((operation,)):
            if tensor.role in MATRICES:
                size = prod(tensor.shape)
                total += size * max(1, tensor.experts)
                used += size * (operation.per_token if isinstance(operation, Experts) and tensor.experts else 1)
    return total, used


def looked_up_weights(config: ModelConfig) -> int:
    """Return the number of weights in the embedding table of per-layer token inputs, of which a token reads one row."""
    inputs = config.token_inputs
    return 0 if inputs is None else inputs.vocab_size * config.num_layers * inputs.width


def pair_operations(config: ModelConfig, layers: Iterable[int]) -> int:
    """Return the floating-point operations per query-key pair, summed over ``layers``, which have attention."""
    return sum(4 * config.num_heads * config.heads_of(layer).head_dim for layer in layers)


def pair_tokens(config: ModelConfig) -> float:
    """Return the operations of a query-key pair divided by those of a token's matrix products. Layers with a sliding
    window are omitted, since late in a prompt they attend to few of the pairs."""
    layers = (layer for layer in config.kv_layers if not config.sliding_windows[layer])
    return pair_operations(config, layers) / (2 * model_weights(config)[1])
