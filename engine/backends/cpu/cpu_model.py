"""A model as a program of CPU kernels: the operations of a step, layer after layer, and their buffers.

The program computes the same as :mod:`pillion.engine.models.decoder`, from the same description of the layers
(:mod:`pillion.engine.backends.cpu.cpu_layer`). From the last layer's attention on, it computes only the sampled rows.

Steps with adapters have a separate program, in which each adapted product is two operations:

    x --A of each row's adapter--> shrunk        x --W, then B of each row's adapter over shrunk--> out

With tensor parallelism, each rank runs this program over its own heads, inner values and tokens. Rows to be added to
``hidden`` are then partial sums, which are all-reduced (:mod:`pillion.engine.ranks.rank_collective`):

    x --W--> partial (shared memory) --all-reduce--> hidden, or layer_output before a norm
    tokens --embedding--> partial --all-reduce--> hidden        hidden --head--> logits (shared memory)

The program of a pipeline stage begins and ends with the buffer ``hidden``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pillion.engine.backends.backend import KVLayout, kv_layout
from pillion.engine.backends.cpu.cpu_layer import MAX_PARTIAL_ROWS, LayerEmitter
from pillion.engine.backends.cpu.cpu_operations import OperationBuilder
from pillion.engine.backends.cpu.cpu_weights import PackedMatrices, load_cpu_weights
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import DTYPES as MODEL_DTYPES
from pillion.engine.checkpoints.weights import embedding_scale, rounded
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.model_config import ModelConfig, TokenInputs
from pillion.engine.models.model_shard import ModelShard, whole_model
from pillion.engine.models.rope import CosSin, growth_table, rope_tables
from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.kernels.cpu.attention.cpu_attention import row_counts
from pillion.kernels.cpu.attention.cpu_attention_plan import CpuAttentionPlanner
from pillion.kernels.cpu.attention.kv_layout import EIGHT_BIT_VERSION, LAYOUT_VERSION
from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.rows.rows import AddPositions, Embed, GroupMaxima, LargestTokens, SoftCapScale
from pillion.kernels.cpu.rows.token_inputs import MixTokenInputs
from pillion.kernels.cpu.runtime.compiler import CompiledKernels, compile_kernels
from pillion.kernels.cpu.runtime.program import Buffer, Operation
from pillion.kernels.state_pieces import STATE_LAYOUT_VERSION


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The operations of a step, and the buffers that callers read.

    Attributes:
        hidden: the residual stream.
        logits: logits of sampled rows.
        ropes: rotary tables.
        states: by layer, its inputs, for the layers whose inputs are stored.
        normed: sampled rows after the last norm.
        largest: group maxima of the logits, and the token of each row's largest logit; None if not computed.
    """

    operations: tuple[Operation, ...]
    hidden: Buffer
    logits: Buffer
    ropes: tuple[CosSin, ...]
    states: Mapping[int, Buffer] = field(default_factory=dict)
    normed: Buffer | None = None
    largest: tuple[Buffer, Buffer] | None = None


@dataclass(frozen=True, slots=True)
class CpuModel:
    """A model, or a process's shard of it, with its kernels; independent of threads and KV pool.

    Attributes:
        config, layout: of the whole model.
        dtype: type of activations; ``layout`` has that of KV.
        checked: True if kernels check every memory access.
        code_folder: cache of machine code.
    """

    config: ModelConfig
    shard: ModelShard
    isa: Isa
    layout: KVLayout
    dtype: str
    max_model_len: int
    weights: PackedMatrices
    plan: ModelPlan
    kernels: CompiledKernels
    checked: bool
    code_folder: Path

    def builder(self, ropes: tuple[CosSin, ...] = ()) -> OperationBuilder:
        """Return a builder for another plan of the model. ``ropes``: rotary tables to reuse."""
        return model_builder(
            self.config,
            self.weights,
            self.layout,
            self.dtype,
            self.max_model_len,
            self.shard,
            ropes,
            rounds_codes=self.isa.rounds_codes,
        )


