"""Llama's layer, with the options by which most families differ from it. Imports no torch.

    attention    norm, qkv, [gate], [norm of queries and keys], [rotate], [grow queries], attend, [gate], o, add
    MLP          norm, down(activation(gate) * up), or down(activation(up)), or experts, add

A family with another list of operations builds its own, from parts of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pillion.engine.models.latent_layer import latent_attention
from pillion.engine.models.layer_operations import (
    AddToLayerSum,
    AddToResidual,
    Attend,
    Entries,
    Experts,
    Gate,
    GrowQueries,
    KeepGate,
    Layer,
    LayerOperation,
    LayerTensor,
    Mlp,
    Multiply,
    Norm,
    NormHeads,
    NormProjections,
    RestoreRows,
    Role,
    Rotate,
    SaveRows,
    Share,
    matrix,
)
from pillion.engine.models.model_config import ModelConfig

# Names in checkpoints of the norms before and after attention, and before and after the MLP; "" for none.
Norms = tuple[str, str, str, str]
# Names of routers in checkpoints.
_ROUTERS = (
    "mlp.gate",
    "block_sparse_moe.gate",
    "block_sparse_moe.router.layer",
    "block_sparse_moe.router",
    "mlp.gate.wg",
    "mlp.router.gate",
    "mlp.router",
    "feed_forward.router",
)
PRE_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
POST_NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
ALL_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """Norm of queries and keys.

    Attributes:
        kind: "head" or "projection" for an RMS norm over each head or over all heads together; "layer_by_head" for a
            LayerNorm over each head, without biases, with a separate weight per head.
        names: names of the weights in checkpoints; () for a norm over each head without weights.
        after_rotation: True if the norm follows the rotary embedding.
        if_rotated: True if layers without a rotary embedding do not norm queries and keys.
    """

    kind: str = "head"
    names: tuple[str, ...] = ("self_attn.q_norm", "self_attn.k_norm")
    after_rotation: bool = False
    if_rotated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """Differences of the query, key and value matrices in checkpoints from Llama's.

    Attributes:
        gated: True if an attention gate follows each head's query in the query matrix.
        gate: name of a separate matrix of attention gates; "" for none.
        by_head: True if the separate gate has one value per head.
    """

    gated: bool = False
    gate: str = ""
    by_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Checkpoint names of the tensors of a mixture of experts, except the experts' matrices.

    Attributes:
        choice_bias: bias of scores for choosing experts (e_score_correction_bias); "" for none.
        optional_bias: True if zeros replace a ``choice_bias`` that a checkpoint lacks.
        shared: matrices of the shared expert: gate and up, separate or fused; down.
        shared_gate: gate of the shared expert's output, one number per row; "" for none.
        sum_norm: norm of the sum of experts and shared expert; "" for none.
        biased: True if router and experts have biases, stored as in gpt-oss.
    """

    choice_bias: str = ""
    optional_bias: bool = False
    shared: tuple[tuple[str, ...], str] = (
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared_experts.down_proj",
    )
    shared_gate: str = ""
    sum_norm: str = ""
    biased: bool = False


_LLAMA_PROJECTIONS, _QWEN_EXPERTS = Projections(), ExpertNames()


def llama_layer(
    config: ModelConfig,
    index: int,
    *,
    norms: Norms = PRE_NORMS,
    mlp: tuple[str, str] = ("mlp.up_proj", "mlp.down_proj"),
    qk_norm: QkNorm | None = None,
    projections: Projections = _LLAMA_PROJECTIONS,
    sinks: bool = False,
    experts: ExpertNames = _QWEN_EXPERTS,
    mixer: Layer = (),
) -> Layer:
    """Return the operations of layer ``index``.

    Args:
        mlp: names in checkpoints of an MLP without a gate.
        sinks: True for attention sinks.
        mixer: operations to run instead of attention and its output projection.
    """
    before_attention, after_attention, before_mlp, after_mlp = _norms(config, norms)
    attention = mixer or _attention(config, index, projections, qk_norm, sinks)
    attention_branch = Norm(before_attention), *attention
    projection = () if mixer else (Multiply(output(config)),)
    end_of_attention: Layer = (*projection, AddToResidual(after_attention, config.residual_scale))
    mlp_branch: Layer = Norm(before_mlp), gated(config) if config.gated else not_gated(config, mlp)
    scale = config.residual_scale
    if config.moe is not None and config.moe.layers[index]:
        scale *= config.moe.share
        mlp_branch = Norm(before_mlp), *_mixture(config, experts, scale)
        after_mlp = norm(config, "mlp_post_norm", experts.sum_norm) if experts.sum_norm else after_mlp
    mlp_branch = *mlp_branch, AddToResidual(after_mlp, scale)
    if config.parallel:
        return (*attention_branch, SaveRows(), *mlp_branch, RestoreRows(), *end_of_attention)
    return (*attention_branch, *end_of_attention, *mlp_branch)


