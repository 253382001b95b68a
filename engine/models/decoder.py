"""The forward pass of every model: one decoder over a paged pool, with the options of its config.

    hidden = embedding * embedding_scale
    each layer:  hidden += residual_scale * post_norm(o(attention(pre_norm(hidden))))
                 hidden += residual_scale * post_norm(mlp(pre_norm(hidden)))      (mlp: dense or mixture of experts)
    logits = soft_cap(lm_head(final_norm(hidden)) / logit_divisor)

A norm that a model does not have is None in its weights; scales of 1 and caps of 0 are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.engine.models.layers import GatedMLP, MoeWeights, RmsNorm, soft_cap
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rope import CosSin, Rope, rotate
from pillion.kernels.torch.torch_attention import StepAttention
from pillion.kernels.torch.torch_linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights. ``qkv`` stacks queries, keys, values in its output. A norm the model does not have is None.

    Queries and keys are normed either together, head by head (``qk_norm``, whose weight is [heads + kv_heads,
    head_dim]), or each over its whole projection (``q_norm``, ``k_norm``).
    """

    attention_norm: RmsNorm | None
    qkv: Linear
    qk_norm: RmsNorm | None
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: Linear
    attention_post_norm: RmsNorm | None
    mlp_norm: RmsNorm | None
    mlp: GatedMLP | MoeWeights
    mlp_post_norm: RmsNorm | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's weights. ``embedding`` is [vocab, hidden]; a model with tied weights has it as ``lm_head``, too.

    ``embedding_scale`` is rounded to the type of the weights, as transformers rounds it.
    """

    embedding: torch.Tensor
    embedding_scale: float
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm
    lm_head: Linear


class RowAdapters(Protocol):
    """What a step's rows add to the outputs of linear layers, by the names of
    :class:`pillion.engine.adapters.adapter_weights.AdapterWeights`."""

    def of_rows(self, rows: torch.Tensor) -> RowAdapters: ...
    def add(self, layer: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None: ...


def run_decoder(
    config: ModelConfig,
    weights: ModelWeights,
    ropes: Sequence[Rope],
    attention: StepAttention,
    token_ids: torch.Tensor,
    rope_rows: torch.Tensor,
    sample_rows: torch.Tensor,
    adapters: RowAdapters | None = None,
    states: dict[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Runs T tokens, with their adapters where any has one, and writes their KV. ``states`` gets the inputs [T, hidden]
    of the layers that are its keys.

    Takes token_ids and rope_rows [T], which are rows of the rotary tables, and sample_rows [R] (all int64); returns
    float32 logits [R, vocab]. The last layer computes only what is needed: sampled rows, or nothing but its KV where no
    row is sampled.
    """
    hidden = weights.embedding[token_ids]
    if weights.embedding_scale != 1.0:
        hidden = hidden * weights.embedding_scale
    tables = [rope.tables(rope_rows, hidden.dtype) for rope in ropes]
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        rope = config.layer_ropes[index]
        if states is not None and index in states:
            states[index] = hidden
        queries, keys, values = project(config, index, layer, hidden, None if rope is None else tables[rope], adapters)
        attention.write(index, keys, values)
        if index == last and not len(sample_rows):
            return torch.empty((0, config.vocab_size), dtype=torch.float32)
        attended = attention.attend(index, queries, config.sliding_windows[index])
        if index == last:
            attended, hidden = attended[sample_rows], hidden[sample_rows]
            adapters = None if adapters is None else adapters.of_rows(sample_rows)
        hidden = _add(
            config, hidden, _linear(layer.o, f"layers.{index}.o", attended, adapters), layer.attention_post_norm
        )
        hidden = _add(
            config, hidden, _mlp(layer.mlp, index, _normed(hidden, layer.mlp_norm), adapters), layer.mlp_post_norm
        )
    return _logits(config, weights, hidden)


def _linear(layer: Linear, name: str, rows: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
    """rows [T, in] -> [T, out], with what their adapters add."""
    outputs = layer(rows)
    if adapters is not None:
        adapters.add(name, rows, outputs)
    return outputs


def _mlp(mlp: GatedMLP | MoeWeights, index: int, rows: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
    """rows [T, hidden] -> [T, hidden]; experts have no adapters."""
    if adapters is None or isinstance(mlp, MoeWeights):
        return mlp(rows)
    inner = mlp.gated(_linear(mlp.gate_up, f"layers.{index}.gate_up", rows, adapters))
    return _linear(mlp.down, f"layers.{index}.down", inner, adapters)


def project(
    config: ModelConfig,
    index: int,
    layer: LayerWeights,
    hidden: torch.Tensor,
    table: CosSin | None,
    adapters: RowAdapters | None,
) -> tuple[torch.Tensor, ...]:
    """hidden [T, H] -> queries [T, heads, D], keys and values [T, kv_heads, D]; queries and keys are rotated."""
    flat = _linear(layer.qkv, f"layers.{index}.qkv", _normed(hidden, layer.attention_norm), adapters)
    heads = flat.view(len(hidden), -1, config.head_dim)
    rotated = heads[:, : -config.num_kv_heads]
    if layer.qk_norm is not None:
        rotated = layer.qk_norm(rotated)
    elif layer.q_norm is not None and layer.k_norm is not None:
        queries, keys = rotated[:, : config.num_heads].flatten(1), rotated[:, config.num_heads :].flatten(1)
        rotated = torch.cat((layer.q_norm(queries), layer.k_norm(keys)), -1).view(rotated.shape)
    if table is not None:
        rotated = rotate(rotated, *table)
    return rotated[:, : config.num_heads], rotated[:, config.num_heads :], heads[:, -config.num_kv_heads :]


def _normed(hidden: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
    return hidden if norm is None else norm(hidden)


def _add(config: ModelConfig, hidden: torch.Tensor, found: torch.Tensor, post_norm: RmsNorm | None) -> torch.Tensor:
    """Adds the output of attention or MLP to the residual stream; all [T, H]."""
    return torch.add(hidden, _normed(found, post_norm), alpha=config.residual_scale)


def _logits(config: ModelConfig, weights: ModelWeights, hidden: torch.Tensor) -> torch.Tensor:
    logits = weights.lm_head(weights.final_norm(hidden)).float()
    if config.logit_divisor != 1.0:
        logits = logits.div_(config.logit_divisor)
    return soft_cap(logits, config.logit_softcap) if config.logit_softcap else logits
