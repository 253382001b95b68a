"""Parser of a Hugging Face folder's ``config.json`` to ModelConfig. Imports no torch.

The table in :mod:`pillion.engine.models.families` has one row per model family.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pillion.engine.encoders.encoder_parser import ENCODER_KEYS, ENCODER_KINDS, parse_encoder
from pillion.engine.models.config_json import (
    EXPERT_COUNT_KEYS,
    above_zero,
    number,
    per_layer,
    read_json,
    size,
    token_ids,
    vocabulary_ids,
)
from pillion.engine.models.config_keys import (
    check_keys,
    check_outer_keys,
    unread,
    without_vision_keys,
)
from pillion.engine.models.families import DEFAULTS, FAMILIES, FAMILY_KEYS, IGNORED_KEYS, TEXT_OF
from pillion.engine.models.family_rows import EITHER_WAY, REMOVED, SAME_AS, TEXT_AS
from pillion.engine.models.layer_config import read_layers
from pillion.engine.models.layer_operations import ClampedSwiglu, TokenIndex
from pillion.engine.models.model_config import (
    LatentConfig,
    LinearConfig,
    ModelConfig,
    MoeConfig,
    QueryGrowth,
)
from pillion.engine.models.model_family import Biases, ModelFamily
from pillion.engine.models.rope_config import (
    RopeConfig,
    original_tokens,
    parse_global_and_local,
    parse_rope,
    query_scaling,
    yarn_mscale,
)
from pillion.engine.quantized.quantization import QUANTIZATION_KEYS
from pillion.engine.quantized.quantization_methods import parse_quantization
from pillion.errors import ConfigError

_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
}

# Keys of the number of experts per token, and of shared experts, in different families; the first one present wins.
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")

# Files in which older tools store a folder's quantization instead of config.json.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def known_architectures() -> tuple[str, ...]:
    """Return the supported values of ``model_type``."""
    return tuple(sorted({*FAMILIES, *TEXT_OF, *TEXT_AS, *SAME_AS, *ENCODER_KINDS}))


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a config is that of an encoder, i.e. of a bidirectional model."""
    return config.get("model_type") in ENCODER_KINDS


def load_config(folder: Path, ignored_keys: Iterable[str] = ()) -> ModelConfig:
    """Read the config of a folder, without ``ignored_keys``. Raises ConfigError for a missing config or an unsupported
    model."""
    config = without_keys(read_config(folder), ignored_keys)
    try:
        return parse_config(config)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error.message.removeprefix('config.json: ')}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json, completed by older tools' quantization files. Raises ConfigError for missing or
    damaged files."""
    config = read_json(folder / "config.json")
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            config.setdefault("quantization_config", {"quant_method": method, **read_json(folder / name)})
    return config


def without_keys(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a config without the keys of --ignore-config-key, also nested ones. Raises ConfigError for a missing
    key."""
    kept = dict(config)
    for name in names:
        if name not in _keys(kept):
            raise ConfigError(f"--ignore-config-key {name}: config.json has no such key")
        kept = _without(kept, name)
    return kept


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner)


def _without(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without(inner, name) for key, inner in value.items() if key != name}


def unused_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config that :func:`parse_config` accepts and ignores."""
    text = config.get("text_config")
    merged = {**text, **config} if isinstance(text, Mapping) else config
    return unread(merged, FAMILY_KEYS | IGNORED_KEYS | ENCODER_KEYS)


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Parse a config of transformers 4 or 5. Raises ConfigError for an unsupported architecture or option."""
    labels = labels_of(config)
    if is_encoder(config):
        return parse_encoder(config, labels)
    return replace(_parse_decoder(_text_config(config), labels), headless=_is_headless(config))


