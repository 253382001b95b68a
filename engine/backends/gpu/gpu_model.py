"""A model on one GPU: its weights, rotary tables, and the fixed buffers of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pillion.engine.backends.gpu.gpu_weights import INNER_VALUES, GpuWeights
from pillion.engine.backends.gpu.shared_experts import JoinedExperts, join_operations
from pillion.engine.gpu_adapters.gpu_adapters import GpuAdapters
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.gpu_ranks.rank_logits import RankLogits
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import (
    AddToLayerSum,
    Attend,
    Experts,
    KeepGate,
    Layer,
    LayerTensor,
    Mlp,
    Role,
    tensors_of,
)
from pillion.engine.models.layers import xielu_factors
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard, whole_model
from pillion.engine.models.rope import growth_table, rope_tables
from pillion.kernels.gpu.attention.kv_write import Rotary
from pillion.kernels.gpu.products.dense_gemm import DenseGemm
from pillion.kernels.gpu.products.fp8_product import Fp8Gemm, Fp8Matrix
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from pillion.kernels.gpu.products.head_product import head_product
from pillion.kernels.gpu.products.quantized_product import QuantizedGemm

GpuMatrix = torch.Tensor | PackedMatrix | Fp8Matrix


class GpuNorm(NamedTuple):
    """A norm's weight, and its bias if it has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _LatentBuffers:
    """Buffers of attention over latents (MLA), [max_tokens, ...] each: latents of queries, queries, rows of latents and
    a rotated key, and the heads' outputs."""

    q_latent: torch.Tensor
    queries: torch.Tensor
    rows: torch.Tensor
    outputs: torch.Tensor

    @staticmethod
    def of(config: ModelConfig, rows: Callable[[int], torch.Tensor]) -> _LatentBuffers | None:
        """Allocate the buffers of a model by ``rows``, which takes a width; None for a model without latents."""
        latents, heads = config.latents, config.num_heads
        if latents is None:
            return None
        widths = latents.q_lora_rank, heads * latents.head_dim, config.head_dim, heads * latents.v_head_dim
        return _LatentBuffers(*map(rows, widths))


