"""Records pass arguments from Python to a kernel. A record is an array of 64-bit words with named fields.

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
    """The names and places of a record's words."""

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
    """The record at ``base`` in the code of kernel ``k``: each read of a field appends a load."""

    def __init__(self, layout: RecordLayout, k: Kernel, base: Ptr) -> None:
        self._layout, self._k, self._base = layout, k, base

    def _at(self, field: str) -> Ptr:
        return self._base + WORD_BYTES * self._layout.place[field]

    def pointer(self, field: str) -> Ptr:
        """The memory that a pointer field points to."""
        assert field in self._layout.pointers, field
        return self._k.load_ptr(self._at(field))

    def number(self, field: str) -> Int:
        """The value of a number field."""
        assert field in self._layout.numbers, field
        return self._k.load_int(self._at(field))

    def real(self, field: str) -> Vec:
        """The value of a float32 field in all sixteen lanes."""
        assert field in self._layout.reals, field
        return self._k.broadcast(self._at(field))


def _address(value: Any) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if isinstance(value, tuple):
        return value
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.nbytes
    return value.data_ptr(), value.numel() * value.element_size()  # A torch tensor.


# The record that all kernels of a step read (:class:`pillion.kernels.cpu.runtime.program.CpuStepRecord` fills it).
STEP = RecordLayout(
    "step",
    pointers=(
        "token_ids",  # [T] int32
        "positions",  # [T] int32
        "rope_rows",  # [T] int32: rows of the rotary tables
        "row_seqs",  # [T] int32: the sequence that a row belongs to
        "query_starts",  # [S + 1] int32
        "context_lens",  # [S] int32
        "block_tables",  # [S, table_stride] int32: slots; any valid slot behind a sequence's last block
        "sample_rows",  # [R] int32
        # [num_items, ITEM_WORDS] int32: items of attention work (pillion.kernels.cpu.attention.cpu_attention_plan)
        "items",
        "merges",  # [num_merges, ITEM_WORDS] int32: items whose context was attended in several splits
        "pool",  # the paged cache
        # Adapters (pillion.kernels.cpu.products.low_rank), for all rows and for the sampled ones: each row's place or
        # -1; the numbers of rows that have one, ordered by place; and int32 [runs, RUN_WORDS], runs of these.
        "tokens_places",
        "tokens_adapted",
        "tokens_runs",
        "samples_places",
        "samples_adapted",
        "samples_runs",
        "used_places",  # [U] int32: the places that the step uses
        "rank_words",  # of the waits for other ranks (pillion.kernels.cpu.rows.rank_sums)
    ),
    numbers=(
        "num_tokens",
        "num_seqs",
        "num_samples",
        "table_stride",
        "num_items",
        "num_merges",
        "num_tokens_runs",
        "num_samples_runs",
        "num_used_places",
        "phase",  # the step's waits for other ranks have the numbers phase + 1 and so on
        "rank_naps",  # how often this rank sleeps in one of them before it ends all ranks
        "rank_nap_ns",
        "rank_stride",  # bytes between the partials of two ranks
    ),
)
