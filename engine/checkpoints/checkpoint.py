"""Reads the tensors of a decoder from safetensors files, under the names that checkpoints have for them.

The same tensor has other names in other families and versions: three projections or one fused (Phi-3), one tensor per
expert or one for all experts of a layer (transformers 5), and the names of the published files or those that
transformers' class has for them (``save_pretrained(save_original_format=False)``). A tensor of the decoder has choices
of *checkpoint names*: each is a list of checkpoint tensors which, stacked along their first dimension, are that tensor.
The first complete choice is used. Neither pickles nor code are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from pillion.engine.checkpoints.model_files import weight_files
from pillion.engine.checkpoints.weight_format import FLOATS, TensorHeader, WeightFormat
from pillion.engine.models.families import FAMILIES, layers_of
from pillion.engine.models.layer_operations import Layer, LayerTensor, Norm, Role, tensors_of
from pillion.engine.models.llama_layer import norm
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.quantized.formats.table import format_of
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import Matrix, plain, stack_rows

# Tensors with these endings and beginnings are not read: leftovers in old checkpoints, and the parts of models of text,
# images and sounds that are not about text.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias", "attention.bias", "causal_mask")
# These are scales for a KV cache in 8 bits. Pillion's KV cache is in more bits, or has scales of its own.
_OF_CACHES = (".kv_scale", *(f".{kind}_{part}" for kind in "qkv" for part in ("scale", "zero_point")))
_OF_PICTURES = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mm_projector.", "vision_embedder."),
    "embed_vision.",
    *("audio_tower.", "embed_audio.", "image_newline", "connector.", "visual_embeddings_table."),
    *("vision_encoder.", "vision_projection.", "vision_projector.", "vision_embed_tokens.", "high_res_vision_"),
    *("aligner.", "projector.", "merger.", "mlp1.", "image_tower.", "video_tower."),
    *("generation_embeddings.", "generation_aligner.", "generation_head.", "vqmodel."),
)
_IGNORED_PREFIXES = (*_OF_PICTURES, *(f"model.{prefix}" for prefix in _OF_PICTURES))
# The language model's tensors begin like this in models of text and images, in transformers 4 and 5.
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.")
# They begin so where the files are those of the model within, without a head.
_BARE_TEXT_PREFIXES = ("language_model.", "text_model.")
# transformers 5 saves the layers of these models' text models under the names that published files have for those of
# what sees: Qianfan-OCR, Kimi K2.5.
_LAYERS_OF_PICTURES = ("encoder.layers.", "blocks.")
_MOST_DRAFT_LAYERS = 8
_LISTED_NAMES = 4  # An error names at most this many tensors.


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Names a tensor of a checkpoint and its shape. ``part`` is the entry of its first dimension that is read; None
    reads all. ``transposed`` says that a plain tensor has its last two dimensions the other way round in the file; None
    that files of the family have either, which their shapes tell. ``optional`` says that a checkpoint may lack it."""

    name: str
    shape: tuple[int, ...]
    part: int | None = None
    transposed: bool | None = False
    optional: bool = False

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Gives the shape that a plain tensor has in the file."""
        return (*self.shape[:-2], *self.shape[:-3:-1]) if self.transposed else self.shape


StackedTensors = tuple[CheckpointTensor, ...]


def decoder_tensors(config: ModelConfig) -> dict[str, tuple[StackedTensors, ...]]:
    """Returns the checkpoint names of every tensor of the model, by the decoder's name for it
    (``layers.3.qkv.weight``)."""
    wanted = {"embedding": _named("model.embed_tokens.weight", config.vocab_size, config.hidden_size)}
    for key, checkpoint_names in layer_checkpoint_names((Norm(norm(config, "final_norm", "norm")),)).items():
        wanted[key] = tuple(_of_model(stacked, "model.") for stacked in checkpoint_names)
    if config.labels:
        wanted["score"] = _named("score.weight", config.labels, config.hidden_size)
    elif not config.tie_word_embeddings:
        wanted["lm_head"] = _named("lm_head.weight", config.vocab_size, config.hidden_size)
    for layer, operations in enumerate(layers_of(config)):
        for key, checkpoint_names in layer_checkpoint_names(operations).items():
            wanted[f"layers.{layer}.{key}"] = tuple(
                _of_model(stacked, f"model.layers.{layer}.") for stacked in checkpoint_names
            )
    family = FAMILIES[config.family]
    if family.turned:
        layers = {key for key in wanted if key.startswith("layers.")}
        wanted |= {key: tuple(_turned(stacked) for stacked in wanted[key]) for key in layers}
    if family.first_position is not None:
        rows = config.max_position_embeddings + family.first_position
        wanted["positions"] = _named("model.embed_positions.weight", rows, config.hidden_size)
    if config.token_inputs is not None:
        width, tokens = config.token_inputs.width, config.token_inputs.vocab_size
        every, name = config.num_layers * width, "model.per_layer_model_projection.weight"
        wanted["token_inputs.embedding"] = _named("model.embed_tokens_per_layer.weight", tokens, every)
        wanted["token_inputs.projection"] = _named(name, every, config.hidden_size)
        wanted["token_inputs.norm"] = _named("model.per_layer_projection_norm.weight", width)
    return {key: _in_files(checkpoint_names, config) for key, checkpoint_names in wanted.items()}


def _turned(stacked: StackedTensors) -> StackedTensors:
    return tuple(replace(tensor, transposed=len(tensor.shape) > 1) for tensor in stacked)


def _in_files(checkpoint_names: tuple[StackedTensors, ...], config: ModelConfig) -> tuple[StackedTensors, ...]:
    """Gives the tensors the names that the family's checkpoints have for them, and as further choices those that
    transformers' class has, where these are others."""
    family = FAMILIES[config.family]
    named = [_renamed(stacked, family.in_files) for stacked in checkpoint_names]
    own = [_renamed(stacked, family.in_models) for stacked in named] if family.model_names else []
    return (*named, *(stacked for stacked, known in zip(own, named, strict=False) if stacked is not known))


