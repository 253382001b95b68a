"""GGUF file names: the parts of a split model, and the only model among several files. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pillion.errors import ConfigError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LISTED_MODELS = 10


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return all files of the model that this GGUF file belongs to (``NAME-00001-of-00005.gguf``). Raises ConfigError
    if one is missing."""
    names = part_names(path.name)
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise ConfigError(
            f"{path.name} is one of {len(names)} parts, and {len(missing)} of them, such as {missing[0]}, are not in"
            f" {path.parent}"
        )
    return tuple(path.parent / name for name in names)


def part_names(name: str) -> list[str]:
    """Return the file names of all parts of the model that this file belongs to."""
    named = _PART.fullmatch(name)
    if named is None:
        return [name]
    return [f"{named['stem']}-{number:05}-of-{named['count']}.gguf" for number in range(1, int(named["count"]) + 1)]


def model_name(name: str) -> str:
    named = _PART.fullmatch(name)
    return named["stem"] if named else name.removesuffix(".gguf")


def only_model(names: Iterable[str], where: str, how: str) -> list[str]:
    """Return the file names of the only GGUF model among ``names``, which may be paths; [] if there is none. Raises
    ConfigError if there are several; ``how`` is the hint for choosing one."""
    found = sorted(name for name in names if name.endswith(".gguf"))
    # Files of llama.cpp's tools beside a model: vision projectors, and statistics for quantization.
    found = [
        name for name in found if not any(other in name.rpartition("/")[2].lower() for other in ("mmproj", "imatrix"))
    ]
    models = {part_names(name)[0]: part_names(name) for name in found}
    if len(models) > 1:
        more = f" and {len(models) - _LISTED_MODELS} more" if len(models) > _LISTED_MODELS else ""
        listed = ", ".join([*models][:_LISTED_MODELS])
        raise ConfigError(f"{where} has {len(models)} GGUF models: {listed}{more}; which one? {how}")
    return next(iter(models.values()), [])
