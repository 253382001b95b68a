"""Layers with a state instead of attention in a ``config.json``, and their shapes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pillion.engine.models.config_json import above_zero, number, per_layer, size, token_ids
from pillion.engine.models.model_config import LinearConfig, MixerScales
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.state_pieces import PIECE_CHANNELS


def lfm2_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse LFM2's convolutions: layers that are not listed as attention have one."""
    count = size(raw, "num_hidden_layers")
    layers = _linear_layers(raw, count, ("conv",))
    if layers is None:
        attends = _listed(raw, "full_attn_idxs")
        layers = tuple(attends is not None and layer not in attends for layer in range(count))
    bias = bool(raw.get("conv_bias"))
    return LinearConfig(layers=layers, taps=size(raw, "conv_L_cache"), taps_bias=bias, bias=bias)


def lfm3_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse LFM3's convolutions, in layers without attention."""
    return lfm2_layers({**raw, "layer_types": None})


def delta_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse the gated delta nets of Qwen3-Next and similar models; by default every fourth layer has attention."""
    count = size(raw, "num_hidden_layers")
    layers = _linear_layers(raw, count, ("linear_attention",))
    interval = size(raw, "full_attention_interval", 4)
    key_heads = size(raw, "linear_num_key_heads", size(raw, "num_attention_heads"))
    heads = size(raw, "linear_num_value_heads", size(raw, "num_attention_heads"))
    if heads % key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads = {heads} and linear_num_key_heads = {key_heads} are inconsistent"
        )
    key_dim = size(raw, "linear_key_head_dim", max(1, int(0.75 * size(raw, "hidden_size") / key_heads)))
    return LinearConfig(
        layers=tuple((layer + 1) % interval != 0 for layer in range(count)) if layers is None else layers,
        taps=size(raw, "linear_conv_kernel_dim"),
        heads=heads,
        head_dim=size(raw, "linear_value_head_dim", 2 * key_dim),
        key_heads=key_heads,
        key_dim=key_dim,
        doubled=bool(raw.get("linear_allow_neg_eigval")),
    )


def olmo_hybrid_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse OLMo-Hybrid's gated delta nets; by default at least the last layer has attention."""
    count = size(raw, "num_hidden_layers")
    if raw.get("layer_types") is None and count < 4:
        raw = {**raw, "layer_types": ["linear_attention"] * (count - 1) + ["full_attention"]}
    return delta_layers(raw)


def kimi_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse Kimi-Linear's gated delta nets, which may be configured in a nested object that counts layers from 1.
    Raises ConfigError if the object has unknown keys, or omits a layer."""
    count, key = size(raw, "num_hidden_layers"), "linear_attn_config"
    nested = {} if raw[key] is None else raw[key]
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config.json: {key} must be an object, not {nested!r}")
    unknown = sorted(
        nested.keys() - {"full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"}
    )
    if unknown:
        raise ConfigError(f"config.json has {key} with {unknown[0]} = {nested[unknown[0]]!r}, which is not supported")
    layers = _linear_layers(raw, count, ("linear_attention",))
    if layers is None and {"full_attn_layers", "kda_layers"} <= nested.keys():
        full, linear = (token_ids(nested[kind]) for kind in ("full_attn_layers", "kda_layers"))
        if sorted((*full, *linear)) != list(range(1, count + 1)):
            raise ConfigError(f"config.json: {key} must name each of the layers 1 to {count} once")
        layers = tuple(layer + 1 in linear for layer in range(count))
    if layers is None:
        layers = tuple(layer == 0 or layer % 4 != 0 for layer in range(count))
    heads, width = (
        size(nested, "num_heads", size(raw, "linear_num_heads")),
        size(nested, "head_dim", raw["linear_head_dim"]),
    )
    taps = size(nested, "short_conv_kernel_size", size(raw, "linear_conv_kernel_dim"))
    return LinearConfig(layers=layers, taps=taps, heads=heads, head_dim=width, key_heads=heads, key_dim=width)


def mamba_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse GraniteMoeHybrid's state-space layers, by default all."""
    count = size(raw, "num_hidden_layers")
    layers = _linear_layers(raw, count, ("linear_attention", "mamba"))
    return _state_spaces(raw, (True,) * count if layers is None else layers)


