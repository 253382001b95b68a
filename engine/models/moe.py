"""Mixture of experts: router -> grouped experts -> combine.

Tokens are sorted by expert, so that each expert that has tokens runs once per batch, over all of them. The middle,
:func:`run_grouped`, is what a fused kernel would replace: rows in groups and the groups' sizes are all it sees.
What a token gets does not depend on the other tokens of the batch beyond the rounding of the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from pillion.engine.models.layers import GatedMLP


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A layer's experts. ``router`` is [num_experts, hidden]."""

    router: torch.Tensor
    experts: tuple[GatedMLP, ...]
    experts_per_token: int
    normalize: bool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [T, hidden] -> [T, hidden]."""
        scores, chosen = route(rows, self.router, self.experts_per_token, self.normalize)
        # Sorted by expert, and by token within one: place i of the sorted rows is pair order[i] of (token, choice).
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=len(self.experts))
        grouped = run_grouped(self.experts, rows[order // self.experts_per_token], counts)
        return combine(grouped, order, scores)


def route(
    rows: torch.Tensor, router: torch.Tensor, experts_per_token: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's best experts: scores [T, k] float32, and which experts they are [T, k].

    Scores are the softmax over all experts; ``normalize`` makes those of the chosen ones sum up to 1.
    """
    scores, chosen = torch.softmax(linear(rows, router).float(), -1).topk(experts_per_token, -1)
    if normalize:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores, chosen


def run_grouped(experts: tuple[GatedMLP, ...], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The first counts[0] of the rows [N, hidden] go through expert 0, the next through expert 1... -> [N, hidden]."""
    out = torch.empty_like(rows)
    begin = 0
    for expert, count in zip(experts, counts.tolist(), strict=True):
        if count:
            out[begin : begin + count] = expert(rows[begin : begin + count])
            begin += count
    return out


def combine(grouped: torch.Tensor, order: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Each token's weighted sum of its choices: grouped [T * k, hidden] in ``order``, scores [T, k] -> [T, hidden]."""
    num_tokens, choices = scores.shape
    by_token = torch.empty_like(grouped)
    by_token[order] = grouped
    weights = scores.to(grouped.dtype)[:, None]
    return torch.bmm(weights, by_token.view(num_tokens, choices, -1))[:, 0]