def _parse_decoder(config: Mapping[str, Any], labels: int) -> ModelConfig:
    name, family = _family_of(config)
    raw = {**family.defaults, **config}
    check_keys(name, family.own, family.ignored, family.fixed, raw, FAMILY_KEYS)
    derived = _derived(raw, family)
    raw |= derived
    options = {**{key: raw[key] for key in family.defaults}, **derived}
    heads = size(raw, "num_attention_heads")
    latents = _latents(raw, options, heads)
    kv_heads, head_dim = _kv_heads(name, raw, heads, latents)
    num_layers = size(raw, "num_hidden_layers")
    rms = bool(family.rms_eps) and raw.get(family.rms_eps) is not None
    has_rope = _has_rope(options, family, num_layers)
    slides = _slides(options, family, num_layers, has_rope)
    linear = _linear(name, raw, family, slides)
    window = int(number(options, "attention_chunk_size", number(options, "sliding_window", 0)))
    if family.rope.nope_if_full and any(slides):
        has_rope = slides
    layers = read_layers(name, raw, options, heads, slides)
    full_dims = [own.head_dim for own, slide in zip(layers.get("layer_heads", ()), slides, strict=False) if not slide]
    ropes, layer_ropes = _ropes(raw, options, family, (head_dim, *full_dims[:1]), has_rope, slides)
    qkv_bias, o_bias, mlp_bias = _biases(options, family.biases)
    moe = _moe(raw, options, family, num_layers)
    return ModelConfig(
        family=name,
        vocab_size=size(raw, "vocab_size"),
        hidden_size=size(raw, "hidden_size"),
        intermediate_size=_mlp_width(raw, options, moe),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads if latents is None else 1,
        head_dim=head_dim if latents is None else latents.row,
        rms_norm_eps=above_zero(raw, family.rms_eps if rms else family.eps, 1e-6),
        max_position_embeddings=_max_length(raw, family, ropes),
        ropes=ropes,
        layer_ropes=layer_ropes,
        sliding_windows=tuple(window if slide else 0 for slide in slides),
        **layers,
        chunked="attention_chunk_size" in options,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        labels=labels,
        learned_positions=family.first_position is not None,
        activation=_activation(name, family, raw, options),
        gated=family.gated,
        norm="plain" if rms else family.norm,
        norm_bias=family.biases.norm,
        qk_norm=bool(options.get("use_qk_norm", True)),
        post_norm=bool(options.get("use_post_norm", True)),
        attention_gate=bool(options.get("use_attention_gate", True)),
        parallel=family.parallel,
        attention_scale=_attention_scale(options, head_dim) if latents is None else _latent_scale(latents, ropes[0]),
        query_growth=_query_growth(raw, options, family, ropes),
        attention_softcap=above_zero(options, "attn_logit_softcapping", 0.0),
        logit_softcap=above_zero(options, "final_logit_softcapping", 0.0),
        embedding_scale=math.sqrt(size(raw, "hidden_size"))
        if family.scaled_embedding
        else above_zero(options, "scale_emb", above_zero(options, "embedding_multiplier", 1.0)),
        residual_scale=_residual_scale(options, num_layers),
        logit_divisor=_logit_divisor(options, size(raw, "hidden_size")),
        moe=moe,
        latents=latents,
        linear=linear,
        bos_token_id=next(iter(vocabulary_ids(raw, "bos_token_id", size(raw, "vocab_size"))), None),
        eos_token_ids=vocabulary_ids(raw, "eos_token_id", size(raw, "vocab_size")),
        quantization=parse_quantization(name, raw),
    )


def _mlp_width(raw: Mapping[str, Any], options: Mapping[str, Any], moe: MoeConfig | None) -> int:
    """Return the inner width of dense MLPs; configs of models without dense MLPs may lack it."""
    of_experts = moe.intermediate_size if moe is not None and all(moe.layers) else None
    width = size(raw, "intermediate_size", of_experts)
    return size(options, "intermediate_size_mlp", width)


def _biases(options: Mapping[str, Any], biases: Biases) -> Iterator[bool]:
    """Yield whether qkv, output projection and MLPs have biases."""
    for bias in (biases.qkv, biases.o, biases.mlp):
        yield bool(options.get(bias)) if isinstance(bias, str) else bias


