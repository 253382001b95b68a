"""Weights packed for the CPU kernels: one file per model and kind, packed once and mapped by every worker.

    checkpoint --layer by layer, its share--> packed file (models' cache) --mapped, shared, read-only--> CpuWeights

Later workers and starts map the file that the first worker packed. Packing goes layer by layer, so a large model needs
the memory of one layer.
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

WIDE_KINDS = {"bfloat16": "bf16", "float32": "fp32"}
# Numbers of a matrix in the file of packed weights; the kind is its index among all kinds.
_NUMBERS = ("kind", "depth", "pairs", "num_matrices", "matrix_bytes", "group", "offsets")


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed matrix, or the ``num_matrices`` matrices of a layer's experts, ``matrix_bytes`` apart.

    Attributes:
        kind: layout of the weights (:mod:`pillion.kernels.cpu.products.packing`).
        data: packed weights.
        bias: float32 [columns], or None.
        order: int32 [depth], the input at each packed input, or None if inputs are in order.
        depth: number of inputs with padding.
        pairs: number of pairs of 16 columns with padding.
        group: number of inputs that share a scale, if quantized; else 0.
        offsets: whether such groups have offsets.
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
    def meets_codes(self) -> bool:
        """True if rows are quantized to int8 before the product."""
        return self.kind == quantized_packing.INT8_DOTS or self.kind in DOT_KINDS


class PackedMatrices:
    """Named tensors, and matrices in the layout of the kernels. Read-only."""

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
        """Return the matrix ``name``. Raises ConfigError if its sizes are inconsistent, because kernels trust them."""
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
    """The mapped file of a model's packed weights, shared by the workers of a host."""


