"""The operations of a decoder layer, each a plain function over rows, so that a backend can replace one by a kernel of
its own or fuse several. The order of roundings in bfloat16 is that of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear, silu

from pillion.kernels.torch.torch_linear import Linear


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, in float32, rounded before the weight is applied, as in most families."""
    wide = values.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(values.dtype)


def rms_norm_wide(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in float32, rounded after a float32 ``weight`` is applied: OLMo 2, and Gemma, whose weight is 1 + w."""
    wide = values.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(values.dtype)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """An RMS norm, ``wide`` or not; its weight is [last dimension], or [heads, head_dim] for [T, heads, head_dim]."""

    weight: torch.Tensor
    eps: float
    wide: bool

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """values [T, ...] -> the same shape and type."""
        return (rms_norm_wide if self.wide else rms_norm)(values, self.weight, self.eps)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; gate_up [T, 2 * inner], gate first -> [T, inner]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def geglu_tanh(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with gelu's tanh approximation; gate_up [T, 2 * inner], gate first -> [T, inner]."""
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up


# The activations that ``ModelConfig.activation`` can name.
GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": swiglu, "gelu_tanh": geglu_tanh}


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(act(gate) * up). ``gate_up`` stacks gate and up in its output; ``gated`` is one of GATED."""

    gate_up: Linear
    down: Linear
    gated: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [T, hidden] -> [T, hidden]."""
        return self.down(self.gated(self.gate_up(rows)))


def soft_cap(values: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(values / cap), in place: values stay within +-cap."""
    return values.div_(cap).tanh_().mul_(cap)


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A mixture of experts: a layer's router [num_experts, hidden] and its experts.

    Tokens are sorted by expert, so that each expert that has tokens runs once per batch, over all its tokens. A fused
    kernel could replace :func:`run_grouped`, which sees only rows in groups and the sizes of the groups. A token's
    result depends on the other tokens of the batch only through the rounding of the products.
    """

    router: torch.Tensor
    experts: tuple[GatedMLP, ...]
    experts_per_token: int
    normalize: bool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        scores, chosen = route(rows, self.router, self.experts_per_token, self.normalize)
        # Sorted by expert, and by token within one: place i of the sorted rows is pair order[i] of (token, choice).
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=len(self.experts))
        grouped = run_grouped(self.experts, rows[order // self.experts_per_token], counts)
        return combine(grouped, order, scores)


def route(
    rows: torch.Tensor, router: torch.Tensor, experts_per_token: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts: returns their scores [T, k] float32 and their numbers [T, k].

    Scores are the softmax over all experts; ``normalize`` scales those of the chosen experts to a sum of 1.
    """
    scores, chosen = torch.softmax(linear(rows, router).float(), -1).topk(experts_per_token, -1)
    if normalize:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores, chosen


def run_grouped(experts: tuple[GatedMLP, ...], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Runs the first counts[0] rows of [N, hidden] through expert 0, the next through expert 1 ... -> [N, hidden]."""
    out = torch.empty_like(rows)
    begin = 0
    for expert, count in zip(experts, counts.tolist(), strict=True):
        if count:
            out[begin : begin + count] = expert(rows[begin : begin + count])
            begin += count
    return out


def combine(grouped: torch.Tensor, order: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Weighted sums over each token's experts: grouped [T * k, hidden] in ``order``, scores [T, k] -> [T, hidden]."""
    num_tokens, choices = scores.shape
    by_token = torch.empty_like(grouped)
    by_token[order] = grouped
    weights = scores.to(grouped.dtype)[:, None]
    return torch.bmm(weights, by_token.view(num_tokens, choices, -1))[:, 0]
