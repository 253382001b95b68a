"""Decides by replays of live requests whether the next version may be promoted. Sans-IO.

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

# What came of a replay: the same tokens; other tokens; another prompt in the same messages; an error that the request
# did not meet at first.
OutcomeName = Literal["equal", "differs", "prompt", "error"]
DIFFERENT: tuple[OutcomeName, ...] = ("differs", "prompt", "error")


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """Says what the next version may do at most.

    Attributes:
        differs: share of the requests that have another answer.
        distance: mean absolute difference of the log probabilities of equal tokens, where they were recorded.
        slower: median over requests of the replay's whole time, by that of the request.
    """

    differs: float = 0.0
    distance: float = math.inf
    slower: float = math.inf


def parse_rule(text: str) -> CanaryRule:
    """Read ``differs=0.02,distance=0.01,slower=1.2``; what is left out keeps its default. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in ("differs", "distance", "slower") or name in found or not value >= 0:
            raise ConfigError(f"--rule {part!r} is not differs=, distance= or slower= with a number from 0 on, once")
        found[name] = value
    return CanaryRule(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOutcome:
    """Tells what came of one replay.

    Attributes:
        name: what it was.
        words: where the answers differ, or the error.
        position: the first position that differs.
        distance, compared_tokens: the sum of the differences of log probabilities, and of how many tokens.
        slower: the replay's whole time by the request's; None where one is not known.
    """

    name: OutcomeName
    words: str = ""
    position: int | None = None
    distance: float = 0.0
    compared_tokens: int = 0
    slower: float | None = None


@dataclass(slots=True)
class CanaryFigures:
    """Sums up the outcomes of requests of one model and kind, or of all."""

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
        """Number of requests that were replayed."""
        return self.counts.total()

    @property
    def different(self) -> int:
        """Number of requests that were not answered alike."""
        return sum(self.counts[name] for name in DIFFERENT)

    @property
    def mean_distance(self) -> float | None:
        """Mean difference of log probabilities; None where none was recorded."""
        return self.distance / self.compared_tokens if self.compared_tokens else None

    @property
    def median_slower(self) -> float | None:
        """Median of the replays' times by the requests'; None where none is known."""
        return median(self.slower) if self.slower else None


class CanaryTally:
    """Counts replays by model and kind of request, and judges them all together.

    Args:
        rule: what is allowed.
        wanted: after how many replays the next version may be promoted.
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
        """Return whether the next version may be promoted; None while that is open. It is stopped as soon as more
        requests differ than may differ of all that are wanted."""
        if self.all.different > self.rule.differs * self.wanted:
            return False
        return None if self.all.requests < self.wanted else not self.broken()

    def broken(self) -> list[str]:
        """Return the parts of the rule that the replays so far break, in words."""
        figures, rule = self.all, self.rule
        found = []
        if figures.different > rule.differs * figures.requests:
            differs = figures.different / figures.requests
            found.append(f"{differs:.1%} of the requests differ (at most {rule.differs:.1%})")
        if (distance := figures.mean_distance) is not None and distance > rule.distance:
            found.append(f"the log probabilities differ by {distance:.3g} (at most {rule.distance:g})")
        if (slower := figures.median_slower) is not None and slower > rule.slower:
            found.append(f"it takes {slower:.2f} times as long (at most {rule.slower:g})")
        return found


def kind_of(bundle: Bundle) -> str:
    """Names the kind of a request: chat or text, greedy or drawn, with a grammar, with several answers."""
    asked = bundle.request
    words = ["chat" if asked.operation == "chat" else "text", "drawn" if asked.sampling.temperature else "greedy"]
    return " ".join(words + ["grammar"] * bool(asked.grammar) + ["n > 1"] * (len(bundle.answers) > 1))


def is_in_share(bundle_id: str, share: float) -> bool:
    """Return whether a bundle is of those that are replayed: its id alone decides."""
    drawn = int.from_bytes(hashlib.sha256(bundle_id.encode()).digest()[:8], "big")
    return drawn < share * 2**64


class TokenPace:
    """Spaces replays so that they take no more than so many tokens a second, prompts and answers together. Times are
    seconds of one clock."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._free_s = 0.0

    def spend(self, tokens: int, now: float) -> float:
        """Note a replay of so many tokens that begins ``now`` or later; return how long it has to wait."""
        begin_s = max(now, self._free_s)
        self._free_s = begin_s + tokens / self._tokens_per_s
        return begin_s - now
