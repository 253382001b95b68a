"""Parser of an encoder's ``config.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pillion.engine.models.config_json import above_zero, number, per_layer, size, vocabulary_ids
from pillion.engine.models.config_keys import check_keys
from pillion.engine.models.encoder_config import EncoderConfig
from pillion.engine.models.families import FAMILY_KEYS
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

# Classifier head (``EncoderConfig.head``) by model type, for encoders with learned positions.
_LEARNED = {"bert": "pooler", "roberta": "dense", "xlm-roberta": "dense"}
_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
}
# Keys that are read, or ignored, in addition to those of all models; and those of encoders with rotary embeddings.
_OWN = frozenset({"layer_norm_eps", "type_vocab_size"})
_OWN_ROTARY = frozenset(
    {
        *("norm_eps", "norm_bias", "attention_bias", "mlp_bias", "hidden_activation", "local_attention"),
        *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "sliding_window"),
        *("classifier_activation", "classifier_bias", "classifier_pooling"),
    }
)
_IGNORED = (
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    "sbert_ce_default_activation_function",
    *("directionality", "gradient_checkpointing", "sentence_transformers", "cls_token_id", "mask_token_id"),
)
_IGNORED_ROTARY = (
    *("initializer_cutoff_factor", "sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn"),
    *("reference_compile", "repad_logits_with_grad", "position_embedding_type", "layer_norm_eps", "decoder_bias"),
    "mlp_dropout",
)
ENCODER_KEYS = frozenset({*_OWN, *_OWN_ROTARY, *_IGNORED, *_IGNORED_ROTARY})
ENCODER_KINDS = (*_LEARNED, "modernbert")


def parse_encoder(raw: Mapping[str, Any], labels: int) -> ModelConfig:
    """Parse the config of an encoder, a classifier with ``labels`` labels unless 0. Raises ConfigError for unsupported
    values."""
    kind = str(raw["model_type"])
    learned = kind in _LEARNED
    fixed = {"is_causal": False, **({"position_embedding_type": "absolute"} if learned else {})}
    own, ignored = (_OWN, _IGNORED) if learned else (_OWN_ROTARY, (*_IGNORED, *_IGNORED_ROTARY))
    check_keys(kind, own, ignored, fixed, raw, FAMILY_KEYS)
    if raw.get("is_decoder"):
        raise ConfigError(f"{kind}: config.json has is_decoder = True, which is not supported")
    hidden, heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
    if hidden % heads or (not learned and hidden // heads % 2):
        raise ConfigError(f"{kind}: {heads} heads do not divide {hidden} values")
    encoder = _learned(kind, raw, labels) if learned else _rotary(raw, labels)
    longest = encoder.num_positions - encoder.position_offset
    if learned and longest < 1:
        raise ConfigError(f"{kind}: max_position_embeddings = {encoder.num_positions} leaves no position")
    return ModelConfig(
        family=kind,
        vocab_size=size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size(raw, "intermediate_size"),
        num_layers=1,
        # One small dummy head, since the pool needs a KV size.
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=encoder.eps,
        # Plus the token that a decoder would generate.
        max_position_embeddings=(longest if learned else size(raw, "max_position_embeddings", 8192)) + 1,
        ropes=(),
        layer_ropes=(None,),
        sliding_windows=(0,),
        attention_scale=1.0,
        labels=labels,
        encoder=encoder,
        bos_token_id=next(iter(vocabulary_ids(raw, "bos_token_id", size(raw, "vocab_size"))), None),
        eos_token_ids=vocabulary_ids(raw, "eos_token_id", size(raw, "vocab_size")),
    )


def _activation(raw: Mapping[str, Any], key: str) -> str:
    name = raw.get(key) or "gelu"
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{raw['model_type']}: {key} {name!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _learned(kind: str, raw: Mapping[str, Any], labels: int) -> EncoderConfig:
    padding = None if kind == "bert" else int(number(raw, "pad_token_id", 1))
    return EncoderConfig(
        num_layers=size(raw, "num_hidden_layers"),
        num_heads=size(raw, "num_attention_heads"),
        eps=above_zero(raw, "layer_norm_eps", 1e-12),
        activation=_activation(raw, "hidden_act"),
        position_offset=0 if padding is None else padding + 1,
        padding_id=padding,
        num_positions=size(raw, "max_position_embeddings", 512),
        num_token_types=size(raw, "type_vocab_size", 2),
        head=_LEARNED[kind] if labels else "",
    )


def _rotary(raw: Mapping[str, Any], labels: int) -> EncoderConfig:
    layers = size(raw, "num_hidden_layers")
    kinds = per_layer(raw, "layer_types", layers)
    if kinds is None:
        interval = size(raw, "global_attn_every_n_layers", 3)
        kinds = ["sliding_attention" if layer % interval else "full_attention" for layer in range(layers)]
    if not {*kinds} <= {"sliding_attention", "full_attention"}:
        raise ConfigError(f"modernbert: layer_types {sorted({*map(str, kinds)})} are not all supported")
    window = size(raw, "local_attention", 128) // 2
    thetas = {
        "full_attention": _theta(raw, "full_attention", "global_rope_theta", 160_000.0),
        "sliding_attention": _theta(raw, "sliding_attention", "local_rope_theta", 10_000.0),
    }
    return EncoderConfig(
        num_layers=layers,
        num_heads=size(raw, "num_attention_heads"),
        eps=above_zero(raw, "norm_eps", 1e-5),
        activation=_activation(raw, "hidden_activation"),
        thetas=tuple(thetas[kind] for kind in kinds),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        norm_bias=bool(raw.get("norm_bias", False)),
        head="normed" if labels else "",
        head_activation=_activation(raw, "classifier_activation"),
        head_bias=bool(raw.get("classifier_bias", False)),
    )


def _theta(raw: Mapping[str, Any], kind: str, old_key: str, default: float) -> float:
    """Return the rotary base of the layers of type ``kind``. Raises ConfigError if their rotary embedding is scaled."""
    ropes = raw.get("rope_parameters")
    rope = ropes.get(kind) if isinstance(ropes, Mapping) else None
    rope = rope if isinstance(rope, Mapping) else {}
    if (
        rope.get("rope_type", "default") != "default"
        or set(rope) - {"rope_type", "rope_theta"}
        or raw.get("rope_scaling")
    ):
        raise ConfigError(f"modernbert: a rotary embedding other than the default one is not supported: {dict(rope)}")
    return above_zero(rope, "rope_theta", above_zero(raw, old_key, default))
