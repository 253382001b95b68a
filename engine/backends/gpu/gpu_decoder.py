"""The forward pass on a GPU: that of :mod:`pillion.engine.models.decoder`, with fused kernels and fixed buffers.

    embed -> residual
    each layer   norm -> qkv product -> [qk-norm, rope, KV into the pool] -> attention -> o product
                 [residual += , norm] -> gate and up product -> [act(gate) * up] -> down product -> [residual += , norm]
    last layer   ends with its KV if no row is sampled; else only sampled rows continue after its attention
    logits       head product, in float32

Layers with recurrent state, instead of attention or beside it (``engine/gpu_states``), keep states in the pool; the
above then holds for their operations.

A rank (``rank_group.py``) does the same over its share of heads, inner values and tokens: the outputs of embedding,
o product and down product are all-reduced, and rank 0 gathers the logits.

A pipeline stage (``engine/gpu_stages``) runs only its own layers. The first one embeds; the others begin with the
previous stage's rows in the residual stream's buffer. Stages leave their output in that buffer.

Brackets enclose one kernel. Products by unquantized matrices run on cuBLAS, through torch, or for few rows on our
kernel if the tuning file says so; those by quantized matrices and experts (``gpu_experts.py``) run on our kernels.
Nothing here synchronizes, and only logits, sampled rows and attention gates are allocated, so that a step can be
captured as a CUDA graph, except if ranks share a GPU, whose all-reduces go through the host (``capturable``).
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
        rows, kept: output of the last operation; stack of rows for later operations.
        count: int32 [1], the number of rows without padding.
        results: the experts' outputs per pair of row and expert, if the next sum adds them up.
        gate: gate of the attention output, before its sigmoid; None without one.
        layer_sum: sum of the outputs that the layer adds up (AddUp); None before the first.
        inputs: the layer's slice of the per-layer token inputs, if any.
        mixers: remaining operations of the layer that write KV or states.
        ended: True if nothing is left to compute, because no row is sampled.
    """

    residual: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor
    results: PairResults | None = None
    kept: list[torch.Tensor] = field(default_factory=list)
    gate: torch.Tensor | None = None
    layer_sum: torch.Tensor | None = None
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
        """``parts``: the process's KV heads by shard, one per attention plan of ``record``. ``states``, ``experts``:
        None if no layer has any."""
        self._model, self._states, self._experts = model, states, experts
        # True once the running step computes only its sampled rows, after the last mixer.
        self._sampled = False
        # Hidden states that the last step returned; the next step overwrites them.
        self.vectors = model.normed[:0]
        planned = list(zip(parts, record.attention, strict=True))
        self._parts = [(part, plan) for part, plan in planned if isinstance(part, PartRows)]
        self._latents = [(part, plan) for part, plan in planned if isinstance(part, LatentRows)]
        self._record = record
        # By layer: the next layer's first norm, which runs with the layer's last sum into the residual stream. The last
        # layer of a stage has none, because the next stage norms its rows.
        self._following = {index - 1: _first_norm(layer) for index, layer in model.layers.items()}
        if "final_norm" in model.weights:
            final = GpuNorm(model.weights["final_norm"], model.weights.get("final_norm.bias"))
            self._following[model.config.num_layers - 1] = final

    def run(self, shape: StepShape) -> torch.Tensor:
        """Run the step in the record, padded to ``shape``. Return float32 logits [shape.samples - shape.vectors,
        vocab_size], and store the hidden states of the other sampled rows in ``vectors``. Stages and ranks above 0
        return no rows."""
        model, config, self._sampled = self._model, self._model.config, False
        step = _LayerStep(*self._begin(shape), self._record.num_rows)
        for index, layer in model.layers.items():
            self._begin_layer(index, layer, step, shape)
            if not step.ended:
                self._run_layer(index, layer, step, shape)
            if step.ended:
                break
        if not step.ended and model.shard.gives_logits:
            num_logits = shape.samples - shape.vectors
            rows, self.vectors = step.rows[:num_logits], step.rows[num_logits:]
            self._keep_outputs(step.residual)
            if num_logits:
                return self._logits(rows)
        if model.ranks is not None:
            # A step with logits needs no barrier: gathering them shows that all ranks have written their KV.
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
        """Store the sampled rows of the residual stream after the last layer; only an EAGLE head reads them."""

    def _embed(self, residual: torch.Tensor, shape: StepShape) -> None:
        """Write the embeddings of the step's tokens to the residual stream."""
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
        """Compute the per-layer token inputs of all layers, ``width`` values each, from the embeddings ``hidden``.
        Every rank computes all of them."""
        model, weights, count = self._model, self._model.weights, len(hidden)
        inputs = model.token_inputs[:count]
        table, tokens = weights["token_inputs.embedding"], self._record.token_ids[:count]
        embed(tokens, model.sampled, table, inputs, weights.token_input_scale, range(len(table)))
        projected = model.gate_up.view(-1)[: inputs.numel()].view(inputs.shape)
        model.product(hidden, weights["token_inputs.projection"], None, projected)
        # The model scales the projection by hidden_size**-0.5 before this norm; scaling eps by hidden_size instead is
        # equivalent.
        by_layer, eps = projected.view(-1, width), model.config.rms_norm_eps * model.config.hidden_size
        rms_norm(by_layer, weights["token_inputs.norm"], by_layer, eps, wide=True)
        inputs.add_(projected).mul_(sqrt(0.5))

    def _begin_layer(self, index: int, layer: GpuLayer, step: _LayerStep, shape: StepShape) -> None:
        """Prepare ``step`` for a layer: store the layer's input if an EAGLE head reads it, select its token inputs, and
        count its mixers."""
        model, inputs = self._model, self._model.config.token_inputs
        for column, layer_index in enumerate(model.aux_hidden_state_layers):
            if layer_index == index:
                model.states[: shape.tokens].chunk(len(model.aux_hidden_state_layers), 1)[column].copy_(step.residual)
        if inputs is not None:
            columns = slice(index * inputs.width, (index + 1) * inputs.width)
            step.inputs = model.token_inputs[: shape.tokens, columns]
        # A last layer without mixers computes only the sampled rows.
        step.mixers, step.layer_sum = sum(isinstance(operation, Mixer) for operation in layer.operations), None
        if not step.mixers and self._is_last(index, shape):
            self._sample(step, shape)

    def _run_layer(self, index: int, layer: GpuLayer, step: _LayerStep, shape: StepShape) -> None:
        """Run the operations of a layer. Some are fused: a norm with the sum before it, and norms and rotation of heads
        with the write of keys and values."""
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
                    assert head_norm is None  # The norm, which runs later, would undo the scale.
                    self._scale_queries(step.rows)
                case Attend():
                    self._run_attention(index, layer, operation, step, head_norm, rotary, shape)
                case _:
                    self._run_operation(index, layer, operation, place, step, shape)
            if step.ended:
                return

    def _run_operation(
        self, index: int, layer: GpuLayer, operation: LayerOperation, place: int, step: _LayerStep, shape: StepShape
    ) -> None:
        """Run ``operation``, number ``place`` of a layer, which is not one of attention over keys and values."""
        match operation:
            case Norm():
                # After a sum into the residual stream, the norm has already run with the sum.
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
                self._run_experts(index, layer, operation, place, step, shape)
            case AddToLayerSum():
                self._add_to_layer_sum(layer, operation, step)
            case ApplyTokenInputs():
                step.rows = self._apply_token_inputs(index, layer, operation, step, shape)
            case AddToResidual():
                self._add_to_residual(index, layer, operation, place, step)
            case ScaleResidual():
                # Fused with the sum before.
                assert isinstance(layer.operations[place - 1], AddToResidual)

    def _product_buffer(self, index: int, matrix: LayerTensor, count: int) -> torch.Tensor:
        """Return the buffer for the product of ``count`` rows with a matrix of a layer."""
        model, width = self._model, matrix.shape[0]
        if matrix.name == "qkv":
            return _first_rows(model.gated_qkv, count, width)
        if width == model.config.hidden_size:
            return model.projected[:count]
        assert self._states is not None
        return self._states.projection_buffer(index, count)

    def _keep_gate(self, step: _LayerStep, values: int) -> None:
        """Keep the first ``values`` columns as the gate of the attention output; copy the others, because attention
        kernels need contiguous rows of queries, keys and values."""
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
        """Write a layer's keys and values, norm and rotate its queries, and compute attention; ``step`` continues with
        its output [T, heads * head_dim]."""
        config, qkv = self._model.config, step.rows
        source = config.kv_source(index)
        parts = [(part, plan) for part, plan in self._parts if source in part.places]
        for part, _ in parts:
            part.write(index, qkv, self._record.rows[: len(qkv)], norm, rotary, source=source)
        if self._end_if_done(index, step, shape):
            return
        window = window_of(operation.window, operation.chunked, self._model.max_model_len)
        sinks = self._model.no_sinks if operation.sinks is None else layer.tensor(operation.sinks)
        width = config.num_heads * config.heads_of(source).head_dim
        step.rows = _first_rows(self._model.attended, shape.tokens, width)
        for part, plan in parts:
            part.attend(index, qkv, step.rows, plan, window=window, chunks=shape.chunks, source=source, sinks=sinks)
        self._after_mixer(index, step, shape)

    def _add_to_residual(
        self, index: int, layer: GpuLayer, operation: AddToResidual, place: int, step: _LayerStep
    ) -> None:
        """Add the rows to the residual stream, fused with the operations after ``place`` that scale and norm it;
        ``step`` continues with the result."""
        operations = layer.operations
        # The layer sum and token inputs are complete on every rank; other rows are partial sums.
        if not isinstance(operations[place - 1], AddToLayerSum | ApplyTokenInputs):
            self._sum(step.rows)
        later, factor = operations[place + 1 :], None
        if later and isinstance(later[0], ScaleResidual):
            factor, later = layer.tensor(later[0].factor), later[1:]
        norm = _norm_of(layer, later[0]) if later else self._following.get(index)
        post_norm = None if operation.norm is None else layer.norms[operation.norm.name].weight
        rows_or_pairs = step.rows if step.results is None else step.results
        step.rows = self._add(step.residual, rows_or_pairs, post_norm, norm, operation.scale, factor)
        step.results = None

    def _add_to_layer_sum(self, layer: GpuLayer, operation: AddToLayerSum, step: _LayerStep) -> None:
        """Add the rows, normed if the operation has a norm, to the layer's sum, with which ``step`` continues."""
        norm = None if operation.norm is None else layer.norms[operation.norm.name]
        self._sum(step.rows)
        if step.layer_sum is None:
            step.layer_sum = self._model.layer_sum[: len(step.rows)]
            if norm is None:
                step.layer_sum.copy_(step.rows)
            else:
                self._normed(step.rows, norm, step.layer_sum)
        else:
            rows_or_pairs = step.rows if step.results is None else step.results
            self._add(step.layer_sum, rows_or_pairs, None if norm is None else norm.weight, None, 1.0)
        step.rows, step.results = step.layer_sum, None

    def _is_last(self, index: int, shape: StepShape) -> bool:
        """Return whether a layer is the last one that a step needs: the model's last layer or, if no row is sampled,
        the last one that writes KV or states or whose input is stored."""
        config = self._model.config
        last_written = max((config.last_kept_layer, *self._model.aux_hidden_state_layers))
        return index == (config.num_layers - 1 if shape.samples else last_written)

    def _end_if_done(self, index: int, step: _LayerStep, shape: StepShape) -> bool:
        """End a step without sampled rows if everything is written; return whether it has ended. Called in a mixer
        after its write."""
        step.ended = step.mixers == 1 and self._is_last(index, shape) and not shape.samples
        return step.ended

    def _after_mixer(self, index: int, step: _LayerStep, shape: StepShape) -> None:
        """Count a mixer as done; after the last one of the last layer, continue only with the sampled rows."""
        step.mixers -= 1
        if not step.mixers and self._is_last(index, shape):
            self._sample(step, shape)

    def _sample(self, step: _LayerStep, shape: StepShape) -> None:
        """Continue only with the sampled rows; end the step if there are none."""
        self._sampled = True
        step.ended, sampled = not shape.samples, self._record.sample_rows[: shape.samples]
        step.rows, step.residual = step.rows.index_select(0, sampled), step.residual.index_select(0, sampled)
        step.count = self._record.num_samples
        step.gate = None if step.gate is None else step.gate.index_select(0, sampled)
        step.inputs = None if step.inputs is None else step.inputs.index_select(0, sampled)

    def _product(
        self, index: int, layer: GpuLayer, name: str, x: torch.Tensor, out: torch.Tensor, shape: StepShape
    ) -> torch.Tensor:
        """Compute a linear layer, including adapters."""
        out = self._model.product(x, layer.matrices[name], layer.biases[name], out)
        self._adapt(index, name, x, out, shape)
        return out

    def _sum(self, values: torch.Tensor) -> None:
        """All-reduce partial sums over the ranks, in place."""
        if self._model.ranks is not None:
            self._model.ranks.sum(values, in_order=self._model.invariant)

    def _adapt(self, index: int, name: str, x: torch.Tensor, out: torch.Tensor, shape: StepShape) -> None:
        """In steps with adapters, add their products of a linear layer's inputs ``x`` to its outputs."""
        if shape.adapters:
            assert self._model.adapters is not None
            self._model.adapters.add(f"layers.{index}.{name}", x, out, sampled=self._sampled)

    def _run_latents(
        self, index: int, layer: GpuLayer, operation: AttendLatents, step: _LayerStep, shape: StepShape
    ) -> None:
        """Compute attention over latents (MLA), from normed rows to the outputs of all heads [T, heads * values]."""
        model, latents, buffers = self._model, self._model.config.latents, self._model.latents
        assert latents is not None
        assert buffers is not None
        heads = model.config.num_heads
        key_up, value_up = (
            layer.tensor(operation.up).view(heads, -1, latents.kv_lora_rank).tensor_split([latents.qk_nope_head_dim], 1)
        )
        queries = self._write_latents(index, layer, operation, step.rows, key_up, shape)
        if self._end_if_done(index, step, shape):
            return
        step.rows = model.attended[: shape.tokens]
        for part, plan in self._latents:
            part.attend(index, queries, step.rows, plan, chunks=shape.chunks)
        self._after_mixer(index, step, shape)
        rows, step.rows = step.rows, buffers.outputs[: len(step.rows)]
        by_head, out = rows.view(len(rows), heads, -1), step.rows.view(len(rows), heads, -1)
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
        """Write the latents and rotated key of rows ``x`` [T, hidden] to the pool; return queries [T, heads, rank +
        rotary]. ``key_up`` [heads, still, rank] maps latents to keys; it is absorbed into the queries."""
        model, latents, buffers, count = self._model, self._model.config.latents, self._model.latents, len(x)
        assert latents is not None
        assert buffers is not None
        q_latent, by_head = x, (count, model.config.num_heads, -1)
        if operation.query_down is not None and operation.query_norm is not None:
            q_latent = self._product(index, layer, operation.query_down.name, x, buffers.q_latent[:count], shape)
            weight = layer.norms[operation.query_norm.name].weight
            rms_norm(q_latent, weight, q_latent, operation.query_norm.eps, model.weights.norm_is_wide)
        projected = self._product(index, layer, operation.query_up.name, q_latent, buffers.queries[:count], shape)
        rows = self._product(index, layer, operation.down.name, x, buffers.rows[:count], shape)
        if operation.grows:
            projected.mul_(self._query_scales(count))
        projected, queries = projected.view(by_head), model.qkv[:count].view(by_head)
        q_nope, q_absorbed = projected[..., : latents.qk_nope_head_dim], queries[..., : latents.kv_lora_rank]
        model.by_head(q_nope, key_up.mT, q_absorbed)
        self._adapt(index, f"{operation.up.name}.keys", q_nope, q_absorbed, shape)
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
        """Norm queries and keys over all heads, in place."""
        model, config = self._model, self._model.config
        if model.ranks is not None:
            self._norm_sharded(qkv, q_norm, k_norm)
            return
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for part, weight in ((slice(0, queries), q_norm), (slice(queries, queries + keys), k_norm)):
            rms_norm(qkv[:, part], weight, qkv[:, part], config.rms_norm_eps, model.weights.norm_is_wide)

    def _scale_queries(self, qkv: torch.Tensor) -> None:
        """Multiply queries by the scales of their positions, in place; this commutes with their rotation."""
        config = self._model.config
        qkv[:, : config.num_heads * config.head_dim].mul_(self._query_scales(len(qkv)))

    def _query_scales(self, count: int) -> torch.Tensor:
        """Return the query scales [count, 1] at the positions of the step's first rows."""
        scales = self._model.query_scales
        assert scales is not None
        return scales.index_select(0, self._record.rope_rows[:count])[:, None]

    def _norm_sharded(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norm queries and keys over the heads of all ranks, in place."""
        model, ranks = self._model, self._model.ranks
        assert ranks is not None
        config, whole, shard = model.config, model.weights.config, ranks.shard
        ends = config.num_heads * config.head_dim, (config.num_heads + config.num_kv_heads) * config.head_dim
        parts = qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]]
        sums = torch.stack([model.square_sums(part) for part in parts])
        # A KV head that several ranks have is added once per rank.
        sums[1] /= max(1, shard.size // whole.num_kv_heads)
        self._sum(sums)
        widths = (heads * config.head_dim for heads in (whole.num_heads, whole.num_kv_heads))
        for part, total, width, weight in zip(parts, sums, widths, (q_norm, k_norm), strict=True):
            normed = part.float() * torch.rsqrt(total / width + config.rms_norm_eps)[:, None]
            part.copy_((normed if model.weights.norm_is_wide else normed.to(part.dtype)) * weight)

    def _gated(
        self, index: int, layer: GpuLayer, operation: Mlp, normed: torch.Tensor, shape: StepShape
    ) -> torch.Tensor:
        """Compute an MLP, from rows [T, hidden] to rows [T, hidden] in a buffer of the model."""
        model, count = self._model, len(normed)
        inner = operation.down.shape[1]
        gate_up = _first_rows(model.gate_up, count, 2 * inner if operation.gated else inner)
        self._product(index, layer, operation.gate_up.name, normed, gate_up, shape)
        out = _first_rows(model.inner, count, inner)
        xielu_params = (0.0, 0.0) if operation.bends is None else layer.xielu_params[operation.bends.name]
        gated(gate_up, out, operation.activation, xielu_params)
        down = self._product(index, layer, operation.down.name, out, model.projected[:count], shape)
        if operation.row_gate is None:
            return down
        gate = layer.tensor(operation.row_gate)
        gates = model.product(normed, gate, None, normed.new_empty(count, len(gate)))
        self._adapt(index, operation.row_gate.name, normed, gates, shape)
        return down.mul_(gates.sigmoid_())

    def _apply_token_inputs(
        self, index: int, layer: GpuLayer, operation: ApplyTokenInputs, step: _LayerStep, shape: StepShape
    ) -> torch.Tensor:
        """Compute a layer's product from its per-layer token inputs: rows [T, hidden]."""
        model, count, width = self._model, len(step.rows), operation.gate.shape[0]
        assert step.inputs is not None
        gates, out = (_first_rows(buffer, count, width) for buffer in (model.gate_up, model.inner))
        self._product(index, layer, operation.gate.name, step.rows, gates, shape)
        gated(gates, out, operation.activation, up=step.inputs)
        return self._product(index, layer, operation.projection.name, out, model.projected[:count], shape)

    def _run_experts(
        self, index: int, layer: GpuLayer, operation: Experts, place: int, step: _LayerStep, shape: StepShape
    ) -> None:
        """Compute a mixture of experts. The sum over experts is fused with a following sum into the residual stream or
        the layer's sum, unless an all-reduce comes between."""
        assert self._experts is not None
        sums: tuple[type, ...] = (AddToResidual,) if step.layer_sum is None else (AddToResidual, AddToLayerSum)
        following = layer.operations[place + 1 : place + 2]
        summed = self._model.ranks is not None or not any(isinstance(later, sums) for later in following)
        adapters = None
        if shape.adapters:
            assert self._model.adapters is not None
            adapters = MixtureAdapters(self._model.adapters, f"layers.{index}.", self._sampled)
        shared = None
        if isinstance(operation, JoinedExperts) and not operation.joined:
            # Adapters may change the gate: then the MLP applies it, otherwise the router and the sum do.
            mlp = operation.beside if shape.adapters else replace(operation.beside, row_gate=None)
            shared = self._gated(index, layer, mlp, step.rows, shape)
        router_rows = None
        if operation.router_norm is not None:
            # In the buffer of the experts' sum, which is written later.
            router_rows = self._normed(
                step.residual, layer.norms[operation.router_norm.name], self._model.projected[: len(step.rows)]
            )
        out = self._experts.run(
            layer,
            operation,
            step.rows,
            step.count,
            summed=summed,
            adapters=adapters,
            shared=shared,
            router_rows=router_rows,
        )
        if isinstance(out, PairResults):
            step.results = out
        else:
            step.rows = out

    def _normed(self, values: torch.Tensor, norm: GpuNorm | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Norm rows into ``out``, by default the buffer of normed rows; return ``values`` themselves if ``norm`` is
        None."""
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
        rows_or_pairs: torch.Tensor | PairResults,
        post_norm: torch.Tensor | None,
        following: GpuNorm | None,
        scale: float,
        factor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute residual = factor * (residual + scale * post_norm(rows)) in place, where rows may be per-expert
        outputs to be added up. Return the result, normed by ``following`` if not None."""
        model = self._model
        out = None if following is None else model.normed[: len(residual)]
        add_rms_norm(
            residual,
            rows_or_pairs,
            out,
            weight=None if following is None else following.weight,
            bias=None if following is None else following.bias,
            post_weight=post_norm,
            scale=scale,
            factor=factor,
            eps=model.config.rms_norm_eps,
            wide=model.weights.norm_is_wide,
            centered=model.weights.norm_is_centered,
        )
        return residual if out is None else out

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return float32 logits of normed rows [R, hidden]; on ranks above 0 no rows."""
        model, config, rows = self._model, self._model.config, len(normed)
        head, fits = model.weights.head, rows <= len(model.logits)
        if model.shares is not None:
            logits = self._gathered_logits(model.shares, normed)
        elif isinstance(head, PackedMatrix):
            logits = model.logits[:rows] if fits else torch.empty(rows, config.vocab_size, device=model.device)
            model.product(normed, head, None, logits)
        elif fits:
            logits, unconverted = model.logits[:rows], model.head[:rows]
            model.product(normed, head, None, unconverted)
            if model.dtype != torch.float32:
                logits.copy_(unconverted)
        else:
            logits = model.product(normed, head, None, normed.new_empty(rows, config.vocab_size)).float()
        if config.logit_divisor != 1.0:
            logits = logits.div_(config.logit_divisor)
        return soft_cap(logits, config.logit_softcap) if config.logit_softcap else logits

    def _gathered_logits(self, shares: RankLogits, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks' tokens on rank 0, no rows on others."""
        model, rows = self._model, len(normed)
        model.product(normed, model.weights.head, None, shares.buffer(rows))
        gathered = shares.gather(rows)
        if not gathered:
            return model.logits[:0]
        logits = (
            model.logits[:rows] if rows <= len(model.logits) else model.logits.new_empty(rows, model.logits.shape[1])
        )
        for tokens, part in gathered:
            logits[:, tokens.start : tokens.stop].copy_(part)
        return logits


def _first_rows(buffer: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """View the start of a buffer as rows [count, width], whatever the shape of the buffer."""
    return buffer.view(-1)[: count * width].view(count, width)


def _norm_of(layer: GpuLayer, operation: LayerOperation) -> GpuNorm | None:
    """Return the weights of a norm of the residual stream; None for another operation or a norm without weights."""
    if not isinstance(operation, Norm) or operation.weight is None:
        return None
    return layer.norms[operation.weight.name]


def _first_norm(layer: GpuLayer) -> GpuNorm | None:
    """Return the norm with which a layer begins, or None."""
    return _norm_of(layer, layer.operations[0])
