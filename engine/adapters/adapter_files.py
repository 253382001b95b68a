"""Reader of an adapter folder as PEFT writes it: its tensors, the check that they fit a model, and its digest.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    [rank, inputs]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    [outputs, rank]

and for the stacked experts of a layer, a parameter of transformers' class (``target_parameters``),

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
READ_AT_ONCE_BYTES = 2**20

# By safetensors dtype: numpy dtype of its bits, and mask of the exponent bits, which are all 1 in NaN and infinities.
TYPES: Mapping[str, tuple[type[np.unsignedinteger], int]] = {
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
# Max absolute value of A, of B times its scale, and of their product; far larger ones overflow.
MAX_CHANGE = 1e6
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


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layer of a checkpoint, and where its outputs are in a fused layer of the decoder.

    Attributes:
        layer: the decoder's name of the fused layer, such as "layers.3.qkv".
        first_output: index of its first output in the fused layer.
        factors: (number of consecutive outputs, factor that the model applies to them); () if it applies none.
        exact: True if inputs and products are float32 for any dtype of the model, as for routers and gates.
        experts: number of experts; 0 for a dense layer.
        expert: index of the expert, for a single expert's layer; else None.
        transposed: True if stacked expert matrices are stored [experts, inputs, outputs].
    """

    layer: str
    first_output: int
    outputs: int
    inputs: int
    factors: tuple[tuple[int, float], ...] = ()
    exact: bool = False
    experts: int = 0
    expert: int | None = None
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """True for the stacked matrices of all experts."""
        return self.experts > 0 and self.expert is None


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """The matrices A and B of an adapter for one linear layer, or for stacked experts.

    Attributes:
        module: name of the changed module or parameter.
        a, b: names of the tensors in the file.
        rank: rank of the matrices; for stacked experts, the rank per expert.
        scale: factor of their product.
        swapped: True if PEFT mistook the orientation of a parameter: ``a`` has a column per output of the layer, ``b``
            a row per input.
    """

    module: str
    a: str
    b: str
    projection: Projection
    rank: int
    scale: float
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's entry in the file's header. ``kind``: safetensors dtype; ``begin``: offset in the file, in bytes."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def projections(layer: Layer, index: int) -> dict[str, Projection]:
    """Return the linear layers of a decoder layer that adapters may change, by checkpoint name, fused ones such as
    qkv_proj and their parts. In an expert's name, {} stands for its index."""
    by_name = {}
    for tensor in tensors_of(layer):
        if tensor.role not in MATRICES:
            continue
        name, inputs = f"layers.{index}.{tensor.name}", tensor.shape[1]
        exact = tensor.role is Role.EXACT_MATRIX
        sizes = [entries.size for entries in tensor.rows]
        factors = tuple(zip(sizes, tensor.scales, strict=True)) if tensor.scales else ()
        for names in tensor.checkpoint_names:
            first = 0
            for module, entries in zip(names, tensor.pieces_of(names), strict=True):
                outputs = sum(sizes[entries])
                by_name[module] = Projection(name, first, outputs, inputs, factors[entries], exact, tensor.experts)
                first += outputs
    return by_name


# Parts of linear layers that some families fuse, by the fused layer's name.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": tuple(
        f"{mlp}.{part}_proj" for mlp in ("mlp", "feed_forward", "block_sparse_moe") for part in ("gate", "up")
    ),
}


def modules(model: ModelConfig, prefix: str = _PREFIXES[0], *, of_experts: bool = False) -> dict[str, Projection]:
    """Return all linear layers of a model that adapters may change, by name in the family's checkpoints and in
    transformers' class. ``prefix``: the decoder's name, before "layers.". ``of_experts``: include each expert's
    layers."""
    family, by_name = FAMILIES[model.family], dict[str, Projection]()
    absent = {name for fused, parts in _FUSED.items() for name in (parts if fused in family.fused else (fused,))}
    for index, layer in enumerate(layers_of(model)):
        for name, projection in projections(layer, index).items():
            layers = [replace(projection, expert=expert) for expert in range(projection.experts if of_experts else 0)]
            if not projection.experts and name not in absent:
                layers = [projection]
            for single in layers:
                for tensor in _names(family, f"{prefix}layers.{index}.{name}.weight".format(single.expert)):
                    by_name[tensor.removesuffix(".weight")] = single
    return by_name


