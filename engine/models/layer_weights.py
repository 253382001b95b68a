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
    """One layer's weights by tensor name: norms, linear layers, those of all experts, other tensors."""

    def norm(self, tensor: LayerTensor) -> RmsNorm | LayerNorm:
        found = self[tensor.name]
        assert isinstance(found, RmsNorm | LayerNorm)
        return found

    def linear(self, tensor: LayerTensor) -> Linear:
        found = self[tensor.name]
        assert isinstance(found, Linear)
        return found

    def linears(self, tensor: LayerTensor) -> tuple[Linear, ...]:
        """Return the linear layers of all experts, or the layer's only one."""
        found = self[tensor.name]
        return (found,) if isinstance(found, Linear) else self.experts(tensor)

    def experts(self, tensor: LayerTensor) -> tuple[Linear, ...]:
        found = self[tensor.name]
        assert isinstance(found, tuple)
        return found

    def tensor(self, tensor: LayerTensor) -> torch.Tensor:
        found = self[tensor.name]
        assert isinstance(found, torch.Tensor)
        return found

    def taps(self, tensor: LayerTensor) -> Taps:
        found = self[tensor.name]
        assert isinstance(found, Taps)
        return found


@dataclass(frozen=True, slots=True)
class TokenInputWeights:
    """Weights of the per-layer token inputs: ``embedding`` [tokens, layers * width], ``projection`` [layers * width,
    hidden], and the norm of a layer's rows."""

    embedding: torch.Tensor
    projection: torch.Tensor
    norm: RmsNorm

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, layers, width] of tokens [T], from their embeddings [T, hidden]."""
        width = self.norm.weight.shape[0]
        scale = float(torch.tensor(math.sqrt(width), dtype=self.embedding.dtype))
        own = (self.embedding[token_ids] * scale).view(len(token_ids), -1, width)
        found = linear(hidden, self.projection) * hidden.shape[1] ** -0.5
        return (self.norm(found.view(own.shape)) + own) * math.sqrt(0.5)


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
