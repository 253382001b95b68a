"""Adapters for the CPU kernels: packed in a process of its own, placed by writing a few addresses into a table.

    CpuAdapterForm --take--> CpuAdapter (its own memory) --place--> the table that kernels read --> a step's arrays

A place holds no memory of its own: an adapter takes what its rank needs, and ``max_adapters`` of them bound it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pillion.engine.adapters.adapter_forms import Bytes
from pillion.engine.backends.batch import Int32, StepBatch, adapted_runs, row_places
from pillion.engine.backends.cpu.cpu_adapter_form import CpuAdapterForm
from pillion.kernels.cpu.language.records import Words
from pillion.kernels.cpu.products.low_rank import PLACE
from pillion.kernels.cpu.runtime.program import CpuStepRecord


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """A packed adapter: ``words`` [layers, PLACE.num_words] are its records, which point into ``data``."""

    words: Words
    data: Bytes

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class AdapterTable:
    """The places of adapters.

    Attributes:
        form: how an adapter is packed for the model.
        places: for each layer that adapters may change, int64 [max_adapters, PLACE.num_words]: what is in each place.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        inner_orders: Mapping[str, Sequence[int]],
        max_adapters: int,
        max_rank: int,
    ) -> None:
        """The arguments are those of :class:`CpuAdapterForm`."""
        self.form = CpuAdapterForm(shapes, inner_orders, max_rank, PLACE.place, PLACE.num_words)
        self._words = np.zeros((len(shapes), max_adapters, PLACE.num_words), np.int64)
        self.places = dict(zip(shapes, self._words, strict=True))

    def take(self, records: list[Any], data: Bytes) -> CpuAdapter:
        """An adapter that was packed in the form. ``data`` begins at a cache line."""
        words = np.array(records, np.int64)
        for field in PLACE.pointers:
            # Records had offsets so far; records without sizes stay zero.
            place = PLACE.place[field]
            words[:, place] += np.where(words[:, place + 1] > 0, data.ctypes.data, 0)
        return CpuAdapter(words, data)

    def place(self, number: int, packed: CpuAdapter) -> None:
        """Writes a place."""
        self._words[:, number] = packed.words


class AdapterRows:
    """Fills a step's record with the rows that have adapters. ``most_rows``: the most rows of a run."""

    def __init__(self, max_adapters: int, most_rows: int) -> None:
        self._max_adapters, self._most_rows = max_adapters, most_rows

    def fill(self, step: CpuStepRecord, batch: StepBatch, sample_rows: Int32) -> None:
        """``sample_rows``: the rows whose logits the step computes. Raises Internal for places that do not exist."""
        places = row_places(batch, self._max_adapters)
        used = np.unique(places)
        self._fill(step, "tokens", places)
        self._fill(step, "samples", places[sample_rows])
        used = used[used >= 0]
        step.point("used_places", used)
        step.count("num_used_places", len(used))

    def _fill(self, step: CpuStepRecord, name: str, places: Int32) -> None:
        rows, runs = adapted_runs(places, self._most_rows)
        step.point(f"{name}_places", places)
        step.point(f"{name}_adapted", rows)
        step.point(f"{name}_runs", runs)
        step.count(f"num_{name}_runs", len(runs))
