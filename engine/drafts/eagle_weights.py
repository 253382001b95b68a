"""Weights of an EAGLE-3 head, loaded from a ``speculators`` checkpoint or one in the original format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import (
    FileTensor,
    finite,
    format_names,
    layer_checkpoint_names,
    open_files,
)
from pillion.engine.checkpoints.weight_format import FLOATS
from pillion.engine.checkpoints.weights import in_order
from pillion.engine.drafts.eagle_config import EagleConfig
from pillion.engine.models.layer_operations import Role, tensors_of
from pillion.engine.models.layer_weights import LayerWeights
from pillion.engine.models.layers import RmsNorm
from pillion.errors import ConfigError
from pillion.kernels.torch.torch_linear import Linear

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
_LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Weights of a head. The inputs of the layer's ``qkv`` are a normed embedding and a normed hidden state, [2 *
    hidden].

    Attributes:
        embedding: [vocab, hidden], the head's own or the main model's.
        fuse: linear layer from the concatenated hidden states of several layers to one [hidden].
        state_norm: norm of the fused hidden state.
        target_ids: [draft vocab] int64, the main model's id of each draft id; None if ids are equal.
    """

    embedding: torch.Tensor
    fuse: Linear
    embedding_norm: RmsNorm
    state_norm: RmsNorm
    layer: LayerWeights
    final_norm: RmsNorm
    lm_head: Linear
    target_ids: torch.Tensor | None


def load_eagle_weights(
    folder: Path, config: EagleConfig, embedding: torch.Tensor, make_linear: MakeLinear = Linear
) -> EagleWeights:
    """Load a head in the dtype of the main model's ``embedding``, which is used if the head has none. ``make_linear``
    makes a linear layer of a weight and a bias or None. Raises ConfigError for tensors that are missing, unknown, of a
    wrong shape, or not finite."""
    with open_files(folder) as files:
        return _make(config, _Tensors(files, config, embedding.dtype, make_linear), embedding)


class _Tensors:
    """The tensors in a head's open files. Raises ConfigError unless names, dtypes and shapes match its config."""

    def __init__(
        self, files: Mapping[str, FileTensor], config: EagleConfig, dtype: torch.dtype, make_linear: MakeLinear
    ) -> None:
        self.make_linear = make_linear
        self._files = {name.replace("midlayer.", _LAYER, 1): tensor for name, tensor in files.items()}
        self._dtype = dtype
        required, optional = dict(_shapes(config)), _optional_shapes(config)
        missing = sorted(required.keys() - self._files.keys())
        if missing:
            raise ConfigError(f"it lacks {format_names(missing)}")
        known = required | optional
        # Ignored: t2d, the inverse of d2t, and inv_freq, which follows from the config.
        unknown = sorted(
            name for name in self._files.keys() - known.keys() if not name.endswith(("t2d", "rotary_emb.inv_freq"))
        )
        if unknown:
            raise ConfigError(f"it contains {format_names(unknown)}, which an EAGLE-3 head does not have")
        for name, shape in known.items():
            if name not in self._files:
                continue
            tensor, dtypes = self._files[name], ("I64", "I32") if name == "d2t" else FLOATS
            header = tensor.header
            if header.dtype not in dtypes:
                raise ConfigError(f"its {tensor.name} is {header.dtype}; only {', '.join(dtypes)} are supported")
            if header.shape != shape:
                raise ConfigError(f"its {tensor.name} is {list(header.shape)}, but config.json requires {list(shape)}")

    def has(self, name: str) -> bool:
        return name in self._files

    def load(self, name: str) -> torch.Tensor:
        """Return a float tensor in the head's dtype. Raises ConfigError if it is not finite."""
        tensor = self.ids(name).to(self._dtype)
        if not finite(tensor):
            raise ConfigError(f"its {self._files[name].name} contains NaN or infinities")
        return tensor

    def ids(self, name: str) -> torch.Tensor:
        """Read a tensor of token ids without a cast."""
        return self._files[name].read()

    def layer(self, config: EagleConfig) -> LayerWeights:
        """Load the weights of the head's layer."""
        joined = {
            key: torch.cat([self.load(_LAYER + part.name) for part in parts])
            for key, (parts, *_) in layer_checkpoint_names(config.operations).items()
        }
        weights = LayerWeights()
        for tensor in tensors_of(config.operations):
            name = tensor.name
            if tensor.role is Role.MATRIX:
                weights[name] = self.make_linear(joined[f"{name}.weight"], joined.get(f"{name}.bias"))
            else:
                weight = in_order(joined[name], tensor)
                weights[name] = RmsNorm(weight, config.layer.rms_norm_eps, wide=False)
        return weights


def _make(config: EagleConfig, tensors: _Tensors, embedding: torch.Tensor) -> EagleWeights:
    def norm(name: str) -> RmsNorm:
        return RmsNorm(tensors.load(f"{name}.weight"), config.layer.rms_norm_eps, wide=False)

    return EagleWeights(
        embedding=tensors.load("embed_tokens.weight") if tensors.has("embed_tokens.weight") else embedding,
        fuse=tensors.make_linear(tensors.load("fc.weight"), None),
        embedding_norm=norm(f"{_LAYER}input_layernorm"),
        state_norm=norm(f"{_LAYER}hidden_norm"),
        layer=tensors.layer(config),
        final_norm=norm("norm"),
        lm_head=tensors.make_linear(tensors.load("lm_head.weight"), None),
        target_ids=_target_ids(config, tensors),
    )


def _target_ids(config: EagleConfig, tensors: _Tensors) -> torch.Tensor | None:
    """Return the main model's id of each draft id, int64 [draft vocab], from the offsets in d2t; None without d2t."""
    if not tensors.has("d2t"):
        return None
    count = config.draft_vocab_size
    ids = torch.arange(count) + tensors.ids("d2t").long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab_size:
        raise ConfigError(f"its d2t maps to tokens outside of the vocabulary of {config.layer.vocab_size}")
    return ids


def _shapes(config: EagleConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each tensor that the head must have."""
    layer, hidden = config.layer, config.layer.hidden_size
    yield "fc.weight", (hidden, len(config.aux_hidden_state_layers) * config.state_size)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (config.draft_vocab_size, hidden)
    if config.draft_vocab_size < layer.vocab_size:
        yield "d2t", (config.draft_vocab_size,)
    if hidden != config.state_size:
        yield "embed_tokens.weight", (layer.vocab_size, hidden)
    for name in ("input_layernorm", "hidden_norm"):
        yield f"{_LAYER}{name}.weight", (hidden,)
    for parts, *_ in layer_checkpoint_names(config.operations).values():
        yield from ((_LAYER + part.name, part.shape) for part in parts)


def _optional_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    layer = config.layer
    return {"embed_tokens.weight": (layer.vocab_size, layer.hidden_size), "d2t": (config.draft_vocab_size,)}
