"""Layers of Gemma 4. Imports no torch.

    hidden += norm(attention(norm(hidden)))
    hidden += norm(mlp(norm(hidden)))                        or, with experts, norm(norm(mlp) + norm(experts))
    hidden += norm(projection(gelu(gate(hidden)) * per-layer input))        in models with per-layer inputs
    hidden *= layer_scalar

The last layers may share the KV of earlier ones, and have queries only.
"""

from __future__ import annotations

from dataclasses import replace

from pillion.engine.models.layer_operations import (
    AddToLayerSum,
    AddToResidual,
    ApplyTokenInputs,
    Attend,
    Entries,
    Experts,
    Layer,
    LayerTensor,
    Multiply,
    Norm,
    NormHeads,
    NormValues,
    Role,
    ScaleResidual,
    Share,
    matrix,
)
from pillion.engine.models.llama_layer import experts_of, gated, norm, output, rotation
from pillion.engine.models.model_config import ModelConfig


def gemma4_layer(config: ModelConfig, index: int) -> Layer:
    """Return the operations of layer ``index``."""
    writes = config.kv_source(index) == index
    factor = LayerTensor(
        name="layer_scalar", role=Role.VECTOR, rows=(Entries(1),), checkpoint_names=(("layer_scalar",),)
    )
    return (
        Norm(norm(config, "attention_norm", "input_layernorm")),
        Multiply(_projections(config, index, writes=writes)),
        NormHeads(_head_norms(config, index, writes=writes)),
        *([NormValues()] if writes else []),
        *rotation(config, index),
        Attend(config.sliding_windows[index]),
        Multiply(output(config, index)),
        AddToResidual(norm(config, "attention_post_norm", "post_attention_layernorm"), 1.0),
        Norm(norm(config, "mlp_norm", "pre_feedforward_layernorm")),
        gated(config, index),
        *(_add_experts(config) if config.moe is not None else ()),
        AddToResidual(norm(config, "mlp_post_norm", "post_feedforward_layernorm"), 1.0),
        *(_token_inputs(config, config.token_inputs.width) if config.token_inputs is not None else ()),
        ScaleResidual(factor),
    )


def _projections(config: ModelConfig, index: int, *, writes: bool) -> LayerTensor:
    """Return the qkv matrix; queries only unless the layer ``writes`` its own KV. If values are keys before their norm,
    it has the key rows twice."""
    heads = config.heads_of(index)
    size, keys = heads.head_dim, Entries(heads.kv_heads * heads.head_dim, Share.KV_HEADS, heads.head_dim)
    values = "self_attn.k_proj" if config.values_are_keys and not config.sliding_windows[index] else "self_attn.v_proj"
    names = "self_attn.q_proj", "self_attn.k_proj", values
    rows = Entries(config.num_heads * size, Share.HEADS, size), keys, keys
    num_tensors = 3 if writes else 1
    return matrix("qkv", rows[:num_tensors], (Entries(config.hidden_size),), names[:num_tensors], bias=config.qkv_bias)


def _head_norms(config: ModelConfig, index: int, *, writes: bool) -> LayerTensor:
    """Return the norms of query heads and, if the layer ``writes`` its own KV, of key heads."""
    heads, num_tensors = config.heads_of(index), 2 if writes else 1
    rows = Entries(config.num_heads, Share.HEADS), Entries(heads.kv_heads, Share.KV_HEADS)
    names = "self_attn.q_norm", "self_attn.k_norm"
    entries = (Entries(heads.head_dim, head=heads.head_dim),)
    return LayerTensor(
        name="qk_norm",
        role=Role.HEAD_NORM,
        rows=rows[:num_tensors],
        inputs=entries,
        checkpoint_names=(names[:num_tensors],),
    )


def _add_experts(config: ModelConfig) -> Layer:
    """Return the operations from the dense MLP's output to its sum with the experts'."""
    return (
        AddToLayerSum(norm(config, "mlp_branch_norm", "post_feedforward_layernorm_1")),
        Norm(norm(config, "experts_norm", "pre_feedforward_layernorm_2")),
        _experts(config),
        AddToLayerSum(norm(config, "experts_branch_norm", "post_feedforward_layernorm_2")),
    )


def _experts(config: ModelConfig) -> Experts:
    """Return the experts, whose router reads the residual stream with its own norm."""
    experts, hidden = experts_of(config), Entries(config.hidden_size)
    scale = LayerTensor(
        name="router_norm",
        role=Role.NORM,
        rows=(hidden,),
        checkpoint_names=(("router.scale",),),
        suffix="",
        factor=config.hidden_size**-0.5,
    )
    return replace(
        experts,
        router=replace(experts.router, checkpoint_names=(("router.proj",),)),
        gate_up=replace(experts.gate_up, checkpoint_names=(), stacked=("experts.gate_up_proj",)),
        down=replace(experts.down, checkpoint_names=(), stacked=("experts.down_proj",)),
        router_norm=scale,
        expert_scales=LayerTensor(
            name="expert_scales",
            role=Role.EXACT_VECTOR,
            rows=experts.router.rows,
            checkpoint_names=(("router.per_expert_scale",),),
        ),
    )


def _token_inputs(config: ModelConfig, width: int) -> Layer:
    """Return the operations that apply the per-layer token inputs."""
    hidden, inner = (Entries(config.hidden_size),), (Entries(width),)
    gate, projection = (
        LayerTensor(name=name, role=Role.MATRIX, rows=rows, inputs=inputs, checkpoint_names=((checkpoint_name,),))
        for name, rows, inputs, checkpoint_name in (
            ("input_gate", inner, hidden, "per_layer_input_gate"),
            ("input_projection", hidden, inner, "per_layer_projection"),
        )
    )
    return (
        Norm(None),
        ApplyTokenInputs(gate, projection, config.activation),
        AddToResidual(norm(config, "input_post_norm", "post_per_layer_input_norm"), 1.0),
    )