def _norms(config: ModelConfig, norms: Norms) -> Iterator[LayerTensor | None]:
    """Yield the norms before and after attention and before and after the MLP, None if absent. In a parallel layer, the
    MLP has the norm before attention, too."""
    before, after, before_mlp, after_mlp = norms if config.post_norm else (norms[0], "", norms[2], "")
    if config.parallel:
        before_mlp = before
    names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    for name, checkpoint_name in zip(names, (before, after, before_mlp, after_mlp), strict=True):
        yield norm(config, name, checkpoint_name) if checkpoint_name else None


def _mixture(config: ModelConfig, names: ExpertNames, scale: float) -> Layer:
    """Return the operations of the experts and the shared expert, whose final rows the caller adds to the residual
    stream with ``scale``: the only output, or the sum of both outputs; without a norm of the sum, the operations add
    the experts' output themselves."""
    assert config.moe is not None
    routed = biased_experts(config) if names.biased else experts_of(config, names)
    if not config.moe.shared:
        return (routed,)
    shared = _shared(config, names)
    if names.sum_norm:
        return SaveRows(), routed, AddToLayerSum(None), RestoreRows(), shared, AddToLayerSum(None)
    return SaveRows(), routed, AddToResidual(None, scale), RestoreRows(), shared


def _attention(config: ModelConfig, index: int, projections: Projections, qk_norm: QkNorm | None, sinks: bool) -> Layer:
    """Return the operations from normed rows to the attention output, before its projection."""
    if config.latents is not None:
        return (latent_attention(config, config.latents, index),)
    rotated = tuple(rotation(config, index))
    between = rotated
    if qk_norm is not None and config.qk_norm and (rotated or not qk_norm.if_rotated):
        heads_norm = _norm_of_heads(config, qk_norm)
        between = (*rotated, heads_norm) if qk_norm.after_rotation else (heads_norm, *rotated)
    attend = Attend(config.sliding_windows[index], attention_sinks(config) if sinks else None, config.chunked)
    gate = tuple(KeepGate(gates) for gates in _gates(config, projections))
    operations = Multiply(qkv(config, projections)), *gate, *between, *growth(config, index), attend
    return (*operations, Gate()) if gate else operations


def norm(config: ModelConfig, name: str, checkpoint_name: str) -> LayerTensor:
    """Return the weight of a norm of the residual stream."""
    return LayerTensor(
        name=name, role=Role.NORM, rows=_hidden(config), checkpoint_names=((checkpoint_name,),), bias=config.norm_bias
    )


def qkv(config: ModelConfig, form: Projections = _LLAMA_PROJECTIONS) -> LayerTensor:
    """Return the fused matrix of gates, if any, queries, keys and values."""
    queries, keys = _heads(config, rotated=True)
    values = Entries(keys.size, Share.KV_HEADS, config.head_dim)
    parts = tuple(f"self_attn.{part}_proj" for part in "qkv")
    gates = _gates(config, form)
    checkpoint_names = ((form.gate, *parts),) if gates and form.gate else (parts, ("self_attn.qkv_proj",))
    return LayerTensor(
        name="qkv",
        role=Role.MATRIX,
        rows=(*gates, queries, keys, values),
        inputs=_hidden(config),
        checkpoint_names=checkpoint_names,
        bias=config.qkv_bias,
        gated=form.gated,
    )


def _gates(config: ModelConfig, form: Projections) -> tuple[Entries, ...]:
    """Return the attention gates; () for none."""
    if not config.attention_gate or not (form.gate or form.gated):
        return ()
    return (Entries(config.num_heads, Share.HEADS) if form.by_head else _heads(config)[0],)