def parameters_of_experts(model: ModelConfig, prefix: str = _PREFIXES[0]) -> dict[str, dict[str, Projection]]:
    """Return the parameters of stacked experts, by module and by name, in the order in which transformers' class
    declares them; ``prefix`` as in :func:`modules`."""
    family, by_module = FAMILIES[model.family], defaultdict[str, dict[str, Projection]](dict)
    for index, layer in enumerate(layers_of(model)):
        for tensor in tensors_of(layer):
            for stacked in tensor.stacked:
                for name in _names(family, f"{prefix}layers.{index}.{stacked}"):
                    module, _, parameter = name.rpartition(".")
                    outputs, inputs = tensor.shape
                    by_module[module][parameter] = Projection(
                        f"layers.{index}.{tensor.name}",
                        0,
                        outputs,
                        inputs,
                        experts=tensor.experts,
                        transposed=bool(tensor.transposed),
                    )
    return by_module


def _names(family: ModelFamily, name: str) -> tuple[str, ...]:
    """Return the names, in a family's checkpoints and in transformers' class, of the tensor that Llama calls
    ``name``."""
    in_files = family.in_files(name)
    return in_files, family.in_models(in_files)


def to_float32(bits: Bits, kind: str) -> npt.NDArray[np.float32]:
    """Return new float32 numbers from the bits of a tensor of safetensors dtype ``kind``."""
    if kind == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)


def rounded_bits(numbers: npt.NDArray[np.float32], dtype: str) -> Bits:
    """Return the bits of float32 ``numbers`` as "float32" or "bfloat16", rounded once; may overwrite ``numbers``."""
    bits = numbers.view(np.uint32)
    if dtype == "float32":
        return bits
    # Round to nearest, ties to even.
    odd = (bits >> 16) & 1
    bits += odd + np.uint32(0x7FFF)
    bits >>= 16
    return bits.astype(np.uint16)


def _why_refused(module: str) -> str | None:
    """Return why adapters of ``module`` are unsupported, with advice; None if they are supported."""
    return next((f"{reason}; {MERGE}" for name, reason in _REFUSED if f".{name}." in f".{module}."), None)


def _why_unsupported(tensor: str) -> str:
    """Return why a tensor is unsupported that is neither A nor B of a linear layer."""
    reasons = {
        "lora_embedding": "adapters of embeddings are not supported",
        "modules_to_save": "adapters with whole layers are not supported",
    }
    reason = next((f"{reason}; {MERGE}" for part, reason in reasons.items() if part in tensor), None)
    # PEFT also saves the weights of embeddings and heads if they are adapted.
    return reason or _why_refused(tensor) or "adapters have no such tensor"


def _sort_key(projection: Projection) -> tuple[str, int, int]:
    """Return the sort key of linear layers: fused layer, output, expert."""
    return projection.layer, projection.first_output, projection.expert or 0


def _kind(projection: Projection) -> str:
    """Return the name of a fused layer within its decoder layer, such as "router"."""
    return projection.layer.split(".", 2)[2]


