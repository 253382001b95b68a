"""Adapters of a step in plain torch, for the torch backend: the reference for all kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pillion.engine.adapters.adapter_rows import adapter_shapes, by_head
from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.adapters.plain_adapters import PlainAdapter, PlainAdapters
from pillion.engine.models.model_config import ModelConfig
from pillion.kernels.step import StepBatch


class StepAdapters:
    """Adapters of a step's rows, applied by the decoder layer by layer.

    Args:
        row_slots: int64 [T], each row's adapter slot; -1 for none.
        adapters: placed adapters by slot.
    """

    def __init__(self, row_slots: torch.Tensor, adapters: Mapping[int, AdapterWeights]) -> None:
        self._row_slots = row_slots
        self._adapters = adapters
        slots = set(row_slots.tolist()) - {-1}
        self._rows = {slot: (row_slots == slot).nonzero()[:, 0] for slot in sorted(slots)}

    def of_rows(self, rows: torch.Tensor) -> StepAdapters:
        """Return the adapters of a subset of the rows; ``rows`` [R] are their indices."""
        return StepAdapters(self._row_slots[rows], self._adapters)

    def add(self, layer: str, inputs: torch.Tensor, outputs: torch.Tensor, expert: int | None = None) -> None:
        """Add each row's B (A x) to ``outputs`` [T, out] of a fused layer, or of one ``expert``, with ``inputs`` [T,
        in]."""
        for slot, rows in self._rows.items():
            for pair in self._adapters[slot].layers.get(layer, ()):
                a, b = (pair.a, pair.b) if expert is None else (pair.a[expert], pair.b[expert])
                # Matrices of routers and gates are float32 whatever the model's type.
                added = (inputs[rows].to(a.dtype) @ a.T @ b.T).to(outputs.dtype)
                columns = torch.arange(pair.first_output, pair.first_output + len(b))
                outputs[rows[:, None], columns] += added

    def add_by_head(
        self, layer: str, sizes: tuple[int, int], part: int, inputs: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Add each row's adapter product to ``outputs`` [T, heads, out] of a layer with a matrix per head, with
        ``inputs`` [T, heads, in].

        ``sizes``: a head's outputs for keys and for values. ``part``: 0 for the product that maps queries to latents, 1
        for the one that maps latents to values (see :func:`by_head`).
        """
        for slot, rows in self._rows.items():
            for pair in self._adapters[slot].layers.get(layer, ()):
                split = by_head(pair, *sizes)[part]
                outputs[rows] += (inputs[rows].transpose(0, 1) @ split.a.mT @ split.b.mT).transpose(0, 1)


class TorchAdapters(PlainAdapters):
    """Adapters of the torch backend."""

    def __init__(self, config: ModelConfig, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        super().__init__(max_adapters, max_rank, adapter_shapes(config, targets))

    def of_step(self, batch: StepBatch) -> StepAdapters:
        placed = {slot: packed.weights for slot, packed in enumerate(self.placed) if isinstance(packed, PlainAdapter)}
        assert batch.adapters is not None
        slots, starts = map(torch.from_numpy, (batch.adapters, batch.query_starts))
        return StepAdapters(slots.long().repeat_interleave(starts.long().diff()), placed)
