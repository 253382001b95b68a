"""Turns sampled tokens into what a client may see: detokenizing, reasoning, calls, stop ids and stop strings.

token --> text --> (content, reasoning, calls, where the answer may hold them) --> stop strings in content --> delta
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import AnswerForm, AnswerReader
from pillion.gateway.tokens.detokenizer import Detokenizer
from pillion.gateway.tokens.stops import StopMatcher, StopStrings
from pillion.types import TokenLogprob, ToolCallDelta


class AnswerDelta(NamedTuple):
    """New text that is certain, and the tokens it came with, with their log probabilities where they are known."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerText:
    """One answer as it grows, over all attempts.

    ``stopped`` turns true with the token that completes a stop string; tokens behind it are not part of the answer. The
    stop string's own text never is. A stop id is part of the tokens, never of the text. The first ``min_tokens`` tokens
    complete no stop string; one that begins in them may be completed by a later token.

    Attributes:
        completion_tokens: the tokens so far.
        reasoning_tokens: how many of them were reasoning, up to the one that ended it.
        calls: calls of tools that have begun.
    """

    __slots__ = (
        *("_detokenizer", "_ended", "_has_stops", "_min_tokens", "_stop_ids", "_stops"),
        *("calls", "completion_tokens", "reasoning_tokens"),
    )

    def __init__(
        self, detokenizer: Detokenizer, strings: StopStrings, stop_ids: frozenset[int], min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._has_stops = bool(strings.stops)
        self._stops = StopMatcher(strings)
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._ended = False
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.calls = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.stopped

    @property
    def stop_string(self) -> str:
        """The stop string that is complete; "" while none is."""
        return self._stops.found

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> AnswerDelta:
        """Adds all tokens, or those up to the one that completes a stop string.

        Args:
            token_ids: the next ones.
            logprobs: one for each of them, or none.
        """
        if not self._has_stops:
            # Most answers have no stop strings, so there is nothing to look for.
            self.completion_tokens += len(token_ids)
            pushed = [self._detokenizer.push(one) for one in token_ids if one not in self._stop_ids]
            return AnswerDelta("".join(pushed), tuple(token_ids), tuple(logprobs))
        texts: list[str] = []
        used = 0
        for token_id in token_ids:
            if self.stopped:
                break
            used += 1
            self.completion_tokens += 1
            if token_id not in self._stop_ids:
                texts.append(self._match_stops(self._detokenizer.push(token_id)))
        return AnswerDelta("".join(texts), tuple(token_ids[:used]), tuple(logprobs[:used]))

    def flush(self, cut: bool = False) -> AnswerDelta:
        """What is still held back; call once, when the stream has ended. ``cut``: by max_tokens."""
        if self._ended or self.stopped:
            return AnswerDelta("", ())
        self._ended = True
        last = self._last(cut)
        return last if self.stopped else last._replace(text=last.text + self._stops.flush())

    def _last(self, cut: bool) -> AnswerDelta:
        return AnswerDelta(self._match_stops(self._detokenizer.flush()), ())

    def _match_stops(self, text: str) -> str:
        early = self.completion_tokens <= self._min_tokens
        return self._stops.pass_by(text) if early else self._stops.push(text)


class ReadAnswerText(AnswerText):
    """An answer that may hold reasoning and calls of tools. Stop strings are looked for in its content alone.

    ``parts`` say what the ids of its calls are made of.
    """

    __slots__ = ("_reader", "_visible")

    def __init__(
        self,
        detokenizer: Detokenizer,
        strings: StopStrings,
        stop_ids: frozenset[int],
        min_tokens: int,
        form: AnswerForm,
        parts: AnswerParts,
    ) -> None:
        super().__init__(detokenizer, strings, stop_ids, min_tokens)
        self._reader = AnswerReader(form, parts)
        self._visible = form.visible

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> AnswerDelta:
        """Adds tokens, as :meth:`AnswerText.push` does."""
        reader, texts = self._reader, []
        used = 0
        for token_id in token_ids:
            if self.stopped:
                break
            used += 1
            self.completion_tokens += 1
            thought = reader.thinking
            if token_id not in self._stop_ids:
                reader.push(self._visible.get(token_id) or self._detokenizer.push(token_id))
            if thought and reader.parts.thought:
                self.reasoning_tokens = self.completion_tokens
            texts.append(self._match_stops(reader.parts.take_content()))
        return self._delta(texts, tuple(token_ids[:used]), tuple(logprobs[:used]))

    def _last(self, cut: bool) -> AnswerDelta:
        self._reader.push(self._detokenizer.flush())
        self._reader.flush(cut)
        return self._delta([self._match_stops(self._reader.parts.take_content())], (), ())

    def _delta(self, texts: list[str], token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> AnswerDelta:
        parts = self._reader.parts
        self.calls = parts.calls
        reasoning, calls = parts.take()
        return AnswerDelta("".join(texts), token_ids, logprobs, reasoning, calls)
