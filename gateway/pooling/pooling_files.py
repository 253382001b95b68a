"""How a checkpoint computes vectors, from the files that sentence-transformers writes next to the weights.

    modules.json                       the modules: Transformer, Pooling, perhaps Normalize
    1_Pooling/config.json              the rows to pool: the last token's, the first one's, or all
    config_sentence_transformers.json  prompts by name, and the name of the default one
    sentence_bert_config.json          whether texts become chat messages; before version 6, max length of a text
    tokenizer_config.json              max length of a text, since version 6
    config.json                        width of a vector

Without modules.json the vector is the last token's row, for an encoder the mean of all rows, normalized. Unsupported
settings are refused by name, because the vectors would not be those that the model was trained for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pillion.engine.models.config_parser import is_encoder, labels_of
from pillion.errors import ConfigError
from pillion.gateway.pooling.pooling_rows import Pooling

Vector = npt.NDArray[np.float32]
MAX_FILE_BYTES = 2**20
# Suffix of an older "pooling_mode_..." key -> newer name of the mode.
_MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
# Current and older names of one file; the first one that exists is read.
_TEXT_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How vectors are computed from texts.

    Attributes:
        pooling: rows whose mean is the vector.
        normalized: whether vectors are scaled to length 1.
        prompts: texts to prepend to a text, by name.
        default_prompt: name of the prompt for calls that name none; "" for none.
        max_tokens: max tokens of a text; None for the model's limit.
        width: values per vector; None if config.json does not specify it.
        as_messages: whether a text becomes a user message for the chat template, and a prompt the system message before
            it.
    """

    normalized: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int | None = None
    width: int | None = None
    pooling: Pooling = Pooling.LAST
    as_messages: bool = False


def read_vector_form(folder: Path) -> VectorForm:
    """Read the vector form from the files in a model's folder. Raises ConfigError for damaged files and unsupported
    settings, by name."""
    config = read_json(folder / "config.json", {})
    width = _width(config)
    if labels_of(config):
        raise ConfigError(f"{folder / 'config.json'}: a {config['architectures'][0]} is a classifier")
    if not (folder / "modules.json").is_file():
        return VectorForm(width=width, pooling=Pooling.MEAN if is_encoder(config) else Pooling.LAST)
    modules = list(modules_of(folder))
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{folder / 'modules.json'}: the modules {', '.join(kinds)}; only Transformer, Pooling and Normalize, in"
            " this order, are supported"
        )
    max_tokens, as_messages = _text_settings(folder / modules[0][1])
    path = folder / modules[1][1] / "config.json"
    pooling, with_prompt = _pooling(path)
    if pooling is Pooling.LAST and is_encoder(config):
        raise ConfigError(f"{path}: pooling by {pooling} is not supported for encoders")
    prompts, default = prompts_of(folder, read_json(folder / "config_sentence_transformers.json", {}))
    if prompts and not with_prompt and pooling is not Pooling.LAST:
        raise ConfigError(f"{path}: pooling by {pooling} without the rows of prompts is not supported")
    return VectorForm("Normalize" in kinds, prompts, default, max_tokens, width, pooling, as_messages)


def prompts_of(folder: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, str], str]:
    """Return the prompts by name, and the default one's name or "".

    ``config``: the content of config_sentence_transformers.json. Raises ConfigError for invalid prompts.
    """
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: prompts is not an object of texts")
    if default and default not in prompts:
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: there is no prompt {default!r}")
    return prompts, default


def modules_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (kind, folder) of each module in modules.json. The kind is the name of its Python class."""
    path = folder / "modules.json"
    listed = read_json(path, [])
    if not isinstance(listed, list):
        raise ConfigError(f"{path} is not a list of modules")
    for module in listed:
        kind, path_in = (str(module.get(key, "")) for key in ("type", "path")) if isinstance(module, dict) else ("", "")
        if not kind or Path(path_in).is_absolute() or ".." in Path(path_in).parts:
            raise ConfigError(f"{path} has a module without a type, or one outside of the folder")
        yield kind.rpartition(".")[2], path_in


def _text_settings(folder: Path) -> tuple[int | None, bool]:
    """Return the max tokens of a text, None without a limit, and whether texts become messages.

    ``folder`` is that of the module Transformer.
    """
    path = next((path for name in _TEXT_FILES if (path := folder / name).is_file()), folder / _TEXT_FILES[0])
    config = read_json(path, {})
    for key in ("do_lower_case", "query_expansion", "processing_kwargs"):
        if config.get(key):
            raise ConfigError(f"{path}: {key} is not supported")
    # Older files do not have this key; then texts are not messages, even with a chat template.
    kinds = config.get("modality_config") or {"text": {}}
    if not isinstance(kinds, dict) or not {"text", "message"} & kinds.keys():
        raise ConfigError(f"{path}: modality_config names no text")
    return _token_count(path, config, "max_seq_length") or tokenizer_bound(folder), "message" in kinds


def tokenizer_bound(folder: Path) -> int | None:
    """Return the max tokens of a text or pair by tokenizer_config.json, None without a limit. Raises ConfigError for an
    invalid limit."""
    path = folder / "tokenizer_config.json"
    config = read_json(path, {})
    limit = config.get("model_max_length")
    # Tokenizers without a limit have 10^30.
    if isinstance(limit, int | float) and limit > 10**9:
        return None
    return _token_count(path, config, "model_max_length")


def _token_count(path: Path, config: Mapping[str, Any], key: str) -> int | None:
    count = config.get(key)
    if count is not None and (type(count) is not int or count < 1):
        raise ConfigError(f"{path}: {key} {count!r} is not a number of tokens")
    return count


def _width(config: Mapping[str, Any]) -> int | None:
    inner = config.get("text_config")
    width = (inner if isinstance(inner, dict) else config).get("hidden_size")
    return width if type(width) is int else None


def _pooling(path: Path) -> tuple[Pooling, bool]:
    """Return the rows to pool, and whether they include prompts' rows. Raises ConfigError for an unsupported mode."""
    if not path.is_file():
        raise ConfigError(f"{path}, named by modules.json, is missing; --tokenizer can name another folder")
    config = read_json(path, {})
    modes = [name for key, name in _MODES.items() if config.get(f"pooling_mode_{key}")]
    named = config.get("pooling_mode")
    modes += [named] if isinstance(named, str) else list(named or ())
    if len(modes) != 1 or modes[0] not in list(Pooling):
        listed, known = ", ".join(map(str, modes)) or "nothing", ", ".join(Pooling)
        raise ConfigError(f"{path}: pooling by {listed}; only one of {known} is supported")
    return Pooling(modes[0]), bool(config.get("include_prompt", True))


def read_json(path: Path, default: Any) -> Any:
    """Return the content of a JSON file, or ``default`` if it is missing. Raises ConfigError for a damaged file, or if
    its content has another type than ``default``."""
    if not path.is_file():
        return default
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        content = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, type(default)):
        raise ConfigError(f"{path} is not a JSON {'object' if isinstance(default, dict) else 'list'}")
    return content
