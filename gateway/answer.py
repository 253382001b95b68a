"""From sampled tokens to the text a client may see: detokenizing, stop ids and stop strings in one place."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.stops import StopMatcher


class Answer:
    """One request's answer as it grows, over all attempts.

    ``stopped`` turns true with the token that completes a stop string; tokens behind it are not part of the answer.
    A stop id is part of the tokens, never of the text.
    """

    __slots__ = ("_detokenizer", "_ended", "_stop_ids", "_stops", "completion_tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], stop_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._stop_ids = stop_ids
        self._ended = False
        self.completion_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.stopped

    def push(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text that became certain, and the tokens taken: all of them, or those up to a stop string's end."""
        pieces: list[str] = []
        taken: list[int] = []
        for token_id in token_ids:
            if self.stopped:
                break
            taken.append(token_id)
            if token_id not in self._stop_ids:
                pieces.append(self._stops.push(self._detokenizer.push(token_id)))
        self.completion_tokens += len(taken)
        return "".join(pieces), tuple(taken)

    def flush(self) -> str:
        """The text still held back, once, when the stream has ended."""
        if self._ended or self.stopped:
            return ""
        self._ended = True
        last = self._stops.push(self._detokenizer.flush())
        return last + ("" if self.stopped else self._stops.flush())
