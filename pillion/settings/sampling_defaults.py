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
    **{name: one.neutral for name, one in SAMPLING_OPTIONS.items() if one.neutral is not None}  # type: ignore[arg-type]
)
NO_DEFAULTS = SamplingParams()
SAMPLING_KEYS = {name: one.recommended_as for name, one in SAMPLING_OPTIONS.items() if one.recommended_as}


def read_defaults(said: Mapping[str, Any], where: str) -> SamplingParams:
    """Return the defaults of a generation config; None where it has none. Unrelated keys are ignored. Raises
    ConfigError, naming ``where`` and the key, for values that are invalid in a request."""
    found: dict[str, Any] = {}
    for name, key in SAMPLING_KEYS.items():
        value = said.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {key} must be a number, not {value!r}")
        whole = SAMPLING_OPTIONS[name].whole
        if not abs(value) < 2**31 or (whole and value != int(value)):
            raise ConfigError(f"{where}: {key} must be a {'whole ' * whole}number in its range, not {value!r}")
        found[name] = int(value) if whole else float(value)
    defaults = SamplingParams(**found)
    for violation in range_violations(defaults, 0):
        key = SAMPLING_KEYS[violation.field.removeprefix("sampling.")]
        raise ConfigError(f"{where}: {key}: {violation.description}")
    if defaults.max_tokens is not None and defaults.max_tokens < 1:
        raise ConfigError(f"{where}: max_new_tokens must be 1 or more, not {defaults.max_tokens}")
    return defaults


def parse_override(text: str) -> str:
    """Check the text of --override-generation-config, a JSON object with SAMPLING_KEYS' values, and return it. Raises
    ConfigError, which names the key, for values that are invalid in a request."""
    override_of(text)
    return text


def override_of(text: str) -> SamplingParams:
    """Return the defaults of --override-generation-config; "" has none. Raises ConfigError."""
    if not text.strip():
        return NO_DEFAULTS
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{OVERRIDE} {text[:200]!r} is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{OVERRIDE} {text[:200]!r} is not a JSON object, such as '{{\"temperature\": 0.6}}'")
    known = SAMPLING_KEYS.values()
    for key in said:
        if key not in known:
            hint = did_you_mean(key, known) or f"; it takes {', '.join(known)}"
            raise ConfigError(f"{OVERRIDE}: unknown key {key[:100]!r}{hint}")
    return read_defaults(said, OVERRIDE)


def joined(first: SamplingParams, then: SamplingParams) -> SamplingParams:
    """Return the defaults of ``first``, completed by those of ``then``."""
    missing = {name: getattr(then, name) for name in SAMPLING_KEYS if getattr(first, name) is None}
    return replace(first, **missing)
