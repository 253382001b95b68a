"""An adapter's folder as PEFT writes it: which matrices it has, whether they fit a model, and its digest.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    [rank, inputs]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    [outputs, rank]

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
from pillion.engine.adapters.adapter_config import AdapterConfig, load_adapter_config
from pillion.engine.adapters.adapter_forms import Bits, Bytes
from pillion.engine.models.families import FAMILIES
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

TENSORS_NAME = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
# Most bytes that are read in one call.
READ_AT_ONCE_BYTES = 2**20

# Types of tensors: the numbers that hold their bits, and the bits that are all 1 in NaN and infinities.
_TYPES: Mapping[str, tuple[type[np.unsignedinteger], int]] = {
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
# The largest number of a matrix A, of a matrix B times its scale, and of their product. A change of a weight by more
# leaves nothing of a model's answers, and one by far more makes infinities of them.
MAX_CHANGE = 1e6
_KINDS = {"float32": "F32", "bfloat16": "BF16"}
_PEFT_PREFIX = "base_model.model."
# The decoder's name in models of text, and in transformers 5 and 4 in models of text and images.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# Modules that may have adapters in PEFT and have none here.
_REFUSED = (
    ("lm_head", "the head has no adapters here"),
    ("embed_tokens", "embeddings have no adapters here"),
    ("experts", "experts have no adapters here"),
    ("gate", "routers of experts have no adapters here"),
)
_REFUSED_PARTS = (
    ("lora_magnitude_vector", "DoRA is not served"),
    ("lora_embedding", "embeddings have no adapters here"),
    ("lora_B.bias", "adapters add no biases here"),
    ("modules_to_save", "an adapter with whole layers of its own is not served"),
)

_DIGEST_TAG = b"pillion.adapter.1"


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of a checkpoint, and the fused layer of the decoder that it is a part of.

    Attributes:
        layer: the decoder's name for the fused layer, such as "layers.3.qkv".
        first_output: its first output among those of the fused layer.
    """

    layer: str
    first_output: int
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """A pair of matrices of an adapter. ``a`` and ``b`` are the tensors' names in the file."""

    a: str
    b: str
    projection: Projection
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def projections(model: ModelConfig, layer: int) -> dict[str, Projection]:
    """The linear layers of a layer of the decoder that may have adapters, by their names in checkpoints. A family
    has either a layer such as qkv_proj or its parts."""
    hidden, prefix = model.hidden_size, f"layers.{layer}."
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    found = {
        "self_attn.q_proj": Projection(prefix + "qkv", 0, queries, hidden),
        "self_attn.k_proj": Projection(prefix + "qkv", queries, keys, hidden),
        "self_attn.v_proj": Projection(prefix + "qkv", queries + keys, keys, hidden),
        "self_attn.qkv_proj": Projection(prefix + "qkv", 0, queries + 2 * keys, hidden),
        "self_attn.o_proj": Projection(prefix + "o", 0, hidden, queries),
    }
    if model.moe is None or not model.moe.layers[layer]:
        inner = model.intermediate_size
        found |= {
            "mlp.gate_proj": Projection(prefix + "gate_up", 0, inner, hidden),
            "mlp.up_proj": Projection(prefix + "gate_up", inner, inner, hidden),
            "mlp.gate_up_proj": Projection(prefix + "gate_up", 0, 2 * inner, hidden),
            "mlp.down_proj": Projection(prefix + "down", 0, hidden, inner),
        }
    return found


# The layers that have a name of their own where they are fused in the checkpoint, and their parts.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def modules(model: ModelConfig, prefix: str = _PREFIXES[0]) -> dict[str, Projection]:
    """All linear layers that may have adapters, by their names in the model, whose decoder is called ``prefix``."""
    fused = FAMILIES[model.family].fused_projections
    hidden = {part for parts in _FUSED.values() for part in parts} if fused else _FUSED.keys()
    return {
        f"{prefix}layers.{layer}.{name}": projection
        for layer in range(model.num_layers)
        for name, projection in projections(model, layer).items()
        if name not in hidden
    }


def _widened(bits: Bits, kind: str) -> npt.NDArray[np.float32]:
    """Numbers of a type of tensors as new float32."""
    if kind == "BF16":
        # A bfloat16 is the upper half of a float32.
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)


