"""Values of a ``config.json``, each with one clear ConfigError where it is not what it should be. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pillion.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError when it is not there or not one."""
    try:
        said = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is no model folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return said


def token_ids(said: Any) -> tuple[int, ...]:
    """The ids in ``eos_token_id`` and its like: nothing, one number, or a list."""
    found = said if isinstance(said, list) else [said]
    return tuple(number for number in found if isinstance(number, int) and not isinstance(number, bool))


def size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0; null and a missing key give ``default``."""
    said = raw.get(key)
    said = default if said is None else said
    if not isinstance(said, int) or isinstance(said, bool) or said < 1:
        raise ConfigError(f"config.json: {key} must be a whole number above 0, not {said!r}")
    return said


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """A number; null and a missing key give ``default``."""
    said = raw.get(key)
    said = default if said is None else said
    if not isinstance(said, int | float) or isinstance(said, bool):
        raise ConfigError(f"config.json: {key} must be a number, not {said!r}")
    return float(said)


def above_zero(raw: Mapping[str, Any], key: str, default: float) -> float:
    """A number above 0; null and a missing key give ``default``."""
    found = number(raw, key, default)
    if found <= 0:
        raise ConfigError(f"config.json: {key} must be above 0, not {found}")
    return found


def per_layer(raw: Mapping[str, Any], key: str, num_layers: int) -> list[Any] | None:
    """A list with one entry for each layer; longer ones are cut, as transformers does. None where it is not said."""
    said = raw.get(key)
    if said is None:
        return None
    if not isinstance(said, list) or len(said) < num_layers:
        raise ConfigError(f"config.json: {key} must name all {num_layers} layers")
    return said[:num_layers]
