"""Records of arguments that Python passes to kernels: arrays of 64-bit words with named fields.

A pointer has two words, its address and its accessible bytes; a number and a float32 have one word each. Python fills a
record through :class:`RecordLayout`, a kernel reads it through :class:`RecordView`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.kernels.cpu.language.emit import Int, Kernel, Ptr, Vec

WORD_BYTES = 8
Words = npt.NDArray[np.int64]


class RecordLayout:
    """Layout of a record; ``place`` is the word index of each field."""

    def __init__(
        self, name: str, *, pointers: tuple[str, ...] = (), numbers: tuple[str, ...] = (), reals: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.pointers, self.numbers, self.reals = pointers, numbers, reals
        # A pointer's second word has no name.
        names = [name for field in pointers for name in (field, "")] + [*numbers, *reals]
        self.place = {field: index for index, field in enumerate(names) if field}
        self.num_words = len(names)

    def fill(self, words: Words, values: Mapping[str, Any]) -> None:
        """Write ``values`` into ``words`` [num_words]. A pointer's value is an array, (address, bytes), or None.

        Raises KeyError if a field is missing or unknown.
        """
        if set(values) != set(self.place):
            raise KeyError(f"{self.name}: {sorted(set(values) ^ set(self.place))} are missing or unknown")
        for field in self.pointers:
            words[self.place[field] : self.place[field] + 2] = _address(values[field])
        for field in self.numbers:
            words[self.place[field]] = int(values[field])
        for field in self.reals:
            words[self.place[field]] = int(np.float32(values[field]).view(np.int32))


class RecordView:
    """The record at ``base``, as the code of kernel ``k`` reads it; each read of a field appends a load."""

    def __init__(self, layout: RecordLayout, k: Kernel, base: Ptr) -> None:
        self._layout, self._k, self._base = layout, k, base

    def _at(self, field: str) -> Ptr:
        return self._base + WORD_BYTES * self._layout.place[field]

    def pointer(self, field: str) -> Ptr:
        assert field in self._layout.pointers, field
        return self._k.load_ptr(self._at(field))

    def number(self, field: str) -> Int:
        assert field in self._layout.numbers, field
        return self._k.load_int(self._at(field))

    def real(self, field: str) -> Vec:
        """Load a float32 field into all sixteen lanes."""
        assert field in self._layout.reals, field
        return self._k.broadcast(self._at(field))


def _address(value: Any) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if isinstance(value, tuple):
        return value
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.nbytes
    return value.data_ptr(), value.numel() * value.element_size()  # a torch tensor


# Record read by all kernels of a step, filled by :class:`pillion.kernels.cpu.runtime.program.CpuStepRecord`.
STEP = RecordLayout(
    "step",
    pointers=(
        "token_ids",  # int32 [T]
        "positions",  # int32 [T]
        "rope_rows",  # int32 [T]: rows of the rotary tables
        "row_seqs",  # int32 [T]: the sequence of each row
        "query_starts",  # int32 [S + 1]
        "context_lens",  # int32 [S]
        "block_tables",  # int32 [S, table_stride]: slots, padded with any valid slot
        "sample_rows",  # int32 [R]
        # Attention's work, int32 [num_items, ITEM_WORDS] (pillion.kernels.cpu.attention.cpu_attention_plan).
        "items",
        "merges",  # int32 [num_merges, ITEM_WORDS]: queries whose context is split over several items
        # Items and merges for layers with a different number of KV heads.
        "items_2",
        "merges_2",
        "pool",  # the paged cache
        # int32 [S, state_pages]: slots of each sequence's state (-1: none), and slots for the state after the step.
        "state_reads",
        "state_writes",
    ),
    numbers=(
        "num_tokens",
        "num_seqs",
        "num_samples",
        "num_logits",  # samples that get logits, the first ones
        "table_stride",
        "num_items",
        "num_merges",
        "num_items_2",
        "num_merges_2",
        "state_pages",
    ),
)
