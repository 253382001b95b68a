"""Reader of an adapter's folder as PEFT writes it: its tensors, whether they fit a model, and its digest.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    [rank, inputs]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    [outputs, rank]

for the experts of a layer in one parameter of transformers' class (``target_parameters``),

    ... .mlp.experts.base_layer.lora_A.weight   [experts * rank, inputs], of gate_up_proj, expert-major
    ... .mlp.experts.base_layer.lora_B.weight   [outputs, rank * experts], rank-major
    ... .mlp.experts.lora_A.weight and .lora_B.weight, of down_proj, which PEFT wraps last

Only headers are read until all tensors are known to fit. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pillion.engine.adapters.adapter_config import CONFIG_NAME, MERGE, AdapterConfig, load_adapter_config
from pillion.engine.adapters.adapter_forms import Bits, Bytes
from pillion.engine.adapters.adapter_targets import FLAG, are_targets, targeted_outputs
from pillion.engine.models.families import FAMILIES, layers_of
from pillion.engine.models.layer_operations import MATRICES, Layer, Role, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_family import ModelFamily
from pillion.errors import ConfigError
from pillion.host.adapter_folders import MAX_HEADER_BYTES

TENSORS_NAME = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
READ_AT_ONCE_BYTES = 2**20

# Tensor type -> numpy type of its bits, and the exponent bits, which are all 1 in NaN and infinities.
TYPES: Mapping[str, tuple[type[np.unsignedinteger], int]] = {
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
# Max absolute value of A, of B times its scale, and of their product. Larger changes drown the model, and far larger
# ones overflow.
MAX_CHANGE = 1e6
_KINDS = {"float32": "F32", "bfloat16": "BF16"}
_PEFT_PREFIX = "base_model.model."
_A, _B = "lora_A.weight", "lora_B.weight"
_OF_MODULE = re.compile(r"(.+?)\.(lora_[AB]\.weight)")
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_WRAPPED = ".base_layer"
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_REFUSED = (
    ("lm_head", "adapters of the head are not supported"),
    *((name, "adapters of embeddings are not supported") for name in ("embed_tokens", "wte", "wpe")),
    *(
        (name, "adapters of convolutions are not supported")
        for name in ("conv.conv", "conv1d", "q_conv1d", "k_conv1d", "v_conv1d")
    ),
)
_REFUSED_PARTS = (
    ("lora_embedding", "adapters of embeddings are not supported"),
    ("modules_to_save", "adapters with whole layers are not supported"),
)


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layer of a checkpoint, and its place in a fused layer of the decoder.

    Attributes:
        layer: the decoder's name of the fused layer, such as "layers.3.qkv".
        first_output: its first output in the fused layer.
        factors: (number of consecutive outputs, factor that the model applies to them); () if it applies none.
        exact: True if inputs and products are float32 whatever the model's type, as for routers and gates.
        experts: number of experts with such a layer; 0 for a dense layer.
        expert: index of a single expert's layer; None otherwise.
        lies_turned: True if expert matrices are stored [experts, inputs, outputs].
    """

    layer: str
    first_output: int
    outputs: int
    inputs: int
    factors: tuple[tuple[int, float], ...] = ()
    exact: bool = False
    experts: int = 0
    expert: int | None = None
    lies_turned: bool = False

    @property
    def stacked(self) -> bool:
        """True for the stacked layers of all experts."""
        return self.experts > 0 and self.expert is None


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """Tensors of an adapter for one linear layer or its stacked experts. ``a`` and ``b`` are their names in the file.
    ``swapped``: ``a`` reads the layer's outputs and ``b`` produces its inputs, because PEFT mistook the orientation of
    a parameter."""

    module: str
    a: str
    b: str
    projection: Projection
    rank: int
    scale: float
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def projections(layer: Layer, index: int) -> dict[str, Projection]:
    """Return the linear layers of a decoder layer that may have adapters, by checkpoint name. A family has either fused
    names such as qkv_proj or their parts. In an expert's name, {} stands for its number."""
    found = {}
    for tensor in tensors_of(layer):
        if tensor.role not in MATRICES:
            continue
        name, inputs = f"layers.{index}.{tensor.name}", tensor.shape[1]
        exact = tensor.role is Role.EXACT_MATRIX
        pieces = [piece.size for piece in tensor.rows]
        factors = tuple(zip(pieces, tensor.scales, strict=True)) if tensor.scales else ()
        for names in tensor.checkpoint_names:
            first = 0
            for module, own in zip(names, tensor.pieces_of(names), strict=True):
                size = sum(pieces[own])
                found[module] = Projection(name, first, size, inputs, factors[own], exact, tensor.experts)
                first += size
    return found


