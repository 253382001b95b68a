"""Makes the matrices of an adapter, in the order of outputs that the decoder's fused layers have."""

from __future__ import annotations

from collections import defaultdict

import torch
from safetensors import safe_open

from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.checkpoints.weights import qkv_order
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError


def read_adapter(files: AdapterFiles, model: ModelConfig, dtype: torch.dtype, digest: str) -> AdapterWeights:
    """Reads an adapter's matrices in ``dtype``. Raises ConfigError if they do not fit the model, or if the files have
    another content than that of ``digest``."""
    pairs = files.pairs(model)
    if files.digest() != digest:
        raise ConfigError(f"{files.folder} does not hold the adapter {digest}")
    files.check_numbers()
    order = qkv_order(model)
    layers: dict[str, list[LowRank]] = defaultdict(list)
    with safe_open(files.path, framework="pt") as tensors:
        for pair in pairs:
            first, projection = pair.projection.first_output, pair.projection
            # The scale is applied to the file's numbers, so that b is rounded once.
            b = tensors.get_tensor(pair.b).float() * pair.scale
            if order is not None and projection.layer.endswith(".qkv"):
                # Heads keep their places, so each projection is reordered within itself.
                b = b[order[first : first + projection.outputs] - first]
            a = tensors.get_tensor(pair.a).to(dtype)
            layers[projection.layer].append(LowRank(first, a.contiguous(), b.to(dtype).contiguous()))
    rank = max(pair.rank for pair in pairs)
    return AdapterWeights(digest, rank, {name: tuple(found) for name, found in layers.items()})
