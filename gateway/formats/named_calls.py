"""Parses calls whose name precedes their arguments, each between marks, as DeepSeek and Kimi write them. Sans-IO (I9).

section mark --> call mark NAME separator {...} call's end mark --> the next call, or the section's end mark
"""

from __future__ import annotations

import re
from collections.abc import Container, Generator
from dataclasses import dataclass

from pillion.gateway.formats.answer_parts import AnswerParts, PendingText
from pillion.gateway.formats.harmony import NAME_PREFIX
from pillion.gateway.formats.json_calls import MAX_NAME_CHARS, NAME, NOT_NAME, JsonCalls

FENCE, END_FENCE = "```json", "```"
_NUMBER = re.compile(r":[0-9]+$")


@dataclass(frozen=True, slots=True)
class NamedForm:
    """Marks of one format.

    Attributes:
        section, end_section: marks around all calls.
        begin, end: marks around one call.
        kind: text between ``begin`` and the name; "" for none.
        separator: mark between the name and the arguments; "" for none.
        fenced: whether the arguments are in a Markdown code block.
        numbered: whether calls have an id with the name in it, ``functions.NAME:NUMBER``, in place of the name.
    """

    section: str
    end_section: str
    begin: str
    end: str
    kind: str = ""
    separator: str = ""
    fenced: bool = False
    numbered: bool = False

    @property
    def inner(self) -> tuple[str, ...]:
        """Marks within the section."""
        return tuple(filter(None, (self.begin, self.separator or DEEPSEEK_SEPARATOR, self.end)))


DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
NAMED_FORMS: dict[str, NamedForm] = {
    "deepseek_v3": NamedForm(*_DEEPSEEK, kind=f"function{DEEPSEEK_SEPARATOR}", fenced=True),
    "deepseek_v31": NamedForm(*_DEEPSEEK, separator=DEEPSEEK_SEPARATOR),
    "kimi_k2": NamedForm(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        separator="<|tool_call_argument_begin|>",
        numbered=True,
    ),
}


class NamedCalls(JsonCalls):
    """Parser of calls with the marks of ``form``. The section's marks are optional."""

    def __init__(self, text: PendingText, parts: AnswerParts, tool_names: Container[str], form: NamedForm) -> None:
        super().__init__(text, parts, tool_names, form.begin, form.end, others={form.section: ""})
        self._form = form
        self._ids: set[str] = set()

    def _after(self, mark: str) -> Generator[None, None, bool]:
        if not (yield from self._named(mark)):
            return False
        for end in (self._form.end, self._form.end_section):
            yield from self._text.skip_space()
            yield from self._text.accept(end)
        return True

    def _named(self, mark: str) -> Generator[None, None, bool]:
        """Parse a call after ``mark``, up to the end of its arguments. Return False if it is none; the caller then
        fails the trial."""
        text, form = self._text, self._form
        if mark == form.section:
            yield from text.skip_space()
            if not (yield from text.accept(form.begin)):
                return False
        yield from text.skip_space()
        if not (yield from text.accept(form.kind)):
            return False
        written = yield from text.up_to(NOT_NAME, MAX_NAME_CHARS)
        name = _NUMBER.sub("", written.removeprefix(NAME_PREFIX)) if form.numbered else written
        yield from text.skip_space()
        if not NAME.fullmatch(name) or not (yield from text.accept(form.separator)):
            return False
        yield from text.skip_space()
        if form.fenced:
            yield from text.accept(FENCE)
        if (yield from text.skip_space()) != "{":
            return False
        text.commit()
        # The template needs the model's own call ids back.
        self._parts.begin(name, written if form.numbered and written not in self._ids else "")
        self._ids.add(written)
        yield from self._stream()
        if form.fenced:
            text.begin_trial()
            yield from text.skip_space()
            if (yield from text.accept(END_FENCE)):
                text.commit()
            else:
                text.fail_trial(self._parts.content)
        return True
