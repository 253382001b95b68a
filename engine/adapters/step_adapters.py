"""Multiplies a step's rows by their adapters in plain torch: the reference for all kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights

Int32 = npt.NDArray[np.int32]


class StepAdapters:
    """The adapters of a step's rows, which the decoder asks layer by layer."""

    def __init__(self, row_places: torch.Tensor, adapters: Mapping[int, AdapterWeights]) -> None:
        """``row_places``: [T] the place of each row's adapter, -1 for none. ``adapters``: by place."""
        self._row_places = row_places
        self._adapters = adapters
        places = set(row_places.tolist()) - {-1}
        self._rows = {place: (row_places == place).nonzero()[:, 0] for place in sorted(places)}

    def of_rows(self, rows: torch.Tensor) -> StepAdapters:
        """The adapters of some of the rows, by their numbers [R]."""
        return StepAdapters(self._row_places[rows], self._adapters)

    def add(self, layer: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Adds to a fused layer's outputs [T, out] what the rows' adapters make of its inputs [T, in]."""
        for place, rows in self._rows.items():
            for pair in self._adapters[place].layers.get(layer, ()):
                added = inputs[rows] @ pair.a.T @ pair.b.T
                # Adding to some columns of some rows is one indexed addition.
                columns = torch.arange(pair.first_output, pair.first_output + len(pair.b))
                outputs[rows[:, None], columns] += added


def step_adapters(places: Int32, query_starts: Int32, adapters: Mapping[int, AdapterWeights]) -> StepAdapters:
    """The adapters of a batch's rows: ``places`` and ``query_starts`` are those of its StepBatch."""
    lengths = torch.from_numpy(query_starts).long().diff()
    return StepAdapters(torch.from_numpy(places).long().repeat_interleave(lengths), adapters)
