"""Parses answers in OpenAI's Harmony format, which gpt-oss writes: messages, each in a channel. Sans-IO (I9).

    header --> analysis, or to a built-in tool                --> reasoning     '--> end mark --> the next header
       |   --> to=functions.NAME, if tools were offered       --> a call
       |   --> final, commentary, or no channel               --> content
       '--> anything else: the text up to the next mark is content

A header is `<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`; the first one of
an answer lacks `<|start|>assistant`, which ends the prompt. The recipient may come before the channel, as chat
templates write it. The format: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Generator
from enum import StrEnum

from pillion.gateway.formats.answer_parts import AnswerParts, Marks, PendingText
from pillion.gateway.formats.json_calls import MARK_START, NAME


class HarmonyMark(StrEnum):
    """Special tokens of the format."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    MESSAGE = "<|message|>"
    CONSTRAIN = "<|constrain|>"
    END = "<|end|>"
    CALL = "<|call|>"
    RETURN = "<|return|>"


HARMONY_MARKS = tuple(HarmonyMark)
NAME_PREFIX = "functions."
ANALYSIS = "analysis"
MAX_HEADER_CHARS = 512
_IN_HEADER = (HarmonyMark.MESSAGE, HarmonyMark.CHANNEL, HarmonyMark.CONSTRAIN, HarmonyMark.START)
_RECIPIENT = r"(?:\s*to=(?P<{name}>[^\s<]+))?"
_HEADER = re.compile(
    rf"\s*(?:<\|start\|>\s*assistant)?{_RECIPIENT.format(name='first')}\s*"
    rf"(?:<\|channel\|>\s*(?P<channel>\w+){_RECIPIENT.format(name='second')})?\s*(?:<\|constrain\|>)?\s*[\w./-]*\s*"
)
_MESSAGE_END = Marks(HarmonyMark.END, HarmonyMark.CALL, HarmonyMark.RETURN, HarmonyMark.START, HarmonyMark.CHANNEL)


class HarmonyAnswer:
    """Parser of a whole answer.

    Args:
        tool_names: the tools that may be called; None if none may.
        opened: if the prompt ends within a message, whether that message is reasoning; None if the answer begins with a
            header.
    """

    def __init__(
        self, text: PendingText, parts: AnswerParts, tool_names: Container[str] | None, opened: bool | None = None
    ) -> None:
        self._text = text
        self._parts = parts
        self._opened = opened
        self._tool_names = tool_names
        # Receiver of the last message's text; consecutive messages with the same one are separated by an empty line.
        self._last: Callable[[str], None] | None = None

    def read(self) -> Generator[None, None, None]:
        """Parse the answer to its end."""
        text, parts = self._text, self._parts
        mark = ""
        if self._opened is not None:
            mark = yield from self._plain(parts.think if self._opened else parts.content)
        while (yield from text.more()):
            text.begin_trial()
            header = yield from self._header(mark)
            if header is not None:
                text.commit()
                mark = yield from self._message(*header)
            elif text.drop_partial_call():
                return
            else:
                left = text.roll_back()
                mark = yield from self._plain(parts.content, (mark if mark in _IN_HEADER else "") + left)

    def _header(self, mark: str) -> Generator[None, None, tuple[str, str] | None]:
        """Parse a header, after ``mark``; return channel and recipient, "" if absent. Return None if it is not a
        header; the caller then fails the trial."""
        text, read = self._text, [mark] if mark in _IN_HEADER else []
        # Without a mark, only "to=" begins a header; looking further ahead would hold back plain text.
        if not read and (character := (yield from text.skip_space())) != "<":
            if character != "t" or not (yield from text.accept("to=")):
                return None
            read.append("to=")
        left = MAX_HEADER_CHARS
        while True:
            between = yield from text.up_to(MARK_START, left)
            left -= len(between)
            read.append(between)
            for next_mark in _IN_HEADER:
                if (yield from text.accept(next_mark)):
                    break
            else:
                return None
            if next_mark == HarmonyMark.MESSAGE:
                break
            left -= len(next_mark)
            read.append(next_mark)
        match = _HEADER.fullmatch("".join(read))
        if match is None:
            return None
        return match["channel"] or "", match["first"] or match["second"] or ""

    def _message(self, channel: str, recipient: str) -> Generator[None, None, str]:
        """Parse a message's text; return the mark after it, "" at the end of the answer."""
        name = recipient.removeprefix(NAME_PREFIX)
        # A model may omit the prefix.
        is_call = self._tool_names is not None and (name != recipient or name in self._tool_names)
        if is_call and NAME.fullmatch(name):
            return (yield from self._call(name))
        is_reasoning = channel == ANALYSIS or (recipient and name == recipient)
        return (yield from self._plain(self._parts.think if is_reasoning else self._parts.content))

    def _call(self, name: str) -> Generator[None, None, str]:
        """Parse the arguments of a call of tool ``name``; return the mark after them, "" at the end of the answer."""
        parts, empty = self._parts, True

        def emit(text: str) -> None:
            nonlocal empty
            empty = empty and not text.strip()
            parts.arguments(text)

        parts.thinking, self._last = False, None
        parts.begin(name)
        mark = yield from self._text.until(_MESSAGE_END, emit)
        if empty and mark:
            parts.arguments("{}")
        return mark

    def _plain(self, emit: Callable[[str], None], begin: str = "") -> Generator[None, None, str]:
        """Emit ``begin``, which was read already, and the text up to the next mark; return the mark, "" at the end of
        the answer."""
        parts = self._parts
        parts.thinking = emit == parts.think
        parts.has_reasoning = parts.has_reasoning or parts.thinking
        if begin:
            emit(begin)
        else:
            parts.mark(between=emit == self._last)
        mark = yield from self._text.until(_MESSAGE_END, emit)
        if mark:
            parts.mark()
        self._last = emit
        return mark
