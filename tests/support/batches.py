"""Step batches over a pool whose blocks are assigned in scrambled order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pillion.kernels.step import StepBatch


class Sequences:
    """Texts that grow in a paged pool. Slot 0 is unused: it pads block tables, and no kernel may read it."""

    def __init__(self, num_slots: int, block_size: int, seed: int = 0) -> None:
        self._block_size = block_size
        self._free = list(np.random.default_rng(seed).permutation(np.arange(1, num_slots)))
        self._tables: list[list[int]] = []
        self._lengths: list[int] = []
        self._shifts: list[int] = []
        self._adapters: list[int] = []

    def add(self, count: int = 1, rope_shift: int = 0, adapter: int = -1) -> list[int]:
        """Add empty sequences and return their numbers. ``rope_shift``: their first row of the rotary tables;
        ``adapter``: their adapter's slot."""
        self._tables += [[] for _ in range(count)]
        self._shifts += [rope_shift] * count
        self._adapters += [adapter] * count
        self._lengths += [0] * count
        return list(range(len(self._tables) - count, len(self._tables)))

    def parallel_sample(self, number: int) -> tuple[int, list[int], list[int]]:
        """Add a parallel sample of a sequence, sharing its full blocks; return its number, and sources and targets of
        copies."""
        table = list(self._tables[number])
        sources = table[self._lengths[number] // self._block_size :]
        targets = [int(self._free.pop()) for _ in sources]
        self._tables.append(table[: len(table) - len(sources)] + targets)
        self._lengths.append(self._lengths[number])
        self._shifts.append(self._shifts[number])
        self._adapters.append(self._adapters[number])
        return len(self._tables) - 1, sources, targets

    def take_slots(self, count: int) -> tuple[int, ...]:
        """Return free slots."""
        return tuple(int(self._free.pop()) for _ in range(count))

    def step(
        self, parts: Sequence[tuple[int, Sequence[int]]], sample: Sequence[int] | None = None, extra_blocks: int = 0
    ) -> StepBatch:
        """Append tokens to sequences. ``sample``: rows to sample; by default the last row of each part."""
        positions: list[int] = []
        starts = [0]
        for number, tokens in parts:
            begin = self._lengths[number]
            self._lengths[number] += len(tokens)
            while len(self._tables[number]) * self._block_size < self._lengths[number]:
                self._tables[number].append(int(self._free.pop()))
            positions += range(begin, self._lengths[number])
            starts.append(len(positions))
        tables = [self._tables[number] for number, _ in parts]
        width = max(len(table) for table in tables) + extra_blocks
        padded = np.zeros((len(tables), width), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        rows = [end - 1 for end in starts[1:]] if sample is None else sample
        shifts = np.repeat([self._shifts[number] for number, _ in parts], np.diff(starts)).astype(np.int32)
        adapters = np.array([self._adapters[number] for number, _ in parts], np.int32)
        at = np.array(positions, np.int32)
        return StepBatch(
            token_ids=np.array([token for _, tokens in parts for token in tokens], np.int32),
            positions=at,
            query_starts=np.array(starts, np.int32),
            context_lens=np.array([self._lengths[number] for number, _ in parts], np.int32),
            block_tables=padded,
            sample_rows=np.array(rows, np.int32),
            rope_rows=at + shifts if shifts.any() else None,
            adapters=adapters if (adapters >= 0).any() else None,
        )