def labels_of(config: Mapping[str, Any]) -> int:
    """Return the number of a classifier's labels, by default 2; 0 for other models."""
    architectures = config.get("architectures")
    if not (
        isinstance(architectures, list)
        and architectures
        and str(architectures[0]).endswith("ForSequenceClassification")
    ):
        return 0
    labels = config.get("id2label")
    return size(config, "num_labels", len(labels) if isinstance(labels, Mapping) and labels else 2)


def _is_headless(config: Mapping[str, Any]) -> bool:
    """Return whether a config names a class of transformers without a head, such as LlavaModel."""
    architectures = config.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return first.endswith("Model") and not first.endswith("LMHeadModel")


def _family_of(config: Mapping[str, Any]) -> tuple[str, ModelFamily]:
    """Return the family of a config, and its name. Raises ConfigError for an unknown one."""
    model_type = config.get("model_type")
    name = SAME_AS.get(model_type, model_type) if isinstance(model_type, str) else ""
    if name in REMOVED:
        raise ConfigError(f"architecture {name!r} is not supported: it was removed in this release, 0.3")
    if name not in FAMILIES:
        similar = difflib.get_close_matches(str(model_type)[:80], known_architectures(), 3)
        hint = f"; near it are {', '.join(similar)}" if similar else ""
        raise ConfigError(f"architecture {str(model_type)[:80]!r} is not supported{hint}; docs/models.md lists what is")
    return name, FAMILIES[name]


