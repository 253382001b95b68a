"""How an adapter gets to the other ranks: its shapes as JSON, its matrices in a file in memory. Each rank packs its
own share of it.

    rank 0: packed --number, file--> ranks: packed under that number --PLACE number--> in a place
       the RankedAdapter is dropped --its number goes along with the next adapter--> ranks drop theirs
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.backends.backend import PackedAdapter

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {value: name for name, value in _TYPES.items()}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RankedAdapter:
    """An adapter that all ranks have packed under ``number``; ``own`` is rank 0's share, ``nbytes`` counts all."""

    number: int
    own: PackedAdapter
    nbytes: int


def write_adapter(weights: AdapterWeights) -> tuple[dict[str, Any], int]:
    """Returns the adapter's shapes and a file in memory with its matrices, which the caller closes."""
    layers = [
        [name, pair.first_output, _NAMES[pair.a.dtype], list(pair.a.shape), list(pair.b.shape)]
        for name, pairs in weights.layers.items()
        for pair in pairs
    ]
    descriptor = os.memfd_create("pillion-adapter", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        for pairs in weights.layers.values():
            for pair in pairs:
                for matrix in (pair.a, pair.b):
                    file.write(matrix.contiguous().view(torch.uint8).numpy().data)
    return {"digest": weights.digest, "rank": weights.rank, "layers": layers}, descriptor


def read_adapter_file(shapes: dict[str, Any], descriptor: int) -> AdapterWeights:
    """The adapter of :func:`write_adapter`; its matrices lie in the file, which may be closed."""
    found: dict[str, tuple[LowRank, ...]] = {}
    if not shapes["layers"]:
        return AdapterWeights(shapes["digest"], shapes["rank"], found)
    matrices = _matrices(shapes["layers"], mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE))
    for name, first_output, *_ in shapes["layers"]:
        found[name] = (*found.get(name, ()), LowRank(first_output, next(matrices), next(matrices)))
    return AdapterWeights(shapes["digest"], shapes["rank"], found)


def _matrices(layers: list[Any], memory: mmap.mmap) -> Iterator[torch.Tensor]:
    begin = 0
    for _, _, kind, *pair in layers:
        for rows, columns in pair:
            matrix = torch.frombuffer(memory, dtype=_TYPES[kind], count=rows * columns, offset=begin)
            begin += matrix.nbytes
            yield matrix.view(rows, columns)
