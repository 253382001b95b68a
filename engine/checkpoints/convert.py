"""Makes model folders out of links and a tokenizer, which transformers converts where it is no tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pillion.engine.checkpoints.model_files import (
    SINGLE_NAME,
    TEXT_FILES,
    TOKENIZER_FILES,
    Progress,
    first_line,
    weight_files,
)
from pillion.engine.checkpoints.tiktoken_files import has_vocabulary, write_tokenizer
from pillion.engine.models.config_parser import QUANTIZATION_FILES
from pillion.errors import ConfigError

# In these files other tools keep tokenizers; transformers converts most of them.
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")


def link_with_tokenizer(source: Path, folder: Path, progress: Progress, tokenizer: Path | None = None) -> None:
    """Fills ``folder`` with links to the files of the model in ``source`` and with a tokenizer.json.

    Args:
        tokenizer: the folder that the tokenizer and the chat template come from; by default it is ``source``.

    Raises:
        ConfigError: the folder of the tokenizer has none that transformers can write as tokenizer.json.
    """
    origin = tokenizer or source
    if (origin / "tokenizer.json").is_file():
        _link(origin, folder, TOKENIZER_FILES)
    else:
        _convert(origin, folder, progress)
    others = ["config.json", *TEXT_FILES, *QUANTIZATION_FILES, SINGLE_NAME + ".index.json"]
    if tokenizer is not None:
        others = [name for name in others if name not in TOKENIZER_FILES]
    _link(source, folder, (*(path.name for path in weight_files(source)), *others))


def check_vocabulary(folder: Path, vocab_size: int) -> None:
    """Raises ConfigError where the tokenizer of a folder cannot be read, or has an id that the model does not have."""
    import tokenizers

    try:
        ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values()
    except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
        raise ConfigError(f"--tokenizer: its tokenizer.json cannot be read: {first_line(error)}") from None
    if max(ids, default=0) >= vocab_size:
        raise ConfigError(f"--tokenizer has the token id {max(ids)}, and the model has {vocab_size} tokens")


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    progress("converting the tokenizer")
    if has_vocabulary(source):
        write_tokenizer(source, folder)
        _link(source, folder, TOKENIZER_FILES)
        return
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001  (transformers raises many kinds of errors over foreign files)
        if not any((source / name).is_file() for name in OTHER_TOKENIZERS):
            names = f"tokenizer.json, {', '.join(OTHER_TOKENIZERS)}"
            raise ConfigError(f"{source} has no tokenizer: put its files there, one of {names}") from None
        raise ConfigError(f"{source} has no tokenizer that can be read: {first_line(error)}") from None
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{source} has no tokenizer that can be written as tokenizer.json")


def _link(source: Path, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        path, link = source / name, folder / name
        if path.is_file() and not link.exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
