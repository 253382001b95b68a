"""Reads an answer as it is written: first its reasoning, then its content and its calls. Sans-IO (I9).

    text --> reasoning, if it begins with it --> content and calls, or content alone --> parts

What was read is a function of the text alone: it does not matter where the text was cut.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from pillion.gateway.formats.answer_parts import AnswerParts, Marks, PendingText
from pillion.gateway.formats.reasoning import ReasoningFormat, read_reasoning
from pillion.gateway.formats.tool_formats import ToolFormat, ToolSchemas


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answers to one request may hold besides content.

    Attributes:
        reasoning: the format of their reasoning; None: they hold none.
        opened: whether they begin within it; None: they say so themselves.
        tools: the format of their calls; None: they hold none.
        schemas: the tools that may be called.
        visible: by id, the texts of special tokens that are marks.
    """

    reasoning: ReasoningFormat | None
    opened: bool | None
    tools: ToolFormat | None
    schemas: ToolSchemas
    visible: Mapping[int, str]


class AnswerReader:
    """Reads one answer.

    Attributes:
        parts: what became certain.
        thinking: whether the answer is within its reasoning, or may still begin with it.
    """

    __slots__ = ("_marks", "_reading", "_text", "parts", "thinking")

    def __init__(self, form: AnswerForm, parts: AnswerParts) -> None:
        self.parts = parts
        self.thinking = form.reasoning is not None and form.opened is not False
        self._text = PendingText()
        marks = [] if form.reasoning is None else [form.reasoning.begin, form.reasoning.end]
        if form.tools is not None:
            marks += filter(None, (form.tools.begin, form.tools.end, *form.tools.inner))
        self._marks = Marks(*marks)
        self._reading = self._read(form)
        # Up to where it needs text.
        next(self._reading, None)

    def push(self, text: str) -> None:
        """Reads the next text."""
        self._text.push(text)
        next(self._reading, None)

    def flush(self, cut: bool = False) -> None:
        """Reads what was held back: no more text will come. Call once, at the end. ``cut``: the answer has not ended
        by itself, so that half a mark at its end, of two characters and more or behind another mark, is no text, and
        neither is half a call whose name is not known yet."""
        text = self._text
        if cut:
            text.cut(self._marks, 1 if self.parts.behind_mark else 2)
        text.ended = True
        next(self._reading, None)
        self.parts.end(self.thinking)

    def _read(self, form: AnswerForm) -> Generator[None, None, None]:
        text, parts = self._text, self.parts
        if form.reasoning is not None:
            yield from read_reasoning(form.reasoning, form.opened, text, parts)
            self.thinking = False
        if form.tools is not None:
            yield from form.tools.read(text, parts, form.schemas)
            return
        yield from text.until(Marks(), parts.content)
