"""Multiplies a step's rows by their adapters in plain torch, for the torch backend: the reference for all kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pillion.engine.adapters.adapter_rows import adapter_shapes, by_head
from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.adapters.plain_adapters import PlainAdapter, PlainAdapters
from pillion.engine.models.model_config import ModelConfig
from pillion.kernels.step import StepBatch


class StepAdapters:
    """Holds the adapters of a step's rows, which the decoder applies layer by layer."""

    def __init__(self, row_slots: torch.Tensor, adapters: Mapping[int, AdapterWeights]) -> None:
        """Takes ``row_slots``, [T] the slot of each row's adapter, -1 for none, and ``adapters`` by slot."""
        self._row_slots = row_slots
        self._adapters = adapters
        slots = set(row_slots.tolist()) - {-1}
        self._rows = {slot: (row_slots == slot).nonzero()[:, 0] for slot in sorted(slots)}

    def of_rows(self, rows: torch.Tensor) -> StepAdapters:
        """Returns the adapters of some of the rows, by their numbers [R]."""
        return StepAdapters(self._row_slots[rows], self._adapters)

    def add(self, layer: str, inputs: torch.Tensor, outputs: torch.Tensor, expert: int | None = None) -> None:
        """Adds to a fused layer's outputs [T, out], or to those of one ``expert``, the products of its inputs [T, in]
        with the rows' adapters."""
        for slot, rows in self._rows.items():
            for pair in self._adapters[slot].layers.get(layer, ()):
                a, b = (pair.a, pair.b) if expert is None else (pair.a[expert], pair.b[expert])
                # The matrices of routers and gates are float32 in every type of the model.
                added = (inputs[rows].to(a.dtype) @ a.T @ b.T).to(outputs.dtype)
                columns = torch.arange(pair.first_output, pair.first_output + len(b))
                # One indexed addition adds to these columns of these rows, and to no others.
                outputs[rows[:, None], columns] += added

    def add_by_head(
        self, layer: str, sizes: tuple[int, int], part: int, inputs: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Adds to the outputs [T, heads, out] of a layer with a matrix for each head the products of its inputs [T,
        heads, in] with the rows' adapters. ``sizes`` are a head's outputs for keys and for values; ``part`` is 0 for
        the product that takes queries to latents, and 1 for that of values."""
        for slot, rows in self._rows.items():
            for pair in self._adapters[slot].layers.get(layer, ()):
                own = by_head(pair, *sizes)[part]
                outputs[rows] += (inputs[rows].transpose(0, 1) @ own.a.mT @ own.b.mT).transpose(0, 1)


class TorchAdapters(PlainAdapters):
    """Holds the adapters of the torch backend."""

    def __init__(self, config: ModelConfig, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        super().__init__(max_adapters, max_rank, adapter_shapes(config, targets))

    def of_step(self, batch: StepBatch) -> StepAdapters:
        """Returns the adapters of a step's rows."""
        placed = {at: one.weights for at, one in enumerate(self.placed) if isinstance(one, PlainAdapter)}
        assert batch.adapters is not None
        slots, starts = map(torch.from_numpy, (batch.adapters, batch.query_starts))
        return StepAdapters(slots.long().repeat_interleave(starts.long().diff()), placed)
