"""The sampling values that a model recommends, which hold where a client gives none: ``--generation-config`` and
``--override-generation-config``, with vLLM's keys and meanings.

The keys are those of a ``generation_config.json``. Its ``max_new_tokens`` bounds every answer, asked for or not, and
whether it says ``do_sample`` does not matter. Both are as in vLLM.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pillion.errors import ConfigError
from pillion.sampling_ranges import range_violations
from pillion.types import SamplingParams

OVERRIDE = "--override-generation-config"
# What holds where neither the client nor the model says anything.
NEUTRAL = SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)
NO_DEFAULTS = SamplingParams()
# The names of the values in SamplingParams, and in a generation_config.json.
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_new_tokens",
}
_WHOLE = ("top_k", "max_tokens")


def read_defaults(said: Mapping[str, Any], where: str) -> SamplingParams:
    """The defaults that a generation config gives; None for those that it does not. Keys about other things are not
    looked at. Raises ConfigError, naming ``where`` and the key, for a value that no request could have."""
    found: dict[str, Any] = {}
    for name, key in SAMPLING_KEYS.items():
        value = said.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {key} must be a number, not {value!r}")
        if not abs(value) < 2**31 or (name in _WHOLE and value != int(value)):
            raise ConfigError(
                f"{where}: {key} must be a {'whole ' * (name in _WHOLE)}number in its range, not {value!r}"
            )
        found[name] = int(value) if name in _WHOLE else float(value)
    defaults = SamplingParams(**found)
    for violation in range_violations(defaults, 0):
        key = SAMPLING_KEYS[violation.field.removeprefix("sampling.")]
        raise ConfigError(f"{where}: {key}: {violation.description}")
    if defaults.max_tokens is not None and defaults.max_tokens < 1:
        raise ConfigError(f"{where}: max_new_tokens must be 1 or more, not {defaults.max_tokens}")
    return defaults


def parse_override(text: str) -> str:
    """Checks the text of --override-generation-config, which is a JSON object of SAMPLING_KEYS' values, and returns it.
    Raises ConfigError for what cannot be meant, and names the key."""
    override_of(text)
    return text


def override_of(text: str) -> SamplingParams:
    """The defaults that --override-generation-config gives; "" gives none. Raises ConfigError."""
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
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
            raise ConfigError(f"{OVERRIDE}: unknown key {key[:100]!r}; {hint}")
    return read_defaults(said, OVERRIDE)


def joined(first: SamplingParams, then: SamplingParams) -> SamplingParams:
    """The defaults of ``first``, and those of ``then`` where it has none."""
    missing = {name: getattr(then, name) for name in SAMPLING_KEYS if getattr(first, name) is None}
    return replace(first, **missing)