def load_cpu_model(
    prepared: PreparedModel,
    block_size: int,
    isa: Isa,
    *,
    kv_cache_dtype: str = "auto",
    progress: Progress = lambda line: None,
    checked: bool | None = None,
    shard: ModelShard | None = None,
) -> CpuModel:
    """Map the packed weights and load the kernels; pack and compile what is not in the models' cache.

    ``shard``: the process's share of the model; None for all of it. ``checked``: kernels check every memory access;
    None reads PILLION_CHECK_KERNELS. The caller has checked that the kernels support the model
    (``pillion.engine.backends.cpu.cpu_loading``). Raises ConfigError for weights that do not fit the config.
    """
    checked = os.environ.get("PILLION_CHECK_KERNELS") == "1" if checked is None else checked
    cache, config = ModelCache(), load_config(prepared.folder)
    version = LAYOUT_VERSION if kv_cache_dtype == "auto" else EIGHT_BIT_VERSION
    if config.linear is not None:
        version += f"/{STATE_LAYOUT_VERSION}"
    layout = kv_layout(prepared, block_size, version, kv_cache_dtype)
    shard = shard or whole_model(config)
    weights = load_cpu_weights(prepared, config, progress, cache, shard)
    rounds = isa.rounds_codes
    length = prepared.max_model_len
    plan = plan_model(model_builder(config, weights, layout, prepared.dtype, length, shard, rounds_codes=rounds))
    specs = [operation.spec for operation in plan.operations]
    folder = cache.make("kernels")
    kernels = compile_kernels(specs, isa, checked=checked, cache_folder=folder, progress=progress)
    return CpuModel(
        config, shard, isa, layout, prepared.dtype, prepared.max_model_len, weights, plan, kernels, checked, folder
    )


def compile_operations(operations: Sequence[Operation], model: CpuModel, progress: Progress) -> CompiledKernels:
    """Return the kernels of ``operations``, compiled with the options of ``model``."""
    specs = [operation.spec for operation in operations]
    return compile_kernels(specs, model.isa, checked=model.checked, cache_folder=model.code_folder, progress=progress)


def model_builder(
    config: ModelConfig,
    weights: PackedMatrices,
    layout: KVLayout,
    dtype: str,
    max_model_len: int,
    shard: ModelShard,
    ropes: tuple[CosSin, ...] = (),
    *,
    rounds_codes: bool = False,
) -> OperationBuilder:
    """Return a builder of the operations of ``shard`` of a model. ``ropes``: rotary tables to reuse; ``rounds_codes``:
    that of the instruction set."""
    ropes = ropes or rope_tables(config, max_model_len)
    local, heads = shard.local(config), config.num_heads
    query_scales = growth_table(config, max_model_len)
    return OperationBuilder(
        local, weights, layout, dtype, ropes, shard, heads, query_scales=query_scales, rounds_codes=rounds_codes
    ).with_collective()


