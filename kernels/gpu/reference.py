"""What the smaller GPU kernels compute, in plain torch: the oracle of their tests, and where to read what they do."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

FP8_MAX = 448.0
FP8_MIN_SCALE = 2.0**-100


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float, wide: bool) -> torch.Tensor:
    """Over the last dimension; a plain norm is rounded before the weight multiplies, a wide one after."""
    normed = values.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(values.dtype) if wide else normed.to(values.dtype) * weight


def add_rms_norm(
    residual: torch.Tensor,
    found: torch.Tensor,
    scale: float,
    post_weight: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The residual stream [T, hidden] with what a layer found, and its norm for the next one.

    The sum is rounded once and the scale never, as torch does it on a GPU; on a CPU it rounds the scale, too.
    """
    added = found if post_weight is None else rms_norm(found, post_weight, eps, wide)
    total = (residual.float() + scale * added.float()).to(residual.dtype)
    return total, None if weight is None else rms_norm(total, weight, eps, wide)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of [T, 2 * inner], gate first; ``activation`` is "silu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, -1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up
