"""Sorting of (row, expert) pairs in plain torch."""

from __future__ import annotations

import torch


def sorted_pairs(chosen: torch.Tensor, tile_rows: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the pairs in order, and their tiles."""
    flat = chosen.flatten().cpu()
    order = [pair for pair in flat.argsort(stable=True).tolist() if flat[pair] >= 0]
    tiles, first = [], 0
    for expert in sorted(set(flat[flat >= 0].tolist())):
        rows = int((flat == expert).sum())
        tiles += [(expert, first + done, min(tile_rows, rows - done)) for done in range(0, rows, tile_rows)]
        first += rows
    return order, tiles
