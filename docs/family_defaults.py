"""Writes what transformers assumes for keys that configs leave out: ``python -m docs.family_defaults``, or ``make
dashboards``.

The values are those of transformers' own classes of configs, of the keys that Pillion reads; the table of families says
only where they are others.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Set
from typing import Any

from transformers import CONFIG_MAPPING

from pillion.engine.models.config_keys import DEFAULTED
from pillion.engine.models.families import DEFAULTS_FILE, FAMILIES, TEXT_AS


def defaults_of(name: str, left_out: Set[str]) -> dict[str, Any]:
    """Returns the values that transformers' class for ``name`` gives to missing keys, but for those ``left_out``."""
    kind = CONFIG_MAPPING[name]
    found = {field.name: field.default for field in dataclasses.fields(kind) if field.name in DEFAULTED - left_out}
    # The base of rotary embeddings is no field, for models that have several of them have no single one.
    if kind.default_theta != 10_000.0 and not isinstance(kind.default_theta, dict):
        found["rope_theta"] = kind.default_theta
    return dict(sorted(found.items()))


def render() -> str:
    """Returns the file's text: an object for each family, and for each text model that is of a family in all but its
    name."""
    rows = {name: defaults_of(name, {*row.fixed, *row.ignored}) for name, row in FAMILIES.items()}
    for name, (family, _) in TEXT_AS.items():
        if name in CONFIG_MAPPING:
            rows[name] = defaults_of(name, DEFAULTED - FAMILIES[family].defaults.keys())
    return json.dumps(rows, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    pathlib.Path(DEFAULTS_FILE).write_text(render())
