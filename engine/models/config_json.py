"""Validated values of a ``config.json``; each function raises one clear ConfigError for an invalid value. Imports no
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pillion.errors import ConfigError

# Published models have at most 126 layers and 512 experts. Limited, since lists of these lengths are allocated before
# weights are read.
MAX_LAYERS, MAX_EXPERTS = 4096, 16_384
# Keys of the number of experts in different families; the first one present wins.
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MAX_VALUES = {"num_hidden_layers": MAX_LAYERS, **dict.fromkeys(EXPERT_COUNT_KEYS, MAX_EXPERTS)}
# Limits on the length of a list of token ids, and on an id.
MAX_IDS, MAX_TOKENS = 1024, 2**24


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError for a missing file, and for content that is not a JSON
    object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids in a value such as ``eos_token_id``: null, a number, or a list of numbers."""
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))


def vocabulary_ids(raw: Mapping[str, Any], key: str, vocab_size: int, source: str = "config.json") -> tuple[int, ...]:
    """Return the token ids in a value such as ``eos_token_id``; () for null and a missing key. Ids outside of the
    vocabulary are dropped: transformers' defaults may be. Raises ConfigError, with the name ``source`` of the file, for
    invalid ids, and for more than MAX_IDS."""
    value = raw.get(key)
    items = value if isinstance(value, list) else [] if value is None else [value]
    if len(items) > MAX_IDS:
        raise ConfigError(f"{source}: {key} has {len(items)} ids; the limit is {MAX_IDS}")
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < MAX_TOKENS:
            raise ConfigError(f"{source}: {key} must be token ids of the vocabulary, from 0 on, not {item!r}")
    return tuple(item for item in items if item < vocab_size)


def _value(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    return default if value is None else value


def size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer; ``default`` for null and a missing key."""
    value = _value(raw, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} must be a whole number above 0, not {value!r}")
    if value > _MAX_VALUES.get(key, value):
        raise ConfigError(f"config.json: {key} must be at most {_MAX_VALUES[key]}, not {value}")
    return value


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Return a finite number; ``default`` for null and a missing key."""
    value = _value(raw, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"config.json: {key} must be a number, not {value!r}")
    try:
        result = float(value)
    except OverflowError:
        raise ConfigError(f"config.json: {key} is too large") from None
    if not math.isfinite(result):
        raise ConfigError(f"config.json: {key} must be a finite number, not {value!r}")
    return result


def above_zero(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive finite number; ``default``, which may be 0 for "none", for null and a missing key."""
    value = number(raw, key, default)
    if value <= 0 and raw.get(key) is not None:
        raise ConfigError(f"config.json: {key} must be above 0, not {value}")
    return value


def per_layer(raw: Mapping[str, Any], key: str, num_layers: int) -> list[Any] | None:
    """Return a list with an entry per layer, truncated as in transformers; None for null and a missing key."""
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) < num_layers:
        raise ConfigError(f"config.json: {key} must have an entry for each of the {num_layers} layers")
    return value[:num_layers]
