"""Reads an answer as it is written: first its reasoning, then its content and its calls. Sans-IO (I9).

    text --> reasoning, if it begins with it --> content and calls, or content alone --> parts
       '---> messages in channels (:mod:`pillion.gateway.formats.harmony`) ---------------^

The parts are a function of the text alone: it does not matter into which pieces the text was cut.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from pillion.gateway.formats.answer_parts import AnswerParts, Marks, PendingText
from pillion.gateway.formats.harmony import HarmonyAnswer
from pillion.gateway.formats.reasoning import ReasoningFormat, read_reasoning
from pillion.gateway.formats.tool_formats import ToolFormat, ToolSchemas


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Says what the answers to one request may hold besides content.

    Attributes:
        reasoning: the format of their reasoning; None where they hold none.
        opened: whether they begin within reasoning; None where each answer shows whether it does.
        tools: the format of their calls; None where they hold none.
        schemas: the tools that may be called.
        visible: the texts of special tokens that are marks, by their ids.
        answering: whether they begin within content that has marks around it.
    """

    reasoning: ReasoningFormat | None
    opened: bool | None
    tools: ToolFormat | None
    schemas: ToolSchemas
    visible: Mapping[int, str]
    answering: bool = False


class AnswerReader:
    """Reads one answer.

    Attributes:
        parts: the parts that became certain.
    """

    __slots__ = ("_marks", "_reading", "_text", "parts")

    def __init__(self, output_format: OutputFormat, parts: AnswerParts) -> None:
        self.parts = parts
        parts.thinking = output_format.reasoning is not None and output_format.opened is not False
        self._text = PendingText()
        if output_format.reasoning is not None:
            parts.between(output_format.reasoning.answer, output_format.reasoning.last, output_format.answering)
        marks = [] if output_format.reasoning is None else [*output_format.reasoning.marks]
        if output_format.tools is not None:
            marks += filter(None, (output_format.tools.begin, output_format.tools.end, *output_format.tools.inner))
        # Marks that are words begin as other words do, so that half of one is text.
        self._marks = Marks(*(mark for mark in marks if mark[0] in "<[]"))
        self._reading = self._read(output_format)
        # The first call lets the reading generator run up to where it needs text.
        next(self._reading, None)

    def push(self, text: str) -> None:
        """Reads the next text of the answer."""
        self._text.push(text)
        next(self._reading, None)

    def flush(self, cut: bool = False) -> None:
        """Reads the text that was held back, because no more will come. Call it once, at the end. With ``cut`` the
        answer did not end by itself: half a mark at its end is then no text, and neither is half a call whose name is
        not known yet."""
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
            known = None if tools is None else frozenset(output_format.schemas)
            yield from HarmonyAnswer(text, parts, output_format.opened, known).read()
            return
        if reasoning is not None:
            yield from read_reasoning(
                reasoning, output_format.opened, text, parts, tools is not None and not tools.bare
            )
            parts.thinking = parts.inner
        if tools is not None:
            yield from tools.read(text, parts, output_format.schemas)
            return
        yield from text.until(Marks(), parts.content)
