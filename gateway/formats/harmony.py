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

from pillion.gateway.formats.answer_parts import AnswerParts, Marks, PendingText
from pillion.gateway.formats.json_calls import NAME

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
NAME_PREFIX = "functions."
ANALYSIS = "analysis"
MAX_HEADER_CHARS = 512
_IN_HEADER = (MESSAGE, CHANNEL, CONSTRAIN, START)
_MARK = re.compile("<")
_TO = "to="
_RECIPIENT = r"(?:\s*to=(?P<{name}>[^\s<]+))?"
_HEADER = re.compile(
    rf"\s*(?:<\|start\|>\s*assistant)?{_RECIPIENT.format(name='first')}\s*"
    rf"(?:<\|channel\|>\s*(?P<channel>\w+){_RECIPIENT.format(name='second')})?\s*(?:<\|constrain\|>)?\s*[\w./-]*\s*"
)
_BEHIND = Marks(END, CALL, RETURN, START, CHANNEL)


class HarmonyAnswer:
    """Parser of a whole answer.

    Args:
        known: names of the tools that may be called; None if none may.
        opened: None if the answer begins with a header; if its prompt ends within a message, whether that one is
            reasoning.
    """

    def __init__(
        self, text: PendingText, parts: AnswerParts, known: Container[str] | None, opened: bool | None = None
    ) -> None:
        self._text = text
        self._parts = parts
        self._opened = opened
        self._known = known
        # Kind of the last text; messages of one kind are separated by an empty line.
        self._last: Callable[[str], None] | None = None

    def read(self) -> Generator[None, None, None]:
        """Parse the answer to its end."""
        text, parts = self._text, self._parts
        mark = ""
        if self._opened is not None:
            mark = yield from self._plain(parts.think if self._opened else parts.content)
        while (yield from text.some()):
            text.begin_trial()
            header = yield from self._header(mark)
            if header is not None:
                text.commit()
                mark = yield from self._message(*header)
            elif text.drop_half():
                return
            else:
                left = text.roll_back()
                mark = yield from self._plain(parts.content, (mark if mark in _IN_HEADER else "") + left)

    def _header(self, mark: str) -> Generator[None, None, tuple[str, str] | None]:
        """Parse a header, after ``mark``; return channel and recipient, "" if absent. Return None if it is not a
        header; the caller then ends the trial."""
        text, read = self._text, [mark] if mark in _IN_HEADER else []
        # Plain text is not held back, so without a mark the first word decides.
        if not read and (character := (yield from text.past_space())) != "<":
            if character != "t" or not (yield from text.has(_TO)):
                return None
            read.append(_TO)
        left = MAX_HEADER_CHARS
        while True:
            words = yield from text.up_to(_MARK, left)
            left -= len(words)
            read.append(words)
            for found in _IN_HEADER:
                if (yield from text.has(found)):
                    break
            else:
                return None
            if found == MESSAGE:
                break
            left -= len(found)
            read.append(found)
        match = _HEADER.fullmatch("".join(read))
        if match is None:
            return None
        return match["channel"] or "", match["first"] or match["second"] or ""

    def _message(self, channel: str, recipient: str) -> Generator[None, None, str]:
        """Parse a message's text; return the mark after it, "" at the end of the answer."""
        name = recipient.removeprefix(NAME_PREFIX)
        # A model may leave the prefix out.
        called = self._known is not None and (name != recipient or name in self._known)
        if called and NAME.fullmatch(name):
            return (yield from self._call(name))
        inner = channel == ANALYSIS or (recipient and name == recipient)
        return (yield from self._plain(self._parts.think if inner else self._parts.content))

    def _call(self, name: str) -> Generator[None, None, str]:
        parts, empty = self._parts, True

        def give(text: str) -> None:
            nonlocal empty
            empty = empty and not text.strip()
            parts.arguments(text)

        parts.thinking, self._last = False, None
        parts.begin(name)
        mark = yield from self._text.until(_BEHIND, give)
        if empty and mark:
            parts.arguments("{}")
        return mark

    def _plain(self, give: Callable[[str], None], begun: str = "") -> Generator[None, None, str]:
        """Emit text up to the next mark, after ``begun``, which was read before."""
        parts = self._parts
        parts.thinking = give == parts.think
        parts.thought = parts.thought or parts.thinking
        if begun:
            give(begun)
        else:
            parts.mark(between=give == self._last)
        mark = yield from self._text.until(_BEHIND, give)
        if mark:
            parts.mark()
        self._last = give
        return mark
