"""Cutting of a rank's shard of a layer out of the checkpoint's weights.

    qkv, gate and up   rows (outputs) of the rank's heads, or of its inner values
    o, down            columns (inputs) of the rank's heads, or of its inner values
    experts            like gate, up and down, or with ``whole_experts`` all of the rank's own experts
    recurrent layers   input projection: rows of the rank's heads and channels; output projection: columns of its heads
    norms, routers     whole, except norms over heads

The description of a layer says this for each tensor (:class:`pillion.engine.models.layer_operations.Entries`). Results
of ``o`` and ``down`` are partial sums; their biases belong to rank 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pillion.engine.models.layer_operations import Experts, Layer, LayerTensor, Mlp, Share, tensors_of
from pillion.engine.models.layer_weights import LayerWeights
from pillion.engine.models.layers import LayerNorm, RmsNorm
from pillion.engine.models.model_shard import ModelShard
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, select_columns, select_inputs, select_rows
from pillion.kernels.torch.recurrences import Taps
from pillion.kernels.torch.torch_linear import Linear


def shard_layer(weights: LayerWeights, layer: Layer, shard: ModelShard) -> LayerWeights:
    """Return a process's shard of a layer with plain linear layers; its tensors are views if possible.

    If the inputs of ``o`` are quantized in an order that crosses heads (GPTQ's act-order), their groups cannot be
    split, and the shard is float32 with the same values.
    """
    if shard.whole:
        return weights
    # The rank's outputs of gate and up must be the inner values that its down projection reads.
    downs = {one.gate_up.name: one.down for one in layer if isinstance(one, Mlp | Experts)}
    share = LayerWeights()
    for tensor in tensors_of(layer):
        found = weights[tensor.name]
        if isinstance(found, Linear | tuple):
            linears = weights.linears(tensor)
            if tensor.experts and shard.whole_experts:
                mine_alone = shard.experts(tensor.experts)
                share[tensor.name] = linears[mine_alone.start : mine_alone.stop]
                continue
            after = weights.linears(downs[tensor.name]) if tensor.name in downs else [None] * len(linears)
            cut = tuple(
                _linear(one, tensor, shard, None if down is None else inner_values(down, shard))
                for one, down in zip(linears, after, strict=True)
            )
            share[tensor.name] = cut if tensor.experts else cut[0]
        elif all(piece.share is Share.WHOLE for piece in tensor.rows):
            share[tensor.name] = found
        else:
            mine = shard.indices(tensor.rows)
            match found:
                case Taps(factors, taps_bias):
                    share[tensor.name] = Taps(factors[mine], None if taps_bias is None else taps_bias[mine])
                case LayerNorm(weight, _, bias):
                    cut_bias = None if bias is None else bias[mine]
                    share[tensor.name] = replace(found, weight=weight[mine], bias=cut_bias)
                case RmsNorm(weight):
                    share[tensor.name] = replace(found, weight=weight[mine])
                case _:
                    share[tensor.name] = found[mine]
    return share


def inner_values(down: Linear, shard: ModelShard) -> torch.Tensor:
    """Return the rank's inner values in its order, int64. If the down projection reorders its inputs, ranks divide them
    in that order, so that quantization groups stay whole."""
    matrix = down.weight
    mine = shard.inner(matrix.shape[1])
    if isinstance(matrix, QuantizedMatrix) and matrix.order is not None:
        return matrix.order[mine.start : mine.stop]
    return torch.arange(mine.start, mine.stop)


def _linear(linear: Linear, tensor: LayerTensor, shard: ModelShard, inner: torch.Tensor | None) -> Linear:
    (inputs, *_), bias = tensor.inputs, linear.bias
    weight: Matrix = linear.weight
    if inputs.share is not Share.WHOLE:
        mine = shard.entries(inputs)
        weight = select_columns(weight, mine) if inputs.share is Share.INNER else select_inputs(weight, mine)
        return Linear.plain(weight, bias if shard.leads else None)
    rows = shard.indices(tensor.rows, inner)
    return Linear.plain(select_rows(weight, rows), None if bias is None else bias[rows])
