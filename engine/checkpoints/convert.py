"""Model folders that consist of links to another folder's files and a converted tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pillion.engine.checkpoints.model_files import (
    TEXT_FILES,
    TOKENIZER_FILES,
    Progress,
    first_line,
    index_files,
    weight_files,
)
from pillion.engine.checkpoints.tiktoken_files import has_vocabulary, write_tokenizer
from pillion.engine.models.config_json import read_json
from pillion.engine.models.config_parser import QUANTIZATION_FILES
from pillion.errors import ConfigError

# Limits of a tokenizer's trial; the largest published tokenizers take 2 s and 1 GiB.
TRIAL_CPU_S = 60
TRIAL_WALL_S = 300.0
TRIAL_MEMORY_BYTES = 4 * 2**30
_OVER_LIMITS = f"it took more than {TRIAL_CPU_S} s of computing or {TRIAL_MEMORY_BYTES // 2**30} GiB of memory"

# Tokenizer files that transformers can convert.
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")


def link_with_tokenizer(source: Path, folder: Path, progress: Progress, tokenizer: Path | None = None) -> None:
    """Fill ``folder`` with links to the files of the model in ``source``, and with a tokenizer.json, converted if
    necessary. ``tokenizer``: folder of the tokenizer and chat template, by default ``source``. Raises ConfigError if
    transformers cannot convert the tokenizer."""
    origin = tokenizer or source
    if (origin / "tokenizer.json").is_file():
        _link(origin, folder, TOKENIZER_FILES)
    else:
        _convert(origin, folder, progress)
    names = ["config.json", *TEXT_FILES, *QUANTIZATION_FILES]
    if tokenizer is not None:
        names = [name for name in names if name not in TOKENIZER_FILES]
    _link(source, folder, (*names, *(path.name for path in (*weight_files(source), *index_files(source)))))


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Result of a tokenizer's trial: id of the eos_token of tokenizer_config.json, None if there is none, and the
    largest id, -1 for a tokenizer without tokens."""

    end_id: int | None
    largest_id: int


def try_tokenizer(folder: Path) -> TokenizerFacts:
    """Load and use a folder's tokenizer.json in a process with limited memory and time. Raises ConfigError if that
    fails or exceeds a limit."""
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    eos_token = read_json(config).get("eos_token") if config.is_file() else None
    eos_token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    settings = {
        "path": str(path),
        "cpu_s": TRIAL_CPU_S,
        "memory_bytes": TRIAL_MEMORY_BYTES,
        "end": eos_token if isinstance(eos_token, str) else None,
    }
    # -I: import installed packages only, nothing from the current folder.
    argv = [sys.executable, "-I", str(Path(__file__).with_name("tokenizer_trial.py"))]
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    try:
        run = subprocess.run(  # noqa: S603
            argv,
            input=json.dumps(settings),
            capture_output=True,
            text=True,
            env=environ,
            timeout=TRIAL_WALL_S,
            check=False,
        )
        answer: dict[str, Any] = json.loads(run.stdout) if run.returncode == 0 else {"wrong": _OVER_LIMITS}
    except subprocess.TimeoutExpired:
        answer = {"wrong": _OVER_LIMITS}
    if "wrong" in answer:
        raise ConfigError(f"{path} cannot be read: {answer['wrong']}")
    return TokenizerFacts(answer["end"], answer["largest"])


def check_vocabulary(facts: TokenizerFacts, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer of --tokenizer has an id outside of the model's vocabulary."""
    if facts.largest_id >= vocab_size:
        raise ConfigError(f"--tokenizer has the token id {facts.largest_id}, but the model has {vocab_size} tokens")


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    """Convert the tokenizer in ``source`` to a tokenizer.json in ``folder``."""
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
        if (source / "tokenizer.model").is_file():
            raise ConfigError(
                f"{source} has a tokenizer.model that cannot be read by itself: put the model's tokenizer.json and"
                " tokenizer_config.json beside it, or name a folder that has them with --tokenizer"
            ) from None
        raise ConfigError(f"{source} has no tokenizer that can be read: {first_line(error)}") from None
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{source} has no tokenizer that can be written as tokenizer.json")


def _link(source: Path, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        path, link = source / name, folder / name
        if path.is_file() and not link.exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