class InMemoryMatrices(PackedMatrices):
    """Weights in this process's memory, too small to be packed into a file. Written by a :class:`MatrixPacker` before
    they are read."""

    def __init__(self) -> None:
        self.tensors, self.numbers = {}, {}

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor, copied unless it is aligned to a cache line."""
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
    """Map a model's packed weights, or this process's share of them; the first call packs them. Raises ConfigError for
    a checkpoint that does not fit."""
    cache, shard = cache or ModelCache(), shard or whole_model(config)
    share = "" if shard.whole else f" (rank {shard.rank} of {shard.size})"

    def pack(writer: PackedWriter) -> None:
        packed = WorkReport(progress, f"packing weights for the CPU kernels{share}", config.num_layers)
        wide = WIDE_KINDS[prepared.dtype]
        packer = MatrixPacker(writer, config, shard, wide)
        packer.pack(prepared.folder, DTYPES[prepared.dtype], packed)

    path = cache.packed_weights(prepared.fingerprint, f"cpu{shard.name}")
    return packed_once(path, CpuWeights, pack, cache, progress)


@dataclass(frozen=True, slots=True)
class MatrixPacker:
    """Packer of a process's share of a model, or of an EAGLE head. ``wide``: the kind of plain matrices, and of
    quantized matrices that are dequantized."""

    writer: PackedWriter | InMemoryMatrices
    config: ModelConfig
    shard: ModelShard
    wide: str

    def pack(self, folder: Path, dtype: torch.dtype, packed: WorkReport) -> None:
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
                packed.add(1)
            self.norm("final_norm", load_final_norm(checkpoint, config, dtype))
            if not checkpoint.chooses_tokens:
                return
            head = load_head(checkpoint, config, dtype, embedding)
            self.linear("lm_head", Linear.plain(select_rows(head, rows)))

    def layer(self, prefix: str, operations: Layer, whole: LayerWeights) -> None:
        """Pack all tensors of a layer whose linear layers are plain."""
        weights = shard_layer(whole, operations, self.shard)
        gated = [one for one in operations if isinstance(one, Mlp | Experts)]
        apart = {tensor.name for one in gated for tensor in (one.gate_up, one.down)}
        for tensor in tensors_of(operations):
            if tensor.name not in apart:
                self._tensor(prefix, tensor, weights)
        for one in gated:
            self._gated(prefix, one, weights)
            orders = [_inner_order(down) for down in whole.linears(one.down)]
            found = [order for order in orders if isinstance(order, torch.Tensor)]
            if found:
                # Adapters need the order of the inner values, because their matrices are in that of the checkpoint, as
                # are unquantized experts.
                every = torch.arange(len(found[0]))
                mine = self.shard.inner(len(every))
                own = torch.stack([every[order][mine.start : mine.stop] for order in orders]).to(torch.int32)
                name = (prefix + one.down.name).rpartition(".")[0]
                self.writer.tensor(f"{name}.inner_order", own if one.down.experts else own[0])

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
                # The norm has one row per head; all rows of queries are equal, and all rows of keys.
                self.writer.tensor(prefix + "q_norm", rows[0])
                self.writer.tensor(prefix + "k_norm", rows[-1])
            case Role.MATRIX:
                self.linear(name, weights.linear(tensor))
            case Role.EXACT_MATRIX:
                # Weights and rows of the router stay float32: a rounding error could change the chosen experts.
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
                # The bias of a router's product has the padding of a packed matrix.
                self.writer.tensor(name, pack_bias(weights.tensor(tensor).view(-1)))

    def _latent_up(self, name: str, ups: torch.Tensor) -> None:
        """Pack the up projections of latents: for each head one matrix that maps queries to latents, and one that maps
        latents to values."""
        latents = self.config.latents
        assert latents is not None
        heads = ups.view(-1, latents.qk_nope_head_dim + latents.v_head_dim, latents.kv_lora_rank)
        keys: list[Matrix] = [head[: latents.qk_nope_head_dim].T.contiguous() for head in heads]
        values: list[Matrix] = [head[latents.qk_nope_head_dim :].contiguous() for head in heads]
        for part, matrices in (("keys", keys), ("values", values)):
            kind, offsets = self._chosen(matrices, len(matrices))
            self._write(f"{name}.{part}", [pack_linear(matrix, kind, offsets) for matrix in matrices])

    def _gated(self, prefix: str, operation: Mlp | Experts, weights: LayerWeights) -> None:
        """Pack an MLP, or all experts of a layer, in panels of one kind. The order of a down projection's inputs
        becomes the order of the outputs before it."""
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
        kind, offsets = self._chosen(halves, count)
        packed = [
            pack_gated(pair[0], pair[1], kind, offsets) if gated else pack_linear(pair[0], kind, offsets)
            for pair in gates
        ]
        self._write(name, packed, halves)
        self._biases(name, [_packed_up_bias(*pair, gated=gated) for pair in zip(ups, downs, strict=True)])
        name = prefix + operation.down.name
        kind, offsets = self._chosen(plain_order, count)
        self._write(name, [pack_linear(down, kind, offsets) for down in plain_order], plain_order)
        self._biases(name, [None if down.bias is None else pack_bias(down.bias) for down in downs])

    def _biases(self, name: str, packed: Sequence[torch.Tensor | None]) -> None:
        """Write the packed biases of one linear layer, or of those of all experts; all have one, or none."""
        found = [bias for bias in packed if bias is not None]
        if found:
            self.writer.tensor(name + ".bias", torch.cat(found))

    def _chosen(self, matrices: Sequence[Matrix], num_matrices: int = 1) -> tuple[str, bool]:
        """Return the kind of panels that all of the matrices can be packed into, and whether they have offsets."""
        quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        plain = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
        if not quantized:
            return exact_kind(plain, self.wide), False
        if num_matrices > 1 and any(matrix.order is not None for matrix in quantized):
            # Experts whose inputs are reordered are dequantized: a step gathers the inputs of all rows in one order,
            # but each expert has a different one.
            return self.wide, False
        kind = quantized_packing.packed_kind(matrices, self.wide)
        return kind, any(quantized_packing.has_offsets(matrix, kind) for matrix in quantized)

    def norm(self, name: str, norm: RmsNorm | LayerNorm) -> None:
        # Kernels read whole vectors: zeros pad weights, like rows.
        room = (0, -len(norm.weight) % LANES)
        self.writer.tensor(name, pad(norm.weight.float(), room))
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            self.writer.tensor(f"{name}.bias", pad(norm.bias, room))

    def linear(self, name: str, linear: Linear) -> None:
        self._write(name, [pack_linear(linear.weight, *self._chosen([linear.weight]))], [linear.weight])
        if linear.bias is not None:
            self.writer.tensor(name + ".bias", pack_bias(linear.bias))

    def _write(self, name: str, packed: list[PackedWeight], matrices: Sequence[Matrix] = ()) -> None:
        """Write one packed matrix, or those of all experts one after the other, packed from ``matrices``."""
        first = packed[0]
        self.writer.tensor(name + ".data", torch.stack([one.data for one in packed]))
        if first.order is not None:
            self.writer.tensor(name + ".order", first.order)
        kind = KINDS.index(first.kind)
        values = (kind, first.depth, first.pairs, len(packed), first.nbytes, first.group, int(first.offsets))
        for field, value in zip(_NUMBERS, values, strict=True):
            self.writer.number(f"{name}.{field}", value)


def _damaged(name: str) -> ConfigError:
    return ConfigError(f"the packed weights of {name} are inconsistent; remove the file")


def _packed_up_bias(up: Linear, down: Linear, *, gated: bool) -> torch.Tensor | None:
    """Return the bias of the outputs before a down projection, in the order in which the latter reads them."""
    if up.bias is None:
        return None
    halves = [half[_inner_order(down)] for half in up.bias.chunk(2 if gated else 1)]
    return pack_gated_bias(*halves) if gated else pack_bias(*halves)


def _inner_order(down: Linear) -> slice | torch.Tensor:
    """Return the order in which the down projection reads the inner values."""
    matrix = down.weight
    return slice(None) if isinstance(matrix, torch.Tensor) or matrix.order is None else matrix.order
