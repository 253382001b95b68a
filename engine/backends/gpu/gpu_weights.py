"""Weights in one piece of GPU memory, cut into tensors by a plan that every worker of a GPU computes alike.

    plan_weights --size--> memory (a region shared through the KV node) --cut--> GpuWeights
                                     '-- the worker that must fill it copies the checkpoint in, layer by layer

The plan depends on the config and on the names of a checkpoint's tensors but not on their values, so a second worker of
a GPU reads no weights at all. The plan's digest is part of the region's key, so versions of this file share nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import TensorSource, decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.weights import DTYPES, embedding_scale, load_final_norm, load_head, load_layer
from pillion.engine.models.decoder import LayerWeights
from pillion.engine.models.layers import MoeWeights, RmsNorm
from pillion.engine.models.model_config import ModelConfig
from pillion.kernels.torch.quantized_matrix import Matrix, plain
from pillion.kernels.torch.torch_linear import Linear

# Tensors begin at multiples of this, so that kernels and cuBLAS may load 16 bytes at a time, and TMA 128.
ALIGN_BYTES = 256
_NORMS = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "qk_norm", "q_norm", "k_norm")
# Standard deviation of random weights, with which a forward pass stays finite.
DUMMY_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A tensor's shape, type and offset in bytes from the beginning of the memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The ``places`` of a model's tensors by name, and ``nbytes``, the size of all of them."""

    places: dict[str, WeightPlace]
    nbytes: int

    def digest(self) -> str:
        """Returns the hexadecimal SHA-256 of names, shapes, types and offsets."""
        described = [[name, list(place.shape), str(place.dtype), place.offset] for name, place in self.places.items()]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()


class GpuWeights(dict[str, torch.Tensor]):
    """Views of one piece of memory, by name: ``layers.3.qkv.weight``, ``layers.3.mlp.down.bias``, ``final_norm``..."""

    def __init__(self, config: ModelConfig, plan: WeightPlan, memory: torch.Tensor, dtype: torch.dtype) -> None:
        """``memory``: uint8, at least ``plan.nbytes`` long; it is borrowed."""
        self.config, self.plan = config, plan
        # Releases the memory; to be called when no step can run any more.
        self.close: Callable[[], None] = lambda: None
        self.embedding_scale = embedding_scale(config, dtype)
        for name, place in plan.places.items():
            self[name] = memory[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)

    @property
    def head(self) -> torch.Tensor:
        """The output projection [vocab, hidden]: the embedding if the model ties the two."""
        return self.get("lm_head", self["embedding"])

    @property
    def norm_is_wide(self) -> bool:
        """Whether the model's norms round after their weight is applied (engine.models.layers.rms_norm_wide)."""
        return self.config.norm != "plain"

    def fill(self, folder: Path, dtype: torch.dtype, progress: Progress) -> None:
        """Copies a checkpoint into the memory. Raises ConfigError for tensors that are missing or misshapen."""
        with open_checkpoint(folder, self.config) as checkpoint, torch.inference_mode():
            left = set(self)
            for name, tensor in _tensors_of(checkpoint, self.config, dtype):
                self[name].copy_(tensor)
                left.remove(name)
                if name.endswith("qkv.weight"):
                    progress(f"weights to the GPU: layer {name.split('.')[1]} of {self.config.num_layers}")
            assert not left, left

    def fill_dummy(self, seed: int = 0) -> None:
        """Fills in random numbers for measurements, with a spread that keeps activations finite."""
        device = next(iter(self.values())).device
        generator = torch.Generator(device).manual_seed(seed)
        with torch.inference_mode():
            for name, tensor in self.items():
                if name.rpartition(".")[2].endswith("norm"):
                    tensor.fill_(1.0)
                else:
                    tensor.normal_(0.0, DUMMY_SPREAD, generator=generator)


