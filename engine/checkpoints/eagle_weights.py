"""Reads the weights of an EAGLE-3 head, under the names of ``speculators`` checkpoints or of the original layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pillion.engine.checkpoints.checkpoint import finite, names_in_words
from pillion.engine.checkpoints.formats.layout import FLOATS
from pillion.engine.checkpoints.model_files import weight_files
from pillion.engine.models.decoder import LayerWeights
from pillion.engine.models.eagle_config import EagleConfig
from pillion.engine.models.layers import GATED, GatedMLP, RmsNorm
from pillion.errors import ConfigError
from pillion.kernels.torch.torch_linear import Linear

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
# The layer's name in the original layout, and here.
_OLD_LAYER, _LAYER = "midlayer.", "layers.0."
# Tensors that are not read: the inverse of d2t, and leftovers.
_IGNORED = ("t2d", "rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A head's weights. ``layer.qkv`` is [heads and KV heads, 2 * hidden]: the normed embedding, then the normed state.

    Attributes:
        embedding: [vocab, hidden], the head's own or the model's.
        fuse: makes one state of those of all layers.
        state_norm: norms a state in front of the layer.
        target_ids: [draft vocab] int64, the model's id of each token that the head can guess; None where all are alike.
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
    """Loads a head in the type of ``embedding``, the model's, which it uses where it has none of its own. Its linear
    layers are made by ``make_linear``.

    Raises ConfigError for tensors that are missing, unknown, of another shape, or no finite numbers.
    """
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a safetensors file: {error}") from None
            handles |= dict.fromkeys(handle.keys(), handle)
        return _make(config, _Tensors(handles, config, embedding.dtype, make_linear), embedding)


class _Tensors:
    """The open files of a head, whose names and shapes fit its config."""

    def __init__(
        self, handles: Mapping[str, Any], config: EagleConfig, dtype: torch.dtype, make_linear: MakeLinear
    ) -> None:
        self.make_linear = make_linear
        self._files = {name.replace(_OLD_LAYER, _LAYER, 1): (handle, name) for name, handle in handles.items()}
        self._dtype = dtype
        wanted, optional = dict(_shapes(config)), _optional_shapes(config)
        missing = sorted(wanted.keys() - self._files.keys())
        if missing:
            raise ConfigError(f"it lacks {names_in_words(missing)}")
        known = wanted | optional
        unknown = sorted(name for name in self._files.keys() - known.keys() if not name.endswith(_IGNORED))
        if unknown:
            raise ConfigError(f"it holds {names_in_words(unknown)}, which an EAGLE-3 head does not have")
        for name, shape in known.items():
            found = self._header(name) if name in self._files else shape
            if found != shape:
                raise ConfigError(f"its {self._files[name][1]} is {list(found)}, config.json wants {list(shape)}")

    def _header(self, name: str) -> tuple[int, ...]:
        handle, own = self._files[name]
        part = handle.get_slice(own)
        kinds = ("I64", "I32") if name == "d2t" else FLOATS
        if part.get_dtype() not in kinds:
            raise ConfigError(f"its {own} is {part.get_dtype()}; only {', '.join(kinds)} are read")
        return tuple(part.get_shape())

    def has(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str) -> torch.Tensor:
        """A tensor of floats in the head's type."""
        tensor = self.ids(name).to(self._dtype)
        if not finite(tensor):
            raise ConfigError(f"its {self._files[name][1]} holds NaN or infinite numbers")
        return tensor

    def ids(self, name: str) -> torch.Tensor:
        """A tensor as it is in the file."""
        handle, own = self._files[name]
        found: torch.Tensor = handle.get_tensor(own)
        return found

    def linear(self, *names: str) -> Linear:
        """The layer of these matrices, one above the other."""
        biases = [f"{_LAYER}{name}.bias" for name in names]
        bias = torch.cat([self.take(one) for one in biases]) if self.has(biases[0]) else None
        return self.make_linear(torch.cat([self.take(f"{_LAYER}{name}.weight") for name in names]), bias)


def _make(config: EagleConfig, tensors: _Tensors, embedding: torch.Tensor) -> EagleWeights:
    layer, eps = config.layer, config.layer.rms_norm_eps

    def norm(name: str) -> RmsNorm:
        return RmsNorm(tensors.take(f"{name}.weight"), eps, wide=False)

    qk_norm = None
    if layer.qk_norm:
        heads = ("q_norm", layer.num_heads), ("k_norm", layer.num_kv_heads)
        weights = [tensors.take(f"{_LAYER}self_attn.{name}.weight").expand(count, -1) for name, count in heads]
        qk_norm = RmsNorm(torch.cat(weights), eps, wide=False)
    return EagleWeights(
        embedding=tensors.take("embed_tokens.weight") if tensors.has("embed_tokens.weight") else embedding,
        fuse=tensors.make_linear(tensors.take("fc.weight"), None),
        embedding_norm=norm(f"{_LAYER}input_layernorm"),
        state_norm=norm(f"{_LAYER}hidden_norm"),
        layer=LayerWeights(
            attention_norm=None,
            qkv=tensors.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norm=qk_norm,
            q_norm=None,
            k_norm=None,
            o=tensors.linear("self_attn.o_proj"),
            attention_post_norm=None,
            mlp_norm=norm(f"{_LAYER}post_attention_layernorm"),
            mlp=GatedMLP(
                tensors.linear("mlp.gate_proj", "mlp.up_proj"), tensors.linear("mlp.down_proj"), GATED[layer.activation]
            ),
            mlp_post_norm=None,
        ),
        final_norm=norm("norm"),
        lm_head=tensors.make_linear(tensors.take("lm_head.weight"), None),
        target_ids=_target_ids(config, tensors),
    )


def _target_ids(config: EagleConfig, tensors: _Tensors) -> torch.Tensor | None:
    """What d2t says: how far behind each draft id the model's id is."""
    if not tensors.has("d2t"):
        return None
    count = config.draft_vocab_size
    ids = torch.arange(count) + tensors.ids("d2t").long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab_size:
        raise ConfigError(f"its d2t names tokens outside of the vocabulary of {config.layer.vocab_size}")
    return ids


def _shapes(config: EagleConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    layer = config.layer
    hidden, inner, heads = layer.hidden_size, layer.intermediate_size, layer.num_heads * layer.head_dim
    keys = layer.num_kv_heads * layer.head_dim
    yield "fc.weight", (hidden, len(config.state_layers) * config.state_size)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (config.draft_vocab_size, hidden)
    if config.draft_vocab_size < layer.vocab_size:
        yield "d2t", (config.draft_vocab_size,)
    if hidden != config.state_size:
        # The model's embedding is as wide as its states.
        yield "embed_tokens.weight", (layer.vocab_size, hidden)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield f"{_LAYER}{name}.weight", (hidden,)
    for name in ("q_norm", "k_norm") if layer.qk_norm else ():
        yield f"{_LAYER}self_attn.{name}.weight", (layer.head_dim,)
    rows = {"q_proj": heads, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    for name, count in rows.items():
        yield f"{_LAYER}self_attn.{name}.weight", (count, heads if name == "o_proj" else 2 * hidden)
        if layer.qkv_bias:
            yield f"{_LAYER}self_attn.{name}.bias", (count,)
    for name, count in {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}.items():
        yield f"{_LAYER}mlp.{name}.weight", (count, inner if name == "down_proj" else hidden)
        if layer.mlp_bias:
            yield f"{_LAYER}mlp.{name}.bias", (count,)


def _optional_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    layer = config.layer
    return {"embed_tokens.weight": (layer.vocab_size, layer.hidden_size), "d2t": (config.draft_vocab_size,)}
