"""Reads an adapter's folder as PEFT writes it: which tensors it has, whether they fit a model, and its digest.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    [rank, inputs]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    [outputs, rank]
    ... .lora_B.bias (lora_bias), .lora_magnitude_vector (DoRA), .bias or .base_layer.bias (bias)    [outputs]

or, where it has virtual tokens,

    prompt_embeddings   [tokens, hidden size], their embeddings; or [tokens, layers * 2 * KV heads * head_dim], their KV

Only the headers of tensors are read until all of them are known to fit. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pillion.adapter_folders import MAX_HEADER_BYTES
from pillion.engine.adapters.adapter_config import CONFIG_NAME, MERGE, AdapterConfig, VirtualConfig, load_adapter_config
from pillion.engine.adapters.adapter_forms import Bits, Bytes, VirtualBits
from pillion.engine.models.families import FAMILIES, layers_of
from pillion.engine.models.layer_operations import Layer, Role, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

TENSORS_NAME = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
# At most this many bytes of a file are read in one call.
READ_AT_ONCE_BYTES = 2**20

# For each type of tensors this has the numpy type that holds their bits, and the bits that are all 1 in NaN and
# infinities.
TYPES: Mapping[str, tuple[type[np.unsignedinteger], int]] = {
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
# These are the largest numbers that a matrix A, a matrix B times its scale, and their product may have. A larger change
# of a weight leaves nothing of a model's answers, and a far larger one makes infinities of them.
MAX_CHANGE = 1e6
_KINDS = {"float32": "F32", "bfloat16": "BF16"}
_PEFT_PREFIX = "base_model.model."
# These are the tensors of a module: those of its pair, a bias of the pair, trained norms of its rows, and the bias that
# it gets in place of the model's.
_A, _B, _PAIR_BIAS, _NORMS = "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"
_BIAS = "bias"
_OF_MODULE = re.compile(r"(.+?)\.(lora_[AB]\.weight|lora_B\.bias|lora_magnitude_vector|(?:base_layer\.)?bias)")
_VIRTUAL = "prompt_embeddings"
# The names of the decoder's tensors begin like this in models of text, and in transformers 5 and 4 in models of text
# and images.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# PEFT may give these modules adapters, which Pillion does not serve.
_REFUSED = (
    ("lm_head", "the head has no adapters here"),
    ("embed_out", "the head has no adapters here"),
    *(
        (name, "embeddings have no adapters here")
        for name in ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings")
    ),
    ("experts", "experts have no adapters here"),
    *((name, "routers of experts have no adapters here") for name in ("gate", "router")),
    ("shared_expert_gate", "gates of experts have no adapters here"),
    *(
        (name, "convolutions have no adapters here")
        for name in ("conv.conv", "conv1d", "q_conv1d", "k_conv1d", "v_conv1d")
    ),
    ("kv_b_proj", "what makes keys and values of latents has no adapters here"),
)
_REFUSED_PARTS = (
    ("lora_embedding", "embeddings have no adapters here"),
    ("modules_to_save", "an adapter with whole layers of its own is not served"),
)

_DIGEST_TAG = b"pillion.adapter.1"


@dataclass(frozen=True, slots=True)
class Projection:
    """Describes a linear layer of a checkpoint, and the decoder's fused layer of which it is a part.

    Attributes:
        layer: the decoder's name for the fused layer, such as "layers.3.qkv".
        first_output: its first output among those of the fused layer.
        biased: whether the model has a bias there.
        factors: how many outputs follow one another that the model multiplies by one number, and this number; () where
            it multiplies none.
    """

    layer: str
    first_output: int
    outputs: int
    inputs: int
    biased: bool = False
    factors: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """Names what an adapter changes in one linear layer. ``a``, ``b``, ``pair_bias``, ``norms`` and ``bias`` are the
    tensors' names in the file, or ""; where there is a bias alone, there is no pair of matrices."""

    module: str
    a: str
    b: str
    projection: Projection
    rank: int
    scale: float
    pair_bias: str = ""
    norms: str = ""
    bias: str = ""


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def projections(layer: Layer, index: int) -> dict[str, Projection]:
    """Returns the linear layers of a layer of the decoder that may have adapters, by their names in checkpoints. A
    family has either a layer such as qkv_proj or its parts. Experts have no adapters."""
    found = {}
    for tensor in tensors_of(layer):
        if tensor.role is not Role.MATRIX or tensor.experts:
            continue
        name, inputs = f"layers.{index}.{tensor.name}", tensor.shape[1]
        pieces = [piece.size for piece in tensor.rows]
        factors = tuple(zip(pieces, tensor.scales, strict=True)) if tensor.scales else ()
        for names in tensor.spellings:
            first = 0
            for module, own in zip(names, tensor.pieces_of(names), strict=True):
                size = sum(pieces[own])
                found[module] = Projection(name, first, size, inputs, tensor.bias, factors[own])
                first += size
    return found


