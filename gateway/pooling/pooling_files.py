"""Reads how a checkpoint wants its vectors made, from the files that sentence-transformers writes beside the weights.

    modules.json                       the modules that a text passes: Transformer, Pooling, perhaps Normalize
    1_Pooling/config.json              which rows become one vector: the last token's, the first one's, or all
    config_sentence_transformers.json  prompts by name, and which of them is the default
    sentence_bert_config.json          whether a text is a message for the chat template; of old, the longest text
    tokenizer_config.json              the longest text, which is kept here since the sixth version
    config.json                        how many values a vector has

A checkpoint without modules.json has the vector of its last token, an encoder the mean of its rows, normalized. What is
not supported is refused by its name, because the vectors would be others than the model was trained for.
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
# A file that describes pooling is no larger than this.
MAX_FILE_BYTES = 2**20
_MODE = "pooling_mode_"
# The keys of a pooling that say which rows count, by the names of modes in newer files.
_MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
# Older files of the same content have these names; the first one that is there counts.
_TEXT_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Tokenizers whose length nobody has set have 10^30 for it.
_NO_LENGTH_TOKENS = 10**9
# Keys of sentence_bert_config.json that change texts in ways that are not supported.
_REFUSED = ("do_lower_case", "query_expansion", "processing_kwargs")


@dataclass(frozen=True, slots=True)
class VectorForm:
    """Says of which rows a vector is made, what is made of it, and what stands before texts.

    Attributes:
        pooling: the rows whose mean is the vector.
        normalized: whether vectors have the length 1.
        prompts: texts that may stand before a text, by name.
        default_prompt: the name of the one that does where a call names none; "" for none.
        max_tokens: the most tokens of a text; None: as many as the model takes.
        width: how many values a vector has; None where config.json does not say it.
        as_messages: whether a text is a user's message, which the chat template makes the model's text of; a prompt
            then is the system's message before it.
    """

    normalized: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int | None = None
    width: int | None = None
    pooling: Pooling = Pooling.LAST
    as_messages: bool = False


def read_vector_form(folder: Path) -> VectorForm:
    """Reads the files of a model's folder. Raises ConfigError for files that are damaged, and, by its name, for what is
    not supported."""
    config = read_json(folder / "config.json", {})
    width = _width(config)
    if labels_of(config):
        raise ConfigError(f"{folder / 'config.json'}: a {config['architectures'][0]} tells labels apart")
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
    """Returns the prompts by name that config_sentence_transformers.json, read as ``own``, has, and the name of the
    default one, "" for none. Raises ConfigError for prompts that are damaged."""
    prompts, default = own.get("prompts") or {}, own.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: prompts are no texts by name")
    if default and default not in prompts:
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: there is no prompt {default!r}")
    return prompts, default


def modules_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the kind and the folder of each module. Its type is the name of a class of Python, of which only the last
    part is read."""
    path = folder / "modules.json"
    listed = read_json(path, [])
    if not isinstance(listed, list):
        raise ConfigError(f"{path} is no list of modules")
    for module in listed:
        kind, place = (str(module.get(key, "")) for key in ("type", "path")) if isinstance(module, dict) else ("", "")
        if not kind or Path(place).is_absolute() or ".." in Path(place).parts:
            raise ConfigError(f"{path} has a module without a type, or one outside of the folder")
        yield kind.rpartition(".")[2], place


def _texts(folder: Path) -> tuple[int | None, bool]:
    """Returns the most tokens of a text, None where no file names a bound, and whether texts are messages. ``folder``
    is that of the module Transformer."""
    path = next((path for name in _TEXT_FILES if (path := folder / name).is_file()), folder / _TEXT_FILES[0])
    found = read_json(path, {})
    for key in _REFUSED:
        if found.get(key):
            raise ConfigError(f"{path}: {key} is not supported")
    # Without this key, which newer files have, texts are no messages, whatever the tokenizer has.
    kinds = found.get("modality_config") or {"text": {}}
    if not isinstance(kinds, dict) or not {"text", "message"} & kinds.keys():
        raise ConfigError(f"{path}: modality_config names no text")
    return _count(path, found, "max_seq_length") or tokenizer_bound(folder), "message" in kinds


def tokenizer_bound(folder: Path) -> int | None:
    """Returns the most tokens of a text by tokenizer_config.json, which sentence-transformers cuts texts and pairs of
    texts to; None where the file names no bound. Raises ConfigError for a bound that is no number of tokens."""
    path = folder / "tokenizer_config.json"
    found = read_json(path, {})
    most = found.get("model_max_length")
    if isinstance(most, int | float) and most > _NO_LENGTH_TOKENS:
        return None
    return _count(path, found, "model_max_length")


def _count(path: Path, found: Mapping[str, Any], key: str) -> int | None:
    most = found.get(key)
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{path}: {key} {most!r} is no number of tokens")
    return most


def _width(config: Mapping[str, Any]) -> int | None:
    inner = config.get("text_config")
    width = (inner if isinstance(inner, dict) else config).get("hidden_size")
    return width if type(width) is int else None


def _pooling(path: Path) -> tuple[Pooling, bool]:
    """Returns the rows that a pooling takes, and whether those of a prompt before the text are among them. Raises
    ConfigError for rows that are not supported."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing, and modules.json names it; --tokenizer gives a folder without it")
    found = read_json(path, {})
    modes = [name for key, name in _MODES.items() if found.get(_MODE + key)]
    named = found.get("pooling_mode")
    modes += [named] if isinstance(named, str) else list(named or ())
    if len(modes) != 1 or modes[0] not in list(Pooling):
        found_modes, known = ", ".join(map(str, modes)) or "nothing", ", ".join(Pooling)
        raise ConfigError(f"{path}: pooling by {found_modes}; only one of {known} is supported")
    return Pooling(modes[0]), bool(found.get("include_prompt", True))


def read_json(path: Path, absent: Any) -> Any:
    """Reads a file in JSON of the same kind as ``absent``, which is returned where it is missing. Raises ConfigError
    for a file that is damaged."""
    if not path.is_file():
        return absent
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, type(absent)):
        raise ConfigError(f"{path} holds no JSON {'object' if isinstance(absent, dict) else 'list'}")
    return found
