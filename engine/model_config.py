"""What a model looks like, read from the ``config.json`` of a Hugging Face folder. Imports no torch.

A family is one row of ``_FAMILIES``: what its config leaves unsaid, and which of the decoder's options it has. The
decoder (:mod:`engine.decoder`) knows options, never families.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pillion.errors import ConfigError

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields behind ``theta`` belong to the kinds that scale; see :mod:`engine.rope`."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and options of a decoder.

    Attributes:
        sliding_windows: per layer, how many tokens a query sees, itself included; 0 means all before it.
        qkv_bias, o_bias, mlp_bias: which linear layers add a bias.
        qk_norm: RMS norm over each query and key head before the rotary embedding.
        eos_token_ids: tokens that end a text.
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
    rope: RopeConfig
    sliding_windows: tuple[int, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Family:
    """A row of the table. An option is True, False, or the key of the config that says it."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows_by_layer: bool = False


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(
        {"max_position_embeddings": 2048}, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "mistral": _Family({"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": _Family({"max_position_embeddings": 32_768}, qkv_bias=True, windows_by_layer=True),
    "qwen3": _Family(
        {"max_position_embeddings": 32_768, "head_dim": 128},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows_by_layer=True,
    ),
}


def known_architectures() -> tuple[str, ...]:
    """The values of ``model_type`` that can be served."""
    return tuple(sorted(_FAMILIES))


def load_config(folder: Path) -> ModelConfig:
    """The model of a prepared folder. Raises ConfigError where it has none, or none that can be served."""
    return parse_config(read_json(folder / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError when it is not there or not one."""
    try:
        said = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is no model folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return said


def parse_config(said: Mapping[str, Any]) -> ModelConfig:
    """Reads a config of transformers 4 or 5. Raises ConfigError for an architecture or option that is not built."""
    name = said.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(f"architecture {name!r} is not supported; known are {', '.join(known_architectures())}")
    raw = {**family.defaults, **said}
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{name}: activation {raw['hidden_act']!r} is not supported; known is silu")
    if raw.get("quantization_config"):
        raise ConfigError(f"{name}: quantized weights are not supported; use the bf16 or fp32 release, or a GGUF file")
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    head_dim = _size(raw, "head_dim", _size(raw, "hidden_size") // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(f"{name}: {heads} heads over {kv_heads} KV heads of {head_dim} values do not fit together")
    max_position = _size(raw, "max_position_embeddings")
    return ModelConfig(
        family=str(name),
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=max_position,
        rope=_rope(raw, max_position, head_dim),
        sliding_windows=_windows(raw, family, _size(raw, "num_hidden_layers")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=_option(raw, family.qkv_bias),
        o_bias=_option(raw, family.o_bias),
        mlp_bias=_option(raw, family.mlp_bias),
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"))), None),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
    )


def token_ids(said: Any) -> tuple[int, ...]:
    """The ids in ``eos_token_id`` and its like: nothing, one number, or a list."""
    found = said if isinstance(said, list) else [said]
    return tuple(number for number in found if isinstance(number, int) and not isinstance(number, bool))


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    said = raw.get(key)
    said = default if said is None else said
    if not isinstance(said, int) or isinstance(said, bool) or said < 1:
        raise ConfigError(f"config.json: {key} must be a whole number above 0, not {said!r}")
    return said


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    said = raw.get(key)
    said = default if said is None else said
    if not isinstance(said, int | float) or isinstance(said, bool):
        raise ConfigError(f"config.json: {key} must be a number, not {said!r}")
    return float(said)


def _option(raw: Mapping[str, Any], rule: bool | str) -> bool:
    return rule if isinstance(rule, bool) else bool(raw.get(rule, False))


def _windows(raw: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int, ...]:
    """Mistral's window holds for all layers; Qwen's must be switched on and begins at a layer."""
    window = int(raw.get("sliding_window") or 0)
    if not family.windows_by_layer:
        return (window,) * num_layers
    if not raw.get("use_sliding_window"):
        return (0,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ConfigError(f"config.json: layer_types names {len(kinds)} layers, not {num_layers}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(raw: Mapping[str, Any], max_position: int, head_dim: int) -> RopeConfig:
    """transformers 5 says all in ``rope_parameters``; older configs split it in ``rope_theta`` and ``rope_scaling``."""
    said = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    if _number(said, "partial_rotary_factor", _number(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("partial rotary embedding is not supported")
    theta = _number(said, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    original = raw.get("original_max_position_embeddings") or said.get("original_max_position_embeddings")
    original_max = int(original or max_position)
    attention_factor = said.get("attention_factor")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=_number(said, "factor", max_position / original_max),
        original_max_position=original_max,
        low_freq_factor=_number(said, "low_freq_factor", 1.0),
        high_freq_factor=_number(said, "high_freq_factor", 4.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        beta_fast=_number(said, "beta_fast", 32.0),
        beta_slow=_number(said, "beta_slow", 1.0),
        mscale=_number(said, "mscale", 0.0),
        mscale_all_dim=_number(said, "mscale_all_dim", 0.0),
        truncate=bool(said.get("truncate", True)),
        frequency_factors=_frequency_factors(said, head_dim) if kind == "longrope" else (),
    )


def _frequency_factors(said: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """One divisor per frequency. KV that depends on the length of the text cannot be shared, so one set only."""
    short, long = said.get("short_factor"), said.get("long_factor")
    if not isinstance(short, list) or short != long:
        raise ConfigError("rope type 'longrope' with different short and long factors is not supported")
    if len(short) != head_dim // 2:
        raise ConfigError(f"rope type 'longrope' needs {head_dim // 2} factors, not {len(short)}")
    return tuple(float(number) for number in short)