def _norm_of_heads(config: ModelConfig, qk_norm: QkNorm) -> LayerOperation:
    """Return the norm of queries and keys."""
    if qk_norm.kind == "projection":
        return NormProjections(
            *(
                LayerTensor(name=name, role=Role.NORM, rows=(piece,), checkpoint_names=((checkpoint_name,),))
                for name, piece, checkpoint_name in zip(
                    ("q_norm", "k_norm"), _heads(config, rotated=True), qk_norm.names, strict=True
                )
            )
        )
    queries = _heads(config, rotated=True)[0]
    return NormHeads(
        LayerTensor(
            name="qk_norm",
            role=Role.HEAD_NORM,
            rows=(Entries(config.num_heads, Share.HEADS), Entries(config.num_kv_heads, Share.KV_HEADS)),
            inputs=(
                Entries(queries.head, head=queries.head, rotated=queries.rotated, interleaved=queries.interleaved),
            ),
            checkpoint_names=(qk_norm.names,) if qk_norm.names else (),
            by_head=qk_norm.kind == "layer_by_head",
        )
    )


def rotation(config: ModelConfig, index: int) -> Iterator[LayerOperation]:
    """Yield the rotary embedding of a layer, if any."""
    rope = config.layer_ropes[index]
    if rope is not None:
        yield Rotate(rope)


def growth(config: ModelConfig, index: int) -> Iterator[LayerOperation]:
    """Yield the position-dependent query scale of a layer, if any."""
    grows = config.query_growth
    if grows is not None and (config.layer_ropes[index] is None or not grows.nope_alone):
        yield GrowQueries()


def attention_sinks(config: ModelConfig) -> LayerTensor:
    """Return the attention sinks, with gpt-oss's name."""
    rows, names = (Entries(config.num_heads, Share.HEADS),), ("self_attn.sinks",)
    return LayerTensor(name="sinks", role=Role.VECTOR, rows=rows, checkpoint_names=(names,))


def output(config: ModelConfig, index: int = 0) -> LayerTensor:
    """Return the output projection of layer ``index``."""
    values = (attended_values(config, index),)
    return matrix("o", _hidden(config), values, ("self_attn.o_proj",), bias=config.o_bias)


def attended_values(config: ModelConfig, index: int = 0) -> Entries:
    """Return the values of the attention output in layer ``index``, by query heads."""
    size = config.heads_of(index).head_dim if config.latents is None else config.latents.v_head_dim
    return Entries(config.num_heads * size, Share.HEADS, size)


def gated(config: ModelConfig, index: int = 0) -> Mlp:
    """Return the gated MLP of layer ``index``."""
    inner, hidden = Entries(config.inner_width(index), Share.INNER), _hidden(config)
    gate_up = matrix(
        "gate_up",
        (inner, inner),
        hidden,
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.gate_up_proj",),
        ("feed_forward.gate_proj", "feed_forward.up_proj"),
        ("block_sparse_moe.gate_proj", "block_sparse_moe.up_proj"),
        bias=config.mlp_bias,
    )
    down = matrix(
        "down",
        hidden,
        (inner,),
        ("mlp.down_proj",),
        ("feed_forward.down_proj",),
        ("block_sparse_moe.down_proj",),
        bias=config.mlp_bias,
    )
    return Mlp(gate_up, down, config.activation)


def not_gated(config: ModelConfig, names: tuple[str, str]) -> Mlp:
    """Return an MLP without a gate."""
    inner, hidden, bias = (Entries(config.intermediate_size, Share.INNER),), _hidden(config), config.mlp_bias
    bends = None
    if config.activation == "xielu":
        checkpoint_names, rows = (("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"),), (Entries(1), Entries(1))
        bends = LayerTensor(name="bends", role=Role.VECTOR, rows=rows, checkpoint_names=checkpoint_names, suffix="")
    return Mlp(
        matrix("up", inner, hidden, (names[0],), bias=bias),
        matrix("down", hidden, inner, (names[1],), bias=bias),
        config.activation,
        gated=False,
        bends=bends,
    )


def _shared(config: ModelConfig, names: ExpertNames) -> Mlp:
    """Return the shared expert, with the gate of its output, if any."""
    assert config.moe is not None
    inner, hidden, bias = Entries(config.moe.shared, Share.INNER), _hidden(config), config.mlp_bias
    up, down = names.shared
    row_gate = None
    if names.shared_gate:
        row, gate_names = (Entries(1),), ((names.shared_gate,),)
        row_gate = LayerTensor(
            name="shared.gate", role=Role.EXACT_MATRIX, rows=row, inputs=hidden, checkpoint_names=gate_names
        )
    return Mlp(
        matrix("shared.gate_up", (inner, inner), hidden, up, bias=bias),
        matrix("shared.down", hidden, (inner,), (down,), bias=bias),
        config.activation,
        row_gate=row_gate,
    )


