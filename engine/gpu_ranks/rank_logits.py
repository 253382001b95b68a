"""Gathering of the logits of a vocabulary-parallel LM head on rank 0.

    rank r   normed [R, hidden] --head of its tokens--> mine [R, tokens of r] --gather--> rank 0: logits [R, vocab]

Shards may differ in size, but torch's gather needs equal sizes, so each rank sends as much as the largest shard.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pillion.engine.gpu_ranks.rank_group import GpuRankGroup


class RankLogits:
    """One rank's buffers for the logits of up to ``max_rows`` rows, used by CUDA graphs; a step with more rows
    allocates its own."""

    def __init__(
        self, ranks: GpuRankGroup, vocab_size: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``dtype`` is the type of the head's products."""
        shard = ranks.shard
        self._ranks, self._rank = ranks, shard.rank
        self._shares = [replace(shard, rank=rank).vocabulary(vocab_size) for rank in range(shard.size)]
        self._most = max(map(len, self._shares))
        self._buffers = torch.zeros(1 + shard.size * shard.leads, max_rows * self._most, dtype=dtype, device=device)
        self._used = self._buffers

    def room(self, rows: int) -> torch.Tensor:
        """Return the tensor for the rank's own products [rows, tokens of the rank]."""
        sent, there = rows * self._most, self._buffers
        self._used = there[:, :sent] if sent <= there.shape[1] else there.new_empty(len(there), sent)
        return self._view(self._used[0], self._rank, rows)

    def gather(self, rows: int) -> list[tuple[range, torch.Tensor]]:
        """Gather the products in all ranks' :meth:`room` for ``rows`` rows; returns each rank's tokens with their
        logits [rows, tokens] on rank 0, [] on others."""
        mine, *every = self._used.unbind(0)
        self._ranks.gather(mine, every)
        return [
            (tokens, self._view(part, rank, rows))
            for rank, (tokens, part) in enumerate(zip(self._shares, every, strict=False))
        ]

    def _view(self, flat: torch.Tensor, rank: int, rows: int) -> torch.Tensor:
        own = len(self._shares[rank])
        return flat[: rows * own].view(rows, own)
