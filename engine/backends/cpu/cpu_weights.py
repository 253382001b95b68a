"""Packed weights of the CPU kernels: one file for each model and kind, packed once and mapped by every worker.

    checkpoint --layer by layer--> packed file (models' cache) --mapped, shared, read-only--> CpuWeights

A second worker, and every later start, maps the file that the first worker packed. Packing goes layer by layer, so a
large model needs the memory of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import pad

from pillion.engine.checkpoints.checkpoint import open_checkpoint
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.packed_file import PackedFile, PackedWriter, packed_once
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import DTYPES, load_final_norm, load_head, load_layer
from pillion.engine.models.decoder import LayerWeights
from pillion.engine.models.layers import GatedMLP, MoeWeights, RmsNorm
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.products.int8 import MAX_QUANTUM
from pillion.kernels.cpu.products.packing import (
    PANEL_COLUMNS,
    PackedWeight,
    exact_kind,
    pack_bias,
    pack_gated,
    pack_gated_bias,
    pack_linear,
)
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, plain
from pillion.kernels.torch.torch_linear import Linear


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed matrix, or the matrices of all experts of a layer, which are ``num_groups``, ``group_bytes`` apart.

    Attributes:
        data: packed weights; layouts in :mod:`pillion.kernels.cpu.products.packing`.
        scales, bias: float32 [columns], or None.
        depth: inputs with padding.
        pairs: pairs of 16 columns with padding.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    depth: int
    pairs: int
    num_groups: int = 0
    group_bytes: int = 0


class CpuWeights(PackedFile):
    """The mapped file of a model's weights, which the workers of a host share."""

    def has(self, name: str) -> bool:
        """Whether the model has a tensor or a matrix ``name``."""
        return name in self.tensors or f"{name}.data" in self.tensors

    def linear(self, name: str) -> CpuLinear:
        """A matrix. Raises ConfigError where its sizes contradict each other, because kernels trust them."""
        scales, bias = (self.tensors.get(f"{name}.{part}") for part in ("scales", "bias"))
        sizes = {key: self.numbers[f"{name}.{key}"] for key in ("depth", "pairs", "num_groups", "group_bytes")}
        linear = CpuLinear(data=self.tensors[f"{name}.data"], scales=scales, bias=bias, **sizes)
        columns, size = linear.pairs * PANEL_COLUMNS, linear.data.element_size()
        sound = min(linear.depth, linear.pairs, linear.num_groups) > 0
        sound = sound and linear.group_bytes == columns * linear.depth * size
        sound = sound and linear.data.numel() * size == linear.num_groups * linear.group_bytes
        sound = sound and all(part is None or part.numel() == linear.num_groups * columns for part in (scales, bias))
        if not sound:
            raise ConfigError(f"the packed weights of {name} do not fit together; remove the file")
        return linear


def load_cpu_weights(
    prepared: PreparedModel, config: ModelConfig, progress: Progress, cache: ModelCache | None = None
) -> CpuWeights:
    """Maps packed weights, packed here the first time. Raises ConfigError for a checkpoint that does not fit."""
    cache = cache or ModelCache()

    def pack(writer: PackedWriter) -> None:
        progress("packing weights for the CPU kernels")
        kind = {"bfloat16": "bf16", "float32": "fp32"}[prepared.dtype]
        _pack(prepared.folder, config, DTYPES[prepared.dtype], kind, writer)

    return packed_once(cache.packed_weights(prepared.fingerprint, "cpu"), CpuWeights, pack, cache, progress)


def _pack(folder: Path, config: ModelConfig, dtype: torch.dtype, kind: str, writer: PackedWriter) -> None:
    with open_checkpoint(folder, config) as checkpoint, torch.inference_mode():
        embedding = checkpoint.take("embedding", dtype)
        writer.tensor("embedding", embedding)
        for index in range(config.num_layers):
            _pack_layer(
                writer, f"layers.{index}.", load_layer(checkpoint, config, dtype, index, Linear.plain), config, kind
            )
        _norm(writer, "final_norm", load_final_norm(checkpoint, config, dtype))
        _linear(writer, "lm_head", Linear.plain(load_head(checkpoint, config, dtype, embedding)), kind)


