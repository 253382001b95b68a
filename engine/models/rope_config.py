"""A model's rotary position embeddings in its ``config.json``. Imports no torch.

KV must not depend on the length of the text, because the hash of a block covers only its tokens (I2). In transformers
two kinds of scaling depend on the length: dynamic NTK, and longrope with two sets of factors. Pillion has two sets of
frequencies for such a model. A request whose prompt and max_tokens fit into the original length gets those of training,
as in transformers. A longer one gets, from its first token on, those that transformers uses for a text of
``max_model_len`` tokens, as in vLLM. The two kinds of requests hash their blocks under different roots, and
:func:`served_variant` separates workers of different ``max_model_len`` in the KV store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pillion.engine.models.config_json import above_zero, number, size
from pillion.engine.models.config_keys import check_rope_keys
from pillion.errors import ConfigError

PROPORTIONAL = "proportional"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", PROPORTIONAL)

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of some layers. The fields after ``turning`` are parameters of kinds that scale.

    Attributes:
        kind: one of ROPE_KINDS; :mod:`pillion.engine.models.rope` has their formulas.
        rotary_dim: rotated values of a head, from its first on.
        interleaved: True if a checkpoint rotates neighbors together, instead of values half of ``rotary_dim`` apart.
        head_dim: width of a head, if layers differ in it; else 0.
        turning: rotated pairs of a head's values in the kind "proportional"; its other pairs have frequency 0.
        original_max_position: max length of training before scaling, in tokens.
        short_factors, long_factors: longrope's divisors, one per frequency, up to the original length and above it.
    """

    kind: str = "default"
    theta: float = 10_000.0
    rotary_dim: int
    interleaved: bool = False
    head_dim: int = 0
    turning: int = 0
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
    def switches_at(self) -> int:
        """Max length, in tokens, with the frequencies of training; 0 if every text has them."""
        switches = self.kind == "dynamic" or (self.kind == "longrope" and self.short_factors != self.long_factors)
        return self.original_max_position if switches else 0

    @property
    def stretched_max_position(self) -> int:
        """Max length after scaling, in tokens; 0 if that is the config's maximum."""
        return int(self.original_max_position * self.factor) if self.kind in ("linear", "dynamic", "yarn") else 0


def yarn_mscale(factor: float, weight: float) -> float:
    """Return YaRN's attention factor (arXiv 2309.00071) for a length ``factor`` times that of training; ``weight`` is a
    config's ``mscale`` or ``mscale_all_dim``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def original_tokens(ropes: Sequence[RopeConfig]) -> int:
    """Return the max length, in tokens, with the frequencies of training; 0 if all texts have them."""
    return min((rope.switches_at for rope in ropes if rope.switches_at), default=0)


def served_variant(ropes: Sequence[RopeConfig], max_model_len: int) -> str:
    """Return a name for the frequencies of texts longer than in training, which depend on ``max_model_len``; "" if all
    texts have those of training. Part of ``KVLayout.version``, so that workers of one model with different lengths
    share blocks only if they compute the same KV."""
    stretched = [rope for rope in ropes if 0 < rope.switches_at < max_model_len]
    return "+".join(f"dynamic{max_model_len}" if rope.kind == "dynamic" else "long" for rope in stretched)


def parse_rope(raw: Mapping[str, Any], head_dim: int, *, partial: bool, query_growth: bool = False) -> RopeConfig:
    """Parse the rotary embedding of a model whose layers all have the same.

    transformers 5 has everything in ``rope_parameters``; older configs use ``rope_theta`` and ``rope_scaling``.
    ``partial``: the family may rotate a part of each head; ``query_growth``: the parameters may include the query
    scale. Raises ConfigError for an unknown kind.
    """
    parameters = _rope_parameters(raw)
    if query_growth:
        parameters = {key: value for key, value in parameters.items() if key != "llama_4_scaling_beta"}
    if any(key in parameters for key in _LAYER_TYPES):
        raise ConfigError("rotary embeddings by layer type are not supported for this architecture")
    return _parse(raw, parameters, above_zero(raw, "rope_theta", 10_000.0), head_dim, partial=partial)


def query_scaling(raw: Mapping[str, Any]) -> tuple[float, int]:
    """Return ``llama_4_scaling_beta``, the rate of the position-dependent query scale, and the length from which it
    applies."""
    parameters = _rope_parameters(raw)
    length = size(parameters, "original_max_position_embeddings", size(raw, "max_position_embeddings"))
    return number(parameters, "llama_4_scaling_beta", 0.0), length


def parse_global_and_local(
    raw: Mapping[str, Any], head_dim: int, global_head_dim: int = 0, *, partial: bool = False
) -> tuple[RopeConfig, ...]:
    """Parse two embeddings: of layers with full attention, and of layers with a window, which are not scaled.
    ``global_head_dim``: head width of layers with full attention; 0 if it is ``head_dim``."""
    parameters = _rope_parameters(raw)
    nested = any(key in parameters for key in _LAYER_TYPES)
    full, local = (parameters.get(key) or {} if nested else {} for key in _LAYER_TYPES)
    theta = above_zero(raw, "rope_theta", 10_000.0)
    full_head_dim = global_head_dim or head_dim
    ropes = (
        _parse(raw, full if nested else parameters, theta, full_head_dim, partial=partial),
        _parse(raw, local, above_zero(raw, "rope_local_base_freq", theta), head_dim, partial=partial),
    )
    if not global_head_dim:
        return ropes
    return replace(ropes[0], head_dim=full_head_dim), replace(ropes[1], head_dim=head_dim)


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``rope_parameters`` and ``rope_scaling``. If a config has both, ``rope_scaling`` was added by hand to a
    config saved by transformers 5, and wins, as it does in transformers."""
    saved, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for value in (saved, scaling):
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: rope parameters must be an object, not {value!r}")
    if not saved or not scaling:
        return saved or scaling
    if "full_attention" in saved and "full_attention" not in scaling:
        return {**saved, "full_attention": {**_unscaled(saved["full_attention"] or {}), **scaling}}
    return {**_unscaled(saved), **scaling}


