"""Logits of a model whose tokens are shared out among ranks: each multiplies by its part of the head, rank 0 has all.

    rank r   normed [R, hidden] --head of its tokens--> mine [R, tokens of r] --gather--> rank 0: logits [R, vocab]

Shares may be unequal, and a gather's are not, so that what is sent is as long as the largest share.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pillion.engine.backends.gpu.rank_group import GpuRankGroup


class RankLogits:
    """One rank's buffers for up to ``max_rows`` rows, which graphs hold; a step with more rows allocates its own."""

    def __init__(
        self, ranks: GpuRankGroup, vocab_size: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``dtype``: of the head's products."""
        split = ranks.split
        self._ranks = ranks
        self._shares = [replace(split, rank=rank).vocabulary(vocab_size) for rank in range(split.size)]
        self._most = max(map(len, self._shares))
        # One row for what is sent, and, at rank 0, one for what comes from each rank.
        self._buffers = torch.zeros(1 + split.size * split.leads, max_rows * self._most, dtype=dtype, device=device)
        self._used = self._buffers

    def room(self, rows: int) -> torch.Tensor:
        """Where the rank's own products [rows, tokens of the rank] go."""
        sent, there = rows * self._most, self._buffers
        self._used = there[:, :sent] if sent <= there.shape[1] else there.new_empty(len(there), sent)
        return self._view(self._used[0], self._ranks.split.rank, rows)

    def gather(self, rows: int) -> list[tuple[range, torch.Tensor]]:
        """Brings what all ranks put into their :meth:`room` for ``rows`` rows to rank 0, which gets each rank's tokens
        with their logits [rows, tokens]. Others get nothing."""
        mine, *every = self._used.unbind(0)
        self._ranks.gather(mine, every)
        return [
            (tokens, self._view(part, rank, rows))
            for rank, (tokens, part) in enumerate(zip(self._shares, every, strict=False))
        ]

    def _view(self, flat: torch.Tensor, rank: int, rows: int) -> torch.Tensor:
        own = len(self._shares[rank])
        return flat[: rows * own].view(rows, own)
