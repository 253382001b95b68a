"""Layers with a state instead of attention: convolutions (LFM2), gated delta nets (Qwen3-Next), also with decay per row
(Kimi-Linear), and state spaces (Mamba-2, and Mamba-1 in Jamba). Imports no torch.

    hybrid_layer      Llama's layer, with another mixer in some layers
    falcon_h1_layer   state space and attention in parallel
    nemotron_h_layer  a single state space, attention, MLP or mixture
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pillion.engine.models.layer_operations import (
    AddToResidual,
    Again,
    Attend,
    DeltaRule,
    Entries,
    Keep,
    Layer,
    LayerOperation,
    LayerTensor,
    Mlp,
    Multiply,
    Norm,
    Role,
    SelectiveScan,
    Share,
    ShortConvolution,
    StateSpace,
    matrix,
)
from pillion.engine.models.llama_layer import ExpertNames, Norms, experts_of, llama_layer, norm, not_gated, output, qkv
from pillion.engine.models.model_config import LinearConfig, ModelConfig

Mixer = Callable[[ModelConfig, LinearConfig], Layer]


def hybrid_layer(
    config: ModelConfig,
    index: int,
    *,
    mixer: Mixer,
    linear_norms: Norms | None = None,
    **options: Any,
) -> Layer:
    """Return the operations of layer ``index``: those of :func:`llama_layer` with its ``options``; in a layer with a
    state, with ``mixer`` instead of attention, and with ``linear_norms``."""
    linear = config.linear
    if linear is None or not linear.layers[index]:
        return llama_layer(config, index, **options)
    if linear_norms is not None:
        options = {**options, "norms": linear_norms}
    return llama_layer(config, index, **options, mixer=mixer(config, linear))


def short_convolution(config: ModelConfig, linear: LinearConfig) -> Layer:
    """Return LFM2's convolution."""
    part, hidden = Entries(config.hidden_size, Share.CHANNELS), (Entries(config.hidden_size),)
    return (
        Multiply(matrix("conv.in", (part, part, part), hidden, ("conv.in_proj",), bias=linear.bias)),
        ShortConvolution(_taps((part,), linear, ("conv.conv",))),
        Multiply(matrix("conv.out", hidden, (part,), ("conv.out_proj",), bias=linear.bias)),
    )


def delta_net(config: ModelConfig, linear: LinearConfig, *, checkpoint_names: str = "apart") -> Layer:
    """Return a gated delta net. ``checkpoint_names``: tensors in checkpoints, "fused" by groups of keys (Qwen3-Next),
    "apart" (Qwen3.5), or one for each part ("each", OLMo-Hybrid)."""
    hidden, one, values = (Entries(config.hidden_size),), (_of_heads(linear, 1),), _of_heads(linear, linear.head_dim)
    keys, held = _of_keys(linear), replace(values, convolved=True)
    mixed, gates, rates = {
        "fused": ((), (), ()),
        "apart": (("in_proj_qkv",), ("in_proj_z",), ("in_proj_b", "in_proj_a")),
        "each": (("q_proj", "k_proj", "v_proj"), ("g_proj",), ("b_proj", "a_proj")),
    }[checkpoint_names]
    inputs = matrix("linear.in", (keys, keys, held, values), hidden, _own(*mixed, *gates))
    rated = matrix("linear.rates", (*one, *one), hidden, _own(*rates))
    if checkpoint_names == "fused":
        inputs = replace(inputs, checkpoint_names=(_own("in_proj_qkvz"),), groups=linear.key_heads)
        rated = replace(rated, checkpoint_names=(_own("in_proj_ba"),), groups=linear.key_heads)
    of_heads, out, eps = "norm", "out_proj", config.rms_norm_eps
    if checkpoint_names == "each":
        of_heads, out, eps = "o_norm", "o_proj", 1e-5
    return (
        DeltaRule(
            inputs=inputs,
            rates=rated,
            taps=replace(
                _taps((keys, keys, held), linear, _own("conv1d")),
                checkpoint_names=(_own("conv1d"), _own("q_conv1d", "k_conv1d", "v_conv1d")),
            ),
            decay=_vector("linear.decay", one, _own("A_log")),
            shift=_vector("linear.shift", one, _own("dt_bias")),
            norm=_vector("linear.norm", (Entries(linear.head_dim),), _own(f"{of_heads}.weight")),
            eps=eps,
            key_heads=linear.key_heads,
            heads=linear.heads,
            key_dim=linear.key_dim,
            head_dim=linear.head_dim,
            doubled=linear.doubled,
        ),
        Multiply(matrix("linear.out", hidden, (values,), _own(out))),
    )


