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
    Attend,
    DeltaRule,
    Entries,
    Layer,
    LayerOperation,
    LayerTensor,
    Mlp,
    Multiply,
    Norm,
    RestoreRows,
    Role,
    SaveRows,
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
    """Return the operations of layer ``index`` by :func:`llama_layer` with ``options``; in a layer with a state, with
    ``mixer`` instead of attention, and with ``linear_norms`` as its norms, if given."""
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
    """Return a gated delta net. ``checkpoint_names``: the input projections in checkpoints: "fused" with rows grouped
    by key heads (Qwen3-Next); "apart" for qkv, gates and each rate (Qwen3.5); "each" for six tensors (OLMo-Hybrid)."""
    hidden, per_head, values = (
        (Entries(config.hidden_size),),
        (_of_heads(linear, 1),),
        _of_heads(linear, linear.head_dim),
    )
    keys, convolved_values = _of_keys(linear), replace(values, convolved=True)
    qkv_names, gate_names, rate_names = {
        "fused": ((), (), ()),
        "apart": (("in_proj_qkv",), ("in_proj_z",), ("in_proj_b", "in_proj_a")),
        "each": (("q_proj", "k_proj", "v_proj"), ("g_proj",), ("b_proj", "a_proj")),
    }[checkpoint_names]
    inputs = matrix("linear.in", (keys, keys, convolved_values, values), hidden, _linear_attn(*qkv_names, *gate_names))
    rate_matrix = matrix("linear.rates", (*per_head, *per_head), hidden, _linear_attn(*rate_names))
    if checkpoint_names == "fused":
        inputs = replace(inputs, checkpoint_names=(_linear_attn("in_proj_qkvz"),), groups=linear.key_heads)
        rate_matrix = replace(rate_matrix, checkpoint_names=(_linear_attn("in_proj_ba"),), groups=linear.key_heads)
    norm_name, out_name, eps = "norm", "out_proj", config.rms_norm_eps
    if checkpoint_names == "each":
        norm_name, out_name, eps = "o_norm", "o_proj", 1e-5
    return (
        DeltaRule(
            inputs=inputs,
            rates=rate_matrix,
            taps=replace(
                _taps((keys, keys, convolved_values), linear, _linear_attn("conv1d")),
                checkpoint_names=(_linear_attn("conv1d"), _linear_attn("q_conv1d", "k_conv1d", "v_conv1d")),
            ),
            decay=_vector("linear.decay", per_head, _linear_attn("A_log")),
            shift=_vector("linear.shift", per_head, _linear_attn("dt_bias")),
            norm=_vector("linear.norm", (Entries(linear.head_dim),), _linear_attn(f"{norm_name}.weight")),
            eps=eps,
            key_heads=linear.key_heads,
            heads=linear.heads,
            key_dim=linear.key_dim,
            head_dim=linear.head_dim,
            doubled=linear.doubled,
        ),
        Multiply(matrix("linear.out", hidden, (values,), _linear_attn(out_name))),
    )


def delta_attention(config: ModelConfig, linear: LinearConfig) -> Layer:
    """Return Kimi-Linear's gated delta net (KDA, arXiv 2510.26692): a decay per row of a head's matrix, and low-rank
    projections of decays and gates."""
    hidden, per_head, values = (
        (Entries(config.hidden_size),),
        (_of_heads(linear, 1),),
        _of_heads(linear, linear.head_dim),
    )
    low_rank, keys, convolved_values = (Entries(linear.head_dim),), _of_keys(linear), replace(values, convolved=True)
    delta_rule, out = delta_net(config, linear, checkpoint_names="each")
    assert isinstance(delta_rule, DeltaRule)
    assert isinstance(out, Multiply)
    rule = replace(
        delta_rule,
        inputs=matrix("linear.in", (keys, keys, convolved_values), hidden, _linear_attn("q_proj", "k_proj", "v_proj")),
        rates=matrix("linear.rates", per_head, hidden, _linear_attn("b_proj")),
        decay=replace(delta_rule.decay, ones=(2, 1)),
        shift=replace(delta_rule.shift, rows=(values,)),
        eps=config.rms_norm_eps,
        forget_down=matrix("linear.forget_down", low_rank, hidden, _linear_attn("f_a_proj")),
        forget_up=matrix("linear.forget_up", (values,), low_rank, _linear_attn("f_b_proj")),
        gate_down=matrix("linear.gate_down", low_rank, hidden, _linear_attn("g_a_proj")),
        gate_up=matrix("linear.gate_up", (values,), low_rank, _linear_attn("g_b_proj")),
    )
    return rule, out


