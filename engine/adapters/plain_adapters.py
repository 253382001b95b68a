"""Adapter slots of backends that use an adapter's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pillion.engine.adapters.adapter_forms import AdapterForm, Bytes, PlainForm, plain_bits
from pillion.engine.adapters.adapter_rows import LayerShape, check_adapter
from pillion.engine.adapters.adapter_weights import AdapterWeights, weights_of
from pillion.engine.backends.backend import PackedAdapter, check_slot


@dataclass(frozen=True, slots=True)
class PlainAdapter:
    """An adapter's tensors, not packed further."""

    weights: AdapterWeights

    @property
    def nbytes(self) -> int:
        pairs = (pair for layer in self.weights.layers.values() for pair in layer)
        return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)


class PlainAdapters:
    """Implementation of :class:`pillion.engine.backends.backend.BackendAdapters`. Subclasses override :meth:`_pack`.
    ``shapes``: those of the fused layers that adapters may change, by name."""

    def __init__(self, max_adapters: int, max_rank: int, shapes: Mapping[str, LayerShape]) -> None:
        self._max_rank, self._shapes = max_rank, shapes
        # By slot; also keeps the adapters' memory alive.
        self.placed: list[PackedAdapter | None] = [None] * max_adapters

    @property
    def max_adapters(self) -> int:
        return len(self.placed)

    def form(self) -> AdapterForm:
        return PlainForm()

    def build(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Return a packed adapter from the output of :meth:`PlainForm.pack`. Raises ConfigError if it does not fit the
        model."""
        return self.pack(weights_of(digest, plain_bits(about, data)))

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Check an adapter and pack it. Raises ConfigError if it does not fit the model."""
        check_adapter(weights, self._shapes, self._max_rank)
        return self._pack(weights)

    def place(self, slot: int, packed: PackedAdapter) -> None:
        check_slot(slot, self.max_adapters)
        self.placed[slot] = packed

    def _pack(self, weights: AdapterWeights) -> PackedAdapter:
        return PlainAdapter(weights)
