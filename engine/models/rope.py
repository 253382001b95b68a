"""Rotary position embedding: frequencies of each kind once per model, cosines and sines once per step.

The arithmetic follows transformers operation by operation in float32, so that fp32 logits agree up to rounding; each
kind is an entry of transformers' ``ROPE_INIT_FUNCTIONS``. Where these depend on the length of the text, this module
uses ``max_model_len``; :mod:`pillion.engine.models.rope_config` explains why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pillion.engine.models.model_config import ModelConfig, QueryGrowth
from pillion.engine.models.rope_config import PROPORTIONAL, RopeConfig, original_tokens, yarn_mscale

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding.

    Attributes:
        frequencies: [head_dim / 2] float32, radians per token; 0 for pairs that are not rotated.
        scales: [head_dim / 2] float32, factors of cosines and sines; 1 for pairs that are not rotated.
        short_frequencies: frequencies of texts within the original length, or None if those of longer texts are the
            same. Position p of a text within the original length is row ``short_rows`` + p of the tables, of a longer
            text row p.
    """

    frequencies: torch.Tensor
    scales: torch.Tensor
    short_frequencies: torch.Tensor | None = None
    short_rows: int = 0

    def cos_sin(self, rows: torch.Tensor) -> CosSin:
        """Return cosines and sines [T, head_dim / 2] float32 of table rows [T]."""
        positions, frequencies = rows[:, None], self.frequencies
        if self.short_frequencies is not None:
            is_short = positions >= self.short_rows
            positions = torch.where(is_short, positions - self.short_rows, positions)
            frequencies = torch.where(is_short, self.short_frequencies, frequencies)
        angles = positions.to(torch.float32) * frequencies
        return angles.cos() * self.scales, angles.sin() * self.scales

    def tables(self, rows: torch.Tensor, dtype: torch.dtype) -> CosSin:
        """Return cosines and signed sines [T, 1, head_dim] of table rows [T], the arguments of :func:`rotate`."""
        cos, sin = self.cos_sin(rows)
        # The first half of a rotated head subtracts, so a negative sine there saves a negation in rotate().
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, H, D] by the angles of their positions; pairs are (i, i + D/2) as in Hugging Face's layout."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * signed_sin


def partial_order(head_dim: int, rotary_dim: int, interleaved: bool = False) -> torch.Tensor:
    """Return a permutation [head_dim] of a head's values that turns partial rotation into whole rotation.

    A checkpoint pairs (i, i + rotary_dim/2), or neighbors if ``interleaved``, and does not rotate values from
    rotary_dim on. In the permuted order queries and keys pair (i, i + head_dim/2) as in all other models, and pairs
    from rotary_dim/2 on have frequency 0. Scores do not change, because queries and keys are permuted alike.
    """
    rotated, unrotated = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else rotated.tensor_split(2)
    return torch.cat([first, unrotated.tensor_split(2)[0], second, unrotated.tensor_split(2)[1]])


def make_ropes(config: ModelConfig, max_model_len: int) -> tuple[Rope, ...]:
    """Return the model's embeddings in the order of ``config.ropes``, for texts of up to ``max_model_len`` tokens."""
    ropes = tuple(make_rope(rope, rope.head_dim or config.rotary_width, max_model_len) for rope in config.ropes)
    original = original_tokens(config.ropes)
    if not 0 < original < max_model_len:
        return ropes
    short = (make_rope(rope, rope.head_dim or config.rotary_width, original).frequencies for rope in config.ropes)
    return tuple(
        replace(rope, short_frequencies=frequencies, short_rows=max_model_len)
        for rope, frequencies in zip(ropes, short, strict=True)
    )


def rope_tables(config: ModelConfig, max_model_len: int) -> tuple[CosSin, ...]:
    """Return cosines and sines [R, head_dim / 2] float32 of each of the model's embeddings: ``max_model_len`` rows,
    then those of texts within the original length, if their frequencies differ."""
    original = original_tokens(config.ropes)
    rows = torch.arange(max_model_len + (original if original < max_model_len else 0))
    return tuple(rope.cos_sin(rows) for rope in make_ropes(config, max_model_len))


def growth_factors(grows: QueryGrowth, positions: torch.Tensor) -> torch.Tensor:
    """Return the query scales [T] float32 at positions [T]."""
    return 1.0 + grows.rate * torch.log1p((positions.float() + grows.ahead).div(grows.length).floor())


def growth_table(config: ModelConfig, max_model_len: int) -> torch.Tensor | None:
    """Return the query scales at the first ``max_model_len`` positions; None for a model without query scales."""
    return None if config.query_growth is None else growth_factors(config.query_growth, torch.arange(max_model_len))


def make_rope(config: RopeConfig, head_dim: int, max_model_len: int) -> Rope:
    """Return the rotary embedding of a config. Only the kinds dynamic and longrope depend on ``max_model_len``."""
    frequencies, scale = _frequencies(config, max_model_len)
    unrotated = (head_dim - config.rotary_dim) // 2
    return Rope(
        torch.cat((frequencies, torch.zeros(unrotated))),
        torch.cat((torch.full_like(frequencies, scale), torch.ones(unrotated))),
    )


def _frequencies(config: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Return frequencies [rotary_dim / 2], and the factor of cosines and sines."""
    theta = config.theta
    if config.kind == "dynamic":
        theta *= _ntk_stretch(config, max_model_len)
    powers = theta ** (torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim)
    if config.kind == PROPORTIONAL:
        is_rotated = torch.arange(len(powers)) < config.turning
        return torch.where(is_rotated, 1.0 / powers / config.factor, 0.0), 1.0
    if config.kind == "linear":
        return 1.0 / powers / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(1.0 / powers, config), 1.0
    if config.kind == "yarn":
        return _yarn(powers, config), _yarn_scale(config)
    if config.kind == "longrope":
        is_long = max_model_len > config.original_max_position
        factors = torch.tensor(config.long_factors if is_long else config.short_factors)
        return 1.0 / (factors * powers), _longrope_scale(config)
    return 1.0 / powers, 1.0


def _ntk_stretch(config: RopeConfig, max_model_len: int) -> float:
    """Return the factor of theta in dynamic NTK for texts of ``max_model_len`` tokens; 1 up to the original length."""
    length = max(max_model_len, config.original_max_position)
    stretch = config.factor * length / config.original_max_position - (config.factor - 1)
    return float(stretch ** (config.rotary_dim / (config.rotary_dim - 2)))


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Apply Llama 3's scaling: divide low frequencies by ``factor``, keep high ones, and interpolate in between."""
    low_wavelength = config.original_max_position / config.low_freq_factor
    high_wavelength = config.original_max_position / config.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    slowed = torch.where(wavelength > low_wavelength, frequencies / config.factor, frequencies)
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * slowed / config.factor + smooth * slowed
    between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(between, blended, slowed)


def _yarn(powers: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Apply YaRN (arXiv 2309.00071): divide low frequencies by ``factor``, keep high ones, and ramp in between."""
    dim = config.rotary_dim

    def dimension_of(rotations: float) -> float:
        ratio = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def _longrope_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))