def _derived(raw: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """Return the values of the family's own keys under the keys of other families, and values derived from a config."""
    derived = {common_key: raw[key] for key, common_key in family.keys.items() if raw.get(key) is not None}
    if "intermediate_size" in family.keys.values() and "intermediate_size" not in derived:
        derived["intermediate_size"] = 4 * size({**raw, **derived}, "hidden_size")
    merged = {**raw, **derived}
    if "rotary_dim" in family.defaults and raw["rotary_dim"]:
        width = size(merged, "head_dim", size(merged, "hidden_size") // size(merged, "num_attention_heads"))
        derived["partial_rotary_factor"] = size(raw, "rotary_dim") / width
    return {**derived, **family.derived(merged)}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's config: the ``text_config`` of a multimodal config, the text keys of an old, flat
    multimodal config, and any other config unchanged. Raises ConfigError for an unknown text model."""
    outer, text = str(config.get("model_type")), config.get("text_config")
    if outer in TEXT_AS:
        # A text model that a class without a head saved: its config does not tell whether the head was tied.
        return {**_as_family(config, outer), "tie_word_embeddings": False}
    text_models = TEXT_OF.get(outer)
    if text_models is None or (text is not None and not isinstance(text, Mapping)):
        return config
    if text is None:
        text = {key: value for key, value in without_vision_keys(config).items() if key != "model_type"}
    else:
        check_outer_keys(outer, config, FAMILY_KEYS)
    model_type = text.get("model_type") or text_models[0]
    model_type = SAME_AS.get(model_type, model_type)
    if model_type not in text_models:
        raise ConfigError(
            f"{outer}: config.json has a text_config of model_type = {model_type!r}, which is not supported"
        )
    outer_keys = ("bos_token_id", "eos_token_id", "tie_word_embeddings", *QUANTIZATION_KEYS)
    return {**_as_family(text, model_type), **{key: config[key] for key in outer_keys if key in config}}


def _as_family(text: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """Convert the config of a text model of ``model_type`` to one of the family with the same arithmetic."""
    if model_type not in TEXT_AS:
        return {**text, "model_type": model_type}
    family, own = TEXT_AS[model_type]
    return {**DEFAULTS.get(model_type, {}), **own, **text, **_without_mrope(text), "model_type": family}


def _without_mrope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a config's rotary embedding without those of mrope, which only affects images."""
    ropes = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if isinstance(rope, Mapping):
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            ropes[key] = {name: "default" if value == "mrope" else value for name, value in plain.items()}
    return ropes


def _activation(name: str, family: ModelFamily, raw: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    if "hidden_activation" in options:
        activation = options["hidden_activation"] or "gelu_pytorch_tanh"
    else:
        activation = raw.get("hidden_act") or "silu"
    known = {**_ACTIVATIONS, **family.activations}
    if not family.gated:
        known |= {name: name for name in ("relu2", "gelu", "relu", "xielu")}
    if activation not in known:
        raise ConfigError(f"{name}: activation {activation!r} is not supported; known are {', '.join(known)}")
    return known[activation]


def _attention_scale(options: Mapping[str, Any], head_dim: int) -> float:
    """Return the scale of attention scores: Granite's multiplier, else 1 / sqrt of ``query_pre_attn_scalar`` or
    head_dim."""
    if "attention_multiplier" in options:
        return above_zero(options, "attention_multiplier", 1.0 / math.sqrt(head_dim))
    return 1.0 / math.sqrt(above_zero(options, "query_pre_attn_scalar", head_dim))


def _kv_heads(name: str, raw: Mapping[str, Any], heads: int, latents: LatentConfig | None) -> tuple[int, int]:
    """Return the number of KV heads, and the width of a head, or with MLA of its part with a rotary embedding. Raises
    ConfigError for inconsistent numbers of heads."""
    kv_heads = size(raw, "num_key_value_heads", heads)
    if latents is not None and kv_heads != heads:
        raise ConfigError(f"{name}: {heads} heads and num_key_value_heads = {kv_heads} are inconsistent")
    head_dim = size(raw, "head_dim", size(raw, "hidden_size") // heads) if latents is None else latents.qk_rope_head_dim
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(f"{name}: {heads} heads over {kv_heads} KV heads of {head_dim} values are inconsistent")
    return kv_heads, head_dim


def _latents(raw: Mapping[str, Any], options: Mapping[str, Any], heads: int) -> LatentConfig | None:
    """Return the latent attention (MLA), in families that have it."""
    if "kv_lora_rank" not in options:
        return None
    rotary = size(options, "qk_rope_head_dim")
    if size(raw, "head_dim", rotary) != rotary:
        raise ConfigError(f"config.json: head_dim = {raw['head_dim']} is not qk_rope_head_dim = {rotary}")
    return LatentConfig(
        kv_lora_rank=size(options, "kv_lora_rank"),
        qk_rope_head_dim=rotary,
        qk_nope_head_dim=size(options, "qk_nope_head_dim"),
        v_head_dim=size(options, "v_head_dim", size(raw, "hidden_size") // heads),
        q_lora_rank=0 if options["q_lora_rank"] is None else size(options, "q_lora_rank"),
        **_token_index(raw, options),
    )


def _token_index(raw: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields ``index`` and ``selecting`` of LatentConfig; {} in families without an indexer."""
    if "index_topk" not in options:
        return {}
    index = TokenIndex(
        heads=size(options, "index_n_heads"),
        dim=size(options, "index_head_dim"),
        top=size(options, "index_topk"),
        interleaved=bool(options.get("indexer_rope_interleave")),
    )
    if index.dim < size(options, "qk_rope_head_dim"):
        raise ConfigError(f"config.json: index_head_dim = {index.dim} is less than qk_rope_head_dim")
    return {"index": index, "selecting": _selecting(raw, size(raw, "num_hidden_layers"))}


def _selecting(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it runs the indexer, or reuses the selection of an earlier layer."""
    kinds = raw.get("indexer_types")
    if kinds is None and (pattern := raw.get("index_topk_pattern")) is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        period, offset = max(int(number(raw, "index_topk_freq", 1)), 1), int(number(raw, "index_skip_topk_offset", 2))
        kinds = ["shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(num_layers)]
    if len(kinds) != num_layers or not {"full", "shared"}.issuperset(kinds) or kinds[0] != "full":
        raise ConfigError(f"config.json: indexer_types = {kinds} does not fit {num_layers} layers")
    return tuple(kind == "full" for kind in kinds)


def _latent_scale(latents: LatentConfig, rope: RopeConfig) -> float:
    """Return the scale of scores: 1 / sqrt of a head's width, times YaRN's factor if any."""
    scale = 1.0 / math.sqrt(latents.head_dim)
    if rope.kind == "default" or not rope.mscale_all_dim:
        return scale
    return scale * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def _residual_scale(options: Mapping[str, Any], num_layers: int) -> float:
    """Return the factor of branches added to the residual stream: Granite's, or MiniCPM's, which depends on the number
    of layers."""
    if options.get("scale_depth") is not None:
        return above_zero(options, "scale_depth", 1.0) / math.sqrt(num_layers)
    return above_zero(options, "residual_multiplier", 1.0)


def _logit_divisor(options: Mapping[str, Any], hidden_size: int) -> float:
    if options.get("dim_model_base") is not None:
        return hidden_size / size(options, "dim_model_base")
    return above_zero(options, "logits_scaling", 1.0) / above_zero(options, "logit_scale", 1.0)


def _has_rope(options: Mapping[str, Any], family: ModelFamily, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has a rotary embedding. In SmolLM3, every fourth layer has none, or the layers with a 0
    in ``no_rope_layers``."""
    kind = options.get("position_embedding_type", "rope")
    if kind not in ("rope", "nope", None):
        raise ConfigError(f"config.json: position_embedding_type = {kind!r} is not supported")
    if family.first_position is not None or kind != "rope":
        return (False,) * num_layers
    flags = per_layer(options, "no_rope_layers", num_layers) if options.get("no_rope_layers") else None
    if flags is not None:
        return tuple(bool(flag) for flag in flags)
    interval = size(options, "no_rope_layer_interval", num_layers + 1)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _linear(name: str, raw: Mapping[str, Any], family: ModelFamily, slides: tuple[bool, ...]) -> LinearConfig | None:
    """Return the layers with states, in families that have them."""
    if family.linear is not None:
        return family.linear(raw)
    _check_layer_types(name, raw, slides)
    return None


def _check_layer_types(name: str, raw: Mapping[str, Any], slides: tuple[bool, ...]) -> None:
    """Raise ConfigError for layer types that contradict the family's rule."""
    kinds = per_layer(raw, "layer_types", len(slides)) or []
    for layer, (kind, slide) in enumerate(zip(kinds, slides, strict=False)):
        if kind not in (("sliding_attention", "chunked_attention") if slide else ("full_attention",)):
            raise ConfigError(
                f"{name}: config.json has layer_types with {kind!r} for layer {layer}, not supported here"
            )


def _kinds(options: Mapping[str, Any], key: str, known: tuple[str, str], num_layers: int) -> list[Any] | None:
    """Return each layer's kind, one of ``known``; None for null and a missing key. Raises ConfigError for an unknown
    kind."""
    kinds = per_layer(options, key, num_layers)
    unknown = sorted({str(kind) for kind in kinds or ()}.difference(known))
    if unknown:
        raise ConfigError(
            f"config.json: {key} has {unknown[0]!r}, which is not supported; known are {known[0]} and {known[1]}"
        )
    return kinds


def _slides(
    options: Mapping[str, Any], family: ModelFamily, num_layers: int, has_rope: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Return whether each layer has the sliding window: by the config's ``layer_types``, else by its other keys and the
    family's ``window_pattern``."""
    windowed = options.get("sliding_window") and options.get("use_sliding_window", True)
    if "attention_chunk_size" in options:
        kinds = _kinds(options, "layer_types", ("full_attention", "chunked_attention"), num_layers)
        chunks = has_rope if kinds is None else (kind == "chunked_attention" for kind in kinds)
        return tuple(bool(options["attention_chunk_size"]) and chunk for chunk in chunks)
    # Local layers may have their own rotary embedding, even with the window switched off.
    if not windowed and not family.rope.local:
        return (False,) * num_layers
    kinds = _kinds(options, "layer_types", ("full_attention", "sliding_attention"), num_layers)
    if kinds is not None:
        return tuple(kind == "sliding_attention" for kind in kinds)
    limit = int(number(options, "max_window_layers", num_layers))
    if "max_window_layers" in options and not family.window_pattern:
        return tuple(layer >= limit for layer in range(num_layers))
    if "sliding_window_pattern" in options or family.window_pattern:
        pattern, first = size(options, "sliding_window_pattern", family.window_pattern), 0 if family.full_first else 1
        return tuple(layer < limit and (layer + first) % pattern != 0 for layer in range(num_layers))
    if "no_rope_layer_interval" in options:
        return tuple(not rope for rope in has_rope)
    return (True,) * num_layers


def _ropes(
    raw: Mapping[str, Any],
    options: Mapping[str, Any],
    family: ModelFamily,
    head_dims: tuple[int, ...],
    has_rope: tuple[bool, ...],
    slides: tuple[bool, ...],
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """Return the rotary embeddings in use, and for each layer its index among them, None without one."""
    head_dim = head_dims[0]
    if family.rope.local:
        both = parse_global_and_local(raw, *head_dims, partial=family.rope.partial)
        return both, tuple(int(slide) for slide in slides)
    rope = parse_rope(raw, head_dim, partial=family.rope.partial, query_growth=family.rope.query_growth == "all")
    interleaved = bool(options.get("rope_interleave", family.rope.interleaved))
    rope = replace(rope, interleaved=interleaved)
    bases = per_layer(raw, "layer_rope_theta", len(slides)) or [rope.theta * has for has in has_rope]
    thetas = sorted({above_zero({"layer_rope_theta": base}, "layer_rope_theta", 1.0) for base in bases if base})
    ropes = tuple(replace(rope, theta=theta) for theta in thetas or [rope.theta])
    return ropes, tuple(thetas.index(base) if base else None for base in bases)


def _query_growth(
    raw: Mapping[str, Any], options: Mapping[str, Any], family: ModelFamily, ropes: tuple[RopeConfig, ...]
) -> QueryGrowth | None:
    """Return the position-dependent query scale; None if there is none. Raises ConfigError if rotary frequencies depend
    on the length, since rows of the rotary tables are then not positions."""
    if family.rope.query_growth == "all":
        beta, length = query_scaling(raw)
        growth = QueryGrowth(rate=beta, length=length)
    elif family.rope.query_growth and options["attn_temperature_tuning"]:
        length = size(options, "floor_scale")
        growth = QueryGrowth(rate=number(options, "attn_scale", 0.0), length=length, ahead=1, nope_alone=True)
    else:
        return None
    if original_tokens(ropes):
        raise ConfigError(f"a position-dependent query scale is not supported with rope type {ropes[0].kind!r}")
    return growth if growth.rate else None


def _max_length(raw: Mapping[str, Any], family: ModelFamily, ropes: tuple[RopeConfig, ...]) -> int:
    """Return the max length of a text. ``max_position_embeddings`` includes scaling in Gemma 3, Ministral 3, and with
    the kinds llama3 and longrope; other kinds of scaling multiply it, as in vLLM."""
    configured = size(raw, "max_position_embeddings")
    after_scaling = len(ropes) > 1 or family.rope.query_growth == "all"
    return configured if after_scaling else max(configured, ropes[0].stretched_max_position)


def _moe(raw: Mapping[str, Any], options: Mapping[str, Any], family: ModelFamily, num_layers: int) -> MoeConfig | None:
    """Return the mixture of experts; None for a model without experts."""
    for key in (*_PER_TOKEN, *_NUM_SHARED):
        if isinstance(value := options.get(key), list) and value and value == value[:1] * len(value):
            options = {**options, key: value[0]}
    per_token_key = next((key for key in _PER_TOKEN if key in options), None)
    if per_token_key is None:
        return None
    count_key = next(key for key in EXPERT_COUNT_KEYS if key in options)
    count_key = next((key for key in EXPERT_COUNT_KEYS if raw.get(key) is not None), count_key)
    if raw[count_key] == 0 and "shared_intermediate_size" in options:
        return None
    num_experts = size(raw, count_key)
    per_token = size(options, per_token_key)
    if per_token > num_experts:
        raise ConfigError(f"config.json: {per_token_key} = {per_token} exceeds the number of experts, {num_experts}")
    of_experts = options.get("moe_intermediate_size") is not None
    inner = size(options, "moe_intermediate_size") if of_experts else size(raw, "intermediate_size")
    groups, kept_groups = _expert_groups(options, count_key, num_experts, per_token)
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=inner,
        normalize=bool(options.get("norm_topk_prob", family.fixed.get("norm_topk_prob", True)))
        and not family.scaled_experts,
        layers=_with_experts(options, num_layers),
        sigmoid=family.sigmoid_router or _choice(options, "expert_selection_fn", ("softmax", "sigmoid")) == "sigmoid",
        scale=above_zero(options, "routed_scaling_factor", above_zero(options, "router_scaling_factor", 1.0)),
        exact="topk_method" in options,
        groups=groups,
        kept_groups=kept_groups,
        clamped=_clamped(options),
        group_best=1 if "topk_method" in options else 2,
        scaled_inputs=family.scaled_experts,
        shared=_shared(options, inner),
        beside="enable_moe_block" in options,
        either_way=bool(raw.get(EITHER_WAY)),
        share=0.5 if _choice(options, "shared_expert_combination_strategy", ("sum", "average")) == "average" else 1.0,
    )


def _choice(options: Mapping[str, Any], key: str, known: tuple[str, str]) -> str:
    """Return a key's value, one of ``known``; by default the first."""
    value = options.get(key, known[0])
    if value not in known:
        raise ConfigError(f"config.json: {key} = {value!r} is not supported; {known[0]!r} and {known[1]!r} are")
    return str(value)


def _expert_groups(options: Mapping[str, Any], count_key: str, num_experts: int, per_token: int) -> tuple[int, int]:
    """Return the number of groups of experts, and the groups per token. Raises ConfigError for groups of unequal size
    or too few experts."""
    method = options.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise ConfigError(f"config.json: topk_method = {method!r} is not supported")
    if method == "greedy":
        return 1, 1
    groups, kept_groups = size(options, "n_group", 1), size(options, "topk_group", 1)
    if groups > 1 and (num_experts % groups or num_experts // groups < 2):
        raise ConfigError(f"config.json: {count_key} = {num_experts} cannot be divided into n_group = {groups} groups")
    if kept_groups > groups:
        raise ConfigError(f"config.json: topk_group = {kept_groups} is more than n_group = {groups}")
    if per_token > kept_groups * num_experts // groups:
        raise ConfigError(
            f"config.json: topk_group = {kept_groups} of n_group = {groups} groups of {num_experts} experts have fewer"
            f" than the {per_token} of a token"
        )
    return groups, kept_groups


def _clamped(options: Mapping[str, Any]) -> ClampedSwiglu | None:
    """Return the activation of gpt-oss's experts, in families that have it."""
    if "swiglu_limit" not in options:
        return None
    return ClampedSwiglu(
        number(options, "swiglu_alpha", 0.0),
        above_zero({"swiglu_limit": options["swiglu_limit"] or 0.0}, "swiglu_limit", 0.0),
    )


def _shared(options: Mapping[str, Any], inner: int) -> int:
    """Return the inner width of the shared expert, given as a width or a multiple of an expert's; 0 for none."""
    count = next((options[key] for key in _NUM_SHARED if key in options), None)
    width_keys = ("shared_intermediate_size", "shared_expert_intermediate_size")
    width = next((options[key] for key in width_keys if key in options), None)
    return size({"shared experts": count or width}, "shared experts") * (inner if count else 1) if count or width else 0


def _with_experts(options: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts, by the keys of different families."""
    kinds = _kinds(options, "mlp_layer_types", ("dense", "sparse"), num_layers)
    if kinds is not None:
        return tuple(kind == "sparse" for kind in kinds)
    if options.get("moe_layers") is not None:
        listed = token_ids(options["moe_layers"])
        return tuple(layer in listed for layer in range(num_layers))
    steps = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
    step = next((size(options, key) for key in steps if key in options), 1)
    dense = token_ids(options.get("mlp_only_layers"))
    first = int(number(options, "first_k_dense_replace", number(options, "moe_layer_start_index", 0)))
    last = int(number(options, "moe_layer_end_index", -1)) % num_layers
    return tuple(
        layer not in dense and (layer + 1) % step == 0 and first <= layer <= last for layer in range(num_layers)
    )
