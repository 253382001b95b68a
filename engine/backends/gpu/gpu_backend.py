"""The backend of the Triton kernels, which launches each step while the previous one runs.

    GpuModel (weights, buffers) -> GpuBackend -> allocate_workspace (kernels compile) -> bind_pool
        -> warm_up (CUDA graphs over that pool) -> launch, launch, wait, launch, wait ... -> close

A launch queues the copy of the step's record to the device, a graph (or single kernels), which usually includes
sampling, and the copy of the tokens to the host. After a launch without rows, ``GpuInFlightStep.choose`` samples.
``GpuInFlightStep.wait`` waits only for the last copy. The tokens also stay on the device, where the next step's
embedding reads them (:mod:`pillion.kernels.gpu.rows.embedding`).

With tensor parallelism (``rank_group.py``), each rank launches the same steps on its shard. Once a step has ended on
rank 0, no rank still writes its KV. Only rank 0 samples; it broadcasts tokens that only its device has before the step
that embeds them. Rank 0 copies blocks, or one rank per shard of a pool divided over GPUs
(:mod:`pillion.engine.backends.gpu.pool_parts`).

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

# Max tokens of a pool, whose rows kernels address by 32-bit numbers.
MAX_ROWS = 2**31 - 1
# Max slots for the KV of the step that compiles the kernels, shared by its blocks: slots for all blocks of a large step
# might not fit into the memory.
SCRATCH_SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    """Limits of a step, which determine the sizes of buffers and graphs.

    Attributes:
        max_samples: max sampled rows of a step in a graph; 0 for a worker that never samples.
        max_scored: max additional rows whose logits score prompts.
        max_model_len: max tokens of a sequence.
        num_speculative_tokens: max draft tokens of a decode.
    """

    max_tokens: int
    max_seqs: int
    max_samples: int
    max_model_len: int
    max_scored: int = 0
    num_speculative_tokens: int = 0


class BoundPool:
    """A pool and all objects that depend on its address: attention, step record, decoder and graphs."""

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
        """``parts``: the process's KV heads by shard, with the shard's bytes [slots, ...]. ``sampler``: None in
        processes that do not sample. ``decoder``: class of the forward pass."""
        self.num_slots, self.products = len(parts[0][1]), model.plain_products
        self.copied = [shard for part, shard in parts if part.copied]
        self.parts = [_part_rows(model, part, shard, layout, limits) for part, shard in parts]
        attention_words = [part.attention_words for part in self.parts]
        samples = 0 if sampler is None else limits.max_samples
        self.record = GpuStepRecord(limits.max_tokens, samples, layout.block_size, attention_words, model.device)
        self._sampler = sampler
        # States are in the rank's own shard, or in the only one.
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

    def can_sample(self, rows: SamplingRows | None) -> bool:
        """Return whether the step itself, i.e. its graph, can sample ``rows``."""
        return rows is not None and not rows.edits and rows.masks is None and len(rows) <= len(self.record.sampling)

    def _run(self, shape: StepShape) -> torch.Tensor:
        """Run the step in the record like :meth:`GpuDecoder.run`, and sample the rows that the record lists."""
        logits = self.decoder.run(shape)
        count = min(len(logits), len(self.record.sampling))
        if self._sampler is not None:
            self._sampler.choose(logits[:count], self.record.sampling[:count])
        return logits

    def plans(self, batch: StepBatch) -> list[GpuAttentionPlan | None]:
        """Return a step's attention plan per part; None for a part that is only written."""
        return [None if part.attention is None else part.attention.planner.plan(batch) for part in self.parts]


