"""Gathering of the logits of a vocabulary-parallel LM head on rank 0.

    rank r   normed [R, hidden] --head of its tokens--> [R, tokens of r] --gather--> rank 0: logits [R, vocab]

Shards may differ in size, but torch's gather needs equal sizes, so each rank sends as much as the largest shard.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pillion.engine.gpu_ranks.rank_group import GpuRankGroup


class RankLogits:
    """One rank's buffers for the logits of up to ``max_rows`` rows, for CUDA graphs; steps with more rows allocate
    separate ones."""

    def __init__(
        self, ranks: GpuRankGroup, vocab_size: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``dtype``: of the head's products."""
        shard = ranks.shard
        self._ranks, self._rank = ranks, shard.rank
        self._shares = [replace(shard, rank=rank).vocabulary(vocab_size) for rank in range(shard.size)]
        self._row_values = max(map(len, self._shares))
        self._buffers = torch.zeros(
            1 + shard.size * shard.leads, max_rows * self._row_values, dtype=dtype, device=device
        )
        self._used = self._buffers

    def buffer(self, rows: int) -> torch.Tensor:
        """Return the tensor [rows, tokens of the rank] for the rank's own products."""
        sent, buffers = rows * self._row_values, self._buffers
        self._used = buffers[:, :sent] if sent <= buffers.shape[1] else buffers.new_empty(len(buffers), sent)
        return self._view(self._used[0], self._rank, rows)

    def gather(self, rows: int) -> list[tuple[range, torch.Tensor]]:
        """Gather the products that all ranks have written to :meth:`buffer`. Return (tokens, logits [rows, tokens]) of
        each rank on rank 0, [] on others."""
        own, *gathered = self._used.unbind(0)
        self._ranks.gather(own, gathered)
        return [
            (tokens, self._view(part, rank, rows))
            for rank, (tokens, part) in enumerate(zip(self._shares, gathered, strict=False))
        ]

    def _view(self, flat: torch.Tensor, rank: int, rows: int) -> torch.Tensor:
        columns = len(self._shares[rank])
        return flat[: rows * columns].view(rows, columns)
