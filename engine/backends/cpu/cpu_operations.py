"""Builder of the operations of a program of CPU kernels, and their buffers.

The residual stream ``hidden`` is float32; inputs of matrix products have the model's type.
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
    """Buffers that assign rows to experts: ``starts`` [experts + 1], the first of each expert's grouped rows; and per
    row and choice (``chosen`` per row) the expert in ``experts`` and the grouped row in ``places``."""

    starts: Buffer
    experts: Buffer
    places: Buffer
    chosen: int


class MatrixRows(NamedTuple):
    """Input rows ``x`` of a product, and the ``sums`` of their groups of inputs if needed; ``operations`` compute
    both."""

    x: Buffer
    sums: Buffer | None = None
    operations: Sequence[Operation] = ()


@dataclass(frozen=True, slots=True)
class OperationBuilder:
    """Builder of a model's operations.

    Attributes:
        config: shape of the process's shard.
        layout: of the whole model's KV.
        dtype: the model's type; KV also has it unless it is 8-bit.
        model_heads: query heads of the whole model.
        rows_of: rows that operations compute: "tokens"; "samples" after the last layer's attention; or "logits" in the
            LM head, without rows that only need hidden states.
        adapters: slots, in a program for steps with adapters.
        collective: all-reduces of ranks; None for the whole model.
        query_scales: position-dependent factors of queries, if any.
        for_samples: True if the operations are only needed in steps with sampled rows.
        keeps_states: True if a step needs all rows of all layers, sampled or not.
        rounds_codes: that of the instruction set.
    """

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
    query_scales: torch.Tensor | None = None
    for_samples: bool = False
    keeps_states: bool = False
    rounds_codes: bool = False

    def with_collective(self) -> OperationBuilder:
        """Return a builder that all-reduces partial sums of ranks; itself if ``shard`` is the whole model."""
        if self.shard.whole:
            return self
        return replace(self, collective=RankCollective(self.shard, self.config, self.layout.num_kv_heads))

    @property
    def bf16(self) -> bool:
        """True if the model's type is bfloat16, not float32."""
        return self.dtype == "bfloat16"

    @property
    def row_dtype(self) -> str:
        """The numpy type of products' inputs; uint16 for bfloat16."""
        return "uint16" if self.bf16 else "float32"

    @property
    def when(self) -> str:
        """Name of the step's count that must not be 0 for the operations to run; "" if they always run. Without
        sampled rows nothing runs after the last layer's KV is written."""
        if self.rows_of == "logits":
            return "num_logits"
        return "num_samples" if self.rows_of == "samples" or self.for_samples else ""

    @property
    def last_kept_layer(self) -> int:
        """The last layer that a step without sampled rows needs."""
        return self.config.num_layers - 1 if self.keeps_states else self.config.last_kept_layer

    def buffer(self, name: str, width: int, dtype: str, each: int = 1) -> Buffer:
        """Return the buffer ``name``, with ``each`` rows of ``width`` values per row of ``rows_of``."""
        return Buffer(f"{self.rows_of}.{name}", -(-width // 32) * 32, dtype, self.rows_of, each)

    def layer_buffer(self, name: str, width: int, dtype: str) -> Buffer:
        """Return the buffer ``name``, a separate one per width if layers differ."""
        return self.buffer(name if self.layout.even else f"{name}{width}", width, dtype)

    def kind_of(self, layer: int) -> int:
        """Return the index of a layer's KV heads in ``config.all_heads``."""
        return self.config.all_heads.index(self.config.heads_of(layer))

    @property
    def hidden(self) -> Buffer:
        return self.buffer("hidden", self.config.hidden_size, "float32")

    @property
    def normed(self) -> Buffer:
        return self.buffer("normed", self.config.hidden_size, self.row_dtype)

    @property
    def layer_output(self) -> Buffer:
        """Output of attention or MLP that is normed before it is added to ``hidden``."""
        return self.buffer("layer_output", self.config.hidden_size, "float32")

    @property
    def layer_sum(self) -> Buffer:
        """Sum of several outputs of a layer, which is then normed or added to ``hidden``."""
        return self.buffer("layer_sum", self.config.hidden_size, "float32")

    @property
    def token_inputs(self) -> Buffer:
        """Per-layer token inputs of all layers."""
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
        """Return the norm ``name`` of ``x`` (by default hidden) into ``out`` (by default normed); only a cast if the
        model has no such norm. ``width``, ``eps``: of the norm, if they differ from the residual stream's.
        ``centered``: a LayerNorm, even if the model's other norms are not."""
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
        """Return the buffer in which a step stores the inputs of layer ``index``."""
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
        xielu_params: tuple[float, float] = (0.0, 0.0),
        head_strides: tuple[int, int] = (0, 0),
    ) -> Iterator[Operation]:
        """Yield the kernels of a product of ``x`` with the matrix ``name``, or with one matrix per expert or head.

        ``groups``: rows of each expert. ``head_strides``: bytes between heads in ``x`` and ``out``; 0 without heads.
        For epilogues: ``factor`` (of "add"), ``clamped`` (of "gated_clamped") and ``xielu_params`` (of "act_xielu").
        Raises ConfigError if the matrix does not fit ``x`` or ``out``.
        """
        linear = self.weights.linear(name)
        columns = linear.pairs * (16 if epilogue in GATED else 32)
        if linear.depth > x.width or columns > out.width:
            raise ConfigError(f"{name} has {linear.depth} inputs and {columns} outputs, which do not fit this model")
        spec_type: type[Gemm] = Gemm
        added: dict[str, Any] = {}
        if self.adapters is not None and name in self.adapters.slots:
            spec_type = AdapterGemm
            heads = linear.num_matrices if head_strides[0] else 0
            shrink, added = self._shrink(self.adapters, name, x, groups, heads, head_strides[0])
            yield shrink
        rows = "fp32" if x.dtype == "float32" else "bf16"
        inputs = MatrixRows(x)
        if linear.order is not None or linear.quantizes_rows or linear.offsets:
            inputs = _quantized_inputs(self, linear, x)
            yield from inputs.operations
        x, sums = inputs.x, inputs.sums
        spec = spec_type(
            linear.kind,
            rows,
            epilogue,
            f"num_{self.rows_of}",
            bias=linear.bias is not None,
            grouped=groups is not None,
            offsets=linear.offsets,
            x_step=head_strides[0],
            out_step=head_strides[1],
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
            "above": xielu_params[0],
            "below": xielu_params[1],
            **added,
        }
        yield Operation(spec, values, self.when)

    def _shrink(
        self, adapters: AdapterTable, name: str, x: Buffer, groups: ExpertGroups | None, heads: int, x_step: int
    ) -> tuple[Operation, dict[str, Any]]:
        """Return the operation shrunk = A x for rows with an adapter, and the arguments with which the product of ``x``
        with the matrix ``name``, or with one matrix per expert or head, adds B shrunk. ``x_step``: bytes between the
        heads' columns in ``x``."""
        kind, each = "fp32" if x.dtype == "float32" else "bf16", 1 if groups is None else groups.chosen
        width = adapters.form.width(experts=groups is not None, heads=heads)
        shrunk = self.buffer(f"shrunk_{kind}_{width}_{each}", width, x.dtype, each)
        place_slots = None if groups is None else self.buffer("place_slots", 1, "int32", each)
        common = {"slots": adapters.slots[name], "shrunk": shrunk, "adapted": adapters.step.words}
        values = {**common, "x": x, "depth": adapters.form.depth(name)}
        spec: KernelSpec = Shrink(kind, self.rows_of, heads, x_step)
        if groups is not None:
            values |= {"experts": groups.experts, "places": groups.places, "place_slots": place_slots}
            values |= {"most_tiles": -(-width // TILE_COLUMNS)}
            spec = ExpertShrink(kind, self.rows_of, each)
        return Operation(spec, values, self.when), {**common, "place_slots": place_slots}

    def norm_add(self, name: str, factor: float, *, x: Buffer | None = None, hidden: Buffer | None = None) -> Operation:
        """Return the operation hidden += ``factor`` * norm ``name`` of ``x``, by default layer_output."""
        x, hidden = x or self.layer_output, hidden or self.hidden
        values = {
            "found": x,
            "weight": self.weights.tensors[name],
            "hidden": hidden,
            "width": self.config.hidden_size,
            "eps": self.config.rms_norm_eps,
            "factor": factor,
        }
        return Operation(NormAdd(self.rows_of), values, self.when)


def _quantized_inputs(builder: OperationBuilder, linear: CpuLinear, x: Buffer) -> MatrixRows:
    """Return the inputs of a product with a quantized matrix: ``x`` reordered, quantized and summed by groups, as the
    matrix requires."""
    operations, sums = [], None
    if linear.order is not None:
        ordered = builder.buffer(f"ordered{linear.depth}", linear.depth, x.dtype)
        values: dict[str, Any] = {"x": x, "order": linear.order, "out": ordered, "depth": linear.depth}
        operations.append(Operation(GatherInputs(builder.bf16, builder.rows_of), values, builder.when))
        x = ordered
    if linear.quantizes_rows:
        operation = _quantize(builder, linear, x)
        x, sums = operation.values["out"], operation.values["constants"]
        operations.append(operation)
    # Kernels that dequantize weights to the rows' type apply offsets there; others multiply them by sums of inputs.
    if linear.offsets and sums is None and not (builder.rounds_codes and x.dtype == "uint16"):
        groups = -(-linear.depth // linear.group)
        sums = builder.buffer(f"input_sums{groups}x{x.each}", groups, "float32", x.each)
        values = {"x": x, "sums": sums, "depth": linear.depth, "inputs": linear.group}
        operations.append(Operation(SumInputs(builder.bf16, builder.rows_of, x.each), values, builder.when))
    return MatrixRows(x, sums, operations)


def _quantize(builder: OperationBuilder, linear: CpuLinear, x: Buffer) -> Operation:
    """Return the operation that quantizes ``x`` to int8 for an integer product with the matrix."""
    depth, inputs = linear.depth, linear.group or linear.depth
    groups = -(-depth // inputs)
    out = replace(builder.buffer(f"codes{depth}x{x.each}", depth, x.dtype, x.each), dtype="int8")
    constants = builder.buffer(f"row_constants{groups}x{x.each}", groups * ROW_CONSTANTS_BYTES // 4, "float32", x.each)
    values = {"x": x, "out": out, "constants": constants, "depth": depth, "inputs": inputs}
    bias = CODE_BIAS if linear.kind == INT8_DOTS else DOT_KINDS[linear.kind].bias
    spec = CodeInputs(x.dtype != "float32", builder.rows_of, x.each, bias)
    return Operation(spec, values, builder.when)
