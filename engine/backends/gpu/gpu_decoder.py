"""The forward pass on a GPU: that of :mod:`pillion.engine.models.decoder`, with fused kernels and fixed buffers.

    embed -> residual
    each layer   norm -> qkv product -> [qk-norm, rope, KV into the pool] -> attention -> o product
                 [residual += , norm] -> gate and up product -> [act(gate) * up] -> down product -> [residual += , norm]
    last layer   ends with its KV if no row is sampled; else only sampled rows continue after its attention
    logits       head product, in float32

In some models layers have recurrent state, instead of attention or beside it (``engine/gpu_states``). The above about
attention and its KV then holds for their operations and states.

One rank of several (``rank_group.py``) does the same over its share of heads, inner values and tokens. The results of
embedding, o product and down product are then all-reduced, and rank 0 gathers the logits.

A stage (``engine/gpu_stages``) runs only its own layers: the first one embeds, the others find the rows of the stage
before in the residual stream's buffer, and leave theirs there.

Brackets enclose one kernel. The products by plain matrices are cuBLAS's, through torch, or our kernel's if the tuning
file says so (few rows); those by quantized matrices are our kernels', as are those of experts (``gpu_experts.py``).
Nothing here synchronises, and only logits, sampled rows and gates of attention's results are allocated, so that a step
can be captured as a CUDA graph. The exceptions (``capturable``) are ranks that share a GPU, whose sums go through the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import torch

from pillion.engine.backends.gpu.gpu_experts import GpuExperts
from pillion.engine.backends.gpu.gpu_model import GpuLayer, GpuModel, GpuNorm
from pillion.engine.backends.gpu.gpu_step import GpuStepRecord, StepShape
from pillion.engine.backends.gpu.pool_parts import LatentRows, PartRows
from pillion.engine.backends.gpu.shared_experts import JoinedExperts
from pillion.engine.gpu_adapters.gpu_adapters import MixtureAdapters
from pillion.engine.gpu_ranks.rank_logits import RankLogits
from pillion.engine.gpu_states.gpu_states import StatesInPool
from pillion.engine.models.layer_operations import (
    AddToLayerSum,
    AddToResidual,
    ApplyTokenInputs,
    Attend,
    AttendLatents,
    DeltaRule,
    Experts,
    Gate,
    GrowQueries,
    KeepGate,
    LayerOperation,
    LayerTensor,
    Mixer,
    Mlp,
    Multiply,
    Norm,
    NormHeads,
    NormProjections,
    NormValues,
    RestoreRows,
    Rotate,
    SaveRows,
    ScaleResidual,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from pillion.engine.models.layers import soft_cap
from pillion.kernels.gpu.attention.kv_write import HeadNorm, Rotary
from pillion.kernels.gpu.attention.latent_write import latent_write
from pillion.kernels.gpu.attention.paged_attention import window_of
from pillion.kernels.gpu.experts.expert_sums import PairResults
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from pillion.kernels.gpu.rows.embedding import embed
from pillion.kernels.gpu.rows.gated import gated
from pillion.kernels.gpu.rows.norms import add_rms_norm, rms_norm


@dataclass(slots=True)
class _LayerStep:
    """State passed between the operations of a layer.

    Attributes:
        residual: the residual stream.
        rows, kept: the output of the last operation, and rows that later operations read.
        count: int32 [1], the number of rows without padding.
        results: the experts' results of the rows, if the next sum adds them up.
        gate: the factor of attention's results, in layers with such a gate.
        added_up: the sum of the layer's operations that add up rows; None before the first of them.
        inputs: the layer's inputs per token beside the residual stream, if any.
        mixers: number of the layer's remaining operations that write keys and values, or states.
        ended: whether nothing more has to be computed, because no row is sampled.
    """

    residual: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor
    results: PairResults | None = None
    kept: list[torch.Tensor] = field(default_factory=list)
    gate: torch.Tensor | None = None
    added_up: torch.Tensor | None = None
    inputs: torch.Tensor | None = None
    mixers: int = 0
    ended: bool = False


class GpuDecoder:
    """The forward pass of a model over one pool."""

    def __init__(
        self,
        model: GpuModel,
        parts: Sequence[PartRows | LatentRows],
        record: GpuStepRecord,
        states: StatesInPool | None = None,
        experts: GpuExperts | None = None,
    ) -> None:
        """``parts``: those of the process's KV heads, one per plan of ``record``; ``states`` and ``experts``: those of
        layers that have some."""
        self._model, self._states, self._experts = model, states, experts
        # Whether a step has reached its sampled rows, which continue alone after the last attention or state.
        self._sampled = False
        # Rows whose vectors the last step returned; the next step's kernels overwrite them.
        self.vectors = model.normed[:0]
        planned = list(zip(parts, record.attention, strict=True))
        self._parts = [(part, plan) for part, plan in planned if isinstance(part, PartRows)]
        self._latents = [(part, plan) for part, plan in planned if isinstance(part, LatentRows)]
        self._record = record
        # Norms of the residual stream after each layer's last sum; none after the last layer of a stage, whose rows the
        # next stage norms.
        self._following = {index - 1: _first_norm(layer) for index, layer in model.layers.items()}
        if "final_norm" in model.weights:
            final = GpuNorm(model.weights["final_norm"], model.weights.get("final_norm.bias"))
            self._following[model.config.num_layers - 1] = final

    def run(self, shape: StepShape) -> torch.Tensor:
        """Run the step in the record, padded to ``shape``; return float32 logits [shape.samples - shape.vectors,
        vocab_size], and leave the other sampled rows in ``vectors``. A stage returns none."""
        model, config, self._sampled = self._model, self._model.config, False
        step = _LayerStep(*self._begin(shape), self._record.num_rows)
        for index, layer in model.layers.items():
            self._begin_layer(index, layer, step, shape)
            if not step.ended:
                self._run_layer(index, layer, step, shape)
            if step.ended:
                break
        if not step.ended and model.shard.gives_logits:
            chosen = shape.samples - shape.vectors
            rows, self.vectors = step.rows[:chosen], step.rows[chosen:]
            self._keep_outputs(step.residual)
            if chosen:
                return self._logits(rows)
        if model.ranks is not None:
            # If there are logits, gathering them shows that all ranks have written their KV.
            model.ranks.barrier()
        return torch.empty((0, config.vocab_size), dtype=torch.float32, device=model.device)

    def _begin(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream before the first layer, and the input of that layer's first operation."""
        residual = self._model.residual[: shape.tokens]
        first, *_ = self._model.layers.values()
        if 0 in self._model.layers:
            self._embed(residual, shape)
        return residual, self._normed(residual, _first_norm(first))

    def _keep_outputs(self, residual: torch.Tensor) -> None:
        """Take the sampled rows of the residual stream after the last layer; only an EAGLE head reads them."""

    def _embed(self, residual: torch.Tensor, shape: StepShape) -> None:
        """Write the embeddings of the step's tokens into the rows of the residual stream."""
        model, table = self._model, self._model.weights.get("positions")
        embed(
            self._record.token_ids[: shape.tokens],
            model.sampled,
            model.weights["embedding"],
            residual,
            model.weights.embedding_scale,
            model.tokens,
            None if table is None else (self._record.rope_rows[: shape.tokens], table),
        )
        self._sum(residual)
        if model.config.token_inputs is not None:
            self._make_token_inputs(residual, model.config.token_inputs.width)

    def _make_token_inputs(self, hidden: torch.Tensor, width: int) -> None:
        """Compute all layers' inputs per token beside the residual stream, ``width`` values per layer, from the
        embeddings ``hidden``. Each rank computes all of it."""
        model, weights, count = self._model, self._model.weights, len(hidden)
        every = model.token_inputs[:count]
        table, tokens = weights["token_inputs.embedding"], self._record.token_ids[:count]
        embed(tokens, model.sampled, table, every, weights.token_input_scale, range(len(table)))
        found = model.gate_up.view(-1)[: every.numel()].view(every.shape)
        model.product(hidden, weights["token_inputs.projection"], None, found)
        # Compensates for products that the model divides by the root of the hidden size before the norm.
        by_layer, eps = found.view(-1, width), model.config.rms_norm_eps * model.config.hidden_size
        rms_norm(by_layer, weights["token_inputs.norm"], by_layer, eps, wide=True)
        every.add_(found).mul_(sqrt(0.5))

    def _begin_layer(self, index: int, layer: GpuLayer, step: _LayerStep, shape: StepShape) -> None:
        """Count the layer's operations that write; without any, the model's last layer computes only the sampled rows.
        The inputs of some layers are stored for an EAGLE head."""
        model, inputs = self._model, self._model.config.token_inputs
        for place in (place for place, kept in enumerate(model.state_layers) if kept == index):
            model.states[: shape.tokens].chunk(len(model.state_layers), 1)[place].copy_(step.residual)
        if inputs is not None:
            mine = slice(index * inputs.width, (index + 1) * inputs.width)
            step.inputs = model.token_inputs[: shape.tokens, mine]
        # After the last mixer of the last layer only sampled rows continue.
        step.mixers, step.added_up = sum(isinstance(operation, Mixer) for operation in layer.operations), None
        if not step.mixers and self._is_last(index, shape):
            self._sample(step, shape)

    def _run_layer(self, index: int, layer: GpuLayer, step: _LayerStep, shape: StepShape) -> None:
        """Run the operations of a layer, some of them in one kernel: a norm runs with the sum before it, and norms and
        rotation of heads run in the kernel that writes keys and values."""
        model = self._model
        head_norm: HeadNorm | None = None
        rotary: Rotary | None = None
        for place, operation in enumerate(layer.operations):
            match operation:
                case NormHeads(weight):
                    vectors, rotated = layer.norms[weight.name].weight, rotary is not None
                    head_norm = HeadNorm(vectors, model.config.rms_norm_eps, last=rotated, centred=weight.by_head)
                case NormValues():
                    assert head_norm is not None
                    head_norm = head_norm._replace(values=True)
                case Rotate(rope):
                    rotary = Rotary(*model.ropes[rope], self._record.rope_rows[: len(step.rows)])
                case GrowQueries():
                    assert head_norm is None  # It would run after this.
                    self._grow(step.rows)
                case Attend():
                    self._run_attention(index, layer, operation, step, head_norm, rotary, shape)
                case _:
                    self._run_operation(index, layer, operation, place, step, shape)
            if step.ended:
                return

    def _run_operation(
        self, index: int, layer: GpuLayer, operation: LayerOperation, place: int, step: _LayerStep, shape: StepShape
    ) -> None:
        """Run operation ``place`` of a layer, except those of attention over keys and values."""
        match operation:
            case Norm():
                # A sum into the residual stream also computes the norm after it.
                if place and not isinstance(layer.operations[place - 1], AddToResidual):
                    step.rows = self._normed(step.residual, _norm_of(layer, operation))
            case SaveRows():
                step.kept.append(step.rows)
            case RestoreRows():
                step.rows = step.kept.pop()
            case Multiply(matrix):
                out = self._product_buffer(index, matrix, len(step.rows))
                step.rows = self._product(index, layer, matrix.name, step.rows, out, shape)
            case KeepGate(values):
                self._keep_gate(step, values.size)
            case NormProjections(queries, keys):
                self._norm_projections(step.rows, layer.norms[queries.name][0], layer.norms[keys.name][0])
            case AttendLatents():
                self._run_latents(index, layer, operation, step, shape)
            case ShortConvolution() | DeltaRule() | StateSpace() | SelectiveScan():
                assert self._states is not None
                step.rows = self._states.run(
                    index, operation, step.rows, lambda name, x, out: self._product(index, layer, name, x, out, shape)
                )
                self._after_mixer(index, step, shape)
            case Gate():
                assert step.gate is not None
                step.rows.view(*step.gate.shape, -1).mul_(step.gate.sigmoid()[..., None])
                step.gate = None
            case Mlp():
                step.rows = self._gated(index, layer, operation, step.rows, shape)
            case Experts():
                self._mix(index, layer, operation, place, step, shape)
            case AddToLayerSum():
                self._add_up(layer, operation, step)
            case ApplyTokenInputs():
                step.rows = self._apply_token_inputs(index, layer, operation, step, shape)
            case AddToResidual():
                self._add_to_residual(index, layer, operation, place, step)
            case ScaleResidual():
                # Done by the sum into the residual stream before it.
                assert isinstance(layer.operations[place - 1], AddToResidual)

    def _product_buffer(self, index: int, matrix: LayerTensor, count: int) -> torch.Tensor:
        """Return the buffer for the product of ``count`` rows with a matrix of a layer."""
        model, width = self._model, matrix.shape[0]
        if matrix.name == "qkv":
            return _first_rows(model.gated_qkv, count, width)
        if width == model.config.hidden_size:
            return model.found[:count]
        assert self._states is not None
        return self._states.room(index, count)

    def _keep_gate(self, step: _LayerStep, values: int) -> None:
        """Store the first values of each row as the gate of attention's results, and copy the rest: the kernels of
        attention read contiguous rows of queries, keys and values."""
        step.gate, projected = step.rows.tensor_split([values], 1)
        step.rows = self._model.qkv[: len(projected)].copy_(projected)

    def _run_attention(
        self,
        index: int,
        layer: GpuLayer,
        operation: Attend,
        step: _LayerStep,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        shape: StepShape,
    ) -> None:
        """Write a layer's keys and values, and attend its queries, which are normed and rotated in place or in a part's
        own rows; ``step`` continues with the results [T, heads * head_dim]."""
        config, qkv = self._model.config, step.rows
        source = config.kv_source(index)
        mine = [(part, plan) for part, plan in self._parts if source in part.places]
        for part, _ in mine:
            part.write(index, qkv, self._record.rows[: len(qkv)], norm, rotary, source=source)
        if self._ends(index, step, shape):
            return
        window = window_of(operation.window, operation.chunked, self._model.longest)
        sinks = self._model.no_sinks if operation.sinks is None else layer.tensor(operation.sinks)
        width = config.num_heads * config.heads_of(source).head_dim
        step.rows = _first_rows(self._model.attended, shape.tokens, width)
        for part, plan in mine:
            part.attend(index, qkv, step.rows, plan, window=window, chunks=shape.chunks, source=source, sinks=sinks)
        self._after_mixer(index, step, shape)

    def _add_to_residual(
        self, index: int, layer: GpuLayer, operation: AddToResidual, place: int, step: _LayerStep
    ) -> None:
        """Add the rows to the residual stream; ``step`` continues with the output of the operation after ``place``."""
        operations = layer.operations
        # A layer's sum of rows is the same on every rank, and each computes all of its token inputs.
        if not isinstance(operations[place - 1], AddToLayerSum | ApplyTokenInputs):
            self._sum(step.rows)
        after, factor = operations[place + 1 :], None
        if after and isinstance(after[0], ScaleResidual):
            factor, after = layer.tensor(after[0].factor), after[1:]
        by = _norm_of(layer, after[0]) if after else self._following.get(index)
        post = None if operation.norm is None else layer.norms[operation.norm.name].weight
        found = step.rows if step.results is None else step.results
        step.rows, step.results = self._add(step.residual, found, post, by, operation.scale, factor), None

    def _add_up(self, layer: GpuLayer, operation: AddToLayerSum, step: _LayerStep) -> None:
        """Add the rows to the sum of the layer, with which ``step`` continues. Ranks have parts of the rows, and norm
        their sum."""
        norm = None if operation.norm is None else layer.norms[operation.norm.name]
        self._sum(step.rows)
        if step.added_up is None:
            step.added_up = self._model.added_up[: len(step.rows)]
            if norm is None:
                step.added_up.copy_(step.rows)
            else:
                self._normed(step.rows, norm, step.added_up)
        else:
            found = step.rows if step.results is None else step.results
            self._add(step.added_up, found, None if norm is None else norm.weight, None, 1.0)
        step.rows, step.results = step.added_up, None

    def _is_last(self, index: int, shape: StepShape) -> bool:
        """Return whether a layer is the last one that a step needs, after whose attention or state only sampled rows
        continue: the model's last one, or, if no row is sampled, the last one that writes something or is stored."""
        config = self._model.config
        kept = max((config.last_kept_layer, *self._model.state_layers))
        return index == (config.num_layers - 1 if shape.samples else kept)

    def _ends(self, index: int, step: _LayerStep, shape: StepShape) -> bool:
        """End the step, and return True, if the layer has written everything that a step without sampled rows has to
        write."""
        step.ended = step.mixers == 1 and self._is_last(index, shape) and not shape.samples
        return step.ended

    def _after_mixer(self, index: int, step: _LayerStep, shape: StepShape) -> None:
        """Continue after an operation that wrote keys and values, or states: only with the sampled rows, if it was the
        last one of the last layer."""
        step.mixers -= 1
        if not step.mixers and self._is_last(index, shape):
            self._sample(step, shape)

    def _sample(self, step: _LayerStep, shape: StepShape) -> None:
        """Continue only with the sampled rows; end the step if there are none."""
        self._sampled = True
        step.ended, wanted = not shape.samples, self._record.sample_rows[: shape.samples]
        step.rows, step.residual = step.rows.index_select(0, wanted), step.residual.index_select(0, wanted)
        step.count = self._record.num_samples
        step.gate = None if step.gate is None else step.gate.index_select(0, wanted)
        step.inputs = None if step.inputs is None else step.inputs.index_select(0, wanted)

    def _product(
        self, index: int, layer: GpuLayer, name: str, x: torch.Tensor, out: torch.Tensor, shape: StepShape
    ) -> torch.Tensor:
        """Compute one linear layer, with the products that adapters add to it."""
        found = self._model.product(x, layer.matrices[name], layer.biases[name], out)
        self._adapt(index, name, x, found, shape)
        return found

    def _sum(self, values: torch.Tensor) -> None:
        """All-reduce partial sums over the ranks, in place."""
        if self._model.ranks is not None:
            self._model.ranks.sum(values, in_order=self._model.invariant)

    def _adapt(self, index: int, name: str, x: torch.Tensor, out: torch.Tensor, shape: StepShape) -> None:
        """Add the products of a fused layer's inputs ``x`` with adapters to its outputs, in steps with adapters."""
        if shape.adapters:
            assert self._model.adapters is not None
            self._model.adapters.add(f"layers.{index}.{name}", x, out, sampled=self._sampled)

    def _run_latents(
        self, index: int, layer: GpuLayer, operation: AttendLatents, step: _LayerStep, shape: StepShape
    ) -> None:
        """Attend over latents, from normed rows to the results of all heads [T, heads * values]."""
        model, latents, buffers = self._model, self._model.config.latents, self._model.latents
        assert latents is not None
        assert buffers is not None
        heads = model.config.num_heads
        key_up, value_up = (
            layer.tensor(operation.up).view(heads, -1, latents.kv_lora_rank).tensor_split([latents.qk_nope_head_dim], 1)
        )
        queries = self._write_latents(index, layer, operation, step.rows, key_up, shape)
        if self._ends(index, step, shape):
            return
        step.rows = model.attended[: shape.tokens]
        for part, plan in self._latents:
            part.attend(index, queries, step.rows, plan, chunks=shape.chunks)
        self._after_mixer(index, step, shape)
        rows, step.rows = step.rows, buffers.found[: len(step.rows)]
        by_head, out = (each.view(len(rows), heads, -1) for each in (rows, step.rows))
        model.by_head(by_head, value_up, out)
        self._adapt(index, f"{operation.up.name}.values", by_head, out, shape)

    def _write_latents(
        self,
        index: int,
        layer: GpuLayer,
        operation: AttendLatents,
        x: torch.Tensor,
        key_up: torch.Tensor,
        shape: StepShape,
    ) -> torch.Tensor:
        """Write a layer's latents and rotated keys of rows [T, hidden]; return queries [T, heads, rank + rotary].
        ``key_up`` [heads, still, rank] maps latents to keys, and is absorbed into the queries."""
        model, latents, buffers, count = self._model, self._model.config.latents, self._model.latents, len(x)
        assert latents is not None
        assert buffers is not None
        few, by_head = x, (count, model.config.num_heads, -1)
        if operation.query_down is not None and operation.query_norm is not None:
            few = self._product(index, layer, operation.query_down.name, x, buffers.few[:count], shape)
            weight = layer.norms[operation.query_norm.name].weight
            rms_norm(few, weight, few, operation.query_norm.eps, model.weights.norm_is_wide)
        projected = self._product(index, layer, operation.query_up.name, few, buffers.projected[:count], shape)
        rows = self._product(index, layer, operation.down.name, x, buffers.rows[:count], shape)
        if operation.grows:
            projected.mul_(self._growth(count))
        projected, queries = projected.view(by_head), model.qkv[:count].view(by_head)
        still, absorbed = projected[..., : latents.qk_nope_head_dim], queries[..., : latents.kv_lora_rank]
        model.by_head(still, key_up.mT, absorbed)
        self._adapt(index, f"{operation.up.name}.keys", still, absorbed, shape)
        if operation.rope is None:
            rotary = model.no_rope._replace(positions=model.no_rope.positions[:count])
        else:
            rotary = Rotary(*model.ropes[operation.rope], self._record.rope_rows[:count])
        for part, _ in self._latents:
            latent_write(
                rows,
                layer.norms[operation.norm.name].weight,
                projected,
                queries,
                part.pool,
                self._record.rows[:count],
                part.places[index],
                rotary,
                eps=operation.norm.eps,
                wide=model.weights.norm_is_wide,
            )
        return queries

    def _norm_projections(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norm queries and keys over their whole projections, in place."""
        model, config = self._model, self._model.config
        if model.ranks is not None:
            self._norm_shares(qkv, q_norm, k_norm)
            return
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for part, weight in ((slice(0, queries), q_norm), (slice(queries, queries + keys), k_norm)):
            rms_norm(qkv[:, part], weight, qkv[:, part], config.rms_norm_eps, model.weights.norm_is_wide)

    def _grow(self, qkv: torch.Tensor) -> None:
        """Multiply queries by the factors of their positions, in place; this commutes with their rotation."""
        config = self._model.config
        qkv[:, : config.num_heads * config.head_dim].mul_(self._growth(len(qkv)))

    def _growth(self, count: int) -> torch.Tensor:
        """Return the factors [count, 1] of queries at the positions of the step's first rows."""
        growth = self._model.growth
        assert growth is not None
        return growth.index_select(0, self._record.rope_rows[:count])[:, None]

    def _norm_shares(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norm queries and keys over their whole projections, in place; the rank has some of their heads."""
        model, ranks = self._model, self._model.ranks
        assert ranks is not None
        config, whole, shard = model.config, model.weights.config, ranks.shard
        ends = config.num_heads * config.head_dim, (config.num_heads + config.num_kv_heads) * config.head_dim
        parts = qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]]
        sums = torch.stack([model.square_sums(part) for part in parts])
        # The ranks that have a KV head in common add it several times.
        sums[1] /= max(1, shard.size // whole.num_kv_heads)
        self._sum(sums)
        widths = (heads * config.head_dim for heads in (whole.num_heads, whole.num_kv_heads))
        for part, total, width, weight in zip(parts, sums, widths, (q_norm, k_norm), strict=True):
            normed = part.float() * torch.rsqrt(total / width + config.rms_norm_eps)[:, None]
            part.copy_((normed if model.weights.norm_is_wide else normed.to(part.dtype)) * weight)

    def _gated(
        self, index: int, layer: GpuLayer, operation: Mlp, normed: torch.Tensor, shape: StepShape
    ) -> torch.Tensor:
        """Compute a layer's MLP, from rows [T, hidden] to rows [T, hidden]."""
        model, count = self._model, len(normed)
        inner = operation.down.shape[1]
        both = _first_rows(model.gate_up, count, 2 * inner if operation.gated else inner)
        self._product(index, layer, operation.gate_up.name, normed, both, shape)
        out = _first_rows(model.inner, count, inner)
        bends = (0.0, 0.0) if operation.bends is None else layer.bends[operation.bends.name]
        gated(both, out, operation.activation, bends)
        found = self._product(index, layer, operation.down.name, out, model.found[:count], shape)
        if operation.row_gate is None:
            return found
        gate = layer.tensor(operation.row_gate)
        gates = model.product(normed, gate, None, normed.new_empty(count, len(gate)))
        self._adapt(index, operation.row_gate.name, normed, gates, shape)
        return found.mul_(gates.sigmoid_())

    def _apply_token_inputs(
        self, index: int, layer: GpuLayer, operation: ApplyTokenInputs, step: _LayerStep, shape: StepShape
    ) -> torch.Tensor:
        """Compute a layer's product from its inputs per token beside the residual stream: rows [T, hidden]."""
        model, count, width = self._model, len(step.rows), operation.gate.shape[0]
        assert step.inputs is not None
        gates, out = (_first_rows(buffer, count, width) for buffer in (model.gate_up, model.inner))
        self._product(index, layer, operation.gate.name, step.rows, gates, shape)
        gated(gates, out, operation.activation, up=step.inputs)
        return self._product(index, layer, operation.projection.name, out, model.found[:count], shape)

    def _mix(
        self, index: int, layer: GpuLayer, operation: Experts, place: int, step: _LayerStep, shape: StepShape
    ) -> None:
        """Compute a mixture of experts. The sum over experts is fused with that of the residual stream or of the layer,
        if that follows and no all-reduce comes before."""
        assert self._experts is not None
        sums: tuple[type, ...] = (AddToResidual,) if step.added_up is None else (AddToResidual, AddToLayerSum)
        following = layer.operations[place + 1 : place + 2]
        summed = self._model.ranks is not None or not any(isinstance(one, sums) for one in following)
        adapters = None
        if shape.adapters:
            assert self._model.adapters is not None
            adapters = MixtureAdapters(self._model.adapters, f"layers.{index}.", self._sampled)
        beside = None
        if isinstance(operation, JoinedExperts) and not operation.joined:
            # Adapters may change the gate: then the MLP applies it, otherwise the router and the sum do.
            mlp = operation.beside if shape.adapters else replace(operation.beside, row_gate=None)
            beside = self._gated(index, layer, mlp, step.rows, shape)
        routed = None
        if operation.router_norm is not None:
            # The buffer of the experts' sum is free until then.
            routed = self._normed(
                step.residual, layer.norms[operation.router_norm.name], self._model.found[: len(step.rows)]
            )
        found = self._experts.run(
            layer, operation, step.rows, step.count, summed=summed, adapters=adapters, beside=beside, routed=routed
        )
        if isinstance(found, PairResults):
            step.results = found
        else:
            step.rows = found

    def _normed(self, values: torch.Tensor, norm: GpuNorm | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Norm rows, by default into the buffer of normed rows; return the rows themselves if there is no norm."""
        if norm is None:
            return values
        model, weights = self._model, self._model.weights
        out = model.normed[: len(values)] if out is None else out
        rms_norm(
            values,
            norm.weight,
            out,
            model.config.rms_norm_eps,
            weights.norm_is_wide,
            centered=weights.norm_is_centered,
            bias=norm.bias,
        )
        return out

    def _add(
        self,
        residual: torch.Tensor,
        found: torch.Tensor | PairResults,
        post: torch.Tensor | None,
        following: GpuNorm | None,
        scale: float,
        factor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute residual = factor * (residual + scale * post_norm(found)), in place; return the next product's
        input, normed by ``following``."""
        model = self._model
        out = None if following is None else model.normed[: len(residual)]
        add_rms_norm(
            residual,
            found,
            out,
            weight=None if following is None else following.weight,
            bias=None if following is None else following.bias,
            post_weight=post,
            scale=scale,
            factor=factor,
            eps=model.config.rms_norm_eps,
            wide=model.weights.norm_is_wide,
            centered=model.weights.norm_is_centered,
        )
        return residual if out is None else out

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        model, config, rows = self._model, self._model.config, len(normed)
        head, fits = model.weights.head, rows <= len(model.logits)
        if model.shares is not None:
            logits = self._gathered_logits(model.shares, normed)
        elif isinstance(head, PackedMatrix):
            logits = model.logits[:rows] if fits else torch.empty(rows, config.vocab_size, device=model.device)
            model.product(normed, head, None, logits)
        elif fits:
            logits, found = model.logits[:rows], model.head[:rows]
            model.product(normed, head, None, found)
            if model.dtype != torch.float32:
                logits.copy_(found)
        else:
            logits = model.product(normed, head, None, normed.new_empty(rows, config.vocab_size)).float()
        if config.logit_divisor != 1.0:
            logits = logits.div_(config.logit_divisor)
        return soft_cap(logits, config.logit_softcap) if config.logit_softcap else logits

    def _gathered_logits(self, shares: RankLogits, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks' tokens on the first rank, and none on others."""
        model, rows = self._model, len(normed)
        head, found = model.weights.head, shares.room(rows)
        model.product(normed, head, None, found)
        every = shares.gather(rows)
        if not every:
            return model.logits[:0]
        logits = (
            model.logits[:rows] if rows <= len(model.logits) else model.logits.new_empty(rows, model.logits.shape[1])
        )
        for tokens, part in every:
            logits[:, tokens.start : tokens.stop].copy_(part)
        return logits


def _first_rows(buffer: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """View the start of a buffer as rows [count, width], regardless of the width of the buffer's rows."""
    return buffer.view(-1)[: count * width].view(count, width)


def _norm_of(layer: GpuLayer, operation: LayerOperation) -> GpuNorm | None:
    """Return the norm ``operation``; None if the model does not norm the residual stream there."""
    if not isinstance(operation, Norm) or operation.weight is None:
        return None
    return layer.norms[operation.weight.name]


def _first_norm(layer: GpuLayer) -> GpuNorm | None:
    return _norm_of(layer, layer.operations[0])