def _renamed(stacked: StackedTensors, rename: Callable[[str], str]) -> StackedTensors:
    """Returns the tensors with other names; the same object where all of them stay."""
    names = [rename(tensor.name) for tensor in stacked]
    if all(name == tensor.name for name, tensor in zip(names, stacked, strict=True)):
        return stacked
    return tuple(replace(tensor, name=name) for name, tensor in zip(names, stacked, strict=True))


def _of_model(stacked: StackedTensors, prefix: str) -> StackedTensors:
    return tuple(replace(tensor, name=prefix + tensor.name) for tensor in stacked)


def layer_checkpoint_names(operations: Layer) -> dict[str, tuple[StackedTensors, ...]]:
    """Returns the checkpoint names of every tensor of a layer, whose names in checkpoints are relative to it. A linear
    layer has a "weight" and perhaps a "bias", and an expert its number: ``qkv.bias``, ``experts.3.gate_up``."""
    wanted: dict[str, tuple[StackedTensors, ...]] = {}
    for tensor in tensors_of(operations):
        if tensor.experts:
            wanted |= _of_experts(tensor)
        elif tensor.role is Role.MATRIX:
            parts = ("weight", "bias") if tensor.bias else ("weight",)
            wanted |= {f"{tensor.name}.{part}": _stacked_tensors(tensor, f".{part}") for part in parts}
        elif tensor.checkpoint_names:
            is_vector = tensor.role in (Role.VECTOR, Role.EXACT_VECTOR)
            checkpoint_names = _stacked_tensors(tensor, "" if is_vector else tensor.suffix)
            if tensor.optional:
                checkpoint_names = tuple(
                    tuple(replace(each, optional=True) for each in stacked) for stacked in checkpoint_names
                )
            wanted[tensor.name] = checkpoint_names
            if tensor.bias:
                wanted[f"{tensor.name}.bias"] = _stacked_tensors(tensor, ".bias")
    return wanted


