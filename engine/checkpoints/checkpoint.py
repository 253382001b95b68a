"""Reads the tensors of a decoder from safetensors files, under the names that checkpoints have for them.

The same tensor has other names in other families and versions: three projections or one fused (Phi-3), one tensor per
expert or one for all experts of a layer (transformers 5). A *spelling* of a decoder's tensor is a list of checkpoint
tensors which, stacked along their first dimension, are that tensor. The first complete spelling is used. Neither
pickles nor code are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from pillion.engine.checkpoints.formats.layout import FLOATS
from pillion.engine.checkpoints.formats.table import choose_format
from pillion.engine.checkpoints.model_files import weight_files
from pillion.engine.checkpoints.weight_format import TensorHeader, WeightFormat
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import Matrix, plain, stack_rows

# Tensors that are not read: leftovers in old checkpoints, and the vision part of models of text and images.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
# Scales for a KV cache in 8 bits. A cache here is in more bits, or has scales of its own.
_OF_CACHES = (".kv_scale", *(f".{kind}_{part}" for kind in "qkv" for part in ("scale", "zero_point")))
_IGNORED_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
# Prefixes of the language model in such a model, in transformers 4 and 5.
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
_LISTED_NAMES = 4  # Most tensors that an error names.


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of a checkpoint and its shape. ``part``: the entry of its first dimension to read; None reads all."""

    name: str
    shape: tuple[int, ...]
    part: int | None = None


Spelling = tuple[CheckpointTensor, ...]


