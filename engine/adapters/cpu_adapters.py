"""Adapters for the CPU kernels: packed in a subprocess, placed by writing a few addresses to a table.

    CpuAdapterForm --build--> CpuAdapter (its own memory) --place--> a slot of the table that kernels read

A slot has no memory itself: each adapter allocates what its rank needs. In the program of steps with adapters, each
product that adapters may change is two operations:

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
    """Writes a step's adapter slots and the runs of its rows with adapters to the record ADAPTED; a run has up to
    ``max_rows`` rows."""

    def __init__(self, max_adapters: int, max_rows: int) -> None:
        self._max_adapters, self._max_rows = max_adapters, max_rows

    def fill(self, step: CpuStepRecord, batch: StepBatch, sample_rows: Int32) -> None:
        """Fill the record of a step that samples from ``sample_rows``. Raises Internal for unknown adapter slots."""
        slots = row_slots(batch, self._max_adapters)
        used = np.unique(slots)
        self._fill(step, "tokens", slots)
        self._fill(step, "samples", slots[sample_rows])
        used = used[used >= 0]
        step.point("used_slots", used)
        step.count("num_used_slots", len(used))

    def _fill(self, step: CpuStepRecord, name: str, slots: Int32) -> None:
        rows, runs = adapted_runs(slots, self._max_rows)
        step.point(f"{name}_slots", slots)
        step.point(f"{name}_adapted", rows)
        step.point(f"{name}_runs", runs)
        step.count(f"num_{name}_runs", len(runs))


class CpuAdapters(PlainAdapters):
    """Adapters of a CPU backend, and its program for steps with adapters; other steps run without overhead. Compiles
    the kernels unless the code cache has them.

    Attributes:
        kernels: kernels of steps with and without adapters.
        program: program of steps with adapters, over the backend's workspace.
    """

    def __init__(
        self, model: CpuModel, workspace: Workspace, max_adapters: int, max_rank: int, targets: Sequence[str] = ()
    ) -> None:
        super().__init__(max_adapters, max_rank, adapter_shapes(model.config, targets))
        self._inner_values = inner_orders(model)
        self._model = model
        self._table = adapter_table(model, self._inner_values, max_adapters, max_rank, targets)
        self.kernels, operations = compile_with_adapters(model, self._table, log.info)
        self._rows = AdapterRows(max_adapters, run_rows(model.isa))
        self.program = Program(operations, self.kernels, workspace)

    def fill(self, batch: StepBatch, sample_rows: Int32) -> None:
        """Write a step's adapter slots to the record that the kernels read. Raises Internal for unknown slots."""
        self._rows.fill(self._table.step, batch, sample_rows)

    def form(self) -> AdapterForm:
        """Return the packer for the kernels or, if this process has a shard of the model and has to slice adapters, the
        plain one."""
        return self._table.form if self._model.shard.whole else super().form()

    def build(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """Return a packed adapter from the output of :meth:`form`'s ``pack``. It keeps ``data``, which is aligned to a
        cache line. Raises ConfigError if a plain one does not fit the model."""
        return self._table.build(about, data) if self._model.shard.whole else super().build(digest, about, data)

    def place(self, slot: int, packed: PackedAdapter) -> None:
        super().place(slot, packed)
        assert isinstance(packed, CpuAdapter)
        self._table.place(slot, packed)

    def _pack(self, weights: AdapterWeights) -> CpuAdapter:
        model, table = self._model, self._table
        own = shard_adapter(weights, model.config, model.shard, self._inner_values)
        return table.build(*table.form.pack(bits_of(own)))


def compile_adapter_kernels(model: CpuModel, progress: Progress) -> None:
    """Compile the kernels of steps with adapters into the code cache, for later starts."""
    compile_with_adapters(model, adapter_table(model, inner_orders(model), 1, 1), progress)


def compile_with_adapters(
    model: CpuModel, table: AdapterTable, progress: Progress
) -> tuple[CompiledKernels, Sequence[Operation]]:
    """Return the kernels of steps with and without adapters, and the operations of a step with them."""
    plan = plan_model(replace(model.builder(model.plan.ropes), adapters=table), tuple(model.plan.states))
    return compile_operations((*model.plan.operations, *plan.operations), model, progress), plan.operations


def inner_orders(model: CpuModel) -> dict[str, torch.Tensor]:
    """Return the order of an MLP's inner values, int64 [inner] or [experts, inner], by name of each layer whose weights
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
    """Return empty slots for adapters of a model that may change the linear layers ``targets``; () for all. ``orders``:
    :func:`inner_orders`."""
    local = {name: order.tolist() for name, order in orders.items()} if model.shard.whole else {}
    gated = [
        f"layers.{index}.{operation.gate_up.name}"
        for index, layer in enumerate(layers_of(model.config))
        for operation in layer
        if isinstance(operation, Mlp | Experts) and operation.gated
    ]
    shapes = adapter_shapes(model.shard.local(model.config), targets)
    return AdapterTable(shapes, gated, local, max_adapters, max_rank)
