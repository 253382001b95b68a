"""Weights in one region of GPU memory, divided into tensors by a plan that all workers of a GPU compute alike.

    plan --size--> region, shared through the KV node --views--> GpuWeights
                      '-- the worker that must fill it copies the checkpoint, layer by layer

The plan of an unquantized checkpoint follows from the config and the names of tensors. The layout of quantized matrices
may depend on their values, so a quantized checkpoint is packed once into a file of the models' cache, whose header is
the plan. Either way a second worker of a GPU reads no weights. The plan's digest is part of the region's key, so that
versions of this program with different plans do not share regions.

A rank has its own plan, region and packed file, with its shard of every layer and of the vocabulary. So has a pipeline
stage, with its own layers; the first one also has the embedding, and none has the output projection.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from pillion.engine.backends.gpu.shared_experts import join_weights
from pillion.engine.checkpoints.checkpoint import TensorSource, decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.model_cache import PACKING_VERSION, ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.packed_file import PackedFile, PackedWriter, packed_once
from pillion.engine.checkpoints.weights import (
    DTYPES,
    embedding_scale,
    load_final_norm,
    load_head,
    load_layer,
    load_positions,
    load_token_inputs,
    rounded,
)
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import Layer, Mlp, Role, tensors_of
from pillion.engine.models.layer_weights import LayerWeights
from pillion.engine.models.layers import LayerNorm, RmsNorm
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.ranks.rank_weights import shard_layer
from pillion.errors import ConfigError
from pillion.kernels.gpu.products.fp8_product import Fp8Matrix, fp8_matrix
from pillion.kernels.gpu.products.gpu_packing import (
    BITS,
    SCALES,
    SHIFTS,
    PackedKind,
    PackedMatrix,
    can_pack,
    pack,
    pack_alike,
)
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, plain, select_rows
from pillion.kernels.torch.torch_linear import Linear

# Alignment of tensors; kernels and cuBLAS need 16 bytes, TMA 128.
ALIGN_BYTES = 256
# Values of PackedKind's str fields; a packed file's header has their indices.
_KIND_NAMES: dict[str, tuple[str, ...]] = {"coding": tuple(BITS), "scale": SCALES, "shift": SHIFTS}
# Name of an int32 tensor: indices of a rank's inner values of a layer's MLP; absent if they are in order.
INNER_VALUES = "inner_values"


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A tensor's shape, type and offset in the region, in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Layout of a model's weights in a region.

    Attributes:
        places: tensors by name.
        nbytes: size of the region.
        kinds: quantized matrices by name, whose tensors are NAME.words, NAME.scales, ... Other matrices are the tensor
            NAME.weight, or NAME for experts and the head.
    """

    places: dict[str, WeightPlace]
    nbytes: int
    kinds: dict[str, PackedKind] = field(default_factory=dict)

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of the plan."""
        described = [[name, list(place.shape), str(place.dtype), place.offset] for name, place in self.places.items()]
        kinds = [[name, *astuple(kind)] for name, kind in self.kinds.items()]
        return hashlib.sha256(json.dumps([described, kinds]).encode()).hexdigest()


class GpuWeights(dict[str, torch.Tensor]):
    """Tensors of a region by name: ``layers.3.qkv.weight``, ``layers.3.down.bias``, ``final_norm``..."""

    def __init__(self, config: ModelConfig, plan: WeightPlan, memory: torch.Tensor, dtype: torch.dtype) -> None:
        """``config``: of the whole model. ``memory``: the region, uint8, at least ``plan.nbytes`` long."""
        self.config, self.plan = config, plan
        self.device, self.dtype = memory.device, dtype
        # Releases the region; called after the last step.
        self.close: Callable[[], None] = lambda: None
        self.embedding_scale = embedding_scale(config, dtype)
        inputs = config.token_inputs
        self.token_input_scale = 1.0 if inputs is None else rounded(inputs.width**0.5, dtype)
        for name, place in plan.places.items():
            self[name] = memory[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)

    def matrix(self, name: str) -> torch.Tensor | PackedMatrix | Fp8Matrix | None:
        """Return the matrix ``name`` ("layers.3.qkv", "lm_head"), or the stack of a layer's experts; None if the model
        does not have it."""
        if f"{name}.codes" in self:
            return Fp8Matrix(self[f"{name}.codes"], self[f"{name}.scales"])
        kind = self.plan.kinds.get(name)
        if kind is None:
            return self.get(f"{name}.weight", self.get(name))
        optional = {part: self.get(f"{name}.{part}") for part in ("offsets", "factors", "order")}
        return PackedMatrix(kind, self[f"{name}.words"], self[f"{name}.scales"], **optional)

    @property
    def head(self) -> torch.Tensor | PackedMatrix | None:
        """The output projection [vocab, hidden], which is the embedding if the model ties them. None in a process with
        neither."""
        head = self.matrix("lm_head")
        assert not isinstance(head, Fp8Matrix)
        return self.get("embedding") if head is None else head

    @property
    def norm_is_wide(self) -> bool:
        """True if norms are rounded after the multiplication by their weight (engine.models.layers.rms_norm_wide)."""
        return self.config.norm != "plain"

    @property
    def norm_is_centered(self) -> bool:
        """True if the model's norms are LayerNorms."""
        return self.config.norm == "layer"

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]], progress: Progress) -> None:
        """Copy all of the plan's tensors into the region."""
        left = set(self)
        for name, tensor in tensors:
            self[name].copy_(tensor)
            left.remove(name)
            if name.endswith((".qkv.weight", ".qkv.words", ".latent_norm")):
                progress(f"weights to the GPU: layer {name.split('.')[1]} of {self.config.num_layers}")
        assert not left, left

    def fill_dummy(self) -> None:
        """Fill the region with random weights, for benchmarks. Replicated tensors, such as routers, are equal on all
        ranks."""
        device = next(iter(self.values())).device
        generator = torch.Generator(device)
        with torch.inference_mode():
            for name, tensor in self.items():
                generator.manual_seed(zlib.crc32(name.encode()))
                if name.rpartition(".")[2].endswith(("norm", "scalar")):
                    tensor.fill_(1.0)
                else:
                    # With this standard deviation, activations stay finite.
                    tensor.normal_(0.0, 0.02, generator=generator)