# A checkpoint may hold these layers fused, under a name of their own; their parts follow.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": tuple(
        f"{mlp}.{part}_proj" for mlp in ("mlp", "feed_forward", "block_sparse_moe") for part in ("gate", "up")
    ),
}


def modules(model: ModelConfig, prefix: str = _PREFIXES[0]) -> dict[str, Projection]:
    """Returns all linear layers that may have adapters, by their names in a model with the decoder ``prefix``, or by
    those that the family has for them, in its checkpoints and in transformers' class."""
    family, found = FAMILIES[model.family], dict[str, Projection]()
    hidden = {one for name, parts in _FUSED.items() for one in (parts if name in family.fused else (name,))}
    for index, layer in enumerate(layers_of(model)):
        for name, projection in projections(layer, index).items():
            in_files = family.in_files(f"{prefix}layers.{index}.{name}.weight")
            if name not in hidden:
                both = {in_files: projection, family.in_models(in_files): projection}
                found |= {tensor.removesuffix(".weight"): projection for tensor in both}
    return found


def widened(bits: Bits, kind: str) -> npt.NDArray[np.float32]:
    """Returns numbers of a type of tensors as new float32."""
    if kind == "BF16":
        # A bfloat16 is the upper half of a float32.
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)


def rounded_bits(wide: npt.NDArray[np.float32], dtype: str) -> Bits:
    """Returns numbers as bits of "float32" or "bfloat16", rounded once; the array may be overwritten."""
    rounded = wide.view(np.uint32)
    if dtype == "float32":
        return rounded
    # Each number is rounded to the nearest one, and to the even one where two are equally near.
    odd = (rounded >> 16) & 1
    rounded += odd + np.uint32(0x7FFF)
    rounded >>= 16
    return rounded.astype(np.uint16)


def _why_refused(module: str) -> str | None:
    """Says why a module takes no adapter although PEFT may give it one, and what to do; None for other modules."""
    return next((f"{reason}; {MERGE}" for name, reason in _REFUSED if f".{name}." in f".{module}."), None)


def _why_none(tensor: str) -> str:
    """Says why an adapter with a tensor of this name is refused, where the name is none of a pair's."""
    reason = next((f"{reason}; {MERGE}" for part, reason in _REFUSED_PARTS if part in tensor), None)
    # With an adapted embedding or head, PEFT also saves the layer itself.
    return reason or _why_refused(tensor) or "no adapter has such a one"


