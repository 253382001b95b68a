"""Merges the deltas that a request's reader has not taken yet into one for each answer. The request's ``max_tokens``
bounds their size. Sans-IO (I9).

    add, add --> finish --> (the other answers' finish) --> end        fail, any time: what is pending, then the error

Where more answers are generated than returned (``best_of``), none is returned before the end, when they are ranked.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pillion.errors import PillionError
from pillion.gateway.request.parallel_samples import rank_answers
from pillion.gateway.tokens.answer_text import AnswerDelta
from pillion.types import Delta, FinishReason, Timings, TokenLogprob, ToolCallDelta, Usage

# One delta has at most this many log probabilities of a prompt, their alternatives included: converting them takes some
# 5 ms.
MAX_DELTA_LOGPROBS = 4096


@dataclass(slots=True)
class _Unread:
    """Holds the tokens and text of one answer that the reader has not taken."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Few answers have reasoning or calls, so no list is made before there is something to hold.
    reasoning: list[str] | None = None
    calls: list[ToolCallDelta] | None = None
    finish_reason: FinishReason | None = None
    stop_string: str = ""


class Outbox:
    """Holds the deltas of a request for its reader: answers come in the order in which they have something new.

    Args:
        request_id: the id that goes into every delta.
        generated: number of answers that are generated.
        given: number of answers, the best ones, that the client gets. They are numbered by rank if these are not all.
        show_logprobs: whether deltas carry log probabilities.
    """

    def __init__(self, request_id: str, generated: int, given: int, show_logprobs: bool) -> None:
        self._request_id = request_id
        self._pending_deltas = [_Unread() for _ in range(generated)]
        self._given = given
        self._ranks = given < generated
        self._show_logprobs = show_logprobs
        self._pending: deque[int] = deque()
        self._scores: deque[TokenLogprob] = deque()
        self._last: tuple[Usage, Timings] | None = None
        self._error: PillionError | None = None
        # This says whether the reader has taken everything.
        self.over = False

    @property
    def pending(self) -> bool:
        """Says whether there is something to take: a delta, or the request's error."""
        return bool(self._pending or self._scores) or (self._error is not None and not self.over)

    def score(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds log probabilities of the prompt's next tokens, which the reader gets before everything else."""
        self._scores.extend(logprobs)

    def add(self, index: int, piece: AnswerDelta) -> None:
        """Adds new tokens and text of an answer."""
        box = self._pending_deltas[index]
        box.texts.append(piece.text)
        box.token_ids.extend(piece.token_ids)
        if self._show_logprobs or self._ranks:
            box.logprobs.extend(piece.logprobs)
        if piece.reasoning or piece.tool_calls:
            if box.reasoning is None or box.calls is None:
                box.reasoning, box.calls = [], []
            box.reasoning.append(piece.reasoning)
            box.calls.extend(piece.tool_calls)
        if piece.token_ids:
            self._announce(index)

    def finish(self, index: int, last: AnswerDelta, reason: FinishReason, stop_string: str = "") -> None:
        """Adds the end of an answer, with the text that it held back, and the stop string that ended it, or ""."""
        box = self._pending_deltas[index]
        box.finish_reason, box.stop_string = reason, stop_string
        self.add(index, last)
        self._announce(index)

    def end(self, usage: Usage, timings: Timings) -> None:
        """Ends the request's deltas; called right after the last ``finish``."""
        self._last = (usage, timings)
        if self._ranks:
            chosen = rank_answers([box.logprobs for box in self._pending_deltas], self._given)
            self._pending_deltas = [self._pending_deltas[index] for index in chosen]
            self._pending.extend(range(len(chosen)))

    def fail(self, error: PillionError) -> None:
        """Ends the request with an error, which the reader gets after what is pending."""
        self._error = error

    def take(self) -> Delta:
        """Returns the next delta; call it only while something is pending. Raises the request's error."""
        if self._scores:
            scores, most = self._scores, MAX_DELTA_LOGPROBS // (1 + len(self._scores[0].top_ids))
            given = tuple(scores.popleft() for _ in range(min(len(scores), max(most, 1))))
            return Delta(self._request_id, "", prompt_logprobs=given)
        if not self._pending:
            assert self._error is not None
            self.over = True
            raise self._error
        index = self._pending.popleft()
        box, self._pending_deltas[index] = self._pending_deltas[index], _Unread()
        usage, timings = None, None
        if self._last is not None and not self._pending:
            self.over = True
            usage, timings = self._last
        return Delta(
            request_id=self._request_id,
            text="".join(box.texts),
            token_ids=tuple(box.token_ids),
            finish_reason=box.finish_reason,
            usage=usage,
            timings=timings,
            index=index,
            logprobs=tuple(box.logprobs) if self._show_logprobs else (),
            reasoning="".join(box.reasoning) if box.reasoning else "",
            tool_calls=_merged(box.calls) if box.calls else (),
            stop_string=box.stop_string,
        )

    def _announce(self, index: int) -> None:
        if not self._ranks and index not in self._pending:
            self._pending.append(index)


def _merged(parts: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Merges the parts of calls, so that what was written of one call's arguments is one part."""
    merged: list[ToolCallDelta] = []
    for _, group in itertools.groupby(parts, key=lambda part: (part.index, part.name)):
        same = list(group)
        merged.append(replace(same[0], arguments="".join(part.arguments for part in same)))
    return tuple(merged)
