"""Decides from replays of live requests whether the next version may be promoted. Sans-IO.

outcome of each replay --note--> figures by model and kind --verdict, by the rule--> promote, stop, or not yet
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from pillion.errors import ConfigError
from pillion.records.bundle import Bundle

# Outcome of a replay: equal tokens; different tokens; another prompt for the same messages; an error.
OutcomeName = Literal["equal", "differs", "prompt", "error"]


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """Limits on what the next version may change.

    Attributes:
        differs: share of requests with a different answer.
        distance: mean absolute difference of the log probabilities of equal tokens, if they were recorded.
        slower: median over requests of the ratio of the replay's total time to the request's.
    """

    differs: float = 0.0
    distance: float = math.inf
    slower: float = math.inf


def parse_rule(text: str) -> CanaryRule:
    """Parse ``differs=0.02,distance=0.01,slower=1.2``; omitted limits have their defaults. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in ("differs", "distance", "slower") or name in limits or not value >= 0:
            raise ConfigError(f"--rule {part!r} is not differs=, distance= or slower= with a number from 0 on, once")
        limits[name] = value
    return CanaryRule(**limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOutcome:
    """The outcome of one replay.

    Attributes:
        name: the kind of outcome.
        words: a description of the difference, or the error.
        position: the first position that differs.
        distance, compared_tokens: sum of the absolute differences of log probabilities, and number of tokens compared.
        slower: ratio of the replay's total time to the request's; None if one is unknown.
    """

    name: OutcomeName
    words: str = ""
    position: int | None = None
    distance: float = 0.0
    compared_tokens: int = 0
    slower: float | None = None


@dataclass(slots=True)
class CanaryFigures:
    """Totals over the requests of one model and kind, or over all."""

    counts: Counter[OutcomeName] = field(default_factory=Counter)
    distance: float = 0.0
    compared_tokens: int = 0
    positions: list[int] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)

    def note(self, outcome: CanaryOutcome) -> None:
        """Add an outcome."""
        self.counts[outcome.name] += 1
        self.distance += outcome.distance
        self.compared_tokens += outcome.compared_tokens
        if outcome.position is not None:
            self.positions.append(outcome.position)
        if outcome.slower is not None:
            self.slower.append(outcome.slower)

    @property
    def requests(self) -> int:
        """Number of replayed requests."""
        return self.counts.total()

    @property
    def different(self) -> int:
        """Number of requests whose replay was not equal."""
        return self.requests - self.counts["equal"]

    @property
    def mean_distance(self) -> float | None:
        """Mean difference of log probabilities; None if none were recorded."""
        return self.distance / self.compared_tokens if self.compared_tokens else None

    @property
    def median_slower(self) -> float | None:
        """Median ratio of the replays' times to the requests'; None if none is known."""
        return median(self.slower) if self.slower else None


class CanaryTally:
    """Counts replays by model and kind of request, and decides by all of them.

    Args:
        rule: the limits.
        wanted: number of replays before the next version may be promoted.
    """

    def __init__(self, rule: CanaryRule, wanted: int) -> None:
        self.rule, self.wanted = rule, wanted
        self.all = CanaryFigures()
        self.rows: dict[tuple[str, ...], CanaryFigures] = {}

    def note(self, bundle: Bundle, outcome: CanaryOutcome) -> None:
        """Count a replay."""
        self.all.note(outcome)
        self.rows.setdefault((bundle.model.name, kind_of(bundle)), CanaryFigures()).note(outcome)

    def verdict(self) -> bool | None:
        """Return whether the next version may be promoted; None while undecided. False as soon as more requests differ
        than the rule allows among ``wanted``."""
        if self.all.different > self.rule.differs * self.wanted:
            return False
        return None if self.all.requests < self.wanted else not self.broken()

    def broken(self) -> list[str]:
        """Return a description of each limit that the replays so far exceed."""
        figures, rule = self.all, self.rule
        faults = []
        if figures.different > rule.differs * figures.requests:
            differs = figures.different / figures.requests
            faults.append(f"{differs:.1%} of the requests differ (at most {rule.differs:.1%})")
        if (distance := figures.mean_distance) is not None and distance > rule.distance:
            faults.append(f"the log probabilities differ by {distance:.3g} (at most {rule.distance:g})")
        if (slower := figures.median_slower) is not None and slower > rule.slower:
            faults.append(f"it takes {slower:.2f} times as long (at most {rule.slower:g})")
        return faults


def kind_of(bundle: Bundle) -> str:
    """Return the kind of a request: chat or text, greedy or drawn, with a grammar, with several answers."""
    asked = bundle.request
    words = ["chat" if asked.operation == "chat" else "text", "drawn" if asked.sampling.temperature else "greedy"]
    return " ".join(words + ["grammar"] * bool(asked.grammar) + ["n > 1"] * (len(bundle.answers) > 1))


def is_in_share(bundle_id: str, share: float) -> bool:
    """Return whether a bundle is in the ``share`` (0 to 1) of bundles to replay; determined by its id."""
    hashed = int.from_bytes(hashlib.sha256(bundle_id.encode()).digest()[:8], "big")
    return hashed < share * 2**64


class TokenPace:
    """Rate limit of replays: at most ``tokens_per_s``, prompts and answers together."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._free_s = 0.0

    def spend(self, tokens: int, now: float) -> float:
        """Reserve time for a replay of ``tokens``; return how many seconds it has to wait from ``now``."""
        begin_s = max(now, self._free_s)
        self._free_s = begin_s + tokens / self._tokens_per_s
        return begin_s - now