class AdapterFiles:
    """An adapter's folder; its config and headers are read on construction.

    Raises ConfigError, with the folder and the key or tensor, for a missing or unsupported adapter. For a copy,
    messages name the original folder, ``called``.
    """

    def __init__(self, folder: Path, called: Path | None = None) -> None:
        self.folder = folder
        self._called = called or folder
        self.config = load_adapter_config(folder, self._called)
        self.path = folder / TENSORS_NAME
        self._tensors = self._headers()
        # Bits of each tensor's largest absolute value so far (check_numbers).
        self._largest: dict[str, int] = defaultdict(int)

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.size_bytes for tensor in self._tensors.values())

    def pairs(self, model: ModelConfig, max_rank: int = 0, targets: Sequence[str] = ()) -> tuple[AdapterPair, ...]:
        """Return the adapter's matrices (A, B), ordered by fused layer and output.

        Args:
            max_rank: max rank; 0 allows any.
            targets: names of linear layers that adapters may change (adapter_targets.py); empty allows all.

        Raises:
            ConfigError: a pair is incomplete, of too high a rank or of a wrong shape; its module is not in the model or
                the config, or not in ``targets``; or a module of the config has no pair.
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
        by_module = self._tensors_by_module()
        prefix = self._prefix(by_module)
        known = modules(model, prefix, of_experts=any(map(_OF_EXPERT.search, by_module)))
        parameters = parameters_of_experts(model, prefix)
        pairs = [
            self._pair(config, module, names, known, parameters, model, max_rank) for module, names in by_module.items()
        ]
        self._check_complete(config, pairs, known, parameters)
        if targets:
            self._check_targets(pairs, model, targets)
        return tuple(sorted(pairs, key=lambda pair: _sort_key(pair.projection)))

    def _check_targets(self, pairs: Iterable[AdapterPair], model: ModelConfig, targets: Sequence[str]) -> None:
        """Raise ConfigError for a pair of a linear layer outside of ``targets``."""
        targeted = targeted_outputs(model, targets)
        for pair in pairs:
            changed = pair.projection
            outputs = range(changed.first_output, changed.first_output + changed.outputs)
            if not are_targets(outputs, targeted.get(changed.layer, ())):
                raise self._error(f"it changes {pair.module}, but {FLAG} allows only {','.join(targets)}")

    def digest(self, use: Callable[[str, Bytes], None] | None = None) -> str:
        """Return the SHA-256, in hexadecimal, of the canonical config and of all tensors by name. Reads the whole file
        once.

        ``use`` is called with the name and bytes of each tensor, in chunks of whole elements, in order; it may
        overwrite the chunks.
        """
        digest = hashlib.sha256(b"pillion.adapter.1")
        canonical = self.config.canonical()
        digest.update(len(canonical).to_bytes(8, "little") + canonical)
        with self.path.open("rb") as file:
            for name, tensor in sorted(self._tensors.items()):
                header = json.dumps([name, tensor.kind, tensor.shape]).encode()
                digest.update(len(header).to_bytes(8, "little") + header)
                for chunk in self._chunks(file, tensor):
                    digest.update(chunk.data)
                    if use is not None:
                        use(name, chunk)
        return digest.hexdigest()

    def check_numbers(self, name: str, chunk: Bytes) -> None:
        """Record the largest absolute value in a chunk of a tensor. Raises ConfigError for NaN or infinities."""
        bits_type, exponent_mask = TYPES[self._tensors[name].kind]
        # Floats without sign are ordered like their bits.
        largest = int((chunk.view(bits_type) & (np.iinfo(bits_type).max >> 1)).max(initial=0))
        if largest >= exponent_mask:
            raise self._error(f"{name} contains NaN or infinities")
        self._largest[name] = max(self._largest[name], largest)

    def check_changes(self, pairs: Iterable[AdapterPair]) -> None:
        """Raise ConfigError for pairs that may change a weight by more than MAX_CHANGE, by the product of their largest
        numbers. Call :meth:`check_numbers` for all tensors before."""
        for pair in pairs:
            a, b = self._largest_of(pair.a), self._largest_of(pair.b) * pair.scale
            if max(a, b, a * b * pair.rank) > MAX_CHANGE:
                text = f"{pair.a} has numbers up to {a:.3g}, and {pair.b} times its scale up to {b:.3g}"
                raise self._error(f"{text}: they may change weights by more than {MAX_CHANGE:.0f}")

    def checked_data(self, digest: str, pairs: Iterable[AdapterPair]) -> dict[str, Bytes]:
        """Return the bytes of all tensors, by name. Raises ConfigError for NaN or infinities, for ``pairs`` that change
        a weight too much, and for content that does not match ``digest``."""
        chunks: dict[str, list[Bytes]] = defaultdict(list)

        def keep(name: str, chunk: Bytes) -> None:
            self.check_numbers(name, chunk)
            chunks[name].append(chunk)

        if self.digest(keep) != digest:
            raise self._error(f"its digest is not {digest}")
        self.check_changes(pairs)
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in chunks.items()}

    def bits(self, name: str, data: Bytes, dtype: str, scale: float = 1.0) -> Bits:
        """Return the numbers of tensor ``name``, whose bytes are ``data``, times ``scale``, as bits of ``dtype``
        ("float32" or "bfloat16"), rounded once."""
        tensor = self._tensors[name]
        bits = data.view(TYPES[tensor.kind][0]).reshape(tensor.shape)
        if scale == 1.0 and (dtype, tensor.kind) in {("float32", "F32"), ("bfloat16", "BF16")}:
            return bits
        # Cannot overflow: check_changes has run.
        return rounded_bits(to_float32(bits, tensor.kind) * np.float32(scale), dtype)

    def numbers(self, name: str, data: Bytes) -> npt.NDArray[np.float32]:
        """Return the numbers of tensor ``name``, whose bytes are ``data``, in float32."""
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
        """Return the pair of ``module`` with tensors ``names``, by suffix. Raises ConfigError if it does not fit the
        config and the model."""
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
        """Return whether PEFT mistook the orientation of a parameter of stacked experts, so that ``a`` has a column per
        output. The shape tells unless the layer has as many inputs as outputs; then it depends on PEFT's release."""
        if projection.outputs != projection.inputs:
            return self._tensors[a].shape[1:] == (projection.outputs,)
        # Newer releases ask transformers' class, and only Llama 4's, which scales the experts' inputs, does not declare
        # that its parameters are [inputs, outputs].
        return not projection.transposed if config.as_they_lie else family.scaled_experts

    def _of_experts(
        self, config: AdapterConfig, module: str, parameters: Mapping[str, Mapping[str, Projection]]
    ) -> tuple[str, Projection | None]:
        """Return the name and projection of the parameter of stacked experts that PEFT saved as ``module``; ``module``
        and None if the module has no such parameters."""
        unwrapped = module
        while unwrapped.endswith(_WRAPPED):
            unwrapped = unwrapped.removesuffix(_WRAPPED)
        by_name = parameters.get(unwrapped, {})
        # PEFT wraps the module once per parameter, in declaration order.
        targets = [name for name in by_name if config.is_parameter(f"{unwrapped}.{name}")]
        depth = (len(module) - len(unwrapped)) // len(_WRAPPED)
        if by_name and depth >= len(targets):
            raise self._error(f"it has tensors for {module}, whose parameter its config does not name as a target")
        return (f"{unwrapped}.{targets[-1 - depth]}", by_name[targets[-1 - depth]]) if by_name else (module, None)

    def _check_complete(
        self,
        config: AdapterConfig,
        pairs: Sequence[AdapterPair],
        known: Mapping[str, Projection],
        parameters: Mapping[str, Mapping[str, Projection]],
    ) -> None:
        """Raise ConfigError for a linear layer with tensors under two names, and for a target of the config without
        tensors."""
        # Some layers have several names in checkpoints, but only one in a model.
        name_of = {pair.projection: pair.module for pair in pairs}
        stacked = {pair.projection.layer for pair in pairs if pair.projection.stacked}
        for pair in pairs:
            is_also_stacked = pair.projection.expert is not None and pair.projection.layer in stacked
            if name_of[pair.projection] != pair.module or is_also_stacked:
                raise self._error(f"it has tensors for {pair.module} under two names")
        adapted = {pair.projection for pair in pairs}
        targets = {name: layer for name, layer in known.items() if config.is_target(name)}
        weights = {f"{name}.weight": layer for name, layer in known.items()}
        weights |= {f"{module}.{name}": layer for module, own in parameters.items() for name, layer in own.items()}
        targets |= {name: layer for name, layer in weights.items() if config.is_parameter(name)}
        # Routers and gates have several possible names, of which transformers' class has at most one.
        kinds = {_kind(layer) for layer in adapted}
        missing = next(
            (
                name
                for name, layer in targets.items()
                if layer not in adapted and (not layer.exact or _kind(layer) in kinds)
            ),
            None,
        )
        if missing is not None:
            raise self._error(f"its config names {missing} as a target, for which {TENSORS_NAME} has no tensors")

    def _largest_of(self, name: str) -> float:
        kind = self._tensors[name].kind
        return float(to_float32(np.array([self._largest[name]], TYPES[kind][0]), kind)[0])

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._called}: {message}")

    def _headers(self) -> dict[str, _Tensor]:
        if not self.path.is_file():
            names = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
            pickled = next((name for name in names if (self.folder / name).exists()), None)
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

    def _chunks(self, file: BufferedReader, tensor: _Tensor) -> Iterator[Bytes]:
        """Yield the bytes of a tensor in the open file, in chunks of up to READ_AT_ONCE_BYTES."""
        file.seek(tensor.begin)
        for done in range(0, tensor.size_bytes, READ_AT_ONCE_BYTES):
            chunk = np.empty(min(READ_AT_ONCE_BYTES, tensor.size_bytes - done), np.uint8)
            if file.readinto(chunk.data) != len(chunk):
                raise self._error(f"{TENSORS_NAME} is shorter than its header says")
            yield chunk

    def _tensors_by_module(self) -> dict[str, dict[str, str]]:
        """Return the names of each module's tensors, by suffix. Raises ConfigError for an unknown tensor, and for A
        without B or the reverse."""
        by_module: dict[str, dict[str, str]] = {}
        for name in self._tensors:
            match = _OF_MODULE.fullmatch(name.removeprefix(_PEFT_PREFIX))
            if match is None or not name.startswith(_PEFT_PREFIX):
                raise self._error(f"it has a tensor {name}: {_why_unsupported(name)}")
            by_module.setdefault(match[1], {})[match[2]] = name
        for module, names in by_module.items():
            if missing := sorted({_A, _B} - names.keys()):
                raise self._error(f"it has {next(iter(names.values()))} and no {missing[0].split('.')[0]} of {module}")
        if not by_module:
            raise self._error(f"{TENSORS_NAME} contains no tensors")
        return by_module

    def _prefix(self, modules: Iterable[str]) -> str:
        """Return the prefix before "layers." in the adapter's module names; the first of _PREFIXES if none matches."""
        for prefix in _PREFIXES:
            if any(module.startswith(f"{prefix}layers.") for module in modules):
                return prefix
        return _PREFIXES[0]

    def _why_unknown(self, module: str, model: ModelConfig) -> str:
        """Return why the model has no linear layer ``module`` for adapters, as a relative clause."""
        reason = _why_refused(module)
        match = next((_IN_LAYER.fullmatch(module.removeprefix(p)) for p in _PREFIXES if module.startswith(p)), None)
        if reason is None and match is not None and int(match[1]) >= model.num_layers:
            reason = f"the model has {model.num_layers} layers"
        return f"which cannot be served: {reason}" if reason else f"which a {model.family} model does not have"

    def _check_shapes(self, pair: AdapterPair) -> None:
        """Raise ConfigError unless the shapes of A and B match the pair's rank and projection."""
        projection = pair.projection
        ranks, outputs, inputs = pair.rank, projection.outputs, projection.inputs
        if projection.stacked:
            ranks *= projection.experts
            outputs, inputs = (inputs, outputs) if pair.swapped else (outputs, inputs)
        for name, expected in ((pair.a, (ranks, inputs)), (pair.b, (outputs, ranks))):
            if (shape := self._tensors[name].shape) != expected:
                why = f" for {projection.experts} experts" if projection.stacked else ""
                raise self._error(f"{name} is {list(shape)}; rank and model require {list(expected)}{why}")
