"""The CPU kernels of one layer: an emitter for each operation of the layer's description.

    hidden --norm--> normed --qkv--> qkv --rotate, write--> queries, pool --attend--> attended --o--> hidden
    hidden --norm--> normed --gate, up--> activated --down--> hidden              (or experts; or a norm after each)

Experts replace the second line:

    normed --router--> routing --route--> scores, experts --group--> grouped --gate, up--> activated --down--> found
    hidden += each row's sum over its experts      (normed first, if the model has a norm after its experts)

The output of a shared expert (an MLP that all rows pass) may have a gate:

    activated --down--> ungated, router's rows --gate--> row_gates: hidden += sigmoid(row_gates) * ungated

Some operations of the description are fused: norms of queries and keys into the kernel that rotates and writes them,
and sums into the residual stream into the product before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from pillion.engine.backends.backend import EIGHT_BIT_KV, KVLayout
from pillion.engine.backends.cpu.cpu_operations import ExpertGroups, OperationBuilder
from pillion.engine.backends.cpu.cpu_states import BufferOf, StateEmitter, channels_of, convolved, gated, inputs_of
from pillion.engine.models.layer_operations import (
    XIELU_SLOPE,
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
    Layer,
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
from pillion.engine.models.model_config import ModelConfig
from pillion.kernels.cpu.attention.attention_rows import AttentionShape
from pillion.kernels.cpu.attention.cpu_attention import Attention, AttentionMerge, step_field
from pillion.kernels.cpu.attention.token_selection import SelectTokens
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.products.moe_kernels import (
    Combine,
    GatherGroups,
    GroupByExpert,
    RouteToExperts,
    ScaleChosen,
    WeighRows,
)
from pillion.kernels.cpu.rows.latents import WriteLatents
from pillion.kernels.cpu.rows.rotate import RotateWrite
from pillion.kernels.cpu.rows.rows import GatherRows
from pillion.kernels.cpu.rows.token_inputs import ScaleRows, WeighByTokenInputs
from pillion.kernels.cpu.runtime.program import Buffer, Columns, HeadStride, Operation
from pillion.kernels.cpu.states.gates import GateRows

Kind = TypeVar("Kind", bound=LayerOperation)
GATED_EPILOGUE = {"silu": "gated_silu", "gelu_tanh": "gated_gelu"}
EPILOGUE = {
    "silu": "act_silu",
    "gelu_tanh": "act_gelu",
    "gelu": "act_erf_gelu",
    "relu": "act_relu",
    "relu2": "act_relu2",
    "xielu": "act_xielu",
}
# Max rows of partial attention sums per KV head; limits the context splits of a step.
MAX_PARTIAL_ROWS = 4096


def projections(builder: OperationBuilder, index: int) -> Buffer:
    """Return the buffer for a layer's projected queries, keys and values."""
    return builder.layer_buffer("qkv", builder.weights.linear(f"layers.{index}.qkv").pairs * 32, "float32")


