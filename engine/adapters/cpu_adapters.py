"""Adapters for the CPU kernels: packed in a subprocess, placed by writing a few addresses to a table.

    CpuAdapterForm --take--> CpuAdapter (its own memory) --slot--> the table that kernels read --> a step's arrays

A slot has no memory itself: an adapter needs what its rank needs, for up to ``max_adapters``. In the program of steps
with adapters, each product that they may change is two operations:

    x --A of each row's adapter--> shrunk        x --W, then B of each row's adapter over shrunk--> out
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pillion.engine.adapters.adapter_forms import AdapterForm
from pillion.engine.adapters.adapter_rows import adapted_runs, adapter_shapes, row_slots
from pillion.engine.adapters.adapter_table import AdapterTable, CpuAdapter
from pillion.engine.adapters.adapter_weights import AdapterWeights, bits_of, shard_adapter
from pillion.engine.adapters.plain_adapters import PlainAdapters
from pillion.engine.backends.backend import Bytes, PackedAdapter
from pillion.engine.backends.cpu.cpu_model import CpuModel, compile_operations, plan_model
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import Experts, Mlp
from pillion.kernels.cpu.adapters.low_rank import run_rows
from pillion.kernels.cpu.runtime.compiler import CompiledKernels
from pillion.kernels.cpu.runtime.program import CpuStepRecord, Operation, Program, Workspace
from pillion.kernels.step import Int32, StepBatch

log = logging.getLogger("pillion.worker")


class AdapterRows:
    """Writer of a step's rows with adapters to the record ADAPTED; ``most_rows`` limits the rows per run."""

    def __init__(self, max_adapters: int, most_rows: int) -> None:
        self._max_adapters, self._most_rows = max_adapters, most_rows

    def fill(self, step: CpuStepRecord, batch: StepBatch, sample_rows: Int32) -> None:
        """Fill the record of a step with logits for ``sample_rows``. Raises Internal for unknown adapter slots."""
        slots = row_slots(batch, self._max_adapters)
        used = np.unique(slots)
        self._fill(step, "tokens", slots)
        self._fill(step, "samples", slots[sample_rows])
        used = used[used >= 0]
        step.point("used_slots", used)
        step.count("num_used_slots", len(used))

    def _fill(self, step: CpuStepRecord, name: str, slots: Int32) -> None:
        rows, runs = adapted_runs(slots, self._most_rows)
        step.point(f"{name}_slots", slots)
        step.point(f"{name}_adapted", rows)
        step.point(f"{name}_runs", runs)
        step.count(f"num_{name}_runs", len(runs))


class CpuAdapters(PlainAdapters):
    """Adapters of a CPU backend, and the program of its steps that use them, so that other steps pay nothing.

    Attributes:
        kernels: of steps with and without adapters.
        program: of steps with adapters, over the backend's workspace.
    """

    def __init__(
        self, model: CpuModel, workspace: Workspace, max_adapters: int, max_rank: int, targets: Sequence[str] = ()
    ) -> None:
        """Compile kernels, the first time on a machine."""
        super().__init__(max_adapters, max_rank, adapter_shapes(model.config, targets))
        self._inner_values = inner_orders(model)
        self._model = model
        self._table = adapter_table(model, self._inner_values, max_adapters, max_rank, targets)
        self.kernels, operations = compile_with_adapters(model, self._table, log.info)
        self._rows = AdapterRows(max_adapters, run_rows(model.isa))
        self.program = Program(operations, self.kernels, workspace)

    def fill(self, batch: StepBatch, sample_rows: Int32) -> None:
        """Pass a step's adapters to the kernels. Raises Internal for unknown adapter slots."""
        self._rows.fill(self._table.step, batch, sample_rows)

    def form(self) -> AdapterForm:
        """Return the packed form for the kernels; the plain form for a process with a shard of the model, which has to
        slice adapters."""
        return self._table.form if self._model.shard.whole else super().form()

    def build(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Return a packed adapter; it owns ``data``, which is aligned to a cache line."""
        return self._table.build(about, data) if self._model.shard.whole else super().build(digest, about, data)

    def place(self, slot: int, packed: PackedAdapter) -> None:
        super().place(slot, packed)
        assert isinstance(packed, CpuAdapter)
        self._table.place(slot, packed)

    def _pack(self, weights: AdapterWeights) -> CpuAdapter:
        model, table = self._model, self._table
        mine = shard_adapter(weights, model.config, model.shard, self._inner_values)
        return table.build(*table.form.pack(bits_of(mine)))


def compile_adapter_kernels(model: CpuModel, progress: Progress) -> None:
    """Compile the kernels of steps with adapters, for later starts."""
    compile_with_adapters(model, adapter_table(model, inner_orders(model), 1, 1), progress)


def compile_with_adapters(
    model: CpuModel, table: AdapterTable, progress: Progress
) -> tuple[CompiledKernels, Sequence[Operation]]:
    """Return the kernels of steps with and without adapters, and the operations of a step with them."""
    plan = plan_model(replace(model.builder(model.plan.ropes), adapters=table), tuple(model.plan.states))
    return compile_operations((*model.plan.operations, *plan.operations), model, progress), plan.operations


def inner_orders(model: CpuModel) -> dict[str, torch.Tensor]:
    """Return the order of the inner values of MLPs, [inner] or per expert [experts, inner], by layer, where weights
    reorder them."""
    names, tensors = {name.rpartition(".")[0] for name in adapter_shapes(model.config)}, model.weights.tensors
    return {name: tensors[f"{name}.inner_order"].long() for name in names if f"{name}.inner_order" in tensors}


def adapter_table(
    model: CpuModel,
    orders: Mapping[str, torch.Tensor],
    max_adapters: int,
    max_rank: int,
    targets: Sequence[str] = (),
) -> AdapterTable:
    """Return empty slots for a model's adapters, which may change ``targets``."""
    local = {name: order.tolist() for name, order in orders.items()} if model.shard.whole else {}
    gated = [
        f"layers.{index}.{operation.gate_up.name}"
        for index, layer in enumerate(layers_of(model.config))
        for operation in layer
        if isinstance(operation, Mlp | Experts) and operation.gated
    ]
    shapes = adapter_shapes(model.shard.local(model.config), targets)
    return AdapterTable(shapes, gated, local, max_adapters, max_rank)
