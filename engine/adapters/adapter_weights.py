"""An adapter's matrices, laid over the fused linear layers of :mod:`pillion.engine.models.decoder`.

    y = W x  +  B (A x)      for each target; B holds the adapter's scale already (Hu et al., 2021: LoRA)

A checkpoint has a pair (A, B) for each projection that was trained; several of them may lie in one fused layer, each
with outputs and a rank of its own. Backends whose form is plain multiply by these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pillion.engine.adapters.adapter_forms import Bits, Layers, PairBits


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to some outputs of a linear layer.

    Attributes:
        first_output: the first output of the fused layer that it adds to.
        a: float32 or bfloat16 [rank, inputs].
        b: the same type [outputs, rank], multiplied by the adapter's scale.
    """

    first_output: int
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter for one model.

    Attributes:
        digest: SHA-256 of the adapter's content in hexadecimal, which is its identity everywhere (I2).
        rank: the greatest rank of a pair.
        layers: what is added to each fused layer, by the layer's name: "layers.3.qkv", "layers.3.o",
            "layers.3.gate_up" (gate before up) and "layers.3.down". Layers without a target are missing. Outputs of the
            pairs of one layer do not overlap, and rise.
    """

    digest: str
    rank: int
    layers: Mapping[str, tuple[LowRank, ...]]


def weights_of(digest: str, layers: Layers) -> AdapterWeights:
    """An adapter's bits as tensors; nothing is copied."""
    rank = max(pair.a.shape[0] for pairs in layers.values() for pair in pairs)
    found = {
        name: tuple(LowRank(pair.first_output, _tensor(pair.a), _tensor(pair.b)) for pair in pairs)
        for name, pairs in layers.items()
    }
    return AdapterWeights(digest, rank, found)


def layers_of(weights: AdapterWeights) -> Layers:
    """The bits of an adapter's tensors."""
    return {
        name: [PairBits(pair.first_output, _bits(pair.a), _bits(pair.b)) for pair in pairs]
        for name, pairs in weights.layers.items()
    }


def _tensor(bits: Bits) -> torch.Tensor:
    if bits.itemsize == 4:
        return torch.from_numpy(bits.view(np.float32))
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _bits(tensor: torch.Tensor) -> Bits:
    if tensor.dtype == torch.float32:
        return tensor.contiguous().numpy().view(np.uint32)
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
