"""Preparation of a model for serving: find it, convert it once and fingerprint it.

Every component of a cluster calls :func:`prepare` with the same flags and gets the same result. Only the first call
converts; later ones read one small record.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pillion.config import DTYPE_CHOICES, ModelFlags
from pillion.engine.checkpoints.convert import check_vocabulary, link_with_tokenizer, try_tokenizer
from pillion.engine.checkpoints.fingerprint import fingerprint
from pillion.engine.checkpoints.gguf_names import gguf_parts
from pillion.engine.checkpoints.model_cache import (
    CONVERSION_VERSION,
    TEXTS_VERSION,
    ModelCache,
    ModelRecord,
    digest_file,
    stamp,
)
from pillion.engine.checkpoints.model_files import (
    INDEX_NAME,
    SINGLE_NAME,
    TEXT_FILES,
    TOKENIZER_PATTERNS,
    ModelSource,
    Progress,
    folder_of,
    index_files,
    is_local,
    locate,
    weight_files,
)
from pillion.engine.checkpoints.work_report import WorkReport
from pillion.engine.models.config_json import MAX_LAYERS, read_json, vocabulary_ids
from pillion.engine.models.config_parser import QUANTIZATION_FILES, load_config, read_config, unused_keys, without_keys
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rope_config import original_tokens
from pillion.engine.quantized.gguf_files import convert_gguf, quantized_types
from pillion.engine.quantized.quantization import GROUPED_ROWS, QUANTIZATION_KEYS
from pillion.errors import ConfigError

log = logging.getLogger(__name__)

# Max --max-model-len if the flag is not given.
MAX_DEFAULT_MODEL_LEN_TOKENS = 8192
# File with the EOS id of --tokenizer, in the folder that links to the tokenizer.
_EOS_FILE = "tokenizer_end.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model that is converted and fingerprinted, so that every component can load it.

    Attributes:
        folder: folder with config.json, tokenizer.json, tokenizer_config.json, *.safetensors and, if the model has one,
            chat_template.jinja; files may be links.
        name: the model's name for clients.
        aliases: further names for clients: those of --served-model-name after the first; without that flag, the value
            of --model if it differs from the name.
        fingerprint: SHA-256 over weights, config and conversion, in hexadecimal (I2).
        dtype: "bfloat16" or "float32", of arithmetic and KV.
        max_model_len: max tokens of prompt plus answer.
        original_tokens: max length with the rotary frequencies of training; 0 if all texts have them.
        weights: storage of the weights, e.g. "awq, 4 bits in groups of 128"; ``dtype`` for plain weights.
        sampling: recommended sampling values that generation_config.json lacks, by its keys.
    """

    folder: Path
    name: str
    fingerprint: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    aliases: tuple[str, ...] = ()
    original_tokens: int = 0
    weights: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)


def prepare(flags: ModelFlags, progress: Progress = lambda line: None) -> PreparedModel:
    """Find, convert and fingerprint ``flags.model``; ``progress`` is called with a line for each longer stage. Raises
    ConfigError, in one line, for a missing model, an unknown architecture or damaged files."""
    weights = WeightKind.of(flags)
    source = _source(flags, progress)
    record = _record_of_dummy(source, weights) if flags.load_format == "dummy" else _recorded(source, weights, progress)
    eos_ids = set(record.eos_token_ids)
    name, *aliases = flags.served_model_name or dict.fromkeys((source.name, flags.model))
    folder = Path(record.folder)
    config = load_config(folder)
    if ignored := unused_keys(read_json(folder / "config.json")):
        progress(f"ignored keys of config.json: {', '.join(ignored)}")
    if flags.tokenizer:
        origin = folder_of(flags.tokenizer, "main", TOKENIZER_PATTERNS, "--tokenizer")
        folder = _with_tokenizer(folder, origin, record.vocab_size, progress)
        eos_ids.update(vocabulary_ids(read_json(folder / _EOS_FILE), "id", record.vocab_size, str(folder / _EOS_FILE)))
    original = original_tokens(config.ropes)
    return PreparedModel(
        folder=folder,
        name=name,
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias != name),
        fingerprint=record.fingerprint,
        dtype=weights.dtype,
        max_model_len=_model_len(flags.max_model_len, record.max_position_embeddings, original),
        vocab_size=record.vocab_size,
        eos_token_ids=tuple(sorted(eos_ids)),
        bos_token_id=record.bos_token_id,
        original_tokens=original,
        weights=config.quantization.words if config.quantization else weights.dtype,
        sampling=source.sampling,
    )


