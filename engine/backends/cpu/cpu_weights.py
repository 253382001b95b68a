"""Packed weights of the CPU kernels: one file for each model and kind, packed once and mapped by every worker.

    checkpoint --layer by layer, a rank's share--> packed file (models' cache) --mapped, shared, read-only--> CpuWeights

A second worker, and every later start, maps the file that the first worker packed. Packing goes layer by layer, so a
large model needs the memory of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from pillion.core_board import LINE_BYTES
from pillion.engine.checkpoints.checkpoint import open_checkpoint
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.packed_file import PackedFile, PackedWriter, packed_once
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import DTYPES, load_final_norm, load_head, load_layer
from pillion.engine.models.decoder import LayerWeights
from pillion.engine.models.layers import GatedMLP, MoeWeights, RmsNorm
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rank_split import RankSplit
from pillion.engine.ranks.rank_weights import inner_values, split_layer
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.products.codes import CODE_KINDS
from pillion.kernels.cpu.products.packing import DTYPES as KINDS
from pillion.kernels.cpu.products.packing import (
    FEW_BITS,
    INT8_DOTS,
    MAX_DOT_INPUTS,
    MAX_GROUP_INPUTS,
    PackedWeight,
    exact_kind,
    has_offsets,
    pack_bias,
    pack_gated,
    pack_gated_bias,
    pack_linear,
    packed_kind,
    panel_bytes,
)
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS
from pillion.kernels.torch.quantized_matrix import (
    LEAST_CODE,
    MOST_CODE,
    ROW_SCHEMES,
    Matrix,
    QuantizedMatrix,
    RowCodes,
    row_codes_of,
    select_rows,
)
from pillion.kernels.torch.torch_linear import Linear

# The kind of plain matrices, by the model's type.
WIDE_KINDS = {"bfloat16": "bf16", "float32": "fp32"}
# The numbers of a matrix in the file; the kind is its place in KINDS.
_NUMBERS = ("kind", "depth", "pairs", "num_matrices", "matrix_bytes", "group", "offsets")


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed matrix, or the matrices of all experts of a layer, which are ``num_matrices``, ``matrix_bytes`` apart.

    Attributes:
        kind: how weights are packed; layouts are in :mod:`pillion.kernels.cpu.products.packing`.
        data: packed weights.
        bias: float32 [columns], or None.
        order: int32 [depth], which input each packed input is, or None where inputs are in order.
        depth: inputs with padding.
        pairs: pairs of 16 columns with padding.
        group: inputs that share a scale, in few bits; else 0.
        offsets: whether such groups have offsets.
        row_codes: how rows are rounded before the product, or None where they are taken as they are.
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
    row_codes: RowCodes | None = None


class PackedMatrices:
    """Named tensors, and matrices as the kernels read them. Nobody may write to them."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def has(self, name: str) -> bool:
        """Whether the model has a tensor or a matrix ``name``."""
        return name in self.tensors or f"{name}.data" in self.tensors

    def linear(self, name: str) -> CpuLinear:
        """A matrix. Raises ConfigError where its sizes contradict each other, because kernels trust them."""
        numbers = {field: self.numbers[f"{name}.{field}"] for field in _NUMBERS}
        kind, offsets = list(KINDS)[numbers.pop("kind") % len(KINDS)], numbers.pop("offsets") != 0
        data, bias, order = (self.tensors.get(f"{name}.{part}") for part in ("data", "bias", "order"))
        assert data is not None
        row_codes = self._row_codes(name)
        linear = CpuLinear(
            kind=kind, data=data, bias=bias, order=order, offsets=offsets, row_codes=row_codes, **numbers
        )
        sound = min(linear.depth, linear.pairs, linear.num_matrices) > 0 and data.dtype == KINDS[kind]
        if kind in CODE_KINDS:
            sound = sound and 0 < linear.group <= MAX_GROUP_INPUTS
            sound = sound and linear.group % DEPTH_MULTIPLE == 0
        if kind in FEW_BITS:
            sound = sound and linear.depth % DEPTH_MULTIPLE == 0
        if kind == INT8_DOTS:
            sound = sound and row_codes is not None and linear.depth < MAX_DOT_INPUTS + DEPTH_MULTIPLE
        sound = sound and linear.matrix_bytes == linear.pairs * panel_bytes(kind, linear.depth, linear.group, offsets)
        sound = sound and data.numel() * data.element_size() == linear.num_matrices * linear.matrix_bytes
        sound = sound and (bias is None or bias.numel() == linear.num_matrices * linear.pairs * PANEL_COLUMNS)
        if order is not None:
            sound = sound and linear.num_matrices == 1 and order.shape == (linear.depth,)
            sound = sound and 0 <= int(order.min()) <= int(order.max()) < linear.depth
        if not sound:
            raise _damaged(name)
        return linear

    def _row_codes(self, name: str) -> RowCodes | None:
        stored = self.tensors.get(f"{name}.row_codes")
        if stored is None:
            return None
        scheme, scale, zero = stored.tolist() if stored.shape == (3,) else (math.nan,) * 3
        if not (
            scheme in range(len(ROW_SCHEMES)) and 0 < scale < math.inf and zero in range(LEAST_CODE, MOST_CODE + 1)
        ):
            raise _damaged(name)
        return RowCodes(ROW_SCHEMES[int(scheme)], scale, int(zero))