def experts_of(config: ModelConfig, names: ExpertNames = _QWEN_EXPERTS) -> Experts:
    """Return experts with their names in Qwen, Mixtral, Llama 4 and Granite, and in transformers 5."""
    moe, hidden = config.moe, _hidden(config)
    assert moe is not None
    inner, qwen, mixtral = Entries(moe.intermediate_size, Share.INNER), "mlp.experts.{}", "block_sparse_moe.experts.{}"
    # Stacked matrices are transposed in Llama 4, the only family with scaled_inputs, and in published files of
    # Qwen3-VL, but not if saved by transformers 5.
    llama, transposed = "feed_forward.experts.{}", None if moe.either_way else moe.scaled_inputs
    router = LayerTensor(
        name="router",
        role=Role.EXACT_MATRIX,
        rows=(Entries(moe.num_experts),),
        inputs=hidden,
        checkpoint_names=tuple((name,) for name in _ROUTERS),
    )
    gate_up = LayerTensor(
        name="experts.gate_up",
        role=Role.MATRIX,
        rows=(inner, inner),
        inputs=hidden,
        checkpoint_names=(
            (f"{qwen}.gate_proj", f"{qwen}.up_proj"),
            (f"{mixtral}.w1", f"{mixtral}.w3"),
            (f"{llama}.gate_proj", f"{llama}.up_proj"),
        ),
        experts=moe.num_experts,
        stacked=(
            "mlp.experts.gate_up_proj",
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.experts.gate_up_proj",
            "feed_forward.experts.gate_up_proj",
        ),
        transposed=transposed,
    )
    down = LayerTensor(
        name="experts.down",
        role=Role.MATRIX,
        rows=hidden,
        inputs=(inner,),
        checkpoint_names=((f"{qwen}.down_proj",), (f"{mixtral}.w2",), (f"{llama}.down_proj",)),
        experts=moe.num_experts,
        stacked=(
            "mlp.experts.down_proj",
            "block_sparse_moe.output_linear.weight",
            "block_sparse_moe.experts.down_proj",
            "feed_forward.experts.down_proj",
        ),
        transposed=transposed,
    )
    return Experts(
        router,
        gate_up,
        down,
        config.activation,
        moe.experts_per_token,
        moe.normalize,
        sigmoid=moe.sigmoid,
        choice_bias=_choice_bias(moe.num_experts, names) if names.choice_bias else None,
        scale=moe.scale,
        exact=moe.exact,
        groups=moe.groups,
        kept_groups=moe.kept_groups,
        group_best=moe.group_best,
        scaled_inputs=moe.scaled_inputs,
    )


def _choice_bias(num_experts: int, names: ExpertNames) -> LayerTensor:
    rows = Entries(1) if "moe_statics" in names.choice_bias else Entries(num_experts)
    return LayerTensor(
        name="choice_bias",
        role=Role.EXACT_VECTOR,
        rows=(rows,),
        inputs=(Entries(num_experts),) if rows.size == 1 else (),
        checkpoint_names=((names.choice_bias,),),
        optional=names.optional_bias,
    )


def biased_experts(config: ModelConfig) -> Experts:
    """Return gpt-oss's experts: with biases, transposed matrices, and interleaved rows of gate and up."""
    experts, moe = experts_of(config), config.moe
    assert moe is not None
    common: dict[str, Any] = {"checkpoint_names": (), "bias": True, "transposed": True}
    rows, names = (Entries(moe.num_experts),), ("mlp.router.bias",)
    return replace(
        experts,
        router=replace(experts.router, checkpoint_names=(("mlp.router",),)),
        router_bias=LayerTensor(name="router.bias", role=Role.EXACT_VECTOR, rows=rows, checkpoint_names=(names,)),
        gate_up=replace(experts.gate_up, **common, stacked=("mlp.experts.gate_up_proj",), alternating=True),
        down=replace(experts.down, **common, stacked=("mlp.experts.down_proj",)),
        clamped=moe.clamped,
    )


def _hidden(config: ModelConfig) -> tuple[Entries, ...]:
    return (Entries(config.hidden_size),)


def _heads(config: ModelConfig, *, rotated: bool = False) -> tuple[Entries, Entries]:
    """Return the entries of queries and of keys. With ``rotated``, the decoder reorders heads that are rotated in part,
    or with neighbors together."""
    size, rope = config.head_dim, config.ropes[0]
    reordered = rope.rotary_dim if rotated and (rope.rotary_dim < size or rope.interleaved) else 0
    return (
        Entries(config.num_heads * size, Share.HEADS, size, reordered, rope.interleaved),
        Entries(config.num_kv_heads * size, Share.KV_HEADS, size, reordered, rope.interleaved),
    )
