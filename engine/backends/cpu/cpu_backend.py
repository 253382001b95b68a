"""The backend of the CPU kernels (:mod:`pillion.kernels.cpu`): one native call per step, on a thread pool.

load_cpu_model (maps weights, compiles or loads kernels) -> CpuBackend (starts threads) -> bind_pool
-> forward, forward, ... -> close (ends threads)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.adapters.cpu_adapters import CpuAdapters
from pillion.engine.backends.backend import Bytes, bound_adapters, distinct_rows
from pillion.engine.backends.cpu.cpu_model import (
    CpuModel,
    ModelPlan,
    attention_planners,
    compile_operations,
    plan_model,
)
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.engine.sampling.sampler import LargestLogits
from pillion.errors import Internal
from pillion.host.core_lending_table import CoreShare
from pillion.kernels.cpu.attention.cpu_attention import step_field
from pillion.kernels.cpu.language.module import SCRATCH_BYTES
from pillion.kernels.cpu.runtime.compiler import CompiledKernels
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
from pillion.kernels.state_pieces import PIECE_ALIGNMENT_BYTES
from pillion.kernels.step import Float32, Int32, States, StepBatch

log = logging.getLogger("pillion.worker")


class CpuBackend(HostBackend):
    """The :class:`HostBackend` of the CPU kernels."""

    adapters: CpuAdapters | None = None
    gives_vectors = True

    def __init__(
        self,
        model: CpuModel,
        threads: int,
        affinity: Sequence[int] = (),
        share: CoreShare | None = None,
        common: Mapping[str, Bytes] | None = None,
    ) -> None:
        """Start ``threads`` - 1 native threads, and one per core that ``share`` allows to borrow.

        ``affinity``: core of each of the ``threads``; () for any. ``common``: by name, the buffers that are in memory
        shared with other processes.
        """
        super().__init__(model.layout, model.config.vocab_size)
        self.model = model
        self.workspace = Workspace(common)
        self.workspace.reserve("steps", 1)
        self._program = Program(model.plan.operations, model.kernels, self.workspace)
        self._new_thread_pool = partial(ThreadPool, threads=threads, affinity=affinity, share=share)
        self._thread_pool = self._new_thread_pool(model.kernels)
        local = model.shard.local(model.config)
        planners = attention_planners(local, model.dtype, model.isa, self._thread_pool.threads)
        self._planners = [(planner, _plan_fields(number)) for number, planner in enumerate(planners)]
        self._step = CpuStepRecord()
        # True if buffers were reallocated after the programs were bound to them.
        self._unbound = False
        angles = max(len(cos) for cos, _ in model.plan.ropes)
        layout = model.layout
        sizes = layout.block_size, angles, layout.state_pages
        self._bounds = Bounds(model.config.vocab_size, 0, model.max_model_len, *sizes)
        # By number of rows: views of the logits and largest logits of that many rows.
        self._views: dict[int, tuple[torch.Tensor, LargestLogits | None]] = {}

    def warm_up(self, max_tokens: int) -> None:
        """Run a step of min(max_tokens, max_model_len) tokens over a separate pool, and log the memory."""
        tokens = min(max_tokens, self.model.max_model_len)
        super().warm_up(tokens)
        buffers, tables, scratch = (size / 2**20 for size in self.memory_bytes())
        log.info(
            "memory of this worker beside weights and KV pool: rotary tables %.1f MiB, scratch %.1f, buffers %.1f after"
            " a step of %d tokens; larger steps grow them",
            tables,
            scratch,
            buffers,
            tokens,
        )

    def memory_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of the buffers, of the rotary tables, and of the threads' scratch memory."""
        tables = sum(table.numel() * table.element_size() for pair in self.model.plan.ropes for table in pair)
        return self.workspace.nbytes, tables, self._thread_pool.threads * SCRATCH_BYTES

    def close(self) -> None:
        """End the backend's threads and release the pool. Idempotent."""
        self._thread_pool.close()
        super().close()

    def again(self, operations: Sequence[Operation]) -> Callable[[], None]:
        """Return a function that runs ``operations`` on the last step's data, to measure single kernels."""
        program = Program(operations, self.model.kernels, self.workspace)
        return lambda: self._run_kernels(program)

    def check_integrity(self) -> None:
        self.workspace.check_integrity()

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Compile the kernel that stores these layers' inputs; machine code is cached."""
        super().set_aux_hidden_state_layers(layers)
        model = self.model
        plan = plan_model(model.builder(), layers)
        self.use(plan, compile_operations(plan.operations, model, log.info))

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Allocate the adapter slots and compile their kernels; machine code is cached."""
        adapters = CpuAdapters(self.model, self.workspace, max_adapters, max_rank, targets)
        self.use(self.model.plan, adapters.kernels)
        self.adapters = adapters

    def use(self, plan: ModelPlan, kernels: CompiledKernels) -> None:
        """Run later steps without adapters by ``plan`` on ``kernels``."""
        self._thread_pool.close()
        self.model = replace(self.model, plan=plan, kernels=kernels)
        self._program = Program(plan.operations, kernels, self.workspace)
        self._thread_pool = self._new_thread_pool(kernels)

    def _programs(self) -> tuple[Program, ...]:
        """Return all programs that use the backend's workspace."""
        return (self._program,) if self.adapters is None else (self._program, self.adapters.program)

    def _rows(self, buffer: Buffer, count: int, width: int) -> npt.NDArray[Any]:
        """Return a view [count, width] of a buffer's first rows."""
        rows = self.workspace.array(buffer).view(buffer.dtype)
        return rows.reshape(-1, buffer.stride // rows.itemsize)[:count, :width]

    def _read_states(self, num_tokens: int) -> States:
        plan, width = self.model.plan, self.model.config.hidden_size
        return np.concatenate(
            [self._rows(plan.states[layer], num_tokens, width) for layer in self.aux_hidden_state_layers], axis=1
        )

    def _read_vectors(self, batch: StepBatch) -> Float32:
        rows, buffer = distinct_rows(batch)[0], self.model.plan.normed
        assert buffer is not None
        vectors = self._rows(buffer, len(rows), self.model.config.hidden_size)[-batch.pooled :]
        # bfloat16 rows are stored as uint16 with the same bits.
        return vectors.copy() if vectors.dtype == np.float32 else (vectors.astype(np.uint32) << 16).view(np.float32)

    def check_step(self, pool: torch.Tensor, batch: StepBatch) -> None:
        if self._bounds.num_slots != len(pool):
            self._bounds = replace(self._bounds, num_slots=len(pool))
        if self.layout.state_pages and pool.data_ptr() % PIECE_ALIGNMENT_BYTES:
            raise Internal(
                "a pool with states must be aligned to cache lines, since kernels bypass the caches to write them"
            )
        check_batch(batch, self._bounds)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        self.check_step(pool, batch)
        return self._run_checked(pool, batch)

    def _run_checked(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        rows, indices = distinct_rows(batch)
        self._fill(pool, batch, rows)
        program = self._program
        if batch.adapters is not None:
            adapters = bound_adapters(self.adapters)
            adapters.fill(batch, rows)
            program = adapters.program
        self._run_kernels(program)
        self.borrowed_s = self._thread_pool.borrowed_s
        if self.model.checked:
            self.check_integrity()
        return self._read_logits(len(rows) - batch.pooled, indices)

    def _read_logits(self, count: int, indices: npt.NDArray[np.intp] | None) -> torch.Tensor:
        """Return the first ``count`` rows of logits, indexed by ``indices`` if not None, and set ``largest``."""
        views = self._views.get(count)
        if views is None:
            rows = torch.from_numpy(self._rows(self.model.plan.logits, count, self.vocab_size))
            views = self._views[count] = rows, self._largest_of(count)
        logits, largest = views
        if indices is not None:
            logits = logits[torch.from_numpy(indices)]
            largest = largest and LargestLogits(largest.maxima[indices], largest.tokens[indices])
        self.largest = largest
        return logits

    def _largest_of(self, count: int) -> LargestLogits | None:
        if self.model.plan.largest is None:
            return None
        maxima, tokens = self.model.plan.largest
        groups = self.vocab_size // GROUP_TOKENS
        return LargestLogits(self._rows(maxima, count, groups), self._rows(tokens, count, 1)[:, 0])

    def _run_kernels(self, program: Program) -> None:
        self._thread_pool.run(program.entries, self._step.words)

    def _bind(self) -> None:
        """Bind the programs to the reallocated buffers."""
        self._views.clear()
        # _unbound stays True if an allocation fails, so that no kernel runs before bind has succeeded.
        for program in self._programs():
            program.bind()
        self._unbound = False

    def _fill(self, pool: torch.Tensor, batch: StepBatch, rows: Int32) -> None:
        """Fill the step's record, and enlarge the buffers if no earlier step was as large."""
        num_logits = len(rows) - batch.pooled
        for unit, count in (("tokens", batch.num_tokens), ("samples", len(rows)), ("logits", num_logits)):
            self._unbound |= self.workspace.reserve(unit, count)
        if self._unbound:
            self._bind()
        step, row_seqs = self._step, np.arange(batch.num_seqs, dtype=np.int32)
        if batch.num_tokens != batch.num_seqs:
            row_seqs = np.repeat(row_seqs, batch.query_starts[1:] - batch.query_starts[:-1])
        for field in ("token_ids", "positions", "query_starts", "context_lens", "block_tables"):
            step.point(field, getattr(batch, field))
        step.point("rope_rows", batch.table_rows)
        step.point("row_seqs", row_seqs)
        step.point("sample_rows", rows)
        for planner, fields in self._planners:
            plan = planner.plan(batch)
            for (address, number), records in zip(fields, (plan.items, plan.merges), strict=True):
                step.point(address, records)
                step.count(number, len(records))
        if batch.states is not None:
            step.point("state_reads", batch.states.reads)
            step.point("state_writes", batch.states.writes)
        step.point_pool(pool.data_ptr(), pool.nbytes)
        step.count("num_tokens", batch.num_tokens)
        step.count("num_seqs", batch.num_seqs)
        step.count("num_samples", len(rows))
        step.count("num_logits", num_logits)
        step.count("table_stride", batch.block_tables.shape[1])
        step.count("state_pages", self.layout.state_pages)


def _plan_fields(number: int) -> list[tuple[str, str]]:
    """Return the record's fields (address, number) of attention plan ``number``: those of its items and its merges."""
    return [(step_field(kind, number), step_field(f"num_{kind}", number)) for kind in ("items", "merges")]
