"""Records: how Python hands a kernel its arguments. A record is an array of 64-bit words with named places.

A pointer takes two words, its address and the bytes behind it that may be used; a number and a float32 take one each.
Python fills a record through :class:`Record`, a kernel reads it through :class:`View`; both look the place up by name,
so that a place has one home.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.kernels.cpu.language.emit import Kernel
from pillion.kernels.cpu.language.values import Int, Ptr, Vec

WORD_BYTES = 8
Words = npt.NDArray[np.int64]


class Layout:
    """Names and places of a record's words."""

    def __init__(
        self, name: str, *, pointers: tuple[str, ...] = (), numbers: tuple[str, ...] = (), reals: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.pointers, self.numbers, self.reals = pointers, numbers, reals
        self.place: dict[str, int] = {}
        for field in pointers:
            self.place[field] = 2 * len(self.place)
        base = 2 * len(pointers)
        for at, field in enumerate((*numbers, *reals)):
            self.place[field] = base + at
        self.num_words = base + len(numbers) + len(reals)

    def fill(self, words: Words, values: Mapping[str, Any]) -> None:
        """Writes ``values`` into ``words`` [num_words]. A pointer is an array, (address, bytes), or None.

        Raises KeyError for a field that is missing or not of this record.
        """
        if set(values) != set(self.place):
            raise KeyError(f"{self.name}: {sorted(set(values) ^ set(self.place))} are missing or unknown")
        for field in self.pointers:
            words[self.place[field] : self.place[field] + 2] = _address(values[field])
        for field in self.numbers:
            words[self.place[field]] = int(values[field])
        for field in self.reals:
            words[self.place[field]] = int(np.float32(values[field]).view(np.int32))

    def view(self, k: Kernel, base: Ptr) -> View:
        """How a kernel reads a record at ``base``."""
        return View(self, k, base)


class View:
    """A record as a kernel sees it."""

    def __init__(self, layout: Layout, k: Kernel, base: Ptr) -> None:
        self._layout, self._k, self._base = layout, k, base

    def at(self, field: str) -> Ptr:
        """Where a field stands."""
        return self._base + WORD_BYTES * self._layout.place[field]

    def pointer(self, field: str) -> Ptr:
        """The memory that a field points to."""
        assert field in self._layout.pointers, field
        return self._k.load_ptr(self.at(field))

    def number(self, field: str) -> Int:
        """A number."""
        assert field in self._layout.numbers, field
        return self._k.load_int(self.at(field))

    def real(self, field: str) -> Vec:
        """A float32, sixteen times."""
        assert field in self._layout.reals, field
        return self._k.broadcast(self.at(field))


def _address(value: Any) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if isinstance(value, tuple):
        return value
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.nbytes
    return value.data_ptr(), value.numel() * value.element_size()  # A torch tensor.


# What all kernels of a step can see; filled by :class:`pillion.kernels.cpu.program.program.StepRecord` once per step.
STEP = Layout(
    "step",
    pointers=(
        "token_ids",  # [T] int32
        "positions",  # [T] int32
        "row_seqs",  # [T] int32: which sequence a row belongs to
        "query_starts",  # [S + 1] int32
        "context_lens",  # [S] int32
        "block_tables",  # [S, table_stride] int32: slots; behind a sequence's last block any valid slot
        "sample_rows",  # [R] int32
        # [num_items, ITEM_WORDS] int32: pieces of attention work (pillion.kernels.cpu.attention.cpu_attention_plan)
        "items",
        "merges",  # [num_merges, MERGE_WORDS] int32: rows whose context was attended in several splits
        "pool",  # the paged cache
    ),
    numbers=("num_tokens", "num_seqs", "num_samples", "table_stride", "num_items", "num_merges"),
)
