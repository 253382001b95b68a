"""Weights packed for the CPU kernels: one file per model and shard, packed once and mapped by every worker.

    checkpoint --pack layer by layer--> file in the models' cache --map, shared, read-only--> CpuWeights

Packing needs the memory of one layer. Later workers and starts only map the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from pillion.engine.checkpoints.checkpoint import open_checkpoint
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.packed_file import PackedFile, PackedWriter, packed_once
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import (
    DTYPES,
    load_final_norm,
    load_head,
    load_layer,
    load_positions,
    load_token_inputs,
)
from pillion.engine.checkpoints.work_report import WorkReport
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import Experts, Layer, LayerTensor, Mlp, Role, tensors_of
from pillion.engine.models.layer_weights import LayerWeights
from pillion.engine.models.layers import LayerNorm, RmsNorm
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard, whole_model
from pillion.engine.ranks.rank_weights import shard_layer
from pillion.errors import ConfigError
from pillion.host.core_lending_table import LINE_BYTES
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.products.packed_weight import PLAIN_TYPES, PackedWeight
from pillion.kernels.cpu.products.packing import exact_kind, pack_bias, pack_gated_bias, pack_taps
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS
from pillion.kernels.cpu.quantized import quantized_packing
from pillion.kernels.cpu.quantized.dot_kinds import DOT_KINDS
from pillion.kernels.cpu.quantized.matrix_packing import KINDS, pack_gated, pack_linear, panel_bytes
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, select_rows
from pillion.kernels.torch.torch_linear import Linear

# Kinds of unquantized matrices by model type.
WIDE_KINDS = {"bfloat16": "bf16", "float32": "fp32"}
# Numbers stored per matrix in a packed file; "kind" is an index of KINDS.
_NUMBERS = ("kind", "depth", "pairs", "num_matrices", "matrix_bytes", "group", "offsets")


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed matrix, or ``num_matrices`` of them (one per expert or head), ``matrix_bytes`` apart.

    Attributes:
        kind: layout of the weights (:mod:`pillion.kernels.cpu.products.packing`).
        data: packed weights.
        bias: float32 [columns], or None.
        order: int32 [depth], the input for each packed position; None if inputs are in order.
        depth: inputs, with padding.
        pairs: panels of 32 columns, with padding.
        group: inputs that share a scale; 0 if not quantized.
        offsets: whether these groups have offsets.
    """

    kind: str
    data: torch.Tensor
    bias: torch.Tensor | None
    order: torch.Tensor | None
    depth: int
    pairs: int
    num_matrices: int
    matrix_bytes: int
    group: int
    offsets: bool

    @property
    def quantizes_rows(self) -> bool:
        """True if input rows are quantized to int8 before the product."""
        return self.kind == quantized_packing.INT8_DOTS or self.kind in DOT_KINDS


class PackedMatrices:
    """Named tensors, and matrices packed for the kernels. Read-only."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def has(self, name: str) -> bool:
        """Return whether there is a tensor or a matrix ``name``."""
        return name in self.tensors or f"{name}.data" in self.tensors

    def linear(self, name: str) -> CpuLinear:
        """Return the matrix ``name``. Raises ConfigError if its sizes are inconsistent, since kernels do not check
        them."""
        numbers = {field: self.numbers[f"{name}.{field}"] for field in _NUMBERS}
        kind, offsets = KINDS[numbers.pop("kind") % len(KINDS)], numbers.pop("offsets") != 0
        data, bias, order = (self.tensors.get(f"{name}.{part}") for part in ("data", "bias", "order"))
        assert data is not None
        linear = CpuLinear(kind=kind, data=data, bias=bias, order=order, offsets=offsets, **numbers)
        sound = min(linear.depth, linear.pairs, linear.num_matrices) > 0 and data.dtype == PLAIN_TYPES.get(
            kind, torch.uint8
        )
        if kind not in PLAIN_TYPES:
            sound = sound and quantized_packing.sound(kind, linear.depth, linear.group)
        sound = sound and linear.matrix_bytes == linear.pairs * panel_bytes(kind, linear.depth, linear.group, offsets)
        sound = sound and data.numel() * data.element_size() == linear.num_matrices * linear.matrix_bytes
        sound = sound and (bias is None or bias.numel() == linear.num_matrices * linear.pairs * PANEL_COLUMNS)
        if order is not None:
            sound = sound and linear.num_matrices == 1 and order.shape == (linear.depth,)
            sound = sound and 0 <= int(order.min()) <= int(order.max()) < linear.depth
        if not sound:
            raise _damaged(name)
        return linear


class CpuWeights(PackedMatrices, PackedFile):
    """The mapped file of a model's packed weights, shared by the workers of a machine."""


