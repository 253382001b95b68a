"""A model as a program of CPU kernels: the operations of a step, layer after layer, and the buffers they run over.

The program computes the same as :mod:`pillion.engine.models.decoder`. A layer:

    hidden --norm--> normed --qkv--> qkv --rotate, write--> queries, pool --attend--> attended --o--> hidden
    hidden --norm--> normed --gate, up--> activated --down--> hidden              (or experts; or a norm behind each)

A layer with experts replaces its second line:

    normed --router--> routing --route--> scores, experts --group--> grouped --gate, up--> activated --down--> found
    hidden += each row's sum over its experts      (through a norm where the model has one behind its experts)

``hidden`` is float32; rows that products read have the model's type. From the last layer's attention on, the program
computes the sampled rows alone.

Steps with adapters have a program of their own, in which each product that adapters may change is two operations:

    x --A of each row's adapter--> shrunk        x --W, then B of each row's adapter over shrunk--> out

Where the model is shared among ranks, each runs this program over its own heads, inner values and tokens. What would be
added to ``hidden`` is a partial sum then, which the ranks add up together (:mod:`pillion.kernels.cpu.rows.rank_sums`):

    x --W--> partial (shared memory) --sum over ranks--> hidden, or found where a norm is behind it
    tokens --embedding--> partial --sum over ranks--> hidden        hidden --head--> logits (shared memory)

The last operation of their steps is a meeting: then all KV is written, and all logits are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pillion.engine.backends.backend import EIGHT_BIT_KV, KVLayout
from pillion.engine.backends.cpu.cpu_adapters import AdapterTable
from pillion.engine.backends.cpu.cpu_weights import CpuLinear, PackedMatrices
from pillion.engine.checkpoints.weights import DTYPES as MODEL_DTYPES
from pillion.engine.checkpoints.weights import embedding_scale
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rank_split import RankSplit
from pillion.engine.models.rope import CosSin, rope_tables
from pillion.engine.ranks.rank_memory import TURNS, logit_row_bytes, partial_row_bytes
from pillion.errors import ConfigError
from pillion.kernels.cpu.attention.attention_rows import AttentionShape
from pillion.kernels.cpu.attention.cpu_attention import Attention, AttentionMerge, row_counts
from pillion.kernels.cpu.attention.cpu_attention_plan import CpuAttentionPlanner
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.products.gemm import GATED, Gemm
from pillion.kernels.cpu.products.input_rows import ROW_CONSTANTS_BYTES, CodeInputs, GatherInputs, SumInputs
from pillion.kernels.cpu.products.low_rank import AdapterGemm, Shrink
from pillion.kernels.cpu.products.moe_kernels import Combine, GatherGroups, GroupByExpert, Route
from pillion.kernels.cpu.products.packing import INT8_DOTS
from pillion.kernels.cpu.rows.rank_sums import MeetRanks, SumRanks
from pillion.kernels.cpu.rows.rotate import ProjectionSquares, RotateWrite
from pillion.kernels.cpu.rows.rows import Embed, GatherRows, NormAdd, NormRows, SoftCapScale
from pillion.kernels.cpu.runtime.program import Buffer, HeadStride, Operation

# Epilogues of gated products, by ``ModelConfig.activation``.
GATED_EPILOGUE = {"silu": "gated_silu", "gelu_tanh": "gated_gelu"}
# Buffers in the memory that ranks share: a rank's own partials and those of all ranks, by turn, and the logits.
PARTIAL, PARTIALS, LOGITS = "rank.partial", "rank.partials", "rank.logits"
# Rows of partial sums that a KV head has room for: a step cuts no more contexts than fit.
MAX_PARTIAL_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The operations of a step, the buffer for the sampled rows' logits, the tables of the rotary embeddings, and the
    layers whose inputs a step keeps, with the buffer of each."""

    operations: tuple[Operation, ...]
    logits: Buffer
    ropes: tuple[CosSin, ...]
    states: Mapping[int, Buffer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OperationBuilder:
    """Builds a model's operations. ``rows_of`` is "tokens", and "samples" behind the last layer's attention. ``dtype``
    is the model's type, which the KV of ``layout`` has, too, unless it has 8 bits. ``adapters``: in a program for steps
    with adapters, their places. ``config`` is the shape of the rank's own layers; ``layout`` is that of all KV, and
    ``model_heads`` are the query heads of all ranks. ``phases`` counts the waits for other ranks."""

    config: ModelConfig
    weights: PackedMatrices
    layout: KVLayout
    dtype: str
    ropes: tuple[CosSin, ...]
    split: RankSplit
    model_heads: int
    rows_of: str = "tokens"
    adapters: AdapterTable | None = None
    phases: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def bf16(self) -> bool:
        """Whether the model's type is bfloat16, not float32."""
        return self.dtype == "bfloat16"

    @property
    def row_dtype(self) -> str:
        """The numpy type of rows that products read; uint16 holds bfloat16."""
        return "uint16" if self.bf16 else "float32"

    @property
    def when(self) -> str:
        """The condition of these operations: without sampled rows nothing runs behind the last layer's KV."""
        return "num_samples" if self.rows_of == "samples" else ""

    def buffer(self, name: str, width: int, dtype: str, each: int = 1) -> Buffer:
        """The buffer ``name``, with ``each`` rows for each row of ``rows_of``."""
        return Buffer(f"{self.rows_of}.{name}", -(-width // 32) * 32, dtype, self.rows_of, each)

    @property
    def hidden(self) -> Buffer:
        return self.buffer("hidden", self.config.hidden_size, "float32")

    @property
    def normed(self) -> Buffer:
        return self.buffer("normed", self.config.hidden_size, self.row_dtype)

    @property
    def found(self) -> Buffer:
        """The output of attention or MLP, where a norm runs before it is added to ``hidden``."""
        return self.buffer("found", self.config.hidden_size, "float32")

    @property
    def attended(self) -> Buffer:
        return self.buffer("attended", self.config.num_heads * self.config.head_dim, self.row_dtype)

    def norm(self, name: str, out: Buffer | None = None, x: Buffer | None = None) -> Operation:
        """hidden, or ``x``, -> normed, or ``out``; changes only the type where the model has no norm ``name``."""
        weight = self.weights.tensors.get(name)
        out, x = out or self.normed, x or self.hidden
        values = {
            "x": x,
            "weight": weight,
            "bias": None,
            "out": out,
            "width": self.config.hidden_size,
            "x_stride": x.stride,
            "out_stride": out.stride,
            "eps": self.config.rms_norm_eps,
        }
        spec = NormRows("none" if weight is None else "rms", out.dtype == "uint16", self.rows_of)
        return Operation(spec, values, self.when)

    def state(self, index: int) -> Buffer:
        """The inputs of the layer ``index``, where a step keeps them."""
        return self.buffer(f"state{index}", self.config.hidden_size, self.row_dtype)

    def gemm(
        self, name: str, x: Buffer, out: Buffer, epilogue: str, *, group_starts: Buffer | None = None
    ) -> Iterator[Operation]:
        """``x`` times the matrix ``name``, or those of experts, whose rows are in ``group_starts``. Raises ConfigError
        where the matrix does not fit ``x`` or ``out``."""
        linear = self.weights.linear(name)
        columns = linear.pairs * (16 if epilogue in GATED else 32)
        if linear.depth > x.width or columns > out.width:
            raise ConfigError(f"{name} has {linear.depth} inputs and {columns} outputs, which do not fit this model")
        spec_type: type[Gemm] = Gemm
        added: dict[str, Any] = {}
        if self.adapters is not None and name in self.adapters.places:
            shrink = self._shrink(self.adapters, name, x)
            yield shrink
            spec_type, added = AdapterGemm, {key: shrink.values[key] for key in ("places", "shrunk", "shrunk_stride")}
        if linear.order is not None:
            ordered = self.buffer(f"ordered{linear.depth}", linear.depth, x.dtype)
            values: dict[str, Any] = {"x": x, "order": linear.order, "out": ordered, "depth": linear.depth}
            values |= {"x_stride": x.stride, "out_stride": ordered.stride}
            yield Operation(GatherInputs(self.bf16, self.rows_of), values, self.when)
            x = ordered
        sums, rows = None, "fp32" if x.dtype == "float32" else "bf16"
        if linear.row_codes is not None:
            operation = self.coded(linear, x)
            x, sums = operation.values["out"], operation.values["constants"]
            yield operation
        if linear.offsets and sums is None:
            groups = -(-linear.depth // linear.group)
            sums = self.buffer(f"input_sums{groups}x{x.each}", groups, "float32", x.each)
            values = {"x": x, "sums": sums, "depth": linear.depth, "inputs": linear.group}
            values |= {"x_stride": x.stride, "sums_stride": sums.stride}
            yield Operation(SumInputs(self.bf16, self.rows_of, x.each), values, self.when)
        spec = spec_type(
            linear.kind,
            rows,
            epilogue,
            f"num_{self.rows_of}",
            bias=linear.bias is not None,
            grouped=group_starts is not None,
            offsets=linear.offsets,
            zeros=linear.kind == INT8_DOTS and linear.row_codes is not None and linear.row_codes.has_zeros,
        )
        values = {
            "x": x,
            "weights": linear.data,
            "input_sums": sums,
            "bias": linear.bias,
            "out": out,
            "group_starts": group_starts,
            "x_stride": x.stride,
            "depth": linear.depth,
            "pairs": linear.pairs,
            "out_stride": out.stride,
            "num_groups": linear.num_matrices,
            "group_bytes": linear.matrix_bytes,
            "inputs": linear.group,
            "input_sums_stride": 0 if sums is None else sums.stride,
            "factor": self.config.residual_scale,
            **added,
        }
        yield Operation(spec, values, self.when)

    def coded(self, linear: CpuLinear, x: Buffer) -> Operation:
        """Rounds ``x`` for the matrix: to codes for a product in integers, else to the numbers that they stand for."""
        row_codes, depth, as_codes = linear.row_codes, linear.depth, linear.kind == INT8_DOTS
        assert row_codes is not None
        out = self.buffer(f"{'codes' if as_codes else 'rounded'}{depth}x{x.each}", depth, x.dtype, x.each)
        constants = None
        if as_codes:
            out = replace(out, dtype="int8")
            constants = self.buffer(f"row_constants{x.each}", ROW_CONSTANTS_BYTES // 4, "float32", x.each)
        values = {
            "x": x,
            "out": out,
            "constants": constants,
            "depth": depth,
            "x_stride": x.stride,
            "out_stride": out.stride,
            "constants_stride": 0 if constants is None else constants.stride,
            "scale": row_codes.scale,
            "zero": row_codes.zero,
        }
        spec = CodeInputs(row_codes.scheme, x.dtype != "float32", self.rows_of, x.each, as_codes)
        return Operation(spec, values, self.when)

    def _shrink(self, adapters: AdapterTable, name: str, x: Buffer) -> Operation:
        """shrunk = A x for the rows with an adapter."""
        shrunk = self.buffer("shrunk", adapters.form.width, self.row_dtype)
        values: dict[str, Any] = {"x": x, "places": adapters.places[name], "shrunk": shrunk}
        values |= {"x_stride": x.stride, "depth": adapters.form.depth(name), "shrunk_stride": shrunk.stride}
        return Operation(Shrink("bf16" if self.bf16 else "fp32", self.rows_of), values, self.when)

    def add(self, name: str, x: Buffer, post_norm: str) -> Iterator[Operation]:
        """hidden += the product of ``x`` with the matrix ``name``, normed first where the model has ``post_norm``."""
        normed = self.weights.has(post_norm)
        out = self.found if normed else self.hidden
        if self.split.whole:
            yield from self.gemm(name, x, out, "store" if normed else "add")
        else:
            partial, total = self.sum_ranks(out, add=not normed)
            yield from self.gemm(name, x, partial, "store")
            yield total
        if normed:
            yield self.norm_add(post_norm)

    def sum_ranks(self, out: Buffer, *, add: bool) -> tuple[Buffer, Operation]:
        """The buffer for this rank's partial rows, and the sum over all ranks that ends in ``out``."""
        number = next(self.phases)
        turn, stride = number % TURNS, partial_row_bytes(self.config)
        width = -(-self.config.hidden_size // 32) * 32
        partial = Buffer(f"{PARTIAL}{turn}", width, "float32", self.rows_of, row_bytes=stride)
        partials = replace(partial, name=f"{PARTIALS}{turn}")
        values = {
            "partials": partials,
            "out": out,
            "rank": self.split.rank,
            "number": number,
            "width": min(width, out.width),
            "row_stride": stride,
            "out_stride": out.stride,
            "factor": self.config.residual_scale if add else 1.0,
        }
        return partial, Operation(SumRanks(self.split.size, add, self.rows_of), values, self.when)

    def meet_ranks(self) -> Operation:
        """The end of a step."""
        return Operation(MeetRanks(self.split.size), {"rank": self.split.rank, "number": next(self.phases)})

    def norm_add(self, name: str) -> Operation:
        """hidden += the norm ``name`` of found."""
        values = {
            "found": self.found,
            "weight": self.weights.tensors[name],
            "hidden": self.hidden,
            "width": self.config.hidden_size,
            "found_stride": self.found.stride,
            "hidden_stride": self.hidden.stride,
            "eps": self.config.rms_norm_eps,
            "factor": self.config.residual_scale,
        }
        return Operation(NormAdd(self.rows_of), values, self.when)


def plan_model(
    config: ModelConfig,
    weights: PackedMatrices,
    layout: KVLayout,
    dtype: str,
    max_model_len: int,
    split: RankSplit,
    state_layers: Sequence[int] = (),
) -> ModelPlan:
    """A rank's program of the model of ``config``, which keeps the inputs of ``state_layers``."""
    ropes = rope_tables(config, max_model_len)
    builder = OperationBuilder(split.local(config), weights, layout, dtype, ropes, split, config.num_heads)
    return _plan(builder, state_layers)


def plan_with_adapters(
    plan: ModelPlan,
    config: ModelConfig,
    weights: PackedMatrices,
    layout: KVLayout,
    dtype: str,
    split: RankSplit,
    adapters: AdapterTable,
) -> ModelPlan:
    """The model of ``plan`` for steps with adapters."""
    local, heads = split.local(config), config.num_heads
    builder = OperationBuilder(local, weights, layout, dtype, plan.ropes, split, heads, adapters=adapters)
    return _plan(builder, tuple(plan.states))


def _plan(builder: OperationBuilder, state_layers: Sequence[int]) -> ModelPlan:
    config, weights, split = builder.config, builder.weights, builder.split
    sampled = replace(builder, rows_of="samples")
    operations = [*_embed(builder)]
    for index in range(config.num_layers):
        last = index == config.num_layers - 1
        if index in state_layers:
            operations.append(builder.norm("", builder.state(index)))
        operations += _attention(builder, index, "num_samples" if last else "")
        if last:
            operations.append(gather(builder, sampled))
        operations += behind_attention(sampled if last else builder, index)
    operations.append(sampled.norm("final_norm"))
    head = weights.linear("lm_head")
    # The sampler edits logits in place where rows follow one another without padding.
    logits = replace(sampled.buffer("logits", head.pairs * 32, "float32"), dense=True)
    if not split.whole:
        logits = replace(logits, name=LOGITS, row_bytes=logit_row_bytes(config))
    operations += sampled.gemm("lm_head", sampled.normed, logits, "store")
    if config.logit_divisor != 1.0 or config.logit_softcap:
        values = {
            "logits": logits,
            "width": len(split.vocabulary(config.vocab_size)),
            "stride": logits.stride,
            "divisor": config.logit_divisor,
            "cap": config.logit_softcap,
        }
        operations.append(Operation(SoftCapScale(config.logit_softcap > 0), values, "num_samples"))
    if not split.whole:
        operations.append(sampled.meet_ranks())
    states = {index: builder.state(index) for index in state_layers}
    return ModelPlan(tuple(operations), logits, builder.ropes, states)


def _embed(builder: OperationBuilder) -> Iterator[Operation]:
    config, tokens = builder.config, builder.split.vocabulary(builder.config.vocab_size)
    out, total = builder.hidden, None
    if not builder.split.whole:
        out, total = builder.sum_ranks(builder.hidden, add=False)
    values = {
        "table": builder.weights.tensors["embedding"],
        "hidden": out,
        "width": config.hidden_size,
        "hidden_stride": out.stride,
        "first": tokens.start,
        "tokens": len(tokens),
        "scale": embedding_scale(config, MODEL_DTYPES[builder.dtype]),
    }
    yield Operation(Embed(builder.bf16, share=total is not None), values)
    if total is not None:
        yield total


def _attention(builder: OperationBuilder, index: int, when: str) -> Iterator[Operation]:
    """The operations from hidden to attended, which also write the layer's KV into the pool."""
    prefix = f"layers.{index}."
    qkv = projections(builder, index)
    yield builder.norm(prefix + "attention_norm")
    yield from builder.gemm(prefix + "qkv", builder.normed, qkv, "store")
    yield from attend(builder, index, qkv, when)


def projections(builder: OperationBuilder, index: int) -> Buffer:
    """The buffer for the queries, keys and values of a layer."""
    return builder.buffer("qkv", builder.weights.linear(f"layers.{index}.qkv").pairs * 32, "float32")


def attend(builder: OperationBuilder, index: int, qkv: Buffer, when: str) -> Iterator[Operation]:
    """The operations from qkv to attended, which also write the layer's KV into the pool."""
    config, weights, layout = builder.config, builder.weights, builder.layout
    prefix, size = f"layers.{index}.", 2 if builder.bf16 else 4
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    shape = attention_shape(config, layout, builder.dtype)
    # The pool has the KV of all heads; the rank reads and writes that of its own.
    layer_offset = (index * 2 * layout.num_kv_heads + builder.split.kv_heads.start) * shape.piece_bytes
    queries = builder.buffer("queries", heads * head_dim, builder.row_dtype)
    head_stride = HeadStride(heads // kv_heads * head_dim * size)
    rope = config.layer_ropes[index]
    squares = None
    if config.qk_norm == "projection" and not builder.split.whole:
        squares = builder.buffer("squares", 2, "float32")
        yield from _projection_squares(builder, qkv, squares)
    spec = RotateWrite(
        head_dim,
        heads,
        kv_heads,
        layout.block_size,
        builder.bf16,
        rope is not None,
        config.qk_norm,
        shape.codes,
        squares is not None,
    )
    yield Operation(
        spec,
        {
            "qkv": qkv,
            "queries": queries,
            "cos": None if rope is None else builder.ropes[rope][0],
            "sin": None if rope is None else builder.ropes[rope][1],
            "q_norm": weights.tensors[prefix + "q_norm"] if config.qk_norm else None,
            "k_norm": weights.tensors[prefix + "k_norm"] if config.qk_norm else None,
            "squares": squares,
            "qkv_stride": qkv.stride,
            "head_stride": head_stride,
            "slot_bytes": layout.block_bytes,
            "layer_offset": layer_offset,
            "value_offset": layout.num_kv_heads * shape.piece_bytes,
            "squares_stride": 0 if squares is None else squares.stride,
            "query_width": builder.model_heads * head_dim,
            "key_width": layout.num_kv_heads * head_dim,
            "eps": config.rms_norm_eps,
        },
    )
    window = config.sliding_windows[index]
    yield from attention_operations(builder, shape, queries, head_stride, layer_offset, window, when)


def _projection_squares(builder: OperationBuilder, qkv: Buffer, out: Buffer) -> Iterator[Operation]:
    """The operations from qkv to the squares of all ranks' queries and keys."""
    config, split = builder.config, builder.split
    partial, total = builder.sum_ranks(out, add=False)
    # Several ranks may have the same KV heads: the first of them counts their keys.
    sharers = max(1, split.size // builder.layout.num_kv_heads)
    spec = ProjectionSquares(config.head_dim, config.num_heads, config.num_kv_heads, split.rank % sharers == 0)
    yield Operation(spec, {"qkv": qkv, "out": partial, "qkv_stride": qkv.stride, "out_stride": partial.stride})
    yield total


def attention_operations(
    builder: OperationBuilder,
    shape: AttentionShape,
    queries: Buffer,
    head_stride: HeadStride,
    layer_offset: int,
    window: int,
    when: str,
) -> Iterator[Operation]:
    """The operations from queries to attended."""
    config, layout = builder.config, builder.layout
    # Partial sums [kv_heads][MAX_PARTIAL_ROWS], of one size for all steps.
    partials = Buffer("partials", shape.sum_bytes // 4, "float32", "steps", config.num_kv_heads * MAX_PARTIAL_ROWS)
    shared = {
        "out": builder.attended,
        "partials": partials,
        "out_stride": builder.attended.stride,
        "partial_stride": MAX_PARTIAL_ROWS * shape.sum_bytes,
        "kv_heads": config.num_kv_heads,
        "window": window,
    }
    attend = {
        **shared,
        "queries": queries,
        "head_stride": head_stride,
        "layer_offset": layer_offset,
        "slot_bytes": layout.block_bytes,
        "piece_bytes": shape.piece_bytes,
        "value_offset": layout.num_kv_heads * shape.piece_bytes,
        "scale": config.attention_scale,
        "softcap": config.attention_softcap,
    }
    yield Operation(Attention(shape, config.attention_softcap > 0, window > 0), attend, when)
    yield Operation(AttentionMerge(shape, window > 0), shared, "num_merges")


def attention_shape(config: ModelConfig, layout: KVLayout, dtype: str) -> AttentionShape:
    """The parameters of the attention kernels of a model of type ``dtype``."""
    group = config.num_heads // config.num_kv_heads
    codes = layout.dtype if layout.dtype in EIGHT_BIT_KV.values() else ""
    return AttentionShape(config.head_dim, group, layout.block_size, dtype == "bfloat16", codes)


def attention_planner(config: ModelConfig, isa: Isa, threads: int) -> CpuAttentionPlanner:
    """The planner that cuts a step's attention into items."""
    group = config.num_heads // config.num_kv_heads
    windows = config.sliding_windows
    return CpuAttentionPlanner(
        group,
        row_counts(isa, group),
        config.num_kv_heads,
        threads,
        MAX_PARTIAL_ROWS,
        max(windows) if all(windows) else 0,
    )


def gather(builder: OperationBuilder, sampled: OperationBuilder) -> Operation:
    """The sampled rows of hidden and attended."""
    values = {
        "hidden": builder.hidden,
        "attended": builder.attended,
        "sampled_hidden": sampled.hidden,
        "sampled_attended": sampled.attended,
        "hidden_stride": builder.hidden.stride,
        "attended_stride": builder.attended.stride,
    }
    return Operation(GatherRows(), values, "num_samples")


def behind_attention(builder: OperationBuilder, index: int) -> Iterator[Operation]:
    """The operations from attended to the next layer's hidden."""
    config, prefix = builder.config, f"layers.{index}."
    yield from builder.add(prefix + "o", builder.attended, prefix + "attention_post_norm")
    yield builder.norm(prefix + "mlp_norm")
    if builder.weights.has(prefix + "router"):
        yield from _experts(builder, prefix)
        return
    inner = builder.weights.linear(prefix + "down").depth
    activated = builder.buffer("activated", inner, builder.row_dtype)
    yield from builder.gemm(prefix + "gate_up", builder.normed, activated, GATED_EPILOGUE[config.activation])
    yield from builder.add(prefix + "down", activated, prefix + "mlp_post_norm")


def _experts(builder: OperationBuilder, prefix: str) -> Iterator[Operation]:
    """The operations of the experts of the layer ``prefix``, from hidden to hidden."""
    config, moe = builder.config, builder.config.moe
    assert moe is not None
    chosen = moe.experts_per_token
    unrounded = builder.buffer("unrounded", config.hidden_size, "float32")
    routing = builder.buffer("routing", moe.num_experts, "float32")
    scores, experts, places = (builder.buffer(name, chosen, "int32") for name in ("scores", "experts", "places"))
    sources = builder.buffer("sources", chosen, "int32")
    starts = builder.buffer("group_starts", moe.num_experts + 1, "int32")
    grouped = builder.buffer("grouped", config.hidden_size, builder.row_dtype, chosen)
    inner = builder.weights.linear(prefix + "experts.down").depth
    activated = builder.buffer("activated_groups", inner, builder.row_dtype, chosen)
    found = builder.buffer("found_groups", config.hidden_size, "float32", chosen)
    post_norm = prefix + "mlp_post_norm"
    out = builder.found if builder.weights.has(post_norm) else builder.hidden

    yield builder.norm(prefix + "mlp_norm", unrounded)
    yield from builder.gemm(prefix + "router", unrounded, routing, "store")
    route = {"logits": routing, "scores": scores, "experts": experts, "stride": routing.stride}
    yield Operation(Route(moe.num_experts, chosen, moe.normalize, builder.rows_of), route, builder.when)
    group = {"experts": experts, "group_starts": starts, "places": places, "sources": sources}
    yield Operation(GroupByExpert(moe.num_experts, chosen, builder.rows_of), group, builder.when)
    gather = {"rows": builder.normed, "sources": sources, "grouped": grouped, "stride": grouped.stride}
    yield Operation(GatherGroups(chosen, builder.rows_of), gather, builder.when)
    epilogue = GATED_EPILOGUE[config.activation]
    yield from builder.gemm(prefix + "experts.gate_up", grouped, activated, epilogue, group_starts=starts)
    yield from builder.gemm(prefix + "experts.down", activated, found, "store", group_starts=starts)
    adds, total = out == builder.hidden, None
    if not builder.split.whole:
        out, total = builder.sum_ranks(out, add=adds)
        adds = False
    combine = {
        "found": found,
        "scores": scores,
        "places": places,
        "out": out,
        "width": config.hidden_size,
        "found_stride": found.stride,
        "out_stride": out.stride,
        "factor": config.residual_scale if adds else 1.0,
    }
    yield Operation(Combine(chosen, adds, builder.rows_of), combine, builder.when)
    if total is not None:
        yield total
    if builder.weights.has(post_norm):
        yield builder.norm_add(post_norm)
