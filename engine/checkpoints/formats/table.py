"""Chooses the format of a checkpoint's matrices by its config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pillion.engine.checkpoints.formats.pillion_format import METHOD, PillionFormat
from pillion.engine.checkpoints.weight_format import WeightFormat
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

# Makes a format of a quantization_config, by its quant_method.
_FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {METHOD: lambda config: PillionFormat()}


def choose_format(config: ModelConfig) -> WeightFormat | None:
    """The format of a model's matrices; None where all of them are plain. Raises ConfigError for an unknown one."""
    if not config.quantization:
        return None
    found = json.loads(config.quantization)
    make = _FORMATS.get(found.get("quant_method"))
    if make is None:
        raise ConfigError(f"weights quantized by {found.get('quant_method')!r} are not read")
    return make(found)
