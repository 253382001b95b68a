"""A model's weights in torch: those of one layer by tensor name, and those outside of layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from pillion.engine.models.layer_operations import Layer, LayerTensor
from pillion.engine.models.layers import LayerNorm, RmsNorm
from pillion.kernels.torch.recurrences import Taps
from pillion.kernels.torch.torch_linear import Linear


class LayerWeights(dict[str, "RmsNorm | LayerNorm | Linear | tuple[Linear, ...] | torch.Tensor | Taps"]):
    """One layer's weights by tensor name: a norm, a linear layer, a tuple of all experts' linear layers, the taps of a
    convolution, or a plain tensor. Each method returns a weight of one of these types."""

    def norm(self, tensor: LayerTensor) -> RmsNorm | LayerNorm:
        weight = self[tensor.name]
        assert isinstance(weight, RmsNorm | LayerNorm)
        return weight

    def linear(self, tensor: LayerTensor) -> Linear:
        weight = self[tensor.name]
        assert isinstance(weight, Linear)
        return weight

    def linears(self, tensor: LayerTensor) -> tuple[Linear, ...]:
        """Return the linear layers of all experts, or a tuple of the single linear layer."""
        weight = self[tensor.name]
        return (weight,) if isinstance(weight, Linear) else self.experts(tensor)

    def experts(self, tensor: LayerTensor) -> tuple[Linear, ...]:
        weight = self[tensor.name]
        assert isinstance(weight, tuple)
        return weight

    def tensor(self, tensor: LayerTensor) -> torch.Tensor:
        weight = self[tensor.name]
        assert isinstance(weight, torch.Tensor)
        return weight

    def taps(self, tensor: LayerTensor) -> Taps:
        weight = self[tensor.name]
        assert isinstance(weight, Taps)
        return weight


@dataclass(frozen=True, slots=True)
class TokenInputWeights:
    """Weights of the per-layer token inputs: ``embedding`` [tokens, layers * width], ``projection`` [layers * width,
    hidden], and the norm of a layer's rows."""

    embedding: torch.Tensor
    projection: torch.Tensor
    norm: RmsNorm

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the per-layer inputs [T, layers, width] of tokens [T]; ``hidden`` [T, hidden] are their embeddings."""
        width = self.norm.weight.shape[0]
        scale = float(torch.tensor(math.sqrt(width), dtype=self.embedding.dtype))
        embedded = (self.embedding[token_ids] * scale).view(len(token_ids), -1, width)
        projected = linear(hidden, self.projection) * hidden.shape[1] ** -0.5
        return (self.norm(projected.view(embedded.shape)) + embedded) * math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's weights. ``embedding`` is [vocab, hidden], also ``lm_head`` if tied; ``positions`` [positions, hidden]
    are learned ones. ``embedding_scale`` is rounded to the type of the weights, as in transformers."""

    embedding: torch.Tensor
    embedding_scale: float
    operations: tuple[Layer, ...]
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm | LayerNorm
    lm_head: Linear
    positions: torch.Tensor | None = None
    token_inputs: TokenInputWeights | None = None
