"""Holds the weights of one layer, by the names of its tensors."""

from __future__ import annotations

import torch

from pillion.engine.models.layer_operations import LayerTensor
from pillion.engine.models.layers import LayerNorm, RmsNorm
from pillion.kernels.torch.recurrences import Taps
from pillion.kernels.torch.torch_linear import Linear


class LayerWeights(dict[str, "RmsNorm | LayerNorm | Linear | tuple[Linear, ...] | torch.Tensor | Taps"]):
    """Holds one layer's weights by the names of its tensors: norms, linear layers, those of all experts, other
    tensors."""

    def norm(self, tensor: LayerTensor) -> RmsNorm | LayerNorm:
        found = self[tensor.name]
        assert isinstance(found, RmsNorm | LayerNorm)
        return found

    def linear(self, tensor: LayerTensor) -> Linear:
        found = self[tensor.name]
        assert isinstance(found, Linear)
        return found

    def linears(self, tensor: LayerTensor) -> tuple[Linear, ...]:
        """Return the linear layers of all experts, or the layer's one."""
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
