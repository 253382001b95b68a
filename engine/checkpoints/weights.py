"""Makes a decoder's weights from a prepared folder, whose tensors :mod:`pillion.engine.checkpoints.checkpoint` names.

Tensors that need no change are views of the mapped file, whose pages all workers of a machine share; fused, converted
and packed tensors belong to this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import TensorSource, open_checkpoint
from pillion.engine.models.decoder import LayerWeights, ModelWeights
from pillion.engine.models.layers import GATED, GatedMLP, MoeWeights, RmsNorm
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rope import partial_order
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, plain, row_codes_of, select_rows
from pillion.kernels.torch.torch_linear import Linear

# Types of arithmetic and KV, by their names in flags and layouts.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Makes a linear layer of a matrix [out, in] and its bias [out].
MakeLinear = Callable[[Matrix, torch.Tensor | None], Linear]


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Loads and fuses all weights for torch, which widens matrices in few bits. Raises ConfigError for tensors that do
    not fit the config."""

    def linear(weight: Matrix, bias: torch.Tensor | None) -> Linear:
        return Linear(plain(weight, dtype), bias, row_codes=row_codes_of([weight]))

    with open_checkpoint(folder, config) as checkpoint:
        embedding = checkpoint.take("embedding", dtype)
        return ModelWeights(
            embedding=embedding,
            embedding_scale=embedding_scale(config, dtype),
            layers=tuple(load_layer(checkpoint, config, dtype, index, linear) for index in range(config.num_layers)),
            final_norm=load_final_norm(checkpoint, config, dtype),
            lm_head=linear(load_head(checkpoint, config, dtype, embedding), None),
        )


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Returns the config's scale of embeddings, rounded to the type of the weights as transformers rounds it."""
    return float(torch.tensor(config.embedding_scale, dtype=dtype))


def load_final_norm(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype) -> RmsNorm:
    return RmsNorm(_norm_weight(checkpoint, config, dtype, "final_norm"), config.rms_norm_eps, config.norm != "plain")


def load_head(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, embedding: torch.Tensor) -> Matrix:
    """Loads the head: the embedding if the model ties the two and the checkpoint holds no other head. Where the
    checkpoint has the embedding in few bits, a tied head stays in these."""
    if not checkpoint.has("lm_head"):
        tied = checkpoint.take_matrix("embedding", dtype)
        return tied if isinstance(tied, QuantizedMatrix) else embedding
    head = checkpoint.take_matrix("lm_head", dtype)
    same = config.tie_word_embeddings and isinstance(head, torch.Tensor) and torch.equal(head, embedding)
    return embedding if same else head


def load_layer(
    checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, index: int, linear: MakeLinear
) -> LayerWeights:
    """Loads one layer, whose matrices ``linear`` makes."""
    prefix = f"layers.{index}."

    def norm(key: str) -> RmsNorm | None:
        if not checkpoint.has(prefix + key):
            return None
        weight = _norm_weight(checkpoint, config, dtype, prefix + key)
        return RmsNorm(weight, config.rms_norm_eps, config.norm != "plain")

    q_norm, k_norm = norm("q_norm"), norm("k_norm")
    qk_norm = None
    if config.qk_norm == "head" and q_norm is not None and k_norm is not None:
        query_weight = q_norm.weight.expand(config.num_heads, -1)
        key_weight = k_norm.weight.expand(config.num_kv_heads, -1)
        qk_norm = RmsNorm(torch.cat((query_weight, key_weight)), config.rms_norm_eps, q_norm.wide)
        q_norm = k_norm = None
    return LayerWeights(
        attention_norm=norm("attention_norm"),
        qkv=_qkv(checkpoint, config, dtype, prefix, linear),
        qk_norm=qk_norm,
        q_norm=q_norm,
        k_norm=k_norm,
        o=_linear(checkpoint, dtype, prefix + "o", linear),
        attention_post_norm=norm("attention_post_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=_moe(checkpoint, config, dtype, prefix, linear)
        if checkpoint.has(prefix + "router")
        else GatedMLP(
            _linear(checkpoint, dtype, prefix + "mlp.gate_up", linear),
            _linear(checkpoint, dtype, prefix + "mlp.down", linear),
            GATED[config.activation],
        ),
        mlp_post_norm=norm("mlp_post_norm"),
    )


def _norm_weight(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, key: str) -> torch.Tensor:
    """Loads a norm's weight: in the model's type for plain norms, else in float32. Gemma's 1 + w is summed up here."""
    weight = checkpoint.take(key, dtype)
    if config.norm == "plain":
        return weight
    return weight.float() + 1.0 if config.norm == "offset" else weight.float()


def _linear(checkpoint: TensorSource, dtype: torch.dtype, key: str, linear: MakeLinear) -> Linear:
    bias = checkpoint.take(key + ".bias", dtype) if checkpoint.has(key + ".bias") else None
    return linear(checkpoint.take_matrix(key + ".weight", dtype), bias)


def qkv_order(config: ModelConfig) -> torch.Tensor | None:
    """Returns the checkpoint's row of each row of the fused projection; None where both have one order.

    For partial rotation, the values of each query's and key's head are put in the order of ``partial_order``.
    """
    rotary_dim = config.ropes[0].rotary_dim
    if rotary_dim == config.head_dim:
        return None
    rotated = config.num_heads + config.num_kv_heads
    order = partial_order(config.head_dim, rotary_dim)
    rows = torch.arange((rotated + config.num_kv_heads) * config.head_dim).view(-1, config.head_dim)
    return torch.cat((rows[:rotated, order], rows[rotated:])).view(-1)


def _qkv(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, prefix: str, linear: MakeLinear) -> Linear:
    """Loads the fused projection, in the order of :func:`qkv_order`."""
    reordered = qkv_order(config)
    if reordered is None:
        return _linear(checkpoint, dtype, prefix + "qkv", linear)
    key = prefix + "qkv."
    bias = checkpoint.take(key + "bias", dtype)[reordered] if checkpoint.has(key + "bias") else None
    return linear(select_rows(checkpoint.take_matrix(key + "weight", dtype), reordered), bias)


def _moe(
    checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, prefix: str, linear: MakeLinear
) -> MoeWeights:
    assert config.moe is not None
    count = config.moe.num_experts

    def taken(key: str) -> Iterator[Matrix]:
        return _rounded_alike(
            [checkpoint.take_matrix(f"{prefix}experts.{index}.{key}", dtype) for index in range(count)]
        )

    return MoeWeights(
        router=checkpoint.take(prefix + "router", dtype),
        experts=tuple(
            GatedMLP(linear(gate_up, None), linear(down, None), GATED[config.activation])
            for gate_up, down in zip(taken("gate_up"), taken("down"), strict=True)
        ),
        experts_per_token=config.moe.experts_per_token,
        normalize=config.moe.normalize,
    )


def _rounded_alike(experts: list[Matrix]) -> Iterator[Matrix]:
    """Yields and forgets the matrices of a layer's experts, without row codes unless those of all are the same.

    A step rounds the rows of all experts in one way, and a wider scale than an expert's own would cost it accuracy.
    """
    codes = {matrix.row_codes if isinstance(matrix, QuantizedMatrix) else None for matrix in experts}
    experts.reverse()
    while experts:
        matrix = experts.pop()
        if isinstance(matrix, QuantizedMatrix) and len(codes) > 1:
            matrix = replace(matrix, row_codes=None)
        yield matrix
