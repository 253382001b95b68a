"""Parses an answer as it is generated: first its reasoning, then its content and calls. Sans-IO (I9).

    text --> reasoning, if it begins with it --> content and calls, or only content --> parts
       '---> messages in channels (:mod:`pillion.gateway.formats.harmony`) ---------------^

The result does not depend on how the text was split into pieces. :class:`ReadAnswerText` feeds it from tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from pillion.gateway.formats.answer_parts import AnswerParts, Marks, PendingText
from pillion.gateway.formats.harmony import HarmonyAnswer
from pillion.gateway.formats.reasoning import ReasoningFormat, read_reasoning
from pillion.gateway.formats.tool_formats import ToolFormat, ToolSchemas
from pillion.gateway.tokens.answer_text import AnswerDelta, AnswerText, Detokenizer, StopStrings
from pillion.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the answers to a request may contain besides content.

    Attributes:
        reasoning: format of their reasoning, or None.
        opened: whether they begin within reasoning; None if the answer itself shows it.
        tools: format of their calls, or None.
        schemas: JSON schemas of the arguments of the tools that may be called, by name.
        visible: texts of special tokens that are marks, by id; other special tokens have no text.
        answering: whether they begin within content that has marks around it.
    """

    reasoning: ReasoningFormat | None
    opened: bool | None
    tools: ToolFormat | None
    schemas: ToolSchemas
    visible: Mapping[int, str]
    answering: bool = False


class AnswerReader:
    """Incremental parser of one answer.

    Attributes:
        parts: the parsed parts.
    """

    __slots__ = ("_marks", "_reading", "_text", "parts")

    def __init__(self, output_format: OutputFormat, parts: AnswerParts) -> None:
        self.parts = parts
        parts.thinking = output_format.reasoning is not None and output_format.opened is not False
        self._text = PendingText()
        if output_format.reasoning is not None:
            parts.set_content_marks(
                output_format.reasoning.answer, output_format.reasoning.last, output_format.answering
            )
        marks = [] if output_format.reasoning is None else [*output_format.reasoning.marks]
        if output_format.tools is not None:
            marks += filter(None, (output_format.tools.begin, output_format.tools.end, *output_format.tools.inner))
        # Some marks are ordinary words, whose beginnings may be content.
        self._marks = Marks(*(mark for mark in marks if mark[0] in "<[]"))
        self._reading = self._read(output_format)
        next(self._reading, None)

    def push(self, text: str) -> None:
        """Parse the next text of the answer."""
        self._text.push(text)
        next(self._reading, None)

    def flush(self, cut: bool = False) -> None:
        """Parse the text held back, at the end of the answer. ``cut``: the answer was truncated, so a partial mark, or
        a partial call without a name, is dropped."""
        text = self._text
        if cut:
            text.cut(self._marks)
        text.ended = True
        next(self._reading, None)
        self.parts.end(cut)

    def _read(self, output_format: OutputFormat) -> Generator[None, None, None]:
        text, parts = self._text, self.parts
        reasoning, tools = output_format.reasoning, output_format.tools
        if reasoning is not None and reasoning.in_channels:
            tool_names = None if tools is None else output_format.schemas
            yield from HarmonyAnswer(text, parts, tool_names, output_format.opened).read()
            return
        if reasoning is not None:
            yield from read_reasoning(
                reasoning, output_format.opened, text, parts, tools is not None and not tools.bare
            )
            parts.thinking = parts.in_reasoning
        if tools is not None:
            yield from tools.reader(text, parts, output_format.schemas).read()
            return
        yield from text.until(Marks(), parts.content)


class ReadAnswerText(AnswerText):
    """Text of an answer that may contain reasoning and tool calls. Stop strings apply only to its content.

    ``parts``: empty, with the inputs of the call ids.
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
        """Add tokens to the answer, as :meth:`AnswerText.push` does."""
        return self._push_each(token_ids, logprobs)

    def _content_of(self, token_id: int) -> str:
        reader = self._reader
        was_thinking = reader.parts.thinking
        if token_id not in self._stop_ids:
            reader.push(self._visible.get(token_id) or self._detokenizer.push(token_id))
        if was_thinking and reader.parts.has_reasoning:
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
        return AnswerDelta(text, token_ids, logprobs, reasoning, calls)
