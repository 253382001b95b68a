"""Reads adapters for the fake model, in the reader process. Imports no torch."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np

from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_forms import Bytes, Layers, PairBits
from pillion.engine.adapters.adapter_reader import AdapterReader
from pillion.errors import ConfigError

LAYER = "layers.0.o"


class FakeAdapterReader(AdapterReader):
    """Adapters that consist of digests; the matrices contain the reader's pid."""

    def packed(self, folder: str, digest: str) -> tuple[list[Any], Bytes]:
        if AdapterFiles(pathlib.Path(folder)).digest() != digest:
            raise ConfigError(f"{folder} does not hold the adapter {digest}")
        own = np.array([[os.getpid()]], np.uint32), np.array([[os.getpriority(os.PRIO_PROCESS, 0)]], np.uint32)
        return self.form.pack({LAYER: [PairBits(0, *own)]})


def packer_of(layers: Layers) -> tuple[int, int]:
    """Return the pid that read an adapter, and its niceness."""
    (pair,) = layers[LAYER]
    return int(pair.a[0, 0]), int(pair.b[0, 0])