class GpuPackedFile(PackedFile):
    """Packed file of a quantized checkpoint, with its plan."""

    # Workers other than the first need only the header.
    read_ahead = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        names = sorted({name.rpartition(".")[0] for name in self.numbers})
        try:
            kinds = {
                name: PackedKind(**{key.name: self._kind(name, key.name) for key in fields(PackedKind)})
                for name in names
            }
        except LookupError as error:
            raise ConfigError(f"{path} cannot be used ({error}); remove it") from None
        self.plan = _planned(self.tensors.items(), kinds)

    def _kind(self, name: str, key: str) -> Any:
        number = self.numbers[f"{name}.{key}"]
        return _KIND_NAMES[key][number] if key in _KIND_NAMES else number


class _ShapesOnly:
    """A checkpoint of meta tensors, with which the loader computes a plan."""

    def __init__(self, config: ModelConfig) -> None:
        self._checkpoint_names = {key: checkpoint_names[0] for key, checkpoint_names in decoder_tensors(config).items()}

    def has(self, key: str) -> bool:
        return key in self._checkpoint_names

    def load(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor ``key`` of the checkpoint as a meta tensor."""
        shapes = [tensor.shape[tensor.part is not None :] for tensor in self._checkpoint_names[key]]
        return torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device="meta")

    def load_matrix(self, key: str, dtype: torch.dtype) -> Matrix:
        return self.load(key, dtype)


def plan_weights(
    config: ModelConfig, dtype: torch.dtype, shard: ModelShard, *, separate_head: bool, join: bool = True
) -> WeightPlan:
    """Plan the weights of an unquantized model. ``separate_head``: the output projection is not the embedding;
    ``join``: shared experts may be put into the stacks of experts (shared_experts.py)."""
    config = replace(config, tie_word_embeddings=not separate_head)
    named = _named_tensors(_ShapesOnly(config), config, dtype, shard, join=join)
    return _planned(((name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)), {})


def _planned(tensors: Iterable[tuple[str, torch.Tensor]], kinds: dict[str, PackedKind]) -> WeightPlan:
    """Place tensors one after the other, aligned."""
    places: dict[str, WeightPlace] = {}
    end = 0
    for name, tensor in tensors:
        places[name] = WeightPlace(tuple(tensor.shape), tensor.dtype, end)
        end += -(-places[name].nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return WeightPlan(places, end, kinds)


def plan_folder(
    folder: Path, config: ModelConfig, dtype: torch.dtype, shard: ModelShard, *, join: bool = True
) -> WeightPlan:
    """Plan the weights of an unquantized checkpoint. Raises ConfigError if it does not fit the config."""
    with open_checkpoint(folder, config) as checkpoint:
        separate = checkpoint.has("lm_head")
        if separate and config.tie_word_embeddings:
            embedding = checkpoint.load("embedding", dtype)
            separate = load_head(checkpoint, config, dtype, embedding) is not embedding
    return plan_weights(config, dtype, shard, separate_head=separate, join=join)


def pack_folder(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    shard: ModelShard,
    fingerprint: str,
    progress: Progress,
    *,
    in_fp8: bool,
    join: bool,
) -> GpuPackedFile:
    """Map the packed file of a quantized checkpoint; the first call packs it. There are separate files with FP8
    matrices for FP8 products (``in_fp8``), and with shared experts in the stacks of experts (``join``). Raises
    ConfigError for a checkpoint that does not fit the config."""

    def write(writer: PackedWriter) -> None:
        progress("packing weights for the GPU")
        with open_checkpoint(folder, config) as checkpoint, torch.inference_mode():
            for name, value in _named_tensors(checkpoint, config, dtype, shard, in_fp8=in_fp8, join=join):
                if isinstance(value, torch.Tensor):
                    writer.tensor(name, value)
                    continue
                for part, tensor in value.parts.items():
                    writer.tensor(f"{name}.{part}", tensor)
                if isinstance(value, Fp8Matrix):
                    continue
                for key, number in asdict(value.kind).items():
                    writer.number(f"{name}.{key}", _KIND_NAMES[key].index(number) if key in _KIND_NAMES else number)

    cache = ModelCache()
    share = "" if shard.whole else f"_rank{shard.name}"
    if shard.layers is not None:
        share += f"_layers{shard.layers.start}to{shard.layers.stop}"
    share += "_fp8" * in_fp8 + "_joined" * (join and config.moe is not None and config.moe.shared > 0)
    path = cache.packed_weights(fingerprint, f"gpu_{str(dtype).removeprefix('torch.')}{share}")
    return packed_once(path, GpuPackedFile, write, cache, progress)


def weights_key(fingerprint: str, dtype: str, plan: WeightPlan, shard: ModelShard) -> str:
    """Return the hexadecimal key of the region for these weights; workers with equal keys share it."""
    layout = f"pillion weights {PACKING_VERSION} {fingerprint} {dtype} {plan.digest()} {shard.rank} {shard.size}"
    return hashlib.sha256(layout.encode()).hexdigest()


def _named_tensors(
    checkpoint: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    shard: ModelShard,
    *,
    in_fp8: bool = False,
    join: bool = True,
) -> Iterator[tuple[str, torch.Tensor | PackedMatrix | Fp8Matrix]]:
    """Yield the names and weights of ``shard``, layer by layer to limit the memory."""
    tokens, layers, own = shard.vocabulary(config.vocab_size), layers_of(config), shard.own_layers(config)
    own_tokens = slice(tokens.start, tokens.stop)
    head = embedding = None
    if own.start == 0:
        embedding = checkpoint.load("embedding", dtype)
        yield "embedding", embedding[own_tokens]
        positions = load_positions(checkpoint, config, dtype)
        if positions is not None:
            yield "positions", positions
        token_inputs = load_token_inputs(checkpoint, config, dtype)
        if token_inputs is not None:
            yield "token_inputs.embedding", token_inputs.embedding
            yield "token_inputs.projection", token_inputs.projection
            yield from _norm_tensors("token_inputs.norm", token_inputs.norm)
        if shard.gives_logits:
            head = load_head(checkpoint, config, dtype, embedding)
    for index in own:
        layer = load_layer(checkpoint, config, dtype, index, Linear.plain)
        operations = layers[index]
        if join:
            layer, operations = join_weights(layer, operations, shard, in_fp8=in_fp8)
        for name, tensor in layer_tensors(operations, layer, dtype, shard, in_fp8):
            yield f"layers.{index}.{name}", tensor
    if head is None:
        return
    yield from _norm_tensors("final_norm", load_final_norm(checkpoint, config, dtype))
    if head is not embedding:
        yield "lm_head", _stored(select_rows(head, own_tokens), dtype)


def layer_tensors(
    operations: Layer, whole: LayerWeights, dtype: torch.dtype, shard: ModelShard, in_fp8: bool
) -> Iterator[tuple[str, torch.Tensor | PackedMatrix | Fp8Matrix]]:
    """Yield the names and weights of ``shard`` of a layer, whose weights of all ranks are ``whole``."""
    for operation in operations:
        if not shard.whole and isinstance(operation, Mlp):
            down = whole.linear(operation.down).weight
            if isinstance(down, QuantizedMatrix) and down.order is not None:
                own = shard.inner(len(down.order))
                yield INNER_VALUES, down.order[own.start : own.stop].int()
    weights = shard_layer(whole, operations, shard)
    for tensor in tensors_of(operations):
        name = tensor.name
        match tensor.role:
            case Role.NORM | Role.HEAD_NORM:
                yield from _norm_tensors(name, weights.norm(tensor))
            case Role.EXACT_MATRIX | Role.HEAD_MATRICES | Role.VECTOR | Role.EXACT_VECTOR:
                yield name, weights.tensor(tensor)
            case Role.TAPS:
                taps = weights.taps(tensor)
                yield name, taps.factors
                if taps.bias is not None:
                    yield f"{name}.bias", taps.bias
            case Role.MATRIX if tensor.experts:
                experts = weights.experts(tensor)
                yield name, _stacked([expert.weight for expert in experts], dtype)
                biases = [expert.bias for expert in experts if expert.bias is not None]
                if biases:
                    yield f"{name}.bias", torch.stack(biases)
            case Role.MATRIX:
                linear = weights.linear(tensor)
                fp8 = fp8_matrix(linear.weight) if in_fp8 and isinstance(linear.weight, QuantizedMatrix) else None
                matrix = fp8 or _stored(linear.weight, dtype)
                yield (f"{name}.weight" if isinstance(matrix, torch.Tensor) else name), matrix
                if linear.bias is not None:
                    yield f"{name}.bias", linear.bias


def _norm_tensors(name: str, norm: RmsNorm | LayerNorm) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, norm.weight
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        yield f"{name}.bias", norm.bias


def _stored(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor | PackedMatrix:
    """Return a matrix packed if it is quantized and a kernel supports it, otherwise in floating point."""
    return pack(matrix, dtype) if isinstance(matrix, QuantizedMatrix) and can_pack(matrix) else plain(matrix, dtype)


def _stacked(matrices: list[Matrix], dtype: torch.dtype) -> torch.Tensor | PackedMatrix:
    """Return the stack of all experts' matrices: packed if all of them are of one kind, otherwise in floating point."""
    packable = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix) and can_pack(matrix)]
    packed = pack_alike(packable, dtype) if len(packable) == len(matrices) else []
    if len({(matrix.kind, *matrix.parts) for matrix in packed}) != 1:
        return torch.stack([plain(matrix, dtype) for matrix in matrices])
    parts = {name: torch.stack([matrix.parts[name] for matrix in packed]) for name in packed[0].parts}
    return PackedMatrix(packed[0].kind, **parts)