def bamba_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse Bamba's state-space layers: all but those listed."""
    attends = _listed(raw, "attn_layer_indices") or []
    return _state_spaces(raw, tuple(layer not in attends for layer in range(size(raw, "num_hidden_layers"))))


def jamba_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse Jamba's state-space layers (Mamba-1): all but one per period. Raises ConfigError for sizes that are not
    whole vectors or pieces of the kernels."""
    period, offset = size(raw, "attn_layer_period"), number(raw, "attn_layer_offset", 0)
    inner, rank = size(raw, "mamba_expand") * size(raw, "hidden_size"), raw["mamba_dt_rank"]
    rank = -(-size(raw, "hidden_size") // 16) if rank == "auto" else size(raw, "mamba_dt_rank")
    columns = size(raw, "mamba_d_state")
    if inner % PIECE_CHANNELS or rank % LANES or columns % LANES:
        raise ConfigError(
            f"config.json: mamba_expand * hidden_size = {inner} must be a multiple of {PIECE_CHANNELS}, mamba_dt_rank"
            f" = {rank} and mamba_d_state = {columns} of {LANES}"
        )
    return LinearConfig(
        layers=tuple(layer % period != offset for layer in range(size(raw, "num_hidden_layers"))),
        taps=size(raw, "mamba_d_conv"),
        taps_bias=bool(raw["mamba_conv_bias"]),
        bias=bool(raw["mamba_proj_bias"]),
        heads=inner // PIECE_CHANNELS,
        head_dim=PIECE_CHANNELS,
        key_heads=inner // PIECE_CHANNELS,
        key_dim=columns,
        step_rank=rank,
    )


def falcon_h1_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse Falcon-H1's state spaces, which each layer has in addition to attention, and its layers' factors."""
    spaces = _state_spaces(raw, (True,) * size(raw, "num_hidden_layers"))
    input_scale = above_zero(raw, "ssm_in_multiplier", 1.0)
    gates, values, writes, reads, steps = (input_scale * factor for factor in _numbers(raw, "ssm_multipliers", 5))
    gate, result = _numbers(raw, "mlp_multipliers", 2)
    attention = (above_zero(raw, f"{key}_multiplier", 1.0) for key in ("attention_in", "key", "attention_out"))
    inputs, keys, outputs = attention
    scales = MixerScales(
        inputs=(gates, values, writes, reads, steps),
        outputs=above_zero(raw, "ssm_out_multiplier", 1.0),
        attention=(inputs, keys, outputs),
        mlp=(gate, result),
    )
    normed, gate_first = bool(raw.get("mamba_rms_norm")), not raw.get("mamba_norm_before_gate")
    return replace(spaces, attends=spaces.layers, normed=normed, gate_first=gate_first, scales=scales)


def nemotron_h_kinds(raw: Mapping[str, Any]) -> list[str]:
    """Return the kind of each of Nemotron-H's layers: "linear_attention", "full_attention", "mlp" or "moe"."""
    pattern = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    listed = raw.get("layers_block_type") or raw.get("layer_types") or raw.get("hybrid_override_pattern")
    kinds = [{**pattern, **names}.get(kind, kind) for kind in listed] if isinstance(listed, list | str) else []
    kinds = kinds or [pattern[kind] for kind in "ME*-"]
    unknown = next((kind for kind in kinds if kind not in pattern.values()), None)
    if unknown is not None or not isinstance(listed, list | str | None):
        raise ConfigError(f"config.json: layers_block_type has {unknown or listed!r}, which is not supported")
    return kinds