class AdapterFiles:
    """An adapter's folder, whose config and headers are read when it is made.

    Raises ConfigError, which names the folder and the key or tensor, for what is no adapter or one that nobody here
    serves.
    """

    def __init__(self, folder: Path, called: Path | None = None) -> None:
        """``called``: the name of the folder in errors, for a copy."""
        self.folder = folder
        self._called = called or folder
        self.config: AdapterConfig = load_adapter_config(folder, self._called)
        self.path = folder / TENSORS_NAME
        self._tensors = self._headers()
        # The bits of each tensor's largest absolute number, as far as it was checked.
        self._largest: dict[str, int] = defaultdict(int)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self._tensors.values())

    def pairs(self, model: ModelConfig, max_rank: int = 0) -> tuple[AdapterPair, ...]:
        """The adapter's pairs in the order of the decoder's layers and their outputs, if all of them fit the model.

        Args:
            model: the model that the adapter is for.
            max_rank: the highest rank that is allowed; 0 allows any.

        Raises:
            ConfigError: a pair is incomplete, too large, for a module that the model or the config does not have, or of
                another shape; or a module that the config names has none.
        """
        halves = self._halves()
        prefix = self._prefix(halves)
        known = modules(model, prefix)
        pairs: list[AdapterPair] = []
        for module, names in halves.items():
            projection = known.get(module)
            if projection is None:
                raise self._error(f"{names[0]} is for {module}, {self._why_unknown(module, model)}")
            if not self.config.is_target(module):
                raise self._error(f"it has {names[0]}, whose module its config does not name as a target")
            rank = self.config.rank_of(module)
            if 0 < max_rank < rank:
                raise self._error(f"{module} has rank {rank}, and --max-lora-rank is {max_rank}")
            pairs.append(AdapterPair(*names, projection, rank, self.config.scale_of(module)))
            self._check_shapes(pairs[-1])
        missing = [module for module in known if module not in halves and self.config.is_target(module)]
        if missing:
            raise self._error(f"its config names {missing[0]} as a target, for which {TENSORS_NAME} has no tensors")
        return tuple(sorted(pairs, key=lambda pair: (pair.projection.layer, pair.projection.first_output)))

    def digest(self, use: Callable[[str, Bytes], None] | None = None) -> str:
        """SHA-256, in hexadecimal, of what the config means and of all tensors, by name. Reads the whole file, once.

        ``use`` is called with each tensor's name and each piece of it, in order. A piece is some whole numbers, and
        belongs to whoever is called.
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
        kind, ones = _TYPES[self._tensors[name].kind]
        # Without their signs, numbers and their bits have one order.
        largest = int((part.view(kind) & (np.iinfo(kind).max >> 1)).max(initial=0))
        if largest >= ones:
            raise self._error(f"{name} holds NaN or infinite numbers")
        self._largest[name] = max(self._largest[name], largest)

    def check_changes(self, pairs: Iterable[AdapterPair]) -> None:
        """Raises ConfigError for pairs that change a weight by more than MAX_CHANGE, or might: it is their largest
        numbers that count. All numbers must have been checked."""
        for pair in pairs:
            a, b = self._largest_of(pair.a), self._largest_of(pair.b) * pair.scale
            if max(a, b, a * b * pair.rank) > MAX_CHANGE:
                text = f"{pair.a} has numbers up to {a:.3g}, and {pair.b} times its scale up to {b:.3g}"
                raise self._error(f"{text}: they may change weights by more than {MAX_CHANGE:.0f}")

    def checked_numbers(self, digest: str, pairs: Iterable[AdapterPair]) -> dict[str, Bytes]:
        """The bytes of all tensors, by name. Raises ConfigError for NaN or infinities, for ``pairs`` that change too
        much, and for another content than that of ``digest``."""
        found: dict[str, list[Bytes]] = defaultdict(list)

        def keep(name: str, part: Bytes) -> None:
            self.check_numbers(name, part)
            found[name].append(part)

        if self.digest(keep) != digest:
            raise self._error(f"it does not hold the adapter {digest}")
        self.check_changes(pairs)
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in found.items()}

    def bits(self, name: str, data: Bytes, dtype: str, scale: float = 1.0) -> Bits:
        """A tensor's numbers times ``scale`` as bits of another type, rounded once.

        Args:
            name: the tensor, whose bytes are ``data``.
            dtype: "float32" or "bfloat16".
        """
        tensor = self._tensors[name]
        found = data.view(_TYPES[tensor.kind][0]).reshape(tensor.shape)
        if scale == 1.0 and tensor.kind == _KINDS[dtype]:
            return found
        # No number overflows: their sizes have been checked.
        wide = _widened(found, tensor.kind) * np.float32(scale)
        rounded = wide.view(np.uint32)
        if dtype == "float32":
            return rounded
        # To the nearest one, and of two that are equally near to the even one.
        odd = (rounded >> 16) & 1
        rounded += odd + np.uint32(0x7FFF)
        rounded >>= 16
        return rounded.astype(np.uint16)

    def _largest_of(self, name: str) -> float:
        kind = self._tensors[name].kind
        return float(_widened(np.array([self._largest[name]], _TYPES[kind][0]), kind)[0])

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._called}: {message}")

    def _headers(self) -> dict[str, _Tensor]:
        if not self.path.is_file():
            pickled = next((name for name in _PICKLED if (self.folder / name).exists()), None)
            if pickled is not None:
                raise self._error(f"{pickled} is pickled, and a pickle may run any program; save it as {TENSORS_NAME}")
            raise self._error(f"it has no {TENSORS_NAME}")
        try:
            with self.path.open("rb") as file:
                if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
                    raise ValueError(f"its header is longer than {MAX_HEADER_BYTES} bytes")
            # It checks that the header fits the file, so that the header can be read simply.
            with safe_open(self.path, framework="numpy"):
                pass
            with self.path.open("rb") as file:
                behind = 8 + (length := int.from_bytes(file.read(8), "little"))
                header = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError) as error:
            raise self._error(f"{TENSORS_NAME} cannot be read: {error}") from None
        header.pop("__metadata__", None)
        for name, about in header.items():
            if about["dtype"] not in _TYPES:
                raise self._error(f"{name} is {about['dtype']}; only {', '.join(_TYPES)} are read")
        return {
            name: _Tensor(about["dtype"], tuple(about["shape"]), behind + begin, end - begin)
            for name, about in header.items()
            for begin, end in [about["data_offsets"]]
        }

    def _parts(self, file: BufferedReader, tensor: _Tensor) -> Iterator[Bytes]:
        """The bytes of a tensor in the open file, in pieces of bounded size."""
        file.seek(tensor.begin)
        for done in range(0, tensor.size_bytes, READ_AT_ONCE_BYTES):
            part = np.empty(min(READ_AT_ONCE_BYTES, tensor.size_bytes - done), np.uint8)
            if file.readinto(part.data) != len(part):
                raise self._error(f"{TENSORS_NAME} is shorter than its header says")
            yield part

    def _halves(self) -> dict[str, tuple[str, str]]:
        """The names of each module's two tensors."""
        halves: dict[str, dict[str, str]] = {}
        for name in self._tensors:
            module, _, half = name.removeprefix(_PEFT_PREFIX).rpartition(".lora_")
            if not name.startswith(_PEFT_PREFIX) or half not in ("A.weight", "B.weight") or not module:
                reason = next((reason for part, reason in _REFUSED_PARTS if part in name), "no adapter has such a one")
                raise self._error(f"it has a tensor {name}: {reason}")
            halves.setdefault(module, {})[half] = name
        for module, found in halves.items():
            if len(found) == 1:
                (half,) = found
                other = "lora_B" if half == "A.weight" else "lora_A"
                raise self._error(f"it has {found[half]} and no {other} of {module}")
        if not halves:
            raise self._error(f"{TENSORS_NAME} holds no tensors")
        return {module: (found["A.weight"], found["B.weight"]) for module, found in halves.items()}

    def _prefix(self, modules: Mapping[str, tuple[str, str]]) -> str:
        """The name of the decoder in the names of the modules."""
        for prefix in _PREFIXES:
            if any(module.startswith(f"{prefix}layers.") for module in modules):
                return prefix
        return _PREFIXES[0]

    def _why_unknown(self, module: str, model: ModelConfig) -> str:
        words = module.split(".")
        reason = next((reason for word, reason in _REFUSED if word in words), None)
        found = next((_IN_LAYER.fullmatch(module.removeprefix(p)) for p in _PREFIXES if module.startswith(p)), None)
        if reason is None and found is not None and int(found[1]) >= model.num_layers:
            reason = f"the model has {model.num_layers} layers"
        return f"which cannot be served: {reason}" if reason else f"which a {model.family} model does not have"

    def _check_shapes(self, pair: AdapterPair) -> None:
        projection = pair.projection
        for name, wanted in (
            (pair.a, (pair.rank, projection.inputs)),
            (pair.b, (projection.outputs, pair.rank)),
        ):
            found = self._tensors[name].shape
            if found != wanted:
                raise self._error(f"{name} is {list(found)}; rank and model want {list(wanted)}")