class LayerEmitter:
    """Emitter of the kernels of layer ``index``. In the ``last`` layer, kernels after the attention are built by
    ``sampled``, which computes only sampled rows."""

    def __init__(self, builder: OperationBuilder, sampled: OperationBuilder, index: int, *, last: bool) -> None:
        self._builder, self._sampled, self._index, self._last = builder, sampled, index, last
        self._prefix = f"layers.{index}."
        self._layer: Layer = ()
        self._rows, self._norm_name = builder.hidden, ""
        self._saved: list[Buffer] = []
        # True once an operation has added to the layer's sum (AddToLayerSum).
        self._has_layer_sum = False
        # Rows that begin with the gates of attention's output, and the bytes of these gates per row.
        self._gates, self._gate_bytes = builder.hidden, 0
        # Number of the layer's remaining mixers: operations that write KV or states.
        self._mixers = 0
        # Normed rows in float32, the router's input.
        self._unrounded: Buffer | None = None

    def emit(self, layer: Layer, rows: Buffer | None = None) -> Iterator[Operation]:
        """Yield the kernels of a layer. ``rows``: input of its first operation, by default the residual stream."""
        self._layer, self._rows = layer, rows or self._rows
        self._mixers = sum(isinstance(operation, Mixer) for operation in layer)
        if self._last and not self._mixers:
            yield self._gather(None, None)
            self._rows = self._builder.hidden
        for operation, following in zip_longest(layer, layer[1:]):
            # Fused into the kernel that rotates and writes (_rotate_and_write).
            if not isinstance(operation, (NormHeads, NormProjections, NormValues, Rotate, GrowQueries)):
                yield from _EMIT[type(operation)](self, operation, following) or ()

    def norm(self, operation: Norm, _: LayerOperation | None) -> Iterator[Operation]:
        self._norm_name = "" if operation.weight is None else self._prefix + operation.weight.name
        self._rows = self._builder.normed
        yield self._builder.norm(self._norm_name)

    def multiply(self, operation: Multiply, following: LayerOperation | None) -> Iterator[Operation]:
        name, x = operation.matrix.name, self._rows
        if isinstance(following, AddToResidual):
            yield from self._add_product(name, x, following)
            return
        if isinstance(following, ShortConvolution):
            channels = channels_of(self._builder, following)
            self._rows = inputs_of(self._builder, self._prefix + name, channels, 2 * channels)
        else:
            self._rows = projections(self._builder, self._index)
        yield from self._builder.gemm(self._prefix + name, x, self._rows, "store")

    def attend(self, operation: Attend, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels of attention, from the buffer qkv to attended; they write the layer's KV into the pool."""
        builder, layout = self._builder, self._builder.layout
        shape = attention_shape(builder.config, layout, builder.dtype, self._index)
        place = layout.place(builder.config.kv_source(self._index))
        # The pool has the KV of all heads; this process accesses only that of its own.
        first = builder.shard.kv_heads_of(place.kv_heads).start
        locations = {
            "head_stride": HeadStride(shape.group * shape.head_dim * shape.element_bytes),
            "layer_offset": place.offset + first * place.piece_bytes,
            "slot_bytes": layout.block_bytes,
            "value_offset": place.kv_heads * place.piece_bytes,
        }
        queries = builder.layer_buffer("queries", builder.config.num_heads * shape.head_dim, builder.row_dtype)
        yield from self._rotate_and_write(shape, queries, locations)
        self._after_mixer()
        yield from self._attention(operation, shape, queries, locations)
        yield from self._continue_with(self._attended)

    def short_convolution(self, operation: ShortConvolution, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernel of a short convolution, which also writes its last inputs into the pool."""
        yield from StateEmitter(self._builder, self._index).short_convolution(operation, self._rows)
        self._after_mixer()
        yield from self._continue_with(lambda builder: convolved(builder, channels_of(builder, operation)))

    def delta_rule(self, operation: DeltaRule, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels of a gated delta net, which also write its state into the pool."""
        yield from StateEmitter(self._builder, self._index).delta_rule(operation, self._rows)
        self._after_mixer()
        yield from self._continue_with(lambda builder: gated(builder, self._state_heads() * operation.head_dim))

    def state_space(self, operation: StateSpace, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels of a state space, which also write its state into the pool."""
        yield from StateEmitter(self._builder, self._index).state_space(operation, self._rows)
        self._after_mixer()
        yield from self._continue_with(lambda builder: gated(builder, self._state_heads() * operation.head_dim))

    def selective_scan(self, operation: SelectiveScan, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels of a selective scan, which also write its state into the pool."""
        yield from StateEmitter(self._builder, self._index).selective_scan(operation, self._rows)
        self._after_mixer()
        yield from self._continue_with(lambda builder: gated(builder, self._state_heads() * operation.head_dim))

    def _state_heads(self) -> int:
        """Return the number of this process's heads with a state."""
        return len(self._builder.shard.state_heads)

    def keep_gate(self, operation: KeepGate, _: LayerOperation | None) -> None:
        """Record that the current rows begin with gates of attention's output."""
        self._gates, self._gate_bytes = self._rows, operation.values.size * 4

    def apply_gate(self, _: Gate, __: LayerOperation | None) -> Iterator[Operation]:
        builder, heads = self._builder, self._builder.config.heads_of(self._index)
        width, gates = builder.config.num_heads * heads.head_dim, self._gate_bytes // 4
        arguments = {"x": self._rows, "gates": self._gates, "width": width}
        yield Operation(GateRows(builder.bf16, builder.rows_of, width // gates), arguments, builder.when)

    def _after_mixer(self) -> None:
        """Count a mixer as done. After the model's last one, kernels are only needed in steps with sampled rows."""
        self._mixers -= 1
        if not self._mixers and self._index == self._builder.last_kept_layer:
            self._builder = replace(self._builder, for_samples=True)

    def attend_latents(self, operation: AttendLatents, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels of attention over latents (MLA), from normed rows to the outputs of all heads."""
        builder, latents, prefix, x = self._builder, self._builder.config.latents, self._prefix, self._rows
        assert latents is not None
        shape = attention_shape(builder.config, builder.layout, builder.dtype, self._index)
        heads = builder.config.num_heads
        if operation.query_down is not None and operation.query_norm is not None:
            q_latent, width = builder.buffer("q_latent", latents.q_lora_rank, "float32"), latents.q_lora_rank
            yield from builder.gemm(prefix + operation.query_down.name, x, q_latent, "store")
            x = builder.buffer("q_latent_normed", width, builder.row_dtype)
            yield builder.norm(prefix + operation.query_norm.name, x, q_latent, width, operation.query_norm.eps)
        projected = builder.buffer("projected", heads * latents.head_dim, builder.row_dtype)
        yield from builder.gemm(prefix + operation.query_up.name, x, projected, "act_none")
        rows = builder.buffer("latents", builder.config.head_dim, "float32")
        yield from builder.gemm(prefix + operation.down.name, self._rows, rows, "store")
        yield builder.norm(prefix + operation.norm.name, rows, rows, latents.kv_lora_rank, operation.norm.eps)
        q_absorbed, up = builder.buffer("absorbed", heads * latents.kv_lora_rank, "float32"), prefix + operation.up.name
        strides = latents.head_dim * shape.element_bytes, latents.kv_lora_rank * 4
        yield from builder.gemm(f"{up}.keys", projected, q_absorbed, "store", head_strides=strides)
        queries = builder.buffer("queries", heads * shape.head_dim, builder.row_dtype)
        cos, sin = (None, None) if operation.rope is None else builder.ropes[operation.rope]
        locations: dict[str, Any] = {
            "slot_bytes": builder.layout.block_bytes,
            "layer_offset": builder.layout.place(self._index).offset,
        }
        arguments = {
            "absorbed": q_absorbed,
            "projected": projected,
            "latents": rows,
            "queries": queries,
            "cos": cos,
            "sin": sin,
            "growth": builder.query_scales if operation.grows else None,
            **locations,
        }
        index_key = None
        if operation.index_key is not None and operation.index_norm is not None:
            index_key, name = builder.buffer("index_key", shape.index, "float32"), prefix + operation.index_norm.name
            yield from builder.gemm(prefix + operation.index_key.name, self._rows, index_key, "store")
            eps = operation.index_norm.eps
            yield builder.norm(name, index_key, index_key, shape.index, eps, centered=True)
        arguments["index_key"] = index_key
        spec = WriteLatents(
            *(latents.kv_lora_rank, latents.qk_rope_head_dim, latents.qk_nope_head_dim),
            *(heads, shape.block_size, builder.bf16),
            codes=shape.codes,
            grows=operation.grows,
            rotated=operation.rope is not None,
            index=shape.index,
            indexed=index_key is not None,
        )
        yield Operation(spec, arguments)
        selected = None
        if operation.index is not None:
            selected = builder.buffer("selected", len(builder.ropes[0][0]) // (2 * LANES) + 1, "int32")
            yield from self._select(operation, shape, x, selected)
        locations |= {"head_stride": HeadStride(shape.group * shape.head_dim * shape.element_bytes), "value_offset": 0}
        self._mixers -= 1
        yield from self._attention(Attend(0), shape, queries, {**locations, "selected": selected})
        yield from self._continue_with(self._attended)
        strides = latents.kv_lora_rank * shape.element_bytes, latents.v_head_dim * shape.element_bytes
        out = self._builder.buffer("value_outputs", heads * latents.v_head_dim, builder.row_dtype)
        yield from self._builder.gemm(f"{up}.values", self._rows, out, "act_none", head_strides=strides)
        self._rows = out

    def _select(
        self, operation: AttendLatents, shape: AttentionShape, x: Buffer, selected: Buffer
    ) -> Iterator[Operation]:
        """Yield the kernels that select tokens by an indexer, from the query projection's input ``x`` to bits in
        ``selected``; none in a layer that reuses the previous layer's selection."""
        builder, index, latents, prefix = self._builder, operation.index, self._builder.config.latents, self._prefix
        assert index is not None
        assert latents is not None
        if operation.index_queries is None or operation.index_weights is None:
            return
        queries = builder.buffer("index_queries", index.heads * index.dim, builder.row_dtype)
        yield from builder.gemm(prefix + operation.index_queries.name, x, queries, "act_none")
        weights = builder.buffer("index_weights", index.heads, "float32")
        rows = builder.buffer("unrounded", builder.config.hidden_size, "float32")
        yield builder.norm(self._norm_name, rows)
        yield from builder.gemm(prefix + operation.index_weights.name, rows, weights, "store")
        cos, sin = (None, None) if operation.rope is None else builder.ropes[operation.rope]
        arguments = {
            "queries": queries,
            "weights": weights,
            "selected": selected,
            "cos": cos,
            "sin": sin,
            "factor": (index.heads * index.dim) ** -0.5,
            "layer_offset": builder.layout.place(self._index).offset,
            "slot_bytes": builder.layout.block_bytes,
        }
        spec = SelectTokens(
            shape, index.heads, index.dim, index.top, latents.qk_rope_head_dim, operation.rope is not None
        )
        yield Operation(spec, arguments, "num_samples" if self._last else builder.when)

    def mlp(self, operation: Mlp, following: LayerOperation | None) -> Iterator[Operation]:
        builder, down = self._builder, operation.down.name
        inner = builder.weights.linear(self._prefix + down).depth
        activated = builder.buffer(f"activated{inner}", inner, builder.row_dtype)
        epilogue = (GATED_EPILOGUE if operation.gated else EPILOGUE)[operation.activation]
        xielu = self._xielu_params(operation.bends)
        yield from builder.gemm(
            self._prefix + operation.gate_up.name, self._rows, activated, epilogue, xielu_params=xielu
        )
        assert isinstance(following, AddToResidual | AddToLayerSum)
        if operation.row_gate is None:
            yield from self._add_product(down, activated, following)
        else:
            assert isinstance(following, AddToResidual)
            yield from self._add_weighed(down, activated, operation.row_gate, following)

    def _xielu_params(self, tensor: LayerTensor | None) -> tuple[float, float]:
        """Return the parameters of xIELU for inputs above and below 0; zeros for other activations."""
        if tensor is None:
            return 0.0, 0.0
        above, below = np.logaddexp(0.0, self._builder.weights.tensors[self._prefix + tensor.name].tolist())
        return float(above), float(below) + XIELU_SLOPE

    def apply_token_inputs(self, operation: ApplyTokenInputs, following: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels that add a product from the per-layer token inputs to the residual stream. Every process
        computes all of it, so there is no all-reduce."""
        builder, inputs = self._builder, self._builder.config.token_inputs
        assert inputs is not None
        gate, all_inputs = builder.buffer("input_gate", inputs.width, builder.row_dtype), builder.token_inputs
        yield from builder.gemm(self._prefix + operation.gate.name, self._rows, gate, EPILOGUE[operation.activation])
        arguments = {"gate": gate, "inputs": all_inputs, "width": inputs.width}
        arguments["layer_bytes"] = self._index * inputs.width * 4
        yield Operation(WeighByTokenInputs(builder.bf16, builder.rows_of), arguments, builder.when)
        yield from builder.gemm(self._prefix + operation.projection.name, gate, builder.layer_output, "store")
        assert isinstance(following, AddToResidual)
        assert following.norm is not None
        yield builder.norm_add(self._prefix + following.norm.name, following.scale)

    def scale_residual(self, operation: ScaleResidual, _: LayerOperation | None) -> Iterator[Operation]:
        builder = self._builder
        arguments = {
            "hidden": builder.hidden,
            "width": builder.config.hidden_size,
            "factor": float(builder.weights.tensors[self._prefix + operation.factor.name][0]),
        }
        yield Operation(ScaleRows(builder.rows_of), arguments, builder.when)

    def add_to_layer_sum(self, _: AddToLayerSum, following: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernel that adds the layer's sum to the residual stream, if that follows. The previous operation
        has added its rows to the sum."""
        builder, self._has_layer_sum = self._builder, True
        if isinstance(following, AddToResidual):
            assert following.norm is not None
            yield builder.norm_add(self._prefix + following.norm.name, following.scale, x=builder.layer_sum)

    def save_rows(self, _: SaveRows, __: LayerOperation | None) -> None:
        self._saved.append(self._rows)

    def restore_rows(self, _: RestoreRows, __: LayerOperation | None) -> None:
        self._rows = self._saved.pop()

    def experts(self, operation: Experts, following: LayerOperation | None) -> Iterator[Operation]:
        builder, prefix, count, chosen = self._builder, self._prefix, operation.gate_up.experts, operation.per_token
        hidden = builder.config.hidden_size
        unrounded = self._unrounded = builder.buffer("unrounded", hidden, "float32")
        routing = builder.buffer("routing", count, "float32")
        scores, experts, places = (builder.buffer(name, chosen, "int32") for name in ("scores", "experts", "places"))
        sources = builder.buffer("sources", chosen, "int32")
        starts = builder.buffer("group_starts", count + 1, "int32")
        grouped = builder.buffer("grouped", hidden, builder.row_dtype, chosen)
        inner = builder.weights.linear(prefix + operation.down.name).depth
        activated = builder.buffer("activated_groups", inner, builder.row_dtype, chosen)
        outputs = builder.buffer("grouped_outputs", hidden, "float32", chosen)

        router_norm = operation.router_norm
        # The router reads float32 rows, so the norm is computed again, without rounding.
        yield builder.norm(self._norm_name if router_norm is None else prefix + router_norm.name, unrounded)
        yield from builder.gemm(prefix + operation.router.name, unrounded, routing, "store")
        bias, scales = operation.choice_bias, operation.expert_scales
        route = {
            "logits": routing,
            "scores": scores,
            "experts": experts,
            "bias": None if bias is None else builder.weights.tensors[prefix + bias.name],
            "stride": routing.stride,
            "scale": operation.scale,
        }
        spec = RouteToExperts(
            count,
            chosen,
            operation.normalize,
            builder.rows_of,
            sigmoid=operation.sigmoid,
            biased=bias is not None,
            groups=operation.groups,
            kept_groups=operation.kept_groups,
            group_best=operation.group_best,
        )
        yield Operation(spec, route, builder.when)
        if scales is not None:
            factors = {"scores": scores, "experts": experts, "scales": builder.weights.tensors[prefix + scales.name]}
            yield Operation(ScaleChosen(chosen, builder.rows_of), factors, builder.when)
        group = {"experts": experts, "group_starts": starts, "places": places, "sources": sources}
        yield Operation(GroupByExpert(count, chosen, builder.rows_of), group, builder.when)
        gather = {"rows": self._rows, "sources": sources, "grouped": grouped, "stride": grouped.stride}
        scaled = operation.scaled_inputs
        gather |= {"scores": scores if scaled else None, "places": places if scaled else None}
        yield Operation(GatherGroups(chosen, builder.rows_of, scaled, scaled and builder.bf16), gather, builder.when)
        gate_up, clamped = prefix + operation.gate_up.name, operation.clamped
        epilogues = GATED_EPILOGUE if operation.gated else EPILOGUE
        epilogue = epilogues[operation.activation] if clamped is None else "gated_clamped"
        groups = ExpertGroups(starts, experts, places, chosen)
        yield from builder.gemm(gate_up, grouped, activated, epilogue, groups=groups, clamped=clamped)
        yield from builder.gemm(prefix + operation.down.name, activated, outputs, "store", groups=groups)
        assert isinstance(following, AddToResidual | AddToLayerSum)
        out, adds, after = self._to_residual(following)
        combine = {
            "found": outputs,
            "scores": scores,
            "places": places,
            "out": out,
            "width": hidden,
            "factor": following.scale if adds and isinstance(following, AddToResidual) else 1.0,
        }
        yield Operation(Combine(chosen, adds, builder.rows_of, not scaled), combine, builder.when)
        yield from after

    def add_to_residual(self, _: AddToResidual, __: LayerOperation | None) -> None:
        """Emit nothing, since the product before is fused with the sum."""
        self._rows = self._builder.hidden

    def _add_product(self, name: str, x: Buffer, operation: AddToResidual | AddToLayerSum) -> Iterator[Operation]:
        """Yield the kernels that multiply ``x`` by the matrix ``name`` and add the result to the residual stream or to
        the layer's sum."""
        out, adds, after = self._to_residual(operation)
        epilogue, factor = "add" if adds else "store", operation.scale if isinstance(operation, AddToResidual) else 1.0
        yield from self._builder.gemm(self._prefix + name, x, out, epilogue, factor=factor)
        yield from after

    def _add_weighed(self, name: str, x: Buffer, gate: LayerTensor, operation: AddToResidual) -> Iterator[Operation]:
        """Yield the kernels that multiply ``x`` by the matrix ``name``, multiply each row of the result by a sigmoid
        gate (the product of the router's input with ``gate``), and add it to the residual stream."""
        builder, hidden, rows = self._builder, self._builder.config.hidden_size, self._unrounded
        assert rows is not None
        ungated, gates = builder.buffer("ungated", hidden, "float32"), builder.buffer("row_gates", 1, "float32")
        yield from builder.gemm(self._prefix + name, x, ungated, "store")
        yield from builder.gemm(self._prefix + gate.name, rows, gates, "store")
        out, adds, after = self._to_residual(operation)
        arguments = {
            "gates": gates,
            "found": ungated,
            "out": out,
            "width": hidden,
            "factor": operation.scale if adds else 1.0,
        }
        yield Operation(WeighRows(adds, builder.rows_of), arguments, builder.when)
        yield from after

    def _to_residual(self, operation: AddToResidual | AddToLayerSum) -> tuple[Buffer, bool, list[Operation]]:
        """Return how to add a product to the residual stream or to the layer's sum: its output buffer, whether it adds
        to that buffer instead of overwriting it, and the operations after it (all-reduce and norm)."""
        builder, normed = self._builder, operation.norm is not None
        plain_sum = not normed and isinstance(operation, AddToLayerSum)
        out, after = builder.layer_output if normed else builder.layer_sum if plain_sum else builder.hidden, []
        adds = not normed and (self._has_layer_sum or not plain_sum)
        if builder.collective is not None:
            factor = operation.scale if adds and isinstance(operation, AddToResidual) else 1.0
            out, total = builder.collective.sum(out, builder.rows_of, builder.when, add=adds, factor=factor)
            after.append(total)
            adds = False
        if isinstance(operation, AddToLayerSum) and operation.norm is not None:
            name, total_rows = self._prefix + operation.norm.name, builder.layer_sum
            add = builder.norm_add(name, 1.0, hidden=total_rows) if self._has_layer_sum else None
            after.append(add or builder.norm(name, total_rows, builder.layer_output))
        elif isinstance(operation, AddToResidual) and operation.norm is not None:
            after.append(builder.norm_add(self._prefix + operation.norm.name, operation.scale))
        return out, adds, after

    def _find(self, kind: type[Kind]) -> Kind | None:
        """Return the layer's first operation of a kind, or None."""
        return next((operation for operation in self._layer if isinstance(operation, kind)), None)

    def _rotate_and_write(
        self, shape: AttentionShape, queries: Buffer, locations: dict[str, Any]
    ) -> Iterator[Operation]:
        """Yield the kernel that norms and rotates queries, from the buffer qkv, and writes KV into the pool."""
        builder, qkv, norm, rotation = self._builder, self._rows, self._find(NormHeads), self._find(Rotate)
        config, layout, heads = builder.config, builder.layout, builder.config.heads_of(self._index)
        norm_kind = "projection" if self._find(NormProjections) else ""
        if norm is not None:
            norm_kind = "layer_by_head" if norm.weight.by_head else "head"
        norm_last = norm is not None and rotation in self._layer[: self._layer.index(norm)]
        grows, squares = self._find(GrowQueries) is not None, None
        if norm_kind == "projection" and builder.collective is not None:
            squares = builder.buffer("squares", 2, "float32")
            yield from builder.collective.squares(qkv, squares, builder.rows_of, builder.when)
        spec = RotateWrite(
            shape.head_dim,
            config.num_heads,
            heads.kv_heads,
            layout.block_size,
            builder.bf16,
            rope=rotation is not None,
            qk_norm=norm_kind,
            codes=shape.codes,
            summed=squares is not None,
            norm_last=norm_last,
            grows=grows,
            norm_values=self._find(NormValues) is not None,
            queries_only=config.kv_source(self._index) != self._index,
        )
        cos, sin = (None, None) if rotation is None else builder.ropes[rotation.rope]
        norms = (builder.weights.tensors[self._prefix + name] if norm_kind else None for name in ("q_norm", "k_norm"))
        arguments = {
            "qkv": Columns(qkv, self._gate_bytes),
            "queries": queries,
            "cos": cos,
            "sin": sin,
            **dict(zip(("q_norm", "k_norm"), norms, strict=True)),
            "squares": squares,
            "growth": builder.query_scales if grows else None,
            **locations,
            "query_width": builder.model_heads * shape.head_dim,
            "key_width": layout.num_kv_heads * shape.head_dim,
            "eps": config.rms_norm_eps,
        }
        yield Operation(spec, arguments, builder.when)

    def _attention(
        self, operation: Attend, shape: AttentionShape, queries: Buffer, locations: dict[str, Any]
    ) -> Iterator[Operation]:
        """Yield the kernels of attention itself, from queries to the buffer attended."""
        builder, config, window = self._builder, self._builder.config, operation.window
        out, kv_heads = self._attended(builder), config.heads_of(self._index).kv_heads
        # [kv_heads, MAX_PARTIAL_ROWS], independent of the step's size.
        name = f"partials{builder.kind_of(self._index)}"
        partials = Buffer(name, shape.sum_bytes // 4, "float32", "steps", kv_heads * MAX_PARTIAL_ROWS)
        shared = {
            "out": out,
            "partials": partials,
            "partial_stride": MAX_PARTIAL_ROWS * shape.sum_bytes,
            "kv_heads": kv_heads,
            "window": window,
            "sinks": None if operation.sinks is None else builder.weights.tensors[self._prefix + operation.sinks.name],
        }
        arguments = {
            **shared,
            "queries": queries,
            "selected": None,
            **locations,
            "piece_bytes": shape.piece_bytes,
            "scale": config.attention_scale,
            "softcap": config.attention_softcap,
        }
        when = "num_samples" if self._last else builder.when
        plan = config.kv_head_counts.index(kv_heads)
        kind = window > 0, operation.sinks is not None, window > 0 and operation.chunked, plan
        sparse = arguments["selected"] is not None
        yield Operation(Attention(shape, config.attention_softcap > 0, *kind, sparse), arguments, when)
        yield Operation(AttentionMerge(shape, *kind), shared, step_field("num_merges", plan))

    def _continue_with(self, rows: BufferOf) -> Iterator[Operation]:
        """Continue with an operation's output; in the last layer, after the last mixer, only with its sampled rows.
        ``rows`` returns a builder's output buffer."""
        self._rows = all_rows = rows(self._builder)
        if not self._last or self._mixers:
            return
        self._rows = rows(self._sampled)
        yield self._gather(all_rows, self._rows)

    def _gather(self, rows: Buffer | None, sampled_rows: Buffer | None) -> Operation:
        """Return the kernel that gathers the sampled rows of hidden, and of ``rows`` into ``sampled_rows``; later
        kernels are built for sampled rows."""
        builder, self._builder = self._builder, self._sampled
        arguments = {
            "hidden": builder.hidden,
            "attended": rows,
            "sampled_hidden": self._sampled.hidden,
            "sampled_attended": sampled_rows,
        }
        return Operation(GatherRows(alone=rows is None), arguments, "num_samples")

    def _attended(self, builder: OperationBuilder) -> Buffer:
        """Return the buffer for the output of the layer's attention."""
        config = builder.config
        width = config.heads_of(self._index).head_dim if config.latents is None else config.value_dim
        return builder.layer_buffer("attended", config.num_heads * width, builder.row_dtype)


_EMIT: dict[type, Callable[[LayerEmitter, Any, LayerOperation | None], Iterator[Operation] | None]] = {
    Norm: LayerEmitter.norm,
    Multiply: LayerEmitter.multiply,
    Attend: LayerEmitter.attend,
    AttendLatents: LayerEmitter.attend_latents,
    ShortConvolution: LayerEmitter.short_convolution,
    DeltaRule: LayerEmitter.delta_rule,
    StateSpace: LayerEmitter.state_space,
    SelectiveScan: LayerEmitter.selective_scan,
    KeepGate: LayerEmitter.keep_gate,
    Gate: LayerEmitter.apply_gate,
    Mlp: LayerEmitter.mlp,
    SaveRows: LayerEmitter.save_rows,
    RestoreRows: LayerEmitter.restore_rows,
    Experts: LayerEmitter.experts,
    AddToLayerSum: LayerEmitter.add_to_layer_sum,
    ApplyTokenInputs: LayerEmitter.apply_token_inputs,
    ScaleResidual: LayerEmitter.scale_residual,
    AddToResidual: LayerEmitter.add_to_residual,
}


def attention_shape(config: ModelConfig, layout: KVLayout, dtype: str, layer: int) -> AttentionShape:
    """Return the parameters of a layer's attention kernels in a model of type ``dtype``."""
    heads = config.heads_of(layer)
    latents = 0 if config.latents is None else config.latents.kv_lora_rank
    codes = layout.dtype if layout.dtype in EIGHT_BIT_KV.values() else ""
    group = config.num_heads // heads.kv_heads
    index = 0 if config.latents is None or config.latents.index is None else config.latents.index.dim
    return AttentionShape(heads.head_dim - index, group, layout.block_size, dtype == "bfloat16", codes, latents, index)
