"""Differences of a model family from Llama. The rows are in :mod:`pillion.engine.models.family_rows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pillion.engine.models.layer_operations import Layer
from pillion.engine.models.llama_layer import llama_layer
from pillion.engine.models.model_config import LinearConfig, ModelConfig

# Keys of the number of layers for multi-token prediction, in different families.
DRAFTING_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases:
    """Biases of a family's linear layers and norms: True, False, or the config key that decides. A key that is not
    among the family's defaults means False.

    Attributes:
        qkv: query, key and value projections.
        o: output projection.
        mlp: MLP matrices.
        norm: norms of the residual stream; never a key.
    """

    qkv: str | bool = "attention_bias"
    o: str | bool = "attention_bias"
    mlp: str | bool = "mlp_bias"
    norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """Differences of a family's positions from Llama's.

    Attributes:
        partial: True if a part of each head may be rotated.
        interleaved: True if adjacent values are rotated together (``RopeConfig.interleaved``).
        local: True if layers with a window have their own rotary embedding.
        nope_if_full: True if layers without a window have no rotary embedding, in a model with windows.
        query_growth: layers with a position-dependent query scale: "all" (``llama_4_scaling_beta``), "nope" for layers
            without a rotary embedding (``attn_scale`` and ``floor_scale``), or "" for none.
    """

    partial: bool = False
    interleaved: bool = False
    local: bool = False
    nope_if_full: bool = False
    query_growth: str = ""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Differences of one family from Llama.

    Attributes:
        defaults: defaults for missing keys, in addition to or overriding those of its config classes. They also enable
            options: a key such as ``attention_bias`` or ``logits_scaling`` is read only in families that have it among
            their defaults, and rejected in others (:mod:`pillion.engine.models.config_keys`).
        layer: returns the operations of a layer, by index.
        linear: parses the layers with a state instead of KV; None for a family without such layers.
        biases: linear layers and norms with biases.
        rope: differences of rotary embeddings.
        norm, gated, parallel: as in ``ModelConfig``.
        rms_eps: key that switches the family's norms to RMS norms if present, and is their epsilon; "" for none.
        scaled_embedding: True if embeddings are multiplied by the square root of their width.
        first_position: row of the first position, in a family with learned position embeddings; None for others.
        window_pattern: period of the layers without a window, for configs that list no layer types: the last layer of
            each period has none, or the first with ``full_first``; 0: all layers have the window. A config's
            ``max_window_layers`` is then the first of the layers without the window; in families without a period, the
            first of the layers with it.
        activations: names of activations specific to the family's configs -> the decoder's.
        sigmoid_router: True for sigmoid scores of experts.
        scaled_experts: True if scores multiply the experts' inputs instead of their outputs.
        ignored: keys in configs of the family that transformers does not read, and those about multi-token prediction.
        keys: the family's own keys -> those of other families for the same values.
        derived: returns values derived from a config, by the usual keys.
        fixed: keys in configs of the family, with the only supported value.
        names: replacements, in order, from Llama's tensor names to the family's in checkpoints.
        model_names: replacements, in order, from module names in checkpoints to those in transformers' class, if they
            differ. Adapters have the names of the class that they were trained with, and files those of the class that
            saved them with ``save_original_format=False``.
        fused: layers that transformers fuses, by their names in checkpoints.
        turned: True if checkpoints store matrices as [inputs, outputs].
        idle: pattern of tensor names in checkpoints that no layer reads.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer: Callable[[ModelConfig, int], Layer] = llama_layer
    linear: Callable[[Mapping[str, Any]], LinearConfig] | None = None
    biases: Biases = Biases()
    rope: RopeRules = RopeRules()
    norm: str = "plain"
    rms_eps: str = ""
    gated: bool = True
    parallel: bool = False
    scaled_embedding: bool = False
    first_position: int | None = None
    window_pattern: int = 0
    full_first: bool = False
    activations: Mapping[str, str] = field(default_factory=dict)
    sigmoid_router: bool = False
    scaled_experts: bool = False
    ignored: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()
    model_names: tuple[tuple[str, str], ...] = ()
    fused: tuple[str, ...] = ()
    turned: bool = False
    idle: str = r"(?!)"

    @property
    def own(self) -> frozenset[str]:
        """Keys that the family reads in addition to those of all families."""
        return frozenset({*self.defaults, *self.keys, self.eps})

    @property
    def eps(self) -> str:
        """Key of the norms' epsilon."""
        others = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
        return next((key for key in others if key in self.defaults), "rms_norm_eps")

    def in_files(self, name: str) -> str:
        """Return a tensor's name in the family's checkpoints, from Llama's name."""
        for usual, own in self.names:
            name = name.replace(usual, own, 1)
        return name

    def in_models(self, name: str) -> str:
        """Return a tensor's name in transformers' class, from its name in the family's checkpoints."""
        for in_files, own in self.model_names:
            name = name.replace(in_files, own, 1)
        return name

    @property
    def draft_layers(self) -> bool:
        """True if checkpoints may have layers for multi-token prediction, which are not read."""
        return not {*DRAFTING_KEYS}.isdisjoint(self.ignored)
