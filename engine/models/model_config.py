"""Defines the checked form of a model's ``config.json``: its shapes and options. Imports no torch.

:mod:`pillion.engine.models.config_parser` reads it, and a model's family lists the operations of its layers from it
(:mod:`pillion.engine.models.families`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.engine.models.encoder_config import EncoderConfig
from pillion.engine.models.layer_operations import ClampedSwiglu, TokenIndex
from pillion.engine.models.rope_config import RopeConfig
from pillion.engine.quantized.quantization import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Describes the shape of a mixture of experts.

    Attributes:
        intermediate_size: inner width of one expert.
        normalize, sigmoid, scale, exact, groups, kept_groups, group_best, clamped, scaled_inputs: those of
            :class:`pillion.engine.models.layer_operations.Experts`.
        shared: inner width of the MLP that all tokens pass beside their experts; 0 for none.
        beside: whether layers with experts have their dense MLP, too.
        either_way: whether plain matrices of all experts in one tensor have inputs as rows in some checkpoints, and
            outputs in others.
        share: the factor of the results of experts and of the MLP beside them, where the residual stream takes them.
        layers: for each layer, whether it has experts; a layer without them has one dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    layers: tuple[bool, ...]
    sigmoid: bool = False
    scale: float = 1.0
    exact: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    clamped: ClampedSwiglu | None = None
    scaled_inputs: bool = False
    shared: int = 0
    beside: bool = False
    either_way: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Says how queries grow with their position p: by the factor 1 + rate * log(1 + floor((p + ahead) / length)).

    Attributes:
        nope_alone: whether only layers without positions have queries that grow.
    """

    rate: float
    length: int
    ahead: int = 0
    nope_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Describes attention whose keys and values are made of latents (multi-head latent attention, MLA). A token's KV in
    a layer is one row for all heads: its latents, the rotated part of its keys, and its index key, if there is one.

    Attributes:
        rank: how many latents a token has.
        rotary: how many values of a query and a key are rotated.
        still: how many values of a query and a key are not; keys make them of the latents.
        values: how many values a head's result has, which are made of the latents, too.
        query_rank: how many values queries are made of; 0 where they are made of the residual stream's.
        index: the indexer of sparse attention; None where queries see all tokens.
        selecting: for each layer, whether it runs the indexer or reuses the selection of the layer before.
    """

    rank: int
    rotary: int
    still: int
    values: int
    query_rank: int
    index: TokenIndex | None = None
    selecting: tuple[bool, ...] = ()

    @property
    def head_dim(self) -> int:
        """Gives the number of values of a head's query and key."""
        return self.still + self.rotary

    @property
    def row(self) -> int:
        """Values of a row of KV."""
        return self.rank + self.rotary + (0 if self.index is None else self.index.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Describes what each layer reads of a token beside the residual stream (per-layer embeddings): ``width`` values, a
    norm of a product with the token's embedding, plus an embedding of their own, from a table of ``vocab_size`` tokens
    that has the rows of all layers side by side."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Describes a layer's KV heads, in models whose layers differ in them.

    Attributes:
        kv_heads: how many there are.
        head_dim: the number of values of a head, of its queries, too.
    """

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerScales:
    """Holds the factors of Falcon-H1's layers, with which loading multiplies matrices.

    Attributes:
        inputs: for what a state space reads, its gates, values, writes, reads and steps of time.
        outputs: for its results.
        attention: for what attention reads, its keys, and its results.
        mlp: for the gates and for the results of MLPs.
    """

    inputs: tuple[float, float, float, float, float]
    outputs: float
    attention: tuple[float, float, float]
    mlp: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Describes layers that carry a state from token to token in place of keys and values.

    Attributes:
        layers: for each layer, whether it is one.
        taps: how many tokens a convolution sees, with the token itself.
        taps_bias: whether convolutions have biases.
        bias: whether the linear layers before and after them have biases.
        heads, head_dim: how many heads there are, and how many values each has; 0 where there are convolutions alone.
        key_heads, key_dim: how many heads there are of what writes to the heads' matrices and reads them, and how many
            values each has.
        doubled: whether what a delta rule learns counts twice.
        step_rank: how many values steps of time are made of, where channels have steps of their own (Mamba-1); else 0.
        normed: whether a state space's results are normed.
        gate_first: whether they are gated before that.
        attends: for each layer, whether it has keys and values; () where those have them that have no state.
        scales: factors of such layers' matrices, where a family has them.
    """

    layers: tuple[bool, ...]
    taps: int
    taps_bias: bool = False
    bias: bool = False
    heads: int = 0
    head_dim: int = 0
    key_heads: int = 0
    key_dim: int = 0
    doubled: bool = False
    step_rank: int = 0
    normed: bool = True
    gate_first: bool = True
    attends: tuple[bool, ...] = ()
    scales: MixerScales | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Describes the shape and options of a decoder. All fields are part of a model's fingerprint.

    Attributes:
        max_position_embeddings: tokens of the longest text, scaling of the rotary embedding included.
        ropes: the rotary embeddings in use.
        layer_ropes: for each layer, the index of its rotary embedding in ``ropes``; None for a layer without positions
            (NoPE).
        sliding_windows: for each layer, how many tokens a query sees, itself included; 0 means all tokens up to it.
        layer_heads: for each layer, its KV heads, or None for one without keys and values; () where all layers have
            ``num_kv_heads`` of ``head_dim`` values.
        kv_sources: for each layer, the layer whose keys and values its queries see; () where each layer has its own.
        values_are_keys: whether layers without a window have no values but their keys before norm and rotation.
        value_width: how many values a head of values has, where these are fewer than a key's: zeros stand behind them.
            0 for as many.
        value_scale: factor of values.
        layer_widths: for each layer, the inner width of its MLP; () where all have ``intermediate_size``.
        token_inputs: what layers read of a token beside the residual stream; None for nothing.
        chunked: whether a query sees not the last tokens of its window, but those since the last multiple of it.
        qkv_bias, o_bias, mlp_bias: which linear layers add a bias.
        labels: how many labels a classifier tells apart, which has a head for these and none for tokens; else 0.
        headless: whether the config names a class without a head, whose files may lack one.
        learned_positions: whether embeddings of positions are added to those of tokens.
        gated: whether MLPs have a gate.
        activation: the MLP's activation: "silu", "gelu_tanh", or, without a gate, "relu", "relu2" and "gelu".
        norm: an RMS norm: "plain" rounds before the weight is applied, "wide" after it; "offset" is wide with a weight
            of 1 + w. "layer" is a LayerNorm.
        norm_bias: whether the norms of the residual stream have biases.
        qk_norm: whether queries and keys are normed, where a family's layers can have that.
        post_norm: whether the outputs of attention and MLP are normed, where a family's layers can have that.
        attention_gate: whether attention's results pass a gate, where a family's layers can have that.
        parallel: whether attention and MLP read the same normed residual stream, and both are added to it.
        attention_scale: factor of the attention scores.
        query_growth: how queries grow with their position; None where they do not.
        attention_softcap, logit_softcap: c of c * tanh(x / c), over scores and over logits; 0 for none.
        embedding_scale, residual_scale: factors of embeddings, and of what each layer adds to the residual stream.
        logit_divisor: divisor of the logits.
        latents: how keys and values are made of latents, where they are; there is one KV head then, and ``head_dim`` is
            the number of values of a row of KV.
        linear: the layers that have a state in place of keys and values, where some have.
        encoder: the layers of an encoder, which has no others: the other numbers of layers and heads are those of a
            stand-in for keys and values, of which it has none. None for a decoder.
        eos_token_ids: tokens that end a text.
        quantization: how the files hold quantized matrices; None where all of them are plain.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int | None, ...]
    sliding_windows: tuple[int, ...]
    layer_heads: tuple[LayerHeads | None, ...] = ()
    kv_sources: tuple[int, ...] = ()
    values_are_keys: bool = False
    value_width: int = 0
    value_scale: float = 1.0
    layer_widths: tuple[int, ...] = ()
    token_inputs: TokenInputs | None = None
    chunked: bool = False
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    labels: int = 0
    headless: bool = False
    learned_positions: bool = False
    gated: bool = True
    activation: str = "silu"
    norm: str = "plain"
    norm_bias: bool = False
    qk_norm: bool = True
    post_norm: bool = True
    attention_gate: bool = True
    parallel: bool = False
    attention_scale: float
    query_growth: QueryGrowth | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    moe: MoeConfig | None = None
    latents: LatentConfig | None = None
    linear: LinearConfig | None = None
    encoder: EncoderConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Gives the layers that have keys and values, in the order in which a block holds them."""
        if self.linear is None:
            return tuple(range(self.num_layers))
        attends = self.linear.attends or [not has_state for has_state in self.linear.layers]
        return tuple(layer for layer, has_rows in enumerate(attends) if has_rows)

    @property
    def rotary_width(self) -> int:
        """Gives the number of values of a head, the part of them where it is apart, that have a rotary embedding."""
        return self.head_dim if self.latents is None else self.latents.rotary

    @property
    def value_dim(self) -> int:
        """Gives the number of values that a head takes from a token's row of KV."""
        return self.head_dim if self.latents is None else self.latents.rank

    @property
    def kv_planes(self) -> int:
        """Gives how many rows a KV head has for a token in a layer: its key and its value, or one row that is both."""
        return 2 if self.latents is None else 1

    def heads_of(self, layer: int) -> LayerHeads:
        """Return the KV heads that the queries of a layer with attention see."""
        found = self.layer_heads[layer] if self.layer_heads else LayerHeads(self.num_kv_heads, self.head_dim)
        assert found is not None
        return found

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values the queries of a layer see: itself, or an earlier one."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def kv_places(self) -> tuple[LayerHeads | None, ...]:
        """Gives for each layer the KV heads that have a place in a block; None where it has none, because it has no
        attention, or sees the keys and values of another layer. () means that all layers have places of one size."""
        layers, kept = range(self.num_layers), self.kv_layers
        if not self.layer_heads and not self.kv_sources:
            one = LayerHeads(self.num_kv_heads, self.head_dim)
            return () if len(kept) == len(layers) else tuple(one if layer in kept else None for layer in layers)
        every = self.layer_heads or (LayerHeads(self.num_kv_heads, self.head_dim),) * len(layers)
        return tuple(every[layer] if self.kv_source(layer) == layer else None for layer in layers)

    @property
    def last_kept_layer(self) -> int:
        """Gives the last layer that leaves something for later steps. In a step that chooses no token, nothing after
        its keys and values, or its state, has to be computed."""
        if self.linear is not None:
            return max(*self.kv_layers, *(layer for layer, has_state in enumerate(self.linear.layers) if has_state))
        kept = (layer for layer, source in enumerate(self.kv_sources) if layer == source)
        return max(kept, default=self.num_layers - 1)

    @property
    def all_heads(self) -> tuple[LayerHeads, ...]:
        """Gives the different kinds of KV heads that layers have, in the order of their first layers."""
        every = self.layer_heads or (LayerHeads(self.num_kv_heads, self.head_dim),)
        return tuple(dict.fromkeys(heads for heads in every if heads is not None))

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """Gives the different numbers of KV heads that layers have, in the order of their first layers."""
        return tuple(dict.fromkeys(heads.kv_heads for heads in self.all_heads))

    @property
    def widest_mlp(self) -> int:
        """Gives the inner width of the widest MLP that all tokens pass."""
        return max(self.intermediate_size, *self.layer_widths, 0 if self.moe is None else self.moe.shared)

    def inner_width(self, layer: int) -> int:
        """Return the inner width of a layer's dense MLP."""
        return self.layer_widths[layer] if self.layer_widths else self.intermediate_size
