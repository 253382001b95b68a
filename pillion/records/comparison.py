"""Compares the answers of a bundle with those of its replay, and describes a difference. Sans-IO.

Sampling is a pure function of logits, seed and position, so equal weights produce equal tokens. If they do not, the
first position that differs shows the cause, by the log probabilities of both tokens in the replay's model: a margin of
the size of rounding means another order of sums, a larger one another model or a defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pillion.records.bundle import BundleAnswer
from pillion.types import TokenLogprob


@dataclass(slots=True)
class ReplayedAnswer:
    """One answer of a replay. ``finish_reason`` is "" until it ends; ``logprobs`` has one entry per token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""

    def covers(self, recorded: BundleAnswer) -> bool:
        """Return whether this answer can be compared with a recorded one: it is finished, or as long as one that was
        recorded unfinished."""
        return bool(self.finish_reason) or (not recorded.finish_reason and len(self.token_ids) >= recorded.tokens)


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The first difference between an answer and its replay: the numbers of the answer and of the token, from 0.

    Attributes:
        recorded, replayed: descriptions of what each has at the position: a token with its log probability by the
            replay's model, or the answer's end.
        margin: log probability of the replayed token minus that of the recorded one, by the replay's model; None if
            unknown or if an answer ends. May be negative at a temperature above 0.
    """

    answer: int
    position: int
    recorded: str
    replayed: str
    margin: float | None = None

    def __str__(self) -> str:
        where = f"answer {self.answer} at position {self.position}"
        margin = "" if self.margin is None else f", margin {self.margin:.6f}"
        return f"{where}: recorded {self.recorded}, replayed {self.replayed}{margin}"


def first_difference(recorded: Sequence[BundleAnswer], replayed: Sequence[ReplayedAnswer]) -> AnswerDifference | None:
    """Return the first difference of the first answer that has one; None if all are equal. An answer that was recorded
    unfinished equals a replay that begins with it."""
    for index, (old, new) in enumerate(zip(recorded, replayed, strict=True)):
        at = shared_tokens(old, new)
        over, new_over = at == len(old.token_ids), at == len(new.token_ids)
        if over and (not old.finish_reason or (new_over and _end(old.finish_reason) == _end(new.finish_reason))):
            continue
        reported = new.logprobs[at] if at < len(new.logprobs) else None
        likeliest = {} if reported is None else dict(zip(reported.top_ids, reported.top_logprobs, strict=False))
        before = None if over else likeliest.get(old.token_ids[at])
        now = None if reported is None else reported.logprob
        return AnswerDifference(
            index,
            at,
            f"its end ({old.finish_reason})" if over else _token(old.token_ids[at], before, len(likeliest)),
            f"its end ({new.finish_reason or 'unknown'})" if new_over else _token(new.token_ids[at], now, 0),
            None if before is None or now is None else now - before,
        )
    return None


def _token(token_id: int, logprob: float | None, likeliest: int) -> str:
    unknown = f" (not among the {likeliest} likeliest)" if likeliest else ""
    return f"{token_id}{unknown if logprob is None else f' ({logprob:.6f})'}"


def shared_tokens(recorded: BundleAnswer, replayed: ReplayedAnswer) -> int:
    """Return the number of equal tokens at the beginning of two answers."""
    pairs = enumerate(zip(recorded.token_ids, replayed.token_ids, strict=False))
    shortest = min(len(recorded.token_ids), len(replayed.token_ids))
    return next((position for position, (old, new) in pairs if old != new), shortest)


def logprob_distance(recorded: Sequence[BundleAnswer], replayed: Sequence[ReplayedAnswer]) -> tuple[float, int]:
    """Return the sum of the absolute differences of the log probabilities of equal tokens, up to each answer's first
    difference, and their number. Only tokens that were recorded with a log probability count."""
    total, count = 0.0, 0
    for old, new in zip(recorded, replayed, strict=True):
        pairs = list(zip(old.logprobs, new.logprobs, strict=False))[: shared_tokens(old, new)]
        known = [abs(before - now.logprob) for before, now in pairs if before is not None]
        total, count = total + sum(known), count + len(known)
    return total, count


def _end(finish_reason: str) -> str:
    """Return how an answer ended as its tokens show it: only the gateway recognizes tool calls."""
    return "stop" if finish_reason == "tool_calls" else finish_reason
