"""Contract of drills: limits for the cost of a strike. Sans-IO except for reading the file.

longest_pause_ms = 2000        # for all kinds
[kvnode]
longest_pause_ms = 5000        # for KV nodes only
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pillion.errors import ConfigError

KINDS = ("gateway", "decode", "prefill", "kvnode", "redis")


@dataclass(frozen=True, slots=True)
class StrikeCost:
    """Cost of a strike.

    Attributes:
        longest_pause_ms: longest time without a token of a stream that had begun.
        recomputed_tokens: tokens of prompts and answers that were computed again.
        lost_blocks: decrease of the KV nodes' blocks; new blocks make up for lost ones.
        lost_streams: streams that ended with an error.
        full_strength_s: time until as many components of each kind as before serve again; infinite if they never do.
    """

    longest_pause_ms: float = 0.0
    recomputed_tokens: int = 0
    lost_blocks: int = 0
    lost_streams: int = 0
    full_strength_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Contract:
    """Limits for the figures of :class:`StrikeCost`, unlimited by default except for lost streams."""

    longest_pause_ms: float = math.inf
    recomputed_tokens: float = math.inf
    lost_blocks: float = math.inf
    lost_streams: float = 0
    full_strength_s: float = math.inf

    def broken_by(self, cost: StrikeCost) -> tuple[str, ...]:
        """Return a sentence per exceeded limit."""
        broken = []
        for name in FIGURES:
            value, limit = getattr(cost, name), getattr(self, name)
            if value > limit:
                broken.append(f"{name} is {value:,.6g}, and may be at most {limit:,.6g}")
            elif value == math.inf:
                broken.append("the cluster did not come back to its full strength")
        return tuple(broken)


FIGURES = tuple(field.name for field in fields(Contract))


def read_contract(path: Path | None) -> dict[str, Contract]:
    """Return the contract per kind of component. Without a file, no stream may be lost, and the cluster must recover.
    Raises ConfigError for an unreadable or invalid file."""
    if path is None:
        return dict.fromkeys(KINDS, Contract())
    try:
        text = path.read_text(encoding="utf-8")
        limits = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the contract {path} cannot be read: {error}") from None
    if not isinstance(limits, dict):
        raise ConfigError(f"the contract {path} is not an object")
    tables = {kind: limits.pop(kind) for kind in KINDS if kind in limits}
    common = _with(Contract(), limits, str(path))
    return {kind: _with(common, tables.get(kind, {}), f"{path}, {kind}") for kind in KINDS}


def _with(contract: Contract, limits: Any, where: str) -> Contract:
    """Return a contract updated by a table's figures."""
    if not isinstance(limits, dict):
        raise ConfigError(f"{where}: a kind of component has a table of figures")
    for name, value in limits.items():
        if name not in FIGURES:
            raise ConfigError(f"{where}: {name!r} is neither a figure ({', '.join(FIGURES)}) nor one of {KINDS}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{where}: {name} is {value!r}, and has to be a number from 0 on")
    return replace(contract, **limits)
