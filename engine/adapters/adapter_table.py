"""Adapter slots of the CPU kernels: a table with the addresses of each adapter's packed matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pillion.engine.adapters.adapter_forms import Bytes
from pillion.engine.adapters.adapter_rows import LayerShape, product_shapes
from pillion.engine.adapters.cpu_adapter_form import CpuAdapterForm
from pillion.kernels.cpu.adapters.low_rank import ADAPTED, SLOT
from pillion.kernels.cpu.language.records import Words
from pillion.kernels.cpu.runtime.program import CpuStepRecord


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """A packed adapter: ``words`` [products, SLOT.num_words] are its records, which point into ``data``."""

    words: Words
    data: Bytes

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class AdapterTable:
    """Adapter slots for programs of the CPU kernels. ``gated``, ``inner_orders`` and ``max_rank``: those of
    :class:`CpuAdapterForm`.

    Attributes:
        step: record of a step's rows and adapter slots, read by the kernels.
        form: packer of adapters for the model's kernels.
        slots: by name of a product that adapters may change, the record of each adapter slot, int64 [max_adapters,
            SLOT.num_words].
    """

    def __init__(
        self,
        shapes: Mapping[str, LayerShape],
        gated: Sequence[str],
        inner_orders: Mapping[str, Sequence[Any]],
        max_adapters: int,
        max_rank: int,
    ) -> None:
        sizes = {
            name: (shape.outputs, shape.inputs, shape.experts or shape.heads)
            for name, shape in product_shapes(shapes).items()
        }
        heads = {name: shape.by_head for name, shape in shapes.items() if shape.by_head is not None}
        self.form = CpuAdapterForm(sizes, heads, gated, inner_orders, max_rank, SLOT.place, SLOT.num_words)
        self.step = CpuStepRecord(ADAPTED)
        self._words = np.zeros((len(sizes), max_adapters, SLOT.num_words), np.int64)
        self.slots = dict(zip(sizes, self._words, strict=True))

    def build(self, about: list[Any], data: Bytes) -> CpuAdapter:
        """Return an adapter from the output of :meth:`CpuAdapterForm.pack`; ``data`` is aligned to a cache line."""
        words = np.array(about, np.int64)
        for field in SLOT.pointers:
            # Relocate offsets to pointers, except in the records of products without pairs, whose size is 0.
            word = SLOT.place[field]
            words[:, word] += np.where(words[:, word + 1] > 0, data.ctypes.data, 0)
        return CpuAdapter(words, data)

    def place(self, slot: int, packed: CpuAdapter) -> None:
        self._words[:, slot] = packed.words
