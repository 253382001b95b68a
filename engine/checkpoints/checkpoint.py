"""Reader of a decoder's tensors from safetensors files, by the names that checkpoints use.

The same tensor has different names in different families and versions: three projections or one fused (Phi-3), one
tensor per expert or one for all experts of a layer (transformers 5), and the names of the published files or of
transformers' class (``save_pretrained(save_original_format=False)``). A decoder tensor therefore has alternatives of
*checkpoint names*, each a list of checkpoint tensors to stack along their first dimension. The first alternative whose
tensors all exist is used. Pickles and code are never read.
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

# Names that are skipped: tensors of old versions of transformers, and scales of an 8-bit KV cache, since Pillion's has
# more bits, or its own scales.
_IGNORED_SUFFIXES = (
    *("rotary_emb.inv_freq", "masked_bias", "attn.bias", "attention.bias", "causal_mask", ".kv_scale"),
    *(f".{kind}_{part}" for kind in "qkv" for part in ("scale", "zero_point")),
)
# Tensors of multimodal models outside of the text model.
_IGNORED_PREFIXES = tuple(
    outer + prefix
    for outer in ("", "model.")
    for prefix in (
        *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mm_projector.", "vision_embedder."),
        "embed_vision.",
        *("audio_tower.", "embed_audio.", "image_newline", "connector.", "visual_embeddings_table."),
        *("vision_encoder.", "vision_projection.", "vision_projector.", "vision_embed_tokens.", "high_res_vision_"),
        *("aligner.", "projector.", "merger.", "mlp1.", "image_tower.", "video_tower."),
        *("generation_embeddings.", "generation_aligner.", "generation_head.", "vqmodel."),
    )
)
# Prefixes of the language model in multimodal models, in transformers 4 and 5.
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.")
# Max layers for multi-token prediction after the last layer of a model.
_MAX_DRAFT_LAYERS = 8
# Names to list in an error.
_LISTED_NAMES = 4


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor to read from a checkpoint.

    Attributes:
        shape: of the whole tensor, as the decoder needs it.
        part: the entry of its first dimension to read; None reads all.
        transposed: True if a plain tensor has its last two dimensions swapped in the file; None if its shape decides.
        optional: True if a checkpoint may lack it.
    """

    name: str
    shape: tuple[int, ...]
    part: int | None = None
    transposed: bool | None = False
    optional: bool = False

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Shape in the file, if the tensor is plain."""
        return (*self.shape[:-2], *self.shape[:-3:-1]) if self.transposed else self.shape


StackedTensors = tuple[CheckpointTensor, ...]


def decoder_tensors(config: ModelConfig) -> dict[str, tuple[StackedTensors, ...]]:
    """Return the alternatives of checkpoint tensors for every tensor of the model, by the decoder's name
    (``layers.3.qkv.weight``)."""
    alternatives = {"embedding": _named("model.embed_tokens.weight", config.vocab_size, config.hidden_size)}
    for key, checkpoint_names in layer_checkpoint_names((Norm(norm(config, "final_norm", "norm")),)).items():
        alternatives[key] = tuple(_of_model(stacked, "model.") for stacked in checkpoint_names)
    if config.labels:
        alternatives["score"] = _named("score.weight", config.labels, config.hidden_size)
    elif not config.tie_word_embeddings:
        alternatives["lm_head"] = _named("lm_head.weight", config.vocab_size, config.hidden_size)
    for layer, operations in enumerate(layers_of(config)):
        for key, checkpoint_names in layer_checkpoint_names(operations).items():
            alternatives[f"layers.{layer}.{key}"] = tuple(
                _of_model(stacked, f"model.layers.{layer}.") for stacked in checkpoint_names
            )
    family = FAMILIES[config.family]
    if family.turned:
        layers = {key for key in alternatives if key.startswith("layers.")}
        alternatives |= {key: tuple(_transposed(stacked) for stacked in alternatives[key]) for key in layers}
    if family.first_position is not None:
        rows = config.max_position_embeddings + family.first_position
        alternatives["positions"] = _named("model.embed_positions.weight", rows, config.hidden_size)
    if config.token_inputs is not None:
        width, tokens = config.token_inputs.width, config.token_inputs.vocab_size
        table_width, name = config.num_layers * width, "model.per_layer_model_projection.weight"
        alternatives["token_inputs.embedding"] = _named("model.embed_tokens_per_layer.weight", tokens, table_width)
        alternatives["token_inputs.projection"] = _named(name, table_width, config.hidden_size)
        alternatives["token_inputs.norm"] = _named("model.per_layer_projection_norm.weight", width)
    return {key: _in_files(checkpoint_names, config) for key, checkpoint_names in alternatives.items()}


def _transposed(stacked: StackedTensors) -> StackedTensors:
    return tuple(replace(tensor, transposed=len(tensor.shape) > 1) for tensor in stacked)


def _in_files(checkpoint_names: tuple[StackedTensors, ...], config: ModelConfig) -> tuple[StackedTensors, ...]:
    """Rename tensors to the family's names in checkpoints, and append alternatives with the names in transformers'
    class if these differ."""
    family = FAMILIES[config.family]
    in_files = [_renamed(stacked, family.in_files) for stacked in checkpoint_names]
    in_models = [_renamed(stacked, family.in_models) for stacked in in_files] if family.model_names else []
    return (
        *in_files,
        *(stacked for stacked, original in zip(in_models, in_files, strict=False) if stacked is not original),
    )


def _renamed(stacked: StackedTensors, rename: Callable[[str], str]) -> StackedTensors:
    """Return the renamed tensors; ``stacked`` itself if no name changes."""
    names = [rename(tensor.name) for tensor in stacked]
    if all(name == tensor.name for name, tensor in zip(names, stacked, strict=True)):
        return stacked
    return tuple(replace(tensor, name=name) for name, tensor in zip(names, stacked, strict=True))


def _of_model(stacked: StackedTensors, prefix: str) -> StackedTensors:
    return tuple(replace(tensor, name=prefix + tensor.name) for tensor in stacked)


def layer_checkpoint_names(operations: Layer) -> dict[str, tuple[StackedTensors, ...]]:
    """Return the alternatives of checkpoint tensors, with names relative to the layer, for every tensor of a layer. The
    keys of linear layers end with "weight" or "bias", those of experts contain their number: ``qkv.bias``,
    ``experts.3.gate_up``."""
    alternatives: dict[str, tuple[StackedTensors, ...]] = {}
    for tensor in tensors_of(operations):
        if tensor.experts:
            alternatives |= _of_experts(tensor)
        elif tensor.role is Role.MATRIX:
            parts = ("weight", "bias") if tensor.bias else ("weight",)
            alternatives |= {f"{tensor.name}.{part}": _stacked_tensors(tensor, f".{part}") for part in parts}
        elif tensor.checkpoint_names:
            is_vector = tensor.role in (Role.VECTOR, Role.EXACT_VECTOR)
            checkpoint_names = _stacked_tensors(tensor, "" if is_vector else tensor.suffix)
            if tensor.optional:
                checkpoint_names = tuple(
                    tuple(replace(checkpoint_tensor, optional=True) for checkpoint_tensor in stacked)
                    for stacked in checkpoint_names
                )
            alternatives[tensor.name] = checkpoint_names
            if tensor.bias:
                alternatives[f"{tensor.name}.bias"] = _stacked_tensors(tensor, ".bias")
    return alternatives


def _stacked_tensors(tensor: LayerTensor, suffix: str, number: int = 0) -> tuple[StackedTensors, ...]:
    """Return the alternatives of checkpoint tensors of a layer's tensor, or of expert ``number``."""
    rows, *columns = tensor.stored_shape
    if tensor.role is Role.TAPS:
        # Depthwise convolutions have one input channel.
        columns = [1, *columns]
    ones_before, ones_after = tensor.ones
    if ones_before or ones_after:
        (names,) = tensor.checkpoint_names
        return ((CheckpointTensor(names[0] + suffix, (*[1] * ones_before, rows, *[1] * ones_after)),),)
    of_heads = tensor.role is Role.HEAD_NORM and not tensor.by_head
    columns = [] if suffix == ".bias" and not of_heads else columns
    sizes, alternatives = [piece.in_files for piece in tensor.rows], []
    for names in tensor.checkpoint_names:
        row_shapes = [[]] * len(names) if of_heads else [[sum(sizes[pieces])] for pieces in tensor.pieces_of(names)]
        alternatives.append(
            tuple(
                CheckpointTensor(name.format(number) + suffix, (*row_shape, *columns))
                for name, row_shape in zip(names, row_shapes, strict=True)
            )
        )
        if tensor.role is Role.TAPS and len(names) > 1:
            # transformers 5 splits a fused tensor into equal parts, even if its pieces have unequal numbers of
            # channels.
            part_rows = -(-rows // len(names))
            part_sizes = [min(part_rows, rows - part_rows * part) for part in range(len(names))]
            alternatives.append(
                tuple(
                    replace(part_tensor, shape=(size, *columns))
                    for part_tensor, size in zip(alternatives[-1], part_sizes, strict=True)
                )
            )
    return tuple(alternatives)


def _of_experts(tensor: LayerTensor) -> dict[str, tuple[StackedTensors, ...]]:
    """Return the alternatives of checkpoint tensors of each expert's matrix and bias."""
    group, _, name = tensor.name.partition(".")
    shape = (tensor.experts, *tensor.shape)
    alternatives: dict[str, tuple[StackedTensors, ...]] = {}
    for number in range(tensor.experts):
        key = f"{group}.{number}.{name}"
        stacked = ((CheckpointTensor(name, shape, number, tensor.transposed),) for name in tensor.stacked)
        alternatives[key] = (*_stacked_tensors(tensor, ".weight", number), *stacked)
        if tensor.bias:
            biases = ((CheckpointTensor(f"{name}_bias", shape[:2], number),) for name in tensor.stacked)
            alternatives[f"{key}.bias"] = (*_stacked_tensors(tensor, ".bias", number), *biases)
    return alternatives


def _named(name: str, *shape: int) -> tuple[StackedTensors, ...]:
    return ((CheckpointTensor(name, shape),),)


class TensorSource(Protocol):
    """Source of tensors by the decoder's names, e.g. a :class:`Checkpoint`."""

    def has(self, key: str) -> bool: ...
    def load(self, key: str, dtype: torch.dtype) -> torch.Tensor: ...
    def load_matrix(self, key: str, dtype: torch.dtype) -> Matrix: ...


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in an open safetensors file. Methods raise ConfigError, with file and tensor, if it cannot be used."""

    handle: Any
    name: str
    path: Path

    @property
    def location(self) -> str:
        """File and tensor name, for errors."""
        return f"{self.path}: {self.name}"

    @property
    def header(self) -> TensorHeader:
        view = self.handle.get_slice(self.name)
        return TensorHeader(view.get_dtype(), tuple(view.get_shape()))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless the tensor has this shape and a float type."""
        header = self.header
        if header.shape != shape:
            raise ConfigError(f"{self.location} is {list(header.shape)}, but config.json requires {list(shape)}")
        if header.dtype not in FLOATS:
            raise ConfigError(f"{self.location} is {header.dtype}; only {', '.join(FLOATS)} are supported")

    def read(self, part: int | None = None) -> torch.Tensor:
        """Return the tensor as stored, or one entry of its first dimension."""
        tensor: torch.Tensor = (
            self.handle.get_tensor(self.name) if part is None else self.handle.get_slice(self.name)[part]
        )
        return tensor

    def numbers(self, dtype: torch.dtype, part: int | None = None) -> torch.Tensor:
        """Return the tensor, or one entry of its first dimension, cast to ``dtype``. Raises ConfigError for NaN and
        infinities, which would make every answer nonsense."""
        tensor = self.read(part).to(dtype)
        if not finite(tensor):
            raise ConfigError(f"{self.location} contains NaN or infinities in {str(dtype).removeprefix('torch.')}")
        return tensor


class Checkpoint:
    """The open weight files of a decoder, checked against its config. Tensors are views of mapped files.

    ``chooses_tokens``: True if the model has an LM head, in its own tensor or tied to the embedding. Classifiers have
    none.
    """

    def __init__(self, folder: Path, config: ModelConfig, handles: dict[str, FileTensor], *, within: bool) -> None:
        """Choose the tensors of the model among ``handles``, those of all files by plain name. ``within``: True if the
        files were saved from the model inside of the class with the head. Raises ConfigError if they do not fit the
        config."""
        self._folder = folder
        self._family = config.family
        # In families with multi-token prediction, layers after the last one are for it.
        draft_layers = [rf"model\.layers\.{config.num_layers + number}\." for number in range(_MAX_DRAFT_LAYERS)]
        drafting = FAMILIES[config.family].draft_layers
        self._draft_names = re.compile("|".join((r"(model\.)?mtp", *draft_layers)) if drafting else r"(?!)")
        # Layers that read another layer's KV may have key and value projections, left over from training.
        idle = "|".join(str(layer) for layer, source in enumerate(config.kv_sources) if layer != source)
        self._idle = re.compile(rf"model\.layers\.({idle})\.self_attn\.[kv]_(proj|norm)\." if idle else r"(?!)")
        self._handles = handles
        self._format: WeightFormat | None = format_of(config)
        self._headers = {plain_name: tensor.header for plain_name, tensor in handles.items()}
        # Plain name -> names of the quantized tensors that replace it.
        self._stored_names: dict[str, tuple[str, ...]] = {}
        alternatives = decoder_tensors(config)
        (plain,) = _named("lm_head.weight", config.vocab_size, config.hidden_size)
        head = _in_files((plain,), config)
        self.chooses_tokens = not config.labels
        has_head = any(self._has(tensor) for (tensor,) in head)
        if config.tie_word_embeddings and not config.labels and has_head:
            # The config ties the head to the embedding, but a head in the files is used anyway.
            alternatives["lm_head"] = head
        elif (within or config.headless) and "lm_head" in alternatives and not has_head:
            self.chooses_tokens = False
            alternatives = {
                key: checkpoint_names for key, checkpoint_names in alternatives.items() if not key.startswith("lm_head")
            }
        self._checkpoint_names = self._resolve_transposed(self._choose(alternatives))
        self._check_names()
        self._check_shapes()

    def load(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor by the decoder's name, dequantized, in ``dtype``; a view of the file if possible. Raises
        ConfigError for NaN and infinities."""
        return plain(self.load_matrix(key, dtype), dtype)

    def load_matrix(self, key: str, dtype: torch.dtype) -> Matrix:
        """Return a matrix by the decoder's name: quantized if all tensors that form it are, in layouts that can be
        stacked; else what :meth:`load` returns."""
        return stack_rows([self._read(source, dtype) for source in self._checkpoint_names[key]], dtype)

    def _read(self, source: CheckpointTensor, dtype: torch.dtype) -> Matrix:
        if self._stored_names.get(source.name):
            assert self._format is not None
            rows, columns = source.shape[-2:]
            with self._naming_files(source.name):
                return self._format.read(
                    source.name, (rows, columns), lambda name: self._handles[name].read(source.part)
                )
        plain_tensor = self._handles[source.name].numbers(dtype, source.part)
        return plain_tensor.mT if source.transposed else plain_tensor

    def tensors(self) -> Iterator[tuple[CheckpointTensor, torch.Tensor]]:
        """Yield all tensors of the model, which must be plain, as they are in the files."""
        by_name = {tensor.name: tensor for stacked in self._checkpoint_names.values() for tensor in stacked}
        for name, tensor in by_name.items():
            yield tensor, self._handles[name].read()

    def has(self, key: str) -> bool:
        return key in self._checkpoint_names

    def _choose(self, alternatives: dict[str, tuple[StackedTensors, ...]]) -> dict[str, StackedTensors]:
        """Choose the first alternative for each tensor that the files have; of several alternatives with the same
        names, the one with the shapes in the files. Raises ConfigError if the files have no alternative for a tensor;
        the error names the alternative with the fewest missing tensors."""

        def absent(stacked: StackedTensors) -> list[str]:
            return [tensor.name for tensor in stacked if not self._has(tensor)]

        def lack(stacked: StackedTensors) -> tuple[float, int]:
            share = len(absent(stacked)) / len(stacked)
            if share == 0:
                return share, sum(not self._fits(tensor) for tensor in stacked)
            return share, len(stacked) if share == 1 else 0

        chosen = {key: min(checkpoint_names, key=lack) for key, checkpoint_names in alternatives.items()}
        for key in [key for key, (tensor, *_) in chosen.items() if tensor.optional and not self._has(tensor)]:
            del chosen[key]
        missing = sorted({name for stacked in chosen.values() for name in absent(stacked)})
        if missing:
            raise ConfigError(f"{self._folder} lacks {format_names(missing)}, which a {self._family} model needs")
        return chosen

    def _fits(self, tensor: CheckpointTensor) -> bool:
        header = self._headers.get(tensor.name)
        return header is None or header.shape == tensor.plain_shape or tensor.transposed is None

    def _resolve_transposed(self, chosen: dict[str, StackedTensors]) -> dict[str, StackedTensors]:
        """Decide whether ambiguous tensors are stored transposed.

        A square matrix is stored like the others: of an expert's two matrices, at least one is not square. Raises
        ConfigError if some are stored transposed and others not.
        """
        ambiguous = [tensor for stacked in chosen.values() for tensor in stacked if tensor.transposed is None]
        if not ambiguous:
            return chosen
        examples: dict[bool, str] = {}
        for is_transposed in (True, False):
            for tensor in (replace(tensor, transposed=is_transposed) for tensor in ambiguous):
                header = self._headers.get(tensor.name)
                if tensor.shape[-1] != tensor.shape[-2] and header and header.shape == tensor.plain_shape:
                    examples[is_transposed] = tensor.name
        if len(examples) > 1:
            raise ConfigError(
                f"{self._handles[examples[True]].location} is [experts, inputs, outputs], and"
                f" {self._handles[examples[False]].location} is [experts, outputs, inputs]; save the model again, with"
                " both in one layout"
            )
        is_transposed = next(iter(examples), True)
        return {
            key: tuple(replace(one, transposed=is_transposed) if one.transposed is None else one for one in stacked)
            for key, stacked in chosen.items()
        }

    def _has(self, tensor: CheckpointTensor) -> bool:
        """Return whether the files have a tensor, plain or quantized. Finds the tensors of a quantized matrix."""
        if self._format is not None and tensor.name not in self._stored_names and len(tensor.shape) > 1:
            with self._naming_files(tensor.name):
                self._stored_names[tensor.name] = self._format.stored(tensor.name, tensor.shape, self._headers)
        return bool(self._stored_names.get(tensor.name)) or tensor.name in self._handles

    @contextmanager
    def _naming_files(self, name: str) -> Iterator[None]:
        """Prefix ConfigErrors of a weight format with the file of the matrix ``name``, or with the folder if its
        tensors are in several files."""
        try:
            yield
        except ConfigError as error:
            module = name.removesuffix(".weight")
            paths = {tensor.path for plain_name, tensor in self._handles.items() if plain_name.startswith(module)}
            location = paths.pop() if len(paths) == 1 else self._folder
            raise ConfigError(f"{location}: {error.message}") from None

    def _check_names(self) -> None:
        """Raise ConfigError for a tensor that the model does not have, and that is not known to be ignored."""
        needed = {tensor.name for stacked in self._checkpoint_names.values() for tensor in stacked}
        known = needed.union(*(self._stored_names.get(name, ()) for name in needed))
        extra = (name for name in self._handles.keys() - known if not name.endswith(_IGNORED_SUFFIXES))
        idle = FAMILIES[self._family].idle
        extra = (name for name in extra if not self._draft_names.match(name) and not self._idle.match(name))
        extra = (name for name in extra if not re.match(idle, name))
        unknown = sorted(name for name in extra if not self._is_idle_bias(name))
        if unknown:
            paths = {self._handles[name].path for name in unknown}
            location = paths.pop() if len(paths) == 1 else self._folder
            raise ConfigError(f"{location} holds {format_names(unknown)}, which a {self._family} model does not have")

    def _is_idle_bias(self, name: str) -> bool:
        """Return whether a tensor is the all-zero bias of a quantized linear layer without bias: old quantizers add one
        to every layer."""
        if not name.endswith(".bias") or not self._stored_names.get(name.removesuffix("bias") + "weight"):
            return False
        return not bool(self._handles[name].read().any())

    def _check_shapes(self) -> None:
        shapes = {tensor.name: tensor.plain_shape for stacked in self._checkpoint_names.values() for tensor in stacked}
        for plain_name, shape in shapes.items():
            if not self._stored_names.get(plain_name):
                self._handles[plain_name].check(shape)


@contextmanager
def open_files(folder: Path) -> Iterator[dict[str, FileTensor]]:
    """Open a folder's weight files and yield their tensors by name. Raises ConfigError for a file that is truncated or
    not safetensors."""
    with ExitStack() as stack:
        tensors: dict[str, FileTensor] = {}
        for path in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                size = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
                raise ConfigError(f"{path} ({size}) is truncated, or not a safetensors file: {error}") from None
            tensors |= {name: FileTensor(handle, name, path) for name in handle.keys()}  # noqa: SIM118  (it is no mapping)
        yield tensors


@contextmanager
def _open_decoder(folder: Path, config: ModelConfig) -> Iterator[tuple[dict[str, FileTensor], bool]]:
    """Open a decoder's files and yield its tensors by plain name, and whether the files were saved from the model
    inside of the class with the head."""
    with open_files(folder) as files:
        handles = {_plain(name): tensor for name, tensor in files.items() if not name.startswith(_IGNORED_PREFIXES)}
        prefix, _, embedding = FAMILIES[config.family].in_files("model.embed_tokens.weight").partition(".")
        within = embedding in handles
        if within:
            unprefixed = ("score.",) if config.labels else ()
            handles = {
                name if name.startswith(unprefixed) else f"{prefix}.{name}": tensor for name, tensor in handles.items()
            }
        yield handles, within


@contextmanager
def open_checkpoint(folder: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Open the weight files of a decoder's folder. Raises ConfigError if they do not fit the config."""
    if config.encoder is not None:
        raise ConfigError(f"{folder} has an encoder ({config.family}), and a decoder is needed here")
    with _open_decoder(folder, config) as (handles, within):
        yield Checkpoint(folder, config, handles, within=within)


def chooses_tokens(folder: Path, config: ModelConfig) -> bool:
    """Return whether a decoder has an LM head, in its own tensor or tied to the embedding. Raises ConfigError for
    unreadable files, and, if only the files decide, for files that do not fit the config."""
    if config.labels or config.tie_word_embeddings:
        return not config.labels
    with _open_decoder(folder, config) as (handles, within):
        may_lack = within or config.headless
        return not may_lack or Checkpoint(folder, config, handles, within=within).chooses_tokens


def finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite. Fast if the sum is finite; otherwise it may have overflowed, and minimum
    and maximum decide."""
    return bool(tensor.sum().isfinite()) or all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))


def _plain(name: str) -> str:
    # The last two prefixes: files saved from the text model inside of the class with the head.
    for prefix in (*_TEXT_PREFIXES, "language_model.", "text_model."):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            # transformers 5 saves the text layers of Qianfan-OCR and Kimi K2.5 under the names of vision layers.
            for layers in ("encoder.layers.", "blocks."):
                rest = f"layers.{rest.removeprefix(layers)}" if rest.startswith(layers) else rest
            return f"model.{rest}" if prefix in _TEXT_PREFIXES else rest
    return name


def format_names(names: list[str]) -> str:
    """Return up to _LISTED_NAMES names, and the number of further ones, for an error."""
    shown = ", ".join(names[:_LISTED_NAMES])
    return shown if len(names) <= _LISTED_NAMES else f"{shown} and {len(names) - _LISTED_NAMES} more tensors"
