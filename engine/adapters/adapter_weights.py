"""An adapter's matrices as tensors, by fused linear layer of :mod:`pillion.engine.models.decoder`.

    y = W x + B (A x)    for each changed layer; B includes the adapter's scale (LoRA, Hu et al. 2021)

A checkpoint has a pair (A, B) per trained projection; a fused layer may have several pairs, each with its own outputs
and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from pillion.engine.adapters.adapter_forms import Bits, Layers, PairBits
from pillion.engine.models import families
from pillion.engine.models.layer_operations import LayerTensor, Share, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard


@dataclass(frozen=True, slots=True)
class LowRank:
    """A pair of LoRA matrices.

    Attributes:
        first_output: index of the first output of the fused layer to which the product is added.
        a: float32 or bfloat16 [rank, inputs], or [experts, rank, inputs] for stacked experts.
        b: same dtype, [outputs, rank] or [experts, outputs, rank], multiplied by the adapter's scale.
    """

    first_output: int
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter for one model.

    Attributes:
        digest: SHA-256 of the adapter's content in hexadecimal, its identity everywhere (I2).
        rank: highest rank of a pair; 1 if there are none.
        layers: pairs by name of the fused layer, such as "layers.3.qkv", "layers.3.o", "layers.3.latent_up" (per head
            keys, then values), "layers.3.gate_up" (gate, then up), "layers.3.down", "layers.3.linear.in" (of a layer
            with a recurrent state), "layers.3.experts.gate_up" and "layers.3.experts.down" of stacked experts,
            "layers.3.router". Only changed layers are included. The outputs of a layer's pairs are disjoint and
            ascending.
    """

    digest: str
    rank: int
    layers: Mapping[str, tuple[LowRank, ...]]


def weights_of(digest: str, layers: Layers) -> AdapterWeights:
    """Return an adapter's matrices as tensors, without copying."""
    rank = max((pair.a.shape[-2] for pairs in layers.values() for pair in pairs), default=1)
    tensors = {
        name: tuple(LowRank(pair.first_output, _tensor(pair.a), _tensor(pair.b)) for pair in pairs)
        for name, pairs in layers.items()
    }
    return AdapterWeights(digest, rank, tensors)


def bits_of(weights: AdapterWeights) -> Layers:
    """Return an adapter's matrices as bits; the inverse of :func:`weights_of`."""
    return {
        name: [PairBits(pair.first_output, _bits(pair.a), _bits(pair.b)) for pair in pairs]
        for name, pairs in weights.layers.items()
    }


def shard_adapter(
    weights: AdapterWeights, config: ModelConfig, shard: ModelShard, inner: Mapping[str, torch.Tensor]
) -> AdapterWeights:
    """Return a process's shard of an adapter that fits the model. ``inner``: by name of an MLP's layer ("layers.3")
    whose inner values are reordered, the indices of the process's inner values, [inner] or [experts, inner]."""
    if shard.whole:
        return weights
    layers: dict[str, tuple[LowRank, ...]] = {}
    tensors = [{tensor.name: tensor for tensor in tensors_of(layer)} for layer in families.layers_of(config)]
    own_layers = shard.own_layers(config)
    for name, pairs in weights.layers.items():
        _, index, tensor_name = name.split(".", 2)
        if int(index) not in own_layers:
            continue
        tensor, values = tensors[int(index)][tensor_name], inner.get(name.rpartition(".")[0])
        if tensor.experts and shard.whole_experts:
            experts = shard.experts(tensor.experts)
            own = slice(experts.start, experts.stop)
            layers[name] = tuple(replace(pair, a=pair.a[own], b=pair.b[own]) for pair in pairs)
            continue
        if values is None or values.ndim == 1:
            layers[name] = _shard_pairs(pairs, tensor, shard, values)
            continue
        by_expert = [
            _shard_pairs([replace(pair, a=pair.a[expert], b=pair.b[expert]) for pair in pairs], tensor, shard, order)
            for expert, order in enumerate(values)
        ]
        layers[name] = tuple(
            replace(stack[0], a=torch.stack([pair.a for pair in stack]), b=torch.stack([pair.b for pair in stack]))
            for stack in zip(*by_expert, strict=True)
        )
    return replace(weights, layers={name: pairs for name, pairs in layers.items() if pairs})


def _shard_pairs(
    pairs: Iterable[LowRank], tensor: LayerTensor, shard: ModelShard, inner: torch.Tensor | None
) -> tuple[LowRank, ...]:
    """Return a process's shard of the pairs of one layer; ``inner``: indices of its inner values, None if in order."""
    if tensor.inputs[0].share is not Share.WHOLE:
        inputs = shard.indices(tensor.inputs, inner)
        return tuple(replace(pair, a=pair.a[..., inputs]) for pair in pairs)
    outputs = shard.indices(tensor.rows, inner)
    shards = [_select_outputs(pair, outputs) for pair in pairs]
    return tuple(pair for pair in shards if pair is not None)


def _select_outputs(pair: LowRank, outputs: torch.Tensor) -> LowRank | None:
    """Return the pair for a fused layer with only these ``outputs``, in this order; zeros for those between its first
    and its last output that the pair does not change. None if it changes none."""
    rows = outputs - pair.first_output
    changed = ((rows >= 0) & (rows < pair.b.shape[-2])).nonzero().flatten()
    if not len(changed):
        return None
    first, last = int(changed[0]), int(changed[-1])
    b = pair.b.new_zeros(*pair.b.shape[:-2], last - first + 1, pair.b.shape[-1])
    b[..., changed - first, :] = pair.b[..., rows[changed], :]
    return LowRank(first, pair.a, b)


def _tensor(bits: Bits) -> torch.Tensor:
    if bits.itemsize == 4:
        return torch.from_numpy(bits.view(np.float32))
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _bits(tensor: torch.Tensor) -> Bits:
    if tensor.dtype == torch.float32:
        return tensor.contiguous().numpy().view(np.uint32)
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