def state_space(config: ModelConfig, linear: LinearConfig) -> Layer:
    """Return a state space of Mamba-2, with Granite's names."""
    hidden, per_head, values = (
        (Entries(config.hidden_size),),
        (_of_heads(linear, 1),),
        _of_heads(linear, linear.head_dim),
    )
    keys = _of_keys(linear)
    rows = values, replace(values, convolved=True), keys, keys, *per_head
    return (
        StateSpace(
            inputs=matrix("linear.in", rows, hidden, ("mamba.in_proj",), bias=linear.bias),
            taps=_taps(rows[1:4], linear, ("mamba.conv1d",)),
            decay=_vector("linear.decay", per_head, ("mamba.A_log",)),
            shift=_vector("linear.shift", per_head, ("mamba.dt_bias",)),
            skip=_vector("linear.skip", per_head, ("mamba.D",)),
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
    """Return a state space of Mamba-1, with Jamba's names, and its norms of time steps, write and read vectors."""
    hidden, values = (Entries(config.hidden_size),), _of_heads(linear, linear.head_dim)
    step_inputs, vector, convolved_values = (
        Entries(linear.step_rank),
        Entries(linear.key_dim),
        replace(values, convolved=True),
    )
    norms = (
        LayerTensor(name=f"linear.{part}_norm", role=Role.NORM, rows=(rows,), checkpoint_names=((f"mamba.{name}",),))
        for part, rows, name in (
            ("step", step_inputs, "dt_layernorm"),
            ("write", vector, "b_layernorm"),
            ("read", vector, "c_layernorm"),
        )
    )
    step_norm, write_norm, read_norm = norms
    return (
        SelectiveScan(
            inputs=matrix("linear.in", (convolved_values, values), hidden, ("mamba.in_proj",), bias=linear.bias),
            taps=_taps((convolved_values,), linear, ("mamba.conv1d",)),
            sides=matrix("linear.sides", (step_inputs, vector, vector), (values,), ("mamba.x_proj",)),
            step_norm=step_norm,
            write_norm=write_norm,
            read_norm=read_norm,
            steps=matrix("linear.steps", (values,), (step_inputs,), ("mamba.dt_proj",), bias=True),
            decay=replace(_vector("linear.decay", (values,), ("mamba.A_log",)), inputs=(vector,)),
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
    normed, *operations = llama_layer(config, index, norms=("input_layernorm", "", "pre_ff_layernorm", ""))
    input_scale, key_scale, output_scale = scales.attention
    factors = {"qkv": (input_scale, input_scale * key_scale, input_scale), "o": (output_scale,)}
    layer: list[LayerOperation] = []
    for operation in operations:
        match operation:
            case Multiply(matrix=weight):
                operation = Multiply(replace(weight, scales=factors[weight.name]))
            case Mlp(gate_up=gate_up, down=down):
                gate, result = scales.mlp
                gate_up, down = replace(gate_up, scales=(gate, 1.0)), replace(down, scales=(result,))
                operation = replace(operation, gate_up=gate_up, down=down)
        layer.append(operation)
    space = replace(space, inputs=replace(space.inputs, scales=scales.inputs))
    out = Multiply(replace(out.matrix, scales=(scales.outputs,)))
    return (normed, SaveRows(), space, out, AddToResidual(None, config.residual_scale), RestoreRows(), *layer)


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
    names, width = ("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"), config.moe.shared
    shared = not_gated(replace(config, intermediate_size=width), names)
    shared = replace(shared, gate_up=replace(shared.gate_up, name="shared.up"))
    shared = replace(shared, down=replace(shared.down, name="shared.down"))
    routed = experts_of(config, ExpertNames(choice_bias="mlp.gate.e_score_correction_bias"))
    up = replace(
        routed.gate_up,
        rows=routed.gate_up.rows[:1],
        checkpoint_names=(("mlp.experts.{}.up_proj",),),
        stacked=("mlp.experts.up_proj",),
    )
    return before, SaveRows(), replace(routed, gate_up=up, gated=False), add, RestoreRows(), shared, add


def _of_heads(linear: LinearConfig, width: int) -> Entries:
    """Return the entries of all state heads, ``width`` each."""
    return Entries(linear.heads * width, Share.STATE_HEADS, width)


def _of_keys(linear: LinearConfig) -> Entries:
    """Return the convolved entries of all key heads."""
    return Entries(linear.key_heads * linear.key_dim, Share.STATE_KEYS, linear.key_dim, convolved=True)


def _linear_attn(*names: str) -> tuple[str, ...]:
    return tuple(f"linear_attn.{name}" for name in names)


def _vector(name: str, rows: tuple[Entries, ...], names: tuple[str, ...]) -> LayerTensor:
    return LayerTensor(name=name, role=Role.EXACT_VECTOR, rows=rows, checkpoint_names=(names,))


def _taps(rows: tuple[Entries, ...], linear: LinearConfig, names: tuple[str, ...]) -> LayerTensor:
    return LayerTensor(
        name="linear.taps",
        role=Role.TAPS,
        rows=rows,
        inputs=(Entries(linear.taps),),
        checkpoint_names=(names,),
        bias=linear.taps_bias,
    )
