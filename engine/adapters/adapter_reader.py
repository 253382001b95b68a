"""Reads the matrices of an adapter, in the order of outputs that the decoder's fused layers have. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_forms import AdapterForm, Bytes, Layers, PairBits
from pillion.engine.adapters.adapter_store import AdapterJobs
from pillion.engine.models.model_config import ModelConfig, load_config


@dataclass(frozen=True, slots=True)
class AdapterReader(AdapterJobs):
    """Reads and packs the adapters of one model, in a process to which it was described.

    Attributes:
        model_folder: the folder of the model that the adapters are for.
        dtype: the model's type, which the matrices get.
        max_rank: the highest rank that is allowed; 0 allows any.
        qkv_order: the checkpoint's output of each output of the fused projection of queries, keys and values; None
            where both have one order.
        form: what the worker's backend takes.
    """

    model_folder: str
    dtype: str
    max_rank: int
    qkv_order: Sequence[int] | None
    form: AdapterForm

    def packed(self, folder: str, digest: str) -> tuple[list[Any], Bytes]:
        """What the form makes of the adapter in a folder. Raises ConfigError for one that does not fit the model or the
        form, and for files of another content than that of ``digest``."""
        files = AdapterFiles(Path(folder))
        model = load_config(Path(self.model_folder))
        return self.form.pack(read_pairs(files, model, self.dtype, digest, self.max_rank, self.qkv_order))


def read_pairs(
    files: AdapterFiles,
    model: ModelConfig,
    dtype: str,
    digest: str,
    max_rank: int = 0,
    qkv_order: Sequence[int] | None = None,
) -> Layers:
    """Reads an adapter's matrices; the arguments are those of :class:`AdapterReader`. Raises ConfigError if they do not
    fit the model, or if the files have another content than that of ``digest``."""
    pairs = files.pairs(model, max_rank)
    numbers = files.checked_numbers(digest, pairs)
    order = None if qkv_order is None else np.array(qkv_order)
    layers: dict[str, list[PairBits]] = defaultdict(list)
    for pair in pairs:
        first, projection = pair.projection.first_output, pair.projection
        a = files.bits(pair.a, numbers.pop(pair.a), dtype)
        b = files.bits(pair.b, numbers.pop(pair.b), dtype, pair.scale)
        if order is not None and projection.layer.endswith(".qkv"):
            # Heads keep their places, so each projection is reordered within itself.
            b = b[order[first : first + projection.outputs] - first]
        layers[projection.layer].append(PairBits(first, a, b))
    return layers
