"""Holds adapters that a backend takes as tensors, from the plain form in which another process has read them."""

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
    """Holds an adapter as a process has read it, with its tensors."""

    weights: AdapterWeights

    @property
    def nbytes(self) -> int:
        pairs = (pair for layer in self.weights.layers.values() for pair in layer)
        return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)


class PlainAdapters:
    """Implements :class:`pillion.engine.backends.backend.BackendAdapters`; each slot holds what :meth:`_pack` makes."""

    def __init__(self, max_adapters: int, max_rank: int, shapes: Mapping[str, LayerShape]) -> None:
        """Makes the empty slots. ``shapes`` are those of the layers that adapters may change."""
        self._max_rank, self._shapes = max_rank, shapes
        # This keeps the adapter in each slot alive.
        self.placed: list[PackedAdapter | None] = [None] * max_adapters

    @property
    def max_adapters(self) -> int:
        return len(self.placed)

    def form(self) -> AdapterForm:
        """Returns the form in which this backend takes adapters: plain tensors."""
        return PlainForm()

    def take(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Makes an adapter of what :class:`PlainForm` packed. Raises ConfigError where the adapter does not fit the
        model."""
        return self.pack(weights_of(digest, plain_bits(about, data)))

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Checks an adapter and brings it into the form of :meth:`_pack`. Raises ConfigError where it does not fit."""
        check_adapter(weights, self._shapes, self._max_rank)
        return self._pack(weights)

    def place(self, slot: int, packed: PackedAdapter) -> None:
        """Puts a packed adapter into a slot."""
        check_slot(slot, self.max_adapters)
        self.placed[slot] = packed

    def _pack(self, weights: AdapterWeights) -> PackedAdapter:
        return PlainAdapter(weights)
