"""The backend of the Triton kernels: steps on a GPU, each launched while the previous one runs.

    GpuModel (weights, buffers) -> GpuBackend -> allocate_workspace (kernels compile) -> bind_pool
        -> warm_up (CUDA graphs over that pool) -> launch, launch, wait, launch, wait ... -> close

A launch copies the step's record to the device, replays a graph (or runs kernel by kernel), which usually samples as
well, and starts the copy of the tokens to the host, without waiting; a launch without rows leaves sampling to
``GpuInFlightStep.choose``. ``GpuInFlightStep.wait`` waits only for that copy. The tokens also stay on the device, where
the next step's embedding reads them (:mod:`pillion.kernels.gpu.rows.embedding`).

One rank of several (``rank_group.py``) launches the same steps over its own share, and ends in the same order: once
rank 0's step has ended, no rank still writes its KV. Only rank 0 samples, and sends tokens known only to its device to
the others before the step that embeds them. In a pool in one piece rank 0 copies blocks, in one divided over GPUs one
rank per shard does (:mod:`pillion.engine.backends.gpu.pool_parts`).

With ``TRITON_INTERPRET=1`` the same code runs on the CPU in Triton's interpreter, over a pool in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pillion.engine.backends.backend import (
    FP8_E4M3,
    BackendLost,
    KVLayout,
    PoolPlace,
    bound_adapters,
    checked_copies,
    checked_memory,
    distinct_rows,
    warm_up_batches,
)
from pillion.engine.backends.gpu.device_memory import (
    DevicePool,
    DividedPool,
    distant_tensor,
    event_on,
    tensor_at,
    to_device,
    to_host,
)
from pillion.engine.backends.gpu.gpu_decoder import GpuDecoder
from pillion.engine.backends.gpu.gpu_experts import GpuExperts
from pillion.engine.backends.gpu.gpu_graphs import MAX_GRAPH_TOKENS, StepGraphs
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.gpu.gpu_sampler import GpuChoice, GpuSampler
from pillion.engine.backends.gpu.gpu_step import GpuStepRecord, StepShape
from pillion.engine.backends.gpu.pool_parts import (
    LatentRows,
    LayerRows,
    PartRows,
    PoolPart,
    part_layout,
    parts_of,
    whole_parts,
)
from pillion.engine.backends.host_backend import states_of_rows
from pillion.engine.gpu_adapters.gpu_adapters import GpuAdapters
from pillion.engine.gpu_states.gpu_states import GpuStates
from pillion.errors import ConfigError, Internal
from pillion.kernels.gpu import blocks
from pillion.kernels.gpu.attention.gpu_attention_plan import GpuAttentionPlan
from pillion.kernels.gpu.attention.latent_attention import LatentAttention
from pillion.kernels.gpu.attention.paged_attention import PagedAttention, window_of
from pillion.kernels.step import Bool, Float32, RowEdit, Sampled, SamplingRows, StateSlots, StepBatch, UInt32
from pillion.types import SAMPLING_OPTIONS, SamplingParams

log = logging.getLogger("pillion.worker")

# Rows of tokens in a pool are 32-bit numbers.
MAX_ROWS = 2**31 - 1
# Slots for the KV of the step that compiles the kernels. Slots for its whole text could exceed the memory that the
# buffers of a large budget leave.
SCRATCH_SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    """The limits of one step, by which buffers and graphs are allocated once.

    Attributes:
        max_samples: max sampled rows of a step; 0 for a worker that never samples. Larger steps run without a graph.
        max_scored: max additional rows, whose logits score the tokens of prompts.
        max_model_len: max tokens of one sequence.
        num_speculative_tokens: max draft tokens of a decode.
    """

    max_tokens: int
    max_seqs: int
    max_samples: int
    max_model_len: int
    max_scored: int = 0
    num_speculative_tokens: int = 0


class BoundPool:
    """A pool, and all objects that depend on its address: attention, the step's record, decoder and graphs."""

    def __init__(
        self,
        model: GpuModel,
        parts: Sequence[tuple[PoolPart, torch.Tensor]],
        layout: KVLayout,
        limits: GpuLimits,
        states: GpuStates | None,
        sampler: GpuSampler | None,
        experts: GpuExperts | None,
        decoder: type[GpuDecoder],
        *,
        eager: bool,
    ) -> None:
        """``parts``: those of the process's KV heads, each with its shard's bytes [slots, ...]. ``sampler``: None in
        processes that do not sample. ``decoder``: the class that runs the forward pass."""
        self.num_slots, self.products = len(parts[0][1]), model.plain_products
        self.copied = [shard for part, shard in parts if part.copied]
        self.parts = [_part_rows(model, part, shard, layout, limits) for part, shard in parts]
        words = [part.attention_words for part in self.parts]
        samples = 0 if sampler is None else limits.max_samples
        self.record = GpuStepRecord(limits.max_tokens, samples, layout.block_size, words, model.device)
        self._sampler = sampler
        # Each rank has a separate shard with states, or all share the only one.
        self.states = None if states is None else states.over(parts[0][1])
        self.decoder = decoder(model, self.parts, self.record, self.states, experts)
        self.graphs = StepGraphs(
            self._run,
            limits.max_tokens,
            limits.max_samples,
            model.device,
            eager=eager or not model.capturable,
            adapters=model.adapters is not None,
            ranks=model.ranks,
        )

    def chooses(self, rows: SamplingRows | None) -> bool:
        """Return whether a step can sample the tokens of its first rows itself."""
        return rows is not None and not rows.edits and rows.masks is None and len(rows) <= len(self.record.sampling)

    def _run(self, shape: StepShape) -> torch.Tensor:
        """Run the step in the record, like :meth:`GpuDecoder.run`, and sample the rows to sample."""
        logits = self.decoder.run(shape)
        count = min(len(logits), len(self.record.sampling))
        if self._sampler is not None:
            self._sampler.choose(logits[:count], self.record.sampling[:count])
        return logits

    def plans(self, batch: StepBatch) -> list[GpuAttentionPlan | None]:
        """Return the plan of a step's attention for each part of the pool."""
        return [None if part.attention is None else part.attention.planner.plan(batch) for part in self.parts]


