"""A small pool with the states of a step's sequences, in pieces, for tests of single kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from tests.support.kernel_runner import normal, rows_step

SLOT_VALUES = 2048


class PiecePool:
    """States of ``pieces`` of these shapes, two of which share a slot if they fit, for sequences with ``counts`` rows
    each; ``found`` lists which have an earlier state."""

    def __init__(self, counts: Sequence[int], found: Sequence[bool], pieces: Sequence[tuple[int, int]]) -> None:
        self._pieces, self._found, seqs = pieces, found, len(counts)
        self._places, page, first = [], 0, 0
        for rows, columns in pieces:
            if first + rows * columns > SLOT_VALUES:
                page, first = page + 1, 0
            self._places.append((page, first))
            first += rows * columns
        pages, starts = page + 1, [0, *accumulate(counts)]
        self.rows = [slice(begin, end) for begin, end in pairwise(starts)]
        slots = np.random.default_rng(0).permutation(2 * seqs * pages + 3).astype(np.int32)
        self.reads, self.writes = slots[: 2 * seqs * pages].reshape(2, seqs, pages)
        self._before = normal(len(slots), SLOT_VALUES)
        self.pool = self._before.clone()
        self.reads[~np.array(found)] = -1
        self.step = rows_step(starts[-1])
        self.step.count("num_seqs", seqs)
        self.step.count("state_pages", pages)
        self.step.point("query_starts", np.array(starts, np.int32))
        self.step.point("state_reads", self.reads)
        self.step.point("state_writes", self.writes)
        self.step.point_pool(self.pool.data_ptr(), self.pool.nbytes)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of a kernel's record that locate pieces."""
        places = torch.tensor([(page, first * 4) for page, first in self._places], dtype=torch.int32)
        return {"places": places, "slot_bytes": SLOT_VALUES * 4}

    def old(self, sequence: int) -> list[torch.Tensor]:
        """Return a sequence's pieces before the step; zeros if there was no state."""
        slots = self.reads[sequence].tolist()
        if not self._found[sequence]:
            return [torch.zeros(shape) for shape in self._pieces]
        return self._read(self._before, slots)

    def new(self, sequence: int) -> list[torch.Tensor]:
        """Return a sequence's pieces after the step."""
        return self._read(self.pool, self.writes[sequence].tolist())

    def _read(self, pool: torch.Tensor, slots: list[int]) -> list[torch.Tensor]:
        return [
            pool[slots[page], first : first + shape[0] * shape[1]].view(shape).clone()
            for (page, first), shape in zip(self._places, self._pieces, strict=True)
        ]

    def check_others_unchanged(self) -> None:
        """Assert that the step wrote its pieces, and nothing else."""
        changed = self.pool.clone()
        for slots in self.writes.tolist():
            for (page, first), (rows, columns) in zip(self._places, self._pieces, strict=True):
                place = slice(first, first + rows * columns)
                changed[slots[page], place] = self._before[slots[page], place]
        assert torch.equal(changed, self._before)
