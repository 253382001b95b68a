"""Loader of a decoder's weights from a checkpoint (:mod:`~pillion.engine.checkpoints.checkpoint`).

Tensors that are used as stored are views of the mapped file, whose pages all workers of a machine share; fused,
converted and packed tensors are private to the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import TensorSource, open_checkpoint
from pillion.engine.models.families import FAMILIES, layers_of
from pillion.engine.models.layer_operations import Entries, LayerTensor, Role, tensors_of
from pillion.engine.models.layer_weights import LayerWeights, ModelWeights, TokenInputWeights
from pillion.engine.models.layers import LayerNorm, RmsNorm
from pillion.engine.models.llama_layer import norm
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rope import partial_order
from pillion.kernels.torch.quantized_matrix import (
    GROUPED_ROWS,
    Matrix,
    QuantizedMatrix,
    plain,
    row_group_of,
    select_rows,
)
from pillion.kernels.torch.recurrences import Taps
from pillion.kernels.torch.torch_linear import Linear

# Values of --dtype, resolved -> torch types.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MakeLinear = Callable[[Matrix, torch.Tensor | None], Linear]


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Load all weights for torch, with fused matrices, dequantized. Raises ConfigError for tensors that do not fit the
    config."""

    def linear(weight: Matrix, bias: torch.Tensor | None) -> Linear:
        return Linear(plain(weight, dtype), bias, row_group=row_group_of([weight]))

    with open_checkpoint(folder, config) as checkpoint:
        embedding = checkpoint.load("embedding", dtype)
        return ModelWeights(
            embedding=embedding,
            embedding_scale=embedding_scale(config, dtype),
            operations=layers_of(config),
            layers=tuple(load_layer(checkpoint, config, dtype, index, linear) for index in range(config.num_layers)),
            final_norm=load_final_norm(checkpoint, config, dtype),
            positions=load_positions(checkpoint, config, dtype),
            lm_head=linear(load_head(checkpoint, config, dtype, embedding), None),
            token_inputs=load_token_inputs(checkpoint, config, dtype),
        )


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the config's embedding scale, rounded to the type of the weights as transformers does."""
    return rounded(config.embedding_scale, dtype)


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Return ``factor`` rounded to ``dtype``."""
    return float(torch.tensor(factor, dtype=dtype))


def load_final_norm(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype) -> RmsNorm | LayerNorm:
    return _norm(checkpoint, config, dtype, "", norm(config, "final_norm", "norm"))


def load_head(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, embedding: torch.Tensor) -> Matrix:
    """Load the LM head; if the checkpoint has none, or an equal one, return the embedding, quantized if it is stored
    so."""
    if not checkpoint.has("lm_head"):
        tied = checkpoint.load_matrix("embedding", dtype)
        return _without_row_codes(tied) if isinstance(tied, QuantizedMatrix) else embedding
    head = _without_row_codes(checkpoint.load_matrix("lm_head", dtype))
    is_embedding = config.tie_word_embeddings and isinstance(head, torch.Tensor) and torch.equal(head, embedding)
    return embedding if is_embedding else head


def _without_row_codes(head: Matrix) -> Matrix:
    """Return the LM head without grouped input quantization, whose errors would go directly into the logits."""
    if isinstance(head, QuantizedMatrix) and head.row_codes == GROUPED_ROWS:
        return replace(head, row_codes="")
    return head


def load_positions(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype) -> torch.Tensor | None:
    """Load the learned position embeddings [positions, hidden]; None for a model without them."""
    first = FAMILIES[config.family].first_position
    return None if first is None else checkpoint.load("positions", dtype)[first:]


def load_token_inputs(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype) -> TokenInputWeights | None:
    """Load the weights of per-layer token inputs (Gemma 4); None for a model without them."""
    if config.token_inputs is None:
        return None
    embedding, projection = (checkpoint.load(f"token_inputs.{part}", dtype) for part in ("embedding", "projection"))
    weight = checkpoint.load("token_inputs.norm", torch.float32)
    return TokenInputWeights(embedding, projection, RmsNorm(weight, config.rms_norm_eps, wide=True))


def load_labels(folder: Path, config: ModelConfig) -> torch.Tensor | None:
    """Load a classifier's score matrix, float32 [labels, hidden]; None for other models. Raises ConfigError for a
    tensor that does not fit the config or is not finite."""
    if not config.labels:
        return None
    with open_checkpoint(folder, config) as checkpoint:
        return checkpoint.load("score", torch.float32).clone()


def load_layer(
    checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, index: int, linear: MakeLinear
) -> LayerWeights:
    """Load one layer; ``linear`` makes a linear layer from a matrix and its bias."""
    prefix, weights = f"layers.{index}.", LayerWeights()
    for tensor in tensors_of(layers_of(config)[index]):
        key = prefix + tensor.name
        match tensor.role:
            case Role.NORM | Role.HEAD_NORM:
                weights[tensor.name] = _norm(checkpoint, config, dtype, prefix, tensor)
            case Role.MATRIX if tensor.experts:
                group, _, name = tensor.name.partition(".")
                keys = [f"{prefix}{group}.{number}.{name}" for number in range(tensor.experts)]
                matrices = _unify_row_codes([_matrix(checkpoint, dtype, key, tensor) for key in keys])
                biases = [_bias(checkpoint, dtype, key, tensor) for key in keys]
                weights[tensor.name] = tuple(map(linear, matrices, biases))
            case Role.MATRIX:
                weights[tensor.name] = _linear(checkpoint, dtype, key, tensor, linear)
            case Role.EXACT_MATRIX | Role.HEAD_MATRICES | Role.VECTOR:
                weights[tensor.name] = checkpoint.load(key, dtype)
            case Role.EXACT_VECTOR if tensor.optional and not checkpoint.has(key):
                weights[tensor.name] = torch.zeros(tensor.shape)
            case Role.EXACT_VECTOR:
                weights[tensor.name] = checkpoint.load(key, torch.float32).view(tensor.shape)
            case Role.TAPS:
                bias = checkpoint.load(f"{key}.bias", torch.float32) if tensor.bias else None
                weights[tensor.name] = Taps(checkpoint.load(key, torch.float32)[:, 0], bias)
    return weights


def _norm(
    checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, prefix: str, tensor: LayerTensor
) -> RmsNorm | LayerNorm:
    """Load a norm: its weight in ``dtype`` for "plain" norms, else in float32; for "offset" norms plus 1."""
    key = prefix + tensor.name
    kind = dtype if config.norm == "plain" else torch.float32
    shape = (len(tensor.rows), *tensor.shape[1:]) if tensor.role is Role.HEAD_NORM else tensor.shape
    weight = in_order(checkpoint.load(key, kind) if tensor.checkpoint_names else torch.ones(shape, dtype=kind), tensor)
    if config.norm == "offset":
        weight = weight + 1.0
    if tensor.factor != 1.0:
        weight = weight * tensor.factor
    eps, layer_norm = tensor.eps or config.rms_norm_eps, config.norm == "layer" or tensor.centered
    if not layer_norm or (tensor.role is Role.HEAD_NORM and not tensor.by_head):
        return RmsNorm(weight, eps, config.norm != "plain")
    bias = in_order(checkpoint.load(f"{key}.bias", dtype).float(), tensor) if tensor.bias else None
    return LayerNorm(weight.float(), eps, bias)


def _linear(checkpoint: TensorSource, dtype: torch.dtype, key: str, tensor: LayerTensor, linear: MakeLinear) -> Linear:
    """Load a linear layer, with its rows in the order of :func:`row_order`."""
    return linear(_matrix(checkpoint, dtype, key + ".weight", tensor), _bias(checkpoint, dtype, key, tensor))


def _matrix(checkpoint: TensorSource, dtype: torch.dtype, key: str, tensor: LayerTensor) -> Matrix:
    weight, order = checkpoint.load_matrix(key, dtype), row_order(tensor)
    if tensor.padded:
        weight = _padded(_padded(plain(weight, dtype), tensor.rows, 0), tensor.inputs, 1)
    weight = weight if order is None else select_rows(weight, order)
    if not tensor.scales:
        return weight
    floats = plain(weight, torch.float32)
    parts = zip(tensor.rows, tensor.scales, strict=True)
    factors = torch.cat([torch.full((row.size, 1), by, device=floats.device) for row, by in parts])
    return (floats * factors).to(dtype)


def _bias(checkpoint: TensorSource, dtype: torch.dtype, key: str, tensor: LayerTensor) -> torch.Tensor | None:
    if not tensor.bias:
        return None
    bias, order = _padded(checkpoint.load(f"{key}.bias", dtype), tensor.rows, 0), row_order(tensor)
    return bias if order is None else bias[order]


def _padded(values: torch.Tensor, pieces: Sequence[Entries], dimension: int) -> torch.Tensor:
    """Return a tensor with zeros, along ``dimension``, for the entries of heads that checkpoints lack."""
    if not any(piece.stored for piece in pieces):
        return values
    entries = [
        torch.arange(piece.size).view(-1, piece.head)[:, : piece.stored or piece.head].reshape(-1) + first
        for piece, first in _placed(pieces)
    ]
    shape = [*values.shape]
    shape[dimension] = sum(piece.size for piece in pieces)
    return values.new_zeros(shape).index_copy_(dimension, torch.cat(entries).to(values.device), values)


def row_order(tensor: LayerTensor) -> torch.Tensor | None:
    """Return for each row of a tensor the index of its row in the checkpoint; None if the orders are equal. Rotated
    heads are in the order of :func:`pillion.engine.models.rope.partial_order`."""
    if tensor.alternating:
        return torch.arange(tensor.shape[0]).view(-1, 2).t().reshape(-1)
    if tensor.gated:
        return _gates_first(tensor)
    if tensor.groups:
        return _ungrouped(tensor.rows, tensor.groups)
    if not any(piece.rotated for piece in tensor.rows):
        return None
    return torch.cat([_head_order(piece) + first for piece, first in _placed(tensor.rows)])


def _gates_first(tensor: LayerTensor) -> torch.Tensor:
    """Return the indices of rows in the checkpoint, where gates alternate with queries by head: of all gates, then of
    the queries, then of the other pieces."""
    gates, queries, *other_pieces = tensor.rows
    pairs = torch.arange(gates.size + queries.size).view(-1, 2, queries.head)
    ordered = pairs[:, 0].reshape(-1)[_head_order(queries)]
    other_rows = [_head_order(piece) + first + pairs.numel() for piece, first in _placed(other_pieces)]
    return torch.cat((pairs[:, 1].reshape(-1), ordered, *other_rows))


def _ungrouped(pieces: Sequence[Entries], count: int) -> torch.Tensor:
    """Return the indices of rows in the checkpoint, which has ``count`` groups with a part of each piece: of the first
    piece, then of the second ..."""
    groups = torch.arange(sum(piece.size for piece in pieces)).view(count, -1)
    widths = [piece.size // count for piece in pieces]
    return torch.cat([part.reshape(-1) for part in torch.split(groups, widths, 1)])


def in_order(weight: torch.Tensor, tensor: LayerTensor) -> torch.Tensor:
    """Return a norm's weight in the decoder's order; for Role.HEAD_NORM, with a row per head."""
    if tensor.role is Role.HEAD_NORM:
        (entries,) = tensor.inputs
        rows = weight.view(-1, entries.size)
        rows = rows[:, _head_order(entries)] if entries.rotated else rows
        if tensor.by_head:
            return rows
        return torch.cat([row.expand(piece.size, -1) for row, piece in zip(rows, tensor.rows, strict=True)])
    order = row_order(tensor)
    return weight if order is None else weight[order]


def output_orders(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return, by the name of a linear layer ("qkv"), the index in the checkpoint of each of its outputs, if the orders
    differ. The order is the same in all layers of a model."""
    tensors = {tensor.name: tensor for layer in layers_of(config) for tensor in tensors_of(layer)}
    matrices = [tensor for tensor in tensors.values() if tensor.role is Role.MATRIX]
    orders = {tensor.name: row_order(tensor) for tensor in matrices}
    return {name: order for name, order in orders.items() if order is not None}


def _head_order(piece: Entries) -> torch.Tensor:
    """Return for each entry of a piece the index of its entry in the checkpoint, which may rotate heads in another
    order."""
    entries = torch.arange(piece.size)
    if not piece.rotated:
        return entries
    order = partial_order(piece.head - piece.rotated_start, piece.rotated, piece.interleaved) + piece.rotated_start
    return entries.view(-1, piece.head)[:, torch.cat((torch.arange(piece.rotated_start), order))].reshape(-1)


def _placed(pieces: Sequence[Entries]) -> Iterator[tuple[Entries, int]]:
    """Yield each piece and the index of its first entry in the tensor."""
    first = 0
    for piece in pieces:
        yield piece, first
        first += piece.size


def _unify_row_codes(experts: list[Matrix]) -> Iterator[Matrix]:
    """Yield the matrices of a layer's experts and remove them from the list. If not all of them quantize inputs, none
    of those yielded does."""
    quantizes_inputs = row_group_of(experts)
    experts.reverse()
    while experts:
        matrix = experts.pop()
        if isinstance(matrix, QuantizedMatrix) and not quantizes_inputs:
            matrix = replace(matrix, row_codes="")
        yield matrix