def decoder_tensors(config: ModelConfig) -> dict[str, tuple[Spelling, ...]]:
    """Returns the spellings of every tensor of the model, by the decoder's name for it (``layers.3.qkv.weight``)."""
    wanted = {"embedding": _named("model.embed_tokens.weight", config.vocab_size, config.hidden_size)}
    wanted["final_norm"] = _named("model.norm.weight", config.hidden_size)
    if not config.tie_word_embeddings:
        wanted["lm_head"] = _named("lm_head.weight", config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        tensors = {**_norms(config), **_attention(config)}
        has_experts = config.moe is not None and config.moe.layers[layer]
        tensors.update(_experts(config) if has_experts else _mlp(config))
        for key, spellings in tensors.items():
            wanted[f"layers.{layer}.{key}"] = tuple(
                tuple(replace(tensor, name=f"model.layers.{layer}.{tensor.name}") for tensor in spelling)
                for spelling in spellings
            )
    return wanted


def _spelling(shape: tuple[int, ...], *names: str, part: int | None = None) -> Spelling:
    return tuple(CheckpointTensor(name, shape, part) for name in names)


def _named(name: str, *shape: int) -> tuple[Spelling, ...]:
    return (_spelling(shape, name),)


def _norms(config: ModelConfig) -> dict[str, tuple[Spelling, ...]]:
    """Families that norm the outputs of attention and MLP have another name for the norm before the MLP."""
    wanted, hidden = {}, config.hidden_size
    between = "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"
    if config.pre_norm:
        wanted["attention_norm"] = _named("input_layernorm.weight", hidden)
        wanted["mlp_norm"] = _named(f"{between}.weight", hidden)
    if config.post_norm:
        wanted["attention_post_norm"] = _named("post_attention_layernorm.weight", hidden)
        wanted["mlp_post_norm"] = _named("post_feedforward_layernorm.weight", hidden)
    if config.qk_norm:
        whole = config.qk_norm == "projection"
        wanted["q_norm"] = _named("self_attn.q_norm.weight", config.head_dim * (config.num_heads if whole else 1))
        wanted["k_norm"] = _named("self_attn.k_norm.weight", config.head_dim * (config.num_kv_heads if whole else 1))
    return wanted


def _attention(config: ModelConfig) -> dict[str, tuple[Spelling, ...]]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    fused = {"self_attn.qkv_proj": queries + 2 * keys}
    return {
        **_linear("qkv", (parts, fused), config.hidden_size, config.qkv_bias),
        **_linear("o", ({"self_attn.o_proj": config.hidden_size},), queries, config.o_bias),
    }


def _mlp(config: ModelConfig) -> dict[str, tuple[Spelling, ...]]:
    inner = config.intermediate_size
    parts, fused = {"mlp.gate_proj": inner, "mlp.up_proj": inner}, {"mlp.gate_up_proj": 2 * inner}
    return {
        **_linear("mlp.gate_up", (parts, fused), config.hidden_size, config.mlp_bias),
        **_linear("mlp.down", ({"mlp.down_proj": config.hidden_size},), inner, config.mlp_bias),
    }


def _linear(
    key: str, spellings: tuple[dict[str, int], ...], columns: int, bias: bool
) -> dict[str, tuple[Spelling, ...]]:
    """A linear layer's weight [rows, columns] and bias [rows]; each spelling has the rows of its tensors, by name."""
    parts = {"weight": (columns,), "bias": ()} if bias else {"weight": (columns,)}
    return {
        f"{key}.{part}": tuple(
            tuple(CheckpointTensor(f"{name}.{part}", (rows, *inner)) for name, rows in spelling.items())
            for spelling in spellings
        )
        for part, inner in parts.items()
    }


def _experts(config: ModelConfig) -> dict[str, tuple[Spelling, ...]]:
    """Experts by Qwen's names, by Mixtral's, and by those of transformers 5, where experts of both are stacked."""
    assert config.moe is not None
    count, inner, hidden = config.moe.num_experts, config.moe.intermediate_size, config.hidden_size
    wanted = {
        "router": tuple(_spelling((count, hidden), f"{block}.gate.weight") for block in ("mlp", "block_sparse_moe"))
    }
    for index in range(count):
        qwen, mixtral = f"mlp.experts.{index}", f"block_sparse_moe.experts.{index}"
        wanted[f"experts.{index}.gate_up"] = (
            _spelling((inner, hidden), f"{qwen}.gate_proj.weight", f"{qwen}.up_proj.weight"),
            _spelling((inner, hidden), f"{mixtral}.w1.weight", f"{mixtral}.w3.weight"),
            _spelling((count, 2 * inner, hidden), "mlp.experts.gate_up_proj", part=index),
        )
        wanted[f"experts.{index}.down"] = (
            _spelling((hidden, inner), f"{qwen}.down_proj.weight"),
            _spelling((hidden, inner), f"{mixtral}.w2.weight"),
            _spelling((count, hidden, inner), "mlp.experts.down_proj", part=index),
        )
    return wanted


class TensorSource(Protocol):
    """Tensors by the decoder's names for them; :class:`Checkpoint` is the source of real ones."""

    def has(self, key: str) -> bool: ...
    def take(self, key: str, dtype: torch.dtype) -> torch.Tensor: ...
    def take_matrix(self, key: str, dtype: torch.dtype) -> Matrix: ...


class Checkpoint:
    """The open weight files of one folder, checked against a config. Its tensors are views of the mapped files."""

    def __init__(self, folder: Path, config: ModelConfig, handles: dict[str, tuple[Any, str]]) -> None:
        """``handles``: name -> (open file, the tensor's name in it). Raises ConfigError if they do not fit."""
        self._folder = folder
        self._family = config.family
        self._handles = handles
        self._format: WeightFormat | None = choose_format(config)
        self._headers = {plain_name: _header(handle, name) for plain_name, (handle, name) in handles.items()}
        # The names of the tensors in few bits that stand for a plain name.
        self._stored: dict[str, tuple[str, ...]] = {}
        wanted = decoder_tensors(config)
        head = _named("lm_head.weight", config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings and self._has(head[0][0]):
            # The config ties the head to the embedding; a head in the file, equal or not, is used nevertheless.
            wanted["lm_head"] = head
        self._spellings = self._choose(wanted)
        self._check_names()
        self._check_shapes()

    def take(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor by the decoder's name, in ``dtype``; a view of the file if nothing has to change.

        Raises ConfigError for one with NaN or infinities, with which every answer would be nonsense.
        """
        return plain(self.take_matrix(key, dtype), dtype)

    def take_matrix(self, key: str, dtype: torch.dtype) -> Matrix:
        """Returns a matrix in few bits where the checkpoint has all of it so, in parts that fit together; else like
        :meth:`take`."""
        return stack_rows([self._read(wanted, dtype) for wanted in self._spellings[key]], dtype)

    def _read(self, wanted: CheckpointTensor, dtype: torch.dtype) -> Matrix:
        if self._stored.get(wanted.name):
            assert self._format is not None
            rows, columns = wanted.shape[-2:]
            with self._named_folder():
                return self._format.read(wanted.name, (rows, columns), lambda name: self._tensor(name, wanted.part))
        tensor = self._tensor(wanted.name, wanted.part).to(dtype)
        if not _finite(tensor):
            kind = str(dtype).removeprefix("torch.")
            name = self._handles[wanted.name][1]
            raise ConfigError(f"{self._folder}: {name} holds NaN or infinite numbers in {kind}")
        return tensor

    def _tensor(self, plain_name: str, part: int | None) -> torch.Tensor:
        handle, name = self._handles[plain_name]
        found: torch.Tensor = handle.get_tensor(name) if part is None else handle.get_slice(name)[part]
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the plain tensors that the model has, by their names in the checkpoint and in the file's type."""
        for name in dict.fromkeys(tensor.name for spelling in self._spellings.values() for tensor in spelling):
            yield name, self._tensor(name, None)

    def has(self, key: str) -> bool:
        """Whether the model has a tensor of that name."""
        return key in self._spellings

    def _choose(self, wanted: dict[str, tuple[Spelling, ...]]) -> dict[str, Spelling]:
        """Chooses each tensor's first complete spelling. Raises ConfigError if a tensor has none."""

        def absent(spelling: Spelling) -> list[str]:
            return [tensor.name for tensor in spelling if not self._has(tensor)]

        chosen = {
            key: min(spellings, key=lambda spelling: len(absent(spelling)) / len(spelling))
            for key, spellings in wanted.items()
        }
        missing = sorted({name for spelling in chosen.values() for name in absent(spelling)})
        if missing:
            raise ConfigError(f"{self._folder} lacks {_names(missing)}, which a {self._family} model needs")
        return chosen

    def _has(self, wanted: CheckpointTensor) -> bool:
        """Whether the files hold a tensor, plain or in few bits."""
        if self._format is not None and wanted.name not in self._stored and len(wanted.shape) > 1:
            with self._named_folder():
                self._stored[wanted.name] = self._format.stored(wanted.name, wanted.shape, self._headers)
        return bool(self._stored.get(wanted.name)) or wanted.name in self._handles

    @contextmanager
    def _named_folder(self) -> Iterator[None]:
        """Adds the folder's name to the errors of the format."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self._folder}: {error.message}") from None

    def _check_names(self) -> None:
        wanted = {tensor.name for spelling in self._spellings.values() for tensor in spelling}
        known = wanted.union(*(self._stored.get(name, ()) for name in wanted))
        left = (name for name in self._handles.keys() - known if not name.endswith(_IGNORED_SUFFIXES + _OF_CACHES))
        unknown = sorted(name for name in left if not self._is_idle_bias(name))
        if unknown:
            raise ConfigError(f"{self._folder} holds {_names(unknown)}, which a {self._family} model does not have")

    def _is_idle_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros beside a matrix in few bits, which old quantizers give to all layers."""
        if not name.endswith(".bias") or not self._stored.get(name.removesuffix("bias") + "weight"):
            return False
        return not bool(self._tensor(name, None).any())

    def _check_shapes(self) -> None:
        shapes = {tensor.name: tensor.shape for spelling in self._spellings.values() for tensor in spelling}
        for plain_name, shape in shapes.items():
            if self._stored.get(plain_name):
                continue
            found, name = self._headers[plain_name], self._handles[plain_name][1]
            if found.shape != shape:
                raise ConfigError(f"{self._folder}: {name} is {list(found.shape)}, config.json wants {list(shape)}")
            if found.dtype not in FLOATS:
                raise ConfigError(f"{self._folder}: {name} is {found.dtype}; only {', '.join(FLOATS)} are read")


@contextmanager
def open_checkpoint(folder: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Opens all weight files of a folder. Raises ConfigError if they do not fit the config."""
    with ExitStack() as stack:
        handles: dict[str, tuple[Any, str]] = {}
        for path in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                size = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
                raise ConfigError(f"{path} ({size}) is cut short, or no safetensors file: {error}") from None
            for name in handle.keys():  # noqa: SIM118  (a file of safetensors is no mapping)
                if not name.startswith(_IGNORED_PREFIXES):
                    handles[_plain(name)] = (handle, name)
        yield Checkpoint(folder, config, handles)


def _header(handle: Any, name: str) -> TensorHeader:
    found = handle.get_slice(name)
    return TensorHeader(found.get_dtype(), tuple(found.get_shape()))


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite. A sum shows it at the speed of memory; huge ones may overflow it."""
    return bool(tensor.sum().isfinite()) or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def _plain(name: str) -> str:
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED_NAMES])
    return shown if len(names) <= _LISTED_NAMES else f"{shown} and {len(names) - _LISTED_NAMES} more tensors"