def _part_rows(
    model: GpuModel, part: PoolPart, shard: torch.Tensor, layout: KVLayout, limits: GpuLimits
) -> PartRows | LatentRows:
    """Build the writer of, and attention over, a part of the process's KV heads in a shard."""
    config, rows = model.config, LayerRows.of(shard, layout, part, model.dtype)
    if config.latents is not None:
        return LatentRows(rows, _latent_attention(model, rows.pool, layout, limits) if part.attended else None)
    attention, own_heads = None, model.shard.kv_heads_of(part.kind.kv_heads)
    sizes = (tokens for layer, tokens in enumerate(config.sliding_windows) if config.kv_source(layer) in rows.places)
    windows = {window_of(tokens, config.chunked, model.max_model_len) for tokens in sizes}
    if part.attended:
        attention = PagedAttention(
            rows.pool,
            num_heads=len(part.heads) * (config.num_heads // len(own_heads)),
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
    return PartRows(config.num_heads, own_heads, part, rows, attention, limits.max_tokens, model.qkv)


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
    """:class:`pillion.engine.backends.backend.Backend` on a GPU."""

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
        # Keeps the memory alive, which a tensor over host memory does not.
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
            memories = [self._shard(memory, part, num_slots) for part in parts]
        elif isinstance(memory, memoryview):
            if model.device.type != "cpu":
                raise ConfigError("this worker computes on a GPU, but the pool of its KV node is in host memory")
            memory, needed = checked_memory(memory, num_slots, self.layout)
            parts = self._whole_parts()
            memories = [torch.frombuffer(memory, dtype=torch.uint8, count=needed)] * len(parts)
        else:
            assert isinstance(memory, DevicePool)
            parts = self._whole_parts()
            pool = _slots_of(tensor_at(memory, model.device), num_slots, self.layout.block_bytes)
            memories = [pool] * len(parts)
        self._memory = memory
        bound = [(part, shard.view(num_slots, -1)) for part, shard in zip(parts, memories, strict=True)]
        self._bound = self._bind(bound, eager=self._eager)

    @property
    def model(self) -> GpuModel:
        """The model, or this process's shard of it."""
        return self._model

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Make each step return these layers' inputs of all its rows (``Sampled.states``). Called at most once, before
        ``bind_pool``, in a worker of one process."""
        self._model.set_aux_hidden_state_layers(layers)

    def warm_up(self, max_tokens: int) -> None:
        """Capture CUDA graphs over the bound pool without writing to it, up to the limits; ``max_tokens`` is
        ignored."""
        bound = self._bound_or_raise()
        bound.record.clear()
        if bound.states is not None:
            bound.states.record.clear()
        if self._model.adapters is not None:
            self._model.adapters.clear()
        with torch.inference_mode():
            if isinstance(self._memory, DividedPool):
                # Compile the kernels for a divided pool before the capture; allocate_workspace has compiled those for a
                # pool in one piece.
                for chunks in (True, False):
                    bound.decoder.run(StepShape(1, min(1, self._limits.max_samples), chunks))
            bound.graphs.capture(log.info)
        log.info(without_graphs(self._model, self._limits, eager=self._eager))
        if self._ranks is not None:
            self._ranks.begin_steps()

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> GpuInFlightStep:
        """Start a step (:meth:`pillion.engine.backends.backend.Backend.launch`)."""
        bound = self._bound_or_raise()
        try:
            # No rank writes KV before all copies are done: the all-reduce of the embeddings comes first.
            if copies:
                self.copy_blocks(*zip(*copies, strict=True))
            logits, sampled = self._forward(bound, batch, rows)
            fetches = batch.pooled_ids and self._sampler is not None
            texts = _fetch_texts(batch, logits, bound.decoder.vectors) if fetches else None
            states = to_host(self._model.states[: batch.num_tokens]) if self._model.aux_hidden_state_layers else None
            step = GpuInFlightStep(self, logits, texts, states)
        except BackendLost:
            raise
        except Exception as error:
            if self._ranks is not None:
                # The other ranks are blocked in this step.
                raise self._ranks.lost(f"a step failed: {error!r}") from error
            self.settle()
            raise
        if rows is not None:
            step.choose(rows, sampled=sampled)
        return step

    def choose(self, logits: torch.Tensor, rows: SamplingRows, *, sampled: bool = False) -> GpuChoice:
        """Start to sample a token per row of a launched step's logits, unless the step itself ``sampled`` them, and to
        copy the tokens to the host."""
        if self._sampler is None:
            raise Internal("only rank 0 samples")
        try:
            return self._sampler.launch(logits, rows, sampled=sampled)
        except Exception:
            self.settle()
            raise

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV. Return float32 logits [R, vocab_size] on the host; R is 0 on ranks above 0."""
        logits, _ = self._forward(self._bound_or_raise(), batch)
        self.settle()
        return logits.cpu()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots like :meth:`pillion.engine.backends.host_backend.HostBackend.copy_blocks`, in the shards
        that this process copies."""
        bound = self._bound_or_raise()
        copies = checked_copies(sources, targets, bound.num_slots)
        # Copy all slots at once if targets are distinct and none is a source, otherwise one after the other.
        independent = len({*sources, *targets}) == len({*sources}) + len(copies)
        if not bound.copied:
            return
        for group in [copies] if copies and independent else [[copy] for copy in copies]:
            pairs = to_device(np.array(group, np.int32), self._model.device)
            for shard in bound.copied:
                blocks.copy(shard, pairs)

    def allocate_workspace(self) -> None:
        """Compile every kernel and allocate the workspace of the largest step, by running steps over scratch memory.
        Call it before the KV node allocates its pool in the remaining memory."""
        layout, device = self.layout, self._model.device
        max_tokens = min(self._limits.max_model_len, self._limits.max_tokens)
        slots = min(SCRATCH_SLOTS, -(-max_tokens // layout.block_size))
        scratch = torch.zeros(slots, layout.block_bytes, dtype=torch.uint8, device=device)
        bound = self._bind([(part, scratch) for part in self._whole_parts()], eager=True)
        if self._model.invariant:
            log.info("%s", _invariance_costs(bound, self._limits.max_model_len))
        no_copies = torch.full((1, 2), -1, dtype=torch.int32, device=device)
        self._model.compile_products()
        if self._experts is not None:
            self._experts.compile()
        batches = warm_up_batches(max_tokens, layout.block_size, slots)
        pages = np.arange(layout.state_pages, dtype=np.int32)[None]
        for batch, drawn in zip(batches, (True, False), strict=True):
            if layout.state_pages:
                batch = replace(batch, states=StateSlots(np.full_like(pages, -1), pages % slots))
            blocks.copy(scratch, no_copies)
            logits, _ = self._forward(bound, batch)
            if self._sampler is not None:
                choice = self.choose(logits, _one_row(self.vocab_size, drawn=drawn))
                self.await_event(choice.done)
                choice.wait()
        if device.type == "cuda":
            # Return torch's cached memory to the device before the KV node allocates the pool.
            del bound, scratch
            self.settle()
            torch.cuda.empty_cache()
        if self._ranks is not None:
            # After this, rank 0 attaches, and the pool takes the remaining memory of all ranks' GPUs.
            self._ranks.agree(True)

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Allocate adapter slots of rank ``max_rank`` and compile their kernels. Raises ConfigError if the kernels do
        not support the model, or memory is short."""
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
        """Wait until the device is idle. Raises BackendLost if the device or a rank has failed."""
        if self._model.device.type == "cuda":
            if self._ranks is not None:
                self.await_event(event_on(self._model.device))
            try:
                torch.cuda.synchronize(self._model.device)
            except RuntimeError as error:
                raise BackendLost(f"the GPU failed: {error}") from error

    def await_event(self, event: Any) -> None:
        """In a worker of several ranks, wait for a CUDA event; None is ignored. Raises BackendLost if a rank fails
        meanwhile."""
        if self._ranks is not None and event is not None:
            self._ranks.wait(event)

    def _whole_parts(self) -> list[PoolPart]:
        """Return this process's parts of a pool in one piece."""
        return list(whole_parts(self._model.weights.config, self._model.shard))

    def _shard(self, pool: DividedPool, part: PoolPart, num_slots: int) -> torch.Tensor:
        """Return the bytes of the shard of a divided pool that contains ``part``. Raises ConfigError if this GPU cannot
        access it."""
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
        """Raise Internal for a batch that exceeds the limits or has unknown adapter slots."""
        if batch.num_tokens > self._limits.max_tokens or batch.num_seqs > self._limits.max_seqs:
            raise Internal(f"a step of {batch.num_tokens} tokens in {batch.num_seqs} sequences is too large")
        if batch.adapters is not None:
            bound_adapters(self.adapters).check(batch)

    def _forward(
        self, bound: BoundPool, batch: StepBatch, sampling: SamplingRows | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Run the forward pass. Return logits on the device, a row per entry of ``batch.sample_rows`` except the last
        ``batch.pooled``, and whether the step itself samples the rows ``sampling``."""
        self.check_step(batch)
        if bound.states is not None:
            bound.states.record.check(batch.states, batch.num_seqs)
        rows, indices = distinct_rows(batch)
        samples = indices is None and bound.can_sample(sampling)
        plans = bound.plans(batch)
        # What one kind of KV heads runs as a chunk may be a decode for another kind.
        chunks = any(plan is not None and plan.with_chunks for plan in plans)
        adapted = batch.adapters is not None
        shape = bound.graphs.shape_of(batch.num_tokens, len(rows), chunks, adapted, batch.pooled)
        with torch.inference_mode():
            if batch.adapters is not None:
                bound_adapters(self.adapters).send(batch, rows, shape)
            bound.record.send(batch, rows, shape, plans, sampling if samples else None)
            if bound.states is not None:
                bound.states.record.send(batch, shape)
            unknown = -int(batch.token_ids.min())
            if self._ranks is not None and unknown > 0:
                self._ranks.broadcast(self._model.sampled[:unknown])
            logits = self._compute(bound, shape, batch.num_tokens)[: len(rows) - batch.pooled]
            if indices is not None and self._sampler is not None:
                logits = logits.index_select(0, to_device(indices, logits.device))
            return logits, samples

    def _compute(self, bound: BoundPool, shape: StepShape, num_tokens: int) -> torch.Tensor:
        """Run the step in the record, ``num_tokens`` tokens padded to ``shape``; return its logits."""
        return bound.graphs.run(shape)


def _invariance_costs(bound: BoundPool, max_model_len: int) -> str:
    """Return a log line about the costs of --batch-invariant."""
    keys = [part.attention.planner.decode.part_keys for part in bound.parts if part.attention is not None]
    costs = f"--batch-invariant: {bound.products} products per step run on fixed-order kernels instead of cuBLAS"
    if not keys:
        return costs
    return f"{costs}; attention is split every {keys[0]} tokens, at most into {-(-max_model_len // keys[0])} parts"


def without_graphs(model: GpuModel, limits: GpuLimits, *, eager: bool) -> str:
    """Return a log line that says which steps run without a CUDA graph."""
    if eager or not model.capturable:
        return "no step runs in a CUDA graph: " + ("--enforce-eager" if eager else "ranks share a GPU")
    tokens = f"of more than {MAX_GRAPH_TOKENS} tokens" if limits.max_tokens > MAX_GRAPH_TOKENS else ""
    samples = f"with more than {limits.max_samples} sampled rows" if limits.max_scored else ""
    reasons = [reason for reason in (tokens, samples, "that return vectors of texts") if reason]
    return "steps without a CUDA graph: those " + ", those ".join(reasons)


def _slots_of(flat: torch.Tensor, num_slots: int, slot_bytes: int) -> torch.Tensor:
    """Return the bytes of the slots of a pool or shard. Raises ConfigError if there are too few."""
    needed = num_slots * slot_bytes
    if len(flat) < needed:
        raise ConfigError(f"a pool of {num_slots} blocks needs {needed} bytes, not {len(flat)}")
    return flat[:needed]


@dataclass(frozen=True, slots=True)
class FetchedTexts:
    """Hidden states [P, hidden] and requested logits (flat) of texts, being copied to the host until the step ends.
    ``ids``: StepBatch.pooled_ids."""

    ids: tuple[tuple[int, ...], ...]
    vectors: torch.Tensor
    logits: torch.Tensor

    def rows(self) -> tuple[Float32, ...]:
        """Return each text's result, as in Sampled.pooled."""
        vectors = iter(self.vectors.float().numpy())
        logits = iter(torch.split(self.logits, [len(ids) for ids in self.ids if ids]))
        return tuple(next(logits).numpy() if ids else next(vectors) for ids in self.ids)


def _fetch_texts(batch: StepBatch, logits: torch.Tensor, vectors: torch.Tensor) -> FetchedTexts:
    """Start to copy the hidden states and requested logits of texts to the host; the latter are from the last rows of
    ``logits``. The copies end before the next step's kernels start."""
    requested = [ids for ids in batch.pooled_ids if ids]
    first = len(logits) - len(requested)
    indices = [(row, token) for row, ids in enumerate(requested, first) for token in ids]
    values = logits.new_empty(0)
    if indices:
        rows, columns = to_device(np.array(indices, np.int64).T.copy(), logits.device)
        values = logits[rows, columns]
    return FetchedTexts(batch.pooled_ids, to_host(vectors), to_host(values))


class GpuInFlightStep:
    """A launched step: its logits [R, V] on the device, and what is being copied to the host, i.e. results of texts and
    stored layer inputs."""

    def __init__(
        self, backend: GpuBackend, logits: torch.Tensor, texts: FetchedTexts | None, states: torch.Tensor | None
    ) -> None:
        self._backend = backend
        count = 0 if texts is None else sum(map(bool, texts.ids))
        self._logits = logits[: len(logits) - count]
        self._texts, self._states = texts, states
        self._choice: GpuChoice | None = None

    def choose(self, rows: SamplingRows, *, sampled: bool = False) -> None:
        """Queue the sampling, which changes the logits, behind the forward pass. If the step itself ``sampled`` the
        tokens, queue only their copy to the host and the scoring of prompts."""
        self._choice = self._backend.choose(self._logits, rows, sampled=sampled)

    def wait(self) -> Sampled:
        """Wait for the step's results, but not for later launches. Raises BackendLost if the GPU failed."""
        if self._choice is None:
            self._backend.settle()
            sampled = Sampled()
        else:
            self._backend.await_event(self._choice.done)
            sampled = self._choice.wait()
        if self._states is not None:
            sampled = replace(sampled, states=states_of_rows(self._states))
        return sampled if self._texts is None else replace(sampled, pooled=self._texts.rows())


class _AllowAllMask:
    """A mask for row 0 that allows every token."""

    def __init__(self, vocab_size: int) -> None:
        self.rows = np.zeros(1, np.int64)
        self._bits = np.full((1, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)

    def take(self) -> tuple[UInt32, Bool]:
        return self._bits, np.ones(1, np.bool_)


def _one_row(vocab_size: int, *, drawn: bool) -> SamplingRows:
    """Return a row that is ``drawn`` with a mask, every filter and an edit, or a greedy one. Sampling both compiles all
    kernels of the sampler."""
    if not drawn:
        return SamplingRows.of([SamplingParams(temperature=0.0)], [0], [0])
    # No option is disabled by the middle of its range, or by 1 if it is an integer.
    ranges = {
        name: option.allowed
        for name, option in SAMPLING_OPTIONS.items()
        if option.of_rows and option.allowed is not None
    }
    params: dict[str, Any] = {
        name: 1 if SAMPLING_OPTIONS[name].whole else (allowed.low + allowed.high) / 2
        for name, allowed in ranges.items()
    }
    edits = (RowEdit(row=0, banned=np.zeros(1, np.int64)),)
    return SamplingRows.of([SamplingParams(**params)], [0], [0], edits=edits, masks=_AllowAllMask(vocab_size))