def delta_attention(config: ModelConfig, linear: LinearConfig) -> Layer:
    """Return Kimi-Linear's gated delta net (KDA, arXiv 2510.26692): a decay per row of a head's matrix, and low-rank
    projections of decays and gates."""
    hidden, one, values = (Entries(config.hidden_size),), (_of_heads(linear, 1),), _of_heads(linear, linear.head_dim)
    few, keys, held = (Entries(linear.head_dim),), _of_keys(linear), replace(values, convolved=True)
    apart, out = delta_net(config, linear, checkpoint_names="each")
    assert isinstance(apart, DeltaRule)
    assert isinstance(out, Multiply)
    rule = replace(
        apart,
        inputs=matrix("linear.in", (keys, keys, held), hidden, _own("q_proj", "k_proj", "v_proj")),
        rates=matrix("linear.rates", one, hidden, _own("b_proj")),
        decay=replace(apart.decay, ones=(2, 1)),
        shift=replace(apart.shift, rows=(values,)),
        eps=config.rms_norm_eps,
        forget_down=matrix("linear.forget_down", few, hidden, _own("f_a_proj")),
        forget_up=matrix("linear.forget_up", (values,), few, _own("f_b_proj")),
        gate_down=matrix("linear.gate_down", few, hidden, _own("g_a_proj")),
        gate_up=matrix("linear.gate_up", (values,), few, _own("g_b_proj")),
    )
    return rule, out


def state_space(config: ModelConfig, linear: LinearConfig) -> Layer:
    """Return a state space of Mamba-2, with Granite's names."""
    hidden, one, values = (Entries(config.hidden_size),), (_of_heads(linear, 1),), _of_heads(linear, linear.head_dim)
    sides = _of_keys(linear)
    parts = values, replace(values, convolved=True), sides, sides, *one
    return (
        StateSpace(
            inputs=matrix("linear.in", parts, hidden, ("mamba.in_proj",), bias=linear.bias),
            taps=_taps(parts[1:4], linear, ("mamba.conv1d",)),
            decay=_vector("linear.decay", one, ("mamba.A_log",)),
            shift=_vector("linear.shift", one, ("mamba.dt_bias",)),
            skip=_vector("linear.skip", one, ("mamba.D",)),
            norm=_vector("linear.norm", (values,), ("mamba.norm.weight",)) if linear.normed else None,
            eps=config.rms_norm_eps,
            heads=linear.heads,
            head_dim=linear.head_dim,
            groups=linear.key_heads,
            state_dim=linear.key_dim,
            gate_first=linear.gate_first,
        ),
        Multiply(matrix("linear.out", hidden, (values,), ("mamba.out_proj",), bias=linear.bias)),
    )


def selective_scan(config: ModelConfig, linear: LinearConfig) -> Layer:
    """Return a state space of Mamba-1, with Jamba's names, and its norms of time steps, writes and reads."""
    hidden, values = (Entries(config.hidden_size),), _of_heads(linear, linear.head_dim)
    few, side, held = Entries(linear.step_rank), Entries(linear.key_dim), replace(values, convolved=True)
    norms = (
        LayerTensor(name=f"linear.{part}_norm", role=Role.NORM, rows=(rows,), checkpoint_names=((f"mamba.{name}",),))
        for part, rows, name in (
            ("step", few, "dt_layernorm"),
            ("write", side, "b_layernorm"),
            ("read", side, "c_layernorm"),
        )
    )
    step_norm, write_norm, read_norm = norms
    return (
        SelectiveScan(
            inputs=matrix("linear.in", (held, values), hidden, ("mamba.in_proj",), bias=linear.bias),
            taps=_taps((held,), linear, ("mamba.conv1d",)),
            sides=matrix("linear.sides", (few, side, side), (values,), ("mamba.x_proj",)),
            step_norm=step_norm,
            write_norm=write_norm,
            read_norm=read_norm,
            steps=matrix("linear.steps", (values,), (few,), ("mamba.dt_proj",), bias=True),
            decay=replace(_vector("linear.decay", (values,), ("mamba.A_log",)), inputs=(side,)),
            skip=_vector("linear.skip", (values,), ("mamba.D",)),
            heads=linear.heads,
            head_dim=linear.head_dim,
            state_dim=linear.key_dim,
        ),
        Multiply(matrix("linear.out", hidden, (values,), ("mamba.out_proj",), bias=linear.bias)),
    )


