"""Which rotary position embeddings a model has, read from its ``config.json``. Imports no torch.

KV may not depend on how long a text has become, because blocks are found by their tokens alone (I2). Two kinds of
scaling do depend on it in transformers: dynamic NTK, and longrope with two sets of factors. They are fixed for the
longest text that is served, as vLLM does: up to the original length what the model was trained with, above it what
transformers takes for a text of ``max_model_len`` tokens. :func:`served_variant` keeps the two apart in the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pillion.engine.models.config_json import above_zero, number, size
from pillion.errors import ConfigError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of some layers. Fields behind ``rotary_dim`` belong to the kinds that scale.

    Attributes:
        kind: one of ROPE_KINDS; :mod:`pillion.engine.models.rope` has their formulas.
        rotary_dim: how many values of a head turn, from its first on.
        original_max_position: tokens of the texts that the model was trained with before it was scaled.
        short_factors, long_factors: longrope's divisors, one per frequency, up to the original length and above it.
    """

    kind: str = "default"
    theta: float = 10_000.0
    rotary_dim: int
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def stretched_max_position(self) -> int:
        """Tokens that scaling stretches the original length to; 0 where the config's own maximum says that already."""
        return int(self.original_max_position * self.factor) if self.kind in ("linear", "dynamic", "yarn") else 0


def served_variant(ropes: Sequence[RopeConfig], max_model_len: int) -> str:
    """Names what ``max_model_len`` changes in the frequencies; empty where it changes nothing.

    Part of ``KVLayout.version``, so that workers that serve one model at two lengths share a block only where both
    would have computed the same.
    """
    said = []
    for rope in ropes:
        if max_model_len <= rope.original_max_position:
            continue
        if rope.kind == "dynamic":
            said.append(f"dynamic{max_model_len}")
        elif rope.kind == "longrope" and rope.short_factors != rope.long_factors:
            said.append("long")
    return "+".join(said)


def parse_rope(raw: Mapping[str, Any], head_dim: int, *, partial: bool) -> RopeConfig:
    """The one embedding of a model whose layers do not differ.

    transformers 5 says all in ``rope_parameters``; older configs split it in ``rope_theta`` and ``rope_scaling``.
    ``partial``: whether the family can turn a part of each head only. Raises ConfigError for kinds that are not known.
    """
    said = _said(raw)
    if any(key in said for key in _LAYER_TYPES):
        raise ConfigError("rotary embeddings by layer type are not supported for this architecture")
    return _parse(raw, said, number(raw, "rope_theta", 10_000.0), head_dim, partial=partial)


def parse_global_and_local(raw: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's two: that of layers which see everything, which may be scaled, and that of layers with a window."""
    said = _said(raw)
    nested = any(key in said for key in _LAYER_TYPES)
    whole, local = (said.get(key) or {} if nested else {} for key in _LAYER_TYPES)
    return (
        _parse(raw, whole if nested else said, number(raw, "rope_theta", 10_000.0), head_dim, partial=False),
        _parse(raw, local, number(raw, "rope_local_base_freq", 10_000.0), head_dim, partial=False),
    )


def _said(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Where both names are said, scaling was added by hand to what transformers 5 saved: it wins, as it does there."""
    said, added = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for found in (said, added):
        if not isinstance(found, dict):
            raise ConfigError(f"config.json: rope parameters must be an object, not {found!r}")
    if not said or not added:
        return said or added
    if "full_attention" in said and "full_attention" not in added:
        return {**said, "full_attention": {**_unscaled(said["full_attention"] or {}), **added}}
    return {**_unscaled(said), **added}


def _unscaled(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key in ("rope_theta", "partial_rotary_factor", *_LAYER_TYPES)}


def _parse(
    raw: Mapping[str, Any], said: Mapping[str, Any], theta: float, head_dim: int, *, partial: bool
) -> RopeConfig:
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in said):
        kind = "longrope"  # What early Phi-3 checkpoints call it.
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    rotary_dim = int(head_dim * above_zero(said, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0)))
    if rotary_dim != head_dim and not partial:
        raise ConfigError("partial rotary embedding is not supported for this architecture")
    if rotary_dim % 2 or not 4 <= rotary_dim <= head_dim:
        raise ConfigError(f"a rotary embedding of {rotary_dim} of {head_dim} values is not possible")
    theta = above_zero(said, "rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    max_position = size(raw, "max_position_embeddings")
    # Linear and dynamic scaling know no other length than the config's.
    original = max_position
    if kind in ("llama3", "yarn", "longrope"):
        trained = raw if raw.get("original_max_position_embeddings") else said
        original = size(trained, "original_max_position_embeddings", max_position)
    attention_factor = said.get("attention_factor")
    return RopeConfig(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        factor=above_zero(said, "factor", max_position / original),
        original_max_position=original,
        low_freq_factor=above_zero(said, "low_freq_factor", 1.0),
        high_freq_factor=above_zero(said, "high_freq_factor", 4.0),
        attention_factor=None if attention_factor is None else number(said, "attention_factor", 1.0),
        beta_fast=above_zero(said, "beta_fast", 32.0),
        beta_slow=above_zero(said, "beta_slow", 1.0),
        mscale=number(said, "mscale", 0.0),
        mscale_all_dim=number(said, "mscale_all_dim", 0.0),
        truncate=bool(said.get("truncate", True)),
        short_factors=_factors(said, "short_factor", rotary_dim // 2) if kind == "longrope" else (),
        long_factors=_factors(said, "long_factor", rotary_dim // 2) if kind == "longrope" else (),
    )


def _factors(said: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    found = said.get(key)
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"rope type 'longrope' needs {count} factors in {key}")
    return tuple(above_zero({key: factor}, key, 0.0) for factor in found)