class CpuWeights(PackedMatrices, PackedFile):
    """The mapped file of a model's weights, which the workers of a host share."""


class HeldMatrices(PackedMatrices):
    """Weights in this process's memory, of what is too small to be packed into a file. Written by a
    :class:`MatrixPacker` before anybody reads them."""

    def __init__(self) -> None:
        self.tensors, self.numbers = {}, {}

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps a tensor; one that does not begin at a cache line, as a copy that does."""
        tensor = tensor.contiguous()
        self.tensors[name] = tensor.clone() if tensor.data_ptr() % LINE_BYTES else tensor

    def number(self, name: str, value: int) -> None:
        self.numbers[name] = value


def load_cpu_weights(
    prepared: PreparedModel,
    config: ModelConfig,
    progress: Progress,
    cache: ModelCache | None = None,
    split: RankSplit | None = None,
) -> CpuWeights:
    """Maps packed weights, packed here the first time: a rank's share of them where there are several. Raises
    ConfigError for a checkpoint that does not fit."""
    cache, split = cache or ModelCache(), split or RankSplit.of(config, 0, 1)
    share = "" if split.whole else f" (rank {split.rank} of {split.size})"

    def pack(writer: PackedWriter) -> None:
        progress(f"packing weights for the CPU kernels{share}")
        wide = WIDE_KINDS[prepared.dtype]
        packer = MatrixPacker(writer, config, split, wide)
        packer.pack(prepared.folder, DTYPES[prepared.dtype])

    path = cache.packed_weights(prepared.fingerprint, split.cpu_name)
    return packed_once(path, CpuWeights, pack, cache, progress)


@dataclass(frozen=True, slots=True)
class MatrixPacker:
    """Packs a rank's share of a model, or an EAGLE head. ``wide``: the kind of plain matrices, and of matrices in few
    bits that do not stay so."""

    writer: PackedWriter | HeldMatrices
    config: ModelConfig
    split: RankSplit
    wide: str

    def pack(self, folder: Path, dtype: torch.dtype) -> None:
        config = self.config
        tokens = self.split.vocabulary(config.vocab_size)
        rows = slice(tokens.start, tokens.stop)
        with open_checkpoint(folder, config) as checkpoint, torch.inference_mode():
            embedding = checkpoint.take("embedding", dtype)
            self.writer.tensor("embedding", embedding[rows])
            for index in range(config.num_layers):
                self.layer(f"layers.{index}.", load_layer(checkpoint, config, dtype, index, Linear.plain))
            self.norm("final_norm", load_final_norm(checkpoint, config, dtype))
            head = load_head(checkpoint, config, dtype, embedding)
            self.linear("lm_head", Linear.plain(select_rows(head, rows)))

    def layer(self, prefix: str, whole: LayerWeights) -> None:
        """Packs a layer whose linear layers are plain."""
        layer = split_layer(whole, self.config, self.split)
        for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm"):
            self.norm(prefix + name, getattr(layer, name))
        if layer.qk_norm is not None:
            # The norm has one row for each head; all rows of queries are equal, and all rows of keys.
            self.writer.tensor(prefix + "q_norm", layer.qk_norm.weight[0].float())
            self.writer.tensor(prefix + "k_norm", layer.qk_norm.weight[len(self.split.heads)].float())
        self.linear(prefix + "qkv", layer.qkv)
        self.linear(prefix + "o", layer.o)
        if isinstance(layer.mlp, MoeWeights):
            # The router makes a choice, which a rounding error could flip: its weights and rows stay float32.
            router = layer.mlp.router
            self._write(prefix + "router", [pack_linear(router, exact_kind([router], "fp32"))])
            self._mlps(prefix + "experts.", layer.mlp.experts)
            return
        self._mlps(prefix, [layer.mlp])
        assert isinstance(whole.mlp, GatedMLP)
        if isinstance(_inner_order(whole.mlp), torch.Tensor):
            # Adapters need it: their matrices are in the order of the checkpoint.
            self.writer.tensor(prefix + "inner_order", inner_values(whole.mlp, self.split).to(torch.int32))
        if layer.mlp.gate_up.bias is not None:
            bias = pack_gated_bias(*(half[_inner_order(layer.mlp)] for half in layer.mlp.gate_up.bias.chunk(2)))
            self.writer.tensor(prefix + "gate_up.bias", bias)
        if layer.mlp.down.bias is not None:
            self.writer.tensor(prefix + "down.bias", pack_bias(layer.mlp.down.bias))

    def _mlps(self, prefix: str, mlps: Sequence[GatedMLP]) -> None:
        """Packs an MLP, or all experts, whose panels are of one kind. The order of a down projection's inputs becomes
        the order of the outputs before it."""
        gates, downs = [], []
        for mlp in mlps:
            weight, order = mlp.gate_up.weight, _inner_order(mlp)
            inner = weight.shape[0] // 2
            parts = (slice(0, inner), slice(inner, None))
            gates.append([select_rows(select_rows(weight, part), order) for part in parts])
            down = mlp.down.weight
            downs.append(replace(down, order=None) if isinstance(down, QuantizedMatrix) else down)
        halves = [half for pair in gates for half in pair]
        kind, offsets = self._chosen(halves, len(mlps))
        self._write(prefix + "gate_up", [pack_gated(gate, up, kind, offsets) for gate, up in gates], halves)
        kind, offsets = self._chosen(downs, len(mlps))
        self._write(prefix + "down", [pack_linear(down, kind, offsets) for down in downs], downs)

    def _chosen(self, matrices: Sequence[Matrix], num_matrices: int = 1) -> tuple[str, bool]:
        """The kind of panels that hold all of the matrices, and whether they have offsets."""
        quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        plain = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
        if not quantized:
            return exact_kind(plain, self.wide), False
        if num_matrices > 1 and any(matrix.order is not None for matrix in quantized):
            # A step gathers the inputs of all rows in one order, but each expert has its own.
            return self.wide, False
        kind = packed_kind(matrices, self.wide)
        return kind, any(has_offsets(matrix, kind) for matrix in quantized)

    def norm(self, name: str, norm: RmsNorm | None) -> None:
        if norm is not None:
            # Kernels read whole vectors, so zeros follow the last weight, as they follow a row's last value.
            self.writer.tensor(name, pad(norm.weight.float(), (0, -len(norm.weight) % LANES)))

    def linear(self, name: str, linear: Linear) -> None:
        self._write(name, [pack_linear(linear.weight, *self._chosen([linear.weight]))], [linear.weight])
        if linear.bias is not None:
            self.writer.tensor(name + ".bias", pack_bias(linear.bias))

    def _write(self, name: str, packed: list[PackedWeight], matrices: Sequence[Matrix] = ()) -> None:
        """Writes one matrix, or the matrices of all experts one behind the other, made of ``matrices``."""
        first = packed[0]
        self.writer.tensor(name + ".data", torch.stack([one.data for one in packed]))
        if first.order is not None:
            self.writer.tensor(name + ".order", first.order)
        row_codes = row_codes_of(matrices)
        if row_codes is not None:
            numbers = ROW_SCHEMES.index(row_codes.scheme), row_codes.scale, row_codes.zero
            self.writer.tensor(name + ".row_codes", torch.tensor(numbers, dtype=torch.float32))
        kind = list(KINDS).index(first.kind)
        values = (kind, first.depth, first.pairs, len(packed), first.nbytes, first.group, int(first.offsets))
        for field, value in zip(_NUMBERS, values, strict=True):
            self.writer.number(f"{name}.{field}", value)


def _damaged(name: str) -> ConfigError:
    return ConfigError(f"the packed weights of {name} do not fit together; remove the file")


def _inner_order(mlp: GatedMLP) -> slice | torch.Tensor:
    """The order in which the down projection reads the inner values."""
    down = mlp.down.weight
    return slice(None) if isinstance(down, torch.Tensor) or down.order is None else down.order