class _ShapesOnly:
    """A checkpoint whose tensors have shapes and types and no values: the loader's input when memory is planned."""

    def __init__(self, config: ModelConfig) -> None:
        self._spellings = {key: spellings[0] for key, spellings in decoder_tensors(config).items()}

    def has(self, key: str) -> bool:
        return key in self._spellings

    def take(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor without memory."""
        shapes = [tensor.shape for tensor in self._spellings[key]]
        return torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device="meta")

    def take_matrix(self, key: str, dtype: torch.dtype) -> Matrix:
        return self.take(key, dtype)


def plan_weights(config: ModelConfig, dtype: torch.dtype, *, separate_head: bool) -> WeightPlan:
    """Plans a model's memory. ``separate_head``: whether the output projection is another than the embedding."""
    config = replace(config, tie_word_embeddings=not separate_head)
    places: dict[str, WeightPlace] = {}
    end = 0
    for name, tensor in _tensors_of(_ShapesOnly(config), config, dtype):
        places[name] = WeightPlace(tuple(tensor.shape), tensor.dtype, end)
        end += -(-places[name].nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return WeightPlan(places, end)


def plan_folder(folder: Path, config: ModelConfig, dtype: torch.dtype) -> WeightPlan:
    """Plans a checkpoint's memory. Raises ConfigError if the checkpoint does not fit the config."""
    with open_checkpoint(folder, config) as checkpoint:
        separate = checkpoint.has("lm_head")
        if separate and config.tie_word_embeddings:
            embedding = checkpoint.take("embedding", dtype)
            separate = load_head(checkpoint, config, dtype, embedding) is not embedding
    return plan_weights(config, dtype, separate_head=separate)


def weights_key(fingerprint: str, dtype: str, plan: WeightPlan) -> str:
    """Returns the hexadecimal key of a region with these weights: workers with equal keys share the region."""
    return hashlib.sha256(f"pillion weights {fingerprint} {dtype} {plan.digest()}".encode()).hexdigest()


def _tensors_of(
    checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and tensors layer by layer, so that little memory is held at a time."""

    def linear(weight: Matrix, bias: torch.Tensor | None) -> Linear:
        return Linear.plain(plain(weight, dtype), bias)

    embedding = checkpoint.take("embedding", dtype)
    yield "embedding", embedding
    head = load_head(checkpoint, config, dtype, embedding)
    for index in range(config.num_layers):
        layer = load_layer(checkpoint, config, dtype, index, linear)
        for name, tensor in _layer_tensors(layer):
            yield f"layers.{index}.{name}", tensor
    yield "final_norm", load_final_norm(checkpoint, config, dtype).weight
    if head is not embedding:
        yield "lm_head", plain(head, dtype)


def _layer_tensors(layer: LayerWeights) -> Iterator[tuple[str, torch.Tensor]]:
    for name in _NORMS:
        norm: RmsNorm | None = getattr(layer, name)
        if norm is not None:
            yield name, norm.weight
    linears: list[tuple[str, Linear]] = [("qkv", layer.qkv), ("o", layer.o)]
    if isinstance(layer.mlp, MoeWeights):
        yield "router", layer.mlp.router
        yield "experts.gate_up", _stacked([expert.gate_up for expert in layer.mlp.experts])
        yield "experts.down", _stacked([expert.down for expert in layer.mlp.experts])
    else:
        linears += [("mlp.gate_up", layer.mlp.gate_up), ("mlp.down", layer.mlp.down)]
    for name, linear in linears:
        yield f"{name}.weight", _plain_weight(linear)
        if linear.bias is not None:
            yield f"{name}.bias", linear.bias


def _stacked(linears: list[Linear]) -> torch.Tensor:
    return torch.stack([_plain_weight(linear) for linear in linears])


def _plain_weight(linear: Linear) -> torch.Tensor:
    assert isinstance(linear.weight, torch.Tensor)
    return linear.weight


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Memory for weights, uint8 of at least the requested size.

    Attributes:
        must_fill: whether this worker must copy the weights in.
        filled: to be called when the weights are there.
        close: to be called when this worker no longer uses them. Idempotent.
    """

    memory: torch.Tensor
    must_fill: bool
    filled: Callable[[], None]
    close: Callable[[], None] = lambda: None


# Gets memory by the weights' key and their size in bytes.
GetMemory = Callable[[str, int], WeightMemory]


def load_gpu_weights(
    folder: Path,
    config: ModelConfig,
    *,
    fingerprint: str,
    dtype: str,
    memory: GetMemory,
    dummy: bool = False,
    progress: Progress = lambda line: None,
) -> GpuWeights:
    """Loads the weights of a prepared folder, or random ones (``dummy``), into memory from ``memory``. Raises
    ConfigError for a checkpoint that does not fit its config."""
    kind = DTYPES[dtype]
    plan = (
        plan_weights(config, kind, separate_head=not config.tie_word_embeddings)
        if dummy
        else plan_folder(folder, config, kind)
    )
    given = memory(weights_key(fingerprint, dtype, plan), plan.nbytes)
    weights = GpuWeights(config, plan, given.memory, kind)
    weights.close = given.close
    if given.must_fill:
        if dummy:
            weights.fill_dummy()
        else:
            weights.fill(folder, kind, progress)
        if given.memory.is_cuda:
            # Another process may read the weights as soon as they are reported as filled.
            torch.cuda.synchronize(given.memory.device)
        given.filled()
    return weights
