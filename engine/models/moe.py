"""Mixture of experts: router -> grouped experts -> combine.

Tokens are sorted by expert, so that each expert that has tokens runs once per batch, over all its tokens. A fused
kernel could replace :func:`run_grouped`, which sees only rows in groups and the sizes of the groups. A token's result
depends on the other tokens of the batch only through the rounding of the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from pillion.engine.models.layers import GatedMLP


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A layer's router [num_experts, hidden] and its experts."""

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
