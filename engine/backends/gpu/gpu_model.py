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
from pillion.kernels.gpu.products.fp8_product import Fp8Gemm, Fp8Matrix
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from pillion.kernels.gpu.products.head_product import head_product
from pillion.kernels.gpu.products.plain_product import DenseGemm
from pillion.kernels.gpu.products.quantized_product import QuantizedGemm

GpuMatrix = torch.Tensor | PackedMatrix | Fp8Matrix


class GpuNorm(NamedTuple):
    """A norm's weight and, if it has one, its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _LatentBuffers:
    """The buffers of attention over latents, [max_tokens, ...] each: down-projected queries, queries, rows of latents
    and rotated key, and heads' results."""

    few: torch.Tensor
    projected: torch.Tensor
    rows: torch.Tensor
    found: torch.Tensor

    @staticmethod
    def of(config: ModelConfig, rows: Callable[[int], torch.Tensor]) -> _LatentBuffers | None:
        """Allocate the buffers of a model, each by ``rows`` of its width; None for a model without latents."""
        latents, heads = config.latents, config.num_heads
        if latents is None:
            return None
        widths = latents.q_lora_rank, heads * latents.head_dim, config.head_dim, heads * latents.v_head_dim
        return _LatentBuffers(*map(rows, widths))


class GpuLayer:
    """One layer's operations and its tensors, by the names of the layer's description.

    Attributes:
        norms: the norms of the residual stream, and those of queries and keys.
        matrices: the matrices of linear layers, those of all experts in one stack, and the router.
        biases: the biases of linear layers, those of all experts as rows; None without one.
        bends: the factors of xIELU, by the names of the tensors from which they are computed.
    """

    def __init__(self, weights: GpuWeights, index: int, operations: Layer) -> None:
        own = f"layers.{index}."
        self.operations = join_operations(operations, lambda mixed, beside: _joined(weights, own, mixed, beside))
        joined = [one.beside for one in self.operations if isinstance(one, JoinedExperts) and one.joined]
        stacked = {tensor.name for beside in joined for tensor in (beside.gate_up, beside.down)}
        self._tensors = [tensor for tensor in tensors_of(operations) if tensor.name not in stacked]
        self.norms: dict[str, GpuNorm] = {}
        self.matrices: dict[str, GpuMatrix] = {}
        self.biases: dict[str, torch.Tensor | None] = {}
        for tensor in self._tensors:
            name = own + tensor.name
            if tensor.role in (Role.NORM, Role.HEAD_NORM):
                self.norms[tensor.name] = GpuNorm(weights[name], weights.get(f"{name}.bias"))
                continue
            matrix = weights.matrix(name)
            assert matrix is not None
            self.matrices[tensor.name] = matrix
            self.biases[tensor.name] = weights.get(f"{name}.bias")
        bends = [one.bends.name for one in self.operations if isinstance(one, Mlp) and one.bends is not None]
        self.bends: dict[str, tuple[float, float]] = {}
        for name in bends:
            numbers = self.matrices[name]
            assert isinstance(numbers, torch.Tensor)
            above, below = xielu_factors(numbers).tolist()
            self.bends[name] = above, below

    def tensor(self, tensor: LayerTensor) -> torch.Tensor:
        """Return a tensor that is never quantized."""
        found = self.matrices[tensor.name]
        assert isinstance(found, torch.Tensor)
        return found

    def packed(self) -> Iterator[tuple[PackedMatrix, torch.Tensor | None]]:
        """Yield the quantized matrices that all rows pass, and their biases."""
        for tensor in self._tensors:
            matrix = self.matrices.get(tensor.name)
            if isinstance(matrix, PackedMatrix) and not tensor.experts:
                yield matrix, self.biases[tensor.name]

    def plain(self, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the plain matrices of this type, except those of experts, and their biases. A router whose bias is
        exact is left out: a separate kernel multiplies by it."""
        for name, matrix in self.matrices.items():
            bias = self.biases[name]
            if bias is not None and bias.dtype != dtype:
                continue
            if isinstance(matrix, torch.Tensor) and matrix.dim() == 2 and matrix.dtype == dtype:
                yield matrix, bias


def _joined(weights: GpuWeights, layer: str, mixed: Experts, beside: Mlp) -> int:
    """Return the number of experts in a stack that are the MLP beside the others."""
    if weights.matrix(layer + beside.down.name) is not None:
        return 0
    stack = weights.matrix(layer + mixed.down.name)
    assert isinstance(stack, torch.Tensor | PackedMatrix)
    return len(stack.words if isinstance(stack, PackedMatrix) else stack) - mixed.router.shape[0]


class GpuModel:
    """A model's weights, rotary tables and activation buffers on one device, for steps of at most ``max_tokens``.

    Attributes:
        config: the shape of the model, or of the rank's share of it.
        shard: the part of the model that the process computes.
        ranks: the worker's other ranks, or None.
        layers: the process's layers, by their numbers in the model.
        max_tokens: max tokens of a step. longest: max tokens of a sequence.
        state_layers, states: the layers whose inputs are stored for an EAGLE head, and these [max_tokens, ...].
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
        """``max_sampled``: max tokens that one step samples, which the next step may embed.

        ``max_samples``: rows of the logits' buffer shared by all steps; larger steps allocate their own. ``shard``:
        what the process computes, by default the share of its rank, or the whole model. ``operations``: those of the
        layers, by default the config's. ``invariant``: a token's bits must depend only on its sequence
        (``--batch-invariant``).
        """
        self.shard = shard or (whole_model(weights.config) if ranks is None else ranks.shard)
        config, device, dtype = self.shard.local(weights.config), weights.device, weights.dtype
        self.config, self.device, self.dtype = config, device, dtype
        self.max_tokens, self.longest = max_tokens, max_model_len
        self.ranks, self.invariant = ranks, invariant
        self.capturable = ranks is None or ranks.capturable
        self.weights = weights
        self.tokens = None if ranks is None else ranks.shard.vocabulary(config.vocab_size)
        self.adapters: GpuAdapters | None = None
        # The rank's inner values of MLPs, by layer, unless they are in order.
        self.inner_values = _inner_values(weights)
        every = operations or layers_of(config)
        self.layers = {index: GpuLayer(weights, index, every[index]) for index in self.shard.own_layers(config)}
        self._packed = [(*each, dtype) for layer in self.layers.values() for each in layer.packed()]
        if isinstance(weights.head, PackedMatrix):
            self._packed.append((weights.head, None, torch.float32))
        self._fp8 = Fp8Gemm((matrix for matrix, _ in self._in_fp8()), max_tokens, dtype, device)
        self._quantized = QuantizedGemm((each[0] for each in self._packed), max_tokens, dtype, device)
        self._plain = DenseGemm(max_tokens, dtype, device)
        # The rotary tables are rounded as in transformers.
        tables = rope_tables(config, max_model_len)
        self.ropes = [(cos.to(dtype).to(device), sin.to(dtype).to(device)) for cos, sin in tables]
        self.no_rope = _no_rope(config, max_tokens, dtype, device)
        growth = growth_table(config, max_model_len)
        self.growth = None if growth is None else growth.to(device)
        self.sampled = torch.zeros(max_sampled, dtype=torch.int32, device=device)
        # Shared by all graphs: separate logits would need gigabytes, and the pool takes the memory that is left.
        leads = ranks is None or ranks.shard.leads
        self.logits = torch.zeros(max_samples if leads else 0, config.vocab_size, dtype=torch.float32, device=device)
        # The output projection of a plain matrix writes its logits here, before they are cast to float32.
        narrow = dtype != torch.float32 and not isinstance(weights.head, PackedMatrix)
        kind = dtype if narrow else torch.float32
        self.shares = None if ranks is None else RankLogits(ranks, config.vocab_size, max_samples, kind, device)
        self.head = torch.zeros_like(self.logits, dtype=dtype) if narrow and ranks is None else self.logits
        self._make_rows()
        self.set_aux_hidden_state_layers(())

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Allocate the buffer in which a step stores the inputs of these layers, side by side, for all its rows."""
        self.state_layers = tuple(layers)
        self.states = self._rows(len(layers) * self.config.hidden_size)

    def _rows(self, width: int) -> torch.Tensor:
        """Allocate a buffer of a step's rows."""
        return torch.zeros(self.max_tokens, width, dtype=self.dtype, device=self.device)

    def _make_rows(self) -> None:
        """Allocate the buffers of a step's rows."""
        config, rows = self.config, self._rows
        every = [operation for layer in self.layers.values() for operation in layer.operations]
        self.residual, self.normed, self.found = (rows(config.hidden_size) for _ in range(3))
        self.added_up = rows(config.hidden_size if any(isinstance(one, AddToLayerSum) for one in every) else 0)
        self.latents = _LatentBuffers.of(config, rows)
        # Layers that differ in their heads share these buffers, of the largest size.
        heads, widest = config.num_heads, max(kind.head_dim for kind in config.all_heads)
        plain = 2 if config.latents is None else 0
        projected = max((heads + plain * kind.kv_heads) * kind.head_dim for kind in config.all_heads)
        self.qkv, self.attended = rows(projected), rows(heads * (widest if plain else config.value_dim))
        # -inf: no effect on the softmax.
        self.no_sinks = torch.full((heads,), -torch.inf, device=self.device) if self.has_sinks else None
        # A product may compute gates of attention's results in front of queries, keys and values.
        gates = max((one.values.size for one in every if isinstance(one, KeepGate)), default=0)
        self.gated_qkv = rows(gates + projected) if gates else self.qkv
        inner, inputs = max(config.widest_mlp, config.hidden_size), config.token_inputs
        # Layers' inputs per token are computed before the first MLP, in its buffer.
        beside = 0 if inputs is None else config.num_layers * inputs.width
        self.token_inputs = rows(beside)
        self.gate_up, self.inner = rows(max(2 * inner, beside)), rows(inner)

    def product(
        self, rows: torch.Tensor, weight: GpuMatrix | None, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows [T, in] by weight [out, in] into ``out`` [T, out]."""
        assert weight is not None
        if isinstance(weight, PackedMatrix):
            return self._quantized(rows, weight, bias, out)
        if isinstance(weight, Fp8Matrix):
            return self._fp8(rows, weight, bias, out)
        if self.invariant or len(rows) <= self._plain.most_rows(weight):
            return self._plain(rows, weight, bias, out)
        if bias is None:
            return torch.mm(rows, weight.T, out=out)
        return torch.addmm(bias, rows, weight.T, out=out)

    def _in_fp8(self) -> Iterator[tuple[Fp8Matrix, torch.Tensor | None]]:
        """Yield the matrices for products in FP8, and their biases."""
        for layer in self.layers.values():
            for name, matrix in layer.matrices.items():
                if isinstance(matrix, Fp8Matrix):
                    yield matrix, layer.biases[name]

    def by_head(self, rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply rows [T, heads, in] by each head's matrix [heads, out, in] into ``out`` [T, heads, out]."""
        if self.invariant:
            head_product(rows, matrices, out)
        else:
            torch.bmm(rows.transpose(0, 1), matrices.mT, out=out.transpose(0, 1))

    def square_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Add up the squares of each row of [T, in] in float32: [T]."""
        squares = rows.float().square()
        if not self.invariant:
            return squares.sum(1)
        # torch adds up the values of a row in an order that depends on the number of rows.
        ones, sums = squares.new_ones(1, 1, squares.shape[1]), squares.new_empty(len(rows), 1, 1)
        return head_product(squares[:, None], ones, sums).view(-1)

    @property
    def plain_products(self) -> int:
        """The number of matrices that are not quantized, counting those of a layer's experts as one."""
        every = [each for layer in self.layers.values() for each in layer.matrices.values()] + [self.weights.head]
        return sum(isinstance(each, torch.Tensor) and each.dim() > 1 for each in every)

    @property
    def has_sinks(self) -> bool:
        """True if layers have attention sinks; ``no_sinks`` is for those without."""
        every = (operation for layer in self.layers.values() for operation in layer.operations)
        return any(isinstance(operation, Attend) and operation.sinks is not None for operation in every)

    @property
    def has_experts(self) -> bool:
        """True if a layer of this process is a mixture of experts."""
        return any(isinstance(operation, Experts) for layer in self.layers.values() for operation in layer.operations)

    def compile_products(self) -> None:
        """Compile the kernels of products, except cuBLAS's, for every number of rows."""
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
                most = self.max_tokens if self.invariant else self._plain.most_rows(weight)
                self._plain.compile(weight, bias, min(most, self.max_tokens))

    def _plain_matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the plain matrices that steps multiply by, except those of experts, and their biases."""
        for layer in self.layers.values():
            yield from layer.plain(self.dtype)
        # Outside of layers, and plain even if the layers are quantized.
        for matrix in (self.weights.head, self.weights.get("token_inputs.projection")):
            if isinstance(matrix, torch.Tensor):
                yield matrix, None


def _inner_values(weights: GpuWeights) -> dict[str, torch.Tensor]:
    """Return the rank's inner values of the MLP, by layers in which they are not in order."""
    names = (f"layers.{index}" for index in range(weights.config.num_layers))
    found = {name: weights.get(f"{name}.{INNER_VALUES}") for name in names}
    return {name: inner.long().cpu() for name, inner in found.items() if inner is not None}


def _no_rope(config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """Build rotary tables that rotate by 0, for a model whose latents have a key that is not rotated."""
    half = 0 if config.latents is None else config.latents.qk_rope_head_dim // 2
    cos, sin = (make(1, half, dtype=dtype, device=device) for make in (torch.ones, torch.zeros))
    return Rotary(cos, sin, torch.zeros(max_tokens, dtype=torch.int32, device=device))