class GpuLayer:
    """One layer's operations and tensors, by the names of the layer's description.

    Attributes:
        norms: norms of the residual stream, of queries and of keys.
        matrices: matrices of linear layers, stacked for experts, and all other tensors.
        biases: biases of ``matrices``, stacked for experts; None without one.
        xielu_params: parameters of xIELU above and below 0, by the name of their tensor.
    """

    def __init__(self, weights: GpuWeights, index: int, operations: Layer) -> None:
        prefix = f"layers.{index}."
        self.operations = join_operations(operations, lambda mixed, shared: _joined(weights, prefix, mixed, shared))
        joined = [each.beside for each in self.operations if isinstance(each, JoinedExperts) and each.joined]
        stacked = {tensor.name for mlp in joined for tensor in (mlp.gate_up, mlp.down)}
        self._tensors = [tensor for tensor in tensors_of(operations) if tensor.name not in stacked]
        self.norms: dict[str, GpuNorm] = {}
        self.matrices: dict[str, GpuMatrix] = {}
        self.biases: dict[str, torch.Tensor | None] = {}
        for tensor in self._tensors:
            name = prefix + tensor.name
            if tensor.role in (Role.NORM, Role.HEAD_NORM):
                self.norms[tensor.name] = GpuNorm(weights[name], weights.get(f"{name}.bias"))
                continue
            matrix = weights.matrix(name)
            assert matrix is not None
            self.matrices[tensor.name] = matrix
            self.biases[tensor.name] = weights.get(f"{name}.bias")
        self.xielu_params: dict[str, tuple[float, float]] = {}
        for mlp in self.operations:
            if isinstance(mlp, Mlp) and mlp.bends is not None:
                above, below = xielu_factors(self.tensor(mlp.bends)).tolist()
                self.xielu_params[mlp.bends.name] = above, below

    def tensor(self, tensor: LayerTensor) -> torch.Tensor:
        """Return a tensor that is never quantized."""
        values = self.matrices[tensor.name]
        assert isinstance(values, torch.Tensor)
        return values

    def packed(self) -> Iterator[tuple[PackedMatrix, torch.Tensor | None]]:
        """Yield the quantized matrices, except those of experts, and their biases."""
        for tensor in self._tensors:
            matrix = self.matrices.get(tensor.name)
            if isinstance(matrix, PackedMatrix) and not tensor.experts:
                yield matrix, self.biases[tensor.name]

    def plain(self, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the unquantized matrices of type ``dtype``, except those of experts, and their biases. Excludes routers
        with a float32 bias, which have a separate kernel."""
        for name, matrix in self.matrices.items():
            bias = self.biases[name]
            if bias is not None and bias.dtype != dtype:
                continue
            if isinstance(matrix, torch.Tensor) and matrix.dim() == 2 and matrix.dtype == dtype:
                yield matrix, bias


def _joined(weights: GpuWeights, prefix: str, mixed: Experts, shared: Mlp) -> int:
    """Return the number of experts in the stack that come from the shared expert; 0 if it has separate matrices."""
    if weights.matrix(prefix + shared.down.name) is not None:
        return 0
    stack = weights.matrix(prefix + mixed.down.name)
    assert isinstance(stack, torch.Tensor | PackedMatrix)
    return len(stack.words if isinstance(stack, PackedMatrix) else stack) - mixed.router.shape[0]


class GpuModel:
    """A model's weights, rotary tables and activation buffers on one device, for steps of at most ``max_tokens``.

    Attributes:
        config: shape of the process's shard of the model.
        shard: the part of the model that the process computes.
        ranks: the worker's other ranks, or None.
        layers: the process's layers, by index in the model.
        max_tokens: max tokens of a step.
        aux_hidden_state_layers, states: layers whose inputs are stored for an EAGLE head, and these inputs [max_tokens,
            layers * hidden].
    """

    def __init__(
        self,
        weights: GpuWeights,
        max_model_len: int,
        max_tokens: int,
        max_sampled: int,
        *,
        max_samples: int = 0,
        ranks: GpuRankGroup | None = None,
        shard: ModelShard | None = None,
        operations: Sequence[Layer] = (),
        invariant: bool = False,
    ) -> None:
        """Allocate the buffers.

        Args:
            max_sampled: max tokens that a step samples and the next one may embed.
            max_samples: rows of the shared logits buffer; larger steps allocate their own.
            shard: of the model, by default that of the rank or all of it.
            operations: of all layers, by default those of the config.
            invariant: True if a token's bits may depend only on its sequence (``--batch-invariant``).
        """
        self.shard = shard or (whole_model(weights.config) if ranks is None else ranks.shard)
        config, device, dtype = self.shard.local(weights.config), weights.device, weights.dtype
        self.config, self.device, self.dtype = config, device, dtype
        self.max_tokens, self.max_model_len = max_tokens, max_model_len
        self.ranks, self.invariant = ranks, invariant
        self.capturable = ranks is None or ranks.capturable
        self.weights = weights
        self.tokens = None if ranks is None else ranks.shard.vocabulary(config.vocab_size)
        self.adapters: GpuAdapters | None = None
        # By layer: indices of the rank's inner values of the MLP, unless they are in order.
        self.inner_values = _inner_values(weights)
        layers = operations or layers_of(config)
        self.layers = {index: GpuLayer(weights, index, layers[index]) for index in self.shard.own_layers(config)}
        self._packed = [(*packed, dtype) for layer in self.layers.values() for packed in layer.packed()]
        if isinstance(weights.head, PackedMatrix):
            self._packed.append((weights.head, None, torch.float32))
        self._fp8 = Fp8Gemm((matrix for matrix, _ in self._in_fp8()), max_tokens, dtype, device)
        self._quantized = QuantizedGemm((packed[0] for packed in self._packed), max_tokens, dtype, device)
        self._plain = DenseGemm(max_tokens, dtype, device)
        # Rounded to the model's type, as in transformers.
        tables = rope_tables(config, max_model_len)
        self.ropes = [(cos.to(dtype).to(device), sin.to(dtype).to(device)) for cos, sin in tables]
        self.no_rope = _no_rope(config, max_tokens, dtype, device)
        query_scales = growth_table(config, max_model_len)
        self.query_scales = None if query_scales is None else query_scales.to(device)
        self.sampled = torch.zeros(max_sampled, dtype=torch.int32, device=device)
        # Shared by all graphs, because a buffer per graph would need gigabytes, at the expense of the pool.
        leads = ranks is None or ranks.shard.leads
        self.logits = torch.zeros(max_samples if leads else 0, config.vocab_size, dtype=torch.float32, device=device)
        # Output of an unquantized LM head, before the cast to float32.
        narrow = dtype != torch.float32 and not isinstance(weights.head, PackedMatrix)
        kind = dtype if narrow else torch.float32
        self.shares = None if ranks is None else RankLogits(ranks, config.vocab_size, max_samples, kind, device)
        self.head = torch.zeros_like(self.logits, dtype=dtype) if narrow and ranks is None else self.logits
        self._make_rows()
        self.set_aux_hidden_state_layers(())

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Make each step store these layers' inputs of all its rows, side by side in ``states``."""
        self.aux_hidden_state_layers = tuple(layers)
        self.states = self._rows(len(layers) * self.config.hidden_size)

    def _rows(self, width: int) -> torch.Tensor:
        """Allocate a buffer [max_tokens, width]."""
        return torch.zeros(self.max_tokens, width, dtype=self.dtype, device=self.device)

    def _make_rows(self) -> None:
        """Allocate the buffers of a step's rows."""
        config, rows = self.config, self._rows
        operations = [operation for layer in self.layers.values() for operation in layer.operations]
        self.residual, self.normed, self.projected = (rows(config.hidden_size) for _ in range(3))
        self.layer_sum = rows(config.hidden_size if any(isinstance(each, AddToLayerSum) for each in operations) else 0)
        self.latents = _LatentBuffers.of(config, rows)
        # Sized for the largest layer, and shared by all.
        heads, widest = config.num_heads, max(kind.head_dim for kind in config.all_heads)
        kv_planes = 2 if config.latents is None else 0
        projected = max((heads + kv_planes * kind.kv_heads) * kind.head_dim for kind in config.all_heads)
        self.qkv, self.attended = rows(projected), rows(heads * (widest if kv_planes else config.value_dim))
        # Sinks of layers without any: -inf has no effect on the softmax.
        self.no_sinks = torch.full((heads,), -torch.inf, device=self.device) if self.has_sinks else None
        # In some models the projection has gates of the attention output before queries, keys and values.
        gates = max((each.values.size for each in operations if isinstance(each, KeepGate)), default=0)
        self.gated_qkv = rows(gates + projected) if gates else self.qkv
        inner, inputs = max(config.widest_mlp, config.hidden_size), config.token_inputs
        # Per-layer token inputs are projected before the first MLP, in its buffer.
        input_width = 0 if inputs is None else config.num_layers * inputs.width
        self.token_inputs = rows(input_width)
        self.gate_up, self.inner = rows(max(2 * inner, input_width)), rows(inner)

    def product(
        self, rows: torch.Tensor, weight: GpuMatrix | None, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows [T, in] by the transpose of weight [out, in], add the bias, and return the product in ``out``
        [T, out]."""
        assert weight is not None
        if isinstance(weight, PackedMatrix):
            return self._quantized(rows, weight, bias, out)
        if isinstance(weight, Fp8Matrix):
            return self._fp8(rows, weight, bias, out)
        if self.invariant or len(rows) <= self._plain.max_rows(weight):
            return self._plain(rows, weight, bias, out)
        if bias is None:
            return torch.mm(rows, weight.T, out=out)
        return torch.addmm(bias, rows, weight.T, out=out)

    def _in_fp8(self) -> Iterator[tuple[Fp8Matrix, torch.Tensor | None]]:
        """Yield the matrices that are multiplied in FP8, and their biases."""
        for layer in self.layers.values():
            for name, matrix in layer.matrices.items():
                if isinstance(matrix, Fp8Matrix):
                    yield matrix, layer.biases[name]

    def by_head(self, rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply rows [T, heads, in] by the transpose of each head's matrix [heads, out, in] into ``out`` [T, heads,
        out]."""
        if self.invariant:
            head_product(rows, matrices, out)
        else:
            torch.bmm(rows.transpose(0, 1), matrices.mT, out=out.transpose(0, 1))

    def square_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares of each row [T, in], float32 [T]."""
        squares = rows.float().square()
        if not self.invariant:
            return squares.sum(1)
        # torch's order of addition within a row depends on the number of rows.
        ones, sums = squares.new_ones(1, 1, squares.shape[1]), squares.new_empty(len(rows), 1, 1)
        return head_product(squares[:, None], ones, sums).view(-1)

    @property
    def plain_products(self) -> int:
        """The number of unquantized matrices; a stack of experts counts as one."""
        matrices = [matrix for layer in self.layers.values() for matrix in layer.matrices.values()]
        return sum(isinstance(matrix, torch.Tensor) and matrix.dim() > 1 for matrix in [*matrices, self.weights.head])

    @property
    def has_sinks(self) -> bool:
        """True if a layer of this process has attention sinks."""
        operations = (operation for layer in self.layers.values() for operation in layer.operations)
        return any(isinstance(operation, Attend) and operation.sinks is not None for operation in operations)

    @property
    def has_experts(self) -> bool:
        """True if a layer of this process is a mixture of experts."""
        return any(isinstance(operation, Experts) for layer in self.layers.values() for operation in layer.operations)

    def compile_products(self) -> None:
        """Compile the variants of all product kernels, for every number of rows."""
        compiled: set[object] = set()
        for fp8, bias in self._in_fp8():
            shape = (fp8.codes.shape, fp8.in_blocks, bias is None)
            if shape not in compiled:
                compiled.add(shape)
                self._fp8.compile(fp8, bias)
        for matrix, bias, dtype in self._packed:
            key = (matrix.kind, *matrix.parts, bias is None, dtype)
            if key not in compiled:
                compiled.add(key)
                self._quantized.compile(matrix, bias, dtype)
        for weight, bias in self._plain_matrices():
            if (weight.shape, bias is None) not in compiled:
                compiled.add((weight.shape, bias is None))
                max_rows = self.max_tokens if self.invariant else self._plain.max_rows(weight)
                self._plain.compile(weight, bias, min(max_rows, self.max_tokens))

    def _plain_matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the unquantized matrices of the model, except those of experts, and their biases."""
        for layer in self.layers.values():
            yield from layer.plain(self.dtype)
        # Matrices outside of layers may be unquantized even if the layers are not.
        for matrix in (self.weights.head, self.weights.get("token_inputs.projection")):
            if isinstance(matrix, torch.Tensor):
                yield matrix, None


def _inner_values(weights: GpuWeights) -> dict[str, torch.Tensor]:
    """Return, by layer, the indices of the rank's inner values of the MLP; only for layers where they are reordered."""
    names = (f"layers.{index}" for index in range(weights.config.num_layers))
    by_layer = {name: weights.get(f"{name}.{INNER_VALUES}") for name in names}
    return {name: inner.long().cpu() for name, inner in by_layer.items() if inner is not None}


def _no_rope(config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """Return rotary tables that rotate by 0, for layers whose latents come with an unrotated key."""
    half = 0 if config.latents is None else config.latents.qk_rope_head_dim // 2
    cos, sin = (make(1, half, dtype=dtype, device=device) for make in (torch.ones, torch.zeros))
    return Rotary(cos, sin, torch.zeros(max_tokens, dtype=torch.int32, device=device))
