"""The CPU kernels of one layer: an emitter for each operation of the layer's description.

    hidden --norm--> normed --qkv--> qkv --rotate, write--> queries, pool --attend--> attended --o--> hidden
    hidden --norm--> normed --gate, up--> activated --down--> hidden              (or experts; or a norm after each)

Experts replace the second line:

    normed --router--> routing --route--> scores, experts --group--> grouped --gate, up--> activated --down--> found
    hidden += each row's sum over its experts      (through a norm where the model has one after its experts)

The result of an MLP beside the experts may have a gate:

    activated --down--> ungated, router's rows --gate--> row_gates: hidden += sigmoid(row_gates) * ungated

Some operations of the description share a kernel: norms of queries and keys run in the kernel that rotates and writes
them, and a sum into the residual stream runs in the product before it.
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
# Rows of partial sums per KV head, which limits the number of context splits per step.
MAX_PARTIAL_ROWS = 4096


def projections(builder: OperationBuilder, index: int) -> Buffer:
    """Return the buffer for the queries, keys and values of a layer."""
    return builder.wide("qkv", builder.weights.linear(f"layers.{index}.qkv").pairs * 32, "float32")


class LayerEmitter:
    """Emitter of the kernels of the layer ``index``. After the attention of the ``last`` layer, ``sampled`` builds
    them: only sampled rows are computed."""

    def __init__(self, builder: OperationBuilder, sampled: OperationBuilder, index: int, *, last: bool) -> None:
        self._builder, self._sampled, self._index, self._last = builder, sampled, index, last
        self._prefix = f"layers.{index}."
        self._layer: Layer = ()
        self._rows, self._norm_name = builder.hidden, ""
        self._kept: list[Buffer] = []
        self._adds_up = False
        # Rows that begin with gates of attention's results, and the bytes of these gates.
        self._gates, self._gate_bytes = builder.hidden, 0
        # Remaining operations that mix tokens, each of which writes state for later steps.
        self._mixers = 0
        self._unrounded: Buffer | None = None

    def emit(self, layer: Layer, rows: Buffer | None = None) -> Iterator[Operation]:
        """Yield the kernels of the operations; ``rows`` is the input of the first."""
        self._layer, self._rows = layer, rows or self._rows
        self._mixers = sum(isinstance(operation, Mixer) for operation in layer)
        if self._last and not self._mixers:
            yield self._gather(None, None)
            self._rows = self._builder.hidden
        for operation, following in zip_longest(layer, layer[1:]):
            # Operations that run inside the kernels of attention.
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
        """Yield the kernels of attention, from the buffer qkv to attended; they also write the layer's KV into the
        pool."""
        builder, layout = self._builder, self._builder.layout
        shape = attention_shape(builder.config, layout, builder.dtype, self._index)
        place = layout.place(builder.config.kv_source(self._index))
        # The pool has the KV of all heads; the process reads and writes only its own.
        first = builder.shard.kv_heads_of(place.kv_heads).start
        places = {
            "head_stride": HeadStride(shape.group * shape.head_dim * shape.element_bytes),
            "layer_offset": place.offset + first * place.piece_bytes,
            "slot_bytes": layout.block_bytes,
            "value_offset": place.kv_heads * place.piece_bytes,
        }
        queries = builder.wide("queries", builder.config.num_heads * shape.head_dim, builder.row_dtype)
        yield from self._rotate_and_write(shape, queries, places)
        self._after_mixer()
        yield from self._attention(operation, shape, queries, places)
        yield from self._continue_with(self._attended)

    def short_convolution(self, operation: ShortConvolution, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernel of a convolution, which also writes its last inputs into the pool."""
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
        """Return the number of the layer's heads with a matrix in this process."""
        return len(self._builder.shard.state_heads)

    def keep_gate(self, operation: KeepGate, _: LayerOperation | None) -> None:
        """Record that the rows before attention begin with gates of its results."""
        self._gates, self._gate_bytes = self._rows, operation.values.size * 4

    def apply_gate(self, _: Gate, __: LayerOperation | None) -> Iterator[Operation]:
        builder, heads = self._builder, self._builder.config.heads_of(self._index)
        width, gates = builder.config.num_heads * heads.head_dim, self._gate_bytes // 4
        values = {"x": self._rows, "gates": self._gates, "width": width}
        yield Operation(GateRows(builder.bf16, builder.rows_of, width // gates), values, builder.when)

    def _after_mixer(self) -> None:
        """Record that one operation has written its state for later steps. After the last one of all layers, a step
        without sampled rows needs nothing more."""
        self._mixers -= 1
        if not self._mixers and self._index == self._builder.last_kept_layer:
            self._builder = replace(self._builder, wanted=True)

    def attend_latents(self, operation: AttendLatents, _: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels of attention over latents, from normed rows to the results of all heads."""
        builder, latents, prefix, x = self._builder, self._builder.config.latents, self._prefix, self._rows
        assert latents is not None
        shape = attention_shape(builder.config, builder.layout, builder.dtype, self._index)
        heads = builder.config.num_heads
        if operation.query_down is not None and operation.query_norm is not None:
            few, width = builder.buffer("few", latents.q_lora_rank, "float32"), latents.q_lora_rank
            yield from builder.gemm(prefix + operation.query_down.name, x, few, "store")
            x = builder.buffer("few_normed", width, builder.row_dtype)
            yield builder.norm(prefix + operation.query_norm.name, x, few, width, operation.query_norm.eps)
        projected = builder.buffer("projected", heads * latents.head_dim, builder.row_dtype)
        yield from builder.gemm(prefix + operation.query_up.name, x, projected, "act_none")
        rows = builder.buffer("latents", builder.config.head_dim, "float32")
        yield from builder.gemm(prefix + operation.down.name, self._rows, rows, "store")
        yield builder.norm(prefix + operation.norm.name, rows, rows, latents.kv_lora_rank, operation.norm.eps)
        absorbed, ups = builder.buffer("absorbed", heads * latents.kv_lora_rank, "float32"), prefix + operation.up.name
        steps = latents.head_dim * shape.element_bytes, latents.kv_lora_rank * 4
        yield from builder.gemm(f"{ups}.keys", projected, absorbed, "store", steps=steps)
        queries = builder.buffer("queries", heads * shape.head_dim, builder.row_dtype)
        cos, sin = (None, None) if operation.rope is None else builder.ropes[operation.rope]
        places: dict[str, Any] = {
            "slot_bytes": builder.layout.block_bytes,
            "layer_offset": builder.layout.place(self._index).offset,
        }
        values = {
            "absorbed": absorbed,
            "projected": projected,
            "latents": rows,
            "queries": queries,
            "cos": cos,
            "sin": sin,
            "growth": builder.growth if operation.grows else None,
            **places,
        }
        index_key = None
        if operation.index_key is not None and operation.index_norm is not None:
            index_key, name = builder.buffer("index_key", shape.index, "float32"), prefix + operation.index_norm.name
            yield from builder.gemm(prefix + operation.index_key.name, self._rows, index_key, "store")
            eps = operation.index_norm.eps
            yield builder.norm(name, index_key, index_key, shape.index, eps, centered=True)
        values["index_key"] = index_key
        spec = WriteLatents(
            *(latents.kv_lora_rank, latents.qk_rope_head_dim, latents.qk_nope_head_dim),
            *(heads, shape.block_size, builder.bf16),
            codes=shape.codes,
            grows=operation.grows,
            rotated=operation.rope is not None,
            index=shape.index,
            indexed=index_key is not None,
        )
        yield Operation(spec, values)
        selected = None
        if operation.index is not None:
            selected = builder.buffer("selected", len(builder.ropes[0][0]) // (2 * LANES) + 1, "int32")
            yield from self._select(operation, shape, x, selected)
        places |= {"head_stride": HeadStride(shape.group * shape.head_dim * shape.element_bytes), "value_offset": 0}
        self._mixers -= 1
        yield from self._attention(Attend(0), shape, queries, {**places, "selected": selected})
        yield from self._continue_with(self._attended)
        steps = latents.kv_lora_rank * shape.element_bytes, latents.v_head_dim * shape.element_bytes
        found = self._builder.buffer("found_values", heads * latents.v_head_dim, builder.row_dtype)
        yield from self._builder.gemm(f"{ups}.values", self._rows, found, "act_none", steps=steps)
        self._rows = found

    def _select(
        self, operation: AttendLatents, shape: AttentionShape, few: Buffer, selected: Buffer
    ) -> Iterator[Operation]:
        """Yield the kernels from the input of queries to the bits of the selected tokens; none in a layer that reuses
        those of the layer before."""
        builder, index, latents, prefix = self._builder, operation.index, self._builder.config.latents, self._prefix
        assert index is not None
        assert latents is not None
        if operation.index_queries is None or operation.index_weights is None:
            return
        queries = builder.buffer("index_queries", index.heads * index.dim, builder.row_dtype)
        yield from builder.gemm(prefix + operation.index_queries.name, few, queries, "act_none")
        weights = builder.buffer("index_weights", index.heads, "float32")
        rows = builder.buffer("unrounded", builder.config.hidden_size, "float32")
        yield builder.norm(self._norm_name, rows)
        yield from builder.gemm(prefix + operation.index_weights.name, rows, weights, "store")
        cos, sin = (None, None) if operation.rope is None else builder.ropes[operation.rope]
        values = {
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
        yield Operation(spec, values, "num_samples" if self._last else builder.when)

    def mlp(self, operation: Mlp, following: LayerOperation | None) -> Iterator[Operation]:
        builder, down = self._builder, operation.down.name
        inner = builder.weights.linear(self._prefix + down).depth
        activated = builder.buffer(f"activated{inner}", inner, builder.row_dtype)
        epilogue = (GATED_EPILOGUE if operation.gated else EPILOGUE)[operation.activation]
        bends = self._bends(operation.bends)
        yield from builder.gemm(self._prefix + operation.gate_up.name, self._rows, activated, epilogue, bends=bends)
        assert isinstance(following, AddToResidual | AddToLayerSum)
        if operation.row_gate is None:
            yield from self._add_product(down, activated, following)
        else:
            assert isinstance(following, AddToResidual)
            yield from self._add_weighed(down, activated, operation.row_gate, following)

    def _bends(self, tensor: LayerTensor | None) -> tuple[float, float]:
        """Return the factors of xIELU above and below 0."""
        if tensor is None:
            return 0.0, 0.0
        above, below = np.logaddexp(0.0, self._builder.weights.tensors[self._prefix + tensor.name].tolist())
        return float(above), float(below) + XIELU_SLOPE

    def apply_token_inputs(self, operation: ApplyTokenInputs, following: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernels that add the token's input of this layer to the residual stream. Every process computes
        all of it, so there is no all-reduce."""
        builder, inputs = self._builder, self._builder.config.token_inputs
        assert inputs is not None
        gate, every = builder.buffer("input_gate", inputs.width, builder.row_dtype), builder.token_inputs
        yield from builder.gemm(self._prefix + operation.gate.name, self._rows, gate, EPILOGUE[operation.activation])
        values = {"gate": gate, "inputs": every, "width": inputs.width, "layer_bytes": self._index * inputs.width * 4}
        yield Operation(WeighByTokenInputs(builder.bf16, builder.rows_of), values, builder.when)
        yield from builder.gemm(self._prefix + operation.projection.name, gate, builder.found, "store")
        assert isinstance(following, AddToResidual)
        assert following.norm is not None
        yield builder.norm_add(self._prefix + following.norm.name, following.scale)

    def scale_residual(self, operation: ScaleResidual, _: LayerOperation | None) -> Iterator[Operation]:
        builder = self._builder
        values = {
            "hidden": builder.hidden,
            "width": builder.config.hidden_size,
            "factor": float(builder.weights.tensors[self._prefix + operation.factor.name][0]),
        }
        yield Operation(ScaleRows(builder.rows_of), values, builder.when)

    def add_to_layer_sum(self, _: AddToLayerSum, following: LayerOperation | None) -> Iterator[Operation]:
        """Yield the kernel that adds the sum to the residual stream; the operation before has added its rows to it."""
        builder, self._adds_up = self._builder, True
        if isinstance(following, AddToResidual):
            assert following.norm is not None
            yield builder.norm_add(self._prefix + following.norm.name, following.scale, found=builder.added_up)

    def keep(self, _: SaveRows, __: LayerOperation | None) -> None:
        self._kept.append(self._rows)

    def again(self, _: RestoreRows, __: LayerOperation | None) -> None:
        self._rows = self._kept.pop()

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
        found = builder.buffer("found_groups", hidden, "float32", chosen)

        router_norm = operation.router_norm
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
            operation.sigmoid,
            bias is not None,
            *(operation.groups, operation.kept_groups, operation.group_best),
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
        yield from builder.gemm(prefix + operation.down.name, activated, found, "store", groups=groups)
        assert isinstance(following, AddToResidual | AddToLayerSum)
        out, adds, after = self._to_residual(following)
        combine = {
            "found": found,
            "scores": scores,
            "places": places,
            "out": out,
            "width": hidden,
            "factor": following.scale if adds and isinstance(following, AddToResidual) else 1.0,
        }
        yield Operation(Combine(chosen, adds, builder.rows_of, not scaled), combine, builder.when)
        yield from after

    def add(self, _: AddToResidual, __: LayerOperation | None) -> None:
        """Emit nothing: the product before has added its rows to the residual stream."""
        self._rows = self._builder.hidden

    def _add_product(self, name: str, x: Buffer, operation: AddToResidual | AddToLayerSum) -> Iterator[Operation]:
        """Yield the kernels that multiply ``x`` by the matrix ``name`` and add the result to the residual stream or to
        the layer's sum."""
        out, adds, after = self._to_residual(operation)
        epilogue, factor = "add" if adds else "store", operation.scale if isinstance(operation, AddToResidual) else 1.0
        yield from self._builder.gemm(self._prefix + name, x, out, epilogue, factor=factor)
        yield from after

    def _add_weighed(self, name: str, x: Buffer, gate: LayerTensor, operation: AddToResidual) -> Iterator[Operation]:
        """Yield the kernels that multiply ``x`` by the matrix ``name``, weigh each row of the result by the sigmoid of
        the router's row times ``gate``, and add that to the residual stream."""
        builder, hidden, rows = self._builder, self._builder.config.hidden_size, self._unrounded
        assert rows is not None
        found, gates = builder.buffer("ungated", hidden, "float32"), builder.buffer("row_gates", 1, "float32")
        yield from builder.gemm(self._prefix + name, x, found, "store")
        yield from builder.gemm(self._prefix + gate.name, rows, gates, "store")
        out, adds, after = self._to_residual(operation)
        values = {
            "gates": gates,
            "found": found,
            "out": out,
            "width": hidden,
            "factor": operation.scale if adds else 1.0,
        }
        yield Operation(WeighRows(adds, builder.rows_of), values, builder.when)
        yield from after

    def _to_residual(self, operation: AddToResidual | AddToLayerSum) -> tuple[Buffer, bool, list[Operation]]:
        """Return the buffer for rows to be added to the residual stream or to the layer's sum; whether the product adds
        them there itself; and the operations after it: the all-reduce, and a norm."""
        builder, normed = self._builder, operation.norm is not None
        plain_sum = not normed and isinstance(operation, AddToLayerSum)
        out, after = builder.found if normed else builder.added_up if plain_sum else builder.hidden, []
        adds = not normed and (self._adds_up or not plain_sum)
        if builder.collective is not None:
            factor = operation.scale if adds and isinstance(operation, AddToResidual) else 1.0
            out, total = builder.collective.sum(out, builder.rows_of, builder.when, add=adds, factor=factor)
            after.append(total)
            adds = False
        if isinstance(operation, AddToLayerSum) and operation.norm is not None:
            name, total_rows = self._prefix + operation.norm.name, builder.added_up
            more = builder.norm_add(name, 1.0, hidden=total_rows) if self._adds_up else None
            after.append(more or builder.norm(name, total_rows, builder.found))
        elif isinstance(operation, AddToResidual) and operation.norm is not None:
            after.append(builder.norm_add(self._prefix + operation.norm.name, operation.scale))
        return out, adds, after

    def _one(self, kind: type[Kind]) -> Kind | None:
        """Return the layer's operation of a kind that occurs at most once."""
        return next((one for one in self._layer if isinstance(one, kind)), None)

    def _rotate_and_write(self, shape: AttentionShape, queries: Buffer, places: dict[str, Any]) -> Iterator[Operation]:
        """Yield the kernels from the buffer qkv to queries, and to KV in the pool."""
        builder, qkv, norm, rotation = self._builder, self._rows, self._one(NormHeads), self._one(Rotate)
        config, layout, heads = builder.config, builder.layout, builder.config.heads_of(self._index)
        kind = "projection" if self._one(NormProjections) else ""
        if norm is not None:
            kind = "layer_by_head" if norm.weight.by_head else "head"
        norm_last = norm is not None and rotation in self._layer[: self._layer.index(norm)]
        grows, squares = self._one(GrowQueries) is not None, None
        if kind == "projection" and builder.collective is not None:
            squares = builder.buffer("squares", 2, "float32")
            yield from builder.collective.squares(qkv, squares, builder.rows_of, builder.when)
        spec = RotateWrite(
            shape.head_dim,
            config.num_heads,
            heads.kv_heads,
            layout.block_size,
            builder.bf16,
            rotation is not None,
            kind,
            shape.codes,
            squares is not None,
            norm_last,
            grows,
            self._one(NormValues) is not None,
            config.kv_source(self._index) != self._index,
        )
        cos, sin = (None, None) if rotation is None else builder.ropes[rotation.rope]
        norms = (builder.weights.tensors[self._prefix + name] if kind else None for name in ("q_norm", "k_norm"))
        values = {
            "qkv": Columns(qkv, self._gate_bytes),
            "queries": queries,
            "cos": cos,
            "sin": sin,
            **dict(zip(("q_norm", "k_norm"), norms, strict=True)),
            "squares": squares,
            "growth": builder.growth if grows else None,
            **places,
            "query_width": builder.model_heads * shape.head_dim,
            "key_width": layout.num_kv_heads * shape.head_dim,
            "eps": config.rms_norm_eps,
        }
        yield Operation(spec, values, builder.when)

    def _attention(
        self, operation: Attend, shape: AttentionShape, queries: Buffer, places: dict[str, Any]
    ) -> Iterator[Operation]:
        """Yield the kernels from queries to attended rows."""
        builder, config, window = self._builder, self._builder.config, operation.window
        out, kv_heads = self._attended(builder), config.heads_of(self._index).kv_heads
        # Partial sums are [kv_heads][MAX_PARTIAL_ROWS], of one size for all steps.
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
        values = {
            **shared,
            "queries": queries,
            "selected": None,
            **places,
            "piece_bytes": shape.piece_bytes,
            "scale": config.attention_scale,
            "softcap": config.attention_softcap,
        }
        when = "num_samples" if self._last else builder.when
        plan = config.kv_head_counts.index(kv_heads)
        kind = window > 0, operation.sinks is not None, window > 0 and operation.chunked, plan
        sparse = values["selected"] is not None
        yield Operation(Attention(shape, config.attention_softcap > 0, *kind, sparse), values, when)
        yield Operation(AttentionMerge(shape, *kind), shared, step_field("num_merges", plan))

    def _continue_with(self, rows: BufferOf) -> Iterator[Operation]:
        """Continue with the output ``rows`` of an operation; in the last layer, after the last operation that mixes
        tokens, gather the sampled ones of them and of hidden."""
        self._rows = made = rows(self._builder)
        if not self._last or self._mixers:
            return
        self._rows = rows(self._sampled)
        yield self._gather(made, self._rows)

    def _gather(self, rows: Buffer | None, chosen: Buffer | None) -> Operation:
        """Gather the sampled rows of hidden, and of ``rows`` into ``chosen``; later operations see only these."""
        builder, self._builder = self._builder, self._sampled
        values = {
            "hidden": builder.hidden,
            "attended": rows,
            "sampled_hidden": self._sampled.hidden,
            "sampled_attended": chosen,
        }
        return Operation(GatherRows(alone=rows is None), values, "num_samples")

    def _attended(self, builder: OperationBuilder) -> Buffer:
        """Return the buffer for the results of the layer's attention."""
        config = builder.config
        width = config.heads_of(self._index).head_dim if config.latents is None else config.value_dim
        return builder.wide("attended", config.num_heads * width, builder.row_dtype)


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
    SaveRows: LayerEmitter.keep,
    RestoreRows: LayerEmitter.again,
    Experts: LayerEmitter.experts,
    AddToLayerSum: LayerEmitter.add_to_layer_sum,
    ApplyTokenInputs: LayerEmitter.apply_token_inputs,
    ScaleResidual: LayerEmitter.scale_residual,
    AddToResidual: LayerEmitter.add,
}


def attention_shape(config: ModelConfig, layout: KVLayout, dtype: str, layer: int) -> AttentionShape:
    """Return the parameters of a layer's attention kernels in a model of type ``dtype``."""
    heads = config.heads_of(layer)
    latents = 0 if config.latents is None else config.latents.kv_lora_rank
    codes = layout.dtype if layout.dtype in EIGHT_BIT_KV.values() else ""
    group = config.num_heads // heads.kv_heads
    index = 0 if config.latents is None or config.latents.index is None else config.latents.index.dim
    return AttentionShape(heads.head_dim - index, group, layout.block_size, dtype == "bfloat16", codes, latents, index)
