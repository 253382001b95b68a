"""Validated form of a model's ``config.json``: its shapes and options. Imports no torch.

Parsed by :mod:`pillion.engine.models.config_parser`; a model's family lists the operations of its layers from it
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
    """A mixture of experts.

    Attributes:
        intermediate_size: inner width of one expert.
        normalize, sigmoid, scale, exact, groups, kept_groups, group_best, clamped, scaled_inputs: as in
            :class:`pillion.engine.models.layer_operations.Experts`.
        shared: inner width of the shared expert; 0 for none.
        beside: True if layers with experts also have their dense MLP.
        either_way: True if plain stacked expert matrices are transposed in some checkpoints.
        share: factor of the outputs of experts and shared expert in the residual stream.
        layers: for each layer, whether it has experts; others have a dense MLP.
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
    """Position-dependent query scale: 1 + rate * log(1 + floor((p + ahead) / length)) at position p.

    ``nope_alone``: True if it only applies to layers without a rotary embedding.
    """

    rate: float
    length: int
    ahead: int = 0
    nope_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (MLA). A token's KV in a layer is one row for all heads: its latents, the rotated
    part of its keys, and its index key, if any.

    Attributes:
        kv_lora_rank: latents per token.
        qk_rope_head_dim: width of the rotated part of a head's query and key.
        qk_nope_head_dim: width of the other part; that of keys is a projection of the latents.
        v_head_dim: width of a head's value, a projection of the latents, and of its output.
        q_lora_rank: rank of the queries' low-rank projection; 0 for none.
        index: indexer of sparse attention; None if queries see all tokens.
        selecting: for each layer, whether it runs the indexer or reuses the selection of the layer before.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int
    index: TokenIndex | None = None
    selecting: tuple[bool, ...] = ()

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row(self) -> int:
        """Values of a row of KV."""
        return self.kv_lora_rank + self.qk_rope_head_dim + (0 if self.index is None else self.index.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Per-layer token inputs (per-layer embeddings): ``width`` values per token and layer, the sum of a normed
    projection of the token's embedding and of a second embedding, from a table [vocab_size, num_layers * width]."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """KV heads of a layer, in models whose layers differ. ``head_dim`` is also the width of queries."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerScales:
    """Factors of Falcon-H1's layers, applied to matrices on load.

    Attributes:
        inputs: of a state space's gates, values, writes, reads and time steps.
        outputs: of its output.
        attention: of attention's inputs, keys, and output.
        mlp: of the gates and outputs of MLPs.
    """

    inputs: tuple[float, float, float, float, float]
    outputs: float
    attention: tuple[float, float, float]
    mlp: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Layers with a state instead of KV.

    Attributes:
        layers: for each layer, whether it has a state.
        taps: kernel size of convolutions, including the token itself.
        taps_bias: True if convolutions have biases.
        bias: True if the linear layers before and after them have biases.
        heads, head_dim: number of heads, and their width; 0 for convolutions only.
        key_heads, key_dim: number and width of the keys and queries, or write and read vectors, of the heads' matrices.
        doubled: True if a delta rule's learning rate is doubled.
        step_rank: width of the inputs of per-channel time steps (Mamba-1); else 0.
        normed: True if a state space's output is normed.
        gate_first: True if a state space's output is gated before that norm.
        attends: for each layer, whether it has KV; () if exactly the layers without a state have.
        scales: factors of matrices (Falcon-H1); None for none.
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
    """Shapes and options of a decoder. All fields are part of a model's fingerprint.

    Attributes:
        max_position_embeddings: max length, including scaling of the rotary embedding.
        ropes: rotary embeddings in use.
        layer_ropes: for each layer, the index of its rotary embedding in ``ropes``; None without positions (NoPE).
        sliding_windows: for each layer, max tokens visible to a query, including its own; 0 for all.
        layer_heads: for each layer, its KV heads, or None without KV; () if all layers have ``num_kv_heads`` of width
            ``head_dim``.
        kv_sources: for each layer, the layer whose KV it reads; () if each has its own.
        values_are_keys: True if layers without a window use their keys before norm and rotation as values.
        value_width: width of value heads if narrower than key heads (zero-padded); else 0.
        value_scale: factor of values.
        layer_widths: for each layer, the inner width of its MLP; () if all have ``intermediate_size``.
        token_inputs: per-layer token inputs; None for none.
        chunked: True if a query sees the tokens since the last multiple of its window instead of the last ones.
        qkv_bias, o_bias, mlp_bias: True for linear layers with a bias.
        labels: number of a classifier's labels, which has a head for these and none for tokens; else 0.
        headless: True if the config names a class without a head, so that files may lack one.
        learned_positions: True if position embeddings are added to token embeddings.
        gated: True if MLPs have a gate.
        activation: of MLPs: "silu", "gelu_tanh", or, without a gate, "relu", "relu2" and "gelu".
        norm: an RMS norm: "plain" rounds before the weight is applied, "wide" after it; "offset" is wide with a weight
            of 1 + w. "layer" is a LayerNorm.
        norm_bias: True if norms of the residual stream have biases.
        qk_norm: True if queries and keys are normed, in families that may do so.
        post_norm: True if outputs of attention and MLP are normed, in families that may do so.
        attention_gate: True if attention's output is gated, in families that may do so.
        parallel: True if attention and MLP read the same normed residual stream, and both are added to it.
        attention_scale: factor of attention scores.
        query_growth: position-dependent query scale; None for none.
        attention_softcap, logit_softcap: c of c * tanh(x / c), of scores and of logits; 0 for none.
        embedding_scale, residual_scale: factors of embeddings, and of what each layer adds to the residual stream.
        logit_divisor: divisor of logits.
        latents: multi-head latent attention, if used; there is then one KV head, and ``head_dim`` is the width of a row
            of KV.
        linear: layers with a state instead of KV, if any.
        encoder: layers of an encoder; None for a decoder. ``num_layers`` and the numbers of heads of an encoder
            describe a dummy KV.
        quantization: storage of quantized matrices; None if all are plain.
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
        """Layers with KV, in their order in a block."""
        if self.linear is None:
            return tuple(range(self.num_layers))
        attends = self.linear.attends or [not has_state for has_state in self.linear.layers]
        return tuple(layer for layer, has_kv in enumerate(attends) if has_kv)

    @property
    def rotary_width(self) -> int:
        """Width of a head, or with MLA of its part that has a rotary embedding."""
        return self.head_dim if self.latents is None else self.latents.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """Values that a head reads from a token's row of KV."""
        return self.head_dim if self.latents is None else self.latents.kv_lora_rank

    @property
    def kv_planes(self) -> int:
        """Rows per KV head, token and layer: key and value, or one row for both."""
        return 2 if self.latents is None else 1

    def heads_of(self, layer: int) -> LayerHeads:
        """Return the KV heads visible to the queries of a layer with attention."""
        heads = self.layer_heads[layer] if self.layer_heads else LayerHeads(self.num_kv_heads, self.head_dim)
        assert heads is not None
        return heads

    def kv_source(self, layer: int) -> int:
        """Return the layer whose KV a layer reads: itself, or an earlier one."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def kv_places(self) -> tuple[LayerHeads | None, ...]:
        """For each layer, its KV heads in a block; None if it has no attention, or reads another layer's KV. () if all
        layers have the same KV heads."""
        layers, kv_layers = range(self.num_layers), self.kv_layers
        if not self.layer_heads and not self.kv_sources:
            if len(kv_layers) == len(layers):
                return ()
            usual = LayerHeads(self.num_kv_heads, self.head_dim)
            return tuple(usual if layer in kv_layers else None for layer in layers)
        layer_heads = self.layer_heads or (LayerHeads(self.num_kv_heads, self.head_dim),) * len(layers)
        return tuple(layer_heads[layer] if self.kv_source(layer) == layer else None for layer in layers)

    @property
    def last_kept_layer(self) -> int:
        """Last layer that writes KV or a state; a step without sampled tokens can end after it."""
        if self.linear is not None:
            return max(*self.kv_layers, *(layer for layer, has_state in enumerate(self.linear.layers) if has_state))
        writing_layers = (layer for layer, source in enumerate(self.kv_sources) if layer == source)
        return max(writing_layers, default=self.num_layers - 1)

    @property
    def all_heads(self) -> tuple[LayerHeads, ...]:
        """Distinct kinds of KV heads, in the order of their first layers."""
        layer_heads = self.layer_heads or (LayerHeads(self.num_kv_heads, self.head_dim),)
        return tuple(dict.fromkeys(heads for heads in layer_heads if heads is not None))

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """Distinct numbers of KV heads, in the order of their first layers."""
        return tuple(dict.fromkeys(heads.kv_heads for heads in self.all_heads))

    @property
    def widest_mlp(self) -> int:
        """Inner width of the widest dense MLP or shared expert."""
        return max(self.intermediate_size, *self.layer_widths, 0 if self.moe is None else self.moe.shared)

    def inner_width(self, layer: int) -> int:
        """Return the inner width of the dense MLP of a layer."""
        return self.layer_widths[layer] if self.layer_widths else self.intermediate_size