def is_prepared(flags: ModelFlags) -> bool:
    """Return whether :func:`prepare` would only read a record; False for hub ids, since the hub is asked for newer
    files, and with --tokenizer. Raises ConfigError for a model that does not exist, and for unsupported flags."""
    if not is_local(flags.model) or flags.tokenizer:
        return False
    source = _source(flags, lambda line: None)
    return flags.load_format == "dummy" or ModelCache().read_record(source.path, str(WeightKind.of(flags))) is not None


def _source(flags: ModelFlags, progress: Progress) -> ModelSource:
    """Return the model's files. With --ignore-config-key, return a folder with links to them, and with config.json
    without these keys."""
    source, ignored = locate(flags.model, flags.revision, progress, flags.ignore_config_key), flags.ignore_config_key
    if not ignored:
        return source
    if source.is_gguf:
        raise ConfigError(f"--ignore-config-key {ignored[0]}: {source.name} is a GGUF file, which has no config.json")
    digest = hashlib.sha256(json.dumps([str(source.path), _stamps(source.path), ignored]).encode()).hexdigest()[:32]

    def fill(into: Path) -> None:
        config = without_keys(read_json(source.path / "config.json"), ignored)
        (into / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
        link_with_tokenizer(source.path, into, progress)

    return replace(source, path=ModelCache().folder(f"{digest}-without-keys", fill, progress))


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Kind of weights to make from a checkpoint: type and quantization. Each field is the value of the flag with its
    name."""

    dtype: str
    quantization: str
    quantization_group_size: str
    activation_quantization: str = "auto"

    @classmethod
    def of(cls, flags: ModelFlags) -> WeightKind:
        """Return the kind of weights of ``flags``, with "auto" of --dtype resolved. Raises ConfigError for an
        unsupported type."""
        return cls(
            choose_dtype(flags.dtype)[0],
            flags.quantization,
            flags.quantization_group_size,
            flags.activation_quantization,
        )

    @property
    def quantizes_inputs(self) -> bool:
        """True with --activation-quantization. Raises ConfigError if --quantization quantizes inputs, too."""
        if self.activation_quantization != "auto" and self.quantization == "int8-dynamic":
            raise ConfigError(
                f"--activation-quantization {self.activation_quantization} and --quantization int8-dynamic both round"
                " inputs; choose int8 weights with the first, which has a scale for each group and is nearer, or the"
                " second alone"
            )
        return self.activation_quantization != "auto"

    @property
    def group(self) -> int:
        """Weights per scale; 0 for one scale per output. Raises ConfigError for incompatible flags."""
        if self.quantization == "int8-dynamic" and self.quantization_group_size != "auto":
            raise ConfigError(
                f"--quantization-group-size {self.quantization_group_size} is for int4 and int8; int8-dynamic"
                " has a scale for each output, because its products add up whole numbers"
            )
        chosen = {"int4": 32, "int8": 0, "int8-dynamic": 0}[self.quantization]
        return chosen if self.quantization_group_size == "auto" else int(self.quantization_group_size)

    def __str__(self) -> str:
        return self.weights + f"-inputs-{self.activation_quantization}" * self.quantizes_inputs

    @property
    def weights(self) -> str:
        """Part of the key that decides the weights, without the quantization of inputs."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}-{self.quantization}-{self.group}"


def _recorded(source: ModelSource, weights: WeightKind, progress: Progress) -> ModelRecord:
    """Return a model's record; if it is missing, make it under its lock."""
    cache = ModelCache()
    record = cache.read_record(source.path, str(weights))
    if record is None:
        with cache.lock(cache.record_path(source.path, str(weights)), progress):
            record = cache.read_record(source.path, str(weights))
            if record is None:
                record = _make_record(cache, source, weights, progress)
                cache.write_record(source.path, str(weights), record)
    return record


def choose_dtype(dtype: str) -> tuple[str, str]:
    """Return the type for a value of --dtype, and the reason in a few words. "auto" is bfloat16 with an NVIDIA GPU or a
    CPU that computes in bfloat16, else float32. float16 becomes float32, which represents its values exactly, because
    nothing computes in float16. Raises ConfigError for an unsupported type.
    """
    if dtype != "auto":
        if dtype not in DTYPE_CHOICES:
            raise ConfigError(f"dtype {dtype!r} is not supported; known are {', '.join(DTYPE_CHOICES)}")
        if dtype in ("float16", "half"):
            return "float32", f"which represents every float16 value exactly, for --dtype {dtype}"
        return "bfloat16" if dtype == "bfloat16" else "float32", f"for --dtype {dtype}"
    if Path("/proc/driver/nvidia/version").exists():
        return "bfloat16", "since there is an NVIDIA GPU"
    try:
        cpu_flags = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    except OSError:
        return "float32", "which every processor supports"
    if cpu_flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return "bfloat16", "which this processor supports"
    return "float32", "since this processor does not support bfloat16"


def _model_len(requested: int, longest: int, original: int) -> int:
    """Return the max length to serve. ``original``, PreparedModel's ``original_tokens``, limits the default, so that
    requests without ``max_tokens`` get the rotary frequencies of training."""
    if requested < 0 or requested > longest:
        raise ConfigError(f"--max-model-len {requested} is not between 1 and the model's {longest} tokens")
    return requested or min(longest, MAX_DEFAULT_MODEL_LEN_TOKENS, original or longest)


def _make_record(cache: ModelCache, source: ModelSource, kind: WeightKind, progress: Progress) -> ModelRecord:
    """Convert and fingerprint a model, and try its tokenizer."""
    sources = []
    if source.is_gguf:
        sources = [*gguf_parts(source.path)]
        if kind.quantization != "none":
            _check_unquantized(source, kind, quantized_types(sources))
        reading = WorkReport(progress, f"reading {source.path.name}", _bytes_of(sources))
        digests = [digest_file(path, reading.add) for path in sources]
        digest = (digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest())[:32]
        folder = cache.folder(
            f"{digest}-{kind.dtype}-{CONVERSION_VERSION}.{TEXTS_VERSION}",
            lambda into: convert_gguf(gguf_parts(source.path), into, kind.dtype, progress),
            progress,
        )
    else:
        folder = _with_tokenizer_json(cache, source.path, progress)
    if kind.quantization != "none":
        sources += _small_files(folder) + list(weight_files(folder))
        folder = _quantized(cache, source, folder, kind, progress)
    if kind.quantizes_inputs:
        sources += _small_files(folder)
        folder = _with_quantized_inputs(cache, source, folder, kind, progress)
    config = load_config(folder)
    weights = weight_files(folder)
    tokenizer_eos = try_tokenizer(folder).end_id
    fingerprinting = WorkReport(progress, "fingerprinting weights", _bytes_of(weights))
    files = stamp([*sources, *_small_files(folder), *weights])
    record = _record_of(folder, config, fingerprint(weights, config, kind.dtype, fingerprinting.add), files)
    eos_ids = set() if tokenizer_eos is None or tokenizer_eos >= config.vocab_size else {tokenizer_eos}
    return replace(record, eos_token_ids=tuple(sorted({*record.eos_token_ids, *eos_ids})))


def _bytes_of(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _small_files(folder: Path) -> list[Path]:
    """Return the files, other than weights, that a record depends on, including missing ones, which may be created."""
    return [
        *(folder / name for name in ("config.json", *TEXT_FILES, SINGLE_NAME, INDEX_NAME, *QUANTIZATION_FILES)),
        *index_files(folder),
    ]


def _quantized(cache: ModelCache, source: ModelSource, folder: Path, kind: WeightKind, progress: Progress) -> Path:
    """Return the folder with quantized weights of a plain model; if it is missing, make it."""
    config = load_config(folder)
    if config.quantization is not None:
        _check_unquantized(source, kind, config.quantization.words)
    # The folder also has copies of these files, e.g. of a chat template, which may differ for equal weights.
    texts = (folder / name for name in TEXT_FILES)
    files = (*weight_files(folder), *(path for path in texts if path.is_file()))
    fingerprinting = WorkReport(progress, "fingerprinting weights", _bytes_of(files))
    digest = fingerprint(files, config, f"{kind.weights} {TEXTS_VERSION}", fingerprinting.add)[:32]

    def fill(into: Path) -> None:
        from pillion.engine.quantized.quantizer import quantize_folder

        quantize_folder(folder, into, kind.quantization, kind.group, progress)

    return cache.folder(digest, fill, progress)


def _with_quantized_inputs(
    cache: ModelCache, source: ModelSource, folder: Path, kind: WeightKind, progress: Progress
) -> Path:
    """Return a folder with links to a quantized model's files, and with a config that enables quantized inputs."""
    raw = read_config(folder)
    if load_config(folder).quantization is None:
        raise ConfigError(
            f"--activation-quantization {kind.activation_quantization} is for quantized weights, and those of"
            f" {source.name} are plain; add --quantization int8 or int4"
        )
    key = next(key for key in QUANTIZATION_KEYS if raw.get(key))
    digest = hashlib.sha256(json.dumps([str(folder), _stamps(folder), GROUPED_ROWS]).encode()).hexdigest()[:32]

    def fill(into: Path) -> None:
        config = {**raw, key: {**raw[key], "row_codes": GROUPED_ROWS}}
        (into / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
        link_with_tokenizer(folder, into, progress)

    return cache.folder(f"{digest}-inputs", fill, progress)


def _check_unquantized(source: ModelSource, kind: WeightKind, quantization: str) -> None:
    """Raise ConfigError if ``quantization``, that of a model to quantize, is not "" for plain weights."""
    if quantization:
        raise ConfigError(
            f"--quantization {kind.quantization} is for plain weights, and {source.name} is quantized already"
            f" ({quantization}); leave the flag out"
        )


def _record_of_dummy(source: ModelSource, kind: WeightKind) -> ModelRecord:
    """Return the record of a folder without weights, for measurements with random weights. It is not written to
    disk."""
    if source.is_gguf:
        raise ConfigError("--load-format dummy needs a folder with config.json and tokenizer.json")
    if kind.quantization != "none":
        raise ConfigError(f"--quantization {kind.quantization} needs weights, which --load-format dummy does not read")
    if kind.quantizes_inputs:
        raise ConfigError("--activation-quantization needs quantized weights, which --load-format dummy does not read")
    config = load_config(source.path)
    return _record_of(source.path, config, fingerprint((), config, f"{kind.dtype} dummy"), ())


def _record_of(
    folder: Path, config: ModelConfig, fingerprint: str, files: tuple[tuple[str, int, int], ...]
) -> ModelRecord:
    return ModelRecord(
        folder=str(folder),
        fingerprint=fingerprint,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(folder, config),
        bos_token_id=config.bos_token_id,
        files=files,
    )


def _with_tokenizer_json(cache: ModelCache, folder: Path, progress: Progress) -> Path:
    """Return ``folder`` if it has a tokenizer.json, else a folder with links to its files and a converted tokenizer."""
    check_counts(load_config(folder), weight_files(folder))
    indexes = [path.name for path in index_files(folder)]
    if indexes and (folder / SINGLE_NAME).is_file():
        log.warning("%s: using %s like transformers, and not the files of %s", folder, SINGLE_NAME, indexes[0])
    if (folder / "tokenizer.json").is_file():
        return folder
    digest = hashlib.sha256(json.dumps([str(folder), _stamps(folder)]).encode()).hexdigest()[:32]
    return cache.folder(f"{digest}-links", lambda into: link_with_tokenizer(folder, into, progress), progress)


def _with_tokenizer(folder: Path, tokenizer: Path, vocab_size: int, progress: Progress) -> Path:
    """Return a folder with links to the model's files, and to the tokenizer and chat template in ``tokenizer``."""
    sources = [str(folder), _stamps(folder), str(tokenizer), _stamps(tokenizer)]
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:32]

    def fill(into: Path) -> None:
        link_with_tokenizer(folder, into, progress, tokenizer)
        facts = try_tokenizer(into)
        check_vocabulary(facts, vocab_size)
        (into / _EOS_FILE).write_text(json.dumps({"id": facts.end_id}), "utf-8")

    return ModelCache().folder(f"{digest}-tokenizer", fill, progress)


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    return stamp(path for path in sorted(folder.iterdir()) if path.is_file())


def _eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the EOS ids of config.json, and of generation_config.json, where chat models list their end-of-turn
    token."""
    ids = set(config.eos_token_ids)
    path = folder / "generation_config.json"
    if path.is_file():
        ids.update(vocabulary_ids(read_json(path), "eos_token_id", config.vocab_size, str(path)))
    return tuple(sorted(ids))


def check_counts(config: ModelConfig, weights: Sequence[Path]) -> None:
    """Raise ConfigError if a config has more layers and experts than the files can store at one bit per weight: objects
    per layer and expert would otherwise fill the memory before a missing tensor is noticed."""
    sparse = config.moe.layers.count(True) if config.moe is not None else 0
    matrices = config.num_layers + (sparse * config.moe.num_experts if config.moe is not None else 0)
    stored = sum(path.stat().st_size for path in weights)
    if matrices > MAX_LAYERS and matrices * config.hidden_size // 8 > stored:
        experts = f" of {config.moe.num_experts} experts" if config.moe is not None and sparse else ""
        raise ConfigError(
            f"config.json has {config.num_layers} layers{experts}, but the weights have only {stored:,} bytes"
        )