_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": tuple(
        f"{mlp}.{part}_proj" for mlp in ("mlp", "feed_forward", "block_sparse_moe") for part in ("gate", "up")
    ),
}


def modules(model: ModelConfig, prefix: str = _PREFIXES[0], *, of_experts: bool = False) -> dict[str, Projection]:
    """Return all linear layers that may have adapters, by their names in a model with the decoder ``prefix``: those of
    the family's checkpoints and of transformers' class. ``of_experts`` adds single experts, which some of them have."""
    family, found = FAMILIES[model.family], dict[str, Projection]()
    hidden = {one for name, parts in _FUSED.items() for one in (parts if name in family.fused else (name,))}
    for index, layer in enumerate(layers_of(model)):
        for name, projection in projections(layer, index).items():
            each = [replace(projection, expert=number) for number in range(projection.experts if of_experts else 0)]
            if not projection.experts and name not in hidden:
                each = [projection]
            for own in each:
                for tensor in _names(family, f"{prefix}layers.{index}.{name}.weight".format(own.expert)):
                    found[tensor.removesuffix(".weight")] = own
    return found


def parameters_of_experts(model: ModelConfig, prefix: str = _PREFIXES[0]) -> dict[str, dict[str, Projection]]:
    """Return the parameters of stacked experts, by module and by name, in the order in which transformers' class
    declares them; ``prefix`` as in :func:`modules`."""
    family, found = FAMILIES[model.family], defaultdict[str, dict[str, Projection]](dict)
    for index, layer in enumerate(layers_of(model)):
        for tensor in tensors_of(layer):
            for name in tensor.stacked:
                for own in _names(family, f"{prefix}layers.{index}.{name}"):
                    module, _, parameter = own.rpartition(".")
                    outputs, inputs = tensor.shape
                    found[module][parameter] = Projection(
                        f"layers.{index}.{tensor.name}",
                        0,
                        outputs,
                        inputs,
                        experts=tensor.experts,
                        lies_turned=bool(tensor.transposed),
                    )
    return found


def _names(family: ModelFamily, name: str) -> tuple[str, ...]:
    """Return a tensor's names in a family's checkpoints and in transformers' class, from Llama's name."""
    in_files = family.in_files(name)
    return in_files, family.in_models(in_files)


def widened(bits: Bits, kind: str) -> npt.NDArray[np.float32]:
    """Cast numbers of a tensor type to new float32."""
    if kind == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)


def rounded_bits(wide: npt.NDArray[np.float32], dtype: str) -> Bits:
    """Return numbers as bits of "float32" or "bfloat16", rounded once; may overwrite ``wide``."""
    rounded = wide.view(np.uint32)
    if dtype == "float32":
        return rounded
    # Round to nearest, ties to even.
    odd = (rounded >> 16) & 1
    rounded += odd + np.uint32(0x7FFF)
    rounded >>= 16
    return rounded.astype(np.uint16)


def _why_refused(module: str) -> str | None:
    """Return why PEFT's adapter of a module is unsupported, and what to do; None for other modules."""
    return next((f"{reason}; {MERGE}" for name, reason in _REFUSED if f".{name}." in f".{module}."), None)


def _why_none(tensor: str) -> str:
    """Return why a tensor that is not of a pair is unsupported."""
    reason = next((f"{reason}; {MERGE}" for part, reason in _REFUSED_PARTS if part in tensor), None)
    # PEFT saves adapted embeddings and heads themselves, too.
    return reason or _why_refused(tensor) or "adapters have no such tensor"


def _place(projection: Projection) -> tuple[str, int, int]:
    """Return the sort key of linear layers: fused layer, output, expert."""
    return projection.layer, projection.first_output, projection.expert or 0


def _kind(projection: Projection) -> str:
    """Return the name of a fused layer within its decoder layer, such as "router"."""
    return projection.layer.split(".", 2)[2]