class InMemoryMatrices(PackedMatrices):
    """Weights in this process's memory, for models too small for a packed file; filled by :class:`MatrixPacker`."""

    def __init__(self) -> None:
        self.tensors, self.numbers = {}, {}

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, copied unless it is aligned to a cache line."""
        tensor = tensor.contiguous()
        self.tensors[name] = tensor.clone() if tensor.data_ptr() % LINE_BYTES else tensor

    def number(self, name: str, value: int) -> None:
        self.numbers[name] = value


def load_cpu_weights(
    prepared: PreparedModel,
    config: ModelConfig,
    progress: Progress,
    cache: ModelCache | None = None,
    shard: ModelShard | None = None,
) -> CpuWeights:
    """Map the packed weights of ``shard`` of a model, by default of all of it; the first call packs them. Raises
    ConfigError for a checkpoint that does not fit the config."""
    cache, shard = cache or ModelCache(), shard or whole_model(config)
    share = "" if shard.whole else f" (rank {shard.rank} of {shard.size})"

    def pack(writer: PackedWriter) -> None:
        report = WorkReport(progress, f"packing weights for the CPU kernels{share}", config.num_layers)
        packer = MatrixPacker(writer, config, shard, WIDE_KINDS[prepared.dtype])
        packer.pack(prepared.folder, DTYPES[prepared.dtype], report)

    path = cache.packed_weights(prepared.fingerprint, f"cpu{shard.name}")
    return packed_once(path, CpuWeights, pack, cache, progress)


@dataclass(frozen=True, slots=True)
class MatrixPacker:
    """Packer of a shard of a model, or of an EAGLE head. ``plain_kind``: the kind of matrices that are not quantized or
    are dequantized."""

    writer: PackedWriter | InMemoryMatrices
    config: ModelConfig
    shard: ModelShard
    plain_kind: str

    def pack(self, folder: Path, dtype: torch.dtype, report: WorkReport) -> None:
        """Pack all tensors of the checkpoint in ``folder``, reporting each layer."""
        config = self.config
        tokens = self.shard.vocabulary(config.vocab_size)
        rows = slice(tokens.start, tokens.stop)
        with open_checkpoint(folder, config) as checkpoint, torch.inference_mode():
            embedding = checkpoint.load("embedding", dtype)
            self.writer.tensor("embedding", embedding[rows])
            positions = load_positions(checkpoint, config, dtype)
            if positions is not None:
                self.writer.tensor("positions", pad(positions.float(), (0, -config.hidden_size % LANES)))
            token_inputs = load_token_inputs(checkpoint, config, dtype)
            if token_inputs is not None:
                self.writer.tensor("token_inputs.embedding", token_inputs.embedding)
                self.linear("token_inputs.projection", Linear.plain(token_inputs.projection, None))
                self.norm("token_inputs.norm", token_inputs.norm)
            for index, operations in enumerate(layers_of(config)):
                self.layer(f"layers.{index}.", operations, load_layer(checkpoint, config, dtype, index, Linear.plain))
                report.add(1)
            self.norm("final_norm", load_final_norm(checkpoint, config, dtype))
            if not checkpoint.chooses_tokens:
                return
            head = load_head(checkpoint, config, dtype, embedding)
            self.linear("lm_head", Linear.plain(select_rows(head, rows)))

    def layer(self, prefix: str, operations: Layer, whole: LayerWeights) -> None:
        """Pack all tensors of a layer. ``whole``: the weights of all ranks."""
        weights = shard_layer(whole, operations, self.shard)
        mlps = [operation for operation in operations if isinstance(operation, Mlp | Experts)]
        of_mlps = {tensor.name for mlp in mlps for tensor in (mlp.gate_up, mlp.down)}
        for tensor in tensors_of(operations):
            if tensor.name not in of_mlps:
                self._tensor(prefix, tensor, weights)
        for mlp in mlps:
            self._mlp(prefix, mlp, weights)
            orders = [_inner_order(down) for down in whole.linears(mlp.down)]
            permutations = [order for order in orders if isinstance(order, torch.Tensor)]
            if permutations:
                # Adapters need the order of the inner values, because their matrices have the checkpoint's order, as do
                # unquantized experts.
                in_order = torch.arange(len(permutations[0]))
                own = self.shard.inner(len(in_order))
                inner = torch.stack([in_order[order][own.start : own.stop] for order in orders]).to(torch.int32)
                name = (prefix + mlp.down.name).rpartition(".")[0]
                self.writer.tensor(f"{name}.inner_order", inner if mlp.down.experts else inner[0])

    def _tensor(self, prefix: str, tensor: LayerTensor, weights: LayerWeights) -> None:
        """Pack a tensor of a layer according to its role."""
        name = prefix + tensor.name
        match tensor.role:
            case Role.NORM:
                self.norm(name, weights.norm(tensor))
            case Role.HEAD_NORM:
                rows = weights.norm(tensor).weight.float()
                if tensor.by_head:
                    queries = len(self.shard.entries(tensor.rows[0]))
                    self.writer.tensor(prefix + "q_norm", rows[:queries].flatten())
                    self.writer.tensor(prefix + "k_norm", rows[queries:].flatten())
                    return
                # One row per head, but all rows of queries are equal, and all rows of keys.
                self.writer.tensor(prefix + "q_norm", rows[0])
                self.writer.tensor(prefix + "k_norm", rows[-1])
            case Role.MATRIX:
                self.linear(name, weights.linear(tensor))
            case Role.EXACT_MATRIX:
                # The router stays float32, since a rounding error could change the chosen experts.
                router = weights.tensor(tensor)
                self._write(name, [pack_linear(router, exact_kind([router], "fp32"))])
            case Role.TAPS:
                taps = weights.taps(tensor)
                self.writer.tensor(name, pack_taps(taps.factors))
                if taps.bias is not None:
                    self.writer.tensor(f"{name}.bias", pack_taps(taps.bias[:, None]))
            case Role.HEAD_MATRICES:
                self._latent_up(name, weights.tensor(tensor))
            case Role.VECTOR:
                self.writer.tensor(name, weights.tensor(tensor).float())
            case Role.EXACT_VECTOR:
                # A router's bias is padded like a packed matrix.
                self.writer.tensor(name, pack_bias(weights.tensor(tensor).view(-1)))

    def _latent_up(self, name: str, ups: torch.Tensor) -> None:
        """Pack the up projections of latents, two matrices per head: from queries to latents (keys), and from latents
        to values."""
        latents = self.config.latents
        assert latents is not None
        heads = ups.view(-1, latents.qk_nope_head_dim + latents.v_head_dim, latents.kv_lora_rank)
        keys: list[Matrix] = [head[: latents.qk_nope_head_dim].T.contiguous() for head in heads]
        values: list[Matrix] = [head[latents.qk_nope_head_dim :].contiguous() for head in heads]
        for part, matrices in (("keys", keys), ("values", values)):
            kind, offsets = self._kind_of(matrices, len(matrices))
            self._write(f"{name}.{part}", [pack_linear(matrix, kind, offsets) for matrix in matrices])

    def _mlp(self, prefix: str, operation: Mlp | Experts, weights: LayerWeights) -> None:
        """Pack an MLP, or all experts of a layer in panels of one kind. If a down projection's inputs are reordered,
        the outputs of the up projection are packed in that order instead."""
        gates, plain_order, gated = [], [], operation.gated
        ups, downs = weights.linears(operation.gate_up), weights.linears(operation.down)
        for up, down in zip(ups, downs, strict=True):
            weight, order = up.weight, _inner_order(down)
            inner = weight.shape[0] // 2 if gated else weight.shape[0]
            parts = (slice(0, inner), slice(inner, None))[: 2 if gated else 1]
            gates.append([select_rows(select_rows(weight, part), order) for part in parts])
            matrix = down.weight
            plain_order.append(replace(matrix, order=None) if isinstance(matrix, QuantizedMatrix) else matrix)
        halves = [half for pair in gates for half in pair]
        name, count = prefix + operation.gate_up.name, len(ups)
        kind, offsets = self._kind_of(halves, count)
        packed = [
            pack_gated(pair[0], pair[1], kind, offsets) if gated else pack_linear(pair[0], kind, offsets)
            for pair in gates
        ]
        self._write(name, packed, halves)
        self._biases(name, [_packed_up_bias(*pair, gated=gated) for pair in zip(ups, downs, strict=True)])
        name = prefix + operation.down.name
        kind, offsets = self._kind_of(plain_order, count)
        self._write(name, [pack_linear(down, kind, offsets) for down in plain_order], plain_order)
        self._biases(name, [None if down.bias is None else pack_bias(down.bias) for down in downs])

    def _biases(self, name: str, packed: Sequence[torch.Tensor | None]) -> None:
        """Write the packed biases of a linear layer, one per expert if it has experts; nothing if all are None."""
        biases = [bias for bias in packed if bias is not None]
        if biases:
            self.writer.tensor(name + ".bias", torch.cat(biases))

    def _kind_of(self, matrices: Sequence[Matrix], num_matrices: int = 1) -> tuple[str, bool]:
        """Return the kind of panels into which all of the matrices are packed, and whether these have offsets."""
        quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        plain = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
        if not quantized:
            return exact_kind(plain, self.plain_kind), False
        if num_matrices > 1 and any(matrix.order is not None for matrix in quantized):
            # Dequantize experts with reordered inputs: the inputs of all rows are gathered in one order, but each
            # expert has its own.
            return self.plain_kind, False
        kind = quantized_packing.packed_kind(matrices, self.plain_kind)
        return kind, any(quantized_packing.has_offsets(matrix, kind) for matrix in quantized)

    def norm(self, name: str, norm: RmsNorm | LayerNorm) -> None:
        """Pack a norm, padded with zeros because kernels read whole vectors."""
        padding = (0, -len(norm.weight) % LANES)
        self.writer.tensor(name, pad(norm.weight.float(), padding))
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            self.writer.tensor(f"{name}.bias", pad(norm.bias, padding))

    def linear(self, name: str, linear: Linear) -> None:
        """Pack a linear layer."""
        self._write(name, [pack_linear(linear.weight, *self._kind_of([linear.weight]))], [linear.weight])
        if linear.bias is not None:
            self.writer.tensor(name + ".bias", pack_bias(linear.bias))

    def _write(self, name: str, packed: list[PackedWeight], matrices: Sequence[Matrix] = ()) -> None:
        """Write packed matrices, one per expert or head, as the matrix ``name``."""
        first = packed[0]
        self.writer.tensor(name + ".data", torch.stack([matrix.data for matrix in packed]))
        if first.order is not None:
            self.writer.tensor(name + ".order", first.order)
        kind = KINDS.index(first.kind)
        values = (kind, first.depth, first.pairs, len(packed), first.nbytes, first.group, int(first.offsets))
        for field, value in zip(_NUMBERS, values, strict=True):
            self.writer.number(f"{name}.{field}", value)


def _damaged(name: str) -> ConfigError:
    return ConfigError(f"the packed weights of {name} are inconsistent; remove the file")


def _packed_up_bias(up: Linear, down: Linear, *, gated: bool) -> torch.Tensor | None:
    """Return the packed bias of an up projection, in the order of the down projection's inputs."""
    if up.bias is None:
        return None
    halves = [half[_inner_order(down)] for half in up.bias.chunk(2 if gated else 1)]
    return pack_gated_bias(*halves) if gated else pack_bias(*halves)


def _inner_order(down: Linear) -> slice | torch.Tensor:
    """Return the permutation of inner values that a down projection expects; slice(None) if they are in order."""
    matrix = down.weight
    return slice(None) if isinstance(matrix, torch.Tensor) or matrix.order is None else matrix.order
