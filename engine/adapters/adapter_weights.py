"""An adapter's matrices, mapped to the fused linear layers of :mod:`pillion.engine.models.decoder`.

    y = W x + B (A x)    for each target; B includes the adapter's scale (Hu et al., 2021: LoRA)

A checkpoint has a pair (A, B) per trained projection; several of them may belong to one fused layer, each with its own
outputs and rank.
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
    """Change of some outputs of a linear layer.

    Attributes:
        first_output: first output of the fused layer that the pair adds to.
        a: float32 or bfloat16 [rank, inputs], or [experts, rank, inputs] for stacked experts.
        b: same type, [outputs, rank] or [experts, outputs, rank], multiplied by the adapter's scale.
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
        layers: pairs by name of the fused layer: "layers.3.qkv", "layers.3.o", "layers.3.latent_up" (keys, then values,
            per head), "layers.3.gate_up" (gate, then up), "layers.3.down", "layers.3.linear.in" (of a layer with a
            state), "layers.3.experts.gate_up" and "layers.3.experts.down" of stacked experts, "layers.3.router".
            Unchanged layers are missing. Outputs of a layer's pairs are disjoint and ascending.
    """

    digest: str
    rank: int
    layers: Mapping[str, tuple[LowRank, ...]]


def weights_of(digest: str, layers: Layers) -> AdapterWeights:
    """Return an adapter's bits as tensors, without copying."""
    rank = max((pair.a.shape[-2] for pairs in layers.values() for pair in pairs), default=1)
    found = {
        name: tuple(LowRank(pair.first_output, _tensor(pair.a), _tensor(pair.b)) for pair in pairs)
        for name, pairs in layers.items()
    }
    return AdapterWeights(digest, rank, found)


def bits_of(weights: AdapterWeights) -> Layers:
    return {
        name: [PairBits(pair.first_output, _bits(pair.a), _bits(pair.b)) for pair in pairs]
        for name, pairs in weights.layers.items()
    }


def shard_adapter(
    weights: AdapterWeights, config: ModelConfig, shard: ModelShard, inner: Mapping[str, torch.Tensor]
) -> AdapterWeights:
    """Return a process's shard of an adapter that fits the model. ``inner``: the inner values of the process, by layer
    name ("layers.3"), if reordered."""
    if shard.whole:
        return weights
    layers: dict[str, tuple[LowRank, ...]] = {}
    tensors = [{tensor.name: tensor for tensor in tensors_of(layer)} for layer in families.layers_of(config)]
    own = shard.own_layers(config)
    for name, pairs in weights.layers.items():
        _, index, kind = name.split(".", 2)
        if int(index) not in own:
            continue
        tensor, values = tensors[int(index)][kind], inner.get(name.rpartition(".")[0])
        if tensor.experts and shard.whole_experts:
            mine = shard.experts(tensor.experts)
            some = slice(mine.start, mine.stop)
            layers[name] = tuple(replace(pair, a=pair.a[some], b=pair.b[some]) for pair in pairs)
            continue
        if values is None or values.ndim == 1:
            layers[name] = _share_of(pairs, tensor, shard, values)
            continue
        each = [
            _share_of([replace(pair, a=pair.a[number], b=pair.b[number]) for pair in pairs], tensor, shard, order)
            for number, order in enumerate(values)
        ]
        layers[name] = tuple(
            replace(same[0], a=torch.stack([one.a for one in same]), b=torch.stack([one.b for one in same]))
            for same in zip(*each, strict=True)
        )
    return replace(weights, layers={name: pairs for name, pairs in layers.items() if pairs})


def _share_of(
    pairs: Iterable[LowRank], tensor: LayerTensor, shard: ModelShard, inner: torch.Tensor | None
) -> tuple[LowRank, ...]:
    """Return a process's shard of the pairs of one layer; ``inner`` is the order of its inner values."""
    if tensor.inputs[0].share is not Share.WHOLE:
        inputs = shard.indices(tensor.inputs, inner)
        return tuple(replace(pair, a=pair.a[..., inputs]) for pair in pairs)
    mine = shard.indices(tensor.rows, inner)
    shares = [_outputs(pair, mine) for pair in pairs]
    return tuple(share for share in shares if share is not None)


def _outputs(pair: LowRank, mine: torch.Tensor) -> LowRank | None:
    """Return the part of a pair that adds to the outputs ``mine``, with zeros in gaps; None if there is none."""
    theirs = mine - pair.first_output
    inside = ((theirs >= 0) & (theirs < pair.b.shape[-2])).nonzero().flatten()
    if not len(inside):
        return None
    first, last = int(inside[0]), int(inside[-1])
    b = pair.b.new_zeros(*pair.b.shape[:-2], last - first + 1, pair.b.shape[-1])
    b[..., inside - first, :] = pair.b[..., theirs[inside], :]
    return LowRank(first, pair.a, b)


def _tensor(bits: Bits) -> torch.Tensor:
    if bits.itemsize == 4:
        return torch.from_numpy(bits.view(np.float32))
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _bits(tensor: torch.Tensor) -> Bits:
    if tensor.dtype == torch.float32:
        return tensor.contiguous().numpy().view(np.uint32)
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
