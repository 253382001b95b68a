"""Reads the sampling values that a model recommends, which hold where a client gives none: ``--generation-config`` and
``--override-generation-config``, with vLLM's keys and meanings.

The keys are those of a ``generation_config.json``. As in vLLM, its ``max_new_tokens`` bounds every answer, also of
requests with a bound of their own, and its ``do_sample`` is ignored.
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
# These values hold where neither the client nor the model gives one.
NEUTRAL = SamplingParams(
    **{name: one.neutral for name, one in SAMPLING_OPTIONS.items() if one.neutral is not None}  # type: ignore[arg-type]
)
NO_DEFAULTS = SamplingParams()
# This maps the names of values in SamplingParams to those in a generation_config.json.
SAMPLING_KEYS = {name: one.recommended_as for name, one in SAMPLING_OPTIONS.items() if one.recommended_as}


def read_defaults(said: Mapping[str, Any], where: str) -> SamplingParams:
    """Return the defaults that a generation config gives; None for those that it does not give. Keys about other
    things are ignored. Raises ConfigError, naming ``where`` and the key, for a value that no request could have."""
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
    """Check the text of --override-generation-config, a JSON object of SAMPLING_KEYS' values, and return it. Raises
    ConfigError, which names the key, for a value that no request could have."""
    override_of(text)
    return text


def override_of(text: str) -> SamplingParams:
    """Return the defaults that --override-generation-config gives; "" gives none. Raises ConfigError."""
    if not text.strip():
        return NO_DEFAULTS
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{OVERRIDE} {text[:200]!r} is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{OVERRIDE} {text[:200]!r} is no JSON object, such as '{{\"temperature\": 0.6}}'")
    known = SAMPLING_KEYS.values()
    for key in said:
        if key not in known:
            hint = did_you_mean(key, known) or f"; it takes {', '.join(known)}"
            raise ConfigError(f"{OVERRIDE}: unknown key {key[:100]!r}{hint}")
    return read_defaults(said, OVERRIDE)


def joined(first: SamplingParams, then: SamplingParams) -> SamplingParams:
    """Return the defaults of ``first``, and those of ``then`` where ``first`` has none."""
    missing = {name: getattr(then, name) for name in SAMPLING_KEYS if getattr(first, name) is None}
    return replace(first, **missing)
