"""A rank's share of a layer and of an adapter, cut from what a checkpoint has.

    qkv, gate and up   the outputs of the rank's heads, or inner values: all inputs
    o, down            all outputs: the inputs of the rank's heads, or inner values
    norms, routers     whole

What ``o`` and ``down`` find is a partial sum; their biases are those of the rank that leads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.models.decoder import LayerWeights
from pillion.engine.models.layers import GatedMLP, MoeWeights, RmsNorm
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rank_split import RankSplit
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix, select_columns, select_inputs, select_rows
from pillion.kernels.torch.torch_linear import Linear


def split_layer(layer: LayerWeights, config: ModelConfig, split: RankSplit) -> LayerWeights:
    """The rank's share of a layer whose linear layers are plain. Parts are views where that is possible.

    Where the inputs of ``o`` are in few bits and in an order of their own that crosses heads (GPTQ's act-order), their
    groups cannot be cut, and the share is float32 with the same values.
    """
    if split.whole:
        return layer
    size, heads, kv_heads = config.head_dim, split.heads, split.kv_heads
    queries = range(heads.start * size, heads.stop * size)
    mlp = layer.mlp
    return replace(
        layer,
        qkv=_rows(layer.qkv, _qkv_rows(config, split)),
        qk_norm=_norm(layer.qk_norm, torch.cat((_each(heads), _each(kv_heads) + config.num_heads))),
        q_norm=_norm(layer.q_norm, _each(queries)),
        k_norm=_norm(layer.k_norm, _each(range(kv_heads.start * size, kv_heads.stop * size))),
        o=Linear.plain(select_inputs(layer.o.weight, queries), _led(layer.o.bias, split)),
        mlp=replace(mlp, experts=tuple(_mlp(expert, split) for expert in mlp.experts))
        if isinstance(mlp, MoeWeights)
        else _mlp(mlp, split),
    )


def inner_values(mlp: GatedMLP, split: RankSplit) -> torch.Tensor:
    """int64: the inner values that the rank has, in its order. Where the down projection has its inputs in an order of
    its own, ranks share these as they lie, so that groups of codes stay whole."""
    down = mlp.down.weight
    mine = split.inner(down.shape[1])
    if isinstance(down, QuantizedMatrix) and down.order is not None:
        return down.order[mine.start : mine.stop]
    return _each(mine)


def split_adapter(
    weights: AdapterWeights, config: ModelConfig, split: RankSplit, inner: Mapping[str, torch.Tensor]
) -> AdapterWeights:
    """The rank's share of an adapter that fits the model. ``inner``: the inner values that the rank has, by the layer's
    name ("layers.3"), where they are not in order."""
    if split.whole:
        return weights
    size = config.head_dim
    queries = _each(range(split.heads.start * size, split.heads.stop * size))
    layers: dict[str, tuple[LowRank, ...]] = {}
    for name, pairs in weights.layers.items():
        layer, _, kind = name.rpartition(".")
        values = inner.get(layer, _each(split.inner(config.intermediate_size)))
        if kind in ("o", "down"):
            inputs = queries if kind == "o" else values
            layers[name] = tuple(replace(pair, a=pair.a[:, inputs]) for pair in pairs)
            continue
        mine = _qkv_rows(config, split) if kind == "qkv" else _both(values, config.intermediate_size)
        shares = [_outputs(pair, mine) for pair in pairs]
        layers[name] = tuple(share for share in shares if share is not None)
    return replace(weights, layers={name: pairs for name, pairs in layers.items() if pairs})


def _outputs(pair: LowRank, mine: torch.Tensor) -> LowRank | None:
    """What a pair adds to the outputs ``mine``; None where it adds nothing. Between the first and the last output that
    it adds to, it adds zeros to those that are not its own."""
    theirs = mine - pair.first_output
    inside = ((theirs >= 0) & (theirs < len(pair.b))).nonzero().flatten()
    if not len(inside):
        return None
    first, last = int(inside[0]), int(inside[-1])
    b = pair.b.new_zeros(last - first + 1, pair.b.shape[1])
    b[inside - first] = pair.b[theirs[inside]]
    return LowRank(first, pair.a, b)


def _mlp(mlp: GatedMLP, split: RankSplit) -> GatedMLP:
    width = mlp.down.weight.shape[1]
    down = Linear.plain(select_columns(mlp.down.weight, split.inner(width)), _led(mlp.down.bias, split))
    return replace(mlp, gate_up=_rows(mlp.gate_up, _both(inner_values(mlp, split), width)), down=down)


def _qkv_rows(config: ModelConfig, split: RankSplit) -> torch.Tensor:
    """The rank's outputs of the fused projection."""
    size, keys = config.head_dim, config.num_heads
    parts = (split.heads, 0), (split.kv_heads, keys), (split.kv_heads, keys + config.num_kv_heads)
    return torch.cat([_each(range((at + part.start) * size, (at + part.stop) * size)) for part, at in parts])


def _both(values: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the rows of both halves, gate and up, that belong to the inner values."""
    return torch.cat((values, values + width))


def _rows(linear: Linear, index: torch.Tensor) -> Linear:
    return Linear.plain(select_rows(linear.weight, index), None if linear.bias is None else linear.bias[index])


def _norm(norm: RmsNorm | None, index: torch.Tensor) -> RmsNorm | None:
    return None if norm is None else replace(norm, weight=norm.weight[index])


def _led(bias: torch.Tensor | None, split: RankSplit) -> torch.Tensor | None:
    return bias if split.leads else None


def _each(values: range) -> torch.Tensor:
    return torch.arange(values.start, values.stop)
