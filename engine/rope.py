"""Rotary position embedding: frequencies of each kind once per model, cosines and sines once per step.

The arithmetic follows transformers operation by operation in float32, so that fp32 logits agree to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.model_config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """``frequencies``: [head_dim / 2] float32, radians per token. ``scale`` multiplies every cosine and sine."""

    frequencies: torch.Tensor
    scale: float

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [T, 1, head_dim] of positions [T], as :func:`rotate` takes them."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        # The first half of a rotated head subtracts, so its sign sits in the table and rotate() has no negation.
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turns heads [T, H, D] by their positions' angles; pairs are (i, i + D/2) as in Hugging Face's layout."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * signed_sin


def make_rope(config: RopeConfig, head_dim: int) -> Rope:
    """Frequencies for a model. ``config.kind`` is one of ``engine.model_config.ROPE_KINDS``."""
    powers = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.kind == "linear":
        return Rope(1.0 / powers / config.factor, 1.0)
    if config.kind == "llama3":
        return Rope(_llama3(1.0 / powers, config), 1.0)
    if config.kind == "yarn":
        return Rope(_yarn(powers, config, head_dim), _yarn_scale(config))
    if config.kind == "longrope":
        return Rope(1.0 / (torch.tensor(config.frequency_factors) * powers), _longrope_scale(config))
    return Rope(1.0 / powers, 1.0)


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by ``factor``, short ones stay, the band between is blended."""
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


def _yarn(powers: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Interpolates slow dimensions, keeps fast ones, ramps linearly between two rotation counts."""

    def dimension_of(rotations: float) -> float:
        ratio = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # A ramp of no width would divide by zero.
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _longrope_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))
