"""Defines records, which pass arguments from Python to a kernel. A record is an array of 64-bit words with named
fields.

A pointer has two words, its address and the number of bytes that may be used there; a number and a float32 have one
word each. Python fills a record through :class:`RecordLayout`, a kernel reads it through :class:`RecordView`.
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
    """Names the words of a record and says where they lie."""

    def __init__(
        self, name: str, *, pointers: tuple[str, ...] = (), numbers: tuple[str, ...] = (), reals: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.pointers, self.numbers, self.reals = pointers, numbers, reals
        words = [word for field in pointers for word in (field, "")] + [*numbers, *reals]
        self.place = {field: at for at, field in enumerate(words) if field}
        self.num_words = len(words)

    def fill(self, words: Words, values: Mapping[str, Any]) -> None:
        """Writes ``values`` into ``words`` [num_words]. A pointer's value is an array, (address, bytes), or None.

        Raises KeyError where a field is missing or unknown.
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
    """Reads the record at ``base`` in the code of kernel ``k``: each read of a field appends a load."""

    def __init__(self, layout: RecordLayout, k: Kernel, base: Ptr) -> None:
        self._layout, self._k, self._base = layout, k, base

    def _at(self, field: str) -> Ptr:
        return self._base + WORD_BYTES * self._layout.place[field]

    def pointer(self, field: str) -> Ptr:
        """Returns the memory that a pointer field points to."""
        assert field in self._layout.pointers, field
        return self._k.load_ptr(self._at(field))

    def number(self, field: str) -> Int:
        """Returns the value of a number field."""
        assert field in self._layout.numbers, field
        return self._k.load_int(self._at(field))

    def real(self, field: str) -> Vec:
        """Returns the value of a float32 field in all sixteen lanes."""
        assert field in self._layout.reals, field
        return self._k.broadcast(self._at(field))


def _address(value: Any) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if isinstance(value, tuple):
        return value
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.nbytes
    return value.data_ptr(), value.numel() * value.element_size()  # The value is a torch tensor.


# All kernels of a step read this record (:class:`pillion.kernels.cpu.runtime.program.CpuStepRecord` fills it).
STEP = RecordLayout(
    "step",
    pointers=(
        "token_ids",  # token_ids are int32 [T]
        "positions",  # positions are int32 [T]
        "rope_rows",  # rope_rows are int32 [T]: the rows of the rotary tables
        "row_seqs",  # row_seqs are int32 [T]: the sequence that each row belongs to
        "query_starts",  # query_starts are int32 [S + 1]
        "context_lens",  # context_lens are int32 [S]
        "block_tables",  # block_tables are int32 [S, table_stride]: slots, and any valid slot after the last
        "sample_rows",  # sample_rows are int32 [R]
        # The items are int32 [num_items, ITEM_WORDS], attention's work
        # (pillion.kernels.cpu.attention.cpu_attention_plan).
        "items",
        "merges",  # merges are int32 [num_merges, ITEM_WORDS]: their context was attended in several items
        # These are the same for layers with another number of KV heads, in models that have such layers.
        "items_2",
        "merges_2",
        "pool",  # pool is the paged cache
        # The slots are int32 [S, state_pages]: those that hold each sequence's state, -1 where it has none, and those
        # that get the state after the step's tokens.
        "state_reads",
        "state_writes",
    ),
    numbers=(
        "num_tokens",
        "num_seqs",
        "num_samples",
        "num_logits",  # num_logits is how many of the samples have logits, the first ones
        "table_stride",
        "num_items",
        "num_merges",
        "num_items_2",
        "num_merges_2",
        "state_pages",
    ),
)
