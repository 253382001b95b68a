"""How a checkpoint computes vectors, from the files that sentence-transformers writes beside the weights.

    modules.json                       the modules: Transformer, Pooling, perhaps Normalize
    1_Pooling/config.json              the rows to pool: the last token's, the first one's, or all
    config_sentence_transformers.json  prompts by name, and the name of the default one
    sentence_bert_config.json          whether texts become messages for the chat template; in old versions, max length
    tokenizer_config.json              max length of a text, since version 6
    config.json                        width of a vector

Without modules.json the vector is that of the last token, for an encoder the mean of all rows, normalized. Unsupported
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
_MODE = "pooling_mode_"
_MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
# Names of older files with the same content; the first one found is used.
_TEXT_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Lengths above this mean no limit: tokenizers without one have 10^30.
_NO_LENGTH_TOKENS = 10**9
_REFUSED = ("do_lower_case", "query_expansion", "processing_kwargs")


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How vectors are computed from texts.

    Attributes:
        pooling: the rows whose mean is the vector.
        normalized: whether vectors have length 1.
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
    """Read the files of a model's folder. Raises ConfigError for damaged files, and for unsupported settings, by
    name."""
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
    most, as_messages = _texts(folder / modules[0][1])
    path = folder / modules[1][1] / "config.json"
    pooling, with_prompt = _pooling(path)
    if pooling is Pooling.LAST and is_encoder(config):
        raise ConfigError(f"{path}: pooling by {pooling} is not supported for encoders")
    prompts, default = prompts_of(folder, read_json(folder / "config_sentence_transformers.json", {}))
    if prompts and not with_prompt and pooling is not Pooling.LAST:
        raise ConfigError(f"{path}: pooling by {pooling} without the rows of prompts is not supported")
    return VectorForm("Normalize" in kinds, prompts, default, most, width, pooling, as_messages)


def prompts_of(folder: Path, own: Mapping[str, Any]) -> tuple[Mapping[str, str], str]:
    """Return the prompts by name, and the default one's name or "".

    ``own`` is config_sentence_transformers.json. Raises ConfigError for damaged prompts.
    """
    prompts, default = own.get("prompts") or {}, own.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: prompts is not an object of texts")
    if default and default not in prompts:
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: there is no prompt {default!r}")
    return prompts, default


def modules_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and folder of each module. The kind is the last part of its type, a Python class name."""
    path = folder / "modules.json"
    listed = read_json(path, [])
    if not isinstance(listed, list):
        raise ConfigError(f"{path} is not a list of modules")
    for module in listed:
        kind, place = (str(module.get(key, "")) for key in ("type", "path")) if isinstance(module, dict) else ("", "")
        if not kind or Path(place).is_absolute() or ".." in Path(place).parts:
            raise ConfigError(f"{path} has a module without a type, or one outside of the folder")
        yield kind.rpartition(".")[2], place


def _texts(folder: Path) -> tuple[int | None, bool]:
    """Return the max tokens of a text, None without a limit, and whether texts become messages.

    ``folder`` is that of the module Transformer.
    """
    path = next((path for name in _TEXT_FILES if (path := folder / name).is_file()), folder / _TEXT_FILES[0])
    found = read_json(path, {})
    for key in _REFUSED:
        if found.get(key):
            raise ConfigError(f"{path}: {key} is not supported")
    # Without this key, which newer files have, texts are not messages, even with a chat template.
    kinds = found.get("modality_config") or {"text": {}}
    if not isinstance(kinds, dict) or not {"text", "message"} & kinds.keys():
        raise ConfigError(f"{path}: modality_config names no text")
    return _count(path, found, "max_seq_length") or tokenizer_bound(folder), "message" in kinds


def tokenizer_bound(folder: Path) -> int | None:
    """Return the max tokens of a text or pair in tokenizer_config.json, None without a limit. Raises ConfigError for a
    damaged limit."""
    path = folder / "tokenizer_config.json"
    found = read_json(path, {})
    most = found.get("model_max_length")
    if isinstance(most, int | float) and most > _NO_LENGTH_TOKENS:
        return None
    return _count(path, found, "model_max_length")


def _count(path: Path, found: Mapping[str, Any], key: str) -> int | None:
    most = found.get(key)
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{path}: {key} {most!r} is not a number of tokens")
    return most


def _width(config: Mapping[str, Any]) -> int | None:
    inner = config.get("text_config")
    width = (inner if isinstance(inner, dict) else config).get("hidden_size")
    return width if type(width) is int else None


def _pooling(path: Path) -> tuple[Pooling, bool]:
    """Return the rows to pool, and whether a prompt's rows are included. Raises ConfigError for an unsupported mode."""
    if not path.is_file():
        raise ConfigError(f"{path}, named by modules.json, is missing; --tokenizer can name another folder")
    found = read_json(path, {})
    modes = [name for key, name in _MODES.items() if found.get(_MODE + key)]
    named = found.get("pooling_mode")
    modes += [named] if isinstance(named, str) else list(named or ())
    if len(modes) != 1 or modes[0] not in list(Pooling):
        found_modes, known = ", ".join(map(str, modes)) or "nothing", ", ".join(Pooling)
        raise ConfigError(f"{path}: pooling by {found_modes}; only one of {known} is supported")
    return Pooling(modes[0]), bool(found.get("include_prompt", True))


def read_json(path: Path, absent: Any) -> Any:
    """Read a JSON file of the same type as ``absent``, which is returned if it is missing. Raises ConfigError for a
    damaged file."""
    if not path.is_file():
        return absent
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, type(absent)):
        raise ConfigError(f"{path} is not a JSON {'object' if isinstance(absent, dict) else 'list'}")
    return found