def _unscaled(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key in ("rope_theta", "partial_rotary_factor", *_LAYER_TYPES)}


def _parse(
    raw: Mapping[str, Any],
    rope: Mapping[str, Any],
    theta: float,
    head_dim: int,
    *,
    partial: bool,
) -> RopeConfig:
    """Parse the parameters of one rotary embedding; ``theta`` is its base if they have none."""
    check_rope_keys(str(raw.get("model_type")), rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):
        kind = "longrope"
    if kind == PROPORTIONAL:
        share = above_zero(rope, "partial_rotary_factor", 1.0)
        turning = int(share * head_dim // 2)
        if not 0 < turning <= head_dim // 2:
            raise ConfigError(f"partial_rotary_factor = {share} does not fit heads of {head_dim} values")
        theta, factor = above_zero(rope, "rope_theta", theta), above_zero(rope, "factor", 1.0)
        return RopeConfig(kind=PROPORTIONAL, theta=theta, rotary_dim=head_dim, factor=factor, turning=turning)
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    rotary_dim = int(
        head_dim * above_zero(rope, "partial_rotary_factor", above_zero(raw, "partial_rotary_factor", 1.0))
    )
    if rotary_dim != head_dim and not partial:
        raise ConfigError("partial rotary embedding is not supported for this architecture")
    if rotary_dim % 2 or not 4 <= rotary_dim <= head_dim:
        raise ConfigError(f"a rotary embedding of {rotary_dim} of {head_dim} values is not possible")
    theta = above_zero(rope, "rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    max_position = size(raw, "max_position_embeddings")
    original = max_position
    if kind in ("llama3", "yarn", "longrope"):
        trained = raw if raw.get("original_max_position_embeddings") else rope
        original = size(trained, "original_max_position_embeddings", max_position)
    if kind in ("linear", "dynamic", "llama3", "yarn") and rope.get("factor") is None:
        raise ConfigError(f"config.json: rope type {kind!r} needs a factor")
    attention_factor = rope.get("attention_factor")
    return RopeConfig(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=False,
        head_dim=0,
        turning=0,
        factor=above_zero(rope, "factor", max_position / original),
        original_max_position=original,
        attention_factor=None if attention_factor is None else above_zero(rope, "attention_factor", 1.0),
        mscale=number(rope, "mscale", 0.0),
        mscale_all_dim=number(rope, "mscale_all_dim", 0.0),
        low_freq_factor=above_zero(rope, "low_freq_factor", 1.0),
        high_freq_factor=above_zero(rope, "high_freq_factor", 4.0),
        beta_fast=above_zero(rope, "beta_fast", 32.0),
        beta_slow=above_zero(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
        short_factors=_factors(rope, "short_factor", rotary_dim // 2) if kind == "longrope" else (),
        long_factors=_factors(rope, "long_factor", rotary_dim // 2) if kind == "longrope" else (),
    )


def _factors(rope: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    factors = rope.get(key)
    if not isinstance(factors, list) or len(factors) != count:
        raise ConfigError(f"rope type 'longrope' needs {count} factors in {key}")
    return tuple(above_zero({key: value or 0.0}, key, 0.0) for value in factors)
