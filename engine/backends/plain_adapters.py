"""How backends take adapters that another process has read in the plain form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pillion.engine.adapters.adapter_forms import AdapterForm, Bytes, PlainForm, plain_layers
from pillion.engine.adapters.adapter_weights import AdapterWeights, weights_of
from pillion.engine.backends.backend import PackedAdapter


class PlainAdapters(ABC):
    """The part of a backend that leaves all packing to its :meth:`pack_adapter`."""

    @abstractmethod
    def pack_adapter(self, weights: AdapterWeights) -> PackedAdapter:
        """Prepares an adapter for this backend. Raises ConfigError where it does not fit."""

    def adapter_form(self) -> AdapterForm:
        """Returns the plain form."""
        return PlainForm()

    def take_adapter(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Makes an adapter of what the plain form packed. Raises ConfigError where it does not fit."""
        return self.pack_adapter(weights_of(digest, plain_layers(about, data)))