class AdapterFiles:
    """Holds an adapter's folder; its config and headers are read when the object is made.

    Raises ConfigError, naming the folder and the key or tensor, for a folder without an adapter that can be served.
    """

    def __init__(self, folder: Path, called: Path | None = None) -> None:
        """Reads the folder. For a copy, ``called`` is the path that errors name."""
        self.folder = folder
        self._called = called or folder
        self.config: AdapterConfig | VirtualConfig = load_adapter_config(folder, self._called)
        self.path = folder / TENSORS_NAME
        self._tensors = self._headers()
        # These are the bits of each tensor's largest absolute number, as far as it was checked.
        self._largest: dict[str, int] = defaultdict(int)

    @property
    def size_bytes(self) -> int:
        """Gives the number of bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self._tensors.values())

    @property
    def virtual_tokens(self) -> int:
        """Gives the number of virtual tokens that stand before a prompt of this adapter."""
        return self.config.tokens if isinstance(self.config, VirtualConfig) else 0

    def pairs(self, model: ModelConfig, max_rank: int = 0) -> tuple[AdapterPair, ...]:
        """Returns the adapter's pairs in the order of the decoder's layers and their outputs, if all of them fit the
        model; none of an adapter whose virtual tokens fit it.

        Args:
            model: the model that the adapter is for.
            max_rank: the highest rank that is allowed; 0 allows any.

        Raises:
            ConfigError: a pair is incomplete, too large, for a module that the model or the config does not have, or of
                another shape; or a module that the config names has none.
        """
        config = self.config
        if isinstance(config, VirtualConfig):
            self._check_virtual(config, model)
            return ()
        if config.turned and not FAMILIES[model.family].turned:
            raise self._error(
                f"{CONFIG_NAME}: fan_in_fan_out = True is not supported: it says that weights lie as [inputs, outputs],"
                f" as those of a {model.family} model do not; PEFT reads it as false"
            )
        halves = self._halves()
        prefix = self._prefix(halves)
        known = modules(model, prefix)
        pairs: list[AdapterPair] = []
        for module, names in halves.items():
            projection = known.get(module)
            if projection is None:
                raise self._error(f"{next(iter(names.values()))} is for {module}, {self._why_unknown(module, model)}")
            if _A in names and not config.is_target(module):
                raise self._error(f"it has {names[_A]}, whose module its config does not name as a target")
            rank = config.rank_of(module)
            if 0 < max_rank < rank:
                raise self._error(f"{module} has rank {rank}, and --max-lora-rank is {max_rank}")
            a, b, *more = (names.get(part, "") for part in (_A, _B, _PAIR_BIAS, _NORMS, _BIAS))
            pairs.append(AdapterPair(module, a, b, projection, rank if a else 1, config.scale_of(module), *more))
            self._check_shapes(pairs[-1])
        # Checkpoints have several names for some layers, of which a model has one.
        once = {pair.projection: pair.module for pair in pairs}
        twice = next((pair.module for pair in pairs if once[pair.projection] != pair.module), None)
        if twice is not None:
            raise self._error(f"it has tensors for {twice} under two names")
        adapted = {pair.projection for pair in pairs if pair.a}
        missing = [module for module in known if known[module] not in adapted and config.is_target(module)]
        if missing:
            raise self._error(f"its config names {missing[0]} as a target, for which {TENSORS_NAME} has no tensors")
        return tuple(sorted(pairs, key=lambda pair: (pair.projection.layer, pair.projection.first_output)))

    def digest(self, use: Callable[[str, Bytes], None] | None = None) -> str:
        """Returns the SHA-256, in hexadecimal, of what the config means and of all tensors, by name. It reads the whole
        file, once.

        ``use`` is called with each tensor's name and each piece of it, in order. Each piece consists of whole numbers
        of the tensor, and ``use`` may change it.
        """
        digest = hashlib.sha256(_DIGEST_TAG)
        canonical = self.config.canonical()
        digest.update(len(canonical).to_bytes(8, "little") + canonical)
        with self.path.open("rb") as file:
            for name, tensor in sorted(self._tensors.items()):
                header = json.dumps([name, tensor.kind, tensor.shape]).encode()
                digest.update(len(header).to_bytes(8, "little") + header)
                for part in self._parts(file, tensor):
                    digest.update(part.data)
                    if use is not None:
                        use(name, part)
        return digest.hexdigest()

    def check_numbers(self, name: str, part: Bytes) -> None:
        """Raises ConfigError for NaN or infinities in a piece of a tensor."""
        kind, ones = TYPES[self._tensors[name].kind]
        # Without their signs, floating-point numbers are in the same order as their bits.
        largest = int((part.view(kind) & (np.iinfo(kind).max >> 1)).max(initial=0))
        if largest >= ones:
            raise self._error(f"{name} holds NaN or infinite numbers")
        self._largest[name] = max(self._largest[name], largest)

    def check_changes(self, pairs: Iterable[AdapterPair]) -> None:
        """Raises ConfigError for pairs that change a weight by more than MAX_CHANGE, or might do so by their largest
        numbers. All numbers must have been checked."""
        if self.virtual_tokens and (largest := self._largest_of(_VIRTUAL)) > MAX_CHANGE:
            raise self._error(f"{_VIRTUAL} has numbers up to {largest:.3g}; they may be up to {MAX_CHANGE:.0f}")
        for pair in pairs:
            vectors = [name for name in (pair.pair_bias, pair.norms, pair.bias) if name]
            if (largest := max(map(self._largest_of, vectors), default=0.0)) > MAX_CHANGE:
                raise self._error(f"{', '.join(vectors)} have numbers up to {largest:.3g}, above {MAX_CHANGE:.0f}")
            if not pair.a:
                continue
            a, b = self._largest_of(pair.a), self._largest_of(pair.b) * pair.scale
            if max(a, b, a * b * pair.rank) > MAX_CHANGE:
                text = f"{pair.a} has numbers up to {a:.3g}, and {pair.b} times its scale up to {b:.3g}"
                raise self._error(f"{text}: they may change weights by more than {MAX_CHANGE:.0f}")

    def checked_numbers(self, digest: str, pairs: Iterable[AdapterPair]) -> dict[str, Bytes]:
        """Returns the bytes of all tensors, by name. Raises ConfigError for NaN or infinities, for ``pairs`` that
        change too much, and where the content is not that of ``digest``."""
        found: dict[str, list[Bytes]] = defaultdict(list)

        def keep(name: str, part: Bytes) -> None:
            self.check_numbers(name, part)
            found[name].append(part)

        if self.digest(keep) != digest:
            raise self._error(f"it does not hold the adapter {digest}")
        self.check_changes(pairs)
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in found.items()}

    def bits(self, name: str, data: Bytes, dtype: str, scale: float = 1.0) -> Bits:
        """Returns a tensor's numbers times ``scale`` as bits of another type, rounded once.

        Args:
            name: the tensor, whose bytes are ``data``.
            dtype: "float32" or "bfloat16".
        """
        tensor = self._tensors[name]
        found = data.view(TYPES[tensor.kind][0]).reshape(tensor.shape)
        if scale == 1.0 and tensor.kind == _KINDS[dtype]:
            return found
        # No number overflows here, because their sizes have been checked.
        return rounded_bits(widened(found, tensor.kind) * np.float32(scale), dtype)

    def numbers(self, name: str, data: Bytes) -> npt.NDArray[np.float32]:
        """Returns a tensor's numbers; ``data`` are its bytes."""
        return self.bits(name, data, "float32").view(np.float32)

    def virtual(self, model: ModelConfig, numbers: Mapping[str, Bytes], dtype: str) -> VirtualBits | None:
        """Returns the adapter's virtual tokens, which fit the model, as bits of ``dtype``; None where it has none.
        ``numbers`` are the bytes of all tensors, by name."""
        if not isinstance(self.config, VirtualConfig):
            return None
        # Granite multiplies all inputs of its decoder; Gemma's embedding alone multiplies, so that trained rows are
        # used as they are.
        scale = model.embedding_scale if model.family.startswith("granite") and not self.config.kv else 1.0
        values = self.bits(_VIRTUAL, numbers[_VIRTUAL], dtype, scale)
        shape = (model.num_layers, 2, model.num_kv_heads, model.head_dim) if self.config.kv else (model.hidden_size,)
        return VirtualBits(self.config.kv, values.reshape(-1, *shape))

    def _check_virtual(self, config: VirtualConfig, model: ModelConfig) -> None:
        for name in self._tensors:
            if name != _VIRTUAL:
                raise self._error(f"it has a tensor {name}: an adapter of virtual tokens has {_VIRTUAL} alone")
        if model.layer_heads or model.kv_sources or model.token_inputs is not None:
            raise self._error(f"{model.family} has no virtual tokens here: its layers differ, or read more of a token")
        if config.kv and model.linear is not None:
            raise self._error("its virtual tokens are keys and values, which leave nothing in this model's states")
        if config.kv and model.latents is not None:
            raise self._error("its virtual tokens are keys and values, and blocks of this model hold latents")
        width = 2 * model.num_layers * model.num_kv_heads * model.head_dim if config.kv else model.hidden_size
        wanted, found = (config.tokens, width), self._tensors.get(_VIRTUAL)
        if found is None:
            raise self._error(f"{TENSORS_NAME} has no {_VIRTUAL}")
        if found.shape != wanted:
            raise self._error(f"{_VIRTUAL} is {list(found.shape)}; config and model want {list(wanted)}")

    def _largest_of(self, name: str) -> float:
        kind = self._tensors[name].kind
        return float(widened(np.array([self._largest[name]], TYPES[kind][0]), kind)[0])

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._called}: {message}")

    def _headers(self) -> dict[str, _Tensor]:
        if not self.path.is_file():
            pickled = next((name for name in _PICKLED if (self.folder / name).exists()), None)
            if pickled is not None:
                raise self._error(
                    f"{pickled} is pickled, and a pickle may run any program; if you trust it, PEFT converts it: "
                    f"PeftModel.from_pretrained(base, FOLDER).save_pretrained(FOLDER) writes {TENSORS_NAME}"
                )
            raise self._error(f"it has no {TENSORS_NAME}")
        try:
            with self.path.open("rb") as file:
                if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
                    raise ValueError(f"its header is longer than {MAX_HEADER_BYTES} bytes")
            # safe_open checks that the header fits the file, so that the header can be read simply.
            with safe_open(self.path, framework="numpy"):
                pass
            with self.path.open("rb") as file:
                after = 8 + (length := int.from_bytes(file.read(8), "little"))
                header = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError) as error:
            raise self._error(f"{TENSORS_NAME} cannot be read: {error}") from None
        header.pop("__metadata__", None)
        for name, about in header.items():
            if about["dtype"] not in TYPES:
                raise self._error(f"{name} is {about['dtype']}; only {', '.join(TYPES)} are read")
        return {
            name: _Tensor(about["dtype"], tuple(about["shape"]), after + begin, end - begin)
            for name, about in header.items()
            for begin, end in [about["data_offsets"]]
        }

    def _parts(self, file: BufferedReader, tensor: _Tensor) -> Iterator[Bytes]:
        """Yields the bytes of a tensor in the open file, in pieces of bounded size."""
        file.seek(tensor.begin)
        for done in range(0, tensor.size_bytes, READ_AT_ONCE_BYTES):
            part = np.empty(min(READ_AT_ONCE_BYTES, tensor.size_bytes - done), np.uint8)
            if file.readinto(part.data) != len(part):
                raise self._error(f"{TENSORS_NAME} is shorter than its header says")
            yield part

    def _halves(self) -> dict[str, dict[str, str]]:
        """Returns the names of each module's tensors, by what they are."""
        assert isinstance(self.config, AdapterConfig)
        halves: dict[str, dict[str, str]] = {}
        config = self.config
        known = {_A, _B} | ({_PAIR_BIAS} if config.lora_bias else set()) | ({_NORMS} if config.dora else set())
        pair = frozenset(known)
        known |= {_BIAS} if config.biases else set()
        for name in self._tensors:
            found = _OF_MODULE.fullmatch(name.removeprefix(_PEFT_PREFIX))
            part = found[2].removeprefix("base_layer.") if found is not None else ""
            if found is None or not name.startswith(_PEFT_PREFIX) or part not in known:
                raise self._error(f"it has a tensor {name}: {_why_none(name)}")
            halves.setdefault(found[1], {})[part] = name
        for module, parts in halves.items():
            lacks = sorted(pair - parts.keys())
            if lacks and parts.keys() != {_BIAS}:
                raise self._error(f"it has {next(iter(parts.values()))} and no {lacks[0].split('.')[0]} of {module}")
        if not halves:
            raise self._error(f"{TENSORS_NAME} holds no tensors")
        return halves

    def _prefix(self, modules: Iterable[str]) -> str:
        """Returns the prefix, such as ``model.``, that the adapter's names of modules have before ``layers.``; the
        first known one where none fits."""
        for prefix in _PREFIXES:
            if any(module.startswith(f"{prefix}layers.") for module in modules):
                return prefix
        return _PREFIXES[0]

    def _why_unknown(self, module: str, model: ModelConfig) -> str:
        reason = _why_refused(module)
        found = next((_IN_LAYER.fullmatch(module.removeprefix(p)) for p in _PREFIXES if module.startswith(p)), None)
        if reason is None and found is not None and int(found[1]) >= model.num_layers:
            reason = f"the model has {model.num_layers} layers"
        return f"which cannot be served: {reason}" if reason else f"which a {model.family} model does not have"

    def _check_shapes(self, pair: AdapterPair) -> None:
        projection = pair.projection
        if pair.bias and not projection.biased:
            raise self._error(f"it has {pair.bias}, and the model has no bias there")
        if pair.pair_bias and projection.factors:
            raise self._error(f"it has {pair.pair_bias}, where the model multiplies inputs by a number of its own")
        vectors = [(name, (projection.outputs,)) for name in (pair.pair_bias, pair.norms, pair.bias)]
        matrices = [(pair.a, (pair.rank, projection.inputs)), (pair.b, (projection.outputs, pair.rank))]
        for name, wanted in (*matrices, *vectors):
            if name and (found := self._tensors[name].shape) != wanted:
                raise self._error(f"{name} is {list(found)}; rank and model want {list(wanted)}")
