"""Follows the text of an answer that may hold reasoning and calls of tools besides content."""

from __future__ import annotations

from collections.abc import Sequence

from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import AnswerReader, OutputFormat
from pillion.gateway.tokens.answer_text import MAX_TOOLS, AnswerDelta, AnswerText, Detokenizer, StopStrings
from pillion.types import TokenLogprob


class ReadAnswerText(AnswerText):
    """Follows an answer that may hold reasoning and calls of tools. Stop strings are looked for in its content alone.

    The ids of its calls are made of fields of ``parts``.
    """

    __slots__ = ("_reader", "_visible")

    def __init__(
        self,
        detokenizer: Detokenizer,
        strings: StopStrings,
        stop_ids: frozenset[int],
        min_tokens: int,
        output_format: OutputFormat,
        parts: AnswerParts,
        included: bool = False,
    ) -> None:
        super().__init__(detokenizer, strings, stop_ids, min_tokens, included)
        self._reader = AnswerReader(output_format, parts)
        self._visible = output_format.visible

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> AnswerDelta:
        """Adds tokens to the answer, as :meth:`AnswerText.push` does."""
        return self._push_each(token_ids, logprobs)

    def _content_of(self, token_id: int) -> str:
        reader = self._reader
        thought = reader.parts.thinking
        if token_id not in self._stop_ids:
            reader.push(self._visible.get(token_id) or self._detokenizer.push(token_id))
        if thought and reader.parts.thought:
            self.reasoning_tokens = self.completion_tokens
        return reader.parts.take_content()

    def _last_content(self, cut: bool) -> str:
        self._reader.push(self._detokenizer.flush())
        self._reader.flush(cut)
        return self._reader.parts.take_content()

    def _delta(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> AnswerDelta:
        parts = self._reader.parts
        self.calls = parts.calls
        reasoning, calls = parts.take()
        if calls and len(self.tools) < MAX_TOOLS:
            self.tools = (*self.tools, *(call.name for call in calls if call.name))[:MAX_TOOLS]
        return AnswerDelta(text, token_ids, logprobs, reasoning, calls)
