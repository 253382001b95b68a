"""Random LoRA adapters in the form that backends take, for tests and benchmarks that need no files."""

from __future__ import annotations

import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.backends.backend import adapter_shapes
from pillion.engine.models.model_config import ModelConfig


def random_adapter(
    config: ModelConfig, seed: int, ranks: tuple[int, ...], dtype: torch.dtype, *, leave: tuple[str, ...] = ()
) -> AdapterWeights:
    """Returns an adapter of every projection, but for layers in ``leave``, whose effect is of the order of a half.

    The projections of a fused layer have the ``ranks`` in turn.
    """
    generator = torch.Generator().manual_seed(seed)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = {}
    for name, (outputs, inputs) in adapter_shapes(config).items():
        sizes = {"qkv": (queries, keys, keys), "gate_up": (outputs // 2, outputs // 2)}.get(
            name.rpartition(".")[2], (outputs,)
        )
        pairs, first = [], 0
        for number, size in enumerate(sizes):
            rank = ranks[number % len(ranks)]
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(size, rank, generator=generator) / (2 * rank**0.5)
            pairs.append(LowRank(first, a.to(dtype), b.to(dtype)))
            first += size
        if name not in leave:
            layers[name] = tuple(pairs)
    return AdapterWeights(f"{seed:064x}", max(ranks), layers)