def nemotron_h_layers(raw: Mapping[str, Any]) -> LinearConfig:
    """Parse Nemotron-H's state-space layers, and which other layers have attention."""
    kinds = nemotron_h_kinds(raw)
    mamba_keys = {
        "mamba_n_heads": raw["mamba_num_heads"],
        "mamba_d_head": raw["mamba_head_dim"],
        "mamba_d_ssm": size(raw, "mamba_num_heads") * size(raw, "mamba_head_dim"),
        "mamba_n_groups": raw["n_groups"],
        "mamba_d_state": raw["ssm_state_size"],
        "mamba_d_conv": raw["conv_kernel"],
        "mamba_conv_bias": raw["use_conv_bias"],
        "mamba_proj_bias": raw["use_bias"],
        "mamba_expand": 1,
    }
    spaces = _state_spaces({**raw, **mamba_keys}, tuple(kind == "linear_attention" for kind in kinds))
    return replace(spaces, attends=tuple(kind == "full_attention" for kind in kinds))


def _state_spaces(raw: Mapping[str, Any], layers: tuple[bool, ...]) -> LinearConfig:
    """Parse the state spaces (Mamba-2) of ``layers``. Raises ConfigError on inconsistency."""
    heads, given_inner = size(raw, "mamba_n_heads"), raw.get("mamba_d_ssm")
    inner = size(raw, "mamba_expand") * size(raw, "hidden_size") if given_inner is None else size(raw, "mamba_d_ssm")
    given = raw.get("mamba_d_head")
    head_dim = max(1, inner // heads) if given in ("auto", None) else size(raw, "mamba_d_head")
    groups = size(raw, "mamba_n_groups")
    if head_dim * heads != inner or heads % groups:
        raise ConfigError(
            f"config.json: mamba_n_heads = {heads}, mamba_d_head = {given!r}, mamba_n_groups = {groups} and"
            f" mamba_expand = {raw['mamba_expand']}, mamba_d_ssm = {given_inner} are inconsistent"
        )
    limit = raw.get("time_step_limit")
    # Only limits without effect are supported: (0, inf), and inf as transformers 5 writes it.
    if limit is not None and (
        not isinstance(limit, list | tuple) or tuple(limit) not in ((0.0, math.inf), (0.0, {"__float__": "Infinity"}))
    ):
        raise ConfigError(f"config.json: time_step_limit = {limit!r} is not supported")
    return LinearConfig(
        layers=layers,
        taps=size(raw, "mamba_d_conv"),
        taps_bias=bool(raw.get("mamba_conv_bias")),
        bias=bool(raw.get("mamba_proj_bias")),
        heads=heads,
        head_dim=head_dim,
        key_heads=groups,
        key_dim=size(raw, "mamba_d_state"),
    )


def _listed(raw: Mapping[str, Any], key: str) -> list[Any] | None:
    """Return the layers listed in a config; None for null and a missing key."""
    listed = raw.get(key)
    if not isinstance(listed, list | None):
        raise ConfigError(f"config.json: {key} must be a list, not {listed!r}")
    return listed


def _numbers(raw: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """Return ``count`` positive numbers; all 1 for null and a missing key."""
    listed = raw.get(key)
    if listed is None:
        return (1.0,) * count
    if not isinstance(listed, list | tuple) or len(listed) != count:
        raise ConfigError(f"config.json: {key} must be {count} numbers, not {listed!r}")
    return tuple(above_zero({key: value}, key, 1.0) for value in listed)


def _linear_layers(raw: Mapping[str, Any], count: int, names: Collection[str]) -> tuple[bool, ...] | None:
    """Return whether each layer has a state, i.e. whether its kind in ``layer_types`` is among ``names``; None without
    the list. Raises ConfigError for an unknown kind."""
    kinds = per_layer(raw, "layer_types", count)
    for layer, kind in enumerate(kinds or ()):
        if kind not in (*names, "full_attention", "attention"):
            raise ConfigError(f"config.json has layer_types with {kind!r} for layer {layer}, not supported here")
    return None if kinds is None else tuple(kind in names for kind in kinds)