def plan_model(builder: OperationBuilder, aux_hidden_state_layers: Sequence[int] = ()) -> ModelPlan:
    """Return the plan of a step, which stores the inputs of ``aux_hidden_state_layers`` for an EAGLE head."""
    config, weights, shard, collective = builder.config, builder.weights, builder.shard, builder.collective
    builder = replace(builder, keeps_states=bool(aux_hidden_state_layers))
    sampled = replace(builder, rows_of="samples")
    own_layers, layers = shard.own_layers(config), layers_of(config)
    operations = [*_embed(builder)] if own_layers.start == 0 else []
    for index in own_layers:
        if index in aux_hidden_state_layers:
            operations.append(builder.norm("", builder.state(index)))
        last = index == config.num_layers - 1
        for_layer = replace(builder, for_samples=index > builder.last_kept_layer)
        operations += LayerEmitter(for_layer, sampled, index, last=last).emit(layers[index])
    width = weights.linear("lm_head").pairs * 32 if weights.has("lm_head") else config.vocab_size
    # Contiguous rows, so that the sampler can edit them in place.
    for_logits = replace(builder, rows_of="logits")
    logits = replace(for_logits.buffer("logits", width, "float32"), dense=True)
    if collective is not None:
        logits = collective.logits(config, logits)
    largest = None
    if own_layers.stop == config.num_layers:
        operations += _head(sampled, for_logits, logits)
        if collective is None and weights.has("lm_head") and config.vocab_size % GROUP_TOKENS == 0:
            maxima = for_logits.buffer("maxima", config.vocab_size // GROUP_TOKENS, "float32")
            largest = maxima, replace(for_logits.buffer("largest", 1, "int32"), dense=True)
            operations += _largest(config.vocab_size, logits, *largest)
    if collective is not None:
        operations.append(collective.end())
    states = {index: builder.state(index) for index in aux_hidden_state_layers}
    return ModelPlan(tuple(operations), builder.hidden, logits, builder.ropes, states, sampled.normed, largest)


def _head(sampled: OperationBuilder, for_logits: OperationBuilder, logits: Buffer) -> Iterator[Operation]:
    """Yield the kernels from the sampled residual stream to logits; only the norm in a model without an LM head."""
    config = sampled.config
    yield sampled.norm("final_norm")
    if not sampled.weights.has("lm_head"):
        return
    yield from for_logits.gemm("lm_head", sampled.normed, logits, "store")
    if config.logit_divisor != 1.0 or config.logit_softcap:
        values = {
            "logits": logits,
            "width": len(sampled.shard.vocabulary(config.vocab_size)),
            "stride": logits.stride,
            "divisor": config.logit_divisor,
            "cap": config.logit_softcap,
        }
        yield Operation(SoftCapScale(config.logit_softcap > 0), values, "num_logits")


def _largest(width: int, logits: Buffer, maxima: Buffer, tokens: Buffer) -> Iterator[Operation]:
    """Yield the kernels from logits to their group maxima and each row's likeliest token."""
    values = {"logits": logits, "maxima": maxima, "width": width, "stride": logits.stride}
    yield Operation(GroupMaxima(GROUP_TOKENS), values, "num_logits")
    yield Operation(LargestTokens(GROUP_TOKENS), {**values, "tokens": tokens}, "num_logits")


def _embed(builder: OperationBuilder) -> Iterator[Operation]:
    """Yield the kernels from token ids to the residual stream, and to per-layer token inputs if any."""
    config, tokens = builder.config, builder.shard.vocabulary(builder.config.vocab_size)
    out, total = builder.hidden, None
    if builder.collective is not None:
        out, total = builder.collective.sum(builder.hidden, builder.rows_of, builder.when)
    values = {
        "table": builder.weights.tensors["embedding"],
        "hidden": out,
        "width": config.hidden_size,
        "first": tokens.start,
        "tokens": len(tokens),
        "scale": embedding_scale(config, MODEL_DTYPES[builder.dtype]),
    }
    yield Operation(Embed(builder.bf16, share=total is not None), values)
    if total is not None:
        yield total
    if config.token_inputs is not None:
        yield from _token_inputs(builder, config.token_inputs)
    if config.learned_positions:
        table, hidden = builder.weights.tensors["positions"], builder.hidden
        values = {
            "table": table,
            "hidden": hidden,
            "width": config.hidden_size,
            "table_stride": table.stride(0) * table.element_size(),
        }
        yield Operation(AddPositions(), values)


def _token_inputs(builder: OperationBuilder, inputs: TokenInputs) -> Iterator[Operation]:
    """Yield the kernels from token ids and their embeddings to the per-layer token inputs of all layers."""
    config, rows, tensors = builder.config, builder.token_inputs, builder.weights.tensors
    own = {
        "table": tensors["token_inputs.embedding"],
        "hidden": rows,
        "width": rows.width,
        "first": 0,
        "tokens": inputs.vocab_size,
        "scale": rounded(inputs.width**0.5, MODEL_DTYPES[builder.dtype]),
    }
    yield Operation(Embed(builder.bf16), own)
    products = builder.buffer("token_input_products", rows.width, "float32")
    yield builder.norm("")
    yield from builder.gemm("token_inputs.projection", builder.normed, products, "store")
    values = {
        "rows": rows,
        "products": products,
        "weight": tensors["token_inputs.norm"],
        "width": inputs.width,
        "layers": config.num_layers,
        # The model scales the projection by hidden_size**-0.5 before this norm; scaling eps instead is equivalent.
        "eps": config.rms_norm_eps * config.hidden_size,
    }
    yield Operation(MixTokenInputs(), values)


def attention_planners(config: ModelConfig, dtype: str, isa: Isa, threads: int) -> tuple[CpuAttentionPlanner, ...]:
    """Return the planners that divide a step's attention into work items: one per distinct number of KV heads."""
    planners = []
    for count in config.kv_head_counts:
        layer_heads = config.layer_heads or (config.heads_of(0),) * config.num_layers
        layers = (layer for layer, heads in enumerate(layer_heads) if heads is not None and heads.kv_heads == count)
        windows = [config.sliding_windows[layer] for layer in layers]
        group, window = config.num_heads // count, max(windows) if all(windows) else 0
        counts = row_counts(isa, group, dtype == "bfloat16")
        planners.append(CpuAttentionPlanner(group, counts, count, threads, MAX_PARTIAL_ROWS, window))
    return tuple(planners)
