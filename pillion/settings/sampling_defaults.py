"""Parses the sampling values that a model recommends, which apply if a client sets none: ``--generation-config`` and
``--override-generation-config``, with vLLM's keys and meanings.

The keys are those of ``generation_config.json``. As in vLLM, ``max_new_tokens`` limits every answer, even of requests
with their own limit, and ``do_sample`` is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pillion.errors import ConfigError
from pillion.near_names import did_you_mean
from pillion.types import SAMPLING_OPTIONS, SamplingParams, range_violations

OVERRIDE = "--override-generation-config"
NEUTRAL = SamplingParams(
    **{name: option.neutral for name, option in SAMPLING_OPTIONS.items() if option.neutral is not None}  # type: ignore[arg-type]
)
NO_DEFAULTS = SamplingParams()
SAMPLING_KEYS = {name: option.recommended_as for name, option in SAMPLING_OPTIONS.items() if option.recommended_as}


def read_defaults(config: Mapping[str, Any], where: str) -> SamplingParams:
    """Return the sampling defaults in a generation config; fields without a value are None. Ignores unrelated keys.
    Raises ConfigError, which names ``where`` and the key, for values that are invalid in a request."""
    values: dict[str, Any] = {}
    for name, key in SAMPLING_KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {key} must be a number, not {value!r}")
        whole = SAMPLING_OPTIONS[name].whole
        if not abs(value) < 2**31 or (whole and value != int(value)):
            raise ConfigError(f"{where}: {key} must be a {'whole ' * whole}number in its range, not {value!r}")
        values[name] = int(value) if whole else float(value)
    defaults = SamplingParams(**values)
    for violation in range_violations(defaults, 0):
        key = SAMPLING_KEYS[violation.field.removeprefix("sampling.")]
        raise ConfigError(f"{where}: {key}: {violation.description}")
    if defaults.max_tokens is not None and defaults.max_tokens < 1:
        raise ConfigError(f"{where}: max_new_tokens must be 1 or more, not {defaults.max_tokens}")
    return defaults


def parse_override(text: str) -> str:
    """Return the text of --override-generation-config, a JSON object with keys of SAMPLING_KEYS. Raises ConfigError,
    which names the key, for values that are invalid in a request."""
    override_of(text)
    return text


def override_of(text: str) -> SamplingParams:
    """Return the sampling defaults in the text of --override-generation-config; "" has none. Raises ConfigError."""
    if not text.strip():
        return NO_DEFAULTS
    try:
        override = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{OVERRIDE} {text[:200]!r} is not JSON: {error}") from None
    if not isinstance(override, dict):
        raise ConfigError(f"{OVERRIDE} {text[:200]!r} is not a JSON object, such as '{{\"temperature\": 0.6}}'")
    known = SAMPLING_KEYS.values()
    for key in override:
        if key not in known:
            hint = did_you_mean(key, known) or f"; it takes {', '.join(known)}"
            raise ConfigError(f"{OVERRIDE}: unknown key {key[:100]!r}{hint}")
    return read_defaults(override, OVERRIDE)


def joined(first: SamplingParams, then: SamplingParams) -> SamplingParams:
    """Return the defaults of ``first``, completed by those of ``then``."""
    missing = {name: getattr(then, name) for name in SAMPLING_KEYS if getattr(first, name) is None}
    return replace(first, **missing)