def _pack_layer(writer: PackedWriter, prefix: str, layer: LayerWeights, config: ModelConfig, kind: str) -> None:
    for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm"):
        _norm(writer, prefix + name, getattr(layer, name))
    if layer.qk_norm is not None:
        # The norm has one row for each head; all rows of queries are equal, and all rows of keys.
        writer.tensor(prefix + "q_norm", layer.qk_norm.weight[0].float())
        writer.tensor(prefix + "k_norm", layer.qk_norm.weight[config.num_heads].float())
    _linear(writer, prefix + "qkv", layer.qkv, kind)
    _linear(writer, prefix + "o", layer.o, kind)
    if isinstance(layer.mlp, MoeWeights):
        # The router makes a choice, which a rounding error could flip: its weights and rows stay float32.
        router = layer.mlp.router
        _write(writer, prefix + "router", [pack_linear(router, exact_kind([router], "fp32"))])
        _write(writer, prefix + "experts.gate_up", _gated(layer.mlp.experts, kind))
        _write(writer, prefix + "experts.down", _packed([expert.down for expert in layer.mlp.experts], kind))
        return
    _write(writer, prefix + "gate_up", _gated([layer.mlp], kind))
    if layer.mlp.gate_up.bias is not None:
        writer.tensor(prefix + "gate_up.bias", pack_gated_bias(*layer.mlp.gate_up.bias.chunk(2)))
    _linear(writer, prefix + "down", layer.mlp.down, kind)


def _gated(mlps: Sequence[GatedMLP], kind: str) -> list[PackedWeight]:
    """Packs the gates and ups of all experts of a layer, or of the only MLP, as one kind."""
    kind = _codes_kind([mlp.gate_up.weight for mlp in mlps], kind)
    halves = [_plain(mlp.gate_up.weight).chunk(2) for mlp in mlps]
    kind = exact_kind((half for pair in halves for half in pair), kind)
    return [pack_gated(gate, up, kind) for gate, up in halves]


def _norm(writer: PackedWriter, name: str, norm: RmsNorm | None) -> None:
    if norm is not None:
        # Kernels read whole vectors, so zeros follow the last weight, as they follow a row's last value.
        writer.tensor(name, pad(norm.weight.float(), (0, -len(norm.weight) % LANES)))


def _linear(writer: PackedWriter, name: str, linear: Linear, kind: str) -> None:
    _write(writer, name, _packed([linear], kind))
    if linear.bias is not None:
        writer.tensor(name + ".bias", pack_bias(linear.bias))


def _packed(linears: Sequence[Linear], kind: str) -> list[PackedWeight]:
    """Packs a matrix, or those of all experts of a layer, as one kind."""
    kind = _codes_kind([linear.weight for linear in linears], kind)
    weights = [_plain(linear.weight) for linear in linears]
    kind = exact_kind(weights, kind)
    return [pack_linear(weight, kind) for weight in weights]


def _codes_kind(matrices: Sequence[Matrix], kind: str) -> str:
    """The kind of the panels of matrices: int8 in place of bf16 where the packer finds their codes again."""
    return "int8" if kind == "bf16" and all(map(_is_whole_int8, matrices)) else kind


def _is_whole_int8(matrix: Matrix) -> bool:
    """Whether a matrix is in 8 bits with one scale for each output. The packer's scale is that of the largest code, so
    this has to be 127, as the quantizer makes it."""
    if not isinstance(matrix, QuantizedMatrix) or matrix.coding != "int8" or matrix.group < matrix.shape[1]:
        return False
    codes = matrix.codes.view(torch.int8)
    largest = codes.abs().amax(1)
    found = ((largest == MAX_QUANTUM) | (largest == 0)).all() and (codes >= -MAX_QUANTUM).all()
    return bool(found) and matrix.offsets is None


def _plain(weight: Matrix) -> torch.Tensor:
    return plain(weight, torch.float32) if isinstance(weight, QuantizedMatrix) else weight


def _write(writer: PackedWriter, name: str, packed: list[PackedWeight]) -> None:
    """Writes one matrix, or the matrices of all experts one behind the other."""
    first = packed[0]
    writer.tensor(name + ".data", torch.stack([one.data for one in packed]))
    if first.scales is not None:
        writer.tensor(name + ".scales", torch.stack([one.scales for one in packed if one.scales is not None]))
    writer.number(name + ".depth", first.depth)
    writer.number(name + ".pairs", first.pairs)
    writer.number(name + ".num_groups", len(packed))
    writer.number(name + ".group_bytes", first.data.numel() * first.data.element_size())
