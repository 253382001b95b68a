"""GGUF file names: the parts of a split model, and the only model among several files. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pillion.errors import ConfigError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Models to list in an error.
_LISTED_MODELS = 10


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return all files of the model of a GGUF file: the file, or all parts of a split model
    (``NAME-00001-of-00005.gguf``). Raises ConfigError if a part is missing."""
    names = part_names(path.name)
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise ConfigError(
            f"{path.name} is one of {len(names)} parts, and {len(missing)} of them, such as {missing[0]}, are not in"
            f" {path.parent}"
        )
    return tuple(path.parent / name for name in names)


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model of a GGUF file."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def model_name(name: str) -> str:
    """Return a GGUF file's name without its ending and part number."""
    match = _PART.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")


def only_model(names: Iterable[str], where: str, how: str) -> list[str]:
    """Return the names of all files of the only GGUF model among the paths ``names``; [] if there is none. Raises
    ConfigError, with the hint ``how`` for choosing one, if there are several; ``where`` names their folder."""
    gguf_files = sorted(name for name in names if name.endswith(".gguf"))
    # These two are files of llama.cpp's tools: vision projectors, and statistics for quantization.
    gguf_files = [
        name
        for name in gguf_files
        if not any(tool in name.rpartition("/")[2].lower() for tool in ("mmproj", "imatrix"))
    ]
    models = {part_names(name)[0]: part_names(name) for name in gguf_files}
    if len(models) > 1:
        ending = f" and {len(models) - _LISTED_MODELS} more" if len(models) > _LISTED_MODELS else ""
        listed = ", ".join([*models][:_LISTED_MODELS])
        raise ConfigError(f"{where} has {len(models)} GGUF models: {listed}{ending}; which one? {how}")
    return next(iter(models.values()), [])