class AdapterFiles:
    """An adapter's folder; its config and headers are read on construction.

    Raises ConfigError, with the folder and the key or tensor, for a missing or unsupported adapter.
    """

    def __init__(self, folder: Path, called: Path | None = None) -> None:
        """Read the folder; errors of a copy name ``called`` instead."""
        self.folder = folder
        self._called = called or folder
        self.config = load_adapter_config(folder, self._called)
        self.path = folder / TENSORS_NAME
        self._tensors = self._headers()
        # Bits of each tensor's largest absolute value among the checked ones.
        self._largest: dict[str, int] = defaultdict(int)

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.size_bytes for tensor in self._tensors.values())

    def pairs(self, model: ModelConfig, max_rank: int = 0, targets: Sequence[str] = ()) -> tuple[AdapterPair, ...]:
        """Return the adapter's pairs, ordered by layer and output.

        Args:
            max_rank: max rank; 0 allows any.
            targets: names of linear layers that adapters may change (adapter_targets.py); empty allows all.

        Raises:
            ConfigError: a pair is incomplete, too large or of a wrong shape, or its module is unknown to the model or
                the config or not a target; or a module of the config has no pair.
        """
        config = self.config
        if config.turned and not FAMILIES[model.family].turned:
            raise self._error(
                f"{CONFIG_NAME}: fan_in_fan_out = True is not supported: it means weights of the layout [inputs,"
                f" outputs], which {model.family} models do not have; PEFT treats it as false"
            )
        if config.parameters and FAMILIES[model.family].turned:
            raise self._error(
                f"{CONFIG_NAME}: target_parameters is not supported for {model.family}: it has no experts"
            )
        halves = self._halves()
        prefix = self._prefix(halves)
        known = modules(model, prefix, of_experts=any(map(_OF_EXPERT.search, halves)))
        parameters = parameters_of_experts(model, prefix)
        pairs = [
            self._pair(config, module, names, known, parameters, model, max_rank) for module, names in halves.items()
        ]
        self._check_complete(config, pairs, known, parameters)
        if targets:
            self._check_targets(pairs, model, targets)
        return tuple(sorted(pairs, key=lambda pair: _place(pair.projection)))

    def _check_targets(self, pairs: Iterable[AdapterPair], model: ModelConfig, targets: Sequence[str]) -> None:
        """Raise ConfigError for a pair of a linear layer outside of ``targets``."""
        targeted = targeted_outputs(model, targets)
        for pair in pairs:
            changed = pair.projection
            outputs = range(changed.first_output, changed.first_output + changed.outputs)
            if not are_targets(outputs, targeted.get(changed.layer, ())):
                raise self._error(f"it changes {pair.module}, and {FLAG} allows {','.join(targets)} alone")

    def digest(self, use: Callable[[str, Bytes], None] | None = None) -> str:
        """Return the SHA-256, in hexadecimal, of the config's meaning and of all tensors by name. Reads the whole file
        once.

        ``use`` is called with each tensor's name and each piece of it, in order. Pieces are whole numbers of elements,
        and ``use`` may change them.
        """
        digest = hashlib.sha256(b"pillion.adapter.1")
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
        """Raise ConfigError for NaN or infinities in a piece of a tensor."""
        kind, ones = TYPES[self._tensors[name].kind]
        # Floats without sign are ordered like their bits.
        largest = int((part.view(kind) & (np.iinfo(kind).max >> 1)).max(initial=0))
        if largest >= ones:
            raise self._error(f"{name} contains NaN or infinities")
        self._largest[name] = max(self._largest[name], largest)

    def check_changes(self, pairs: Iterable[AdapterPair]) -> None:
        """Raise ConfigError for pairs that may change a weight by more than MAX_CHANGE, judged by their largest
        numbers. Needs :meth:`check_numbers` of all tensors."""
        for pair in pairs:
            a, b = self._largest_of(pair.a), self._largest_of(pair.b) * pair.scale
            if max(a, b, a * b * pair.rank) > MAX_CHANGE:
                text = f"{pair.a} has numbers up to {a:.3g}, and {pair.b} times its scale up to {b:.3g}"
                raise self._error(f"{text}: they may change weights by more than {MAX_CHANGE:.0f}")

    def checked_numbers(self, digest: str, pairs: Iterable[AdapterPair]) -> dict[str, Bytes]:
        """Return the bytes of all tensors, by name. Raises ConfigError for NaN or infinities, for ``pairs`` that change
        too much, and for content that does not match ``digest``."""
        found: dict[str, list[Bytes]] = defaultdict(list)

        def keep(name: str, part: Bytes) -> None:
            self.check_numbers(name, part)
            found[name].append(part)

        if self.digest(keep) != digest:
            raise self._error(f"it does not hold the adapter {digest}")
        self.check_changes(pairs)
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in found.items()}

    def bits(self, name: str, data: Bytes, dtype: str, scale: float = 1.0) -> Bits:
        """Return a tensor's numbers times ``scale`` as bits of ``dtype`` ("float32" or "bfloat16"), rounded once;
        ``data`` are its bytes."""
        tensor = self._tensors[name]
        found = data.view(TYPES[tensor.kind][0]).reshape(tensor.shape)
        if scale == 1.0 and tensor.kind == _KINDS[dtype]:
            return found
        # Cannot overflow: check_changes has run.
        return rounded_bits(widened(found, tensor.kind) * np.float32(scale), dtype)

    def numbers(self, name: str, data: Bytes) -> npt.NDArray[np.float32]:
        """Return a tensor in float32; ``data`` are its bytes."""
        return self.bits(name, data, "float32").view(np.float32)

    def _pair(
        self,
        config: AdapterConfig,
        module: str,
        names: Mapping[str, str],
        known: Mapping[str, Projection],
        parameters: Mapping[str, Mapping[str, Projection]],
        model: ModelConfig,
        max_rank: int,
    ) -> AdapterPair:
        """Return the pair of a module with tensors ``names``. Raises ConfigError if it does not fit config and
        model."""
        projection, name = known.get(module), module
        if projection is None:
            name, projection = self._of_experts(config, module, parameters)
        elif not config.is_target(module):
            name = f"{module}.weight"
            if not config.is_parameter(name):
                raise self._error(f"it has {names[_A]}, whose module its config does not name as a target")
        if projection is None:
            raise self._error(f"{next(iter(names.values()))} is for {module}, {self._why_unknown(module, model)}")
        rank = config.rank_of(name)
        if 0 < max_rank < rank:
            raise self._error(f"{name} has rank {rank}, and --max-lora-rank is {max_rank}")
        swapped = projection.stacked and self._is_swapped(config, projection, names[_A], FAMILIES[model.family])
        pair = AdapterPair(name, names[_A], names[_B], projection, rank, config.scale_of(name), swapped)
        self._check_shapes(pair)
        return pair

    def _is_swapped(self, config: AdapterConfig, projection: Projection, a: str, family: ModelFamily) -> bool:
        """Return whether the matrix ``a`` of a parameter reads outputs. PEFT's releases differ, so shapes decide if
        they can."""
        if projection.outputs != projection.inputs:
            return self._tensors[a].shape[1:] == (projection.outputs,)
        # Only Llama 4's class, which scales the experts' inputs, does not declare that its parameters are [inputs,
        # outputs].
        return not projection.lies_turned if config.as_they_lie else family.scaled_experts

    def _of_experts(
        self, config: AdapterConfig, module: str, parameters: Mapping[str, Mapping[str, Projection]]
    ) -> tuple[str, Projection | None]:
        """Return the name and projection of the stacked experts for which PEFT wrote a module; ``module`` and None if
        it is not for such a parameter."""
        inside = module
        while inside.endswith(_WRAPPED):
            inside = inside.removesuffix(_WRAPPED)
        own = parameters.get(inside, {})
        # PEFT wraps the module once per parameter, in declaration order.
        targets = [name for name in own if config.is_parameter(f"{inside}.{name}")]
        depth = (len(module) - len(inside)) // len(_WRAPPED)
        if own and depth >= len(targets):
            raise self._error(f"it has tensors for {module}, whose parameter its config does not name as a target")
        return (f"{inside}.{targets[-1 - depth]}", own[targets[-1 - depth]]) if own else (module, None)

    def _check_complete(
        self,
        config: AdapterConfig,
        pairs: Sequence[AdapterPair],
        known: Mapping[str, Projection],
        parameters: Mapping[str, Mapping[str, Projection]],
    ) -> None:
        """Raise ConfigError for modules and parameters with tensors under two names, and for those of the config
        without tensors."""
        # Checkpoints have several names for some layers, a model only one.
        once = {pair.projection: pair.module for pair in pairs}
        stacked = {pair.projection.layer for pair in pairs if pair.projection.stacked}
        for pair in pairs:
            apart = pair.projection.expert is not None and pair.projection.layer in stacked
            if once[pair.projection] != pair.module or apart:
                raise self._error(f"it has tensors for {pair.module} under two names")
        adapted = {pair.projection for pair in pairs}
        wanted = {name: found for name, found in known.items() if config.is_target(name)}
        weights = {f"{name}.weight": found for name, found in known.items()}
        weights |= {f"{module}.{name}": found for module, own in parameters.items() for name, found in own.items()}
        wanted |= {name: found for name, found in weights.items() if config.is_parameter(name)}
        # Of these names of routers and gates, a class of transformers has at most one.
        kinds = {_kind(found) for found in adapted}
        missing = next(
            (
                name
                for name, found in wanted.items()
                if found not in adapted and (not found.exact or _kind(found) in kinds)
            ),
            None,
        )
        if missing is not None:
            raise self._error(f"its config names {missing} as a target, for which {TENSORS_NAME} has no tensors")

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
                    f"{pickled} is pickled, and a pickle may run arbitrary code; if you trust it, PEFT converts it: "
                    f"PeftModel.from_pretrained(base, FOLDER).save_pretrained(FOLDER) writes {TENSORS_NAME}"
                )
            raise self._error(f"it has no {TENSORS_NAME}")
        try:
            with self.path.open("rb") as file:
                if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
                    raise ValueError(f"its header is longer than {MAX_HEADER_BYTES} bytes")
            # safe_open validates the header, which can then be read without checks.
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
                raise self._error(f"{name} is {about['dtype']}; only {', '.join(TYPES)} are supported")
        return {
            name: _Tensor(about["dtype"], tuple(about["shape"]), after + begin, end - begin)
            for name, about in header.items()
            for begin, end in [about["data_offsets"]]
        }

    def _parts(self, file: BufferedReader, tensor: _Tensor) -> Iterator[Bytes]:
        """Yield the bytes of a tensor in the open file, in pieces of limited size."""
        file.seek(tensor.begin)
        for done in range(0, tensor.size_bytes, READ_AT_ONCE_BYTES):
            part = np.empty(min(READ_AT_ONCE_BYTES, tensor.size_bytes - done), np.uint8)
            if file.readinto(part.data) != len(part):
                raise self._error(f"{TENSORS_NAME} is shorter than its header says")
            yield part

    def _halves(self) -> dict[str, dict[str, str]]:
        """Return the names of each module's tensors, by suffix."""
        halves: dict[str, dict[str, str]] = {}
        for name in self._tensors:
            found = _OF_MODULE.fullmatch(name.removeprefix(_PEFT_PREFIX))
            if found is None or not name.startswith(_PEFT_PREFIX):
                raise self._error(f"it has a tensor {name}: {_why_none(name)}")
            halves.setdefault(found[1], {})[found[2]] = name
        for module, parts in halves.items():
            if lacks := sorted({_A, _B} - parts.keys()):
                raise self._error(f"it has {next(iter(parts.values()))} and no {lacks[0].split('.')[0]} of {module}")
        if not halves:
            raise self._error(f"{TENSORS_NAME} holds no tensors")
        return halves

    def _prefix(self, modules: Iterable[str]) -> str:
        """Return the prefix before ``layers.`` in the adapter's module names; the first known one if none fits."""
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
        ranks, outputs, inputs = pair.rank, projection.outputs, projection.inputs
        if projection.stacked:
            ranks *= projection.experts
            outputs, inputs = (inputs, outputs) if pair.swapped else (outputs, inputs)
        for name, wanted in ((pair.a, (ranks, inputs)), (pair.b, (outputs, ranks))):
            if (found := self._tensors[name].shape) != wanted:
                why = f" for {projection.experts} experts" if projection.stacked else ""
                raise self._error(f"{name} is {list(found)}; rank and model want {list(wanted)}{why}")