def _part_rows(
    model: GpuModel, part: PoolPart, shard: torch.Tensor, layout: KVLayout, limits: GpuLimits
) -> PartRows | LatentRows:
    """Build the object that writes and attends a part of the process's KV heads in the bytes of a shard."""
    config, rows = model.config, LayerRows.of(shard, layout, part, model.dtype)
    if config.latents is not None:
        return LatentRows(rows, _latent_attention(model, rows.pool, layout, limits) if part.attended else None)
    attention, mine = None, model.shard.kv_heads_of(part.kind.kv_heads)
    sees = (tokens for layer, tokens in enumerate(config.sliding_windows) if config.kv_source(layer) in rows.places)
    windows = {window_of(tokens, config.chunked, model.longest) for tokens in sees}
    if part.attended:
        attention = PagedAttention(
            rows.pool,
            num_heads=len(part.heads) * (config.num_heads // len(mine)),
            num_kv_heads=len(part.heads),
            head_dim=part.kind.head_dim,
            block_size=layout.block_size,
            num_layers=rows.pool.shape[1],
            kv="fp8_e4m3" if layout.dtype == FP8_E4M3 else "plain",
            decode_rows=1 + limits.num_speculative_tokens,
            dtype=model.dtype,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            windows=tuple(sorted(windows)),
            max_tokens=limits.max_tokens,
            max_seqs=limits.max_seqs,
            max_context_blocks=-(-limits.max_model_len // layout.block_size),
            first_kv_head=part.heads.start - part.shard_heads.start,
            sinks=model.has_sinks,
            invariant=model.invariant,
            device=model.device,
        )
    return PartRows(config.num_heads, mine, part, rows, attention, limits.max_tokens, model.qkv)


def _latent_attention(model: GpuModel, pool: torch.Tensor, layout: KVLayout, limits: GpuLimits) -> LatentAttention:
    """Build attention over a pool of latents."""
    config, latents = model.config, model.config.latents
    assert latents is not None
    return LatentAttention(
        pool,
        dtype=model.dtype,
        num_heads=config.num_heads,
        rank=latents.kv_lora_rank,
        rotary=latents.qk_rope_head_dim,
        block_size=layout.block_size,
        num_layers=pool.shape[1],
        scale=config.attention_scale,
        max_tokens=limits.max_tokens,
        max_seqs=limits.max_seqs,
        max_context_blocks=-(-limits.max_model_len // layout.block_size),
        fp8=layout.dtype == FP8_E4M3,
        decode_rows=1 + limits.num_speculative_tokens,
        invariant=model.invariant,
        device=model.device,
    )


class GpuBackend:
    """The ``pillion.engine.backends.backend.Backend`` of a GPU; that class's docstring has the contract."""

    max_steps_in_flight = 2
    gives_vectors = True

    adapters: GpuAdapters | None = None
    decoder: type[GpuDecoder] = GpuDecoder

    def __init__(self, model: GpuModel, layout: KVLayout, limits: GpuLimits, *, enforce_eager: bool = False) -> None:
        """``enforce_eager``: capture no CUDA graphs."""
        self._model = model
        self.layout = layout
        self.vocab_size = model.config.vocab_size
        self._limits = limits
        self._eager = enforce_eager
        self._states = GpuStates(model, layout, limits.max_seqs) if layout.state_pages else None
        self._experts = GpuExperts(model) if model.has_experts else None
        self._ranks = model.ranks
        leads = model.ranks is None or model.ranks.shard.leads
        self._sampler = GpuSampler(model.sampled, self.vocab_size, limits.max_seqs) if leads else None
        self._bound: BoundPool | None = None
        # A reference, because a tensor over host memory does not keep the memory alive.
        self._memory: Any = None

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory`` as the paged KV pool. Raises ConfigError if it is too small or inaccessible."""
        model = self._model
        if not isinstance(memory, memoryview) and num_slots > MAX_ROWS // self.layout.block_size:
            raise ConfigError(f"the GPU kernels address at most {MAX_ROWS} tokens of a pool: lower --kv-pool-bytes")
        shards = len(memory.shares) if isinstance(memory, DividedPool) else 1
        if self.layout.state_pages and shards != self.layout.state_shards:
            raise ConfigError(
                f"this worker divides its layers' states over {self.layout.state_shards} shards of a pool, but the pool"
                f" of its KV node has {shards}: both need as many GPUs as the worker has ranks"
            )
        if isinstance(memory, DividedPool):
            parts = parts_of(model.weights.config, model.shard, memory.shares)
            each = [self._shard(memory, part, num_slots) for part in parts]
        elif isinstance(memory, memoryview):
            if model.device.type != "cpu":
                raise ConfigError("this worker computes on a GPU, but the pool of its KV node is in host memory")
            memory, needed = checked_memory(memory, num_slots, self.layout)
            parts = self._whole_parts()
            each = [torch.frombuffer(memory, dtype=torch.uint8, count=needed)] * len(parts)
        else:
            assert isinstance(memory, DevicePool)
            parts = self._whole_parts()
            pool = _slots_of(tensor_at(memory, model.device), num_slots, self.layout.block_bytes)
            each = [pool] * len(parts)
        self._memory = memory
        bound = [(part, shard.view(num_slots, -1)) for part, shard in zip(parts, each, strict=True)]
        self._bound = self._bind(bound, eager=self._eager)

    @property
    def model(self) -> GpuModel:
        """The model that this process computes, or its share of it."""
        return self._model

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Make each step return the inputs of these layers for all its rows (``Sampled.states``). Called at most once,
        before ``bind_pool``, in a worker of one process."""
        self._model.set_aux_hidden_state_layers(layers)

    def warm_up(self, max_tokens: int) -> None:
        """Capture CUDA graphs over the bound pool without writing to it. ``max_tokens`` is ignored: limits decide."""
        bound = self._bound_or_raise()
        bound.record.clear()
        if bound.states is not None:
            bound.states.record.clear()
        if self._model.adapters is not None:
            self._model.adapters.clear()
        with torch.inference_mode():
            if isinstance(self._memory, DividedPool):
                # The workspace has compiled the kernels for a pool in one piece. A divided pool needs others, compiled
                # by these steps before the graphs are captured.
                for chunks in (True, False):
                    bound.decoder.run(StepShape(1, min(1, self._limits.max_samples), chunks))
            bound.graphs.capture(log.info)
        log.info(without_graphs(self._model, self._limits, eager=self._eager))
        if self._ranks is not None:
            self._ranks.begin_steps()

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> GpuInFlightStep:
        """Start a step, as ``pillion.engine.backends.backend.Backend`` describes."""
        bound = self._bound_or_raise()
        try:
            # No rank writes KV before the sum of the embeddings, which ends after the copies of all ranks.
            if copies:
                self.copy_blocks(*zip(*copies, strict=True))
            logits, chosen = self._forward(bound, batch, rows)
            fetches = batch.pooled_ids and self._sampler is not None
            texts = _fetch_texts(batch, logits, bound.decoder.vectors) if fetches else None
            kept = to_host(self._model.states[: batch.num_tokens]) if self._model.state_layers else None
            step = GpuInFlightStep(self, logits, texts, kept)
        except BackendLost:
            raise
        except Exception as error:
            if self._ranks is not None:
                # The other ranks wait in the middle of this step.
                raise self._ranks.lost(f"a step failed: {error!r}") from error
            self.settle()
            raise
        if rows is not None:
            step.choose(rows, chosen=chosen)
        return step

    def choose(self, logits: torch.Tensor, rows: SamplingRows, *, chosen: bool = False) -> GpuChoice:
        """Start to sample a token for each row of a launched step's logits, unless the step itself has ``chosen``
        them, and to copy the tokens to the host."""
        if self._sampler is None:
            raise Internal("only rank 0 samples")
        try:
            return self._sampler.launch(logits, rows, chosen=chosen)
        except Exception:
            self.settle()
            raise

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [R, vocab_size] on the host; ranks above 0 return none."""
        logits, _ = self._forward(self._bound_or_raise(), batch)
        self.settle()
        return logits.cpu()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots, like :meth:`pillion.engine.backends.host_backend.HostBackend.copy_blocks`, in the shards
        assigned to this process."""
        bound = self._bound_or_raise()
        copies = checked_copies(sources, targets, bound.num_slots)
        # Slots are copied all at once if no target occurs twice or is also a source, otherwise in order.
        apart = len({*sources, *targets}) == len({*sources}) + len(copies)
        if not bound.copied:
            return
        for group in [copies] if copies and apart else [[copy] for copy in copies]:
            pairs = to_device(np.array(group, np.int32), self._model.device)
            for shard in bound.copied:
                blocks.copy(shard, pairs)

    def allocate_workspace(self) -> None:
        """Compile every kernel and allocate the workspace of a full step, over scratch memory, before the KV node
        allocates its pool in the rest of the device's memory."""
        layout, device = self.layout, self._model.device
        max_tokens = min(self._limits.max_model_len, self._limits.max_tokens)
        slots = min(SCRATCH_SLOTS, -(-max_tokens // layout.block_size))
        scratch = torch.zeros(slots, layout.block_bytes, dtype=torch.uint8, device=device)
        bound = self._bind([(part, scratch) for part in self._whole_parts()], eager=True)
        if self._model.invariant:
            log.info("%s", _invariance_costs(bound, self._limits.max_model_len))
        nothing = torch.full((1, 2), -1, dtype=torch.int32, device=device)
        self._model.compile_products()
        if self._experts is not None:
            self._experts.compile()
        batches = warm_up_batches(max_tokens, layout.block_size, slots)
        pages = np.arange(layout.state_pages, dtype=np.int32)[None]
        for batch, drawn in zip(batches, (True, False), strict=True):
            if layout.state_pages:
                batch = replace(batch, states=StateSlots(np.full_like(pages, -1), pages % slots))
            blocks.copy(scratch, nothing)
            logits, _ = self._forward(bound, batch)
            if self._sampler is not None:
                choice = self.choose(logits, _one_row(self.vocab_size, drawn=drawn))
                self.await_event(choice.done)
                choice.wait()
        if device.type == "cuda":
            # Torch's cached memory must not look used when the KV node allocates the pool.
            del bound, scratch
            self.settle()
            torch.cuda.empty_cache()
        if self._ranks is not None:
            # Rank 0 attaches next, and then the pool takes the memory that all ranks have left.
            self._ranks.agree(True)

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Allocate adapter slots for the max rank and compile the kernels. Raises ConfigError if the kernels cannot run
        the model."""
        model = self._model
        self.adapters = model.adapters = GpuAdapters(
            model.weights.config,
            model.shard,
            model.inner_values if model.ranks is not None else None,
            model.dtype,
            model.device,
            max_adapters,
            max_rank,
            self._limits.max_tokens,
            targets,
        )
        if self._experts is not None:
            self._experts.compile(self.adapters)

    def close(self) -> None:
        """Release the graphs, the pool and the weights. Idempotent."""
        try:
            self.settle()
        except BackendLost as error:
            log.warning("%s", error)
        if self._bound is not None:
            self._bound.graphs.close()
        self._bound = self._memory = None
        self._model.weights.close()
        if self._ranks is not None:
            self._ranks.close()

    def settle(self) -> None:
        """Wait until no launch is running on the device. Raises BackendLost if the device or a rank has failed."""
        if self._model.device.type == "cuda":
            if self._ranks is not None:
                self.await_event(event_on(self._model.device))
            try:
                torch.cuda.synchronize(self._model.device)
            except RuntimeError as error:
                raise BackendLost(f"the GPU failed: {error}") from error

    def await_event(self, event: Any) -> None:
        """Wait for a CUDA event, if not None and the process is one of several ranks. Raises BackendLost if another
        rank fails meanwhile."""
        if self._ranks is not None and event is not None:
            self._ranks.wait(event)

    def _whole_parts(self) -> list[PoolPart]:
        """Return this process's parts of a pool that is not divided."""
        return list(whole_parts(self._model.weights.config, self._model.shard))

    def _shard(self, pool: DividedPool, part: PoolPart, num_slots: int) -> torch.Tensor:
        """Return the bytes of a divided pool's shard with ``part``. Raises ConfigError if this GPU cannot access
        them."""
        mapped, device = pool.shard(part.shard), self._model.device
        tensor = tensor_at if mapped.device_index == (device.index or 0) else distant_tensor
        return _slots_of(tensor(mapped, device), num_slots, part_layout(self.layout, part).block_bytes)

    def _bind(self, parts: Sequence[tuple[PoolPart, torch.Tensor]], *, eager: bool) -> BoundPool:
        own = self._states, self._sampler, self._experts, self.decoder
        return BoundPool(self._model, parts, self.layout, self._limits, *own, eager=eager)

    def _bound_or_raise(self) -> BoundPool:
        if self._bound is None:
            raise Internal("a step before bind_pool")
        return self._bound

    def check_step(self, batch: StepBatch) -> None:
        """Raise Internal for a batch that this backend cannot run as a step."""
        if batch.num_tokens > self._limits.max_tokens or batch.num_seqs > self._limits.max_seqs:
            raise Internal(f"a step of {batch.num_tokens} tokens in {batch.num_seqs} sequences is too large")
        if batch.adapters is not None:
            bound_adapters(self.adapters).check(batch)

    def _forward(
        self, bound: BoundPool, batch: StepBatch, sampling: SamplingRows | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Run the forward pass; return logits on the device, one row for each of ``batch.sample_rows`` except those of
        which only vectors are needed, and whether the step also samples the rows in ``sampling``."""
        self.check_step(batch)
        if bound.states is not None:
            bound.states.record.check(batch.states, batch.num_seqs)
        rows, places = distinct_rows(batch)
        chooses = places is None and bound.chooses(sampling)
        plans = bound.plans(batch)
        # Parts of one kind agree on which sequences are chunks. For another kind a chunk may be a decode.
        chunks = any(plan is not None and plan.with_chunks for plan in plans)
        adapted = batch.adapters is not None
        shape = bound.graphs.shape_of(batch.num_tokens, len(rows), chunks, adapted, batch.pooled)
        with torch.inference_mode():
            if batch.adapters is not None:
                bound_adapters(self.adapters).send(batch, rows, shape)
            bound.record.send(batch, rows, shape, plans, sampling if chooses else None)
            if bound.states is not None:
                bound.states.record.send(batch, shape)
            unknown = -int(batch.token_ids.min())
            if self._ranks is not None and unknown > 0:
                self._ranks.broadcast(self._model.sampled[:unknown])
            logits = self._compute(bound, shape, batch.num_tokens)[: len(rows) - batch.pooled]
            if places is not None and self._sampler is not None:
                logits = logits.index_select(0, to_device(places, logits.device))
            return logits, chooses

    def _compute(self, bound: BoundPool, shape: StepShape, num_tokens: int) -> torch.Tensor:
        """Run the step in the record, of ``num_tokens`` tokens before it was padded to ``shape``; return its logits."""
        return bound.graphs.run(shape)


def _invariance_costs(bound: BoundPool, max_model_len: int) -> str:
    """Return a log line with the cost of results that do not depend on other sequences."""
    keys = [part.attention.planner.decode.part_keys for part in bound.parts if part.attention is not None]
    every = f"{bound.products} products a step run on kernels of one order, and none on cuBLAS"
    if not keys:
        return f"--batch-invariant: {every}"
    return (
        f"--batch-invariant: {every}; attention is cut at every {keys[0]} tokens, a text of {max_model_len} into"
        f" {-(-max_model_len // keys[0])} parts"
    )


def without_graphs(model: GpuModel, limits: GpuLimits, *, eager: bool) -> str:
    """Return a log line about the steps that the host launches kernel by kernel."""
    if eager or not model.capturable:
        return "no step runs in a CUDA graph: " + ("--enforce-eager" if eager else "ranks share a GPU")
    few = f"of more than {MAX_GRAPH_TOKENS} tokens" if limits.max_tokens > MAX_GRAPH_TOKENS else ""
    samples = f"with more than {limits.max_samples} sampled rows" if limits.max_scored else ""
    left = [words for words in (few, samples, "that return vectors of texts") if words]
    return "steps leave their CUDA graph: those " + ", those ".join(left)


def _slots_of(flat: torch.Tensor, num_slots: int, slot_bytes: int) -> torch.Tensor:
    """Return the bytes of the slots of a pool or shard. Raises ConfigError if they are too few."""
    needed = num_slots * slot_bytes
    if len(flat) < needed:
        raise ConfigError(f"a pool of {num_slots} blocks needs {needed} bytes, not {len(flat)}")
    return flat[:needed]


@dataclass(frozen=True, slots=True)
class FetchedTexts:
    """Vectors and logits of texts, copied to the host when the step has ended: vectors [P, hidden] in the model's type,
    and the requested logits, one after the other. ``ids`` is StepBatch.pooled_ids."""

    ids: tuple[tuple[int, ...], ...]
    vectors: torch.Tensor
    logits: torch.Tensor

    def rows(self) -> tuple[Float32, ...]:
        """Return the row of each text, as in Sampled.pooled."""
        vectors = iter(self.vectors.float().numpy())
        parts = iter(torch.split(self.logits, [len(ids) for ids in self.ids if ids]))
        return tuple(next(parts).numpy() if ids else next(vectors) for ids in self.ids)


def _fetch_texts(batch: StepBatch, logits: torch.Tensor, vectors: torch.Tensor) -> FetchedTexts:
    """Start to copy the vectors and logits of texts. The latter are in the last rows of ``logits``; the copies end
    before the kernels of the next step start."""
    wanted = [ids for ids in batch.pooled_ids if ids]
    first = len(logits) - len(wanted)
    places = [(row, each) for row, ids in enumerate(wanted, first) for each in ids]
    found = logits.new_empty(0)
    if places:
        rows, columns = to_device(np.array(places, np.int64).T.copy(), logits.device)
        found = logits[rows, columns]
    return FetchedTexts(batch.pooled_ids, *(to_host(each) for each in (vectors, found)))


class GpuInFlightStep:
    """A launched step of a backend: its logits [R, V] on the device, the vectors and logits of texts, and the stored
    states, which are being copied to the host."""

    def __init__(
        self, backend: GpuBackend, logits: torch.Tensor, texts: FetchedTexts | None, kept: torch.Tensor | None
    ) -> None:
        self._backend = backend
        count = 0 if texts is None else sum(map(bool, texts.ids))
        self._logits = logits[: len(logits) - count]
        self._texts, self._kept = texts, kept
        self._choice: GpuChoice | None = None

    def choose(self, rows: SamplingRows, *, chosen: bool = False) -> None:
        """Queue the sampling behind the forward pass; it changes the logits. If the step itself has ``chosen`` the
        tokens, only their copy to the host and the scores of prompts' tokens are queued."""
        self._choice = self._backend.choose(self._logits, rows, chosen=chosen)

    def wait(self) -> Sampled:
        """Wait for the step's tokens, but for nothing launched after them. Raises BackendLost if the GPU failed."""
        if self._choice is None:
            self._backend.settle()
            sampled = Sampled()
        else:
            self._backend.await_event(self._choice.done)
            sampled = self._choice.wait()
        if self._kept is not None:
            sampled = replace(sampled, states=states_of_rows(self._kept))
        return sampled if self._texts is None else replace(sampled, pooled=self._texts.rows())


class _AllowAllMask:
    """A mask for row 0 that allows every token."""

    def __init__(self, vocab_size: int) -> None:
        self.rows = np.zeros(1, np.int64)
        self._bits = np.full((1, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)

    def take(self) -> tuple[UInt32, Bool]:
        return self._bits, np.ones(1, np.bool_)


def _one_row(vocab_size: int, *, drawn: bool) -> SamplingRows:
    """Return one row that draws with a mask, every cut and an edit, or a greedy one: together they compile all of the
    sampler."""
    if not drawn:
        return SamplingRows.of([SamplingParams(temperature=0.0)], [0], [0])
    # The middle of an option's range never disables the option, nor does 1 for whole numbers.
    ranges = {name: one.allowed for name, one in SAMPLING_OPTIONS.items() if one.of_rows and one.allowed is not None}
    params: dict[str, Any] = {
        name: 1 if SAMPLING_OPTIONS[name].whole else (one.low + one.high) / 2 for name, one in ranges.items()
    }
    edits = (RowEdit(row=0, banned=np.zeros(1, np.int64)),)
    return SamplingRows.of([SamplingParams(**params)], [0], [0], edits=edits, masks=_AllowAllMask(vocab_size))
