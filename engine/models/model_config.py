"""Reads the ``config.json`` of a Hugging Face folder into a :class:`ModelConfig`. Imports no torch.

The table in :mod:`pillion.engine.models.families` has one row for each model family. The decoder
(:mod:`pillion.engine.models.decoder`) knows the options of a ModelConfig and never a family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pillion.engine.models.config_json import above_zero, number, per_layer, read_json, size, token_ids
from pillion.engine.models.config_keys import refuse_unknown_keys, refuse_unknown_outer_keys
from pillion.engine.models.families import FAMILIES, TEXT_OF, ModelFamily
from pillion.engine.models.quantization import Quantization
from pillion.engine.models.quantization_methods import QUANTIZATION_KEYS, parse_quantization
from pillion.engine.models.rope_config import RopeConfig, parse_global_and_local, parse_rope
from pillion.errors import ConfigError

# Activations by their names in configs, and the decoder's names for them.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Files in which older tools say how they quantized a folder's weights, beside a config.json that does not.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Shape of a mixture of experts.

    Attributes:
        intermediate_size: inner width of one expert.
        normalize: whether the scores of a token's experts are scaled to a sum of 1.
        layers: for each layer, whether it has experts; a layer without them has one dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and options of a decoder. All fields are part of a model's fingerprint.

    Attributes:
        max_position_embeddings: tokens of the longest text, scaling of the rotary embedding included.
        ropes: the rotary embeddings in use.
        layer_ropes: for each layer, the index of its rotary embedding in ``ropes``; None for a layer without positions
            (NoPE).
        sliding_windows: for each layer, how many tokens a query sees, itself included; 0 means all tokens up to it.
        qkv_bias, o_bias, mlp_bias: which linear layers add a bias.
        activation: the gated MLP's activation, "silu" or "gelu_tanh".
        norm: "plain" rounds before the weight is applied, "wide" after it; "offset" is wide with a weight of 1 + w.
        pre_norm, post_norm: whether the inputs of attention and MLP are normed, and whether their outputs are.
        qk_norm: RMS norm of queries and keys before the rotary embedding, over each "head" or over the whole
            "projection"; "" for none.
        attention_scale: factor of the attention scores.
        attention_softcap, logit_softcap: c of c * tanh(x / c), over scores and over logits; 0 for none.
        embedding_scale, residual_scale: factors of embeddings, and of what each layer adds to the residual stream.
        logit_divisor: divisor of the logits.
        eos_token_ids: tokens that end a text.
        quantization: how the files hold matrices in few bits; None where all of them are plain.
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
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    norm: str = "plain"
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str = ""
    attention_scale: float
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    moe: MoeConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None


def known_architectures() -> tuple[str, ...]:
    """Returns the values of ``model_type`` that can be served."""
    return tuple(sorted({*FAMILIES, *TEXT_OF}))


def load_config(folder: Path) -> ModelConfig:
    """Reads the config of a prepared folder. Raises ConfigError for a missing config or an unsupported model."""
    config = read_json(folder / "config.json")
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            config.setdefault("quantization_config", {"quant_method": method, **read_json(folder / name)})
    return parse_config(config)


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of transformers 4 or 5. Raises ConfigError for an architecture or option that is not supported."""
    config = _text_config(config)
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(f"architecture {name!r} is not supported; known are {', '.join(known_architectures())}")
    raw = {**family.defaults, **config}
    refuse_unknown_keys(str(name), family, raw)
    options = {key: raw[key] for key in family.defaults}
    heads = size(raw, "num_attention_heads")
    kv_heads = size(raw, "num_key_value_heads", heads)
    head_dim = size(raw, "head_dim", size(raw, "hidden_size") // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(f"{name}: {heads} heads over {kv_heads} KV heads of {head_dim} values do not fit together")
    num_layers = size(raw, "num_hidden_layers")
    has_rope = _has_rope(options, num_layers)
    slides = _slides(options, num_layers, has_rope)
    _check_layer_types(str(name), raw, slides)
    window = int(number(options, "sliding_window", 0))
    ropes, layer_ropes = _ropes(raw, family, head_dim, has_rope, slides)
    attention_bias = bool(options.get("attention_bias"))
    return ModelConfig(
        family=str(name),
        vocab_size=size(raw, "vocab_size"),
        hidden_size=size(raw, "hidden_size"),
        intermediate_size=size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=_longest(raw, ropes),
        ropes=ropes,
        layer_ropes=layer_ropes,
        sliding_windows=tuple(window if slide else 0 for slide in slides),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(options.get("mlp_bias")),
        activation=_activation(str(name), raw, options),
        norm=family.norm,
        pre_norm=family.pre_norm,
        post_norm=family.post_norm,
        qk_norm=family.qk_norm,
        attention_scale=_attention_scale(options, head_dim),
        attention_softcap=number(options, "attn_logit_softcapping", 0.0),
        logit_softcap=number(options, "final_logit_softcapping", 0.0),
        embedding_scale=math.sqrt(size(raw, "hidden_size"))
        if family.scaled_embedding
        else number(options, "embedding_multiplier", 1.0),
        residual_scale=number(options, "residual_multiplier", 1.0),
        logit_divisor=above_zero(options, "logits_scaling", 1.0),
        moe=_moe(raw, options, num_layers),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"))), None),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        quantization=parse_quantization(str(name), raw),
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's config out of a config for text and images; any other config as it is."""
    text, family = config.get("text_config"), TEXT_OF.get(str(config.get("model_type")))
    if family is None or not isinstance(text, Mapping):
        return config
    refuse_unknown_outer_keys(str(config["model_type"]), config)
    around = ("bos_token_id", "eos_token_id", "tie_word_embeddings", *QUANTIZATION_KEYS)
    outer = {key: config[key] for key in around if key in config}
    return {**text, **outer, "model_type": family}


def _activation(name: str, raw: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    if "hidden_activation" in options:
        activation = options["hidden_activation"] or "gelu_pytorch_tanh"
    else:
        activation = raw.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"{name}: activation {activation!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _attention_scale(options: Mapping[str, Any], head_dim: int) -> float:
    """Granite's configs hold the scale; for others it is 1 / sqrt of ``query_pre_attn_scalar`` or else of head_dim."""
    if "attention_multiplier" in options:
        return number(options, "attention_multiplier", 1.0)
    return 1.0 / math.sqrt(above_zero(options, "query_pre_attn_scalar", head_dim))


def _has_rope(options: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates. SmolLM3 has layers without: every fourth, or those with a 0 in its list."""
    flags = per_layer(options, "no_rope_layers", num_layers)
    if flags is not None:
        return tuple(bool(flag) for flag in flags)
    interval = size(options, "no_rope_layer_interval", num_layers + 1)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _check_layer_types(name: str, raw: Mapping[str, Any], slides: tuple[bool, ...]) -> None:
    """Raises ConfigError where a config lists other layer types than its family's rule gives, and the rule decides."""
    kinds = per_layer(raw, "layer_types", len(slides)) or []
    for layer, (kind, slide) in enumerate(zip(kinds, slides, strict=False)):
        if kind != ("sliding_attention" if slide else "full_attention"):
            raise ConfigError(
                f"{name}: config.json has layer_types with {kind!r} for layer {layer}, not supported here"
            )


def _slides(options: Mapping[str, Any], num_layers: int, has_rope: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether each layer has the sliding window: by the config's list of layer types, or else by its family's rule."""
    windowed = options.get("sliding_window") and options.get("use_sliding_window", True)
    # In Gemma 3 these layers have a rotary embedding of their own, even where the window is switched off.
    if not windowed and "rope_local_base_freq" not in options:
        return (False,) * num_layers
    kinds = per_layer(options, "layer_types", num_layers)
    if kinds is not None:
        unknown = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention"})
        if unknown:
            raise ConfigError(f"layer type {unknown[0]!r} is not supported; known are full and sliding attention")
        return tuple(kind == "sliding_attention" for kind in kinds)
    if "max_window_layers" in options:
        first = int(number(options, "max_window_layers", 0))
        return tuple(layer >= first for layer in range(num_layers))
    if "sliding_window_pattern" in options:
        pattern = size(options, "sliding_window_pattern")
        return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    if "no_rope_layer_interval" in options:
        return tuple(not rope for rope in has_rope)
    return (True,) * num_layers


def _ropes(
    raw: Mapping[str, Any], family: ModelFamily, head_dim: int, has_rope: tuple[bool, ...], slides: tuple[bool, ...]
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    if "rope_local_base_freq" in family.defaults:
        return parse_global_and_local(raw, head_dim), tuple(int(slide) for slide in slides)
    rope = parse_rope(raw, head_dim, partial=family.partial_rope)
    return (rope,), tuple(0 if rope else None for rope in has_rope)


def _longest(raw: Mapping[str, Any], ropes: tuple[RopeConfig, ...]) -> int:
    """Longest text in tokens. Configs of Gemma 3, llama3 and longrope hold the length after scaling; the other kinds
    of scaling multiply it by their factor, as in vLLM.
    """
    configured = size(raw, "max_position_embeddings")
    return configured if len(ropes) > 1 else max(configured, ropes[0].stretched_max_position)


def _moe(raw: Mapping[str, Any], options: Mapping[str, Any], num_layers: int) -> MoeConfig | None:
    if "num_experts_per_tok" not in options:
        return None
    # transformers 5 writes num_local_experts for all families.
    num_experts = size(raw, "num_local_experts", size(raw, "num_experts", options.get("num_local_experts")))
    per_token = size(options, "num_experts_per_tok")
    if per_token > num_experts:
        raise ConfigError(f"config.json: {per_token} experts per token are more than there are: {num_experts}")
    step, dense = size(options, "decoder_sparse_step", 1), token_ids(options.get("mlp_only_layers"))
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=size(options, "moe_intermediate_size", size(raw, "intermediate_size")),
        normalize=bool(options.get("norm_topk_prob", True)),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