def own_weights(
    config: ModelConfig, named: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device
) -> GpuWeights:
    """Copy tensors, e.g. of an EAGLE head, to memory that is not shared with other processes."""
    plan = _planned(named, {})
    weights = GpuWeights(config, plan, torch.empty(plan.nbytes, dtype=torch.uint8, device=device), dtype)
    weights.fill(named, lambda line: None)
    return weights


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """A region for weights.

    Attributes:
        memory: uint8, of at least the requested size.
        must_fill: True if this worker must copy the weights.
        filled: to be called when the weights are complete.
        close: to be called when this worker no longer uses them. Idempotent.
    """

    memory: torch.Tensor
    must_fill: bool
    filled: Callable[[], None]
    close: Callable[[], None] = lambda: None


# Returns the region with a key and a size in bytes.
GetMemory = Callable[[str, int], WeightMemory]


def load_gpu_weights(
    folder: Path,
    config: ModelConfig,
    *,
    fingerprint: str,
    dtype: str,
    shard: ModelShard,
    memory: GetMemory,
    dummy: bool = False,
    in_fp8: bool = False,
    join: bool = True,
    progress: Progress = lambda line: None,
) -> GpuWeights:
    """Load ``shard`` of the weights in a prepared folder, or random ones (``dummy``), into a region from ``memory``.

    ``in_fp8``: store FP8 matrices for FP8 products if possible. ``join``: shared experts may be put into the stacks of
    experts. Raises ConfigError for a checkpoint that does not fit its config.
    """
    kind = DTYPES[dtype]
    packed = None
    if dummy:
        plan = plan_weights(config, kind, shard, separate_head=not config.tie_word_embeddings, join=join)
    elif config.quantization:
        packed = pack_folder(folder, config, kind, shard, fingerprint, progress, in_fp8=in_fp8, join=join)
        plan = packed.plan
    else:
        plan = plan_folder(folder, config, kind, shard, join=join)
    region = memory(weights_key(fingerprint, dtype, plan, shard), plan.nbytes)
    weights = GpuWeights(config, plan, region.memory, kind)
    weights.close = region.close
    if region.must_fill:
        if dummy:
            weights.fill_dummy()
        elif packed is not None:
            weights.fill(packed.tensors.items(), progress)
        else:
            with open_checkpoint(folder, config) as checkpoint, torch.inference_mode():
                named = _named_tensors(checkpoint, config, kind, shard, join=join)
                weights.fill(((name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)), progress)
        if region.memory.is_cuda:
            # Other processes read the weights as soon as they are reported as filled.
            torch.cuda.synchronize(region.memory.device)
        region.filled()
    return weights
