"""Recommended sampling values of a model: its generation_config.json, or its GGUF metadata. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pillion.config import AnswerFlags
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_json import read_json
from pillion.errors import ConfigError
from pillion.settings.sampling_defaults import NO_DEFAULTS, joined, override_of, read_defaults
from pillion.types import SamplingParams

FILE_NAME = "generation_config.json"
AUTO = "auto"
# Values of --generation-config that use no recommended values.
WITHOUT_DEFAULTS = ("vllm", "none")


def default_sampling(model: PreparedModel, flags: AnswerFlags) -> SamplingParams:
    """Return the default sampling values of requests; fields without a recommended value are None. Raises ConfigError
    for invalid files and flags."""
    override = override_of(flags.override_generation_config)
    if flags.generation_config in WITHOUT_DEFAULTS:
        return override
    if flags.generation_config == AUTO:
        return joined(override, joined(_of_folder(model.folder), read_defaults(model.sampling, model.name)))
    check_folder(flags.generation_config)
    return joined(override, _of_folder(Path(flags.generation_config).expanduser()))


def check_folder(chosen: str) -> None:
    """Raise ConfigError for a value of --generation-config that is neither a keyword nor a folder with the file."""
    if chosen not in (AUTO, *WITHOUT_DEFAULTS) and not (Path(chosen).expanduser() / FILE_NAME).is_file():
        raise ConfigError(f"--generation-config {chosen}: it is auto, vllm, none, or a folder with a {FILE_NAME}")


def _of_folder(folder: Path) -> SamplingParams:
    path = folder / FILE_NAME
    if not path.is_file():
        return NO_DEFAULTS
    try:
        return read_defaults(read_json(path), str(path))
    except ConfigError as error:
        raise ConfigError(f"{error.message}; --generation-config none ignores it") from None