def falcon_h1_layer(config: ModelConfig, index: int) -> Layer:
    """Return a layer of Falcon-H1: a state space and attention read the same normed rows, and both are added to the
    residual stream."""
    linear = config.linear
    assert linear is not None
    scales = linear.scales
    assert scales is not None
    space, out = state_space(config, linear)
    assert isinstance(space, StateSpace)
    assert isinstance(out, Multiply)
    normed, *rest = llama_layer(config, index, norms=("input_layernorm", "", "pre_ff_layernorm", ""))
    of_attention, of_keys, of_results = scales.attention
    factors = {"qkv": (of_attention, of_attention * of_keys, of_attention), "o": (of_results,)}
    layer: list[LayerOperation] = []
    for operation in rest:
        match operation:
            case Multiply(matrix=own):
                operation = Multiply(replace(own, scales=factors[own.name]))
            case Mlp(gate_up=gate_up, down=down):
                gate, result = scales.mlp
                gate_up, down = replace(gate_up, scales=(gate, 1.0)), replace(down, scales=(result,))
                operation = replace(operation, gate_up=gate_up, down=down)
        layer.append(operation)
    space = replace(space, inputs=replace(space.inputs, scales=scales.inputs))
    out = Multiply(replace(out.matrix, scales=(scales.outputs,)))
    return (normed, Keep(), space, out, AddToResidual(None, config.residual_scale), Again(), *layer)


def nemotron_h_layer(config: ModelConfig, index: int) -> Layer:
    """Return a layer of Nemotron-H: a single state space, attention, MLP or mixture of experts."""
    linear = config.linear
    assert linear is not None
    before, add = Norm(norm(config, "norm", "input_layernorm")), AddToResidual(None, config.residual_scale)
    if linear.layers[index]:
        return (before, *state_space(config, linear), add)
    if linear.attends[index]:
        return before, Multiply(qkv(config)), Attend(0), Multiply(output(config)), add
    if config.moe is None or not config.moe.layers[index]:
        return before, not_gated(config, ("mlp.up_proj", "mlp.down_proj")), add
    names, wide = ("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"), config.moe.shared
    beside = not_gated(replace(config, intermediate_size=wide), names)
    beside = replace(beside, gate_up=replace(beside.gate_up, name="shared.up"))
    beside = replace(beside, down=replace(beside.down, name="shared.down"))
    mixed = experts_of(config, ExpertNames(choice_bias="mlp.gate.e_score_correction_bias"))
    up = replace(
        mixed.gate_up,
        rows=mixed.gate_up.rows[:1],
        checkpoint_names=(("mlp.experts.{}.up_proj",),),
        stacked=("mlp.experts.up_proj",),
    )
    return before, Keep(), replace(mixed, gate_up=up, gated=False), add, Again(), beside, add


def _of_heads(linear: LinearConfig, each: int) -> Entries:
    """Return a piece with ``each`` entries per state head."""
    return Entries(linear.heads * each, Share.STATE_HEADS, each)


def _of_keys(linear: LinearConfig) -> Entries:
    """Return a convolved piece with what several state heads share."""
    return Entries(linear.key_heads * linear.key_dim, Share.STATE_KEYS, linear.key_dim, convolved=True)


def _own(*names: str) -> tuple[str, ...]:
    return tuple(f"linear_attn.{name}" for name in names)


def _vector(name: str, rows: tuple[Entries, ...], stacked: tuple[str, ...]) -> LayerTensor:
    return LayerTensor(name=name, role=Role.EXACT_VECTOR, rows=rows, checkpoint_names=(stacked,))


def _taps(rows: tuple[Entries, ...], linear: LinearConfig, stacked: tuple[str, ...]) -> LayerTensor:
    return LayerTensor(
        name="linear.taps",
        role=Role.TAPS,
        rows=rows,
        inputs=(Entries(linear.taps),),
        checkpoint_names=(stacked,),
        bias=linear.taps_bias,
    )