def _stacked_tensors(tensor: LayerTensor, suffix: str, number: int = 0) -> tuple[StackedTensors, ...]:
    rows, *columns = tensor.stored_shape
    if tensor.role is Role.TAPS:
        # A convolution of each channel on its own reads one channel.
        columns = [1, *columns]
    before, behind = tensor.ones
    if before or behind:
        (names,) = tensor.checkpoint_names
        return ((CheckpointTensor(names[0] + suffix, (*[1] * before, rows, *[1] * behind)),),)
    # A norm of whole projections has one row for all heads of queries, and one for those of keys.
    of_heads = tensor.role is Role.HEAD_NORM and not tensor.by_head
    columns = [] if suffix == ".bias" and not of_heads else columns
    sizes, found = [piece.in_files for piece in tensor.rows], []
    for names in tensor.checkpoint_names:
        first = [[]] * len(names) if of_heads else [[sum(sizes[own])] for own in tensor.pieces_of(names)]
        found.append(
            tuple(
                CheckpointTensor(name.format(number) + suffix, (*row, *columns))
                for name, row in zip(names, first, strict=True)
            )
        )
        if tensor.role is Role.TAPS and len(names) > 1:
            # transformers 5 cuts what it has in one tensor into equal parts, however many channels each part has.
            most = -(-rows // len(names))
            cut = [min(most, rows - most * part) for part in range(len(names))]
            found.append(tuple(replace(each, shape=(own, *columns)) for each, own in zip(found[-1], cut, strict=True)))
    return tuple(found)


def _of_experts(tensor: LayerTensor) -> dict[str, tuple[StackedTensors, ...]]:
    group, _, name = tensor.name.partition(".")
    shape = (tensor.experts, *tensor.shape)
    wanted: dict[str, tuple[StackedTensors, ...]] = {}
    for number in range(tensor.experts):
        key = f"{group}.{number}.{name}"
        stacked = ((CheckpointTensor(name, shape, number, tensor.transposed),) for name in tensor.stacked)
        wanted[key] = (*_stacked_tensors(tensor, ".weight", number), *stacked)
        if tensor.bias:
            biases = ((CheckpointTensor(f"{name}_bias", shape[:2], number),) for name in tensor.stacked)
            wanted[f"{key}.bias"] = (*_stacked_tensors(tensor, ".bias", number), *biases)
    return wanted


def _named(name: str, *shape: int) -> tuple[StackedTensors, ...]:
    return ((CheckpointTensor(name, shape),),)


class TensorSource(Protocol):
    """Finds tensors by the decoder's names for them; :class:`Checkpoint` finds those of real checkpoints."""

    def has(self, key: str) -> bool: ...
    def take(self, key: str, dtype: torch.dtype) -> torch.Tensor: ...
    def take_matrix(self, key: str, dtype: torch.dtype) -> Matrix: ...


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Represents a tensor of an open file. Raises ConfigError, which names the file, for one that cannot be used."""

    handle: Any
    name: str
    path: Path

    @property
    def place(self) -> str:
        """Gives the tensor's file and its name there, for errors."""
        return f"{self.path}: {self.name}"

    @property
    def header(self) -> TensorHeader:
        """Gives what the file's header says of the tensor."""
        found = self.handle.get_slice(self.name)
        return TensorHeader(found.get_dtype(), tuple(found.get_shape()))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ConfigError unless the tensor has this shape, and holds floats."""
        header = self.header
        if header.shape != shape:
            raise ConfigError(f"{self.place} is {list(header.shape)}, config.json wants {list(shape)}")
        if header.dtype not in FLOATS:
            raise ConfigError(f"{self.place} is {header.dtype}; only {', '.join(FLOATS)} are read")

    def read(self, part: int | None = None) -> torch.Tensor:
        """Returns the tensor as it is in the file, or one entry of its first dimension."""
        found: torch.Tensor = (
            self.handle.get_tensor(self.name) if part is None else self.handle.get_slice(self.name)[part]
        )
        return found

    def numbers(self, dtype: torch.dtype, part: int | None = None) -> torch.Tensor:
        """Returns what :meth:`read` does in ``dtype``. Raises ConfigError for NaN or infinities, with which every
        answer would be nonsense."""
        tensor = self.read(part).to(dtype)
        if not finite(tensor):
            raise ConfigError(f"{self.place} holds NaN or infinite numbers in {str(dtype).removeprefix('torch.')}")
        return tensor


class Checkpoint:
    """Holds the open weight files of one folder, checked against a config. Tensors are views of mapped files.

    ``chooses_tokens`` says whether the model has a head that does. Classifiers have none, nor have files of a model
    that was saved without its head, unless that is the embedding.
    """

    def __init__(self, folder: Path, config: ModelConfig, handles: dict[str, FileTensor], *, within: bool) -> None:
        """Takes ``handles``, the tensors of all files by their plain names, and whether they are those of the model
        ``within`` alone. Raises ConfigError if they do not fit."""
        self._folder = folder
        self._family = config.family
        # Layers after the model's last one only draft tokens (multi-token prediction), in families that may have them.
        behind = [rf"model\.layers\.{config.num_layers + more}\." for more in range(_MOST_DRAFT_LAYERS)]
        drafting = FAMILIES[config.family].draft_layers
        self._draft_tokens = re.compile("|".join((r"(model\.)?mtp", *behind)) if drafting else r"(?!)")
        # Layers that see the keys and values of another one may have tensors for their own, from the training.
        idle = "|".join(str(layer) for layer, source in enumerate(config.kv_sources) if layer != source)
        self._idle = re.compile(rf"model\.layers\.({idle})\.self_attn\.[kv]_(proj|norm)\." if idle else r"(?!)")
        self._handles = handles
        self._format: WeightFormat | None = format_of(config)
        self._headers = {plain_name: found.header for plain_name, found in handles.items()}
        # For a plain name these are the names of the tensors quantized that stand for it.
        self._stored: dict[str, tuple[str, ...]] = {}
        wanted = decoder_tensors(config)
        (plain,) = _named("lm_head.weight", config.vocab_size, config.hidden_size)
        head = _in_files((plain,), config)
        self.chooses_tokens = not config.labels
        has_head = any(self._has(tensor) for (tensor,) in head)
        if config.tie_word_embeddings and not config.labels and has_head:
            # The config ties the head to the embedding; a head in the file is used nevertheless, equal or not.
            wanted["lm_head"] = head
        elif (within or config.headless) and "lm_head" in wanted and not has_head:
            self.chooses_tokens = False
            wanted = {
                key: checkpoint_names for key, checkpoint_names in wanted.items() if not key.startswith("lm_head")
            }
        self._checkpoint_names = self._settled(self._choose(wanted))
        self._check_names()
        self._check_shapes()

    def take(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor by the decoder's name, in ``dtype``; a view of the file if nothing has to change.

        Raises ConfigError for a tensor with NaN or infinities, with which every answer would be nonsense.
        """
        return plain(self.take_matrix(key, dtype), dtype)

    def take_matrix(self, key: str, dtype: torch.dtype) -> Matrix:
        """Returns a quantized matrix where the checkpoint has all its parts quantized, and they fit together; else
        like :meth:`take`."""
        return stack_rows([self._read(wanted, dtype) for wanted in self._checkpoint_names[key]], dtype)

    def _read(self, wanted: CheckpointTensor, dtype: torch.dtype) -> Matrix:
        if self._stored.get(wanted.name):
            assert self._format is not None
            rows, columns = wanted.shape[-2:]
            with self._named_place(wanted.name):
                return self._format.read(
                    wanted.name, (rows, columns), lambda name: self._handles[name].read(wanted.part)
                )
        tensor = self._handles[wanted.name].numbers(dtype, wanted.part)
        return tensor.mT if wanted.transposed else tensor

    def tensors(self) -> Iterator[tuple[CheckpointTensor, torch.Tensor]]:
        """Yields the plain tensors that the model has, as they are in the file and in its type."""
        every = {tensor.name: tensor for stacked in self._checkpoint_names.values() for tensor in stacked}
        for name, tensor in every.items():
            yield tensor, self._handles[name].read()

    def has(self, key: str) -> bool:
        """Returns whether the model has a tensor of that name."""
        return key in self._checkpoint_names

    def _choose(self, wanted: dict[str, tuple[StackedTensors, ...]]) -> dict[str, StackedTensors]:
        """Chooses the first complete checkpoint names of each tensor, and of several with the same names the one whose
        shapes fit. Raises ConfigError if a tensor has none; where all of one is missing, the error names the layer that
        the family's checkpoints have in place of several."""

        def absent(stacked: StackedTensors) -> list[str]:
            return [tensor.name for tensor in stacked if not self._has(tensor)]

        def lack(stacked: StackedTensors) -> tuple[float, int]:
            share = len(absent(stacked)) / len(stacked)
            if share == 0:
                return share, sum(not self._fits(tensor) for tensor in stacked)
            return share, len(stacked) if share == 1 else 0

        chosen = {key: min(checkpoint_names, key=lack) for key, checkpoint_names in wanted.items()}
        for key in [key for key, (tensor, *_) in chosen.items() if tensor.optional and not self._has(tensor)]:
            del chosen[key]
        missing = sorted({name for stacked in chosen.values() for name in absent(stacked)})
        if missing:
            raise ConfigError(f"{self._folder} lacks {names_in_words(missing)}, which a {self._family} model needs")
        return chosen

    def _fits(self, tensor: CheckpointTensor) -> bool:
        """Returns whether a plain tensor has the shape that the config wants."""
        header = self._headers.get(tensor.name)
        return header is None or header.shape == tensor.plain_shape or tensor.transposed is None

    def _settled(self, chosen: dict[str, StackedTensors]) -> dict[str, StackedTensors]:
        """Says of tensors that may be either way round in files which way they are in these.

        A square one shows nothing, and lies as the model's others do: of the two matrices of an expert one at least is
        not square. Raises ConfigError where some lie one way round and some the other.
        """
        either = [tensor for stacked in chosen.values() for tensor in stacked if tensor.transposed is None]
        if not either:
            return chosen
        ways: dict[bool, str] = {}
        for way in (True, False):
            for tensor in (replace(tensor, transposed=way) for tensor in either):
                header = self._headers.get(tensor.name)
                if tensor.shape[-1] != tensor.shape[-2] and header and header.shape == tensor.plain_shape:
                    ways[way] = tensor.name
        if len(ways) > 1:
            raise ConfigError(
                f"{self._handles[ways[True]].place} is [experts, inputs, outputs], and"
                f" {self._handles[ways[False]].place} is [experts, outputs, inputs]; save the model anew, so that both"
                " are one way round"
            )
        # Where no shape fits either way, the error of the shapes says what published files have.
        way = next(iter(ways), True)
        return {
            key: tuple(replace(each, transposed=way) if each.transposed is None else each for each in stacked)
            for key, stacked in chosen.items()
        }

    def _has(self, wanted: CheckpointTensor) -> bool:
        """Returns whether the files hold a tensor, plain or quantized."""
        if self._format is not None and wanted.name not in self._stored and len(wanted.shape) > 1:
            with self._named_place(wanted.name):
                self._stored[wanted.name] = self._format.stored(wanted.name, wanted.shape, self._headers)
        return bool(self._stored.get(wanted.name)) or wanted.name in self._handles

    @contextmanager
    def _named_place(self, name: str) -> Iterator[None]:
        """Adds to errors that a weight format raises within the block the file that has all parts of a matrix, or the
        folder where several have some."""
        try:
            yield
        except ConfigError as error:
            module = name.removesuffix(".weight")
            paths = {found.path for plain_name, found in self._handles.items() if plain_name.startswith(module)}
            place = paths.pop() if len(paths) == 1 else self._folder
            raise ConfigError(f"{place}: {error.message}") from None

    def _check_names(self) -> None:
        wanted = {tensor.name for stacked in self._checkpoint_names.values() for tensor in stacked}
        known = wanted.union(*(self._stored.get(name, ()) for name in wanted))
        left = (name for name in self._handles.keys() - known if not name.endswith(_IGNORED_SUFFIXES + _OF_CACHES))
        idle = FAMILIES[self._family].idle
        left = (name for name in left if not self._draft_tokens.match(name) and not self._idle.match(name))
        left = (name for name in left if not re.match(idle, name))
        unknown = sorted(name for name in left if not self._is_idle_bias(name))
        if unknown:
            paths = {self._handles[name].path for name in unknown}
            place = paths.pop() if len(paths) == 1 else self._folder
            raise ConfigError(f"{place} holds {names_in_words(unknown)}, which a {self._family} model does not have")

    def _is_idle_bias(self, name: str) -> bool:
        """Returns whether a tensor is a bias of zeros beside a quantized matrix, which old quantizers give to all
        layers."""
        if not name.endswith(".bias") or not self._stored.get(name.removesuffix("bias") + "weight"):
            return False
        return not bool(self._handles[name].read().any())

    def _check_shapes(self) -> None:
        shapes = {tensor.name: tensor.plain_shape for stacked in self._checkpoint_names.values() for tensor in stacked}
        for plain_name, shape in shapes.items():
            if not self._stored.get(plain_name):
                self._handles[plain_name].check(shape)


@contextmanager
def open_files(folder: Path) -> Iterator[dict[str, FileTensor]]:
    """Opens all weight files of a folder; yields their tensors by the names that they have there. Raises ConfigError
    for a file that is cut short or no safetensors file."""
    with ExitStack() as stack:
        found: dict[str, FileTensor] = {}
        for path in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                size = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
                raise ConfigError(f"{path} ({size}) is cut short, or no safetensors file: {error}") from None
            found |= {name: FileTensor(handle, name, path) for name in handle.keys()}  # noqa: SIM118  (it is no mapping)
        yield found


@contextmanager
def _open_decoder(folder: Path, config: ModelConfig) -> Iterator[tuple[dict[str, FileTensor], bool]]:
    """Opens a decoder's files; yields its tensors by their plain names, and whether they are those of the model within
    alone."""
    with open_files(folder) as files:
        handles = {_plain(name): found for name, found in files.items() if not name.startswith(_IGNORED_PREFIXES)}
        # Checkpoints of embedding models are often those of the model within that for text.
        prefix, _, embedding = FAMILIES[config.family].in_files("model.embed_tokens.weight").partition(".")
        within = embedding in handles
        if within:
            kept = ("score.",) if config.labels else ()
            handles = {name if name.startswith(kept) else f"{prefix}.{name}": found for name, found in handles.items()}
        yield handles, within


@contextmanager
def open_checkpoint(folder: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Opens all weight files of a decoder's folder. Raises ConfigError if they do not fit the config."""
    if config.encoder is not None:
        raise ConfigError(f"{folder} has an encoder ({config.family}), and a decoder is needed here")
    with _open_decoder(folder, config) as (handles, within):
        yield Checkpoint(folder, config, handles, within=within)


def chooses_tokens(folder: Path, config: ModelConfig) -> bool:
    """Returns whether a decoder's files have a head that chooses tokens. Raises ConfigError for files that cannot be
    read; whether they fit the config is looked at where the head may be absent."""
    if config.labels or config.tie_word_embeddings:
        return not config.labels
    with _open_decoder(folder, config) as (handles, within):
        may_lack = within or config.headless
        return not may_lack or Checkpoint(folder, config, handles, within=within).chooses_tokens


def finite(tensor: torch.Tensor) -> bool:
    """Returns whether all numbers are finite. Summing them up shows that as fast as memory is read; where huge numbers
    overflow the sum, each one is looked at."""
    return bool(tensor.sum().isfinite()) or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def _plain(name: str) -> str:
    for prefix in (*_TEXT_PREFIXES, *_BARE_TEXT_PREFIXES):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            for layers in _LAYERS_OF_PICTURES:
                rest = f"layers.{rest.removeprefix(layers)}" if rest.startswith(layers) else rest
            return f"model.{rest}" if prefix in _TEXT_PREFIXES else rest
    return name


def names_in_words(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED_NAMES])
    return shown if len(names) <= _LISTED_NAMES else f"{shown} and {len(names) - _LISTED_NAMES} more tensors"
