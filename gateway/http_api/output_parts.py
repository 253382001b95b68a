"""Cuts one answer into parts, in the order in which they begin: reasoning, texts, and calls of tools. Sans-IO (I9).

The parts become Anthropic's content blocks, and the output items of OpenAI's responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pillion.types import Delta, TokenLogprob, ToolCallDelta


class PartKind(Enum):
    """Names what a part of an answer is."""

    REASONING = 0
    TEXT = 1
    CALL = 2


@dataclass(slots=True)
class OutputPart:
    """Holds one part of an answer, whose parts ``index`` counts. Only calls have ``call_id`` and ``name``, and only
    texts have ``logprobs``."""

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Gives the part's whole text so far; for a call, its arguments."""
        return "".join(self.texts)


class OutputParts:
    """Cuts the deltas of one answer into parts. A part ends where the next one begins.

    Attributes:
        all: the answer's parts so far; the last one grows.
    """

    def __init__(self) -> None:
        self.all: list[OutputPart] = []
        # Where the last part is a call, this is its number among the answer's calls.
        self._call = -1

    @property
    def has_calls(self) -> bool:
        """Says whether the answer calls a tool."""
        return any(part.kind is PartKind.CALL for part in self.all)

    def take(self, delta: Delta) -> Iterator[tuple[OutputPart, str, bool]]:
        """Yields the next texts of parts, each with its part, and whether the part begins with it. A delta may be made
        of several that waited: the call that has begun goes on first, and further calls come after reasoning and
        content."""
        growing = self._call
        for call in delta.tool_calls:
            if call.index == growing:
                yield self._grown(PartKind.CALL, call.arguments, call)
        if delta.reasoning:
            yield self._grown(PartKind.REASONING, delta.reasoning)
        if delta.text:
            yield self._grown(PartKind.TEXT, delta.text)
        for call in delta.tool_calls:
            if call.index != growing:
                yield self._grown(PartKind.CALL, call.arguments, call)

    def further_text(self, delta: Delta) -> bool:
        """Returns whether ``delta`` only brings further text of the last part, as nearly every delta does; the text is
        added to the part."""
        if delta.finish_reason or delta.reasoning or delta.tool_calls:
            return False
        if not self.all or self.all[-1].kind is not PartKind.TEXT:
            return False
        self.all[-1].texts.append(delta.text)
        return True

    def _grown(self, kind: PartKind, text: str, call: ToolCallDelta | None = None) -> tuple[OutputPart, str, bool]:
        number = -1 if call is None else call.index
        begins = not self.all or self.all[-1].kind is not kind or number != self._call
        if begins:
            self.all.append(OutputPart(kind, len(self.all)))
            self._call = number
        part = self.all[-1]
        if call is not None:
            part.call_id, part.name = part.call_id or call.id, part.name or call.name
        part.texts.append(text)
        return part, text, begins
