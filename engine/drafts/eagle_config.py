"""The ``config.json`` of an EAGLE-3 head, as ``speculators`` writes it or in the original format.

``speculators`` puts the keys of the head's single layer under ``transformer_layer_config``, and omits transformers'
defaults. In the original format they are at the top level, with ``draft_vocab_size``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pillion.engine.models.config_json import read_json, size, token_ids
from pillion.engine.models.config_keys import check_head_keys
from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.families import DEFAULTS, layers_of
from pillion.engine.models.layer_operations import Entries, Layer, Multiply
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

_LAYER_TYPES = ("llama", "qwen3")
# Keys of the original format that are not the layer's.
_HEAD_KEYS = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", "eagle_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Sizes and options of an EAGLE-3 head.

    Attributes:
        layer: config of the head's single layer and of its rotary embedding; ``vocab_size`` is the main model's.
        draft_vocab_size: number of tokens that the head can draft.
        aux_hidden_state_layers: the main model's layers whose inputs the head reads, in the order of concatenation.
        state_size: hidden size of the main model.
        norm_before_residual: True if the head's residual is the normed hidden state instead of the hidden state.
    """

    layer: ModelConfig
    draft_vocab_size: int
    aux_hidden_state_layers: tuple[int, ...]
    state_size: int
    norm_before_residual: bool

    @property
    def operations(self) -> Layer:
        """Operations of the head's layer, from the concatenated normed embedding and normed hidden state on."""
        _, qkv, *later = layers_of(self.layer)[0]
        assert isinstance(qkv, Multiply)
        matrix = replace(qkv.matrix, inputs=(Entries(2 * self.layer.hidden_size),))
        return (Multiply(matrix), *later)


def load_eagle_config(folder: Path, main: ModelConfig) -> EagleConfig:
    """Read the config of an EAGLE-3 head for the model ``main``. Raises ConfigError if the head is not supported, or
    was made for another model."""
    raw = read_json(folder / "config.json")
    head, layer_keys = _split_keys(raw)
    layer_type = layer_keys.get("model_type")
    if layer_type not in _LAYER_TYPES:
        supported = " and ".join(_LAYER_TYPES)
        raise ConfigError(f"its layer has model_type {layer_type!r}; only {supported} are supported")
    # ``speculators`` omits transformers' defaults, which may differ from the family's.
    layer = parse_config({**DEFAULTS[layer_type], **layer_keys})
    if layer.quantization is not None:
        raise ConfigError(f"its weights are quantized ({layer.quantization.words}); only plain ones are supported")
    if layer.num_layers != 1:
        raise ConfigError(f"it has {layer.num_layers} layers; only heads of one layer are supported")
    if layer.vocab_size != main.vocab_size:
        raise ConfigError(f"it was made for a vocabulary of {layer.vocab_size} tokens, the model has {main.vocab_size}")
    state_size = size(head, "target_hidden_size", layer.hidden_size)
    if state_size != main.hidden_size:
        raise ConfigError(f"it reads hidden states of {state_size} values, but the model's have {main.hidden_size}")
    draft_vocab_size = size(head, "draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise ConfigError(f"its draft_vocab_size {draft_vocab_size} is larger than the vocabulary, {layer.vocab_size}")
    return EagleConfig(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        aux_hidden_state_layers=_aux_hidden_state_layers(head, main.num_layers),
        state_size=state_size,
        norm_before_residual=bool(head.get("norm_before_residual")),
    )


def _split_keys(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config's entries of the head, and those of its layer. Raises ConfigError for an unsupported head."""
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        if raw.get("speculators_model_type") != "eagle3":
            raise ConfigError(f"its speculators_model_type is {raw.get('speculators_model_type')!r}, not 'eagle3'")
        check_head_keys(raw)
        layer = raw.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise ConfigError(f"config.json: transformer_layer_config must be an object, not {layer!r}")
        return dict(raw), layer
    if "draft_vocab_size" not in raw:
        raise ConfigError(
            "it is not an EAGLE-3 head: config.json has neither speculators_model_type nor draft_vocab_size"
        )
    head = {key: raw[key] for key in _HEAD_KEYS if key in raw}
    options = head.pop("eagle_config", None) or {}
    if not isinstance(options, dict) or options.get("use_aux_hidden_state") is False:
        raise ConfigError(
            f"config.json has eagle_config = {options!r}; only heads that read three hidden states are supported"
        )
    check_head_keys(options)
    return {**head, **options}, {key: value for key, value in raw.items() if key not in _HEAD_KEYS}


def _aux_hidden_state_layers(head: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the main model's layers whose inputs the head reads: the config's, or vLLM's default."""
    ids = head.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        layers: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    else:
        layers = token_ids(ids)
        if not isinstance(ids, list) or not ids or len(layers) != len(ids):
            raise ConfigError(f"config.json: eagle_aux_hidden_state_layer_ids must be a list of layers, not {ids!r}")
    unknown = [layer for layer in layers if not 0 <= layer < num_layers]
    if unknown:
        raise ConfigError(f"it reads the inputs of layer {unknown[0]}; the model has {num_layers} layers")
    return layers
