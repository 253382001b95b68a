"""Builder of the operations of a program of CPU kernels, and their buffers.

``hidden`` is float32; rows that matrices are multiplied by have the model's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pillion.engine.adapters.adapter_table import AdapterTable
from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.cpu.cpu_weights import CpuLinear, PackedMatrices
from pillion.engine.models.layer_operations import ClampedSwiglu
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.models.rope import CosSin
from pillion.engine.ranks.rank_collective import RankCollective
from pillion.errors import ConfigError
from pillion.kernels.cpu.adapters.low_rank import AdapterGemm, ExpertShrink, Shrink
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.products.gemm import GATED, Gemm
from pillion.kernels.cpu.products.tiles import TILE_COLUMNS
from pillion.kernels.cpu.quantized.dot_kinds import DOT_KINDS
from pillion.kernels.cpu.quantized.input_rows import CODE_BIAS, ROW_CONSTANTS_BYTES, CodeInputs, GatherInputs, SumInputs
from pillion.kernels.cpu.quantized.quantized_packing import INT8_DOTS
from pillion.kernels.cpu.rows.rows import NormAdd, NormRows
from pillion.kernels.cpu.runtime.program import Buffer, Columns, Operation


class ExpertGroups(NamedTuple):
    """Buffers that assign rows to experts: ``starts`` [experts + 1] of each expert's grouped rows, and for each of the
    ``chosen`` experts of a row the expert in ``experts`` and the grouped row in ``places``."""

    starts: Buffer
    experts: Buffer
    places: Buffer
    chosen: int


class MatrixRows(NamedTuple):
    """The input rows of a product: ``x``, with ``sums`` of their inputs, valid after ``operations``."""

    x: Buffer
    sums: Buffer | None = None
    operations: Sequence[Operation] = ()


@dataclass(frozen=True, slots=True)
class OperationBuilder:
    """Builder of a model's operations.

    ``rows_of``: "tokens", "samples" after the last layer's attention, or "logits" for the head, which rows of vectors
    skip. ``dtype``: the model's type, also of the KV of ``layout`` unless it is 8-bit. ``adapters``: the slots, in a
    program for steps with adapters. ``config``: the shape of the process's own layers; ``layout`` is that of all KV,
    and ``model_heads`` counts all query heads. ``collective``: None for a program of the whole model. ``growth``: the
    factors of queries that grow with their position. ``wanted``: these operations run only in a step with sampled rows.
    ``keeps_states``: a step needs the rows of all layers, sampled or not. ``rounds_codes``: the attribute of the
    instruction set."""

    config: ModelConfig
    weights: PackedMatrices
    layout: KVLayout
    dtype: str
    ropes: tuple[CosSin, ...]
    shard: ModelShard
    model_heads: int
    rows_of: str = "tokens"
    adapters: AdapterTable | None = None
    collective: RankCollective | None = None
    growth: torch.Tensor | None = None
    wanted: bool = False
    keeps_states: bool = False
    rounds_codes: bool = False

    def with_collective(self) -> OperationBuilder:
        """Return a builder that all-reduces the partial sums of ranks, unless ``shard`` is the whole model."""
        if self.shard.whole:
            return self
        return replace(self, collective=RankCollective(self.shard, self.config, self.layout.num_kv_heads))

    @property
    def bf16(self) -> bool:
        """True if the model's type is bfloat16, not float32."""
        return self.dtype == "bfloat16"

    @property
    def row_dtype(self) -> str:
        """The numpy type of rows that matrices are multiplied by; uint16 for bfloat16."""
        return "uint16" if self.bf16 else "float32"

    @property
    def when(self) -> str:
        """The condition under which these operations run: without sampled rows nothing runs after the last layer's
        KV."""
        if self.rows_of == "logits":
            return "num_logits"
        return "num_samples" if self.rows_of == "samples" or self.wanted else ""

    @property
    def last_kept_layer(self) -> int:
        """The last layer whose output a step without sampled rows needs."""
        return self.config.num_layers - 1 if self.keeps_states else self.config.last_kept_layer

    def buffer(self, name: str, width: int, dtype: str, each: int = 1) -> Buffer:
        """Return the buffer ``name``, with ``each`` rows per row of ``rows_of``."""
        return Buffer(f"{self.rows_of}.{name}", -(-width // 32) * 32, dtype, self.rows_of, each)

    def wide(self, name: str, width: int, dtype: str) -> Buffer:
        """Return the buffer ``name`` of rows whose width depends on the layer, if layers differ."""
        return self.buffer(name if self.layout.even else f"{name}{width}", width, dtype)

    def kind_of(self, layer: int) -> int:
        """Return the index of a layer's kind of KV heads among those of the model."""
        return self.config.all_heads.index(self.config.heads_of(layer))

    @property
    def hidden(self) -> Buffer:
        return self.buffer("hidden", self.config.hidden_size, "float32")

    @property
    def normed(self) -> Buffer:
        return self.buffer("normed", self.config.hidden_size, self.row_dtype)

    @property
    def found(self) -> Buffer:
        """The output of attention or MLP, if a norm runs before it is added to ``hidden``."""
        return self.buffer("found", self.config.hidden_size, "float32")

    @property
    def added_up(self) -> Buffer:
        """The sum of rows that are normed again before they are added to ``hidden``."""
        return self.buffer("added_up", self.config.hidden_size, "float32")

    @property
    def token_inputs(self) -> Buffer:
        """The inputs of all layers per token, beside the residual stream."""
        inputs = self.config.token_inputs
        assert inputs is not None
        return Buffer("tokens.token_inputs", self.config.num_layers * inputs.width, "float32")

    def norm(
        self,
        name: str,
        out: Buffer | None = None,
        x: Buffer | Columns | None = None,
        width: int = 0,
        eps: float = 0.0,
        *,
        centered: bool = False,
    ) -> Operation:
        """Return hidden, or ``x``, -> normed, or ``out``; only a cast if the model has no norm ``name``. ``width`` and
        ``eps``: those of the norm, if they differ from the residual stream's. ``centered``: a LayerNorm, regardless of
        the model's norms."""
        weight, bias = self.weights.tensors.get(name), self.weights.tensors.get(f"{name}.bias")
        out, x = out or self.normed, x or self.hidden
        values = {
            "x": x,
            "weight": weight,
            "bias": bias,
            "out": out,
            "width": width or self.config.hidden_size,
            "eps": eps or self.config.rms_norm_eps,
        }
        kind = "layer" if centered or self.config.norm == "layer" else "rms"
        spec = NormRows("none" if weight is None else kind, out.dtype == "uint16", self.rows_of, bias is not None)
        return Operation(spec, values, self.when)

    def state(self, index: int) -> Buffer:
        """Return the buffer for the inputs of the layer ``index``, in steps that store them."""
        return self.buffer(f"state{index}", self.config.hidden_size, self.row_dtype)

    def gemm(
        self,
        name: str,
        x: Buffer,
        out: Buffer,
        epilogue: str,
        *,
        groups: ExpertGroups | None = None,
        factor: float = 1.0,
        clamped: ClampedSwiglu | None = None,
        bends: tuple[float, float] = (0.0, 0.0),
        steps: tuple[int, int] = (0, 0),
    ) -> Iterator[Operation]:
        """Yield the product of ``x`` with the matrix ``name``, with those of experts, whose rows are in ``groups``, or
        with those of heads, whose columns of ``x`` and ``out`` are ``steps`` bytes apart. The epilogue "add" multiplies
        by ``factor``, "gated_clamped" is ``clamped``, and "act_xielu" has the factors ``bends``. Raises ConfigError if
        the matrix does not fit ``x`` or ``out``."""
        linear = self.weights.linear(name)
        columns = linear.pairs * (16 if epilogue in GATED else 32)
        if linear.depth > x.width or columns > out.width:
            raise ConfigError(f"{name} has {linear.depth} inputs and {columns} outputs, which do not fit this model")
        spec_type: type[Gemm] = Gemm
        added: dict[str, Any] = {}
        if self.adapters is not None and name in self.adapters.slots:
            spec_type = AdapterGemm
            heads = linear.num_matrices if steps[0] else 0
            before, added = self._shrink(self.adapters, name, x, groups, heads, steps[0])
            yield before
        rows = "fp32" if x.dtype == "float32" else "bf16"
        ready = MatrixRows(x)
        if linear.order is not None or linear.meets_codes or linear.offsets:
            ready = _rows_for_codes(self, linear, x)
            yield from ready.operations
        x, sums = ready.x, ready.sums
        spec = spec_type(
            linear.kind,
            rows,
            epilogue,
            f"num_{self.rows_of}",
            bias=linear.bias is not None,
            grouped=groups is not None,
            offsets=linear.offsets,
            x_step=steps[0],
            out_step=steps[1],
        )
        values = {
            "x": x,
            "weights": linear.data,
            "input_sums": sums,
            "bias": linear.bias,
            "out": out,
            "group_starts": None if groups is None else groups.starts,
            "depth": linear.depth,
            "pairs": linear.pairs,
            "num_groups": linear.num_matrices,
            "group_bytes": linear.matrix_bytes,
            "inputs": linear.group,
            "factor": factor,
            "alpha": 0.0 if clamped is None else clamped.alpha,
            "limit": 0.0 if clamped is None else clamped.limit,
            "above": bends[0],
            "below": bends[1],
            **added,
        }
        yield Operation(spec, values, self.when)

    def _shrink(
        self, adapters: AdapterTable, name: str, x: Buffer, groups: ExpertGroups | None, heads: int, x_step: int
    ) -> tuple[Operation, dict[str, Any]]:
        """Return the operation shrunk = A x for the rows with an adapter, before the product of ``x`` with the matrix
        ``name``, or with those of experts or of ``heads``, and the additional arguments of that product."""
        kind, each = "fp32" if x.dtype == "float32" else "bf16", 1 if groups is None else groups.chosen
        width = adapters.form.width(experts=groups is not None, heads=heads)
        shrunk = self.buffer(f"shrunk_{kind}_{width}_{each}", width, x.dtype, each)
        own = None if groups is None else self.buffer("place_slots", 1, "int32", each)
        both = {"slots": adapters.slots[name], "shrunk": shrunk, "adapted": adapters.step.words}
        values = {**both, "x": x, "depth": adapters.form.depth(name)}
        spec: KernelSpec = Shrink(kind, self.rows_of, heads, x_step)
        if groups is not None:
            values |= {"experts": groups.experts, "places": groups.places, "place_slots": own}
            values |= {"most_tiles": -(-width // TILE_COLUMNS)}
            spec = ExpertShrink(kind, self.rows_of, each)
        return Operation(spec, values, self.when), {**both, "place_slots": own}

    def norm_add(
        self, name: str, factor: float, *, found: Buffer | None = None, hidden: Buffer | None = None
    ) -> Operation:
        """Compute hidden += ``factor`` times the norm ``name`` of ``found``; both buffers can be replaced."""
        found, hidden = found or self.found, hidden or self.hidden
        values = {
            "found": found,
            "weight": self.weights.tensors[name],
            "hidden": hidden,
            "width": self.config.hidden_size,
            "eps": self.config.rms_norm_eps,
            "factor": factor,
        }
        return Operation(NormAdd(self.rows_of), values, self.when)


def _rows_for_codes(builder: OperationBuilder, linear: CpuLinear, x: Buffer) -> MatrixRows:
    """Build the operations on a matrix's inputs: to reorder them, to quantize them, and to sum them up by groups."""
    operations, sums = [], None
    if linear.order is not None:
        ordered = builder.buffer(f"ordered{linear.depth}", linear.depth, x.dtype)
        values: dict[str, Any] = {"x": x, "order": linear.order, "out": ordered, "depth": linear.depth}
        operations.append(Operation(GatherInputs(builder.bf16, builder.rows_of), values, builder.when))
        x = ordered
    if linear.meets_codes:
        operation = _coded(builder, linear, x)
        x, sums = operation.values["out"], operation.values["constants"]
        operations.append(operation)
    # Offsets are part of each rounded weight, or are multiplied by the sums of inputs.
    if linear.offsets and sums is None and not (builder.rounds_codes and x.dtype == "uint16"):
        groups = -(-linear.depth // linear.group)
        sums = builder.buffer(f"input_sums{groups}x{x.each}", groups, "float32", x.each)
        values = {"x": x, "sums": sums, "depth": linear.depth, "inputs": linear.group}
        operations.append(Operation(SumInputs(builder.bf16, builder.rows_of, x.each), values, builder.when))
    return MatrixRows(x, sums, operations)


def _coded(builder: OperationBuilder, linear: CpuLinear, x: Buffer) -> Operation:
    """Build the operation that quantizes ``x`` for an integer product with the matrix."""
    depth, inputs = linear.depth, linear.group or linear.depth
    groups = -(-depth // inputs)
    out = replace(builder.buffer(f"codes{depth}x{x.each}", depth, x.dtype, x.each), dtype="int8")
    constants = builder.buffer(f"row_constants{groups}x{x.each}", groups * ROW_CONSTANTS_BYTES // 4, "float32", x.each)
    values = {"x": x, "out": out, "constants": constants, "depth": depth, "inputs": inputs}
    bias = CODE_BIAS if linear.kind == INT8_DOTS else DOT_KINDS[linear.kind].bias
    spec = CodeInputs(x.dtype != "float32", builder.rows_of, x.each, bias)
    return Operation(spec, values, builder.when)
