"""The backend of the CPU kernels (:mod:`pillion.kernels.cpu`): one native call for each step, on a pool of threads.

load_cpu_model (weights mapped, kernels compiled or loaded) -> CpuBackend (threads started) -> bind_pool
-> forward, forward, ... -> close (threads ended)
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.core_board import CoreShare
from pillion.engine.adapters.adapter_forms import AdapterForm
from pillion.engine.adapters.adapter_weights import AdapterWeights, layers_of
from pillion.engine.backends.backend import (
    BackendLost,
    KVLayout,
    PackedAdapter,
    adapter_shapes,
    distinct_rows,
    kv_layout,
)
from pillion.engine.backends.batch import Int32, StepBatch
from pillion.engine.backends.cpu.cpu_adapters import AdapterRows, AdapterTable, CpuAdapter
from pillion.engine.backends.cpu.cpu_model import (
    LOGITS,
    PARTIAL,
    PARTIALS,
    ModelPlan,
    attention_planner,
    plan_model,
    plan_with_adapters,
)
from pillion.engine.backends.cpu.cpu_weights import PackedMatrices, load_cpu_weights
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.model_config import ModelConfig, load_config
from pillion.engine.models.rank_split import RankSplit
from pillion.engine.ranks.rank_memory import TURNS, Bytes, RankMember
from pillion.engine.ranks.rank_weights import split_adapter
from pillion.engine.sampling.sampling_rows import States
from pillion.errors import Internal
from pillion.kernels.cpu.attention.kv_layout import EIGHT_BIT_VERSION, LAYOUT_VERSION
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.module import SCRATCH_BYTES
from pillion.kernels.cpu.products.low_rank import run_rows
from pillion.kernels.cpu.runtime.compiler import CompiledKernels, compile_kernels
from pillion.kernels.cpu.runtime.program import (
    Bounds,
    Buffer,
    CpuStepRecord,
    Operation,
    Program,
    Workspace,
    check_batch,
)
from pillion.kernels.cpu.runtime.thread_pool import ThreadPool

log = logging.getLogger("pillion.worker")

CHECK_VARIABLE = "PILLION_CHECK_KERNELS"


@dataclass(frozen=True, slots=True)
class CpuModel:
    """A model with its kernels, or a rank's share of one: everything that does not depend on threads and the KV pool.
    ``config`` and ``layout`` are those of the whole model; ``dtype`` is the type of its rows, that of KV is in
    ``layout``. ``code_folder`` keeps machine code."""

    config: ModelConfig
    split: RankSplit
    isa: Isa
    layout: KVLayout
    dtype: str
    max_model_len: int
    weights: PackedMatrices
    plan: ModelPlan
    kernels: CompiledKernels
    checked: bool
    code_folder: Path


def load_cpu_model(
    prepared: PreparedModel,
    block_size: int,
    isa: Isa,
    *,
    kv_cache_dtype: str = "auto",
    progress: Progress = lambda line: None,
    checked: bool | None = None,
    cache: ModelCache | None = None,
    split: RankSplit | None = None,
) -> CpuModel:
    """Maps the weights (packs them, the first time) and loads the kernels (compiles them, the first time).

    ``split``: the rank whose share of the model it is; None for a worker of one process.
    ``checked``: kernels check every access; None reads PILLION_CHECK_KERNELS. The caller has made sure that the kernels
    can run the model (``pillion.engine.backends.loading``). Raises ConfigError for weights that do not fit the config.
    """
    checked = os.environ.get(CHECK_VARIABLE) == "1" if checked is None else checked
    cache = cache or ModelCache()
    config = load_config(prepared.folder)
    version = LAYOUT_VERSION if kv_cache_dtype == "auto" else EIGHT_BIT_VERSION
    layout = kv_layout(prepared, block_size, version, kv_cache_dtype)
    split = split or RankSplit.of(config, 0, 1)
    weights = load_cpu_weights(prepared, config, progress, cache, split)
    plan = plan_model(config, weights, layout, prepared.dtype, prepared.max_model_len, split)
    specs = [operation.spec for operation in plan.operations]
    folder = cache.make("kernels")
    kernels = compile_kernels(specs, isa, checked=checked, cache_folder=folder, progress=progress)
    return CpuModel(
        config, split, isa, layout, prepared.dtype, prepared.max_model_len, weights, plan, kernels, checked, folder
    )


def compile_adapter_kernels(model: CpuModel, progress: Progress) -> None:
    """Compiles what steps with adapters need, for later starts."""
    # The code does not depend on how many adapters there are, nor on their ranks.
    compile_with_adapters(model, _adapter_table(model, _inner_orders(model), 1, 1), progress)


def compile_with_adapters(
    model: CpuModel, table: AdapterTable, progress: Progress
) -> tuple[CompiledKernels, Sequence[Operation]]:
    """Returns the kernels of steps with and without adapters, and the operations of a step with them."""
    plan = plan_with_adapters(model.plan, model.config, model.weights, model.layout, model.dtype, model.split, table)
    return compile_operations((*model.plan.operations, *plan.operations), model, progress), plan.operations


def compile_operations(operations: Sequence[Operation], model: CpuModel, progress: Progress) -> CompiledKernels:
    """The kernels of ``operations``, compiled as those of ``model``."""
    specs = [operation.spec for operation in operations]
    return compile_kernels(specs, model.isa, checked=model.checked, cache_folder=model.code_folder, progress=progress)


def _inner_orders(model: CpuModel) -> dict[str, torch.Tensor]:
    """Which inner values of an MLP the weights have, by layer, where they are not in order."""
    names, tensors = {name.rpartition(".")[0] for name in adapter_shapes(model.config)}, model.weights.tensors
    return {name: tensors[f"{name}.inner_order"].long() for name in names if f"{name}.inner_order" in tensors}


def _adapter_table(
    model: CpuModel, orders: Mapping[str, torch.Tensor], max_adapters: int, max_rank: int
) -> AdapterTable:
    local = {name: order.tolist() for name, order in orders.items()} if model.split.whole else {}
    return AdapterTable(adapter_shapes(model.split.local(model.config)), local, max_adapters, max_rank)


@dataclass(frozen=True, slots=True)
class _AdapterSteps:
    """What steps with adapters need. They run a program of their own, so that the others run as if there were none.

    ``inner_values``: which inner values of an MLP the weights have, by layer, where they are not in order.
    """

    table: AdapterTable
    inner_values: Mapping[str, torch.Tensor]
    rows: AdapterRows
    program: Program


class CpuBackend(HostBackend):
    """A :class:`HostBackend` over the CPU kernels.

    A worker of several ranks has one in each rank, over the same pool. All run each forward pass at the same time, with
    the same batch and the same adapters in the same places: a rank waits in it for the others. Rank 0 alone gets
    logits; it copies blocks before its forward pass begins. Where a rank fails, all do: a step raises BackendLost.
    """

    def __init__(
        self,
        model: CpuModel,
        threads: int,
        affinity: Sequence[int] = (),
        share: CoreShare | None = None,
        ranks: RankMember | None = None,
    ) -> None:
        """Starts ``threads`` - 1 native threads, and one for each core that ``share`` lets this worker borrow.

        ``affinity``: the core of each of the ``threads``, or () for any core. ``ranks``: the rank whose share of the
        model this is.
        """
        super().__init__(model.layout, model.config.vocab_size)
        assert model.split == (RankSplit.of(model.config, 0, 1) if ranks is None else ranks.split)
        self.model, self._ranks = model, ranks
        self._workspace = Workspace(_shared_buffers(model.config, ranks) if ranks is not None else {})
        self._workspace.reserve("steps", 1)
        self._program = Program(model.plan.operations, model.kernels, self._workspace)
        self._new_thread_pool = partial(ThreadPool, threads=threads, affinity=affinity, share=share)
        self._thread_pool = self._new_thread_pool(model.kernels)
        self._with_adapters: _AdapterSteps | None = None
        local = model.split.local(model.config)
        self._planner = attention_planner(local, model.isa, self._thread_pool.threads)
        self._step = CpuStepRecord()
        if ranks is not None:
            self._step.point("rank_words", ranks.memory.words)
            self._step.count("rank_naps", ranks.naps)
            self._step.count("rank_nap_ns", ranks.nap_ns)
            self._step.count("rank_stride", ranks.memory.rank_bytes)
        # Whether buffers were replaced since the program was bound to them.
        self._unbound = False
        angles = max(len(cos) for cos, _ in model.plan.ropes)
        self._bounds = Bounds(model.config.vocab_size, 0, model.max_model_len, model.layout.block_size, angles)
        # Views of the logits' buffer without its padding, by number of rows.
        self._logits: dict[int, torch.Tensor] = {}
        # How long the kernels of the last step ran; the rest of the step's time is the host's.
        self.kernel_seconds = 0.0

    def warm_up(self, max_tokens: int) -> None:
        """Run a step of ``max_tokens`` tokens, or of the model's longest text where that is shorter."""
        most = min(max_tokens, self.model.max_model_len)
        super().warm_up(most)
        buffers, tables, scratch = (size / 2**20 for size in self.memory_bytes())
        log.info(
            "memory of this worker beside weights and KV pool: rotary tables %.1f MiB, scratch %.1f, buffers %.1f after"
            " a step of %d tokens; larger steps have them grow",
            tables,
            scratch,
            buffers,
            most,
        )

    def memory_bytes(self) -> tuple[int, int, int]:
        """Bytes of the buffers as they are now, of the rotary tables, and of the threads' scratch."""
        tables = sum(table.numel() * table.element_size() for pair in self.model.plan.ropes for table in pair)
        return self._workspace.nbytes, tables, self._thread_pool.threads * SCRATCH_BYTES

    def close(self) -> None:
        """Ends the threads and releases the pool. Idempotent."""
        self._thread_pool.close()
        super().close()

    def again(self, operations: Sequence[Operation]) -> Callable[[], None]:
        """A function that runs ``operations`` over the record of the last step, to measure single kernels."""
        program = Program(operations, self.model.kernels, self._workspace)
        return lambda: self._run_kernels(program)

    def check_integrity(self) -> None:
        self._workspace.check_integrity()

    def bind_adapters(self, max_adapters: int, max_rank: int) -> None:
        """Makes empty places, and compiles kernels the first time on a machine."""
        super().bind_adapters(max_adapters, max_rank)
        model, orders = self.model, _inner_orders(self.model)
        table = _adapter_table(model, orders, max_adapters, max_rank)
        kernels, operations = compile_with_adapters(model, table, log.info)
        self._use(model.plan, kernels)
        self._with_adapters = _AdapterSteps(
            table,
            orders,
            AdapterRows(max_adapters, run_rows(model.isa)),
            Program(operations, kernels, self._workspace),
        )

    def keep_states(self, layers: Sequence[int]) -> None:
        """Compiles a kernel the first time on a machine."""
        super().keep_states(layers)
        model = self.model
        plan = plan_model(
            model.config, model.weights, model.layout, model.dtype, model.max_model_len, model.split, layers
        )
        self._use(plan, compile_operations(plan.operations, model, log.info))

    def _use(self, plan: ModelPlan, kernels: CompiledKernels) -> None:
        """Has steps without adapters run ``plan``."""
        self._thread_pool.close()
        self.model = replace(self.model, plan=plan, kernels=kernels)
        self._program = Program(plan.operations, kernels, self._workspace)
        self._thread_pool = self._new_thread_pool(kernels)

    def _programs(self) -> tuple[Program, ...]:
        """All programs over the workspace."""
        return (self._program,) if self._with_adapters is None else (self._program, self._with_adapters.program)

    def _rows(self, buffer: Buffer, count: int, width: int) -> npt.NDArray[Any]:
        """The first ``count`` rows of a buffer, a view [count, width]."""
        rows = self._workspace.array(buffer).view(buffer.dtype)
        return rows.reshape(-1, buffer.stride // rows.itemsize)[:count, :width]

    def _read_states(self, num_tokens: int) -> States:
        plan, width = self.model.plan, self.model.config.hidden_size
        return np.concatenate(
            [self._rows(plan.states[layer], num_tokens, width) for layer in self.state_layers], axis=1
        )

    def place_adapter(self, place: int, packed: PackedAdapter) -> None:
        """Writes the adapter's addresses into the table that kernels read."""
        super().place_adapter(place, packed)
        assert isinstance(packed, CpuAdapter)
        self._adapter_steps().table.place(place, packed)

    def adapter_form(self) -> AdapterForm:
        """The packed tiles of the kernels; a rank cuts its share of an adapter here, and so gets it plain."""
        return self._adapter_steps().table.form if self.model.split.whole else super().adapter_form()

    def take_adapter(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        """``data`` begins at a cache line and belongs to the adapter from now on."""
        if not self.model.split.whole:
            return super().take_adapter(digest, about, data)
        return self._adapter_steps().table.take(about, data)

    def _pack(self, weights: AdapterWeights) -> CpuAdapter:
        steps, model = self._adapter_steps(), self.model
        mine = split_adapter(weights, model.config, model.split, steps.inner_values)
        return steps.table.take(*steps.table.form.pack(layers_of(mine)))

    def _adapter_steps(self) -> _AdapterSteps:
        if self._with_adapters is None:
            raise Internal("adapters before bind_adapters")
        return self._with_adapters

    def _adapter_shapes(self) -> Mapping[str, tuple[int, int]]:
        return adapter_shapes(self.model.config)

    def check_step(self, pool: torch.Tensor, batch: StepBatch) -> None:
        if self._bounds.num_slots != len(pool):
            self._bounds = replace(self._bounds, num_slots=len(pool))
        check_batch(batch, self._bounds)
        if self._ranks is not None and batch.num_tokens > self._ranks.memory.max_tokens:
            raise Internal(f"{batch.num_tokens} tokens, the ranks have memory for {self._ranks.memory.max_tokens}")

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        self.check_step(pool, batch)
        try:
            return self._run_checked(pool, batch)
        except BaseException:
            if self._ranks is not None:
                self._ranks.memory.abort()
            raise

    def _run_checked(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        rows, places = distinct_rows(batch)
        self._fill(pool, batch, rows)
        program = self._program
        if batch.adapters is not None:
            steps = self._adapter_steps()
            steps.rows.fill(self._step, batch, rows)
            program = steps.program
        begin = time.perf_counter()
        self._run_kernels(program)
        self.kernel_seconds = time.perf_counter() - begin
        self.borrowed_s = self._thread_pool.borrowed_s
        if self.model.checked:
            self.check_integrity()
        if not self.model.split.leads:
            return torch.empty(0, self.vocab_size)
        logits = self._logits.get(len(rows))
        if logits is None:
            buffer = self.model.plan.logits
            table = self._workspace.array(buffer).view(np.float32).reshape(-1, buffer.stride // 4)
            logits = self._logits[len(rows)] = torch.from_numpy(table[: len(rows), : self.vocab_size])
        return logits if places is None else logits[torch.from_numpy(places)]

    def _run_kernels(self, program: Program) -> None:
        """Runs a step. Raises BackendLost where another rank does not come: what the step has computed is worth
        nothing then."""
        ranks = self._ranks
        if ranks is None:
            self._thread_pool.run(program.entries, self._step.words)
            return
        # The last operation of a step is a wait, so all ranks begin the next step with the same number.
        self._step.count("phase", ranks.memory.phase(ranks.split.rank))
        self._thread_pool.run(program.entries, self._step.words)
        if ranks.memory.aborted:
            raise BackendLost(f"rank {ranks.split.rank} of {ranks.split.size}: a rank was lost, or hangs")

    def _fill(self, pool: torch.Tensor, batch: StepBatch, rows: Int32) -> None:
        """Fills the step's record; buffers grow where this step is larger than all steps before it."""
        plan = self._planner.plan(batch)
        for unit, count in (("tokens", batch.num_tokens), ("samples", len(rows))):
            self._unbound |= self._workspace.reserve(unit, count)
        if self._unbound:
            self._logits.clear()
            # Where bind fails for lack of memory, no kernel may run until it has succeeded.
            for program in self._programs():
                program.bind()
            self._unbound = False
        step, row_seqs = self._step, np.arange(batch.num_seqs, dtype=np.int32)
        if batch.num_tokens != batch.num_seqs:
            row_seqs = np.repeat(row_seqs, batch.query_starts[1:] - batch.query_starts[:-1])
        for field in ("token_ids", "positions", "query_starts", "context_lens", "block_tables"):
            step.point(field, getattr(batch, field))
        step.point("rope_rows", batch.table_rows)
        step.point("row_seqs", row_seqs)
        step.point("sample_rows", rows)
        step.point("items", plan.items)
        step.point("merges", plan.merges)
        step.point_pool(pool.data_ptr(), pool.nbytes)
        step.count("num_tokens", batch.num_tokens)
        step.count("num_seqs", batch.num_seqs)
        step.count("num_samples", len(rows))
        step.count("table_stride", batch.block_tables.shape[1])
        step.count("num_items", len(plan.items))
        step.count("num_merges", len(plan.merges))


def _shared_buffers(config: ModelConfig, ranks: RankMember) -> dict[str, Bytes]:
    """What the programs of a rank read and write in the memory of all ranks, by the names of buffers."""
    memory, split = ranks.memory, ranks.split
    found = {LOGITS: memory.logits[split.vocabulary(config.vocab_size).start * 4 :]}
    for turn in range(TURNS):
        found[f"{PARTIALS}{turn}"] = every = memory.partials(turn)
        found[f"{PARTIAL}{turn}"] = every[split.rank * memory.rank_bytes : (split.rank + 1) * memory.rank_bytes]
    return found
